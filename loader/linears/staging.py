"""Staging of linears: how many bytes of them are read at a time, and by whom, before any is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loader.checkpoint.folder import Checkpoint
from loader.chunks import Chunk, build_chunks
from loader.linears.plan import LinearPlan
from loader.native import Implementation
from loader.pieces import BUFFER_QUANTUM, minimum_staging, split_pieces
from loader.plan import BUFFERS
from loader.ring import PARTS, RingShape, ring_shape


@dataclass(frozen=True)
class LinearStaging:
    """The staging of one load of linears (``loader.staging_plan.StagingPlan``).

    ``limit`` is the most bytes of a chunk; ``ring`` is None on the host, where there are
    ``buffers`` of ``buffer_bytes``; ``direct``: native code reads the files itself.
    """

    checkpoint: Checkpoint
    device: torch.device
    implementation: Implementation
    limit: int
    direct: bool
    buffers: int = 0
    buffer_bytes: int = 0
    ring: RingShape | None = None

    @property
    def nbytes(self) -> int:
        """All of it, on the host and on a card."""
        return self.buffers * self.buffer_bytes if self.ring is None else self.ring.nbytes

    def chunks(self, plan: LinearPlan) -> list[Chunk]:
        """The reads of one linear, or of one run."""
        return build_chunks(split_pieces(plan.pieces(), self.limit), self.limit)


def stage_linears(
    checkpoint: Checkpoint,
    plans: Sequence[LinearPlan],
    device: torch.device,
    code: Implementation,
    staging_bytes: int,
) -> LinearStaging:
    """The staging that some linears need, within ``staging_bytes``; none for none."""
    direct = code.reads_files and checkpoint.source.lends_descriptors
    parts = BUFFERS if code.card is None else PARTS
    limit = staging_bytes // parts // BUFFER_QUANTUM * BUFFER_QUANTUM
    staging = LinearStaging(checkpoint, device, code, limit, direct)
    if not plans:
        return staging
    if code.card is None and direct:
        least = max(minimum_staging(plan.pieces(), BUFFERS) for plan in plans)
        share = min(staging_bytes // code.threads, code.buffer_bytes)
        each = max(least, share) // BUFFER_QUANTUM * BUFFER_QUANTUM
        count = max(1, min(code.threads, staging_bytes // each))
        return LinearStaging(checkpoint, device, code, limit, direct, count, each)
    largest = max(chunk.buffer_bytes for plan in plans for chunk in staging.chunks(plan))
    if code.card is None:
        return LinearStaging(checkpoint, device, code, limit, direct, BUFFERS, largest)
    ring = ring_shape(staging_bytes, largest, code.threads, direct)
    return LinearStaging(checkpoint, device, code, limit, direct, ring=ring)

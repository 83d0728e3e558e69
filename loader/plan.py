"""Plan: what each card will hold, decided from headers alone.

A plan is a value: it can be printed, compared and written as JSON, and ``load`` does what it says.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from loader import memory, request
from loader.checkpoint.catalog import NOT_EXPERT, REASONS
from loader.checkpoint.family import Family, layer_of
from loader.checkpoint.folder import Checkpoint, open_checkpoint
from loader.checkpoint.hub import located
from loader.checkpoint.source import Source
from loader.chunks import Chunk
from loader.converter import cache_bytes, card_cache_bytes
from loader.errors import CapacityError
from loader.layer_choice import DENSE, SkippedLayer, choose_layers
from loader.layer_plan import LayerPlan, plan_layer
from loader.native import Implementation, implementation_for
from loader.pieces import BUFFER_QUANTUM, Places, minimum_staging
from loader.policy import Policy, ResolvedPolicy
from loader.render import plan_text
from loader.ring import KEPT_BYTES, PARTS, RingShape, ring_shape
from loader.room import Room, room_for
from loader.route import known_device, require_implementation
from loader.shard import Shard

DEFAULT_STAGING_BYTES = 64 << 20
BUFFERS = 2
"""Read buffers of the staging ring: one is read into while the other is converted."""


@dataclass(frozen=True, eq=False)
class Plan:
    """What one card will hold. Sizes are bytes; ``predicted_peak`` counts from the baseline."""

    checkpoint: Checkpoint = field(repr=False)
    device: torch.device
    shard: Shard
    policy: ResolvedPolicy
    implementation: Implementation
    layers: tuple[LayerPlan, ...]
    skipped: tuple[SkippedLayer, ...]
    staging_limit: int
    room: Room
    _kept: dict[int, list[Chunk]] = field(default_factory=dict, repr=False)

    @property
    def top_k(self) -> int:
        """Experts that the router selects for each token."""
        return self.checkpoint.model.top_k

    @cached_property
    def scratch_bytes(self) -> int:
        """Scratch of the workspace, shared by all layers of the card."""
        specs = [layer.spec for layer in self.layers]
        tokens = max((layer.fast_tokens for layer in self.layers), default=0)
        return self.implementation.scratch_bytes(specs, tokens, self.top_k) if specs else 0

    @cached_property
    def workspace_bytes(self) -> int:
        """Scratch and the expert map (int32 for each expert)."""
        return self.scratch_bytes + 4 * self.checkpoint.model.experts * bool(self.layers)

    @cached_property
    def resident_bytes(self) -> int:
        """What stays: all banks and the workspace."""
        return sum(layer.spec.nbytes() for layer in self.layers) + self.workspace_bytes

    @property
    def chunk_limit(self) -> int:
        """Most bytes of one chunk: the staging budget shared by the read buffers."""
        parts = BUFFERS if self.implementation.card is None else PARTS
        return self.staging_limit // parts // BUFFER_QUANTUM * BUFFER_QUANTUM

    @cached_property
    def ring(self) -> RingShape | None:
        """The staging ring of a load to a card; None on the host."""
        if self.implementation.card is None:
            return None
        largest = max((largest for largest, _ in self._reads.values()), default=0)
        return ring_shape(self.staging_limit, largest, self.implementation.threads, self.direct)

    def chunks(self, layer: LayerPlan) -> list[Chunk]:
        """The reads of one layer; those that were kept are handed out once."""
        return self._kept.pop(layer.layer, None) or layer.chunks(self.chunk_limit)

    @cached_property
    def _reads(self) -> dict[int, tuple[int, int]]:
        """For each layer: bytes of its largest chunk, bytes read in all."""
        reads, room = {}, KEPT_BYTES if self.implementation.card is not None else 0
        try:
            for layer in self.layers:
                chunks = layer.chunks(self.chunk_limit)
                read = sum(chunk.bytes_read for chunk in chunks)
                reads[layer.layer] = (max(chunk.buffer_bytes for chunk in chunks), read)
                room -= sum(chunk.pieces.nbytes for chunk in chunks)
                if room >= 0:
                    self._kept[layer.layer] = chunks
            return reads
        except CapacityError as error:
            parts = BUFFERS if self.implementation.card is None else PARTS
            least = max(minimum_staging(layer.cut, parts) for layer in self.layers)
            found = f"{self.staging_limit} bytes"
            wanted = f"at least {least} bytes"
            raise CapacityError(error.what, expected=wanted, found=found) from None

    @property
    def direct(self) -> bool:
        """Whether native code reads the files itself, a cache-sized piece at a time."""
        return self.implementation.reads_files and self.checkpoint.source.lends_descriptors

    @cached_property
    def buffer_bytes(self) -> int:
        """Size of one read buffer: the largest chunk, or what a native thread converts at once."""
        if not self.direct:
            return max((largest for largest, _ in self._reads.values()), default=0)
        # Gate and up are read together.
        least = max((minimum_staging(layer.cut, 2) for layer in self.layers), default=0)
        share = self.staging_limit // self.implementation.threads
        return max(least, min(share, self.implementation.buffer_bytes)) // 64 * 64

    @cached_property
    def buffers(self) -> int:
        """Read buffers of the staging ring."""
        if not self.direct:
            return BUFFERS
        fit = self.staging_limit // max(self.buffer_bytes, 1)
        return max(1, min(self.implementation.threads, fit))

    def read_bytes(self, layer: int) -> int:
        """Bytes that loading one layer takes from files, small gaps included."""
        return self._reads[layer][1]

    @property
    def staging_bytes(self) -> int:
        """The staging ring as it will be allocated, on the host and on the card together."""
        return self.buffers * self.buffer_bytes if self.ring is None else self.ring.nbytes

    @cached_property
    def conversion_bytes(self) -> int:
        """Most that converting one layer takes: its cache, its tables, the temporaries."""
        spare = self.implementation.temporary_bytes
        if self.ring is not None:  # the tables stay on the host
            return spare + max((card_cache_bytes(layer.spec) for layer in self.layers), default=0)
        sizes = (cache_bytes(layer.spec) + 3 * layer.cut.nbytes for layer in self.layers)
        return spare + max(sizes, default=0)

    @property
    def predicted_peak(self) -> int:
        """Most that the load will hold on its card above what was held before it."""
        staging = self.staging_bytes if self.ring is None else self.ring.card_bytes
        return self.resident_bytes + staging + self.conversion_bytes

    @property
    def card_bytes(self) -> int:
        """What the card has left for the load."""
        return self.room.nbytes

    @property
    def fits(self) -> bool:
        """Whether the peak fits into the card's memory."""
        return self.predicted_peak <= self.card_bytes

    def require_fit(self) -> None:
        """Raise :class:`CapacityError`, saying by how much, where the plan does not fit."""
        if not self.fits:
            raise CapacityError(
                f"the plan does not fit: {self.predicted_peak - self.card_bytes} bytes too many",
                expected=f"a predicted peak within {self.card_bytes} bytes, the {self.room.limit}",
                found=f"{self.predicted_peak} bytes on {self.device}",
            )

    def left_alone(self) -> dict[str, list[str]]:
        """Names of the tensors that are not loaded, by reason; their bytes are never read."""
        catalog = self.checkpoint.catalog
        left = np.ones(len(catalog.names), bool)
        for layer in self.layers:
            for table in layer.source.tables:
                left[table.rows] = False
        skipped = {one.layer: one.reason for one in self.skipped}
        found: dict[str, list[str]] = {}
        for row in np.flatnonzero(left).tolist():
            found.setdefault(self._why(row, skipped), []).append(catalog.names[row])
        return found

    def _why(self, row: int, skipped: Mapping[int, str]) -> str:
        catalog = self.checkpoint.catalog
        name, layer = catalog.names[row], int(catalog.layer[row])
        if layer >= 0:
            return skipped.get(layer, "part of an expert that the format does not use")
        if catalog.reason[row] == NOT_EXPERT:
            if ".shared_expert" in name:
                return "shared expert"
            inside = layer_of(name)
            if inside is not None and ".mlp." in name and skipped.get(inside) == DENSE:
                return DENSE
        return REASONS[catalog.reason[row]]

    def fingerprint(self) -> dict[str, Any]:
        """What all ranks of one model must agree on, whatever slice each of them holds."""
        return {
            "policy": self.policy.to_dict(),
            "layers": [
                [layer.layer, layer.source.scheme.format, layer.spec.w13.layout]
                + [[r.first, r.last, r.route, r.implementation] for r in layer.routes]
                for layer in self.layers
            ],
        }

    def to_dict(self) -> dict[str, Any]:
        """The JSON report without its measured keys."""
        return {
            "schema": 1,
            "source": self.checkpoint.source.name,
            "device": str(self.device),
            "shard": self.shard.to_dict(),
            "policy": self.policy.to_dict(),
            "top_k": self.top_k,
            "layers": [layer.to_dict() for layer in self.layers],
            "skipped": [{"layer": s.layer, "reason": s.reason} for s in self.skipped],
            "left_alone": {
                reason: {"tensors": len(names), "names": names[:8]}
                for reason, names in self.left_alone().items()
            },
            "memory": {
                "predicted_resident": self.resident_bytes,
                "predicted_peak": self.predicted_peak,
                "workspace": self.workspace_bytes,
                "staging": self.staging_bytes,
                "conversion": self.conversion_bytes,
                "card": self.card_bytes,
                "fits": self.fits,
            },
        }

    def __str__(self) -> str:
        return plan_text([self.to_dict()])


def plan(
    source: str | os.PathLike[str] | Source,
    shard: Shard | None = None,
    policy: Policy | None = None,
    layers: Iterable[int] | None = None,
    *,
    device: str | torch.device = "cpu",
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    card_memory: int | None = None,
    family: Family | None = None,
    revision: str | None = None,
) -> Plan:
    """Plan a load from headers alone; no payload is read and nothing is allocated.

    ``layers`` names layer indices outright (None: all MoE layers of the model). ``card_memory`` is
    the card's budget in bytes (None: what is free now). ``family`` is a naming pattern of your own,
    ``revision`` the branch, tag or commit where ``source`` is a Hub repo.

    Raises a :class:`loader.LoaderError` for everything that headers and configs are enough to know.
    """
    (one,) = plan_cards(
        source,
        [request.asked_shard(shard)],
        policy,
        layers,
        device=device,
        staging_bytes=staging_bytes,
        card_memory=card_memory,
        family=family,
        revision=revision,
    )
    return one


def plan_cards(
    source: str | os.PathLike[str] | Source,
    shards: Sequence[Shard],
    policy: Policy | None = None,
    layers: Iterable[int] | None = None,
    *,
    device: str | torch.device = "cpu",
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    card_memory: int | None = None,
    family: Family | None = None,
    revision: str | None = None,
) -> list[Plan]:
    """Plan the load of several cards; the headers are read once. See :func:`plan`."""
    resolved, families = request.asked_policy(policy), request.asked_families(family)
    chosen, budget = request.asked_layers(layers), request.asked_budget("card_memory", card_memory)
    staging_bytes = request.asked_number("staging_bytes", staging_bytes)
    with memory.nothing_kept(), memory.uncollected(), located(source, revision) as opened:
        checkpoint = open_checkpoint(opened, families)
        plans: list[Plan] = []
        for shard in shards:
            # What was free before the first plan: our own tables are no part of the question.
            card = plans[0].room if plans else budget
            plans.append(
                plan_checkpoint(checkpoint, shard, resolved, chosen, device, staging_bytes, card)
            )
        return plans


def plan_checkpoint(
    checkpoint: Checkpoint,
    shard: Shard,
    policy: ResolvedPolicy,
    layers: Iterable[int] | None,
    device: str | torch.device,
    staging_bytes: int,
    card_memory: Room | int | None,
) -> Plan:
    """Plan an opened checkpoint; see :func:`plan`."""
    device = known_device(device)
    implementation = require_implementation(device, implementation_for(device))
    chosen, skipped = choose_layers(checkpoint, layers)
    expert_ids = shard.experts_of(checkpoint.model.experts)
    places = Places(checkpoint.catalog.file, checkpoint.catalog.begin)
    planned = tuple(
        plan_layer(
            checkpoint.resolver.resolve(layer), expert_ids, shard, policy, implementation, places
        )
        for layer in chosen
    )
    room = card_memory if isinstance(card_memory, Room) else room_for(device, card_memory)
    result = Plan(
        checkpoint, device, shard, policy, implementation, planned, skipped, staging_bytes, room
    )
    _ = result.read_bytes(chosen[0])  # a staging budget that is too small is refused here
    return result

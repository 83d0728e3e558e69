"""Peers: int4 MoE kernels of another serving stack, beside ours in one run.

They come from an installation of vLLM that the caller names, are no part of this package, and are
given the very numbers of our banks. What cannot run raises :class:`Absent` with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from decode_layer import CARD, Layer


class Absent(Exception):
    """Why a peer, or one of its cells, is not there."""


@dataclass(frozen=True)
class Rows:
    """Rows of a step by expert, each expert's padded to whole blocks, as both peers take them.

    ``rows`` (padded,) int32: row t * k + j, or the number of rows where there is none; ``experts``
    (blocks,) int32; ``padded`` (1,) int32.
    """

    block: int
    rows: torch.Tensor
    experts: torch.Tensor
    padded: torch.Tensor


def rows_by_expert(ids: torch.Tensor, experts: int, block: int) -> Rows:
    """Made on the host, outside of what is timed."""
    flat = ids.flatten().tolist()
    own: dict[int, list[int]] = {expert: [] for expert in range(experts)}
    for row, expert in enumerate(flat):
        own[expert].append(row)
    rows: list[int] = []
    owners: list[int] = []
    for expert, found in own.items():
        blocks = -(-len(found) // block)
        rows += found + [len(flat)] * (blocks * block - len(found))
        owners += [expert] * blocks

    def on_card(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=CARD)

    return Rows(block, on_card(rows), on_card(owners), on_card([len(rows)]))


class Peer(Protocol):
    """A peer that is there."""

    name: str

    def prepare(self, layer: Layer) -> Prepared:
        """The layer's numbers in the peer's layout. Raises :class:`Absent`."""
        ...


class Prepared(Protocol):
    """A layer in a peer's layout."""

    def rows(self, ids: torch.Tensor) -> Rows:
        """The rows of a step, to be made before it is timed."""
        ...

    def run(self, out: torch.Tensor, x: torch.Tensor, router: torch.Tensor, rows: Rows) -> None:
        """Enqueue one whole layer; ``router`` (T, k) fp32."""
        ...


def swiglu(inner: torch.Tensor, both: torch.Tensor) -> None:
    """``inner`` (rows, I) = silu(gate) * up of ``both`` (rows, 2 I), gate first."""
    try:
        from peer_swiglu import silu_and_mul
    except ImportError as error:
        raise Absent(f"SwiGLU between its products needs Triton: {error}") from error
    silu_and_mul(inner, both)

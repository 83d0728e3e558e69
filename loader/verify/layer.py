"""What the check needs of a finished layer, as protocols: it imports no class it verifies."""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

import torch

Projection = Literal["gate", "up", "down"]
PROJECTIONS: tuple[Projection, ...] = ("gate", "up", "down")


class ShardView(Protocol):
    """Which TP slice of every expert a card holds."""

    @property
    def tp_rank(self) -> int:
        """This card's slice."""

    @property
    def tp_size(self) -> int:
        """Slices in all."""


@runtime_checkable
class LayerView(Protocol):
    """One finished MoE layer on one card.

    ``expert_ids`` are global; ``intermediate_size`` is this card's slice. ``dequantize`` gives
    float32 ``gate`` and ``up`` (intermediate, hidden) and ``down`` (hidden, intermediate).
    """

    @property
    def expert_ids(self) -> tuple[int, ...]:
        """Global ids of the experts held, by slot."""

    @property
    def shard(self) -> ShardView:
        """The slice of each expert."""

    @property
    def hidden_size(self) -> int:
        """H."""

    @property
    def intermediate_size(self) -> int:
        """I of this card's slice."""

    @property
    def metadata_layout(self) -> str:
        """``wide``, ``record``, ``compact`` or ``plain``."""

    @property
    def awq_rounding(self) -> str:
        """``exact`` or ``fused_bias``."""

    def dequantize(self, expert_id: int, /) -> dict[str, torch.Tensor]:
        """Weights fp32 of one expert, this card's slice."""

    def __call__(
        self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, /
    ) -> torch.Tensor: ...


def column_count(layer: LayerView, projection: Projection) -> int:
    """Output columns of ``projection`` on this card."""
    return layer.hidden_size if projection == "down" else layer.intermediate_size

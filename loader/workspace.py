"""Workspace: scratch and tables that all layers of one load share on one card.

It is allocated once, keeps its addresses, is counted once and is in no state dict. One forward at a
time uses it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from loader import memory
from loader.errors import LoaderError


class Workspace:
    """``scratch`` fp32 (numbers,) for routes; ``expert_map`` int32 (E,): slot, or -1 elsewhere."""

    def __init__(
        self,
        scratch_bytes: int,
        expert_ids: Sequence[int],
        experts: int,
        device: torch.device,
    ) -> None:
        # Zeroed so that its pages are there: what is counted as resident is resident.
        self.scratch = memory.fresh((scratch_bytes // 4,), torch.float32, device).zero_()
        self.expert_map = memory.fresh((experts,), torch.int32, device)
        self.expert_map.copy_(_expert_map(expert_ids, experts))

    def _held(self) -> list[int]:
        held = [(slot, expert) for expert, slot in enumerate(self.expert_map.tolist()) if slot >= 0]
        return [expert for _, expert in sorted(held)]

    def require(
        self, least_scratch_bytes: int, expert_ids: Sequence[int], experts: int, layer: int
    ) -> None:
        """Raise :class:`LoaderError` where this workspace cannot serve another layer's experts."""
        if not torch.equal(self.expert_map.cpu(), _expert_map(expert_ids, experts)):
            raise LoaderError(
                "the workspace is that of other experts",
                layer=layer,
                expected=f"{experts} experts with {list(expert_ids[:8])}... on this card",
                found=f"{self.expert_map.numel()} experts with {self._held()[:8]}...",
            )
        if self.scratch.nbytes < least_scratch_bytes:
            raise LoaderError(
                "the workspace is too small for this layer",
                layer=layer,
                expected=f"at least {least_scratch_bytes} bytes of scratch",
                found=f"{self.scratch.nbytes} bytes",
            )

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the workspace holds, for accounting."""
        return (self.scratch, self.expert_map)


def _expert_map(expert_ids: Sequence[int], experts: int) -> torch.Tensor:
    """On the host, whatever the caller's default device is."""
    table = torch.full((experts,), -1, dtype=torch.int32, device="cpu")
    slots = torch.arange(len(expert_ids), dtype=torch.int32, device="cpu")
    table[torch.tensor(expert_ids, dtype=torch.int64, device="cpu")] = slots
    return table

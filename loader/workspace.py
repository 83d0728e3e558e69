"""Workspace: scratch and tables that all layers of one load share on one card.

It is allocated once, keeps its addresses, is counted once and is in no state dict. One forward at a
time uses it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from loader import memory


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
        table = torch.full((experts,), -1, dtype=torch.int32)
        table[torch.tensor(expert_ids, dtype=torch.int64)] = torch.arange(
            len(expert_ids), dtype=torch.int32
        )
        self.expert_map = table.to(device)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the workspace holds, for accounting."""
        return (self.scratch, self.expert_map)

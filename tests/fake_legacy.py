"""``legacy``'s launches on a card, in PyTorch on the host: for what is decided in Python."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from loader.bank import TILE, layer_spec_from_ints, split_banks
from loader.core import NativeLayer
from loader.cuda_legacy_calls import Chunk, LegacyCalls, Places, Step
from loader.reference.routes import local_slots
from loader.reference.weights import Columns, dequantize


class FakeCalls(LegacyCalls):
    """Does what the kernels are to do, and counts calls by name. Memory nobody wrote is NaN."""

    def __init__(self) -> None:
        core: Any = SimpleNamespace(library=None)
        super().__init__(core)
        self.made: list[str] = []

    def route(self, step: Step) -> None:
        self.made.append("route")
        step.results.fill_(float("nan"))
        slots = local_slots(step.ids, step.expert_map).long()
        first = (slots[:, :, None] == slots[:, None, :]).int().argmax(2)
        rows = torch.arange(step.ids.numel()).view(step.ids.shape)
        source = torch.where(slots >= 0, rows[:, :1] + first, -1)
        step.source.copy_(source.flatten())
        step.keys.copy_(torch.where(source == rows, slots, step.slots).flatten())
        step.order.copy_(step.keys.sort(stable=True).indices)
        step.counts.copy_(torch.bincount(step.keys, minlength=step.slots + 1)[: step.slots])
        step.starts.copy_(step.counts.cumsum(0) - step.counts)
        ranked_counts, ranked = step.counts.sort(descending=True, stable=True)
        step.ranked.copy_(ranked)
        step.ranked_counts.copy_(ranked_counts)

    def unpack(
        self,
        number: int,
        weights: torch.Tensor,
        factors: torch.Tensor,
        chunk: Chunk,
        tiles: tuple[int, int],
        banks: Sequence[torch.Tensor],
        spec: list[int],
        layer: NativeLayer | None = None,
    ) -> None:
        self.made.append("unpack")
        whole = layer_spec_from_ints(spec)
        bank = whole.banks[number]
        first, last = tiles[0] * TILE, min(tiles[1] * TILE, bank.n)
        for i, (slot, count) in enumerate(zip(chunk.ranked, chunk.counts, strict=True)):
            weights[i] = float("nan")
            if not count:
                continue
            at = Columns(int(slot), first, last)
            own = dequantize(bank, whole.awq_rounding, split_banks(whole, banks)[number], at)
            factors[i] = 0.5
            rest = own / 0.5
            for part in weights[i]:
                part.copy_(rest)
                rest = rest - part.float()

    def gather(self, step: Step, places: Places) -> None:
        self.made.append("gather")
        places.rows.fill_(float("nan"))
        for i, place, row in self._rows(step, places):
            places.rows[i, place] = step.x[row // step.ids.shape[1]]

    def inner(self, step: Step, places: Places) -> None:
        self.made.append("inner")
        both = self._scaled(places, 0).to(step.x.dtype).float()
        gate, up = both[..., 0::2], both[..., 1::2]
        places.inner.copy_(torch.nn.functional.silu(gate) * up)

    def results(self, step: Step, places: Places) -> None:
        self.made.append("results")
        y = self._scaled(places, 1).to(step.x.dtype)
        for i, place, row in self._rows(step, places):
            step.results[row] = y[i, place]

    def sum(self, step: Step) -> None:
        self.made.append("sum")
        total = torch.zeros(step.out.shape)
        sources = step.source.view(step.ids.shape)
        for token, own in enumerate(sources.tolist()):
            for j, source in enumerate(own):
                if source >= 0:
                    total[token] += step.weights[token, j].float() * step.results[source].float()
        step.out.copy_(total)

    def multiply(self, rows: torch.Tensor, weights: torch.Tensor, sums: torch.Tensor) -> None:
        assert rows.dtype == weights.dtype and sums.dtype == torch.float32
        self.made.append("multiply")
        sums.zero_()
        for part in weights.unbind(1):
            sums += torch.bmm(rows.float(), part.float().transpose(1, 2))

    def _rows(self, step: Step, places: Places) -> list[tuple[int, int, int]]:
        found = []
        for i, slot in enumerate(places.chunk.ranked.tolist()):
            for place in range(places.rows.shape[1]):
                if places.first + place < places.chunk.counts[i]:
                    at = int(step.starts[slot]) + places.first + place
                    found.append((i, place, int(step.order[at])))
        return found

    def _scaled(self, places: Places, number: int) -> torch.Tensor:
        factors = places.factors[number]
        shape = (
            *places.rows.shape[:2],
            places.rows.shape[2] if number else 2 * places.inner.shape[2],
        )
        sums = places.sums[: torch.Size(shape).numel()].view(shape)
        return sums if factors is None else sums * factors[:, None]

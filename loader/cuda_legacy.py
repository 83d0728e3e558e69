"""CUDA legacy: dequantize the active experts in chunks, then ordinary matrix products.

Rows are sorted by expert on the card, and experts ranked by how many rows they have. A chunk is a
run of ranks whose weights fit into the workspace: one launch a bank unpacks them, and one batched
product each multiplies W13 and W2. Experts of one chunk have about the same number of rows, so that
the places of the batch are nearly all rows.

The host is asked once a step, for the counts. While a graph is captured nobody is asked: the expert
of rank i has at most rows / (i + 1) rows, which bounds the places of every chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from loader.bank import TILE, BankSpec, LayerSpec
from loader.cuda_legacy_calls import Chunk, LegacyCalls, Places, Step
from loader.errors import LoaderError

LEGACY_WORKSPACE_BYTES = 256 << 20
"""Most weights that are unpacked at a time."""

LEGACY_ROWS_BYTES = 256 << 20
"""Most results, and most rows of one chunk, that a step holds at a time; each at least one row."""

LEGACY_CAPTURED_TOKENS = 512
"""Most tokens of a step that a CUDA graph can hold."""

FEW_ROWS = 64
"""Up to so many places an expert costs what reading its weights costs: padding is free."""

MOST_EXPERTS = 65535
"""Most experts of a chunk: blocks across one grid."""


def weights_dtype(bank: BankSpec, activations: torch.dtype) -> torch.dtype:
    """What weights are unpacked to. Scaled, fp16 holds those of any bank; bf16 has the range.

    Unquantized weights of another dtype than the activations are multiplied in fp32.
    """
    if bank.kind == "plain" and bank.scale_dtype != activations:
        return torch.float32
    return activations


def parts_of(layer: LayerSpec, dtype: torch.dtype) -> int:
    """Numbers that make one weight: under ``fused_bias`` it is fp16, two numbers of bf16."""
    fused = layer.w13.kind == "int4" and layer.awq_rounding == "fused_bias"
    return 2 if fused and dtype == torch.bfloat16 else 1


def scratch_bytes(layer: LayerSpec) -> int:
    """Room for the weights of a layer in 16 bits, within the budget; one tile in fp32 at least."""
    tile = max(TILE * bank.k * 4 for bank in layer.banks)
    whole = sum(bank.experts * bank.n * bank.k * 2 for bank in layer.banks)
    return max(tile, min(LEGACY_WORKSPACE_BYTES, whole))


@dataclass(frozen=True)
class Ranks:
    """Experts [first, last) by rank, with so many places each."""

    first: int
    last: int
    places: int


def chunks(bounds: Sequence[int], most: int) -> Iterator[Ranks]:
    """Chunks of up to ``most`` experts whose bounds (descending) are within a factor of two."""
    first = 0
    while first < len(bounds):
        last = first + 1
        while (
            last < min(len(bounds), first + most)
            and max(2 * bounds[last], FEW_ROWS) >= bounds[first]
        ):
            last += 1
        yield Ranks(first, last, bounds[first])
        first = last


def captured_bounds(tokens: int, top_k: int, slots: int) -> list[int]:
    """Most rows of the expert of each rank: so many others have no fewer."""
    rows = tokens * top_k
    return [min(tokens, rows // (rank + 1)) for rank in range(min(slots, rows))]


class Legacy:
    """The ``legacy`` route on a card."""

    def __init__(
        self,
        calls: LegacyCalls,
        capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
    ) -> None:
        self._calls = calls
        self._capturing = capturing

    def moe(
        self,
        out: torch.Tensor,
        scratch: torch.Tensor,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        expert_map: torch.Tensor,
        layer: LayerSpec,
        banks: Sequence[torch.Tensor],
    ) -> None:
        """One MoE layer; arguments are checked. Raises :class:`LoaderError` for a long capture."""
        tokens, top_k = topk_ids.shape
        if self._capturing() and tokens > LEGACY_CAPTURED_TOKENS:
            raise LoaderError(
                "a legacy step of so many tokens cannot be captured: it asks the host how many "
                "rows each expert has",
                expected=f"at most {LEGACY_CAPTURED_TOKENS} tokens in a CUDA graph",
                found=f"{tokens} tokens",
            )
        runs = -(-tokens * top_k * x[0].nbytes // LEGACY_ROWS_BYTES)
        each = -(-tokens // runs)
        for first in range(0, tokens, each):
            part = slice(first, first + each)
            rows = topk_ids[part].numel()
            step = Step(
                x[part],
                out[part],
                topk_ids[part],
                topk_weights[part],
                expert_map,
                keys=expert_map.new_empty(rows),
                source=expert_map.new_empty(rows),
                results=x.new_empty((rows, x.shape[1])),
                slots=layer.w13.experts,
                width=layer.w2.k,
            )
            self._run(step, scratch, layer, banks)

    def _run(
        self, step: Step, scratch: torch.Tensor, layer: LayerSpec, banks: Sequence[torch.Tensor]
    ) -> None:
        self._calls.keys(step)
        ordered, order = step.keys.sort(stable=True)
        ends = torch.arange(step.slots + 1, dtype=torch.int32, device=step.keys.device)
        starts = torch.searchsorted(ordered, ends, out_int32=True)
        counts, ranked = starts.diff().sort(descending=True, stable=True)
        step = replace(step, order=order, starts=starts)
        if self._capturing():
            bounds = captured_bounds(step.ids.shape[0], step.ids.shape[1], step.slots)
        else:
            bounds = [count for count in counts.tolist() if count]
        weights = _Weights(self._calls, scratch, layer, banks, step.x.dtype)
        parts = [
            (ranks, weights.places_at_once(ranks)) for ranks in chunks(bounds, weights.most_experts)
        ]
        most = max(((ranks.last - ranks.first) * places for ranks, places in parts), default=0)
        buffers = _Buffers(step, most)
        for ranks, places in parts:
            chunk = Chunk(ranked[ranks.first : ranks.last], counts[ranks.first : ranks.last])
            weights.take(chunk)
            for first in range(0, ranks.places, places):
                here = min(places, ranks.places - first)
                self._multiply(step, weights, buffers.places(chunk, first, here, weights.factors))
        self._calls.sum(step)

    def _multiply(self, step: Step, weights: _Weights, places: Places) -> None:
        count, here, hidden = places.rows.shape
        sums = places.sums.view(-1)
        self._calls.gather(step, places)
        both = sums[: count * here * 2 * step.width].view(count, here, -1)
        weights.multiply(0, places.rows, both)
        self._calls.inner(step, replace(places, sums=both))
        y = sums[: count * here * hidden].view(count, here, -1)
        weights.multiply(1, places.inner, y)
        self._calls.results(step, replace(places, sums=y))


class _Buffers:
    """Memory of the rows of one chunk at a time, for so many places in all."""

    def __init__(self, step: Step, places: int) -> None:
        x, self._hidden, self._width = step.x, step.x.shape[1], step.width
        self._rows = x.new_empty(places * self._hidden)
        self._inner = x.new_empty(places * self._width)
        widest = max(2 * self._width, self._hidden)
        self._sums = x.new_empty(places * widest, dtype=torch.float32)

    def places(
        self,
        chunk: Chunk,
        first: int,
        places: int,
        factors: tuple[torch.Tensor | None, torch.Tensor | None],
    ) -> Places:
        """Views of the memory for some places of each expert of a chunk."""
        count = len(chunk.ranked)
        rows = self._rows[: count * places * self._hidden].view(count, places, self._hidden)
        inner = self._inner[: count * places * self._width].view(count, places, self._width)
        return Places(chunk, first, rows, self._sums, inner, factors)


class _Weights:
    """Weights of one chunk in the workspace: both banks whole, or a run of tiles at a time."""

    def __init__(
        self,
        calls: LegacyCalls,
        scratch: torch.Tensor,
        layer: LayerSpec,
        banks: Sequence[torch.Tensor],
        activations: torch.dtype,
    ) -> None:
        self._calls = calls
        self._layer = layer
        self._banks = banks
        self._spec = layer.to_ints()
        self._activations = activations
        self._dtype = weights_dtype(layer.w13, activations)
        self._parts = parts_of(layer, self._dtype)
        self._room = scratch[: LEGACY_WORKSPACE_BYTES // 4].view(self._dtype)
        each = sum(bank.n * bank.k * self._parts for bank in layer.banks)
        self._whole = each <= self._room.numel()
        self.most_experts = min(max(self._room.numel() // each, 1), MOST_EXPERTS)
        self.factors: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        self._unpacked: list[torch.Tensor] = []

    def places_at_once(self, ranks: Ranks) -> int:
        """Places of each expert of a chunk whose rows fit into their budget; at least one."""
        hidden, width = self._layer.w13.k, self._layer.w2.k
        each = (hidden + width) * self._activations.itemsize + max(2 * width, hidden) * 4
        return min(max(LEGACY_ROWS_BYTES // (each * (ranks.last - ranks.first)), 1), ranks.places)

    def take(self, chunk: Chunk) -> None:
        """Make the weights of a chunk those that are multiplied."""
        self._chunk = chunk
        if self._layer.w13.kind != "plain":
            first, second = (
                torch.empty(
                    (len(chunk.ranked), bank.n), dtype=torch.float32, device=self._room.device
                )
                for bank in self._layer.banks
            )
            self.factors = (first, second)
        if self._whole:
            tiles = [bank.n_padded // TILE for bank in self._layer.banks]
            w13 = self._unpack(0, (0, tiles[0]), self._room)
            w2 = self._unpack(1, (0, tiles[1]), self._room[w13.numel() :])
            self._unpacked = [w13, w2]

    def multiply(self, number: int, rows: torch.Tensor, sums: torch.Tensor) -> None:
        """``sums`` (count, n, N) fp32 = ``rows`` (count, n, K) @ weights of bank ``number``."""
        rows = rows.to(self._dtype)
        if self._whole:
            self._calls.multiply(rows, self._unpacked[number], sums)
            return
        bank = self._layer.banks[number]
        each = max(self._room.numel() // (TILE * bank.k * self._parts), 1)
        for first in range(0, bank.n_padded // TILE, each):
            last = min(first + each, bank.n_padded // TILE)
            weights = self._unpack(number, (first, last), self._room)
            some = sums.new_empty((*sums.shape[:2], weights.shape[2]))
            self._calls.multiply(rows, weights, some)
            sums[..., first * TILE : last * TILE] = some

    def _unpack(self, number: int, tiles: tuple[int, int], room: torch.Tensor) -> torch.Tensor:
        """Tiles [first, last) of the chunk's experts: ``(count, parts, columns, K)``."""
        bank, count = self._layer.banks[number], len(self._chunk.ranked)
        columns = slice(tiles[0] * TILE, min(tiles[1] * TILE, bank.n))
        shape = (count, self._parts, columns.stop - columns.start, bank.k)
        weights = room[: torch.Size(shape).numel()].view(shape)
        factors = self.factors[number]
        if factors is None:
            weights[:, 0] = self._banks[number][:, columns].index_select(0, self._chunk.ranked)
        else:
            self._calls.unpack(
                number, weights, factors, self._chunk, tiles, self._banks, self._spec
            )
        return weights

"""CUDA legacy: dequantize the active experts in chunks, then ordinary matrix products.

Rows are sorted by expert on the card, and experts ranked by how many rows they have. A group is a
run of ranks with about as many rows each, given the same number of places, so that rows are
gathered, SwiGLU taken and results handed on in one launch each. Within a group, as many experts as
fit into the workspace are unpacked by one launch and multiplied by one batched product, for W13 and
then for W2.

The host is asked once a step, for the counts. While a graph is captured nobody is asked: the expert
of rank i has at most rows / (i + 1) rows, which bounds the places of every group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from loader.bank import TILE, BankSpec, LayerSpec
from loader.core import NativeLayer
from loader.cuda_legacy_calls import Chunk, LegacyCalls, Places, Step
from loader.errors import LoaderError

LEGACY_WORKSPACE_BYTES = 256 << 20
"""Most weights that are unpacked at a time."""

LEGACY_ROWS_BYTES = 256 << 20
"""Most results, and most rows of one group, that a step holds at a time; each at least one row."""

LEGACY_CAPTURED_TOKENS = 512
"""Most tokens of a step that a CUDA graph can hold."""

FEW_ROWS = 64
"""Up to so many places an expert costs what reading its weights costs: padding is free."""

MOST_EXPERTS = 65535
"""Most experts of a group: blocks across one grid."""


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


def groups(bounds: Sequence[int], most_places: int) -> Iterator[Ranks]:
    """Groups of up to so many places whose bounds (descending) are within a factor of two.

    A group of one expert may have more.
    """
    first = 0
    while first < len(bounds):
        most = min(max(most_places // bounds[first], 1), MOST_EXPERTS)
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
            ids = topk_ids[part]
            rows, slots = ids.numel(), layer.w13.experts
            sizes = (rows, rows, rows, slots, slots, slots)
            keys, source, order, starts, counts, ranked_counts = expert_map.new_empty(
                sum(sizes)
            ).split(sizes)
            step = Step(
                x[part],
                out[part],
                ids,
                topk_weights[part],
                expert_map,
                keys=keys,
                source=source,
                order=order,
                starts=starts,
                counts=counts,
                ranked=expert_map.new_empty(slots, dtype=torch.int64),
                ranked_counts=ranked_counts,
                results=x.new_empty((rows, x.shape[1])),
                width=layer.w2.k,
            )
            self._run(step, scratch, layer, banks)

    def _run(
        self, step: Step, scratch: torch.Tensor, layer: LayerSpec, banks: Sequence[torch.Tensor]
    ) -> None:
        self._calls.route(step)
        if self._capturing():
            bounds = captured_bounds(step.ids.shape[0], step.ids.shape[1], step.slots)
        else:
            bounds = [count for count in step.ranked_counts.tolist() if count]
        weights = _Weights(self._calls, scratch, layer, banks, step.x.dtype)
        most = max(LEGACY_ROWS_BYTES // _bytes_of_place(layer, step.x.dtype), 1)
        found = list(groups(bounds, most))
        sizes = (min((own.last - own.first) * own.places, most) for own in found)
        buffers = _Buffers(step, max(sizes, default=0))
        for own in found:
            ranks = slice(own.first, own.last)
            chunk = Chunk(step.ranked[ranks], step.ranked_counts[ranks])
            weights.take(chunk)
            at_once = max(most // (own.last - own.first), 1)
            for first in range(0, own.places, at_once):
                here = min(at_once, own.places - first)
                self._multiply(step, weights, buffers.places(chunk, first, here, weights.factors))
        self._calls.sum(step)

    def _multiply(self, step: Step, weights: _Weights, places: Places) -> None:
        count, here, hidden = places.rows.shape
        self._calls.gather(step, places)
        weights.multiply(0, places.rows, _sums(places, count, here, 2 * step.width))
        self._calls.inner(step, places)
        weights.multiply(1, places.inner, _sums(places, count, here, hidden))
        self._calls.results(step, places)


def _sums(places: Places, *shape: int) -> torch.Tensor:
    return places.sums[: torch.Size(shape).numel()].view(shape)


def _bytes_of_place(layer: LayerSpec, activations: torch.dtype) -> int:
    """Memory of one row of a group: activations, SwiGLU outputs, fp32 sums."""
    hidden, width = layer.w13.k, layer.w2.k
    return (hidden + width) * activations.itemsize + max(2 * width, hidden) * 4


class _Buffers:
    """Memory of the rows of one group at a time, for so many places in all."""

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
        """Views of the memory for some places of each expert of a group."""
        count = len(chunk.ranked)
        rows = self._rows[: count * places * self._hidden].view(count, places, self._hidden)
        inner = self._inner[: count * places * self._width].view(count, places, self._width)
        return Places(chunk, first, rows, self._sums, inner, factors)


class _Weights:
    """Weights of a group, unpacked into the workspace as they are multiplied."""

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
        plain = layer.w13.kind == "plain"
        self._native = None if plain else NativeLayer(self._spec, banks)
        self._dtype = weights_dtype(layer.w13, activations)
        self._parts = parts_of(layer, self._dtype)
        self._room = scratch[: LEGACY_WORKSPACE_BYTES // 4].view(self._dtype)
        self.factors: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)

    def take(self, group: Chunk) -> None:
        """Make a group the one whose weights are multiplied."""
        self._group = group
        if self._native is not None:
            first, second = (
                torch.empty(
                    (len(group.ranked), bank.n), dtype=torch.float32, device=self._room.device
                )
                for bank in self._layer.banks
            )
            self.factors = (first, second)

    def multiply(self, number: int, rows: torch.Tensor, sums: torch.Tensor) -> None:
        """``sums`` (count, n, N) fp32 = ``rows`` (count, n, K) @ weights of bank ``number``."""
        rows = rows.to(self._dtype)
        bank = self._layer.banks[number]
        fitting = self._room.numel() // (bank.n * bank.k * self._parts)
        if not fitting:
            for expert in range(len(rows)):
                self._multiply_by_tiles(number, slice(expert, expert + 1), rows, sums)
            return
        runs = -(-len(rows) // fitting)
        each = -(-len(rows) // runs)
        for first in range(0, len(rows), each):
            some = slice(first, first + each)
            weights = self._unpack(number, some, (0, bank.n_padded // TILE))
            self._calls.multiply(rows[some], weights, sums[some])

    def _multiply_by_tiles(
        self, number: int, some: slice, rows: torch.Tensor, sums: torch.Tensor
    ) -> None:
        """An expert that is larger than the workspace: a run of its columns at a time."""
        bank = self._layer.banks[number]
        each = max(self._room.numel() // (TILE * bank.k * self._parts), 1)
        for first in range(0, bank.n_padded // TILE, each):
            last = min(first + each, bank.n_padded // TILE)
            weights = self._unpack(number, some, (first, last))
            part = sums.new_empty((1, sums.shape[1], weights.shape[2]))
            self._calls.multiply(rows[some], weights, part)
            sums[some, :, first * TILE : last * TILE] = part

    def _unpack(self, number: int, some: slice, tiles: tuple[int, int]) -> torch.Tensor:
        """Tiles [first, last) of some experts of the group: ``(count, parts, columns, K)``."""
        bank = self._layer.banks[number]
        chunk = Chunk(self._group.ranked[some], self._group.counts[some])
        columns = slice(tiles[0] * TILE, min(tiles[1] * TILE, bank.n))
        shape = (len(chunk.ranked), self._parts, columns.stop - columns.start, bank.k)
        weights = self._room[: torch.Size(shape).numel()].view(shape)
        factors = self.factors[number]
        if factors is None:
            weights[:, 0] = self._banks[number][:, columns].index_select(0, chunk.ranked)
        else:
            self._calls.unpack(
                number,
                weights,
                factors[some],
                chunk,
                tiles,
                self._banks,
                self._spec,
                self._native,
            )
        return weights

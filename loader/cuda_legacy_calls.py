"""CUDA legacy calls: the launches of ``legacy`` on a card.

Matrix products are PyTorch's. Everything is enqueued on the current stream; nothing is allocated
here and nothing waits for the host.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from loader.core import NativeLayer
from loader.structs import FLOATS, Error

_ROUTE, _GATHER, _INNER, _RESULTS, _SUM = range(5)
"""``LegacyStage`` of csrc/launch/legacy.h."""

_STEP_SIZES = "tokens top_k experts slots hidden width dtype weight_dtype ids_are_64"
_STEP_TENSORS = (
    "x out ids weights expert_map keys source order starts counts ranked ranked_counts results"
)


class _Span(ctypes.Structure):
    """A tensor with its capacity; nothing where there is none."""

    _fields_ = [("at", ctypes.c_void_p), ("bytes", ctypes.c_int64)]


class _Call(ctypes.Structure):
    """``LegacyCall`` of csrc/launch/legacy.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _STEP_SIZES.split()),
        *((name, _Span) for name in _STEP_TENSORS.split()),
    ]


class _Places(ctypes.Structure):
    """``LegacyPlaces`` of csrc/launch/legacy.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("count", "first", "places")),
        *((name, _Span) for name in ("ranked", "counts", "rows", "sums", "inner")),
        ("factors", _Span * 2),
    ]


class _Weights(ctypes.Structure):
    """``LegacyWeights`` of csrc/launch/legacy.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("count", "first_tile", "last_tile", "dtype")),
        *((name, _Span) for name in ("out", "factors", "ranked", "counts")),
    ]


@dataclass(frozen=True)
class Step:
    """A run of tokens of one step, and its rows: row r is slot r % k of token r // k.

    ``x``, ``out`` (T, H); ``ids``, ``weights`` (T, k); ``expert_map`` (E,) int32. What
    :meth:`LegacyCalls.route` fills: ``keys`` (rows,) int32, a row's slot, or ``slots`` where
    it has no result of its own; ``source`` (rows,) int32, the row whose result serves it, or -1;
    ``order`` (rows,) int32, rows by slot; ``starts``, ``counts`` (slots,) int32, where those of a
    slot begin, and how many they are; ``ranked`` (slots,) int64, slots by count, the fullest first,
    and ``ranked_counts`` (slots,) int32. ``results`` (rows, H).
    """

    x: torch.Tensor
    out: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    expert_map: torch.Tensor
    keys: torch.Tensor
    source: torch.Tensor
    order: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    ranked: torch.Tensor
    ranked_counts: torch.Tensor
    results: torch.Tensor
    width: int

    @property
    def slots(self) -> int:
        """Experts on this card."""
        return len(self.ranked)

    @cached_property
    def native(self) -> ctypes.Structure:
        """The step as native calls take it, by address."""
        tokens, top_k = self.ids.shape
        return _Call(
            tokens,
            top_k,
            self.expert_map.numel(),
            self.slots,
            self.x.shape[1],
            self.width,
            FLOATS[self.x.dtype],
            FLOATS[self.weights.dtype],
            int(self.ids.dtype == torch.int64),
            *(_span(getattr(self, name)) for name in _STEP_TENSORS.split()),
        )


@dataclass(frozen=True)
class Chunk:
    """Some experts: ``ranked`` (count,) int64 slots, ``counts`` (count,) int32 rows."""

    ranked: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True)
class Places:
    """Places [first, first + n) of each of some experts; those beyond its rows hold nothing.

    ``rows`` (count, n, H) and ``inner`` (count, n, I) of the activation dtype; ``sums`` fp32: room
    for those of W13, (count, n, 2 I), and then of W2, (count, n, H); ``factors`` fp32: of W13
    (count, 2 I) and of W2 (count, H), or None.
    """

    chunk: Chunk
    first: int
    rows: torch.Tensor
    sums: torch.Tensor
    inner: torch.Tensor
    factors: tuple[torch.Tensor | None, torch.Tensor | None]

    @cached_property
    def native(self) -> ctypes.Structure:
        """The places as native calls take them, by address."""
        chunk = self.chunk
        spans = map(_span, (chunk.ranked, chunk.counts, self.rows, self.sums, self.inner))
        factors = (_Span * 2)(*map(_span, self.factors))
        return _Places(len(chunk.ranked), self.first, self.rows.shape[1], *spans, factors)


class _Core(Protocol):
    """What is used of ``loader/cuda_core.py``."""

    library: ctypes.CDLL

    def check(self, code: int, error: Error) -> None: ...


class LegacyCalls:
    """The launches of one library. Every argument that does not fit raises before its launch."""

    def __init__(self, core: _Core) -> None:
        self._core = core

    def route(self, step: Step) -> None:
        """Write which rows each expert has, and which experts have most."""
        self._run(_ROUTE, step, None)

    def gather(self, step: Step, places: Places) -> None:
        """Write ``rows``: activations by expert."""
        self._run(_GATHER, step, places)

    def inner(self, step: Step, places: Places) -> None:
        """Write ``inner`` = silu(gate) * up from the ``sums`` of W13, rounded twice."""
        self._run(_INNER, step, places)

    def results(self, step: Step, places: Places) -> None:
        """Write ``results`` of the rows of these places from the ``sums`` of W2, rounded."""
        self._run(_RESULTS, step, places)

    def sum(self, step: Step) -> None:
        """Write ``out``: results in router order, by router weight."""
        self._run(_SUM, step, None)

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
        """Write tiles [first, last) of a bank (0: W13, 1: W2) of the experts that have rows.

        ``weights`` (count, parts, columns, K) fp16, bf16 or fp32: the weight is the sum of its
        parts times ``factors`` (count, N) of its column. ``layer`` is the same banks, made once for
        many calls.
        """
        error = Error()
        call = _Weights(
            len(chunk.ranked),
            *tiles,
            FLOATS[weights.dtype],
            *map(_span, (weights, factors, chunk.ranked, chunk.counts)),
        )
        code = self._core.library.qpn_cuda_dequantize(
            ctypes.c_int(number),
            ctypes.byref(call),
            *(layer or NativeLayer(spec, banks)).arguments(),
            _stream(),
            ctypes.byref(error),
        )
        self._core.check(code, error)

    def multiply(self, rows: torch.Tensor, weights: torch.Tensor, sums: torch.Tensor) -> None:
        """``sums`` (count, n, N) fp32 = ``rows`` (count, n, K) @ ``weights`` (count, parts, N, K).

        Accumulated in fp32 whatever the dtype of the operands.
        """
        first, *others = (part.transpose(1, 2) for part in weights.unbind(1))
        if rows.dtype == torch.float32:
            torch.bmm(rows, first, out=sums)
            return
        torch.bmm(rows, first, out_dtype=torch.float32, out=sums)
        for part in others:
            torch.baddbmm(sums, rows, part, out_dtype=torch.float32, out=sums)

    def _run(self, stage: int, step: Step, places: Places | None) -> None:
        error = Error()
        given = None if places is None else ctypes.byref(places.native)
        code = self._core.library.qpn_cuda_legacy(
            ctypes.c_int(stage), ctypes.byref(step.native), given, _stream(), ctypes.byref(error)
        )
        self._core.check(code, error)


def _span(tensor: torch.Tensor | None) -> _Span:
    return _Span() if tensor is None else _Span(tensor.data_ptr(), tensor.nbytes)


def _stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

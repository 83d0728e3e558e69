"""CUDA routes: the ``moe`` operator served by the kernels of a card.

Fast routes enqueue two launches for one token and three for more, and neither allocate nor wait for
the host, so that a step can be captured in a CUDA graph and replayed with other tokens, experts and
weights. ``legacy`` is :mod:`loader.cuda_legacy`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch

from loader import cuda_legacy
from loader.arguments import BOUNDARY, Arguments
from loader.bank import LayerSpec, layer_spec_from_ints
from loader.card import CardFacts
from loader.core import NativeLayer
from loader.cuda_legacy_calls import LegacyCalls
from loader.errors import UnsupportedError
from loader.structs import FLOATS, Error

FAMILIES = ("host", "quadpair", "m16n8k16")
"""Families of kernels, as the third number of ``routes``; ``host`` leaves it to the card."""

ROW_MULTIPLE = 8
"""H and I are multiples of it: rows of activations are read 16 bytes at a time."""


class _Core(Protocol):
    """What is used of ``loader/cuda_core.py``."""

    library: ctypes.CDLL

    def check(self, code: int, error: Error) -> None: ...


class _Call(ctypes.Structure):
    """``MoeCall`` of csrc/launch/moe.h."""

    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in (
                "tokens",
                "top_k",
                "experts",
                "dtype",
                "weight_dtype",
                "ids_are_64",
                "family",
                "in_router_order",
                "x_bytes",
                "ids_bytes",
                "weights_bytes",
                "expert_map_bytes",
                "out_bytes",
                "scratch_bytes",
            )
        ),
        *(
            (name, ctypes.c_void_p)
            for name in ("x", "ids", "weights", "expert_map", "out", "scratch")
        ),
    ]


def family_of(architecture: int) -> int:
    """Kernels for an architecture (90 is SM 9.0): an index of :data:`FAMILIES`."""
    return FAMILIES.index("m16n8k16" if architecture >= 80 else "quadpair")


class CudaRoutes:
    """The ``moe`` operator on cards of one architecture, by one library."""

    routes = ("qpn_m1", "qpn_grouped", "legacy")
    kinds = ("int4", "e2m1")
    layouts = ("compact", "record", "wide")
    group_multiple = 16

    def __init__(self, core: _Core, facts: CardFacts) -> None:
        self._core = core
        self._block_bytes = facts.block_bytes
        self._legacy = cuda_legacy.Legacy(LegacyCalls(core))
        self.family = family_of(facts.architecture)
        self.dtypes = (torch.float16, torch.bfloat16) if facts.has_bf16 else (torch.float16,)

    def moe(
        self,
        out: torch.Tensor,
        scratch: torch.Tensor,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        expert_map: torch.Tensor,
        banks: Sequence[torch.Tensor],
        spec: list[int],
        routes: list[int],
    ) -> None:
        """One MoE layer; see ``loader/reference/routes.py`` for the contract.

        ``routes`` may have a third number, the family of kernels (:data:`FAMILIES`). Everything
        lies on one card and is contiguous. Raises :class:`LoaderError` before any launch where an
        argument does not fit.
        """
        layer = layer_spec_from_ints(spec)
        _check(layer, out, scratch, x, topk_ids, topk_weights, expert_map, banks)
        if not topk_ids.numel():  # no token, or no expert for any: nothing to launch
            out.zero_()
            return
        tokens = x.shape[0]
        with torch.cuda.device(x.device):
            if tokens <= routes[0] or 2 <= tokens <= routes[1]:
                family = (routes[2] if len(routes) > 2 else 0) or self.family
                self._fast(
                    out, scratch, x, topk_ids, topk_weights, expert_map, banks, spec, routes, family
                )
            else:
                self._legacy.moe(out, scratch, x, topk_ids, topk_weights, expert_map, layer, banks)

    def _fast(
        self,
        out: torch.Tensor,
        scratch: torch.Tensor,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        expert_map: torch.Tensor,
        banks: Sequence[torch.Tensor],
        spec: list[int],
        routes: list[int],
        family: int,
    ) -> None:
        if x.dtype not in self.dtypes:
            raise UnsupportedError(
                "the kernels of this card do not take activations of this dtype",
                expected=" or ".join(str(dtype) for dtype in self.dtypes),
                found=x.dtype,
            )
        tokens, top_k = topk_ids.shape
        needed = self._scratch(spec, tokens, top_k)
        if scratch.nbytes < needed:  # a wider top-k than the plan knew of
            scratch = torch.empty(needed // 4 + 1, dtype=torch.float32, device=x.device)
        call = _Call(
            tokens,
            top_k,
            expert_map.numel(),
            FLOATS[x.dtype],
            FLOATS[topk_weights.dtype],
            int(topk_ids.dtype == torch.int64),
            family,
            int(tokens == 1 and routes[0] == 1),
            x.nbytes,
            topk_ids.nbytes,
            topk_weights.nbytes,
            expert_map.nbytes,
            out.nbytes,
            scratch.nbytes,
            x.data_ptr(),
            topk_ids.data_ptr(),
            topk_weights.data_ptr(),
            expert_map.data_ptr(),
            out.data_ptr(),
            scratch.data_ptr(),
        )
        error = Error()
        code = self._core.library.qpn_cuda_moe(
            ctypes.byref(call),
            *NativeLayer(spec, banks).arguments(),
            _stream(),
            ctypes.byref(error),
        )
        self._core.check(code, error)

    def _scratch(self, spec: list[int], tokens: int, top_k: int) -> int:
        numbers = (ctypes.c_int64 * len(spec))(*spec)
        count = self._core.library.qpn_cuda_moe_scratch
        count.restype = ctypes.c_int64
        return int(count(numbers, ctypes.c_int64(tokens), ctypes.c_int64(top_k)))

    def most_tokens(self, layer: LayerSpec, top_k: int) -> int:
        """Most tokens of one step of the fast routes: a block compacts all rows by itself."""
        numbers = (ctypes.c_int64 * len(layer.to_ints()))(*layer.to_ints())
        count = self._core.library.qpn_cuda_moe_most_rows
        count.restype = ctypes.c_int64
        rows = [
            int(
                count(
                    numbers,
                    ctypes.c_int64(FLOATS[dtype]),
                    ctypes.c_int64(self.family),
                    ctypes.c_int64(self._block_bytes),
                )
            )
            for dtype in self.dtypes
        ]
        return max(min(rows) // top_k, 0)

    def scratch_bytes(self, layers: Sequence[LayerSpec], tokens: int, top_k: int) -> int:
        """Scratch that steps of up to ``tokens`` tokens, and ``legacy``, need."""
        most = 0
        for layer in layers:
            most = max(most, cuda_legacy.scratch_bytes(layer))
            if layer.w13.kind in self.kinds:
                most = max(most, self._scratch(layer.to_ints(), max(tokens, 1), top_k))
        return -(-most // 16) * 16


def _stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def _check(
    layer: LayerSpec,
    out: torch.Tensor,
    scratch: torch.Tensor,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor,
    banks: Sequence[torch.Tensor],
) -> None:
    """Raise :class:`LoaderError` for the first argument that does not fit the layer."""
    own = Arguments("layer", x.device)
    rows = (x.shape[0], layer.w13.k)
    shape = tuple(topk_ids.shape)
    own.require("x", x, rows, tuple(FLOATS)[:3], BOUNDARY)
    own.require("out", out, rows, (x.dtype,), BOUNDARY)
    own.require("topk_ids", topk_ids, (rows[0], *shape[1:2]), (torch.int32, torch.int64))
    own.require("topk_weights", topk_weights, shape, tuple(FLOATS))
    own.require("expert_map", expert_map, (expert_map.numel(),), (torch.int32,))
    own.require("scratch", scratch, (scratch.numel(),), (torch.float32,), BOUNDARY)
    if len(shape) != 2:
        own.refuse("the shape of topk_ids", "(tokens, k)", shape)
    own.require_banks([tensor for bank in layer.banks for tensor in bank.tensors()], banks)
    inputs = {"x": x, "topk_ids": topk_ids, "topk_weights": topk_weights}
    own.require_apart(out, {**inputs, "expert_map": expert_map, "scratch": scratch})

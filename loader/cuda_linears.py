"""CUDA linears: the ``linear`` operator served by the kernels of a card.

A linear is one expert: up to the limit of its routes the kernels of W2 multiply its bank as it is,
in one launch that neither allocates nor waits for the host. Beyond that the bank is unpacked into
the scratch in runs of columns and multiplied as ``legacy`` does it. A graph can capture both.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from loader.arguments import BOUNDARY, Arguments
from loader.bank import TILE, BankSpec, LayerSpec, Tensors, layer_spec_from_ints
from loader.core import NativeLayer
from loader.cuda_core import CudaCore, stream_of
from loader.cuda_legacy import parts_of
from loader.cuda_legacy_calls import Chunk, LegacyCalls
from loader.cuda_routes import family_of
from loader.errors import UnsupportedError
from loader.reference import linear as reference_linear
from loader.reference import routes as reference
from loader.structs import FLOATS, CardLinear, Error

WORKSPACE_BYTES = 64 << 20
"""Most weights of a linear that are unpacked at a time."""


class CudaLinears:
    """The ``linear`` operator on cards of one architecture, by one library."""

    def __init__(self, core: CudaCore, architecture: int, dtypes: Sequence[torch.dtype]) -> None:
        self._core = core
        self._calls = LegacyCalls(core)
        self._family = family_of(architecture)
        self._dtypes = tuple(dtypes)

    def linear(
        self,
        out: torch.Tensor,
        scratch: torch.Tensor,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        banks: Sequence[torch.Tensor],
        spec: list[int],
        routes: list[int],
    ) -> None:
        """One linear; see ``loader/reference/linear.py`` for the contract.

        With a bias, the product of a fast route is rounded before the bias is added in fp32.
        ``routes`` may have a third number, the family of kernels. Everything lies on one card and
        is contiguous. Raises :class:`LoaderError` before any launch where an argument does not fit.
        """
        layer = layer_spec_from_ints(spec)
        _check(layer, out, scratch, x, bias, banks)
        tokens = x.shape[0]
        if not tokens:
            return
        with torch.cuda.device(x.device):
            if tokens <= routes[0] or 2 <= tokens <= routes[1]:
                family = (routes[2] if len(routes) > 2 else 0) or self._family
                self._fast(out, x, banks, spec, family)
                if bias is not None:
                    out.add_(bias)
            else:
                product = self._dequantized(scratch, banks, spec, x.dtype)
                reference_linear.multiply(out, x, bias, banks, spec, product)

    def _fast(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        banks: Sequence[torch.Tensor],
        spec: list[int],
        family: int,
    ) -> None:
        if x.dtype not in self._dtypes:
            raise UnsupportedError(
                "the kernels of this card do not take activations of this dtype",
                expected=" or ".join(str(dtype) for dtype in self._dtypes),
                found=x.dtype,
            )
        call = CardLinear(
            x.shape[0],
            FLOATS[x.dtype],
            family,
            x.nbytes,
            out.nbytes,
            x.data_ptr(),
            out.data_ptr(),
        )
        error = Error()
        code = self._core.library.qpn_cuda_linear(
            ctypes.byref(call),
            *NativeLayer(spec, banks).arguments(),
            stream_of(x.device),
            ctypes.byref(error),
        )
        self._core.check(code, error)

    def _dequantized(
        self,
        scratch: torch.Tensor,
        banks: Sequence[torch.Tensor],
        spec: list[int],
        activations: torch.dtype,
    ) -> reference.Product:
        def product(
            x: torch.Tensor, layer: LayerSpec, bank: BankSpec, tensors: Tensors, slot: int
        ) -> torch.Tensor:
            one = torch.zeros(1, dtype=torch.int64, device=x.device)
            chunk = Chunk(one, torch.ones(1, dtype=torch.int32, device=x.device))
            parts = parts_of(LayerSpec(bank, bank, layer.awq_rounding), activations)
            rows, room = x.to(activations)[None], scratch.view(activations)
            y = torch.empty((1, len(x), bank.n), dtype=torch.float32, device=x.device)
            factors = torch.empty((1, bank.n), dtype=torch.float32, device=x.device)
            tiles = bank.n_padded // TILE
            each = room.numel() // (TILE * bank.k * parts)
            for first in range(0, tiles, each):
                last = min(first + each, tiles)
                columns = slice(first * TILE, min(last * TILE, bank.n))
                shape = (1, parts, columns.stop - columns.start, bank.k)
                weights = room[: torch.Size(shape).numel()].view(shape)
                self._calls.unpack(1, weights, factors, chunk, (first, last), banks, spec)
                some = y if each >= tiles else y.new_empty((1, len(x), shape[2]))
                self._calls.multiply(rows, weights, some)
                if some is not y:
                    y[..., columns] = some
            return y[0].mul_(factors)

        return product

    def scratch_bytes(self, spec: list[int], tokens: int) -> int:
        """Scratch of a linear: what is unpacked at a time, in 16 bits; few tokens need none."""
        bank = layer_spec_from_ints(spec).w2
        return max(_least_scratch(bank), min(WORKSPACE_BYTES, bank.n_padded * bank.k * 2))


def _least_scratch(bank: BankSpec) -> int:
    """One tile, whose weights take up to 32 bits each."""
    return TILE * bank.k * 4


def _check(
    layer: LayerSpec,
    out: torch.Tensor,
    scratch: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    banks: Sequence[torch.Tensor],
) -> None:
    """Raise :class:`LoaderError` for the first argument that does not fit the linear."""
    bank, own = layer.w2, Arguments("linear", x.device)
    rows = tuple(x.shape[:1])
    if layer.w13.kind != "absent":
        own.refuse("the spec", "W2 of a layer whose W13 is absent", layer.w13.kind)
    own.require("x", x, (*rows, bank.k), tuple(FLOATS)[:3], BOUNDARY)
    own.require("out", out, (*rows, bank.n), (x.dtype,), BOUNDARY)
    own.require("scratch", scratch, (scratch.numel(),), (torch.float32,), BOUNDARY)
    inputs = {"x": x, "scratch": scratch}
    if bias is not None:
        own.require("bias", bias, (bank.n,), tuple(FLOATS))
        inputs["bias"] = bias
    if scratch.nbytes < (least := _least_scratch(bank)):
        own.refuse("the scratch", f"{least} bytes at least", f"{scratch.nbytes} bytes")
    own.require_banks(bank.tensors(), banks)
    own.require_apart(out, inputs)

"""The way back: weights of one expert, or their scaled codes, from a bank (docs/routes.md)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from loader.bank import (
    E2M1_VALUES,
    TILE,
    BankSpec,
    Tensors,
    group_of_rows,
    unpack_codes,
    unpack_zeros,
)
from loader.reference.closing import fp16_bias


class Columns(NamedTuple):
    """A run of columns of one expert: ``first`` is a multiple of 32."""

    slot: int
    first: int
    last: int


class ScaledCodes(NamedTuple):
    """Weights as ``codes * scale[group]``, then ``whole``: what a kernel multiplies.

    ``codes`` fp32 ``(K, columns)`` exact integers or e2m1 values; ``scale`` fp32 ``(G, columns)``;
    ``whole`` fp32 ``(columns,)`` and ``divides`` for the globals of NVFP4, else None.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    whole: torch.Tensor | None
    divides: bool


def _codes(bank: BankSpec, tensors: Tensors, at: Columns) -> torch.Tensor:
    tiles = tensors["weight"][at.slot, at.first // TILE : -(-at.last // TILE)]
    return unpack_codes(tiles, bank.k, at.last - at.first)


def scale_and_zero(
    bank: BankSpec, tensors: Tensors, at: Columns
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales (as stored: fp16 or bf16) and zero points fp32 of an int4 bank, ``(G, columns)``."""
    run = slice(at.first, at.last)
    if bank.layout == "compact":
        scale = tensors["scales"][at.slot, :, run]
        packed = tensors["zeros"][at.slot, :, at.first // 2 : -(-at.last // 2)]
        return scale, unpack_zeros(packed)[:, : at.last - at.first].float()
    metadata = tensors["metadata"][at.slot, :, run].contiguous()
    if bank.layout == "record":
        scale = metadata[..., :2].contiguous().view(torch.float16).squeeze(-1)
        return scale, metadata[..., 2].float()
    halves = metadata.view(torch.float16).view(*metadata.shape, 2)
    scale, bias = halves[..., 0], halves[..., 1]
    # A zero scale has no zero point to recover; its weights are 0 whatever it was.
    zero = torch.where(scale == 0, 0.0, torch.round(-bias.float() / scale.float()))
    return scale, zero


def _scale_and_bias(
    bank: BankSpec, tensors: Tensors, at: Columns
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and fp16(-z * scale), both fp16 ``(G, columns)``, of an int4 bank."""
    if bank.layout == "wide":
        # As stored: a zero scale loses its zero point, and with it the sign of a zero bias.
        metadata = tensors["metadata"][at.slot, :, at.first : at.last].contiguous()
        halves = metadata.view(torch.float16).view(*metadata.shape, 2)
        return halves[..., 0], halves[..., 1]
    scale, zero = scale_and_zero(bank, tensors, at)
    return scale.half(), fp16_bias(scale.half(), zero)


def scaled_codes(bank: BankSpec, tensors: Tensors, at: Columns) -> ScaledCodes:
    """Codes and scales of an ``exact`` int4 bank or of an NVFP4 bank."""
    codes = _codes(bank, tensors, at)
    if bank.kind == "int4":
        scale, zero = scale_and_zero(bank, tensors, at)
        rows = group_of_rows(bank, codes.device)
        return ScaledCodes(codes.float() - zero[rows], scale.float(), None, False)
    known = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=codes.device)
    values = known[codes.long()]
    run = slice(at.first, at.last)
    if bank.layout == "wide":
        scale = tensors["metadata"][at.slot, :, run].float()
        return ScaledCodes(values, scale, None, False)
    scale = tensors["scales"][at.slot, :, run].contiguous().view(torch.float8_e4m3fn).float()
    return ScaledCodes(values, scale, _whole(bank, tensors, at), bank.global_sense == "divisor")


def _whole(bank: BankSpec, tensors: Tensors, at: Columns) -> torch.Tensor:
    """The global of each column of a run: gate and up have their own."""
    return tensors["globals"][at.slot].repeat(-(-(at.last - at.first) // bank.projections))[
        : at.last - at.first
    ]


def dequantize(bank: BankSpec, rounding: str, tensors: Tensors, at: Columns) -> torch.Tensor:
    """Weights fp32 ``(columns, K)`` in the order of docs/routes.md.

    int4 ``exact``: (q - z) * s; ``fused_bias``: fp16_fma(q, s, fp16(-z * s)); NVFP4:
    e2m1 * fp32(e4m3 o global); plain: as stored. Equal bit for bit under every layout but NVFP4
    ``wide``, which rounds.
    """
    if bank.kind == "plain":
        return tensors["weight"][at.slot, at.first : at.last].float()
    group = group_of_rows(bank, tensors["weight"].device)
    if bank.kind == "int4" and rounding == "fused_bias":
        scale, bias = _scale_and_bias(bank, tensors, at)
        # q * s + b is exact in fp64, so this rounds once, as an fp16 fma does.
        exact = _codes(bank, tensors, at).double() * scale.double()[group] + bias.double()[group]
        return exact.half().float().t()
    parts = scaled_codes(bank, tensors, at)
    scale = parts.scale
    if parts.whole is not None:
        scale = scale / parts.whole if parts.divides else scale * parts.whole
    weights = parts.codes * scale[group]
    if bank.kind == "int4":
        # -0 from (q - z) * 0 would tell layouts apart: `wide` cannot keep z where the scale is 0.
        weights = torch.where(scale[group] == 0, 0.0, weights)
    return weights.t()

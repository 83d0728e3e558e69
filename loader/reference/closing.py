"""The closing pass of the reference converter: metadata that needed more than one source tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from loader.bank import BankSpec, Tensors, layer_spec_from_ints, split_banks
from loader.reference.findings import Kind, first_bad, table

_FP16_SMALLEST_NORMAL = 2.0**-14

Findings = list[list[int]]


def held(values: torch.Tensor) -> torch.Tensor:
    """True where fp16 holds a value without flushing it (docs/bank.md)."""
    size = values.abs()
    return (values == 0) | ((size >= _FP16_SMALLEST_NORMAL) & values.half().isfinite())


def usable_globals(values: torch.Tensor, sense: str) -> torch.Tensor:
    """True where a global scale is positive and finite, and as a divisor has a reciprocal."""
    good = values.isfinite() & (values > 0)
    return good & values.reciprocal().isfinite() if sense == "divisor" else good


def finish(banks: Sequence[torch.Tensor], cache: torch.Tensor, spec: list[int]) -> torch.Tensor:
    """Complete the metadata of one layer after its last ``write``; findings as in ``write``."""
    layer = layer_spec_from_ints(spec)
    findings: Findings = []
    for number, (bank, tensors) in enumerate(
        zip(layer.banks, split_banks(layer, banks), strict=True)
    ):
        for slot in range(bank.experts):
            one = {name: tensor[slot] for name, tensor in tensors.items()}
            subject = number * bank.experts + slot
            if bank.kind == "int4":
                findings += _finish_int4(subject, bank, one, layer.checks_fp16)
            elif bank.kind == "e2m1" and bank.layout == "wide":
                scale = cache[slot, :2] if bank.projections == 2 else cache[slot, 2:]
                findings += _finish_wide_e2m1(subject, bank, one["metadata"], scale)
    return table(findings)


def _finish_int4(subject: int, bank: BankSpec, one: Tensors, checks_fp16: bool) -> Findings:
    if bank.layout == "compact" and bank.projections == 2:
        packed = one["zeros"][:, : bank.n // 2]
        both = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(1)
        packed.copy_(both[:, : bank.columns] | (both[:, bank.columns :] << 4))
    if not checks_fp16:
        return []
    scale, zero = _scale_and_zero(bank, one)
    scale, zero = scale[:, : bank.n], zero[:, : bank.n]
    bias = fp16_bias(scale, zero)
    if bank.layout == "wide":
        halves = one["metadata"].view(torch.int16).view(*one["metadata"].shape, 2)
        halves[:, : bank.n, 1] = bias.view(torch.int16)
    bad = ~bias.isfinite() & scale.isfinite()
    return first_bad(subject, Kind.NOT_HELD, bad, scale.contiguous().view(torch.int16))


def fp16_bias(scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """fp16(-z * scale) of fp16 scales: the fp32 product of 4 and 11 bits is exact, rounded once."""
    return ((0 - zero.float()) * scale.float()).half()


def _scale_and_zero(bank: BankSpec, one: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales fp16 and zero points uint8, both ``(groups, Np)``, before ``wide`` has its bias."""
    if bank.layout == "compact":
        packed = one["zeros"]
        zero = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(1)
        return one["scales"].half(), zero
    metadata = one["metadata"]
    if bank.layout == "record":
        scale = metadata[..., :2].contiguous().view(torch.float16).squeeze(-1)
        return scale, metadata[..., 2]
    halves = metadata.view(torch.int16).view(*metadata.shape, 2)
    zero = ((metadata >> 16) & 0xFF).to(torch.uint8)
    return halves[..., 0].contiguous().view(torch.float16), zero


def _finish_wide_e2m1(
    subject: int, bank: BankSpec, metadata: torch.Tensor, scale: torch.Tensor
) -> Findings:
    columns = metadata[:, : bank.n]
    codes = metadata.view(torch.uint8).view(*metadata.shape, 2)[:, : bank.n, 0]
    block = codes.contiguous().view(torch.float8_e4m3fn).float()
    whole = scale.repeat(bank.columns)
    value = block / whole if bank.global_sense == "divisor" else block * whole
    # What `write` has reported of block scales and globals is not reported again.
    bad = ~held(value) & block.isfinite() & usable_globals(whole, bank.global_sense)
    columns.copy_(value.half())
    return first_bad(subject, Kind.NOT_HELD, bad, value.view(torch.int32))

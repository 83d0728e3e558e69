"""The reference converter: source bytes of one chunk into bank tensors, and the closing pass.

A metadata byte that needs two tensors is *parked* in its own place in the bank until ``finish``:
gate and up zero points lie packed side by side in the row that will hold them interleaved, and a
``wide`` entry holds its scale and its zero point until the bias can be computed. So nothing of a
layer's metadata is held twice; only the globals of NVFP4 ``wide`` wait in the conversion cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from loader.bank import (
    NIBBLE_OF_ROW,
    ROWS_PER_WORD,
    TILE,
    BankSpec,
    LayerSpec,
    Tensors,
    layer_spec_from_ints,
    pack_rows,
    split_banks,
)
from loader.checkpoint.scheme import Role
from loader.reference import BLOCK_BYTES
from loader.reference.closing import finish, held, usable_globals
from loader.reference.findings import Kind, first_bad, table

# Nibble that holds column 8 j + m of an AWQ word: the reverse of the tools' 0, 2, 4, 6, 1, 3, 5, 7.
_AWQ_NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)

Findings = list[list[int]]

__all__ = ["finish", "write"]


class _Descriptor(NamedTuple):
    role: int
    bank: int
    projection: int
    slot: int
    offset: int
    rows: int
    row_bytes: int
    skip: int
    cols: int
    dest_row: int
    expect_a: int
    expect_b: int


class _Target(NamedTuple):
    """Where one descriptor writes: spec and tensors of its bank, and its column parity."""

    layer: LayerSpec
    spec: BankSpec
    tensors: Tensors
    cache: torch.Tensor
    parity: int


def write(
    chunk: torch.Tensor,
    descriptors: torch.Tensor,
    banks: Sequence[torch.Tensor],
    cache: torch.Tensor,
    spec: list[int],
) -> torch.Tensor:
    """Convert every tensor piece of one chunk.

    ``chunk`` uint8 (bytes,); ``descriptors`` int64 (pieces, 12), see ``DESCRIPTOR_FIELDS``;
    ``banks`` the tensors of W13 then W2; ``cache`` fp32 (experts, 3), the globals of ``wide``.
    Returns findings int64 (n, 6). Raises ``ValueError`` for a descriptor outside the chunk.
    """
    layer = layer_spec_from_ints(spec)
    both = split_banks(layer, banks)
    findings: Findings = []
    for subject, numbers in enumerate(descriptors.tolist()):
        piece = _Descriptor(*numbers)
        if piece.offset < 0 or piece.offset + piece.rows * piece.row_bytes > chunk.numel():
            raise ValueError(f"descriptor {subject} reaches outside the chunk: {piece}")
        bank = layer.banks[piece.bank]
        parity = piece.projection if bank.projections == 2 else 0
        target = _Target(layer, bank, both[piece.bank], cache, parity)
        convert, used_bytes, dtype = _ROLES[piece.role]
        for first, block in _blocks(chunk, piece, used_bytes(piece.cols), dtype):
            findings += convert(subject, piece, first, block, target)
    return table(findings)


def _blocks(
    chunk: torch.Tensor, piece: _Descriptor, used: int, dtype: torch.dtype
) -> Iterator[tuple[int, torch.Tensor]]:
    """Runs of source rows as typed tensors ``(rows, columns)``, each with its first row's index."""
    each = max(BLOCK_BYTES // piece.row_bytes // TILE, 1) * TILE
    for first in range(0, piece.rows, each):
        rows = min(each, piece.rows - first)
        start = piece.offset + first * piece.row_bytes
        block = chunk[start : start + rows * piece.row_bytes].view(rows, piece.row_bytes)
        block = block[:, piece.skip : piece.skip + used].contiguous()
        if block.data_ptr() % dtype.itemsize:
            block = block.clone()
        yield first, block.view(dtype)


def _codes_kn(
    subject: int, piece: _Descriptor, first: int, block: torch.Tensor, to: _Target
) -> Findings:
    parts = block.view(torch.uint8).view(block.shape[0], -1, 4)
    shape = (block.shape[0], parts.shape[1], 8)
    codes = torch.empty(shape, dtype=torch.uint8, device=block.device)
    for column, nibble in enumerate(_AWQ_NIBBLE):
        codes[:, :, column] = (parts[:, :, nibble // 2] >> (4 * (nibble % 2))) & 0xF
    words = pack_rows(codes.view(block.shape[0], -1)[:, : piece.cols])
    _place(words, piece.slot, 0, (piece.dest_row + first) // ROWS_PER_WORD, to)
    return []


def _codes_nk(
    subject: int, piece: _Descriptor, first: int, block: torch.Tensor, to: _Target
) -> Findings:
    words = torch.zeros_like(block)
    for row, nibble in enumerate(NIBBLE_OF_ROW):
        words |= ((block >> (4 * row)) & 0xF) << (4 * nibble)
    _place(words.t(), piece.slot, piece.dest_row + first, 0, to)
    return []


def _place(words: torch.Tensor, slot: int, column: int, k8: int, to: _Target) -> None:
    """Write words ``(k8 rows, columns) int32`` of one projection into its tiles."""
    unit = TILE // to.spec.projections
    weight = to.tensors["weight"][slot]
    tiled = weight.view(*weight.shape[:2], unit, to.spec.projections)[..., to.parity]
    tiles = -(-words.shape[1] // unit)
    if words.shape[1] % unit:
        words = torch.nn.functional.pad(words, (0, tiles * unit - words.shape[1]))
    source = words.reshape(words.shape[0], tiles, unit).transpose(0, 1)
    tiled[column // unit : column // unit + tiles, k8 : k8 + words.shape[0]] = source


def _scales_gn(
    subject: int, piece: _Descriptor, first: int, block: torch.Tensor, to: _Target
) -> Findings:
    return _scales(subject, piece, block, piece.dest_row + first, 0, to)


def _scales_ng(
    subject: int, piece: _Descriptor, first: int, block: torch.Tensor, to: _Target
) -> Findings:
    return _scales(subject, piece, block.t(), 0, piece.dest_row + first, to)


def _scales(
    subject: int,
    piece: _Descriptor,
    bits: torch.Tensor,
    group: int,
    column: int,
    to: _Target,
) -> Findings:
    """Store scales ``(groups, columns)``, given as bits: int16, or int32 of fp32 scales."""
    bits = bits.contiguous()
    is_wide = bits.dtype == torch.int32
    values = bits.view(torch.float32 if is_wide else to.spec.scale_dtype).float()
    findings = first_bad(subject, Kind.NONFINITE, ~values.isfinite(), bits, group, column)
    if is_wide and not to.layer.checks_fp16:
        for kind, dtype in (Kind.NOT_FP16, torch.float16), (Kind.NOT_BF16, torch.bfloat16):
            other = (values.to(dtype).float() != values) & values.isfinite()
            findings += first_bad(subject, kind, other, bits, group, column)
    if to.layer.checks_fp16:
        exact = held(values) & (values.half().float() == values) | ~values.isfinite()
        findings += first_bad(subject, Kind.NOT_HELD, ~exact, bits, group, column)
    if to.spec.layout == "compact":
        plane = to.tensors["scales"].view(torch.int16)
        bits = values.to(to.spec.scale_dtype).view(torch.int16) if is_wide else bits
    else:
        bits = values.half().view(torch.int16)
        metadata = to.tensors["metadata"]
        if to.spec.layout == "record":
            plane = metadata[..., :2]
            bits = bits.contiguous().view(torch.uint8).view(*bits.shape, 2)
        else:
            plane = metadata.view(torch.int16).view(*metadata.shape, 2)[..., 0]
    _window(plane, piece.slot, group, column, bits, to)
    return findings


def _window(
    plane: torch.Tensor, slot: int, group: int, column: int, values: torch.Tensor, to: _Target
) -> None:
    """Write ``values (groups, columns, ...)`` of one projection into a metadata plane."""
    step = to.spec.projections
    start = column * step + to.parity
    groups, columns = values.shape[:2]
    plane[slot, group : group + groups, start : start + columns * step : step] = values


def _block_scales(
    subject: int, piece: _Descriptor, first: int, block: torch.Tensor, to: _Target
) -> Findings:
    values, column = block.t(), piece.dest_row + first
    findings = first_bad(subject, Kind.NONFINITE, (values & 0x7F) == 0x7F, values, 0, column)
    if to.spec.layout == "compact":
        plane = to.tensors["scales"]
    else:
        metadata = to.tensors["metadata"]
        plane = metadata.view(torch.uint8).view(*metadata.shape, 2)[..., 0]
    _window(plane, piece.slot, 0, column, values, to)
    return findings


def _zeros_gn(
    subject: int, piece: _Descriptor, first: int, block: torch.Tensor, to: _Target
) -> Findings:
    parts = block.view(torch.uint8).view(block.shape[0], -1, 4)
    columns = [(parts[:, :, n // 2] >> (4 * (n % 2))) & 0xF for n in _AWQ_NIBBLE]
    zeros = torch.stack(columns, dim=-1).flatten(1)[:, : piece.cols]
    return _zeros(subject, piece, zeros, piece.dest_row + first, 0, to)


def _zeros_ng(
    subject: int, piece: _Descriptor, first: int, block: torch.Tensor, to: _Target
) -> Findings:
    nibbles = [(block >> (4 * n)) & 0xF for n in range(8)]
    zeros = torch.stack(nibbles, dim=1).flatten(0, 1).t().to(torch.uint8)
    return _zeros(subject, piece, zeros, 0, piece.dest_row + first * 8, to)


def _zeros(
    subject: int, piece: _Descriptor, zeros: torch.Tensor, group: int, column: int, to: _Target
) -> Findings:
    """Store zero points ``(groups, columns) uint8``."""
    findings: Findings = []
    if piece.expect_a >= 0:
        findings = first_bad(
            subject, Kind.ZERO_POINT, zeros != piece.expect_a, zeros, group, column
        )
    if to.spec.layout == "compact":
        packed = zeros[:, 0::2] | (zeros[:, 1::2] << 4)
        start = (to.parity * to.spec.columns + column) // 2
        plane = to.tensors["zeros"][piece.slot]
        plane[group : group + packed.shape[0], start : start + packed.shape[1]] = packed
        return findings
    metadata = to.tensors["metadata"]
    if to.spec.layout == "wide":
        metadata = metadata.view(torch.uint8).view(*metadata.shape, 4)
    _window(metadata[..., 2], piece.slot, group, column, zeros, to)
    return findings


def _global(
    subject: int, piece: _Descriptor, first: int, block: torch.Tensor, to: _Target
) -> Findings:
    value = block.view(-1)[:1].float()
    good = usable_globals(value, to.spec.global_sense)
    if to.spec.layout == "compact":
        to.tensors["globals"][piece.slot, to.parity] = value[0]
    else:
        to.cache[piece.slot, piece.projection] = value[0]
    return first_bad(subject, Kind.GLOBAL, ~good.view(1, 1), value.view(torch.int32))


def _shape(
    subject: int, piece: _Descriptor, first: int, block: torch.Tensor, to: _Target
) -> Findings:
    wanted = torch.tensor([[piece.expect_a, piece.expect_b]], device=block.device)
    bad = block.view(1, -1) != wanted
    return first_bad(subject, Kind.SHAPE, bad, block)


def _group_index(
    subject: int, piece: _Descriptor, first: int, block: torch.Tensor, to: _Target
) -> Findings:
    index = block.view(1, -1)
    rows = torch.arange(piece.cols, dtype=torch.int32, device=block.device)
    ordered = rows // piece.expect_a
    if bool((index == -1).all()):
        return []
    return first_bad(subject, Kind.GROUPS, index != ordered, index)


def _plain(
    subject: int, piece: _Descriptor, first: int, block: torch.Tensor, to: _Target
) -> Findings:
    step = to.spec.projections
    start = (piece.dest_row + first) * step + to.parity
    weight = to.tensors["weight"].view(torch.int16)
    weight[piece.slot, start : start + block.shape[0] * step : step, : block.shape[1]] = block
    return []


_Convert = Callable[[int, _Descriptor, int, torch.Tensor, _Target], Findings]
_ROLES: dict[int, tuple[_Convert, Callable[[int], int], torch.dtype]] = {
    # role: conversion, bytes of so many columns, dtype of the source elements
    Role.CODES_KN: (_codes_kn, lambda cols: cols // 2, torch.int32),
    Role.CODES_NK: (_codes_nk, lambda cols: cols // 2, torch.int32),
    Role.SCALES_GN: (_scales_gn, lambda cols: cols * 2, torch.int16),
    Role.SCALES_NG: (_scales_ng, lambda cols: cols * 2, torch.int16),
    Role.SCALES_GN32: (_scales_gn, lambda cols: cols * 4, torch.int32),
    Role.SCALES_NG32: (_scales_ng, lambda cols: cols * 4, torch.int32),
    Role.SCALES_NG8: (_block_scales, lambda cols: cols, torch.uint8),
    Role.ZEROS_GN: (_zeros_gn, lambda cols: cols // 2, torch.int32),
    Role.ZEROS_NG: (_zeros_ng, lambda cols: cols * 4, torch.int32),
    Role.GLOBAL_F32: (_global, lambda cols: cols * 4, torch.float32),
    Role.GLOBAL_BF16: (_global, lambda cols: cols * 2, torch.bfloat16),
    Role.CHECK_SHAPE: (_shape, lambda cols: cols * 8, torch.int64),
    Role.CHECK_GROUPS: (_group_index, lambda cols: cols * 4, torch.int32),
    Role.PLAIN_NK: (_plain, lambda cols: cols * 2, torch.int16),
}

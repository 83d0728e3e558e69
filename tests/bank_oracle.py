"""The banks of docs/bank.md once more, from the generator's numbers, with numpy alone.

Nothing here comes from the converter or from ``loader.bank``; ``test_bank.py`` holds the words of
this file to a loop over bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import loader
from loader import memory
from loader.checkpoint.source import LocalSource
from loader.errors import CapacityError
from loader.experts import PreparedExperts
from loader.testing.checkpoint import TinyCheckpoint, tiny_checkpoint
from loader.testing.container import edit_tensor
from loader.testing.encode import from_bits
from loader.testing.values import Codes

NIBBLE_OF_ROW = (0, 4, 1, 5, 2, 6, 3, 7)
FLOATS = ("ct-nvfp4", "modelopt-nvfp4")
INT4 = ("awq-gemm", "awq-gptqmodel", "ct-int4", "ct-int4-asym")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
SMALL: dict[str, Any] = {
    "hidden": 128,
    "intermediate": 192,
    "experts": 4,
    "layers": 1,
    "attention": False,
    "vocabulary": 8,
}

Array = np.ndarray[Any, Any]


def small(folder: Path | str, **settings: Any) -> TinyCheckpoint:
    """A checkpoint of one layer; group 32 where the format leaves a choice."""
    if settings.get("dialect", "awq-gemm") not in FLOATS:
        settings.setdefault("group", 32)
    return tiny_checkpoint(folder, **{**SMALL, **settings})


def poisoned(monkeypatch: Any) -> None:
    """Fill fresh memory with bytes that are NaN in every float dtype, and wrong in every other."""
    fresh = memory.fresh

    def filled(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        tensor = fresh(shape, dtype, device)
        if tensor.numel():
            tensor.view(torch.uint8).fill_(0xFF)
        return tensor

    monkeypatch.setattr(memory, "fresh", filled)


def load(checkpoint: TinyCheckpoint, layout: str = "compact", **settings: Any) -> Any:
    """Load under one metadata layout."""
    return loader.load(checkpoint.folder, policy=loader.Policy(layout=layout), **settings)


def layouts(dialect: str) -> tuple[str, ...]:
    """The metadata layouts that a dialect's banks can have."""
    return ("compact", "wide") if dialect in FLOATS else ("compact", "record", "wide")


def least_staging(checkpoint: TinyCheckpoint) -> int:
    """What the error about a staging budget of one byte asks for."""
    with pytest.raises(CapacityError) as caught:
        loader.plan(checkpoint.folder, staging_bytes=1)
    wanted = str(caught.value.expected)
    assert str(caught.value).startswith("staging_bytes is too small for the largest rows")
    return int(wanted.removeprefix("at least ").removesuffix(" bytes"))


def reads_by(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let loads of this test take their bytes as the fixture ``way`` says."""
    if way == "ahead":
        monkeypatch.setattr(LocalSource, "lends_descriptors", False)


def up32(size: int) -> int:
    """The next multiple of 32."""
    return -(-size // 32) * 32


def words(codes: Array) -> Array:
    """Codes ``(K, N)`` below 16 to words ``(Np / 32, Kp / 8, 32) int32``."""
    k, n = codes.shape
    padded = np.zeros((up32(k), up32(n)), np.uint32)
    padded[:k, :n] = codes
    tiled = padded.reshape(up32(k) // 8, 8, up32(n) // 32, 32)
    packed = np.zeros((up32(k) // 8, up32(n) // 32, 32), np.uint32)
    for row, nibble in enumerate(NIBBLE_OF_ROW):
        packed |= tiled[:, row] << np.uint32(4 * nibble)
    return np.ascontiguousarray(packed.transpose(1, 0, 2)).view(np.int32)


def interleave(gate: Array, up: Array) -> Array:
    """Column 2i is gate i, column 2i + 1 is up i."""
    both = np.empty((gate.shape[0], 2 * gate.shape[1]), gate.dtype)
    both[:, 0::2], both[:, 1::2] = gate, up
    return both


def fp16_bias(scale: Array, zero: Array) -> Array:
    """fp16(-z * s) of float32 scales, the product exact in float64."""
    return np.asarray((0.0 - zero.astype(np.float64)) * scale.astype(np.float64)).astype(np.float16)


def _columns(plane: Array) -> Array:
    """Pad columns of ``(G, N)`` with zero."""
    return np.pad(plane, ((0, 0), (0, up32(plane.shape[1]) - plane.shape[1])))


def metadata(layout: str, dtype: str, scale: Array, zero: Array | None) -> dict[str, Array]:
    """Planes of one expert, as bits, from scale bits and zero points ``(G, N)``."""
    if zero is None:
        return {"scales": _columns(scale)}
    if layout == "compact":
        padded = _columns(zero)
        return {"scales": _columns(scale), "zeros": padded[:, 0::2] | (padded[:, 1::2] << 4)}
    value = from_bits(scale, dtype)
    half = value.astype(np.float16).view(np.uint16)
    if layout == "record":
        parts = (half & 0xFF, half >> 8, zero)
        return {"metadata": np.stack([_columns(part).astype(np.uint8) for part in parts], axis=-1)}
    bias = fp16_bias(value, zero).view(np.uint16)
    return {"metadata": _columns(half.astype(np.uint32) | (bias.astype(np.uint32) << 16))}


def wide_e2m1(scale: Array, global_scale: Array, divides: bool) -> dict[str, Array]:
    """fp16(fp32(e4m3 o global)), the global of each column given."""
    block = from_bits(scale, "F8_E4M3")
    value = block / global_scale if divides else block * global_scale
    return {"metadata": _columns(value.astype(np.float16).view(np.uint16))}


def bank(
    checkpoint: TinyCheckpoint,
    layout: str,
    codes: Array,
    scale: Array,
    zero: Array | None,
    wide: Array,
) -> dict[str, Array]:
    """One expert of one bank; codes ``(K, N)``, scale and zero ``(G, N)``, globals ``(N,)``."""
    found = {"weight": words(codes)}
    if zero is not None or layout == "compact":
        found |= metadata(layout, checkpoint.scale_dtype, scale, zero)
    else:
        found |= wide_e2m1(scale, wide, checkpoint.writer.divisor)
    return found


def expected(
    checkpoint: TinyCheckpoint,
    layer: int,
    layout: str = "compact",
    offset: int = 0,
    count: int | None = None,
    expert_ids: tuple[int, ...] | None = None,
) -> dict[str, Array]:
    """Every tensor of both banks by buffer name, as unsigned bits (words int32, globals fp32)."""
    count = checkpoint.intermediate if count is None else count
    ids = tuple(range(checkpoint.experts)) if expert_ids is None else expert_ids
    group = checkpoint.intermediate if checkpoint.group == -1 else checkpoint.group
    inner, groups = slice(offset, offset + count), slice(offset // group, None)
    groups = slice(groups.start, -(-(offset + count) // group))
    stacked: dict[str, list[Array]] = {}
    for expert in ids:
        gate, up, down = (checkpoint.codes(layer, expert, name) for name in ("gate", "up", "down"))
        w13 = bank(
            checkpoint,
            layout,
            interleave(gate.q[inner].T, up.q[inner].T),
            interleave(gate.scale[inner].T, up.scale[inner].T),
            None if gate.z is None or up.z is None else interleave(gate.z[inner].T, up.z[inner].T),
            np.tile(_globals(gate, up), count),
        )
        w2 = bank(
            checkpoint,
            layout,
            down.q[:, inner].T,
            down.scale[:, groups].T,
            None if down.z is None else down.z[:, groups].T,
            np.tile(_globals(down), checkpoint.hidden),
        )
        if down.z is None and layout == "compact":
            w13["globals"], w2["globals"] = _globals(gate, up), _globals(down)
        for prefix, part in (("w13", w13), ("w2", w2)):
            for name, array in part.items():
                stacked.setdefault(f"{prefix}_{name}", []).append(array)
    return {name: np.stack(arrays) for name, arrays in stacked.items()}


def _globals(*codes: Codes) -> Array:
    return np.array([0.0 if c.global_scale is None else c.global_scale for c in codes], np.float32)


def bits(tensor: torch.Tensor) -> Array:
    """A tensor's bytes as unsigned integers of its item size."""
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}[tensor.itemsize]
    views = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize]
    return tensor.detach().contiguous().view(views).numpy().view(unsigned)


def assert_same(found: torch.Tensor, wanted: Array, what: str) -> None:
    """Equal shape and bits; the message has the first difference."""
    assert tuple(found.shape) == wanted.shape, what
    have = bits(found)
    want = np.ascontiguousarray(wanted).view(have.dtype)
    different = np.argwhere(have != want)
    if len(different):
        at = tuple(different[0])
        raise AssertionError(f"{what}: {len(different)} differ, first {at}: {have[at]} {want[at]}")


def assert_banks(module: PreparedExperts, wanted: dict[str, Array]) -> None:
    """The buffers of a module are exactly these tensors."""
    buffers = dict(module.named_buffers())
    assert buffers.keys() == wanted.keys()
    for name, array in wanted.items():
        assert_same(buffers[name], array, name)


def fused_bias_weight(checkpoint: TinyCheckpoint, layer: int, expert: int, name: str) -> Array:
    """``(out, in) float32``: fp16_fma(q, s, fp16(-z * s)); float64 holds q * s + b exactly."""
    codes = checkpoint.codes(layer, expert, name)
    assert codes.z is not None
    group = codes.q.shape[1] if checkpoint.group == -1 else checkpoint.group
    of_row = np.arange(codes.q.shape[1]) // group
    scale = from_bits(codes.scale, checkpoint.scale_dtype)
    bias = fp16_bias(scale, codes.z).astype(np.float64)[:, of_row]
    fused = codes.q.astype(np.float64) * scale.astype(np.float64)[:, of_row] + bias
    return np.asarray(fused.astype(np.float16).astype(np.float32))


def set_scale(checkpoint: TinyCheckpoint, name: str, group: int, column: int, bits: int) -> None:
    """One scale's bits, of a single (not fused) projection."""
    turned = checkpoint.writer.layout == "awq"

    def edit(array: np.ndarray[Any, Any]) -> None:
        array.view(f"u{array.itemsize}")[(group, column) if turned else (column, group)] = bits

    edit_tensor(checkpoint.folder, name, edit)


def set_zero(checkpoint: TinyCheckpoint, name: str, group: int, column: int, zero: int) -> None:
    """One zero point of an AWQ projection."""
    nibble = [0, 2, 4, 6, 1, 3, 5, 7].index(column % 8)

    def edit(array: np.ndarray[Any, Any]) -> None:
        word = array.view(np.uint32)[group, column // 8]
        word = int(word) & ~(15 << 4 * nibble) | zero << 4 * nibble
        array.view(np.uint32)[group, column // 8] = word

    edit_tensor(checkpoint.folder, name, edit)

"""Cases, section 4: dtypes and shapes of scales, globals and every other part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from case_checks import (
    PRESENT,
    assert_same,
    ok,
    refuse,
    scale_values,
    small,
)
from case_values import GLOBALS, NAMES

import loader
from loader.testing.container import RawTensor, edit_tensor, rewrite

# 4.2 Scale dtype and shape


def with_extremes(folder: Path, name: str, dtype: str, values: tuple[float, ...]) -> None:
    """Puts values among the scales of one tensor."""

    def edit(array: np.ndarray) -> None:
        for place, value in enumerate(values):
            single = np.array([value], np.float32)
            bits = (single.view(np.uint32) >> 16).astype(np.uint16)
            if dtype == "F16":
                bits = single.astype(np.float16).view(np.uint16)
            array.view(np.uint16).reshape(-1)[7 + 11 * place] = bits[0]

    edit_tensor(folder, name, edit)


@pytest.mark.parametrize("projection", ["up", "down"])
@pytest.mark.parametrize("dtype", ["F16", "BF16"])
@pytest.mark.parametrize("dialect", ["A", "P", "ct-int4-asym"])
def test_sixteen_bit_scales_are_kept_as_they_are(
    tmp_path: Path, dialect: str, dtype: str, projection: str
) -> None:
    checkpoint = small(tmp_path, dialect, scale_dtype=dtype)
    name = checkpoint.name(1, 1, projection, "scales" if dialect == "A" else "weight_scale")
    with_extremes(tmp_path, name, dtype, (1e-6, 7e4 if dtype == "BF16" else 6e4, -0.5))
    values = scale_values(checkpoint.stored_codes(1, 1, projection).scale)[dtype]
    assert values.max() > 5e4 and 0 < np.abs(values).min() < 2e-6
    cards = ok(checkpoint, dtypes=(torch.float32,))
    wanted = torch.float16 if dtype == "F16" else torch.bfloat16
    assert cards[1][0].get_buffer("w13_scales").dtype == wanted


def test_w13_and_w2_may_have_scales_of_two_dtypes(tmp_path: Path) -> None:
    """Each bank keeps its own dtype; gate and up of one bank must agree."""
    checkpoint = small(tmp_path, "A", scale_dtype="F16")

    def edit(tensors: dict[str, Any], projections: tuple[str, ...]) -> None:
        for name, tensor in list(tensors.items()):
            if name.endswith("scales") and any(f".{p}_proj." in name for p in projections):
                tensors[name] = RawTensor("BF16", tensor.shape, tensor.data, tensor.file)

    rewrite(tmp_path, lambda tensors: edit(tensors, ("down",)))
    (module,) = loader.load(tmp_path, layers=[0]).values()
    assert module.get_buffer("w13_scales").dtype == torch.float16
    assert module.get_buffer("w2_scales").dtype == torch.bfloat16
    found = module.get_buffer("w2_scales")[3, :, :64].view(torch.int16).numpy().T
    assert_same(found.view(np.uint16), checkpoint.stored_codes(0, 3, "down").scale, "down")
    rewrite(tmp_path, lambda tensors: edit(tensors, ("up",)))
    name = checkpoint.name(0, 0, "up", "scales")
    refuse(tmp_path, file=PRESENT, layer=0, tensor=name, expected="F16", found="BF16")


@pytest.mark.parametrize("dtype", ["F64", "I32", "U8", "F8_E4M3"])
@pytest.mark.parametrize("dialect", ["A", "P"])
def test_scales_of_another_dtype_are_refused(tmp_path: Path, dialect: str, dtype: str) -> None:
    checkpoint = small(tmp_path, dialect)
    name = checkpoint.name(1, 2, "down", "scales" if dialect == "A" else "weight_scale")
    sizes = {"F64": 8, "I32": 4, "U8": 1, "F8_E4M3": 1}

    def edit(tensors: dict[str, Any]) -> None:
        old = tensors[name]
        count = len(old.data) // 2 * sizes[dtype]
        tensors[name] = RawTensor(dtype, old.shape, bytes(count), old.file)

    rewrite(tmp_path, edit)
    refuse(
        tmp_path,
        file=PRESENT,
        layer=1,
        experts="2",
        tensor=name,
        expected="F16 or BF16 or F32",
        found=f"{dtype} in 1 tensors",
    )


@pytest.mark.parametrize("projections", [NAMES, ("gate",), ("down",)])
@pytest.mark.parametrize("dialect", ["N", "M"])
def test_block_scales_as_bytes_are_the_same_bytes(
    tmp_path: Path, dialect: str, projections: tuple[str, ...]
) -> None:
    checkpoint = small(tmp_path, dialect)

    def edit(tensors: dict[str, Any]) -> None:
        for name, tensor in list(tensors.items()):
            if name.endswith("weight_scale") and any(f".{p}_proj." in name for p in projections):
                tensors[name] = RawTensor("U8", tensor.shape, tensor.data, tensor.file)

    rewrite(tmp_path, edit)
    ok(checkpoint, dtypes=(torch.float32,))


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dialect", ["N", "M"])
def test_globals_of_every_rank_and_dtype(
    tmp_path: Path, dialect: str, shape: tuple[int, ...], dtype: str
) -> None:
    checkpoint = small(tmp_path, dialect)
    part = GLOBALS[dialect]

    def edit(tensors: dict[str, Any]) -> None:
        for name, tensor in list(tensors.items()):
            if name.endswith(part):
                # A BF16 value is the upper half of the fp32 value of the same number.
                data = tensor.data if dtype == "F32" else tensor.data[2:]
                tensors[name] = RawTensor(dtype, shape, data, tensor.file)

    rewrite(tmp_path, edit)

    def truth(layer: int, expert: int, projection: str) -> Any:
        codes = checkpoint.codes(layer, expert, projection)
        assert codes.global_scale is not None
        bits = np.array([codes.global_scale], np.float32).view(np.uint32)
        bits = bits if dtype == "F32" else bits & np.uint32(0xFFFF0000)
        return codes._replace(global_scale=bits.view(np.float32)[0])

    ok(checkpoint, truth=truth, dtypes=(torch.float32,))


def test_globals_of_several_ranks_in_one_layer(tmp_path: Path) -> None:
    checkpoint = small(tmp_path, "N")
    name = checkpoint.name(1, 0, "up", "weight_global_scale")

    def edit(tensors: dict[str, Any]) -> None:
        tensors[name] = RawTensor("F32", (), tensors[name].data, tensors[name].file)

    rewrite(tmp_path, edit)
    ok(checkpoint, dtypes=())


@pytest.mark.parametrize(
    "dtype, shape", [("F16", (1,)), ("F64", (1,)), ("F32", (2,)), ("F32", (1, 2)), ("F32", (0,))]
)
@pytest.mark.parametrize("dialect", ["N", "M"])
def test_globals_of_another_shape_or_dtype_are_refused(
    tmp_path: Path, dialect: str, dtype: str, shape: tuple[int, ...]
) -> None:
    checkpoint = small(tmp_path, dialect)
    name = checkpoint.name(0, 3, "gate", GLOBALS[dialect])
    count = int(np.prod(shape)) * {"F16": 2, "F64": 8, "F32": 4}[dtype]

    def edit(tensors: dict[str, Any]) -> None:
        tensors[name] = RawTensor(dtype, shape, bytes(count), tensors[name].file)

    rewrite(tmp_path, edit)
    refuse(
        tmp_path, file=PRESENT, layer=0, experts="3", tensor=name, expected=PRESENT, found=PRESENT
    )


PARTS = [
    ("A", "qweight", "I64"),
    ("A", "qzeros", "U8"),
    ("P", "weight_packed", "U8"),
    ("P", "weight_shape", "I32"),
    ("N", "weight_packed", "I32"),
    ("N", "weight_scale", "F16"),
    ("M", "weight", "I32"),
    ("M", "weight_scale", "BF16"),
]


@pytest.mark.parametrize("dialect, part, dtype", PARTS)
def test_every_part_of_another_dtype_is_refused(
    tmp_path: Path, dialect: str, part: str, dtype: str
) -> None:
    checkpoint = small(tmp_path, dialect)
    name = checkpoint.name(1, 0, "up", part)
    size = {"I64": 8, "U8": 1, "I32": 4, "F16": 2, "BF16": 2}[dtype]

    def edit(tensors: dict[str, Any]) -> None:
        old = tensors[name]
        count = int(np.prod(old.shape)) * size
        tensors[name] = RawTensor(dtype, old.shape, bytes(count), old.file)

    rewrite(tmp_path, edit)
    refuse(tmp_path, file=PRESENT, layer=1, experts="0", tensor=name, found=dtype)


SHAPES = [(d, p) for d, p, _ in PARTS if p != "weight_shape"] + [
    ("A", "scales"),
    ("P", "weight_scale"),
]


@pytest.mark.parametrize("dialect, part", SHAPES)
@pytest.mark.parametrize("change", ["longer", "transposed", "flat", "deeper"])
def test_every_part_of_another_shape_is_refused(
    tmp_path: Path, dialect: str, part: str, change: str
) -> None:
    checkpoint = small(tmp_path, dialect)
    name = checkpoint.name(0, 2, "down", part)
    shapes: list[list[int]] = []

    def edit(tensors: dict[str, Any]) -> None:
        old = tensors[name]
        rows, columns = old.shape
        new = {
            "longer": (rows, 2 * columns),
            "transposed": (columns, rows),
            "flat": (rows * columns,),
            "deeper": (1, rows, columns),
        }[change]
        data = old.data * (2 if change == "longer" else 1)
        tensors[name] = RawTensor(old.dtype, new, data, old.file)
        shapes.extend(([rows, columns], list(new)))

    rewrite(tmp_path, edit)
    refuse(
        tmp_path,
        file=PRESENT,
        layer=0,
        experts="2",
        tensor=name,
        expected=str(shapes[0]),
        found=str(shapes[1]),
    )

"""Cases, section 4: bits are moved as they are, and what cannot be meant is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from case_checks import (
    PRESENT,
    assert_same,
    case,
    inputs,
    layer_weights,
    ok,
    refuse,
    right_routes,
    scale_values,
    small,
)

import loader
from loader.testing.checkpoint import TinyCheckpoint
from loader.testing.container import RawTensor, edit_tensor, rewrite

NAMES = ("gate", "up", "down")
GLOBALS = {"N": "weight_global_scale", "M": "weight_scale_2"}


def set_float(folder: Path, name: str, value: float) -> None:
    """Writes one fp32 value over a whole tensor."""
    edit_tensor(folder, name, lambda array: np.full_like(array, np.float32(value)))


# 4.1 Unusable scales


@pytest.mark.parametrize(
    "value, shown",
    [(0.0, "0"), (-0.0, "-0"), (-1.0, "-1"), (np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf")],
)
@pytest.mark.parametrize(
    "dialect, layer, expert, projection", [("N", 1, 3, "down"), ("M", 0, 0, "up")]
)
def test_a_global_scale_that_cannot_be_used(
    tmp_path: Path, dialect: str, layer: int, expert: int, projection: str, value: float, shown: str
) -> None:
    checkpoint = small(tmp_path, dialect)
    name = checkpoint.name(layer, expert, projection, GLOBALS[dialect])
    set_float(tmp_path, name, value)
    refuse(
        tmp_path,
        loader.ConversionError,
        plan=False,
        file=checkpoint.file_of(name).name,
        tensor=name,
        layer=layer,
        experts=str(expert),
        expected="positive finite",
        found=f"{shown} at [0, 0]",
    )


def test_the_case_itself(tmp_path: Path) -> None:
    checkpoint = case(tmp_path, "M")
    name = checkpoint.name(1, 4, "down", "weight_scale_2")
    set_float(tmp_path, name, -1)
    refuse(tmp_path, loader.ConversionError, plan=False, tensor=name, layer=1, experts="4")


def test_a_divisor_without_a_finite_reciprocal(tmp_path: Path) -> None:
    checkpoint = small(tmp_path, "N")
    name = checkpoint.name(1, 2, "down", "weight_global_scale")
    set_float(tmp_path, name, 1e-45)
    refuse(
        tmp_path,
        loader.ConversionError,
        plan=False,
        tensor=name,
        layer=1,
        experts="2",
        expected="reciprocal",
        found="1.4013e-45",
    )


def test_several_bad_globals_make_one_message(tmp_path: Path) -> None:
    checkpoint = small(tmp_path, "M", shards=1)
    for expert in (1, 2, 3):
        set_float(tmp_path, checkpoint.name(0, expert, "gate", "weight_scale_2"), 0)
    refuse(tmp_path, loader.ConversionError, plan=False, layer=0, found="2 more tensors alike")


@pytest.mark.parametrize("bits, shown", [(0x7E01, "nan"), (0x7C00, "inf"), (0xFC00, "-inf")])
@pytest.mark.parametrize("projection", NAMES)
def test_a_scale_of_awq_that_is_not_finite(
    tmp_path: Path, projection: str, bits: int, shown: str
) -> None:
    checkpoint = small(tmp_path, "A")
    name = checkpoint.name(1, 3, projection, "scales")
    group, column = (2, 40) if projection == "down" else (1, 80)

    def edit(array: np.ndarray) -> None:
        array.view(np.uint16)[group, column] = bits

    edit_tensor(tmp_path, name, edit)
    refuse(
        tmp_path,
        loader.ConversionError,
        plan=False,
        tensor=name,
        layer=1,
        experts="3",
        expected="finite",
        found=f"{shown} (0x{bits:04x}) at [{group}, {column}]",
    )


@pytest.mark.parametrize("dialect, bits", [("P", 0x7FC0), ("P", 0x7F80), ("N", 0x7F), ("M", 0xFF)])
def test_a_block_or_group_scale_that_is_not_finite(tmp_path: Path, dialect: str, bits: int) -> None:
    checkpoint = small(tmp_path, dialect)
    name = checkpoint.name(0, 1, "up", "weight_scale")

    def edit(array: np.ndarray) -> None:
        array[33, 1] = bits

    edit_tensor(tmp_path, name, edit)
    refuse(
        tmp_path,
        loader.ConversionError,
        plan=False,
        tensor=name,
        layer=0,
        experts="1",
        found="at [1, 33]",
    )


@pytest.mark.parametrize("dialect", ["A", "P", "N", "M"])
@pytest.mark.parametrize(
    "projection, column, group", [("gate", 0, 0), ("up", 95, 1), ("down", 63, 2)]
)
def test_zero_scales_are_legal_and_mean_zero(
    tmp_path: Path, dialect: str, projection: str, column: int, group: int
) -> None:
    checkpoint = small(tmp_path, dialect)
    name = checkpoint.name(1, 0, projection, "scales" if dialect == "A" else "weight_scale")

    def edit(array: np.ndarray) -> None:
        array[(group, column) if dialect == "A" else (column, group)] = 0

    edit_tensor(tmp_path, name, edit)
    (module,) = ok(checkpoint, dtypes=(torch.float32,))[1]
    weight = module.dequantize(0)[projection]
    size = checkpoint.group
    zeros = weight[column] == 0
    assert bool(zeros[group * size : (group + 1) * size].all()) and not bool(zeros.all())


@pytest.mark.parametrize("dialect", ["A", "M"])
def test_nonfinite_scales_that_the_user_keeps(tmp_path: Path, dialect: str) -> None:
    checkpoint = small(tmp_path, dialect)
    part = "scales" if dialect == "A" else "weight_scale_2"
    name = checkpoint.name(0, 2, "down", part)

    def edit(array: np.ndarray) -> None:
        array.reshape(-1)[:1] = np.nan

    edit_tensor(tmp_path, name, edit)
    experts = loader.load(tmp_path, policy=loader.Policy(nonfinite="warn"))
    (line,) = experts.report.nonfinite
    assert name in line and "nan" in line
    x, ids, router = inputs(checkpoint, 4)
    others = torch.where(ids == 2, 1, ids)
    assert experts[0](x, others, router).isfinite().all()
    assert experts[0](x, torch.full_like(ids, 2), router).isnan().any()


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


@pytest.mark.parametrize("dtype", ["F32", "F64", "I32", "U8", "F8_E4M3"])
@pytest.mark.parametrize("dialect", ["A", "P"])
def test_scales_of_another_dtype_are_refused(tmp_path: Path, dialect: str, dtype: str) -> None:
    checkpoint = small(tmp_path, dialect)
    name = checkpoint.name(1, 2, "down", "scales" if dialect == "A" else "weight_scale")
    sizes = {"F32": 4, "F64": 8, "I32": 4, "U8": 1, "F8_E4M3": 1}

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
        expected="F16 or BF16",
        found=f"{dtype} in 1 tensors",
    )


@pytest.mark.parametrize("dialect", ["A", "P", "ct-int4-asym"])
def test_single_precision_scales_are_refused_by_name(tmp_path: Path, dialect: str) -> None:
    checkpoint = small(tmp_path, dialect, scale_dtype="F32")
    refuse(
        tmp_path,
        file=PRESENT,
        layer=0,
        experts="0, 1, 2, 3",
        tensor=checkpoint.name(0, 0, "gate", "scales" if dialect == "A" else "weight_scale"),
        expected="F16 or BF16",
        found="F32 in 4 tensors",
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


# 4.3 Range


def ranged(folder: Path, gate_up: float, down: float) -> TinyCheckpoint:
    """Block scales from 2^-9 to 448 within expert 0, all 448 in expert 1, and given globals."""
    checkpoint = small(folder, "M", experts=2, top_k=2)

    def edit(tensors: dict[str, Any]) -> None:
        for name, tensor in list(tensors.items()):
            if ".experts." not in name:
                continue
            array = tensor.array()
            if name.endswith("weight_scale"):
                steps = np.arange(array.size) % 0x7E + 1  # every byte from 2^-9 to 448
                array[:] = 0x7E if ".experts.1." in name else steps.reshape(array.shape)
            elif name.endswith("weight_scale_2"):
                array[...] = down if ".down_proj." in name else gate_up
            tensors[name] = RawTensor(tensor.dtype, tensor.shape, array.tobytes(), tensor.file)

    rewrite(folder, edit)
    return checkpoint


@pytest.mark.parametrize("gate_up, down, scale", [(1e-6, 0.5, 128.0), (0.5, 1e-6, 2.0**-7)])
def test_block_scales_over_the_whole_range(
    tmp_path: Path, gate_up: float, down: float, scale: float
) -> None:
    checkpoint = ranged(tmp_path, gate_up, down)
    cards = ok(checkpoint, dtypes=())
    weights = layer_weights(checkpoint, 0, checkpoint.stored_codes)
    x = inputs(checkpoint, 64, scale=scale)[0].double().numpy()
    for weight in weights:
        gate, up = x @ weight["gate"].T, x @ weight["up"].T
        hidden = gate / (1 + np.exp(-gate)) * up
        down_ = hidden @ weight["down"].T
        assert max(np.abs(rounded).max() for rounded in (gate, up, hidden, down_)) < 6e4
        # Without the globals a product is beyond fp16.
        assert max(np.abs(gate).max() / gate_up, np.abs(down_).max() / down) > 6.6e4
    both = (torch.float16, torch.bfloat16, torch.float32)
    right_routes(cards[0], weights, checkpoint, both, scale=scale)


@pytest.mark.parametrize("gate_up, down", [(1e-6, 0.5), (0.5, 1e-6)])
def test_wide_says_what_fp16_cannot_hold(tmp_path: Path, gate_up: float, down: float) -> None:
    ranged(tmp_path, gate_up, down)
    projection = "gate" if gate_up < 1e-3 else "down"
    refuse(
        tmp_path,
        loader.ConversionError,
        plan=False,
        settings={"policy": loader.Policy(layout="wide")},
        cli=("--layout", "wide"),
        file=PRESENT,
        layer=0,
        experts="0",
        tensor=f"experts.0.{projection}_proj.weight_scale",
        expected="2**-14",
        found="at [0, ",
    )

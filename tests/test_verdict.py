"""What a value in the payload means for a load: refused with all that a user needs, or kept.

Positions are those of the checkpoint's own tensor, whatever slice or chunk it was found in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bank_oracle import (
    FLOATS,
    assert_banks,
    expected,
    least_staging,
    load,
    poisoned,
    reads_by,
    set_scale,
    set_zero,
    small,
)

import loader
from loader.errors import CheckpointError, ConversionError
from loader.testing.checkpoint import TinyCheckpoint
from loader.testing.container import edit_json, edit_tensor, raw, rewrite
from loader.testing.encode import from_bits

pytestmark = pytest.mark.parametrize("way", ["direct", "reference"], indirect=True)


@pytest.fixture(autouse=True)
def _every_way_in_memory_full_of_nan(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads_by(way, monkeypatch)
    poisoned(monkeypatch)


def first_scale(checkpoint: TinyCheckpoint, projection: str = "up", expert: int = 2) -> str:
    return checkpoint.name(0, expert, projection, checkpoint.writer.scale)


NOT_HELD = (
    "fp16 cannot hold a value that the layout or rounding stores in it; "
    "file model.safetensors, layer 0, experts 2, tensor {name}; "
    "expected 0, or finite with |x| >= 2**-14 and exact; "
    "layout='compact' with awq_rounding='exact' keeps the value as it is"
    ", found {value} at [1, 37] (group, column), 1 such values"
)

HELD_POLICIES = [
    {"layout": "wide"},
    {"layout": "record"},
    {"awq_rounding": "fused_bias"},
    {"awq_rounding": "fused_bias", "layout": "record"},
]


@pytest.mark.parametrize("policy", HELD_POLICIES, ids=lambda p: "-".join(p.values()))
@pytest.mark.parametrize(
    "dtype, bits, value",
    [
        ("F16", 0x03FF, "6.09756e-05 (0x03ff)"),  # the largest subnormal: below 2^-14
        ("F16", 0x8001, "-5.96046e-08 (0x8001)"),
        ("BF16", 0x3586, "9.98378e-07 (0x3586)"),  # 1e-6
        ("BF16", 0x4789, "70144 (0x4789)"),  # beyond fp16
        ("BF16", 0x3880 - 1, "6.07967e-05 (0x387f)"),
    ],
)
@pytest.mark.parametrize("dialect", ["awq-gemm", "ct-int4-asym"])
def test_a_scale_that_fp16_does_not_hold(
    dialect: str, dtype: str, bits: int, value: str, policy: dict[str, Any], tmp_path: Path
) -> None:
    checkpoint = small(tmp_path, dialect=dialect, scale_dtype=dtype)
    name = first_scale(checkpoint)
    set_scale(checkpoint, name, 1, 37, bits)
    with pytest.raises(ConversionError) as caught:
        loader.load(checkpoint.folder, policy=loader.Policy(**policy))
    assert str(caught.value) == NOT_HELD.format(name=name, value=value)
    # `compact` with `exact` keeps it, bit for bit.
    module = load(checkpoint)[0]
    assert int(module.w13_scales.view(torch.int16)[2, 1, 75]) & 0xFFFF == bits


@pytest.mark.parametrize("policy", HELD_POLICIES, ids=lambda p: "-".join(p.values()))
@pytest.mark.parametrize(
    "dtype, bits", [("F16", 0x0400), ("BF16", 0x3880), ("F16", 0), ("F16", 0x8000)]
)
def test_the_smallest_scale_that_fp16_holds(
    dtype: str, bits: int, policy: dict[str, Any], tmp_path: Path
) -> None:
    """2^-14 and both zeros."""
    checkpoint = small(tmp_path, scale_dtype=dtype)
    set_scale(checkpoint, first_scale(checkpoint), 1, 37, bits)
    module = loader.load(checkpoint.folder, policy=loader.Policy(**policy))[0]
    wanted = checkpoint.stored_codes(0, 2, "up")
    assert from_bits(wanted.scale[37:38, 1], dtype)[0] in (0.0, 2.0**-14)
    if policy.get("layout") == "record":
        stored = module.w13_metadata[2, 1, 75]
        half = int(from_bits(wanted.scale[37:38, 1], dtype).astype(np.float16).view(np.uint16)[0])
        assert stored.tolist() == [half & 0xFF, half >> 8, int(wanted.z[37, 1])]


@pytest.mark.parametrize("policy", HELD_POLICIES, ids=lambda p: "-".join(p.values()))
def test_an_infinite_bias(policy: dict[str, Any], tmp_path: Path) -> None:
    """fp16 holds 8192, but not 15 times it."""
    checkpoint = small(tmp_path, symmetric=False)
    zeros = [checkpoint.codes(0, 2, name).z for name in ("up", "down")]
    set_scale(checkpoint, first_scale(checkpoint), 1, 37, 0x7000)
    if int(zeros[0][37, 1]) * 8192 < 65520:
        set_zero(checkpoint, checkpoint.name(0, 2, "up", "qzeros"), 1, 37, 15)
    with pytest.raises(ConversionError) as caught:
        loader.load(checkpoint.folder, policy=loader.Policy(**policy))
    name = first_scale(checkpoint)
    assert str(caught.value) == NOT_HELD.format(name=name, value="8192 (0x7000)")
    set_zero(checkpoint, checkpoint.name(0, 2, "up", "qzeros"), 1, 37, 7)
    loader.load(checkpoint.folder, policy=loader.Policy(**policy))


@pytest.mark.parametrize("policy", [{}, *HELD_POLICIES], ids=lambda p: "-".join(p.values()) or "-")
@pytest.mark.parametrize(
    "dialect, dtype, bits, value",
    [
        ("awq-gemm", "F16", 0x7E00, "nan (0x7e00)"),
        ("awq-gemm", "F16", 0xFC00, "-inf (0xfc00)"),
        ("ct-int4-asym", "BF16", 0x7F80, "inf (0x7f80)"),
        ("ct-int4", "BF16", 0xFFC0, "nan (0xffc0)"),
    ],
)
def test_a_scale_that_is_not_finite(
    dialect: str, dtype: str, bits: int, value: str, policy: dict[str, Any], tmp_path: Path
) -> None:
    checkpoint = small(tmp_path, dialect=dialect, scale_dtype=dtype)
    name = first_scale(checkpoint)
    set_scale(checkpoint, name, 1, 37, bits)
    with pytest.raises(ConversionError) as caught:
        loader.load(checkpoint.folder, policy=loader.Policy(**policy))
    assert str(caught.value) == (
        f"a scale is not finite; file model.safetensors, layer 0, experts 2, tensor {name}; "
        f"expected finite scales, found {value} at [1, 37] (group, column), 1 such values"
    )


@pytest.mark.parametrize("layout", ["compact", "wide"])
@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("dialect", FLOATS)
def test_a_block_scale_that_is_nan(dialect: str, byte: int, layout: str, tmp_path: Path) -> None:
    checkpoint = small(tmp_path, dialect=dialect)
    name = first_scale(checkpoint, "down")
    set_scale(checkpoint, name, 3, 70, byte)
    with pytest.raises(ConversionError) as caught:
        load(checkpoint, layout)
    assert str(caught.value) == (
        f"a scale is not finite; file model.safetensors, layer 0, experts 2, tensor {name}; "
        f"expected finite scales, found e4m3 byte 0x{byte:02x} at [3, 70] (group, column), "
        "1 such values"
    )


@pytest.mark.parametrize("layout", ["compact", "wide"])
@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, float("nan"), float("inf"), 1e-45])
@pytest.mark.parametrize("dialect", FLOATS)
def test_a_global_that_cannot_be_used(
    dialect: str, value: float, layout: str, tmp_path: Path
) -> None:
    checkpoint = small(tmp_path, dialect=dialect)
    name = checkpoint.name(0, 1, "gate", checkpoint.writer.global_)
    edit_tensor(checkpoint.folder, name, lambda array: np.full_like(array, value))
    if value > 0 and np.isfinite(value) and dialect == "modelopt-nvfp4":
        # As a multiplier the smallest float is a number like any other, but fp16 cannot hold it.
        if layout == "compact":
            assert load(checkpoint, layout)[0].w13_globals[1, 0].item() == np.float32(value)
        else:
            with pytest.raises(ConversionError, match="fp16 cannot hold a value"):
                load(checkpoint, layout)
        return
    with pytest.raises(ConversionError) as caught:
        load(checkpoint, layout)
    shown = f"{np.float32(value):g}"
    assert str(caught.value) == (
        f"a global scale cannot be used; file model.safetensors, layer 0, experts 1, tensor {name};"
        " expected a positive finite number (as a divisor, one with a finite reciprocal), found "
        f"{shown} at [0, 0] (group, column), 1 such values"
    )


@pytest.mark.parametrize("projection", ["gate", "up", "down"])
@pytest.mark.parametrize("factor", [1e-5, 1e7])
@pytest.mark.parametrize("dialect", FLOATS)
def test_a_product_that_wide_does_not_hold(
    dialect: str, factor: float, projection: str, tmp_path: Path
) -> None:
    checkpoint = small(tmp_path, dialect=dialect)
    name = checkpoint.name(0, 3, projection, checkpoint.writer.global_)
    by = np.float32(1 / factor if checkpoint.writer.divisor else factor)
    edit_tensor(checkpoint.folder, name, lambda array: array * by)
    codes = checkpoint.stored_codes(0, 3, projection)
    block = from_bits(codes.scale, "F8_E4M3")
    value = block / codes.global_scale if checkpoint.writer.divisor else block * codes.global_scale
    lost = (np.abs(value) < 2.0**-14) | (np.abs(value) >= 65520)
    assert lost.any()
    column, group = min(np.argwhere(lost).tolist(), key=lambda at: (at[1], at[0]))
    with pytest.raises(ConversionError) as caught:
        load(checkpoint, "wide")
    error = caught.value
    assert error.tensor == checkpoint.name(0, 3, projection, checkpoint.writer.scale)
    assert (error.layer, error.experts) == (0, "3")
    first = f"{value[column, group]:g} at [{group}, {column}] (group, column)"
    assert str(error.found).startswith(first)
    assert_banks(load(checkpoint)[0], changed(checkpoint, expected(checkpoint, 0)))


def changed(checkpoint: TinyCheckpoint, banks: dict[str, Any]) -> dict[str, Any]:
    """Expected banks with the globals as the file has them now."""
    for expert in range(checkpoint.experts):
        stored = [
            checkpoint.stored_codes(0, expert, n).global_scale for n in ("gate", "up", "down")
        ]
        banks["w13_globals"][expert], banks["w2_globals"][expert] = stored[:2], stored[2:]
    return banks


@pytest.mark.parametrize("staging", [None, "least"])
@pytest.mark.parametrize("projection", ["gate", "down"])
@pytest.mark.parametrize("dialect", ["awq-gptqmodel", "ct-int4-asym"])
def test_a_zero_point_that_contradicts_symmetric(
    dialect: str, projection: str, staging: str | None, tmp_path: Path
) -> None:
    """The position is that of the whole tensor."""
    checkpoint = small(tmp_path, dialect=dialect, symmetric=dialect == "awq-gptqmodel", hidden=160)
    if dialect == "ct-int4-asym":
        edit_json(checkpoint.folder, "config.json", say_symmetric)
    for expert in range(4):
        for each in ("gate", "up", "down"):
            name = checkpoint.name(0, expert, each, checkpoint.writer.zeros)
            edit_tensor(checkpoint.folder, name, lambda a: np.full_like(a, -0x77777778))
    name = checkpoint.name(0, 2, projection, checkpoint.writer.zeros)
    if dialect == "awq-gptqmodel":
        set_zero(checkpoint, name, 2, 117, 11)
    else:

        def edit(array: np.ndarray[Any, Any]) -> None:
            word = array.view(np.uint32)[117 // 8, 2]
            array.view(np.uint32)[117 // 8, 2] = word ^ np.uint32((8 ^ 11) << 4 * (117 % 8))

        edit_tensor(checkpoint.folder, name, edit)
    budget = {} if staging is None else {"staging_bytes": least_staging(checkpoint)}
    with pytest.raises(CheckpointError) as caught:
        load(checkpoint, **budget)
    assert str(caught.value) == (
        "a zero point contradicts the config, which says symmetric; file model.safetensors, layer "
        f"0, experts 2, tensor {name}; expected zero points of 8 everywhere, found 11 at [2, 117] "
        "(group, column), 1 such values"
    )


def say_symmetric(config: dict[str, Any]) -> None:
    for group in config["quantization_config"]["config_groups"].values():
        group["weights"]["symmetric"] = True


@pytest.mark.parametrize("projection", ["gate", "down"])
@pytest.mark.parametrize("dialect", ["awq-gemm", "ct-int4-asym", "ct-nvfp4"])
def test_the_position_does_not_depend_on_staging_or_slice(
    dialect: str, projection: str, tmp_path: Path
) -> None:
    """A bad value is shown where it stands in the tensor of the file."""
    checkpoint = small(tmp_path, dialect=dialect, hidden=192, intermediate=256)
    name = first_scale(checkpoint, projection)
    bits, group = (0x7F, 11) if dialect in FLOATS else (0x7FC1, 5)  # in the slice of rank 1
    set_scale(checkpoint, name, group, 150, bits)
    found = set()
    for settings_ in (
        {},
        {"staging_bytes": least_staging(checkpoint)},
        {"shard": loader.Shard(tp_rank=1, tp_size=2)},
        {"shard": loader.Shard(expert_ids=(3, 2))},
    ):
        with pytest.raises(ConversionError) as caught:
            load(checkpoint, **settings_)
        assert (caught.value.tensor, caught.value.experts) == (name, "2")
        found.add(str(caught.value.found))
    assert len(found) == 1 and f"at [{group}, 150] (group, column)" in found.pop()


def test_weight_shape_that_disagrees(tmp_path: Path) -> None:
    checkpoint = small(tmp_path, dialect="ct-int4", fused=False)
    name = checkpoint.name(0, 3, "down", "weight_shape")
    edit_tensor(checkpoint.folder, name, lambda array: np.array([128, 200]))
    with pytest.raises(CheckpointError) as caught:
        load(checkpoint)
    assert caught.value.what == "weight_shape disagrees with the packed tensor"
    assert (caught.value.tensor, caught.value.experts) == (name, "3")
    assert caught.value.expected == "[128, 192] as packed"
    assert str(caught.value.found).startswith("200 at [1]")


@pytest.mark.parametrize("index, good", [("i // g", True), ("-1", True), ("reversed", False)])
def test_g_idx(index: str, good: bool, tmp_path: Path) -> None:
    checkpoint = small(tmp_path, dialect="awq-gptqmodel")
    of_row = {
        "i // g": lambda k: np.arange(k, dtype=np.int32) // 32,
        "-1": lambda k: np.full(k, -1, np.int32),
        "reversed": lambda k: (np.arange(k, dtype=np.int32) // 32)[::-1].copy(),
    }
    added: dict[str, Any] = {}

    def edit(tensors: dict[str, Any]) -> None:
        for expert in range(4):
            for projection in ("gate", "up", "down"):
                k = checkpoint.size(projection)[1]
                bad = (expert, projection) == (1, "down")
                values = of_row[index if bad else "i // g"](k)
                added[checkpoint.name(0, expert, projection, "g_idx")] = raw(values)
        tensors.update(added)

    rewrite(checkpoint.folder, edit)
    if good:
        assert_banks(load(checkpoint)[0], expected(checkpoint, 0))
        return
    with pytest.raises(CheckpointError) as caught:
        load(checkpoint)
    assert caught.value.what == "the group index reorders the rows"
    assert caught.value.tensor == checkpoint.name(0, 1, "down", "g_idx")
    assert str(caught.value.found).startswith("5 at [0]")


@pytest.mark.parametrize("dialect", ["awq-gemm", *FLOATS])
def test_warn_keeps_the_value_and_says_so(dialect: str, tmp_path: Path) -> None:
    checkpoint = small(tmp_path, dialect=dialect)
    name = first_scale(checkpoint)
    set_scale(checkpoint, name, 1, 37, 0x7F if dialect in FLOATS else 0x7E01)
    experts = loader.load(checkpoint.folder, policy=loader.Policy(nonfinite="warn"))
    assert len(experts.report.nonfinite) == 1 and name in experts.report.nonfinite[0]
    gate, up = experts[0].dequantize(2)["gate"], experts[0].dequantize(2)["up"]
    assert gate.isfinite().all() and not up[37].isfinite().all()
    assert up[torch.arange(len(up)) != 37].isfinite().all()

"""Cases, section 4: bits are moved as they are, and what cannot be meant is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from case_checks import (
    PRESENT,
    case,
    inputs,
    layer_weights,
    ok,
    refuse,
    right_routes,
    small,
)
from case_values import GLOBALS, NAMES, set_float

import loader
from loader.testing.checkpoint import TinyCheckpoint
from loader.testing.container import RawTensor, edit_tensor, rewrite

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


@pytest.mark.parametrize("layout", ["compact", "wide"])
@pytest.mark.parametrize("dialect", ["N", "M"])
@pytest.mark.parametrize("part", ["block", "global"])
def test_what_the_user_keeps_is_kept_in_every_layout(
    tmp_path: Path, way: str, dialect: str, part: str, layout: str
) -> None:
    """Kept once and listed once: the product with a NaN is no second fault of `wide`."""
    checkpoint = small(tmp_path, dialect)
    name = checkpoint.name(1, 2, "up", "weight_scale" if part == "block" else GLOBALS[dialect])

    def edit(array: np.ndarray) -> None:
        array.reshape(-1)[:1] = 0x7F if part == "block" else np.nan

    edit_tensor(tmp_path, name, edit)
    policy = loader.Policy(nonfinite="warn", layout=layout)
    experts = loader.load(tmp_path, policy=policy)
    (line,) = experts.report.nonfinite
    assert name in line and "layer 1" in line and "experts 2" in line
    found = experts[1].dequantize(2)["up"].isnan()
    assert found[0, :16].all() if part == "block" else found.any()
    assert not experts[1].dequantize(1)["up"].isnan().any()
    refuse(
        tmp_path,
        loader.ConversionError,
        plan=False,
        settings={"policy": loader.Policy(layout=layout)},
        cli=("--layout", layout),
        tensor=name,
    )


@pytest.mark.parametrize("dialect", ["A", "P", "N", "M"])
@pytest.mark.parametrize("codes", [False, True])
def test_an_expert_of_nothing_but_zeros(tmp_path: Path, dialect: str, codes: bool) -> None:
    """Zero scales, or zero codes as well, are legal: such an expert adds exactly nothing."""
    checkpoint = small(tmp_path, dialect)
    scales = "scales" if dialect == "A" else "weight_scale"
    words = {"A": "qweight", "P": "weight_packed", "N": "weight_packed", "M": "weight"}[dialect]
    for projection in NAMES:
        for part in (scales, words) if codes else (scales,):
            edit_tensor(tmp_path, checkpoint.name(1, 3, projection, part), np.zeros_like)
    layer = loader.load(tmp_path)[1]
    assert not any(weight.any() for weight in layer.dequantize(3).values())
    x, ids, router = inputs(checkpoint, 9)
    assert not layer(x, torch.full_like(ids, 3), router).any()
    assert layer(x, torch.zeros_like(ids), router).any()


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

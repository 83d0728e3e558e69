"""Cases, section 2: fused experts, whose shapes and names alone say which way they lie."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from case_checks import PRESENT, case, ok, refuse, small
from case_names import drop

from loader.testing.container import RawTensor, rewrite

# 2.3 Fused experts with equal dimensions

GEOMETRIES = [(512, 256), (256, 256), (128, 96)]


@pytest.mark.parametrize("hidden, intermediate", GEOMETRIES)
@pytest.mark.parametrize("dialect", ["P", "N", "A", "M", "ct-int4-asym"])
def test_fused_experts(tmp_path: Path, dialect: str, hidden: int, intermediate: int) -> None:
    group = {} if dialect in ("N", "M") else {"group": 32}
    checkpoint = case(
        tmp_path,
        dialect,
        hidden=hidden,
        intermediate=intermediate,
        experts=3,
        layers=1,
        shards=1,
        fused=True,
        **group,
    )
    ok(checkpoint, dtypes=())


@pytest.mark.parametrize("globals_", ["E", "E1", "E2"])
@pytest.mark.parametrize("dialect", ["N", "M"])
def test_globals_of_fused_experts(tmp_path: Path, dialect: str, globals_: str) -> None:
    ok(small(tmp_path, dialect, fused=True, fused_globals=globals_), dtypes=())


def transpose(folder: Path, pattern: str) -> None:
    """Swaps the last two axes of the tensors that match."""

    def edit(tensors: dict[str, Any]) -> None:
        for name, tensor in tensors.items():
            if re.fullmatch(pattern, name):
                turned = np.ascontiguousarray(tensor.array().swapaxes(1, 2))
                tensors[name] = RawTensor(tensor.dtype, turned.shape, turned.tobytes(), tensor.file)

    rewrite(folder, edit)


@pytest.mark.parametrize("hidden, intermediate", GEOMETRIES)
@pytest.mark.parametrize("projection", ["gate_up", "down"])
@pytest.mark.parametrize("dialect", ["P", "N"])
def test_transposed_fused_experts_are_refused(
    tmp_path: Path, dialect: str, projection: str, hidden: int, intermediate: int
) -> None:
    group = {} if dialect == "N" else {"group": 32}
    case(
        tmp_path,
        dialect,
        hidden=hidden,
        intermediate=intermediate,
        experts=2,
        layers=1,
        shards=1,
        fused=True,
        **group,
    )
    transpose(tmp_path, rf".*experts\.{projection}_proj\.(weight_packed|weight_scale)")
    tensor = f"experts.{projection}_proj.weight"
    refuse(tmp_path, file=PRESENT, layer=0, tensor=tensor, expected="[2, ", found="[2, ")


@pytest.mark.parametrize("projection", ["gate_up", "down"])
@pytest.mark.parametrize("dialect", ["P", "N", "M", "A"])
@pytest.mark.parametrize("part", ["", ".weight"])
def test_an_unquantized_fused_tensor_in_a_quantized_layer(
    tmp_path: Path, dialect: str, projection: str, part: str
) -> None:
    checkpoint = small(tmp_path, dialect, fused=True)
    drop(tmp_path, rf".*layers\.1\..*experts\.{projection}_proj\..*")
    name = f"model.layers.1.mlp.experts.{projection}_proj{part}"
    out, columns = (64, 96) if projection == "down" else (192, 64)
    plain = RawTensor("BF16", (4, out, columns), bytes(4 * out * columns * 2))
    rewrite(tmp_path, lambda tensors: tensors.update({name: plain}))
    refuse(tmp_path, file=PRESENT, layer=1, tensor=name, found="BF16")
    ok(checkpoint, layers=[0], dtypes=())


@pytest.mark.parametrize("dialect", ["P", "A"])
def test_wholly_unquantized_fused_experts_without_an_exclusion(
    tmp_path: Path, dialect: str
) -> None:
    small(tmp_path, dialect, fused=True, extra_layers=1, config={"num_hidden_layers": 3})
    refuse(tmp_path, file="config.json", layer=2, tensor="experts", expected="quantized")


def test_two_namings_in_one_layer(tmp_path: Path) -> None:
    checkpoint = small(tmp_path, "P", fused=True, shards=1)
    extra = "model.layers.0.mlp.experts.0.gate_proj.weight_packed"

    def edit(tensors: dict[str, Any]) -> None:
        one = tensors[checkpoint.name(0, 0, "gate", "weight_packed")]
        half = one.array()[0, :96]
        tensors[extra] = RawTensor(one.dtype, half.shape, half.tobytes(), one.file)

    rewrite(tmp_path, edit)
    refuse(tmp_path, file=PRESENT, layer=0, expected="one family", found="experts.{expert}")

"""Cases, section 4.4: zero points that are absent, empty or asymmetric."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from case_checks import PRESENT, ok, refuse, small

import loader
from loader.testing.checkpoint import TinyCheckpoint
from loader.testing.container import RawTensor, edit_json, edit_tensor, rewrite


def take_away(folder: Path, part: str, layer: int | None = None) -> None:
    """Removes one part of all experts."""

    def edit(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            inside = layer is None or f".layers.{layer}." in name
            if name.endswith(f".{part}") and ".experts." in name and inside:
                del tensors[name]

    rewrite(folder, edit)


def eights(checkpoint: TinyCheckpoint, layers: tuple[int, ...]) -> Any:
    """The generated numbers with zero points of 8 in some layers."""

    def truth(layer: int, expert: int, projection: str) -> Any:
        codes = checkpoint.codes(layer, expert, projection)
        assert codes.z is not None
        return codes._replace(z=np.full_like(codes.z, 8)) if layer in layers else codes

    return truth


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("shape", [(0,), (0, 12), (3, 0)])
def test_zero_points_that_are_stored_empty(
    tmp_path: Path, layer: int, shape: tuple[int, ...]
) -> None:
    checkpoint = small(tmp_path, "A")

    def edit(tensors: dict[str, Any]) -> None:
        for name, tensor in list(tensors.items()):
            if f".layers.{layer}.mlp.experts." in name and name.endswith("qzeros"):
                tensors[name] = RawTensor("I32", shape, b"", tensor.file)

    rewrite(tmp_path, edit)
    ok(checkpoint, truth=eights(checkpoint, (layer,)), dtypes=(torch.float32,))


@pytest.mark.parametrize("shape", [(0,), (0, 2), (3, 0)])
@pytest.mark.parametrize("dialect, part", [("A", "qzeros"), ("ct-int4", "weight_zero_point")])
def test_a_load_with_empty_zero_points_is_verified(
    tmp_path: Path, dialect: str, part: str, shape: tuple[int, ...]
) -> None:
    checkpoint = small(tmp_path, dialect)

    def edit(tensors: dict[str, Any]) -> None:
        (file, *_) = {tensor.file for tensor in tensors.values()}
        for expert in range(checkpoint.experts):
            for projection in ("gate", "up", "down"):
                name = checkpoint.name(1, expert, projection, part)
                tensors[name] = RawTensor("I32", shape, b"", file)

    rewrite(tmp_path, edit)
    experts = loader.load(tmp_path)
    assert loader.verify(experts, tmp_path, samples=64).ok
    experts[1].w13_zeros.view(-1)[0] ^= 0x70
    assert not loader.verify(experts, tmp_path, samples=1 << 20).ok


@pytest.mark.parametrize("experts", ["3", "012"])
def test_zero_points_that_only_some_experts_store_empty(tmp_path: Path, experts: str) -> None:
    checkpoint = small(tmp_path, "A")

    def edit(tensors: dict[str, Any]) -> None:
        for expert in experts:
            name = checkpoint.name(1, int(expert), "up", "qzeros")
            tensors[name] = RawTensor("I32", (0,), b"", tensors[name].file)

    rewrite(tmp_path, edit)
    refuse(tmp_path, file=PRESENT, layer=1, tensor="up_proj.qzeros", experts=", ".join(experts))


def test_zero_points_that_only_one_projection_stores_empty(tmp_path: Path) -> None:
    checkpoint = small(tmp_path, "A")

    def edit(tensors: dict[str, Any]) -> None:
        for expert in range(4):
            name = checkpoint.name(0, expert, "up", "qzeros")
            tensors[name] = RawTensor("I32", (0,), b"", tensors[name].file)

    rewrite(tmp_path, edit)
    refuse(tmp_path, file=PRESENT, layer=0, found="gate, down")


@pytest.mark.parametrize("scale_dtype", ["F16", "BF16"])
def test_no_zero_points_where_the_config_says_so(tmp_path: Path, scale_dtype: str) -> None:
    checkpoint = small(tmp_path, "A", symmetric=True, scale_dtype=scale_dtype)
    assert not [name for name in checkpoint.tensor_names() if name.endswith("qzeros")]
    ok(checkpoint, dtypes=(torch.float32,))


def test_stored_eights_where_the_config_says_none(tmp_path: Path) -> None:
    checkpoint = small(tmp_path, "awq-gptqmodel", symmetric=True)
    assert [name for name in checkpoint.tensor_names() if name.endswith("qzeros")]
    ok(checkpoint, dtypes=(torch.float32,))


@pytest.mark.parametrize(
    "projection, group, column", [("gate", 0, 0), ("up", 1, 95), ("down", 2, 63)]
)
def test_other_zero_points_where_the_config_says_none(
    tmp_path: Path, projection: str, group: int, column: int
) -> None:
    checkpoint = small(tmp_path, "awq-gptqmodel", symmetric=True)
    name = checkpoint.name(1, 2, projection, "qzeros")
    nibble = (0, 4, 1, 5, 2, 6, 3, 7)[column % 8]

    def edit(array: np.ndarray) -> None:
        array.view(np.uint32)[group, column // 8] ^= np.uint32((8 ^ 5) << 4 * nibble)

    edit_tensor(tmp_path, name, edit)
    refuse(
        tmp_path,
        plan=False,
        file=PRESENT,
        tensor=name,
        layer=1,
        experts="2",
        expected="8",
        found=f"5 at [{group}, {column}]",
    )


def test_no_zero_points_where_the_config_promises_them(tmp_path: Path) -> None:
    checkpoint = small(tmp_path, "A")
    take_away(tmp_path, "qzeros")
    name = checkpoint.name(0, 0, "gate", "qzeros")
    refuse(tmp_path, file=PRESENT, layer=0, experts="0, 1, 2, 3", tensor=name, found="gate.qzeros")


def say(folder: Path, symmetric: bool) -> None:
    """Changes ``symmetric`` of the one config group."""

    def edit(content: dict[str, Any]) -> None:
        group = content["quantization_config"]["config_groups"]["group_0"]
        group["weights"]["symmetric"] = symmetric

    edit_json(folder, "config.json", edit)


@pytest.mark.parametrize("group", [32, 64])
def test_asymmetric_packed_integers(tmp_path: Path, group: int) -> None:
    ok(small(tmp_path, "ct-int4-asym", group=group), dtypes=(torch.float32,))


def test_asymmetric_without_zero_points(tmp_path: Path) -> None:
    checkpoint = small(tmp_path, "P")
    say(tmp_path, symmetric=False)
    name = checkpoint.name(0, 0, "gate", "weight_zero_point")
    refuse(tmp_path, file=PRESENT, layer=0, experts="0, 1, 2, 3", tensor=name)


def test_symmetric_with_zero_points_of_eight(tmp_path: Path) -> None:
    checkpoint = small(tmp_path, "ct-int4-asym")
    say(tmp_path, symmetric=True)

    def edit(tensors: dict[str, Any]) -> None:
        for name, tensor in list(tensors.items()):
            if name.endswith("weight_zero_point"):
                data = b"\x88" * len(tensor.data)
                tensors[name] = RawTensor("I32", tensor.shape, data, tensor.file)

    rewrite(tmp_path, edit)
    ok(checkpoint, dtypes=(torch.float32,))


def test_symmetric_with_other_zero_points(tmp_path: Path) -> None:
    checkpoint = small(tmp_path, "ct-int4-asym")
    say(tmp_path, symmetric=True)
    first = checkpoint.name(0, 0, "down", "weight_zero_point")
    refuse(
        tmp_path,
        plan=False,
        file=PRESENT,
        tensor=first,
        layer=0,
        experts="0",
        expected="8",
        found="more tensors alike",
    )

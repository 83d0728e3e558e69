"""Tables: completeness, dtypes and shapes of one layer, known from headers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loader.checkpoint.family import DOWN, GATE, GATE_UP, PROJECTIONS, UP
from loader.checkpoint.folder import open_checkpoint
from loader.checkpoint.source import LocalSource
from loader.checkpoint.tables import LayerSource, some_of
from loader.errors import CheckpointError, LoaderError
from loader.testing.checkpoint import TinyCheckpoint, tiny_checkpoint
from loader.testing.container import RawTensor, byte_count, edit_json, read_header, rewrite

TINY: dict[str, Any] = {
    "hidden": 64,
    "intermediate": 96,
    "experts": 5,
    "layers": 1,
    "attention": False,
}
DIALECTS = ("awq-gemm", "awq-gptqmodel", "ct-int4", "ct-int4-asym", "ct-nvfp4", "modelopt-nvfp4")


def tiny(folder: Path, dialect: str, **settings_: Any) -> TinyCheckpoint:
    group = {} if "nvfp4" in dialect else {"group": 32}
    return tiny_checkpoint(folder, dialect=dialect, **{**TINY, **group, **settings_})


def resolve(folder: Path) -> LayerSource:
    with LocalSource(folder) as source:
        checkpoint = open_checkpoint(source)
        found = checkpoint.resolver.resolve(0)
    names = checkpoint.catalog.names
    for table in found.tables:
        for place, row in enumerate(table.rows.tolist()):
            assert checkpoint.catalog.projection[row] == table.projection
            assert found.fused or f".experts.{place}." in names[row], "rows in expert order"
    return found


@pytest.mark.parametrize("order", ["name", "dtype", "random"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_tables_of_single_experts(tmp_path: Path, dialect: str, order: str) -> None:
    checkpoint = tiny(tmp_path, dialect, order=order, shards=3)
    source = resolve(tmp_path)
    assert not source.fused
    header = {n: e for path in checkpoint.files() for n, e in read_header(path)[0].items()}
    wanted: dict[tuple[int, tuple[int, ...]], int] = {}
    for name, entry in header.items():
        if ".experts.0." in name and not name.endswith(("input_scale", "input_global_scale")):
            word = name.split(".")[-2].removesuffix("_proj")
            key = (PROJECTIONS.index(word), tuple(entry["shape"]))
            wanted[key] = wanted.get(key, 0) + 1
    found: dict[tuple[int, tuple[int, ...]], int] = {}
    for table in source.tables:
        key = (table.projection, table.shape)
        found[key] = found.get(key, 0) + 1
        assert len(table.rows) == len(set(table.rows.tolist())) == 5
    assert found == wanted


@pytest.mark.parametrize("dialect", DIALECTS)
def test_tables_of_fused_experts(tmp_path: Path, dialect: str) -> None:
    tiny(tmp_path, dialect, fused=True)
    source = resolve(tmp_path)
    assert source.fused and {table.projection for table in source.tables} == {GATE_UP, DOWN}
    shapes = {(t.projection, t.role): t.shape for t in source.tables}
    assert all(len(t.rows) == 1 for t in source.tables)
    assert all(5 not in shape[:1] for shape in shapes.values()), "the leading axis is taken off"


def change(folder: Path, name: str, dtype: str | None, shape: tuple[int, ...] | None) -> None:
    """Rewrites one tensor with another dtype or shape, zeros inside."""

    def edit(tensors: dict[str, Any]) -> None:
        old = tensors[name]
        new_dtype, new_shape = dtype or old.dtype, old.shape if shape is None else shape
        data = bytes(byte_count(new_dtype, new_shape))
        tensors[name] = RawTensor(new_dtype, new_shape, data, old.file)

    rewrite(folder, edit)


def refused(folder: Path) -> LoaderError:
    with pytest.raises(CheckpointError) as caught:
        resolve(folder)
    error = caught.value
    assert error.layer == 0 and error.file and error.tensor and error.expected and error.found
    return error


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    dialect=st.sampled_from(DIALECTS),
    expert=st.integers(0, 4),
    projection=st.sampled_from(["gate", "up", "down"]),
    which=st.integers(0, 9),
    axis=st.integers(0, 1),
    by=st.sampled_from([-1, 1, 8, "double", "drop", "insert", "dtype"]),
)
def test_any_tensor_of_another_form_is_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory,
    dialect: str,
    expert: int,
    projection: str,
    which: int,
    axis: int,
    by: int | str,
) -> None:
    folder = tmp_path_factory.mktemp("ck")
    checkpoint = tiny(folder, dialect)
    module = checkpoint.name(0, expert, projection, "")
    names = [n for n in checkpoint.tensor_names() if n.startswith(module) and "input" not in n]
    name = sorted(names)[which % len(names)]
    shape = list(checkpoint.tensor(name).shape)
    dtype = None
    if by == "dtype":
        dtype = "F64"
    elif by == "insert":
        shape.insert(axis, 3)
    elif by == "drop" and shape:
        shape.pop(min(axis, len(shape) - 1))
        shape = shape or [7]
    elif shape:
        at = min(axis, len(shape) - 1)
        shape[at] = 2 * shape[at] if by == "double" else shape[at] + int(by if by != "drop" else 1)
    else:
        shape = [2]
    if 0 in shape or (shape in ([], [1], [1, 1]) and len(checkpoint.tensor(name).shape) < 2):
        return  # empty zero points and globals of these shapes have tests of their own
    change(folder, name, dtype, tuple(shape))
    error = refused(folder)
    assert error.tensor == name and error.experts == str(expert)
    shown = dtype or str(shape)
    assert shown in str(error.found)


def test_several_wrong_tensors_make_one_message(tmp_path: Path) -> None:
    checkpoint = tiny(tmp_path, "awq-gemm")
    for expert in (1, 3, 4):
        change(tmp_path, checkpoint.name(0, expert, "up", "scales"), None, (4, 96))
    error = refused(tmp_path)
    assert error.experts == "1, 3, 4" and "2 more tensors" in str(error.found)
    assert "group 32 in the config, 16 in the file" in str(error.expected)


def test_all_missing_tensors_make_one_message(tmp_path: Path) -> None:
    checkpoint = tiny(tmp_path, "ct-nvfp4")
    gone = [
        checkpoint.name(0, expert, projection, part)
        for expert, projection, part in (
            (4, "up", "weight_global_scale"),
            (1, "up", "weight_global_scale"),
            (2, "down", "weight_packed"),
        )
    ]
    rewrite(tmp_path, lambda tensors: [tensors.pop(name) for name in gone] and None)
    error = refused(tmp_path)
    assert "(3)" in error.what and error.experts == "1, 2, 4" and error.tensor == gone[1]
    assert "no up.weight_global_scale of experts 1, 4" in str(error.found)
    assert "no down.weight_packed of experts 2" in str(error.found)


def test_a_missing_fused_part(tmp_path: Path) -> None:
    checkpoint = tiny(tmp_path, "modelopt-nvfp4", fused=True)
    name = checkpoint.name(0, 0, "gate", "weight_scale_2")
    rewrite(tmp_path, lambda tensors: tensors.pop(name) and None)
    error = refused(tmp_path)
    assert error.tensor == name and error.experts is None and "gate_up" in str(error.found)


@pytest.mark.parametrize("absent", ["hidden_size", "moe_intermediate_size"])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("fused", [False, True])
def test_sizes_come_from_the_tensors_where_the_config_has_none(
    tmp_path: Path, dialect: str, absent: str, fused: bool
) -> None:
    tiny(tmp_path, dialect, fused=fused)
    edit_json(tmp_path, "config.json", lambda content: content.pop(absent) and None)
    source = resolve(tmp_path)
    assert (source.hidden, source.intermediate) == (64, 96)


def test_gate_and_down_that_disagree_on_the_width(tmp_path: Path) -> None:
    checkpoint = tiny(tmp_path, "ct-int4")
    edit_json(tmp_path, "config.json", lambda c: c.pop("moe_intermediate_size") and None)
    for expert in range(5):
        change(tmp_path, checkpoint.name(0, expert, "down", "weight_packed"), None, (64, 16))
    error = refused(tmp_path)
    assert "intermediate size" in error.what and error.tensor.endswith("down_proj.weight_packed")
    assert ("96" in str(error.expected), error.found) == (True, "128")


def test_sizes_that_do_not_divide_into_words(tmp_path: Path) -> None:
    tiny(tmp_path, "awq-gemm")
    edit_json(tmp_path, "config.json", lambda c: c.update(moe_intermediate_size=100))
    with pytest.raises(CheckpointError) as caught:
        resolve(tmp_path)
    assert caught.value.layer == 0 and "multiples of 8" in str(caught.value.expected)
    assert "100" in str(caught.value.found)


def test_scale_dtypes_by_bank(tmp_path: Path) -> None:
    checkpoint = tiny(tmp_path, "awq-gemm")
    for expert in range(5):
        change(tmp_path, checkpoint.name(0, expert, "down", "scales"), "BF16", None)
    assert resolve(tmp_path).scale_dtypes == ("F16", "BF16")
    for expert in range(5):
        change(tmp_path, checkpoint.name(0, expert, "up", "scales"), "BF16", None)
    error = refused(tmp_path)
    assert (error.expected, error.found) == ("F16", "BF16")
    assert error.tensor == checkpoint.name(0, 0, "up", "scales")


def test_some_of_many() -> None:
    assert some_of(np.array([3])) == "3"
    assert some_of(np.arange(8)) == "0, 1, 2, 3, 4, 5, 6, 7"
    assert some_of(np.arange(10)) == "0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
    assert (GATE, UP, DOWN, GATE_UP) == (0, 1, 2, 3)

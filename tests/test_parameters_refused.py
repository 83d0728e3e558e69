"""Parameters that cannot be converted: refused before anything changes, each by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from load_fakes import (
    bits,
    parameters_of,
    quantization_of,
)
from parameters_fakes import DIALECTS, TABLES, Refused, make, module_with

import loader
from loader import CheckpointError, LoaderError, Shard, ShardError, UnsupportedError
from loader.parameters import read_parameters
from loader.testing.container import rewrite


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Refused:
    return Refused(monkeypatch)


# What is refused


@pytest.mark.parametrize("dialect", ["awq-gemm", "ct-int4-asym"])
def test_empty_zero_points_of_an_asymmetric_config_are_refused(
    tmp_path: Path, dialect: str, refused: Refused
) -> None:
    """Nothing stands in for what the config promises: no default zero point."""
    made = make(tmp_path, dialect)
    values = parameters_of(made, 0, Shard())
    for name in values:
        if "zero" in name:
            values[name] = values[name].new_empty((4, 0, 8))
    error = refused(values, quantization_of(made))
    assert error.tensor is not None and "zero" in error.tensor

    def empty(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            if "zero" in name:
                tensors[name] = np.zeros((0, 8), np.int32)

    rewrite(made.folder, empty)
    if dialect == "awq-gemm":
        # On disk, an AWQ layer with empty zero points is a symmetric one.
        assert loader.plan(made.folder).layers[0].zero_point == 8
        return
    with pytest.raises(CheckpointError, match="zero"):
        loader.load(made.folder)


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("bank", ["w13", "w2"])
def test_zero_points_of_one_bank_only_are_refused(
    tmp_path: Path, bank: str, empty: bool, refused: Refused
) -> None:
    """The other bank's would be left unset: all banks store them, or none."""
    made = make(tmp_path, "awq-gptqmodel")
    values = parameters_of(made, 0, Shard())
    name = f"{bank}_qzeros"
    if empty:
        values[name] = values[name].new_empty((4, 0))
    else:
        del values[name]
    error = refused(values, quantization_of(made))
    assert (error.layer, error.tensor) == (11, name)
    assert "zero points" in str(error)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_missing_parameter_is_named(tmp_path: Path, dialect: str, refused: Refused) -> None:
    made = make(tmp_path, dialect)
    values = parameters_of(made, 0, Shard())
    for name in values:
        without = {key: value for key, value in values.items() if key != name}
        if name.endswith(TABLES):
            read_parameters(module_with(without), quantization_of(made), 0, Shard())
            continue
        if "zero" in name and made.symmetric:
            continue
        error = refused(without, quantization_of(made))
        assert isinstance(error, CheckpointError), name
        assert (error.layer, error.tensor) == (11, name)


def test_a_module_without_experts_is_refused(tmp_path: Path, refused: Refused) -> None:
    made = make(tmp_path, "awq-gemm")
    error = refused({"weight": torch.ones(2)}, quantization_of(made))
    assert "w13_qweight" in str(error)
    assert "w13_qweight" in str(refused({}, quantization_of(made)))


@pytest.mark.parametrize("name", ["w13_bias", "w2_bias", "w13_weight_scale_3", "w2_", "w13_lora.A"])
@pytest.mark.parametrize("dialect", ["awq-gemm", "ct-nvfp4"])
def test_an_unknown_parameter_is_refused(
    tmp_path: Path, dialect: str, name: str, refused: Refused
) -> None:
    if "." in name:
        name = name.replace(".", "_")
    made = make(tmp_path, dialect)
    values = parameters_of(made, 0, Shard())
    error = refused({**values, name: torch.ones(4)}, quantization_of(made))
    assert (error.layer, error.tensor) == (11, name)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_parameters_of_another_format_are_refused(
    tmp_path: Path, dialect: str, refused: Refused
) -> None:
    made = make(tmp_path / "own", dialect)
    values = parameters_of(made, 0, Shard())
    for other in DIALECTS:
        if made.writer.codes == (foreign := make(tmp_path / other, other)).writer.codes and (
            made.writer.kind == foreign.writer.kind
        ):
            continue
        assert refused(values, quantization_of(foreign)).layer == 11


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_wrong_shape_is_refused(tmp_path: Path, dialect: str, refused: Refused) -> None:
    made = make(tmp_path, dialect, intermediate=96, experts=3)
    values = parameters_of(made, 0, Shard())
    for name, value in values.items():
        if name.endswith(TABLES):
            continue
        wrong = {
            "one expert less": value[:-1].contiguous(),
            "one axis more": value.unsqueeze(-1) if value.dim() > 2 else value[:, None, None],
            "flat": value.reshape(-1) if value.dim() > 1 else value.new_ones(()),
        }
        if value.dim() == 3:
            wrong["one row less"] = value[:, :-1].contiguous()
            wrong["one column less"] = value[:, :, :-1].contiguous()
            wrong["one row more"] = torch.cat((value, value[:, :1]), 1)
            wrong["swapped"] = value.transpose(1, 2).contiguous()
        for what, tensor in wrong.items():
            if tensor.shape == value.shape:
                continue
            error = refused({**values, name: tensor}, quantization_of(made))
            where = (name, what)
            assert error.layer == 11, where
            assert error.tensor in values or isinstance(error, ShardError), where
            assert error.expected is not None and error.found is not None, where


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_wrong_dtype_is_refused(tmp_path: Path, dialect: str, refused: Refused) -> None:
    made = make(tmp_path, dialect)
    values = parameters_of(made, 0, Shard())
    for name, value in values.items():
        if name.endswith(TABLES):
            continue
        for dtype in (torch.int8, torch.float64, torch.complex64):
            error = refused({**values, name: value.to(dtype)}, quantization_of(made))
            assert isinstance(error, CheckpointError)
            assert error.tensor == name, (name, dtype)
            assert error.layer == 11


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_parameter_that_is_not_contiguous_is_refused(
    tmp_path: Path, dialect: str, refused: Refused
) -> None:
    made = make(tmp_path, dialect)
    values = parameters_of(made, 0, Shard())
    for name, value in values.items():
        if name.endswith(TABLES):
            continue
        strided = torch.stack((value, value), -1)[..., 0]
        assert bits(strided) == bits(value) and not strided.is_contiguous()
        error = refused({**values, name: strided}, quantization_of(made))
        assert (error.layer, error.tensor) == (11, name)
        assert "contiguous" in str(error)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"bits": 8}, UnsupportedError),
        ({"version": "gemv"}, UnsupportedError),
        ({"quant_method": "gptq"}, UnsupportedError),
        ({"quant_method": None}, UnsupportedError),
        ({"group_size": 8}, LoaderError),
        ({"group_size": 64}, LoaderError),
        ({"group_size": 0}, CheckpointError),
        ({"group_size": "32"}, CheckpointError),
    ],
)
def test_a_quantization_that_is_not_loaded(
    tmp_path: Path, refused: Refused, change: dict[str, Any], error: type[LoaderError]
) -> None:
    made = make(tmp_path, "awq-gemm", hidden=96, intermediate=96)
    values = parameters_of(made, 0, Shard())
    assert isinstance(refused(values, {**quantization_of(made), **change}), error)


def test_no_quantization_at_all(tmp_path: Path, refused: Refused) -> None:
    made = make(tmp_path, "awq-gemm")
    values = parameters_of(made, 0, Shard())
    assert isinstance(refused(values, {}), UnsupportedError)
    assert isinstance(refused(values, None), UnsupportedError)


def test_a_slice_that_cannot_be_cut_so_is_refused(tmp_path: Path, refused: Refused) -> None:
    made = make(tmp_path, "awq-gemm", intermediate=80)
    values = parameters_of(made, 0, Shard())
    read_parameters(module_with(values), quantization_of(made), 0, Shard())
    made = make(tmp_path / "odd", "awq-gemm", intermediate=24)
    values = parameters_of(made, 0, Shard())
    error = refused(values, quantization_of(made), shard=Shard(tp_size=2))
    assert isinstance(error, ShardError) and error.layer == 11


def test_parameters_on_several_devices_are_refused(tmp_path: Path, refused: Refused) -> None:
    made = make(tmp_path, "awq-gemm")
    values = parameters_of(made, 0, Shard())
    for name in values:
        mixed = {**values, name: values[name].to("meta")}
        error = refused(mixed, quantization_of(made))
        assert error.layer == 11 and "meta" in str(error)
    refused({name: value.to("meta") for name, value in values.items()}, quantization_of(made))

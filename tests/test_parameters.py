"""Parameters on a module: what is read of them, and as what."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from load_fakes import (
    banks_of,
    parameters_of,
    quantization_of,
    same_bits,
)
from parameters_fakes import DIALECTS, TABLES, make, module_with

import loader
from loader import Shard
from loader.parameters import read_parameters

# What is read


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_is_found_is_what_the_checkpoint_has(tmp_path: Path, dialect: str) -> None:
    made = make(tmp_path, dialect)
    values = parameters_of(made, 0, Shard())
    found = read_parameters(module_with(values), quantization_of(made), 3, Shard())
    assert found.names == list(values)
    assert all(a is b for a, b in zip(found.tensors, values.values(), strict=True))
    source = found.source
    assert (source.layer, source.experts) == (3, made.experts)
    assert (source.hidden, source.intermediate) == (made.hidden, made.intermediate)
    assert (source.group13, source.group2) == (made.group, made.group)
    assert source.zeros_stored == made.zero_points
    assert found.zero_point == (8 if made.writer.kind == "int4" and not made.zero_points else None)
    read = [v for name, v in values.items() if not name.endswith(TABLES)]
    assert found.read_bytes == sum(tensor.nbytes for tensor in read)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_phase_is_that_of_the_shard(tmp_path: Path, dialect: str) -> None:
    more = {} if "nvfp4" in dialect else {"group": 128}
    made = make(tmp_path, dialect, intermediate=192, hidden=128, **more)
    for rank in range(4):
        shard = Shard(tp_size=4, tp_rank=rank)
        values = parameters_of(made, 0, shard)
        found = read_parameters(module_with(values), quantization_of(made), 0, shard)
        assert found.phase == 48 * rank % made.group
        assert found.source.intermediate == 48


@pytest.mark.parametrize("dialect", DIALECTS[:4])
def test_a_whole_row_as_group(tmp_path: Path, dialect: str) -> None:
    made = make(tmp_path, dialect, group=-1, intermediate=96)
    module = module_with(parameters_of(made, 0, Shard()))
    prepared = loader.prepare_module(module, quantization=quantization_of(made))
    assert same_bits(banks_of(prepared), banks_of(loader.load(tmp_path)))


def test_a_group_index_of_the_framework_is_not_read(tmp_path: Path) -> None:
    made = make(tmp_path, "awq-gemm")
    values = parameters_of(made, 0, Shard())
    values["w13_g_idx"] = torch.full((4, 64), 77, dtype=torch.int32)
    values["w2_g_idx"] = torch.empty(0)
    module = module_with(values)
    prepared = loader.prepare_module(module, quantization=quantization_of(made))
    assert same_bits(banks_of(prepared), banks_of(loader.load(tmp_path)))
    assert not list(module.named_buffers(recurse=False))


def test_empty_zero_points_are_absent_ones(tmp_path: Path) -> None:
    made = make(tmp_path, "ct-int4")
    values = parameters_of(made, 0, Shard())
    for bank in ("w13", "w2"):
        values[f"{bank}_weight_zero_point"] = torch.empty((4, 0), dtype=torch.int32)
    prepared = loader.prepare_module(module_with(values), quantization=quantization_of(made))
    assert same_bits(banks_of(prepared), banks_of(loader.load(tmp_path)))


def test_gate_and_up_scales_of_another_dtype_than_down(tmp_path: Path) -> None:
    """Each bank has a scale dtype of its own, as in a load."""
    made = make(tmp_path, "awq-gemm", scale_dtype="F16")
    values = parameters_of(made, 0, Shard())
    values["w2_scales"] = values["w2_scales"].bfloat16()
    prepared = loader.prepare_module(module_with(values), quantization=quantization_of(made))
    assert prepared.w13_scales.dtype == torch.float16
    assert prepared.w2_scales.dtype == torch.bfloat16


def test_the_device_is_that_of_the_codes(tmp_path: Path) -> None:
    made = make(tmp_path, "ct-nvfp4", input_scale=True)
    values = parameters_of(made, 0, Shard())
    elsewhere = {n: v.to("meta") if n.endswith(TABLES) else v for n, v in values.items()}
    ordered = dict(sorted(elsewhere.items(), key=lambda item: not item[0].endswith(TABLES)))
    prepared = loader.prepare_module(module_with(ordered), quantization=quantization_of(made))
    assert same_bits(banks_of(prepared), banks_of(loader.load(tmp_path)))

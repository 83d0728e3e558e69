"""Linears outside the experts are found from headers and held against config and format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from linear_oracle import decode, modules_of, quantization, tensors_of
from verify_fakes import copied, edit

from loader.checkpoint.folder import open_checkpoint
from loader.checkpoint.linears import LinearSource, find_linears
from loader.checkpoint.scheme import Role
from loader.checkpoint.source import LocalSource
from loader.errors import CheckpointError, LoaderError, UnsupportedError
from loader.testing.container import edit_json

FIXTURES = Path(__file__).parents[2] / "fixtures" / "checkpoints"
NOT_LOADED = {"qwen3moe-modelopt-int4-awq"}
CHECKPOINTS = sorted(p.name for p in FIXTURES.iterdir() if p.is_dir() and p.name not in NOT_LOADED)
AWQ, INT4, FP4 = "qwen3moe-awq-gemm-g128", "qwen3moe-ct-w4a16asym-g32", "qwen3moe-modelopt-nvfp4"
Q = "model.layers.1.self_attn.q_proj"
Tensors = dict[str, torch.Tensor]


def found_in(folder: Path) -> dict[str, LinearSource]:
    with LocalSource(folder) as source:
        return find_linears(open_checkpoint(source))


def edited(name: str, folder: Path, change: Callable[[Tensors], object]) -> Path:
    target = copied(name, folder)

    def changed(tensors: Tensors) -> Tensors:
        change(tensors)
        return tensors

    edit(target, changed)
    return target


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_quantized_module_outside_the_experts_is_found(name: str) -> None:
    folder = FIXTURES / name
    tensors, found = tensors_of(folder), found_in(folder)
    assert sorted(found) == [m for m in modules_of(tensors) if ".experts." not in m]
    with LocalSource(folder) as source:
        names = open_checkpoint(source).catalog.names
    for module, linear in found.items():
        weight = decode(tensors, module, quantization(folder))
        assert (linear.n, linear.k) == tuple(weight.shape)
        assert linear.source.layer == int(module.split(".")[2])
        own = {n for n in tensors if n.rpartition(".")[0] == module}
        assert {names[row] for row in linear.rows} == own
        assert linear.bias is None


def test_what_is_unread_is_accounted_for_and_no_table() -> None:
    linear = found_in(FIXTURES / FP4)[Q]
    assert len(linear.rows) == 4  # input_scale too
    assert {table.role for table in linear.source.tables} == {
        Role.CODES_NK,
        Role.SCALES_NG8,
        Role.GLOBAL_F32,
    }


def test_a_module_that_is_not_wanted_is_not_looked_at(tmp_path: Path) -> None:
    folder = edited(AWQ, tmp_path, lambda t: t.pop(f"{Q}.scales"))
    with LocalSource(folder) as source:
        found = find_linears(open_checkpoint(source), lambda name: name.endswith("k_proj"))
    assert sorted(found) == [f"model.layers.{n}.self_attn.k_proj" for n in (0, 1)]


def test_a_bias_is_found(tmp_path: Path) -> None:
    folder = edited(AWQ, tmp_path, lambda t: t.update({f"{Q}.bias": torch.ones(256)}))
    linear = found_in(folder)[Q]
    with LocalSource(folder) as source:
        assert open_checkpoint(source).catalog.names[linear.bias or 0] == f"{Q}.bias"
    assert linear.bias not in linear.rows


def test_zero_points_left_empty_are_absent(tmp_path: Path) -> None:
    folder = edited(
        AWQ, tmp_path, lambda t: t.update({f"{Q}.qzeros": torch.zeros((0, 32), dtype=torch.int32)})
    )
    source = found_in(folder)[Q].source
    assert not source.zeros_stored


def refused(folder: Path, kind: type[LoaderError], *words: str) -> None:
    with pytest.raises(kind) as caught:
        found_in(folder)
    for word in (Q, *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("part", ["scales", "qzeros"])
def test_a_missing_part_is_named(part: str, tmp_path: Path) -> None:
    folder = edited(AWQ, tmp_path, lambda t: t.pop(f"{Q}.{part}"))
    refused(folder, CheckpointError, "missing", f"no {part}")


def test_codes_in_another_dtype_are_another_format(tmp_path: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors[f"{Q}.weight"] = tensors[f"{Q}.weight"].view(torch.int8)

    refused(edited(FP4, tmp_path, spoil), UnsupportedError, "format that is not loaded", "I8")


def test_scales_of_another_shape_are_refused(tmp_path: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors[f"{Q}.weight_scale"] = tensors[f"{Q}.weight_scale"][:, :4].clone()

    refused(edited(INT4, tmp_path, spoil), CheckpointError, "weight_scale has the wrong shape")


def test_activation_scales_are_refused(tmp_path: Path) -> None:
    folder = edited(FP4, tmp_path, lambda t: t.update({f"{Q}.pre_quant_scale": torch.ones(256)}))
    refused(folder, UnsupportedError, "pre_quant_scale")


def test_a_module_that_the_config_excludes_may_not_be_quantized(tmp_path: Path) -> None:
    folder = copied(INT4, tmp_path)
    edit_json(folder, "config.json", lambda c: c["quantization_config"]["ignore"].append(Q))
    refused(folder, CheckpointError, "config and file disagree")

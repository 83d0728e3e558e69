"""The whole check on real loads: it passes what is right, and finds each kind of damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from load_fakes import SMALL
from verify_fakes import FIXTURES, LOADABLE, REFUSED

import loader
from loader import ConversionError, LoaderError, Policy, PreparedExperts, Shard, ShardError
from loader.testing.checkpoint import TinyCheckpoint, tiny_checkpoint

EVERYTHING = 1 << 30
DIALECTS = ("awq-gemm", "awq-gptqmodel", "ct-int4", "ct-int4-asym", "ct-nvfp4", "modelopt-nvfp4")


def make(folder: Path, dialect: str = "awq-gemm", **more: Any) -> TinyCheckpoint:
    given: dict[str, Any] = dict(SMALL, dialect=dialect, attention=False)
    if "nvfp4" in dialect:
        given["group"] = None
    else:
        given["scale_dtype"] = "F16"
    return tiny_checkpoint(folder, **{**given, **more})


def policies(folder: Path) -> list[Policy]:
    """Every layout and rounding that exists for the format of a checkpoint."""
    kinds = {layer.spec.w13.kind for layer in loader.plan(folder).layers}
    if "int4" not in kinds:
        return [Policy(layout=layout) for layout in ("compact", "wide")]
    return [
        Policy(layout=layout, awq_rounding=rounding)
        for layout in ("compact", "record", "wide")
        for rounding in ("exact", "fused_bias")
    ]


def scales_are_fp16(folder: Path) -> bool:
    dtypes = {layer.spec.w13.scale_dtype for layer in loader.plan(folder).layers}
    return torch.bfloat16 not in dtypes


def one_layer(experts: Any, number: int) -> dict[int, PreparedExperts]:
    """One layer, another one each time: a check of all would take most of its time in fp64."""
    layer = sorted(experts)[number % len(experts)]
    return {layer: experts[layer]}


# What is right passes


@pytest.mark.parametrize("name", LOADABLE)
def test_every_fixture_under_every_layout_and_rounding(name: str) -> None:
    folder = FIXTURES / name
    passed = 0
    for number, policy in enumerate(policies(folder)):
        try:
            experts = loader.load(folder, policy=policy)
        except ConversionError as error:
            assert policy.layout != "compact" or policy.awq_rounding == "fused_bias"
            assert not scales_are_fp16(folder), error
            continue
        some = dict(experts) if number == 0 else one_layer(experts, number)
        report = loader.verify(some, folder)
        assert report.ok, f"{policy}\n{report}"
        assert 0 < report.columns <= 1152 and report.forward_count
        assert report.layers == tuple(sorted(some))
        passed += 1
    assert passed == len(policies(folder)) or not scales_are_fp16(folder)
    assert passed >= 1


@pytest.mark.parametrize("name", LOADABLE)
def test_every_fixture_under_every_shard(name: str) -> None:
    folder, cut = FIXTURES / name, 0
    shards = [Shard(tp_size=2, tp_rank=rank) for rank in range(2)]
    shards += [Shard(tp_size=4, tp_rank=3), Shard(ep_size=2, ep_rank=1), Shard(expert_ids=[1, 0])]
    for number, shard in enumerate(shards):
        try:
            experts = loader.load(folder, shard=shard)
        except ShardError:
            assert shard.tp_size > 1
            continue
        report = loader.verify(one_layer(experts, number), folder, samples=300, seed=number)
        assert report.ok, f"{shard}\n{report}"
        cut += shard.tp_size > 1
    assert cut, "at least one tensor parallel slice"


def test_the_fixture_that_is_refused() -> None:
    with pytest.raises(LoaderError, match="pre_quant_scale"):
        loader.load(FIXTURES / REFUSED)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_checkpoint_policy_and_shard(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    dialect = data.draw(st.sampled_from(DIALECTS))
    tp, experts = data.draw(st.sampled_from([1, 2, 3])), data.draw(st.integers(2, 5))
    ep = data.draw(st.sampled_from([1, 2]))
    more: dict[str, Any] = {}
    if "nvfp4" not in dialect:
        more["group"] = data.draw(st.sampled_from([32, 48, 64, 128, -1]))
    fused = data.draw(st.booleans())
    made = make(
        tmp_path_factory.mktemp("any"),
        dialect,
        hidden=16 * data.draw(st.integers(4, 9)),
        intermediate=16 * tp * data.draw(st.integers(2, 5)),
        experts=experts,
        layers=data.draw(st.integers(1, 2)),
        fused=fused,
        fused_globals=data.draw(st.sampled_from(["E", "E1", "E2"])) if fused else "E",
        shards=data.draw(st.integers(1, 2)),
        excluded=data.draw(st.sampled_from([(), (0,)])),
        seed=data.draw(st.integers(0, 1000)),
        **more,
    )
    shard = Shard(tp_size=tp, tp_rank=tp - 1, ep_size=ep, ep_rank=ep - 1)
    policy = data.draw(st.sampled_from(policies(made.folder)))
    loaded = loader.load(made.folder, shard=shard, policy=policy)
    report = loader.verify(loaded, made.folder, samples=data.draw(st.sampled_from([40, 1152])))
    assert report.ok, f"{shard} {policy}\n{report}"
    assert report.forward_count > 0


@pytest.mark.parametrize("family", ["qwen3.5", "mixtral", "minimax", "deepseek-v3", "glm4-moe"])
def test_other_families(tmp_path: Path, family: str) -> None:
    first = family in ("deepseek-v3", "glm4-moe")
    made = make(
        tmp_path, family=family, layers=3, dense=(0,) if first else (), extra_layers=int(first)
    )
    experts = loader.load(tmp_path)
    assert tuple(experts) == made.moe_layers
    assert loader.verify(experts, tmp_path).ok


def test_the_report_of_a_pass(tmp_path: Path) -> None:
    make(tmp_path, layers=2)
    experts = loader.load(tmp_path)
    report = loader.verify(experts, tmp_path, samples=100, seed=5)
    assert (report.samples, report.columns, report.seed) == (100, 100, 5)
    assert json.loads(json.dumps(report.to_dict()))["mismatch_count"] == 0
    again = loader.verify(experts, tmp_path, samples=100, seed=5)
    assert (again.values, again.experts) == (report.values, report.experts)
    assert loader.verify({0: experts[0]}, tmp_path, samples=10).layers == (0,)
    every = loader.verify(experts, tmp_path, samples=EVERYTHING)
    assert every.columns == 2 * 4 * (64 + 64 + 64) and every.ok
    with pytest.raises(LoaderError):
        loader.verify(experts, tmp_path, samples=0)


def test_the_check_changes_nothing(tmp_path: Path) -> None:
    make(tmp_path)
    experts = loader.load(tmp_path)
    before = [tensor.clone() for tensor in experts[0].banks()]
    loader.verify(experts, tmp_path)
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(before, experts[0].banks(), strict=True)
    )


def test_banks_of_another_checkpoint_do_not_pass(tmp_path: Path) -> None:
    make(tmp_path / "a")
    make(tmp_path / "b", seed=1)
    assert not loader.verify(loader.load(tmp_path / "a"), tmp_path / "b").ok


def test_banks_of_another_size_do_not_pass(tmp_path: Path) -> None:
    make(tmp_path / "a", intermediate=128)
    make(tmp_path / "b")
    report = loader.verify(loader.load(tmp_path / "a"), tmp_path / "b")
    assert not report.ok and report.problems


# Damage


LAYER, SLOT = 1, 2


def buffer(layer: PreparedExperts, name: str) -> torch.Tensor:
    return dict(layer.named_buffers())[name]


def found(experts: Any, folder: Path) -> loader.VerifyReport:
    report = loader.verify(experts, folder, samples=EVERYTHING)
    assert not report.ok
    assert {item.layer for item in report.mismatches} == {LAYER}
    assert {item.expert for item in report.mismatches} == {SLOT}
    return report


@pytest.mark.parametrize("dialect", DIALECTS)
def test_one_flipped_nibble(tmp_path: Path, dialect: str) -> None:
    """Column c of W13 is gate c // 2 or up c // 2; nibble (0, 4, 1, 5, ...)[j] is row j."""
    make(tmp_path, dialect, hidden=96)
    rng = np.random.default_rng(7)
    experts = loader.load(tmp_path)
    for _ in range(4):
        bank, k_size = (("w13", 96), ("w2", 64))[int(rng.integers(2))]
        column, k = int(rng.integers(128 if bank == "w13" else 96)), int(rng.integers(k_size))
        words = buffer(experts[LAYER], f"{bank}_weight")
        shift = 4 * (0, 4, 1, 5, 2, 6, 3, 7)[k % 8]
        words[SLOT, column // 32, k // 8, column % 32] ^= 1 << shift
        report = found(experts, tmp_path)
        projection = ("gate", "up")[column % 2] if bank == "w13" else "down"
        row = column // 2 if bank == "w13" else column
        assert report.mismatch_count == 1
        item = report.mismatches[0]
        assert (item.projection, item.column, item.k) == (projection, row, k)
        words[SLOT, column // 32, k // 8, column % 32] ^= 1 << shift
        assert loader.verify(experts, tmp_path, samples=EVERYTHING).ok


@pytest.mark.parametrize("layout", ["compact", "record", "wide"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_one_bit_of_a_scale(tmp_path: Path, dialect: str, layout: str) -> None:
    if "nvfp4" in dialect and layout == "record":
        layout = "compact"
    made = make(tmp_path, dialect)
    experts = loader.load(tmp_path, policy=Policy(layout=layout))
    for bank, column, group in (("w13", 7, 1), ("w13", 12, 0), ("w2", 33, 1)):
        plane = buffer(experts[LAYER], f"{bank}_{'scales' if layout == 'compact' else 'metadata'}")
        view = plane.view(torch.uint8).view(*plane.shape[:2], -1)
        each = view.shape[2] // buffer(experts[LAYER], f"{bank}_weight")[0, :, 0].numel()
        view[SLOT, group, column * each] ^= 1
        report = found(experts, tmp_path)
        projection = ("gate", "up")[column % 2] if bank == "w13" else "down"
        row = column // 2 if bank == "w13" else column
        assert {(i.projection, i.column) for i in report.mismatches} == {(projection, row)}
        assert {i.k // made.group for i in report.mismatches} == {group}
        view[SLOT, group, column * each] ^= 1
    assert loader.verify(experts, tmp_path, samples=EVERYTHING).ok


@pytest.mark.parametrize("layout", ["compact", "record"])
@pytest.mark.parametrize("dialect", DIALECTS[:4])
def test_one_zero_point(tmp_path: Path, dialect: str, layout: str) -> None:
    made = make(tmp_path, dialect)
    experts = loader.load(tmp_path, policy=Policy(layout=layout))
    for bank, column, group in (("w13", 6, 1), ("w13", 9, 0), ("w2", 60, 1)):
        if layout == "compact":
            plane = buffer(experts[LAYER], f"{bank}_zeros")
            at, bit = (SLOT, group, column // 2), 1 << 4 * (column % 2)
        else:
            plane = buffer(experts[LAYER], f"{bank}_metadata")
            at, bit = (SLOT, group, column, 2), 1
        plane[at] ^= bit
        report = found(experts, tmp_path)
        projection = ("gate", "up")[column % 2] if bank == "w13" else "down"
        row = column // 2 if bank == "w13" else column
        assert {(i.projection, i.column) for i in report.mismatches} == {(projection, row)}
        assert report.mismatch_count == made.group, "every weight of the group moves"
        plane[at] ^= bit
    assert loader.verify(experts, tmp_path, samples=EVERYTHING).ok


@pytest.mark.parametrize("bits", [1, -1])
@pytest.mark.parametrize("place", [("w13", 0), ("w13", 1), ("w2", 0)])
@pytest.mark.parametrize("dialect", ["ct-nvfp4", "modelopt-nvfp4"])
def test_one_global(tmp_path: Path, dialect: str, place: tuple[str, int], bits: int) -> None:
    """64 units in the last place of the fp32: fp32(e4m3 o global) shows them everywhere."""
    make(tmp_path, dialect)
    experts = loader.load(tmp_path)
    bank, which = place
    words = buffer(experts[LAYER], f"{bank}_globals").view(torch.int32)
    words[SLOT, which] += 64 * bits
    report = found(experts, tmp_path)
    projection = ("gate", "up")[which] if bank == "w13" else "down"
    assert {item.projection for item in report.mismatches} == {projection}
    assert report.mismatch_count > 0.8 * 64 * 64, "all but the zeros among the codes"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_gate_and_up_swapped(tmp_path: Path, dialect: str) -> None:
    make(tmp_path, dialect)
    experts = loader.load(tmp_path)
    layer = experts[LAYER]
    for name, tensor in layer.named_buffers():
        if name.startswith("w13_"):
            one = tensor[SLOT]
            if name == "w13_zeros":
                one.copy_((one >> 4) | (one << 4))
            else:
                one.copy_(one.view(*one.shape[:-1], -1, 2).flip(-1).reshape(one.shape))
    report = found(experts, tmp_path)
    assert {item.projection for item in report.mismatches} <= {"gate", "up"}
    assert report.mismatch_count > 64 * 64
    assert report.forward_failures


def test_two_experts_swapped(tmp_path: Path) -> None:
    make(tmp_path)
    experts = loader.load(tmp_path)
    for _, tensor in experts[0].named_buffers():
        tensor[[0, 1]] = tensor[[1, 0]]
    report = loader.verify(experts, tmp_path, samples=EVERYTHING)
    assert not report.ok and report.mismatch_count > 2 * 3 * 64 * 64 * 0.8


def test_damage_behind_the_banks_is_found_by_the_calls(tmp_path: Path) -> None:
    """The weights are right and the map of experts is not: only a forward can tell."""
    make(tmp_path)
    experts = loader.load(tmp_path)
    table = experts[0].workspace.expert_map
    table[[0, 1]] = table[[1, 0]]
    report = loader.verify(experts, tmp_path, samples=EVERYTHING)
    assert not report.mismatch_count and report.forward_failures and not report.ok


def test_samples_that_do_not_cover_the_damage_may_miss_it(tmp_path: Path) -> None:
    """What a sampled check promises, and what it does not."""
    make(tmp_path)
    experts = loader.load(tmp_path)
    buffer(experts[LAYER], "w2_weight")[SLOT, 0, 0, 0] ^= 1
    seeds = [loader.verify(experts, tmp_path, samples=60, seed=seed) for seed in range(12)]
    assert any(report.mismatch_count == 0 for report in seeds)
    assert found(experts, tmp_path).mismatch_count == 1

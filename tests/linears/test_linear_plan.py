"""How one linear is served, by capability, and which slices of it can be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loader import Policy, native
from loader.checkpoint.folder import open_checkpoint
from loader.checkpoint.linears import LinearSource, find_linears
from loader.checkpoint.source import LocalSource
from loader.errors import PolicyError, ShardError, UnsupportedError
from loader.linears import LinearPlan, LinearSlice, plan_linear
from loader.pieces import Places

FIXTURES = Path(__file__).parents[2] / "fixtures" / "checkpoints"
Q = "model.layers.1.self_attn.q_proj"
AWQ, FP4 = "qwen3moe-awq-gemm-g128", "qwen3moe-modelopt-nvfp4"


def source_of(name: str) -> tuple[LinearSource, Places]:
    with LocalSource(FIXTURES / name) as source:
        checkpoint = open_checkpoint(source)
    catalog = checkpoint.catalog
    return find_linears(checkpoint)[Q], Places(catalog.file, catalog.begin)


def planned(name: str = AWQ, policy: Policy | None = None, **changes: Any) -> LinearPlan:
    source, places = source_of(name)
    code = replace(native.REFERENCE, **changes.pop("code", {}))
    settings = {"dtype": torch.float32, **changes}
    return plan_linear(source, (policy or Policy()).resolve(), code, places, **settings)


def test_a_bank_serves_what_fits_one_and_says_so() -> None:
    plan = planned()
    assert plan.served == "bank" and "compact" in plan.reason
    assert plan.nbytes(torch.float32) == plan.bank.nbytes() < 256 * 256
    assert [route.route for route in plan.routes] == ["qpn_m1", "qpn_grouped", "legacy"]
    assert plan.to_dict()["metadata_layout"] == "compact"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"plain_because": "it is a router"}, "it is a router"),
        ({"dtype": torch.float64}, "float64"),
        ({"code": {"linear": None}}, "serves no linear"),
        ({"code": {"kinds": ("e2m1",)}}, "quantized experts"),
        ({"code": {"layouts": ("wide",)}}, "metadata layout"),
        ({"code": {"group_multiple": 256}}, "group size"),
    ],
)
def test_what_no_bank_serves_is_dequantized_with_the_reason(
    changes: dict[str, Any], words: str
) -> None:
    plan = planned(**changes)
    assert plan.served == "dequantized" and words in plan.reason
    assert plan.nbytes(torch.bfloat16) == 2 * 256 * 256
    assert plan.routes == () and plan.fast_tokens == 0
    assert plan.scratch_bytes(native.REFERENCE) == 0


def test_an_odd_number_of_outputs_is_dequantized() -> None:
    source, places = source_of("qwen3moe-ct-w4a16asym-g32")
    odd = replace(source, source=replace(source.source, hidden=255))
    plan = plan_linear(odd, Policy().resolve(), native.REFERENCE, places, torch.float32)
    assert plan.served == "dequantized" and "pairs" in plan.reason and plan.bank.n == 256


def test_scales_of_32_bits_are_refused() -> None:
    source, places = source_of(AWQ)
    wide = replace(source, source=replace(source.source, scale_dtypes=("F32", "F32")))
    with pytest.raises(UnsupportedError, match=r"scales of 32 bits.*self_attn\.q_proj"):
        plan_linear(wide, Policy().resolve(), native.REFERENCE, places, torch.float32)


def test_policy_switches_routes_and_layout() -> None:
    plan = planned(policy=Policy(qpn_grouped="off", layout="record"))
    assert plan.routes[1].route == "legacy" and plan.bank.layout == "record"
    assert plan.fast_tokens == 1
    with pytest.raises(PolicyError, match="record"):
        planned(FP4, policy=Policy(layout="record"))


@pytest.mark.parametrize(
    "part",
    [
        LinearSlice(outs=(4, 8)),
        LinearSlice(outs=(0, 12)),
        LinearSlice(outs=(248, 16)),
        LinearSlice(outs=(-8, 8)),
        LinearSlice(ins=(8, 16)),
        LinearSlice(ins=(0, 24)),
        LinearSlice(ins=(256, 16)),
        LinearSlice(ins=(0, 0)),
    ],
)
def test_a_slice_that_cuts_a_word_or_leaves_the_weight_is_refused(part: LinearSlice) -> None:
    with pytest.raises(ShardError, match="multiples of"):
        planned(part=part)


def test_a_slice_of_inputs_begins_inside_a_group() -> None:
    plan = planned(part=LinearSlice(ins=(144, 112)))
    assert (plan.k, plan.bank.phase, plan.bank.groups) == (112, 16, 1)


def test_runs_cover_the_weight_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loader.linears.plan.RUN_BYTES", 5000)
    for name, along in ((AWQ, "k"), (FP4, "n")):
        runs = list(planned(name).runs())
        assert len(runs) > 3
        sizes = [(run.n, run.k) for run in runs]
        if along == "k":
            assert {n for n, _ in sizes} == {256} and sum(k for _, k in sizes) == 256
        else:
            assert {k for _, k in sizes} == {256} and sum(n for n, _ in sizes) == 256
        assert all(run.bank.nbytes("weight") <= 2 * 5000 for run in runs)

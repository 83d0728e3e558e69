"""Crossovers measured at load: what is measured, what the report says, what stays frozen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import loader
from loader import native
from loader.route import MEASURED_GROUPED_MOST
from loader.testing.checkpoint import tiny_checkpoint

MEASURE = loader.Policy(grouped_max_tokens="measure")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_checkpoint(tmp_path, dialect="awq-gemm", hidden=64, intermediate=64, experts=8, layers=2)
    return tmp_path


def clocked(monkeypatch: pytest.MonkeyPatch, cost: Callable[[int, bool], float]) -> list[int]:
    """Steps take what ``cost(tokens, grouped)`` says, by a clock of ours; returns their tokens."""
    now = [0.0]
    seen: list[int] = []
    implementation = native.implementation_for(torch.device("cpu"))
    assert implementation is not None

    def moe(out, scratch, x, ids, weights, expert_map, banks, spec, routes) -> None:
        now[0] += cost(len(x), routes[1] >= len(x))
        seen.append(len(x))
        out.zero_()

    slow = replace(implementation, moe=moe)
    monkeypatch.setitem(native._SERVING, "cpu", slow)
    monkeypatch.setattr("loader.crossover.perf_counter", lambda: now[0])
    return seen


@pytest.mark.parametrize("crossover", [1, 2, 3, 16, 100, 256, 1000])
def test_the_crossover_is_where_legacy_becomes_faster(
    folder: Path, monkeypatch: pytest.MonkeyPatch, crossover: int
) -> None:
    clocked(monkeypatch, lambda tokens, grouped: float(tokens) if grouped else crossover + 0.5)
    experts = loader.load(folder, policy=MEASURE)
    whole = min(crossover, MEASURED_GROUPED_MOST)
    wanted = 1 << (whole.bit_length() - 1)
    last = {r.route: r.last for r in experts[0].routes}
    assert last["legacy"] is None
    assert last.get("qpn_grouped", 1) == wanted


def test_a_geometry_is_measured_once_and_the_report_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = clocked(monkeypatch, lambda tokens, grouped: float(tokens) if grouped else 20.0)
    experts = loader.load(folder, policy=MEASURE)
    once = len(seen)
    report = experts.report.to_dict()
    assert [layer["routes"] for layer in report["layers"]] == [
        [route.to_dict() for route in experts[layer].routes] for layer in (0, 1)
    ]
    grouped, legacy = report["layers"][1]["routes"][1:]
    assert grouped["tokens"] == [2, 16] and grouped["reason"].endswith(
        "measured at load: 16 tokens"
    )
    assert (
        legacy["tokens"] == [17, None] and "faster from 17 tokens on, measured" in legacy["reason"]
    )
    seen.clear()
    loader.load(folder, policy=MEASURE, layers=[0])
    assert len(seen) == once


def test_nothing_is_measured_where_grouped_is_off(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = clocked(monkeypatch, lambda tokens, grouped: 1.0)
    policy = loader.Policy(grouped_max_tokens="measure", qpn_grouped="off")
    experts = loader.load(folder, policy=policy)
    assert not seen
    assert {r.route for r in experts[0].routes if r.first > 1} == {"legacy"}


def test_a_real_measurement_serves_every_token_count(folder: Path) -> None:
    measured = loader.load(folder, policy=MEASURE)
    plain = loader.load(folder)
    report = measured.report.to_dict()["memory"]
    assert report["resident"] == report["predicted_resident"]
    for tokens in (1, 2, 64, 300):
        x = torch.randn(tokens, 64)
        ids = torch.rand(tokens, 8).topk(2).indices
        weights = torch.rand(tokens, 2)
        got, wanted = measured[0](x, ids, weights), plain[0](x, ids, weights)
        assert (got - wanted).norm() <= 1e-5 * wanted.norm()


def test_a_plan_says_that_it_will_be_measured(folder: Path) -> None:
    grouped = loader.plan(folder, policy=MEASURE).to_dict()["layers"][0]["routes"][1]
    assert grouped["tokens"] == [2, MEASURED_GROUPED_MOST]
    assert grouped["reason"].endswith("crossover measured at load")

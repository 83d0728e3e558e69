"""Routes: which kernel serves which token count, why, and what an explicit ``on`` demands."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from load_fakes import Allocations, RecordingSource, module_of, quantization_of

import loader
from loader.bank import BankSpec, LayerSpec
from loader.errors import PolicyError, UnsupportedError
from loader.native import REFERENCE, Implementation, implementation_for
from loader.policy import Policy, ResolvedPolicy
from loader.route import (
    FAST_ROUTES,
    MEASURED_GROUPED_MOST,
    NEEDS,
    RouteRange,
    decide,
    fast_tokens,
    known_device,
    limits,
    require_implementation,
    settle,
)
from loader.testing.checkpoint import TinyCheckpoint, tiny_checkpoint

SWITCHES = ("auto", "on", "off")
HALF = torch.float16


def spec(kind: str = "int4", layout: str = "compact", group: int = 32) -> LayerSpec:
    if kind == "plain":
        layout = "plain"
    w13 = BankSpec(kind, layout, 4, 64, 128, group, 0, 2, HALF)
    return LayerSpec(w13, replace(w13, n=64, projections=1))


def resolved(**settings: Any) -> ResolvedPolicy:
    return Policy(**settings).resolve({})


def code(**changes: Any) -> Implementation:
    return replace(REFERENCE, name="device", **changes)


def spans(routes: tuple[RouteRange, ...]) -> list[tuple[int, int | None]]:
    return [(route.first, route.last) for route in routes]


@pytest.mark.parametrize(("m1", "grouped"), list(product(SWITCHES, SWITCHES)))
def test_every_combination_of_switches_on_a_layer_that_supports_all(m1: str, grouped: str) -> None:
    policy = resolved(qpn_m1=m1, qpn_grouped=grouped)
    routes = decide(0, spec(), REFERENCE, policy, "why")
    wanted = ["legacy" if m1 == "off" else "qpn_m1"]
    wanted += ["legacy" if grouped == "off" else "qpn_grouped", "legacy"]
    assert [route.route for route in routes] == wanted
    assert spans(routes) == [(1, 1), (2, 8), (9, None)]
    assert [route.implementation for route in routes] == ["reference"] * 3
    for route, switch, value in zip(routes, FAST_ROUTES, (m1, grouped), strict=False):
        origin = "default" if value == "auto" else "argument"
        asked = f"{switch}={value} ({origin})"
        assert route.reason == (asked if value == "off" else f"admitted, {asked}")
    assert routes[2].reason == ("any tokens" if grouped == "off" else "more than 8 tokens")
    assert limits(routes) == [int(m1 != "off"), 8 * (grouped != "off")]


@pytest.mark.parametrize(("m1", "grouped"), list(product(SWITCHES, SWITCHES)))
def test_every_combination_of_switches_on_a_layer_that_supports_none(m1: str, grouped: str) -> None:
    policy = resolved(qpn_m1=m1, qpn_grouped=grouped)
    if "on" in (m1, grouped):
        with pytest.raises(PolicyError) as caught:
            decide(7, spec("plain"), REFERENCE, policy, "why")
        first = "qpn_m1" if m1 == "on" else "qpn_grouped"
        assert str(caught.value) == (
            f"{first}=on (argument) cannot be honoured: quantized experts; layer 7; "
            "expected int4 or e2m1 codes, found not quantized"
        )
        return
    routes = decide(7, spec("plain"), REFERENCE, policy, "excluded by config")
    assert [route.route for route in routes] == ["legacy"] * 3
    assert limits(routes) == [0, 0]
    for route, switch, value in zip(routes, FAST_ROUTES, (m1, grouped), strict=False):
        needs = f"{switch} needs quantized experts: int4 or e2m1 codes; found not quantized"
        assert route.reason == (f"{switch}=off (argument)" if value == "off" else needs)
    assert routes[2].reason == "excluded by config"


LACKS: list[tuple[str, LayerSpec, Implementation, str, str]] = [
    ("native operator", spec(), code(routes=("legacy",)), "for this device", "device"),
    ("quantized experts", spec("plain"), code(), "int4 or e2m1 codes", "not quantized"),
    ("quantized experts", spec("e2m1"), code(kinds=("int4",)), "int4 codes", "e2m1"),
    ("metadata layout", spec(layout="wide"), code(layouts=("compact",)), "compact", "wide"),
    ("group size", spec(group=48), code(group_multiple=32), "a multiple of 32", "48 and 48"),
    ("sizes", spec(), code(row_multiple=7), "multiples of 7", "64 and 64"),
]


@pytest.mark.parametrize("route", FAST_ROUTES)
@pytest.mark.parametrize(("capability", "layer", "implementation", "needs", "found"), LACKS)
def test_each_missing_capability_is_named_with_what_it_needs_and_what_was_found(
    route: str,
    capability: str,
    layer: LayerSpec,
    implementation: Implementation,
    needs: str,
    found: str,
) -> None:
    position = FAST_ROUTES.index(route)
    fallen = decide(3, layer, implementation, resolved(), "why")[position]
    assert (fallen.route, fallen.implementation) == ("legacy", "device")
    for fact in (route, capability, needs, found):
        assert fact in fallen.reason
    with pytest.raises(PolicyError) as caught:
        decide(3, layer, implementation, resolved(**{route: "on"}), "why")
    error = caught.value
    assert error.layer == 3 and capability in error.what and route in error.what
    assert needs in str(error.expected) and error.found == found
    off = decide(3, layer, implementation, resolved(**{route: "off"}), "why")[position]
    assert (off.route, off.reason) == ("legacy", f"{route}=off (argument)")


def test_every_need_is_covered_above() -> None:
    assert {need.capability for need in NEEDS} == {row[0] for row in LACKS} - {"native operator"}


def test_one_lacking_route_does_not_take_the_other_with_it() -> None:
    only_m1 = decide(0, spec(), code(routes=("qpn_m1", "legacy")), resolved(), "why")
    assert [route.route for route in only_m1] == ["qpn_m1", "legacy", "legacy"]
    assert limits(only_m1) == [1, 0]


@settings(deadline=None, max_examples=200)
@given(
    m1=st.sampled_from(("auto", "off")),
    grouped=st.sampled_from(("auto", "off")),
    limit=st.none() | st.integers(2, 5000),
    kind=st.sampled_from(("int4", "e2m1", "plain")),
    runs=st.sets(st.sampled_from(FAST_ROUTES)),
    tokens=st.integers(1, 10_000),
)
def test_every_token_count_from_one_has_exactly_one_route(
    m1: str, grouped: str, limit: int | None, kind: str, runs: set[str], tokens: int
) -> None:
    policy = resolved(qpn_m1=m1, qpn_grouped=grouped, grouped_max_tokens=limit)
    routes = decide(0, spec(kind), code(routes=(*runs, "legacy")), policy, "why")
    assert routes[0].first == 1 and routes[-1].last is None
    for before, after in zip(routes, routes[1:], strict=False):
        assert before.last is not None and before.first <= before.last
        assert after.first == before.last + 1
    serving = [r for r in routes if r.first <= tokens and (r.last is None or tokens <= r.last)]
    assert len(serving) == 1
    # What the operator is told must pick the same route.
    last_m1, last_grouped = limits(routes)
    told = "legacy"
    if tokens == 1 and last_m1:
        told = "qpn_m1"
    elif 2 <= tokens <= last_grouped:
        told = "qpn_grouped"
    assert serving[0].route == told
    assert all(route.reason and route.implementation == "device" for route in routes)


def test_the_limit_of_grouped_is_the_policys() -> None:
    routes = decide(0, spec(), REFERENCE, resolved(grouped_max_tokens=31), "why")
    assert spans(routes) == [(1, 1), (2, 31), (32, None)]
    assert routes[-1].reason == "more than 31 tokens"
    assert limits(routes) == [1, 31]


def test_a_measured_crossover_replaces_the_bound() -> None:
    ranges = decide(2, spec(), REFERENCE, resolved(grouped_max_tokens="measure"), "why")
    assert fast_tokens(ranges) == MEASURED_GROUPED_MOST
    settled = settle(ranges, 32)
    assert [(r.first, r.last) for r in settled] == [(1, 1), (2, 32), (33, None)]
    assert [(r.first, r.last) for r in settle(ranges, 1)] == [(1, 1), (2, None)]


def test_the_form_in_the_report() -> None:
    assert RouteRange(9, None, "legacy", "reference", "why").to_dict() == {
        "tokens": [9, None],
        "route": "legacy",
        "implementation": "reference",
        "reason": "why",
    }


def test_a_device_without_an_implementation_is_refused_never_served_by_the_reference() -> None:
    serving = implementation_for(torch.device("cpu"))
    assert serving is not None and require_implementation(torch.device("cpu"), serving) is serving
    for name in ("meta", "xpu:1"):
        device = torch.device(name)
        assert implementation_for(device) is None
        with pytest.raises(UnsupportedError, match=f"found device {name}"):
            require_implementation(device, None)


def test_a_name_that_is_no_device_is_refused(checkpoint: TinyCheckpoint) -> None:
    assert known_device("cpu") == torch.device("cpu")
    for call in (loader.plan, loader.load):
        with pytest.raises(UnsupportedError, match="no such device; .*'xyz'"):
            call(checkpoint.folder, device="xyz")
        with pytest.raises(UnsupportedError, match="found device meta"):
            call(checkpoint.folder, device="meta")


def test_a_card_that_is_not_there_is_refused_with_those_that_are(
    checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert known_device("cuda") == torch.device("cuda", 1)
    assert known_device("cuda:0") == torch.device("cuda", 0)
    with pytest.raises(UnsupportedError) as caught:
        loader.plan(checkpoint.folder, device="cuda:2")
    assert str(caught.value) == ("no such device; expected cuda:0 to cuda:1, found 'cuda:2'")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """Layers 0 and 2 are quantized, 1 and 3 are not."""
    return tiny_checkpoint(
        tmp_path_factory.mktemp("route"),
        hidden=64,
        intermediate=64,
        experts=2,
        group=32,
        layers=4,
        excluded=(1, 3),
    )


@pytest.mark.parametrize("switch", FAST_ROUTES)
def test_on_for_a_layer_that_is_not_quantized_fails_before_anything_is_read_or_allocated(
    checkpoint: TinyCheckpoint, switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocations = Allocations(monkeypatch)
    policy = Policy(**{switch: "on"})
    for call in (loader.plan, loader.load):
        with RecordingSource(checkpoint.folder) as source:
            with pytest.raises(PolicyError) as caught:
                call(source, policy=policy)
            assert source.log == []
        assert caught.value.layer == 1
        assert "quantized experts" in caught.value.what and switch in caught.value.what
        assert caught.value.expected == "int4 or e2m1 codes"
        assert caught.value.found == "not quantized"
    assert allocations.storages == []
    loaded = loader.load(checkpoint.folder, policy=policy, layers=[0, 2])
    assert [route.route for route in loaded[2].routes] == ["qpn_m1", "qpn_grouped", "legacy"]


def test_on_from_the_environment_names_the_variable(
    checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QPN_M1", "1")
    with pytest.raises(PolicyError, match=r"qpn_m1=on \(environment QPN_M1=1\) cannot be honoured"):
        loader.plan(checkpoint.folder)


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_each_distinct_reason_is_logged_once_with_its_layers(
    checkpoint: TinyCheckpoint, caplog: pytest.LogCaptureFixture
) -> None:
    loader.load(checkpoint.folder)
    needs = "needs quantized experts: int4 or e2m1 codes; found not quantized"
    assert _warnings(caplog) == [
        f"layers [1, 3] run the legacy route: {route} {needs}" for route in FAST_ROUTES
    ]


def test_nothing_is_logged_where_nothing_fell_back(
    checkpoint: TinyCheckpoint, caplog: pytest.LogCaptureFixture
) -> None:
    loader.load(checkpoint.folder, layers=[0, 2])
    loader.load(checkpoint.folder, policy=Policy(qpn_m1="off", qpn_grouped="off"))
    assert _warnings(caplog) == []


def test_the_decision_in_place_is_the_same(checkpoint: TinyCheckpoint) -> None:
    policy = Policy(qpn_m1="off", grouped_max_tokens=4)
    module = module_of(checkpoint)
    quantization = quantization_of(checkpoint)
    prepared = loader.prepare_module(module, quantization=quantization, policy=policy)
    assert prepared.routes == loader.load(checkpoint.folder, policy=policy)[0].routes


def test_names_of_models_and_paths_decide_nothing(tmp_path: Path) -> None:
    """The same geometry under every family and writer of int4 gets the same routes."""
    found = set()
    for dialect, family in (("awq-gemm", "qwen3-moe"), ("awq-gptqmodel", "mixtral")):
        for rounding in ("exact", "fused_bias"):
            folder = tmp_path / f"{dialect}-{family}-{rounding}"
            tiny_checkpoint(folder, dialect=dialect, family=family, layers=1, payload="sparse")
            layer = loader.plan(folder, policy=Policy(awq_rounding=rounding)).layers[0]
            found.add(layer.routes)
    assert len(found) == 1

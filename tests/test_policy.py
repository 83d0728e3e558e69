"""Policy: its values, the environment, which of them wins, and when they are read."""

from __future__ import annotations

from collections import Counter
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from load_fakes import module_of, quantization_of

import loader
from loader.errors import PolicyError
from loader.policy import ENVIRONMENT, Policy
from loader.testing.checkpoint import TinyCheckpoint, tiny_checkpoint

VARIABLES = {
    "qpn_m1": "QPN_M1",
    "qpn_grouped": "QPN_GROUPED",
    "compact_metadata": "QPN_COMPACT_METADATA",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    settings: dict[str, Any] = {"hidden": 64, "intermediate": 64, "experts": 2, "group": 32}
    return tiny_checkpoint(tmp_path_factory.mktemp("policy"), layers=1, **settings)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)


def test_defaults() -> None:
    policy = Policy()
    assert (policy.qpn_m1, policy.qpn_grouped, policy.compact_metadata) == ("auto",) * 3
    assert (policy.layout, policy.awq_rounding) == (None, "exact")
    assert (policy.grouped_max_tokens, policy.nonfinite) == (None, "error")


def test_the_variables_are_those_of_the_contract() -> None:
    assert dict(ENVIRONMENT) == VARIABLES


GOOD: dict[str, tuple[Any, ...]] = {
    **{switch: ("auto", "on", "off") for switch in VARIABLES},
    "layout": (None, "wide", "record", "compact"),
    "awq_rounding": ("exact", "fused_bias"),
    "grouped_max_tokens": (None, "measure", 2, 8, 1000),
    "nonfinite": ("error", "warn"),
}
BAD: dict[str, tuple[Any, ...]] = {
    **{switch: ("", "AUTO", "1", "0", 1, True, None, "yes", " on") for switch in VARIABLES},
    "layout": ("", "Wide", "plain", "auto", 3, False, np.ones(2)),
    "awq_rounding": ("", "fused", None, 1),
    "grouped_max_tokens": (1, 0, -3, "8", 2.0, True, "auto", "", 1 << 31, 1 << 70, np.ones(2)),
    "nonfinite": ("", "ignore", None, True),
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, vs in GOOD.items() for v in vs])
def test_values_that_are_accepted(field: str, value: Any) -> None:
    assert getattr(Policy(**{field: value}), field) == value


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, vs in BAD.items() for v in vs])
def test_values_that_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(PolicyError) as caught:
        Policy(**{field: value})
    assert f"Policy.{field}" in str(caught.value)
    assert caught.value.found == repr(value)
    assert caught.value.expected


def test_unknown_settings_are_an_error() -> None:
    with pytest.raises(TypeError, match="qpn_m2"):
        Policy(qpn_m2="on")  # type: ignore[call-arg]  # wrong on purpose


def test_a_policy_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Policy().qpn_m1 = "on"  # type: ignore[misc]  # wrong on purpose
    resolved = Policy().resolve({})
    with pytest.raises(FrozenInstanceError):
        resolved.policy = Policy()  # type: ignore[misc]  # wrong on purpose


@pytest.mark.parametrize("switch", VARIABLES)
@pytest.mark.parametrize("asked", ("auto", "on", "off"))
@pytest.mark.parametrize("setting", (None, "0", "1"))
def test_the_argument_wins_then_the_environment_then_auto(
    switch: str, asked: str, setting: str | None
) -> None:
    environment = {} if setting is None else {VARIABLES[switch]: setting}
    resolved = Policy(**{switch: asked}).resolve(environment)
    if asked != "auto":
        wanted, origin = asked, "argument"
    elif setting is None:
        wanted, origin = "auto", "default"
    else:
        wanted = {"0": "off", "1": "on"}[setting]
        origin = f"environment {VARIABLES[switch]}={setting}"
    assert resolved.switch(switch) == wanted
    assert resolved.describe(switch) == f"{switch}={wanted} ({origin})"
    assert resolved.to_dict()[switch] == wanted
    assert resolved.to_dict()["origins"][switch] == origin
    others = [other for other in VARIABLES if other != switch]
    assert [resolved.switch(other) for other in others] == ["auto", "auto"]


@pytest.mark.parametrize("switch", VARIABLES)
@pytest.mark.parametrize("setting", ("", "2", "on", "off", "auto", "true", " 1", "1 ", "01", "-1"))
def test_other_settings_of_a_variable_are_errors_even_where_the_argument_wins(
    switch: str, setting: str
) -> None:
    for asked in ("auto", "on", "off"):
        with pytest.raises(PolicyError) as caught:
            Policy(**{switch: asked}).resolve({VARIABLES[switch]: setting})
        assert VARIABLES[switch] in str(caught.value)
        assert (caught.value.expected, caught.value.found) == ("unset, 0 or 1", repr(setting))


@pytest.mark.parametrize(
    ("policy", "kind", "layout"),
    [
        (Policy(), "int4", "compact"),
        (Policy(), "e2m1", "compact"),
        (Policy(), "plain", "plain"),
        (Policy(compact_metadata="on"), "int4", "compact"),
        (Policy(compact_metadata="off"), "int4", "wide"),
        (Policy(compact_metadata="off"), "e2m1", "wide"),
        (Policy(compact_metadata="off"), "plain", "plain"),
        (Policy(layout="record"), "int4", "record"),
        (Policy(layout="record"), "plain", "plain"),
        (Policy(layout="wide", compact_metadata="on"), "int4", "wide"),
        (Policy(layout="compact", compact_metadata="off"), "e2m1", "compact"),
    ],
)
def test_the_layout_of_each_kind(policy: Policy, kind: str, layout: str) -> None:
    assert policy.resolve({}).layout_for(kind)[0] == layout


def test_the_layout_says_who_asked() -> None:
    assert Policy().resolve({}).layout_for("int4")[1] == "compact_metadata=auto (default)"
    off = Policy().resolve({"QPN_COMPACT_METADATA": "0"})
    reason = "compact_metadata=off (environment QPN_COMPACT_METADATA=0)"
    assert off.layout_for("int4") == ("wide", reason)
    named = Policy(layout="wide").resolve({"QPN_COMPACT_METADATA": "1"})
    assert named.layout_for("int4") == ("wide", "asked by Policy.layout")


def test_a_layout_that_a_format_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="wide or compact for NVFP4"):
        Policy(layout="record").resolve({}).layout_for("e2m1")
    tiny_checkpoint(tmp_path, dialect="ct-nvfp4", layers=1, payload="sparse")
    with pytest.raises(PolicyError) as caught:
        loader.plan(tmp_path, policy=Policy(layout="record"))
    assert caught.value.layer == 0


class _Environment(dict[str, str]):
    """Counts how often each variable is looked at."""

    def __init__(self, **settings: str) -> None:
        super().__init__(settings)
        self.looks: Counter[str] = Counter()

    def get(self, key: str, default: Any = None) -> Any:
        self.looks[key] += 1
        return super().get(key, default)

    def __getitem__(self, key: str) -> str:
        self.looks[key] += 1
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.looks[str(key)] += 1
        return super().__contains__(key)


def _watch(monkeypatch: pytest.MonkeyPatch, **settings: str) -> _Environment:
    environment = _Environment(**settings)
    monkeypatch.setattr("loader.policy.os", SimpleNamespace(environ=environment))
    return environment


ONCE = Counter(dict.fromkeys(VARIABLES.values(), 1))


def test_each_call_reads_each_variable_once_and_running_reads_none(
    checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = _watch(monkeypatch)
    loader.plan(checkpoint.folder)
    assert environment.looks == ONCE
    environment.looks.clear()
    experts = loader.load(checkpoint.folder)
    assert environment.looks == ONCE
    environment.looks.clear()
    module = module_of(checkpoint)
    assert environment.looks == Counter()
    loader.prepare_module(module, quantization=quantization_of(checkpoint))
    assert environment.looks == ONCE
    environment.looks.clear()
    _run(experts[0])
    experts[0].dequantize(0)
    str(experts.report)
    assert environment.looks == Counter()


def _run(layer: Any) -> torch.Tensor:
    x = torch.linspace(-1, 1, 64).view(1, 64)
    return layer(x, torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.5]]))


def test_changing_the_environment_after_a_load_changes_nothing(
    checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = _watch(monkeypatch, QPN_M1="0", QPN_COMPACT_METADATA="0")
    planned = loader.plan(checkpoint.folder)
    layer = loader.load(checkpoint.folder)[0]
    before = (layer.routes, layer.policy.to_dict(), layer.metadata_layout, _run(layer))
    assert [route.route for route in layer.routes] == ["legacy", "qpn_grouped", "legacy"]
    assert layer.metadata_layout == "wide"
    described = planned.to_dict()
    for setting in ("1", "nonsense"):
        environment.update(dict.fromkeys(VARIABLES.values(), setting))
        assert (layer.routes, layer.policy.to_dict(), layer.metadata_layout) == before[:3]
        assert torch.equal(_run(layer), before[3])
        assert planned.to_dict() == described
    environment.clear()
    assert [route.route for route in loader.load(checkpoint.folder)[0].routes] == [
        "qpn_m1",
        "qpn_grouped",
        "legacy",
    ]


@pytest.mark.parametrize("variable", VARIABLES.values())
def test_a_bad_variable_is_refused_before_the_source_is_looked_at(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "yes")
    for call in (loader.plan, loader.load):
        with pytest.raises(PolicyError, match=variable):
            call("there is no such folder")
    module = torch.nn.Module()
    with pytest.raises(PolicyError, match=variable):
        loader.prepare_module(module, quantization={})


def test_the_real_environment_is_what_counts(
    checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QPN_GROUPED", "0")
    routes = loader.plan(checkpoint.folder).layers[0].routes
    assert [route.route for route in routes] == ["qpn_m1", "legacy", "legacy"]
    assert routes[1].reason == "qpn_grouped=off (environment QPN_GROUPED=0)"


@pytest.mark.parametrize("name", ("routes", "policy", "metadata_layout", "awq_rounding", "spec"))
def test_a_decision_of_a_loaded_layer_cannot_be_changed(
    checkpoint: TinyCheckpoint, name: str
) -> None:
    layer = loader.load(checkpoint.folder)[0]
    with pytest.raises(loader.LifecycleError, match="does not change"):
        setattr(layer, name, None)

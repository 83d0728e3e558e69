"""Cases, section 7: every decision is visible, and results depend on nothing but the row."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from case_checks import (
    PRESENT,
    TOLERANCES,
    command,
    inputs,
    layer_weights,
    moe64,
    ok,
    refuse,
    relative_error,
    routes_of,
    run_route,
    small,
)

import loader
from loader import native
from loader.testing.checkpoint import TinyCheckpoint

DIALECTS = ["A", "P", "N", "M"]
FAR = 2**31 - 1
SWITCHES = {"qpn_m1": "QPN_M1", "qpn_grouped": "QPN_GROUPED"}
FIELDS = ("qpn_m1", "qpn_grouped", "legacy")


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No switch is set, whatever the machine has."""
    for variable in (*SWITCHES.values(), "QPN_COMPACT_METADATA"):
        monkeypatch.delenv(variable, raising=False)


# 7.1 Empty slots and empty batches


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 17, 64])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_slots_that_name_no_expert_add_nothing(
    tmp_path: Path, dialect: str, tokens: int, ids_dtype: torch.dtype
) -> None:
    checkpoint = small(tmp_path, dialect, top_k=4)
    (module,) = loader.load(tmp_path, layers=[1]).values()
    x, ids, router = inputs(checkpoint, tokens)
    empty = [-1, checkpoint.experts, FAR, -FAR - 1]
    if ids_dtype == torch.int64:
        empty += [2**40, -(2**40)]
    ids = ids.to(ids_dtype)
    for token in range(tokens):
        ids[token, token % 4] = empty[token % len(empty)]
    # The weight of such a slot is not multiplied: it may be anything.
    used = (ids >= 0) & (ids < checkpoint.experts)
    weights = torch.where(used, router, torch.tensor([np.nan, np.inf] * 2))
    kept = [tensor.clone() for tensor in (x, ids, weights)]
    wanted = moe64(layer_weights(checkpoint, 1, checkpoint.codes), x, ids, router)
    for dtype, tolerance in TOLERANCES.items():
        found = module(x.to(dtype), ids, weights)
        assert relative_error(found.double().numpy(), wanted) <= tolerance
    for tensor, before in zip((x, ids, weights), kept, strict=True):
        assert tensor.numpy().tobytes() == before.numpy().tobytes(), "an input was changed"


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dialect", ["A", "M"])
def test_rows_without_any_expert(tmp_path: Path, dialect: str, ids_dtype: torch.dtype) -> None:
    checkpoint = small(tmp_path, dialect, excluded=(0,))
    experts = loader.load(tmp_path)
    for tokens in (1, 2, 9):
        x, ids, router = inputs(checkpoint, tokens)
        for value in (-1, checkpoint.experts, FAR):
            gone = torch.full_like(ids, value).to(ids_dtype)
            for module in experts.values():
                out = torch.full_like(x, np.nan)
                module(x * np.nan, gone, router * np.nan, out=out)
                assert not out.any(), "a row without experts is not exactly 0"
        for module in experts.values():
            whole = module(x, ids, router)
            some = ids.clone()
            some[0] = -1
            part = module(x, some, router)
            assert not part[0].any()
            # Products of fewer rows may add in another order, and nothing more.
            assert torch.allclose(part[1:], whole[1:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("dialect", ["A", "N"])
def test_an_empty_batch(tmp_path: Path, dialect: str, dtype: torch.dtype) -> None:
    checkpoint = small(tmp_path, dialect, excluded=(1,))
    for module in loader.load(tmp_path).values():
        x, ids, router = inputs(checkpoint, 2)
        before = module(x.to(dtype), ids, router)
        nothing = module(x.to(dtype)[:0], ids[:0], router[:0])
        assert nothing.shape == (0, checkpoint.hidden) and nothing.dtype == dtype
        for limits in ([0, 0], [1, 8]):
            run_route(module, limits, x[:0], ids[:0], router[:0])
        no_experts = module(x.to(dtype), ids[:, :0], router[:, :0])
        assert not no_experts.any()
        assert torch.equal(module(x.to(dtype), ids, router), before)


def test_a_repeated_expert_keeps_both_weights(tmp_path: Path) -> None:
    checkpoint = small(tmp_path, "P", top_k=3)
    (module,) = loader.load(tmp_path, layers=[0]).values()
    for tokens in (1, 2, 9):
        x, ids, router = inputs(checkpoint, tokens)
        ids[:, 2] = ids[:, 0]
        wanted = moe64(layer_weights(checkpoint, 0, checkpoint.codes), x, ids, router)
        assert relative_error(module(x, ids, router).double().numpy(), wanted) <= 1e-5


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dialect", [*DIALECTS, "ct-int4-asym"])
def test_the_reference_is_right_as_well(tmp_path: Path, dialect: str, fused: bool) -> None:
    """Whatever else serves the host, the oracle of all others holds to the same."""
    with native.serving(native.REFERENCE):
        ok(small(tmp_path, dialect, fused=fused), ranks=3 if fused else 1)


# 7.2 Small batches


def spread(tokens: int, top_k: int, experts: int) -> torch.Tensor:
    """Routing over all experts in turn."""
    return torch.arange(tokens * top_k).view(tokens, top_k) % experts


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_row_does_not_depend_on_its_neighbours(
    tmp_path: Path, dialect: str, dtype: torch.dtype
) -> None:
    checkpoint = small(tmp_path, dialect)
    (module,) = loader.load(tmp_path, layers=[1]).values()
    weights = layer_weights(checkpoint, 1, checkpoint.codes)
    one, ids, router = inputs(checkpoint, 1, seed=7)
    wanted = moe64(weights, one, ids, router)
    alone = module(one.to(dtype), ids, router)
    assert relative_error(alone.double().numpy(), wanted) <= TOLERANCES[dtype]
    for tokens in (2, 3, 8, 9, 15, 16, 17, 64):
        for to_one in (False, True):
            x, _, w = inputs(checkpoint, tokens, seed=tokens)
            others = torch.full((tokens, 2), 3) if to_one else spread(tokens, 2, 4)
            # Neighbours far larger than the row itself must not be felt.
            x = x * 64
            for place in (0, tokens - 1):
                x[place], others[place], w[place] = one[0], ids[0], router[0]
            found = module(x.to(dtype), others, w)
            every = moe64(weights, x.to(dtype), others, w)
            for row in (0, tokens - 1):
                error = relative_error(found[row].double().numpy(), wanted[0])
                assert error <= TOLERANCES[dtype], (tokens, to_one, row)
            middle = found[1:-1].double().numpy()
            if len(middle) and dtype != torch.float16:
                assert relative_error(middle, every[1:-1]) <= TOLERANCES[dtype]


# 7.3 Asked for one kernel, got another


def mixed(folder: Path, dialect: str = "M") -> TinyCheckpoint:
    """Two MoE layers, the second not quantized: no fast route can take it."""
    return small(folder, dialect, excluded=(1,))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_auto_falls_back_and_says_why(
    tmp_path: Path, dialect: str, caplog: pytest.LogCaptureFixture
) -> None:
    mixed(tmp_path, dialect)
    with caplog.at_level(logging.WARNING):
        routes = routes_of(tmp_path)
    assert [route for route, _ in routes[0]] == list(FIELDS)
    assert [route for route, _ in routes[1]] == ["legacy"] * 3
    for name, (_, reason) in zip(FIELDS[:2], routes[1][:2], strict=True):
        assert name in reason and "not quantized" in reason
    assert routes[1][2][1] == "excluded by config"
    warned = [record.getMessage() for record in caplog.records if "legacy" in record.getMessage()]
    assert len(warned) == len(set(warned)) == 2 and all("[1]" in line for line in warned)


def test_one_line_for_a_reason_that_many_layers_share(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small(tmp_path, "P", layers=5, excluded=(1, 3, 4))
    with caplog.at_level(logging.WARNING):
        loader.load(tmp_path)
    warned = [record.getMessage() for record in caplog.records if "legacy" in record.getMessage()]
    assert len(warned) == 2 and all("[1, 3, 4]" in line for line in warned)


@pytest.mark.parametrize("by", ["policy", "environment"])
@pytest.mark.parametrize("switch", SWITCHES)
def test_on_that_cannot_be_honoured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switch: str, by: str
) -> None:
    mixed(tmp_path)
    settings: dict[str, Any] = {}
    cli: tuple[str, ...] = ()
    if by == "policy":
        settings = {"policy": loader.Policy(**{switch: "on"})}
        cli = (f"--{switch.replace('_', '-')}", "on")
    else:
        monkeypatch.setenv(SWITCHES[switch], "1")
    error = refuse(
        tmp_path,
        loader.PolicyError,
        settings=settings,
        cli=cli,
        layer=1,
        expected="int4 or e2m1",
        found="not quantized",
        says=(f"{switch}=on", "quantized experts"),
    )
    assert ("argument" if by == "policy" else f"{SWITCHES[switch]}=1") in error.what
    loader.load(tmp_path, layers=[0], **settings)


@pytest.mark.parametrize("by", ["policy", "environment"])
@pytest.mark.parametrize("switch", SWITCHES)
def test_off_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switch: str, by: str
) -> None:
    checkpoint = mixed(tmp_path)
    policy = {switch: "off"} if by == "policy" else {}
    if by == "environment":
        monkeypatch.setenv(SWITCHES[switch], "0")
    routes = routes_of(tmp_path, **policy)
    place = FIELDS.index(switch)
    assert routes[0][place][0] == "legacy" and f"{switch}=off" in routes[0][place][1]
    assert [route for route, _ in routes[0]].count("legacy") == 2
    module = loader.load(tmp_path, policy=loader.Policy(**policy))[0]
    for tokens in (1, 2, 8, 9):
        x, ids, router = inputs(checkpoint, tokens)
        wanted = moe64(layer_weights(checkpoint, 0, checkpoint.codes), x, ids, router)
        found = module(x, ids, router)
        assert relative_error(found.double().numpy(), wanted) <= 1e-5
        if tokens == (1 if switch == "qpn_m1" else 2):
            assert torch.equal(found, run_route(module, [0, 0], x, ids, router))


@pytest.mark.parametrize("value", ["2", "true", "on", "", "01", " 1", "-1"])
@pytest.mark.parametrize("variable", [*SWITCHES.values(), "QPN_COMPACT_METADATA"])
def test_other_values_of_a_variable_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    small(tmp_path, "A")
    monkeypatch.setenv(variable, value)
    refuse(
        tmp_path,
        loader.PolicyError,
        expected="unset, 0 or 1",
        found=repr(value),
        says=(variable,),
    )


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("argument, variable", [("on", "0"), ("off", "1")])
def test_the_argument_wins(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    switch: str,
    argument: str,
    variable: str,
) -> None:
    small(tmp_path, "A")
    monkeypatch.setenv(SWITCHES[switch], variable)
    routes = routes_of(tmp_path, **{switch: argument})
    route, reason = routes[0][FIELDS.index(switch)]
    assert route == (switch if argument == "on" else "legacy")
    assert f"{switch}={argument} (argument)" in reason
    # And where the argument says nothing, the variable counts.
    route, reason = routes_of(tmp_path)[0][FIELDS.index(switch)]
    assert route == (switch if variable == "1" else "legacy")


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7", "meta", "nonsense"])
def test_a_machine_without_that_device(tmp_path: Path, device: str) -> None:
    small(tmp_path, "A")
    error = refused_on(tmp_path, device)
    assert isinstance(error, loader.UnsupportedError) and device in str(error)
    for name in ("plan", "load"):
        code, out, err = command(name, str(tmp_path), "--device", device)
        assert (code, out) == (1, "")
        assert err.count("\n") == 1 and err.startswith("qpn: ") and device in err


def refused_on(folder: Path, device: str) -> loader.LoaderError:
    """The one error of plan and load on a device that nothing serves."""
    if device.startswith("cuda") and torch.cuda.is_available():
        pytest.skip("this machine has such a card")
    with pytest.raises(loader.LoaderError) as planned:
        loader.plan(folder, device=device)
    with pytest.raises(loader.LoaderError) as loaded:
        loader.load(folder, device=device)
    assert str(planned.value) == str(loaded.value)
    return planned.value


@pytest.mark.parametrize(
    "policy", [{"qpn_m1": "yes"}, {"qpn_grouped": True}, {"layout": "dense"}, {"nonfinite": "fix"}]
)
def test_other_values_of_the_policy_are_refused(policy: dict[str, Any]) -> None:
    with pytest.raises(loader.PolicyError) as caught:
        loader.Policy(**policy)
    assert caught.value.expected and caught.value.found == repr(next(iter(policy.values())))


def test_a_decision_is_frozen_with_the_layer(tmp_path: Path) -> None:
    small(tmp_path, "A")
    module = loader.load(tmp_path, layers=[0])[0]
    for name in ("routes", "policy", "shard", "spec"):
        with pytest.raises(loader.LifecycleError) as caught:
            setattr(module, name, getattr(module, name))
        assert caught.value.layer == 0 and name in str(caught.value)


def test_a_refusal_names_what_it_needs_before_anything_is_read(tmp_path: Path) -> None:
    """Record has no form for NVFP4: named by layer, before memory is taken."""
    small(tmp_path, "N")
    refuse(
        tmp_path,
        loader.PolicyError,
        settings={"policy": loader.Policy(layout="record")},
        cli=("--layout", "record"),
        layer=0,
        expected="wide or compact",
        found=PRESENT,
    )

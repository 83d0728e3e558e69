"""The states of a layer: order, observers, and what a failure tells whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lifecycle_fakes import DIALECTS, checkpoint
from load_fakes import (
    SMALL,
    STATES,
    TINY_STAGING,
    Allocations,
    Raiser,
    RecordingSource,
    bits,
    module_of,
    nothing_left,
    quantization_of,
    recorded,
)

import loader
from loader import LayerEvent, LifecycleError, Policy
from loader.lifecycle import Lifecycle

NEXT: dict[str | None, set[str]] = {
    None: {"planned"},
    "planned": {"reading"},
    "reading": {"reading", "converting"},
    "converting": {"prepared"},
    "prepared": {"released"},
    "released": {"ready"},
    "ready": set(),
    "failed": set(),
}


# The machine by itself


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([*STATES, "failed", "flying"]), max_size=12))
def test_only_the_transitions_of_the_contract_are_taken(steps: list[str]) -> None:
    told: list[LayerEvent] = []
    life = Lifecycle([0], [told.append])
    now: str | None = None
    taken: list[str] = []
    for step in steps:
        if step in NEXT[now]:
            life.enter(0, step, 7)
            now = step
            taken.append(step)
            continue
        with pytest.raises(LifecycleError, match="cannot take this step") as caught:
            life.enter(0, step, 7)
        assert (caught.value.layer, caught.value.found) == (0, step)
        assert life.state(0) == now
    assert [event.state for event in told] == taken
    assert all(event.bytes == 7 and event.layer == 0 for event in told)
    assert [e.seconds for e in told] == sorted(e.seconds for e in told)


@given(st.sampled_from([None, *STATES]))
@settings(deadline=None)
def test_a_layer_can_fail_from_every_state_once(until: str | None) -> None:
    told: list[LayerEvent] = []
    life = Lifecycle([3], [told.append])
    for state in STATES[: 0 if until is None else STATES.index(until) + 1]:
        life.enter(3, state)
    assert life.fail() == []
    assert life.fail() == []
    failed = [event for event in told if event.state == "failed"]
    assert len(failed) == (until is not None)
    with pytest.raises(LifecycleError):
        life.enter(3, "planned" if until else "reading")


def test_layers_are_apart() -> None:
    life = Lifecycle([0, 1])
    life.enter(0, "planned")
    life.enter(0, "reading")
    with pytest.raises(LifecycleError, match="layer 1"):
        life.enter(1, "reading")
    life.enter(1, "planned")
    life.enter(0, "converting")
    assert (life.state(0), life.state(1), life.state(2)) == ("converting", "planned", None)


def test_an_observer_that_raises_is_the_cause_and_is_named() -> None:
    cause = KeyError("lost")

    def hook(event: LayerEvent) -> None:
        raise cause

    with pytest.raises(LifecycleError) as caught:
        Lifecycle([5], [hook]).enter(5, "planned")
    error = caught.value
    assert error.__cause__ is cause
    assert error.layer == 5
    assert "planned" in str(error) and "KeyError" in str(error) and "hook" in str(error)


def test_an_interrupt_in_an_observer_stays_an_interrupt() -> None:
    raiser = Raiser("planned", error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        Lifecycle([0], [raiser]).enter(0, "planned")


def test_every_observer_hears_of_a_failure_whatever_the_others_do() -> None:
    first, second = Raiser("failed"), Raiser()
    life = Lifecycle([0, 1], [first, second])
    life.enter(0, "planned")
    life.enter(1, "planned")
    raised = life.fail()
    assert [error.layer for error in raised] == [0, 1]
    assert all(error.__cause__ is first.error for error in raised)
    assert second.states(0) == second.states(1) == ["planned", "failed"]


# Events of a load


@pytest.mark.parametrize("layout", ["compact", "wide"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_events_of_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, dialect: str, layout: str
) -> None:
    checkpoint(tmp_path, dialect, layers=3, excluded=(1,), scale_dtype=scales(dialect))
    log: list[Any] = []
    source = recorded(tmp_path, way, monkeypatch, log)
    experts = loader.load(
        source, policy=Policy(layout=layout), staging_bytes=TINY_STAGING, observers=[log.append]
    )
    source.close()
    events = [entry for entry in log if isinstance(entry, LayerEvent)]
    planned = [event for event in events if event.state == "planned"]
    assert [event.layer for event in planned] == [0, 1, 2]
    assert log[:3] == planned, "every layer is planned before any payload is read"
    read = sum(entry[3] for entry in log if not isinstance(entry, LayerEvent))
    gaps = sum(event.bytes for event in planned) - read
    assert gaps == 0 or way == "direct" and 0 < gaps < 3 * 4096
    for layer in range(3):
        own = [event for event in events if event.layer == layer]
        check_layer(own, sum(tensor.nbytes for tensor in experts[layer].banks()))
    assert {entry["releases"] for entry in experts.report.to_dict()["layers"]} == {1}
    assert [e.seconds for e in events] == sorted(e.seconds for e in events)


def scales(dialect: str) -> str | None:
    return None if "nvfp4" in dialect else "F16"  # `wide` holds no small bf16 scale


def check_layer(own: list[LayerEvent], bank_bytes: int) -> None:
    states = [event.state for event in own]
    chunks = states.count("reading") - 1
    assert states == ["planned", *["reading"] * (chunks + 1), *STATES[2:]]
    reading = [event.bytes for event in own if event.state == "reading"]
    assert chunks > 1 and reading[0] == 0
    assert all(a < b for a, b in zip(reading, reading[1:], strict=False))
    assert reading[-1] == own[0].bytes
    by_state = {event.state: event.bytes for event in own}
    assert by_state["prepared"] == by_state["ready"] == bank_bytes
    assert by_state["converting"] == 0


def test_released_bytes_are_the_cache(tmp_path: Path) -> None:
    checkpoint(tmp_path, "modelopt-nvfp4", layers=1)
    for layout, expected in (("compact", 0), ("wide", SMALL["experts"] * 3 * 4)):
        raiser = Raiser()
        loader.load(tmp_path, policy=Policy(layout=layout), observers=[raiser])
        assert [e.bytes for e in raiser.events if e.state == "released"] == [expected]


def test_the_next_layer_may_be_read_before_this_one_is_released(tmp_path: Path) -> None:
    checkpoint(tmp_path, layers=2)
    source = RecordingSource(tmp_path)
    seen: list[int] = []

    def at_release(event: LayerEvent) -> None:
        if event.state == "reading" and event.layer == 0:
            seen.append(source.payload_reads)

    loader.load(source, observers=[at_release])
    source.close()
    assert len(seen) == 2, "one chunk a layer"


# Observers that raise


@pytest.mark.parametrize("also_failed", [False, True])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("state", STATES)
def test_an_observer_that_raises_fails_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, layer: int, also_failed: bool
) -> None:
    checkpoint(tmp_path, layers=3)
    raiser, witness = Raiser(state, layer, also_failed=also_failed), Raiser()
    allocations = Allocations(monkeypatch)
    with nothing_left(allocations):
        with pytest.raises(LifecycleError) as caught:
            loader.load(tmp_path, observers=[raiser, witness])
        assert allocations.alive() == 0
    assert caught.value.__cause__ is raiser.error
    assert f"at {state}" in str(caught.value) and caught.value.layer == layer
    known = {event.layer for event in raiser.events}
    for number in known:
        assert raiser.states(number)[-1] == "failed"
        assert raiser.states(number).count("failed") == 1
        assert [s for s in witness.states(number) if s == "failed"] == ["failed"]
    assert len(loader.load(tmp_path)) == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_an_interrupt_at_failed_comes_after_the_memory_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    checkpoint(tmp_path, layers=2)
    allocations = Allocations(monkeypatch)
    first = Raiser("prepared", 1)
    with nothing_left(allocations), pytest.raises(type(error)) as caught:
        loader.load(tmp_path, observers=[first, Raiser("failed", error=error)])
    cause = caught.value.__context__
    assert isinstance(cause, LifecycleError) and cause.__cause__ is first.error


@pytest.mark.parametrize("also_failed", [False, True])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("dialect", ["awq-gemm", "modelopt-nvfp4"])
def test_an_observer_that_raises_fails_the_conversion_in_place(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dialect: str,
    state: str,
    also_failed: bool,
) -> None:
    made = checkpoint(tmp_path, dialect, layers=1)
    module = module_of(made)
    before = {name: (t.data_ptr(), bits(t)) for name, t in module.named_parameters()}
    raiser, witness = Raiser(state, also_failed=also_failed), Raiser()
    allocations = Allocations(monkeypatch)
    with pytest.raises(LifecycleError) as caught:
        loader.prepare_module(
            module, quantization=quantization_of(made), observers=[raiser, witness]
        )
    assert caught.value.__cause__ is raiser.error
    assert raiser.states(0)[-1] == witness.states(0)[-1] == "failed"
    after = {name: (t.data_ptr(), bits(t)) for name, t in module.named_parameters()}
    if state in ("released", "ready"):
        assert not after, "the sources are gone by then, and the result stays instead"
        assert module.experts.layer == 0
        return
    assert after == before
    assert allocations.alive() == 0
    assert not list(module.children())
    loader.prepare_module(module, quantization=quantization_of(made))


class Unsayable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def test_an_error_without_words_fails_the_load_as_any_other(tmp_path: Path) -> None:
    made = checkpoint(tmp_path, "awq-gemm", layers=1)
    raiser = Raiser("converting", error=Unsayable())
    with pytest.raises(LifecycleError, match="Unsayable, whose message is a ValueError itself"):
        loader.load(made.folder, observers=[raiser])
    assert raiser.states(0)[-1] == "failed"

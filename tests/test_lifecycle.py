"""The states of a layer: order, observers, and what a failure tells whom."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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
from loader import LayerEvent, LifecycleError, LoaderError, Policy, native
from loader.converter import ConversionCache
from loader.lifecycle import Lifecycle
from loader.testing.checkpoint import TinyCheckpoint, tiny_checkpoint

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
DIALECTS = ("awq-gemm", "awq-gptqmodel", "ct-int4-asym", "ct-nvfp4", "modelopt-nvfp4")


def checkpoint(folder: Path, dialect: str = "awq-gemm", **more: Any) -> TinyCheckpoint:
    given = dict(SMALL, dialect=dialect, attention=False, **more)
    if "nvfp4" in dialect:
        given["group"] = None
    return tiny_checkpoint(folder, **given)


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


# The release


class ReleaseSpy:
    """Checks at each release what must be gone and what must be there; counts discards."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order: list[str] = []
        self.direct = False
        read = native.read

        def spy_read(*args: Any) -> Any:
            self.direct = True
            return read(*args)

        monkeypatch.setattr(native, "read", spy_read)
        self.chunks: list[weakref.ref[torch.Tensor]] = []
        self.extra: list[weakref.ref[torch.Tensor]] = []
        self.prepared: list[torch.Tensor] = []
        write, finish = native.write, native.finish
        release, discard = ConversionCache.release, ConversionCache.discard

        def spy_write(chunk: torch.Tensor, *rest: Any) -> Any:
            self.chunks.append(weakref.ref(chunk))
            return write(chunk, *rest)

        def spy_finish(banks: list[torch.Tensor], *rest: Any) -> Any:
            self.order.append("finish")
            self.prepared = list(banks)
            return finish(banks, *rest)

        def spy_release(cache: ConversionCache) -> int:
            assert (self.chunks or self.direct) and not any(
                ref() is not None for ref in self.chunks
            )
            assert not any(ref() is not None for ref in self.extra)
            assert self.order[-2:] == ["finish", "prepared"]
            self.order.append("release")
            return release(cache)

        def spy_discard(cache: ConversionCache) -> None:
            self.order.append("discard")
            discard(cache)

        monkeypatch.setattr(native, "write", spy_write)
        monkeypatch.setattr(native, "finish", spy_finish)
        monkeypatch.setattr(ConversionCache, "release", spy_release)
        monkeypatch.setattr(ConversionCache, "discard", spy_discard)

    def __call__(self, event: LayerEvent) -> None:
        if event.state == "reading":
            assert not any(ref() is not None for ref in self.chunks), "what was consumed is let go"
        if event.state not in ("planned", "reading", "converting"):
            self.order.append(event.state)
        if event.state == "prepared":
            assert self.prepared and event.bytes == sum(t.nbytes for t in self.prepared)


WHOLE = ["finish", "prepared", "release", "released", "ready"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_release_of_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, dialect: str
) -> None:
    checkpoint(tmp_path, dialect, layers=2)
    spy = ReleaseSpy(monkeypatch)
    with recorded(tmp_path, way, monkeypatch) as source:
        experts = loader.load(source, observers=[spy], staging_bytes=TINY_STAGING)
    assert spy.direct == (way == "direct")
    assert spy.order == WHOLE * 2
    assert all(a is b for a, b in zip(spy.prepared, experts[1].banks(), strict=True))


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_release_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dialect: str, buffers: bool
) -> None:
    made = checkpoint(tmp_path, dialect, layers=1)
    module = module_of(made, buffers=buffers)
    spy = ReleaseSpy(monkeypatch)
    tensors = [*module.parameters(), *module.buffers()]
    spy.extra = [weakref.ref(tensor) for tensor in tensors]
    sources = sum(tensor.nbytes for tensor in tensors)
    del tensors
    raiser = Raiser()
    loader.prepare_module(module, quantization=quantization_of(made), observers=[spy, raiser])
    assert spy.order == WHOLE
    released = [event.bytes for event in raiser.events if event.state == "released"]
    assert released == [sources], "what went back: the sources, and an empty cache"


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("stage", ["write", "finish"])
def test_no_release_after_a_failed_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, in_place: bool, stage: str
) -> None:
    made = checkpoint(tmp_path, layers=2)
    spy = ReleaseSpy(monkeypatch)
    source = recorded(tmp_path, way, monkeypatch)
    if stage == "write" and way == "direct" and not in_place:
        stage = "read"
    done = getattr(native, stage)
    calls: list[int] = []

    def broken(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2 - in_place:
            raise RuntimeError("no such instruction")
        return done(*args)

    monkeypatch.setattr(native, stage, broken)
    with pytest.raises(LoaderError, match="no such instruction") as caught:
        if in_place:
            loader.prepare_module(
                module_of(made), quantization=quantization_of(made), observers=[spy]
            )
        else:
            loader.load(source, observers=[spy])
    source.close()
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert spy.order == (
        ["discard", "failed"] if in_place else [*WHOLE, "discard", *["failed"] * 2]
    )


def test_a_cache_is_released_once(tmp_path: Path) -> None:
    checkpoint(tmp_path, "modelopt-nvfp4")
    spec = loader.plan(tmp_path, policy=Policy(layout="wide")).layers[0].spec
    cache = ConversionCache(spec, torch.device("cpu"))
    assert cache.release() == cache.nbytes > 0
    with pytest.raises(AssertionError, match="released twice"):
        cache.release()
    assert cache.released == 1

"""The recorder: each assertion holds for a load as it is, and fails for what it is about alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from load_fakes import SMALL, STATES, Raiser, module_of, quantization_of

import loader
from loader import LayerEvent, LoaderError, memory
from loader.testing import LifecycleRecorder, TinyCheckpoint, lifecycle_recorder, tiny_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> TinyCheckpoint:
    return tiny_checkpoint(tmp_path / "checkpoint", **SMALL, layers=3, attention=False)


def replayed(
    events: list[LayerEvent], change: Callable[[list[LayerEvent]], list[LayerEvent]]
) -> LifecycleRecorder:
    """A recorder that was told other events than a load tells."""
    recorder = lifecycle_recorder()
    for event in change(events):
        recorder(event)
    return recorder


def refused(recorder: LifecycleRecorder, assertion: str, *arguments: Any) -> list[list[str]]:
    """The table of a failed assertion, a list of cells for each row, without the names."""
    with pytest.raises(AssertionError) as caught:
        getattr(recorder, assertion)(*arguments)
    title, _, names, _, *rows = str(caught.value).splitlines()
    assert re.search(r": \d+ of \d+ checks$", title)
    assert names.split() == ["layer", "what", "expected", "found"]
    return [re.split(r" {2,}", row.strip()) for row in rows]


def test_all_assertions_hold_for_a_load(checkpoint: TinyCheckpoint) -> None:
    recorder = lifecycle_recorder()
    recorder.watch(checkpoint)
    experts = loader.load(checkpoint, observers=[recorder])
    recorder.assert_released_once()
    recorder.assert_sources_gone()
    recorder.assert_bytes(experts.report)
    recorder.assert_bytes(loader.plan(checkpoint))
    recorder.assert_bytes({n: layer.spec.nbytes() for n, layer in experts.items()})
    assert recorder.states(1) == STATES and recorder.states(7) == ()
    assert [event.layer for event in recorder.events if event.state == "ready"] == [0, 1, 2]


def test_all_assertions_hold_for_one_module_after_the_other(checkpoint: TinyCheckpoint) -> None:
    recorder = lifecycle_recorder()
    quantization, banks = quantization_of(checkpoint), {}
    for layer in range(3):
        module = module_of(checkpoint, layer)
        recorder.watch(module, layer)
        prepared = loader.prepare_module(
            module, quantization=quantization, layer=layer, observers=[recorder]
        )
        banks[layer] = prepared.spec.nbytes()
    recorder.assert_released_once()
    recorder.assert_sources_gone()
    recorder.assert_bytes(banks)


def test_a_load_nobody_saw_proves_nothing(checkpoint: TinyCheckpoint) -> None:
    for assertion in ("assert_released_once", "assert_sources_gone", "assert_nothing_left"):
        rows = refused(lifecycle_recorder(), assertion)
        assert rows == [["layers", "some", "none"]]
    assert refused(lifecycle_recorder(), "assert_bytes", {}) == [["layers", "some", "none"]]


# --- released once ------------------------------------------------------------------------------


def test_a_second_release_is_told_as_a_table(checkpoint: TinyCheckpoint) -> None:
    first = lifecycle_recorder()
    loader.load(checkpoint, observers=[first])

    def twice(events: list[LayerEvent]) -> list[LayerEvent]:
        return [e for one in events for e in [one] * (1 + (one.state == "released"))]

    rows = refused(replayed(first.events, twice), "assert_released_once")
    assert rows == [[str(layer), "releases", "1", "2"] for layer in range(3)]


def test_steps_that_are_missing_or_out_of_turn_are_told(checkpoint: TinyCheckpoint) -> None:
    first = lifecycle_recorder()
    loader.load(checkpoint, observers=[first])

    def without(events: list[LayerEvent]) -> list[LayerEvent]:
        return [e for e in events if (e.layer, e.state) != (1, "released")]

    (releases, states) = refused(replayed(first.events, without), "assert_released_once")
    assert releases == ["1", "releases", "1", "0"]
    assert states == [
        "1",
        "states",
        " ".join(STATES),
        " ".join(s for s in STATES if s != "released"),
    ]

    def early(events: list[LayerEvent]) -> list[LayerEvent]:
        order = [0, 1, 2, 4, 3, 5]
        return sorted(events, key=lambda e: (e.layer, order[STATES.index(e.state)]))

    rows = refused(replayed(first.events, early), "assert_released_once")
    assert [row[:2] for row in rows] == [[str(layer), "states"] for layer in range(3)]


# --- sources gone -------------------------------------------------------------------------------


def test_a_parameter_that_somebody_holds_is_told(checkpoint: TinyCheckpoint) -> None:
    module = module_of(checkpoint, 2)
    recorder = lifecycle_recorder()
    recorder.watch(module, 2)
    held = module.w2_qweight.detach()[1:]
    loader.prepare_module(
        module, quantization=quantization_of(checkpoint), layer=2, observers=[recorder]
    )
    size = str(held.untyped_storage().nbytes())
    rows = refused(recorder, "assert_sources_gone")
    assert rows == [["2", "source bytes left on the module", "0", size]]
    recorder.assert_released_once()


def test_a_module_that_was_never_converted_is_told(checkpoint: TinyCheckpoint) -> None:
    recorder = lifecycle_recorder()
    recorder.watch(module_of(checkpoint, 1), 5)
    loader.load(checkpoint, observers=[recorder])
    rows = refused(recorder, "assert_sources_gone")
    assert rows == [["5", "source bytes left on the module", "0", "no release"]]


@pytest.mark.parametrize("mapped", [False, True], ids=["open", "mapped"])
def test_a_file_that_somebody_uses_is_told(checkpoint: TinyCheckpoint, mapped: bool) -> None:
    recorder = lifecycle_recorder()
    recorder.watch(checkpoint)
    loader.load(checkpoint, observers=[recorder])
    (file,) = checkpoint.files()
    if mapped:
        held: Any = torch.from_file(str(file), size=64, dtype=torch.uint8, shared=False)
        (row,) = refused(recorder, "assert_sources_gone")
    else:
        with open(file, "rb") as held:
            (row,) = refused(recorder, "assert_sources_gone")
    assert row[-2:] == ["none", file.name]
    del held
    recorder.assert_sources_gone()


def test_bytes_that_were_not_consumed_are_told(checkpoint: TinyCheckpoint) -> None:
    first = lifecycle_recorder()
    loader.load(checkpoint, observers=[first])

    def short(events: list[LayerEvent]) -> list[LayerEvent]:
        return [e for e in events if e.layer or e.state != "reading" or not e.bytes]

    planned = next(e.bytes for e in first.events if e.state == "planned")
    rows = refused(replayed(first.events, short), "assert_sources_gone")
    assert rows == [["0", "source bytes consumed", str(planned), "0"]]


# --- nothing on failure -------------------------------------------------------------------------


@pytest.mark.parametrize("state", STATES)
def test_a_load_that_fails_leaves_nothing(checkpoint: TinyCheckpoint, state: str) -> None:
    recorder = lifecycle_recorder()
    with pytest.raises(LoaderError) as caught:
        loader.load(checkpoint, observers=[recorder, Raiser(state, 1)])
    others = loader.load(checkpoint)  # not observed, and none of the recorder's business
    recorder.assert_nothing_left()
    assert caught.value.layer == 1 and len(others) == 3
    # The same recorder takes the next load as if nothing had been.
    experts = loader.load(checkpoint, observers=[recorder], layers=[2])
    recorder.assert_released_once()
    recorder.assert_bytes(experts.report)


def test_a_module_that_fails_leaves_nothing_and_those_before_it_stay(
    checkpoint: TinyCheckpoint,
) -> None:
    recorder = lifecycle_recorder()
    done = []
    for layer, observer in ((0, Raiser()), (1, Raiser("converting"))):
        module = module_of(checkpoint, layer)
        try:
            done.append(
                loader.prepare_module(
                    module,
                    quantization=quantization_of(checkpoint),
                    layer=layer,
                    observers=[recorder, observer],
                )
            )
        except LoaderError:
            recorder.assert_nothing_left()
    assert len(done) == 1 and recorder.states(1)[-1] == "failed"


def test_a_load_that_did_not_fail_is_told(checkpoint: TinyCheckpoint) -> None:
    recorder = lifecycle_recorder()
    experts = loader.load(checkpoint, observers=[recorder])
    rows = refused(recorder, "assert_nothing_left")
    resident = str(experts.report.memory.resident)
    assert rows == [
        *([str(layer), "last state", "failed", "ready"] for layer in range(3)),
        ["bytes that are still allocated", "0", resident],
    ]


def test_memory_that_is_left_is_told_to_the_byte(
    checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[torch.Tensor] = []
    recorder = lifecycle_recorder()
    monkeypatch.setattr(
        loader.converter.LayerBanks, "split", lambda banks: kept.extend(banks.tensors) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        loader.load(checkpoint, observers=[recorder])
    (row,) = refused(recorder, "assert_nothing_left")
    assert row == ["bytes that are still allocated", "0", str(memory.storage_bytes(kept))]
    kept.clear()
    recorder.assert_nothing_left()


def test_memory_that_the_process_holds_is_told(checkpoint: TinyCheckpoint) -> None:
    recorder = lifecycle_recorder()
    earlier = torch.ones(24 << 20, dtype=torch.uint8)  # before the load began: not left by it
    with pytest.raises(LoaderError):
        loader.load(checkpoint, observers=[recorder, Raiser("ready", 2)])
    recorder.assert_nothing_left()
    held = torch.ones(24 << 20, dtype=torch.uint8)
    ((what, expected, found),) = refused(recorder, "assert_nothing_left")
    assert (what, expected) == ("host anonymous bytes", f"at most {8 << 20}")
    assert int(found) > 16 << 20
    recorder.assert_nothing_left(tolerance_bytes=64 << 20)
    del held, earlier


def test_a_release_after_the_failure_is_told() -> None:
    events = [LayerEvent(0, "planned", 0.0, 1), LayerEvent(1, "planned", 0.0, 1)]
    events += [LayerEvent(1, "failed", 1.0, 0), LayerEvent(0, "released", 1.0, 0)]
    events += [LayerEvent(0, "failed", 1.0, 0)]
    rows = refused(replayed(events, list), "assert_nothing_left")
    assert rows == [["releases after the failure", "0", "1"]]


# --- bytes of a card ----------------------------------------------------------------------------


def test_bytes_of_another_card_are_told_by_layer_and_sum(checkpoint: TinyCheckpoint) -> None:
    recorder = lifecycle_recorder()
    loader.load(checkpoint, observers=[recorder], layers=[0, 1])
    whole = {n: loader.plan(checkpoint).layers[n].spec.nbytes() for n in range(3)}
    assert refused(recorder, "assert_bytes", {**whole, 0: 7}) == [
        ["0", "bank bytes", "7", str(whole[0])],
        ["2", "bank bytes", str(whole[2]), "not loaded"],
        ["all", "bank bytes", str(7 + whole[1] + whole[2]), str(whole[0] + whole[1])],
    ]
    assert refused(recorder, "assert_bytes", {0: whole[0]}) == [
        ["1", "bank bytes", "not expected", str(whole[1])],
        ["all", "bank bytes", str(whole[0]), str(whole[0] + whole[1])],
    ]
    other = loader.plan(checkpoint, loader.Shard(tp_rank=1, tp_size=2), layers=[0, 1])
    rows = refused(recorder, "assert_bytes", other)
    assert [row[:2] for row in rows[-2:]] == [["all", "bank bytes"], ["all", "banks and workspace"]]


def test_a_report_that_measured_something_else_is_told(checkpoint: TinyCheckpoint) -> None:
    recorder = lifecycle_recorder()
    experts = loader.load(checkpoint, observers=[recorder])
    resident = experts.report.memory.resident
    experts.report.memory.resident += 64
    rows = refused(recorder, "assert_bytes", experts.report)
    assert rows == [["all", "resident as measured", str(resident), str(resident + 64)]]


def test_staging_that_is_kept_is_told(
    checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader.stream.Staging, "close", lambda staging: None)
    kept: list[Any] = []
    staging = loader.stream.Staging
    monkeypatch.setattr(loader.stream, "Staging", lambda *a: kept.append(staging(*a)) or kept[0])
    recorder = lifecycle_recorder()
    experts = loader.load(checkpoint, observers=[recorder])
    (row,) = refused(recorder, "assert_bytes", experts.report)
    resident = experts.report.memory.resident
    held = resident + kept[0].table().nbytes
    assert row == ["all", "bytes held now", f"at most {resident}", str(held)]

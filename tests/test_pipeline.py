"""A whole load: what it holds, how it fails, and that it keeps out of everyone's way."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from load_fakes import (
    SMALL,
    TINY_STAGING,
    Allocations,
    Raiser,
    RecordingSource,
    banks_of,
    bits,
    nothing_left,
    recorded,
    same_bits,
)

import loader
from loader import (
    CapacityError,
    CheckpointError,
    ConversionError,
    LifecycleError,
    LoaderError,
    Policy,
    Shard,
    native,
)
from loader.testing.checkpoint import TinyCheckpoint, tiny_checkpoint
from loader.testing.container import edit_tensor, truncate_file

DIALECTS = (
    "awq-gemm",
    "awq-gptqmodel",
    "ct-int4",
    "ct-int4-asym",
    "ct-nvfp4",
    "modelopt-nvfp4",
)
SHARDS = (
    Shard(),
    Shard(tp_size=2, tp_rank=1),
    Shard(tp_size=4, tp_rank=3),
    Shard(ep_size=2, ep_rank=1),
    Shard(expert_ids=[2]),
    Shard(expert_ids=[3, 1], tp_size=2),
)


def make(folder: Path, dialect: str = "awq-gemm", **more: Any) -> TinyCheckpoint:
    settings: dict[str, Any] = dict(SMALL, dialect=dialect, attention=False)
    if "nvfp4" in dialect:
        settings["group"] = None
    else:
        settings["scale_dtype"] = "F16"
    return tiny_checkpoint(folder, **{**settings, **more})


# Bytes


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_was_predicted_is_what_stays(tmp_path: Path, dialect: str) -> None:
    make(tmp_path, dialect, layers=3, excluded=(1,))
    kinds = ("wide", "compact") if "nvfp4" in dialect else ("wide", "record", "compact")
    for layout in kinds:
        for shard in SHARDS:
            policy = Policy(layout=layout)
            plan = loader.plan(tmp_path, shard=shard, policy=policy)
            experts = loader.load(tmp_path, shard=shard, policy=policy)
            buffers = [t for layer in experts.values() for t in layer.buffers()]
            space = experts[0].workspace.tensors()
            distinct = {
                t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                for t in (*buffers, *space)
            }
            numbers = experts.report.to_dict()["memory"]
            assert plan.resident_bytes == numbers["predicted_resident"] == numbers["resident"]
            assert numbers["resident"] == sum(distinct.values())
            assert sum(t.nbytes for t in (*buffers, *space)) == numbers["resident"]
            by_category = [entry["bytes"] for entry in experts.report.to_dict()["layers"]]
            parts = ("weight", "metadata", "globals", "unquantized")
            total = sum(entry[part] for entry in by_category for part in parts)
            assert total + numbers["workspace"] == numbers["resident"]


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_predictions_hold_for_any_geometry(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    dialect = data.draw(st.sampled_from(DIALECTS))
    tp = data.draw(st.sampled_from([1, 2, 3]))
    group = data.draw(st.sampled_from([32, 48, 64, -1]))
    made = make(
        tmp_path_factory.mktemp("any"),
        dialect,
        hidden=16 * data.draw(st.integers(2, 6)),
        intermediate=16 * tp * data.draw(st.integers(1, 4)),
        experts=data.draw(st.integers(2, 5)),
        layers=data.draw(st.integers(1, 2)),
        fused=data.draw(st.booleans()),
        group=None if "nvfp4" in dialect else group,
        order=data.draw(st.sampled_from(["name", "dtype", "random"])),
    )
    layout = data.draw(st.sampled_from(["compact", "wide"]))
    shard = Shard(tp_size=tp, tp_rank=data.draw(st.integers(0, tp - 1)))
    experts = loader.load(made.folder, shard=shard, policy=Policy(layout=layout))
    numbers = experts.report.to_dict()["memory"]
    assert numbers["predicted_resident"] == numbers["resident"]
    assert {layer: experts[layer].layer for layer in experts} == {i: i for i in range(made.layers)}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_banks_do_not_depend_on_how_the_bytes_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, dialect: str
) -> None:
    make(tmp_path, dialect, shards=2, order="random")
    with native.serving(native.REFERENCE):
        whole = banks_of(loader.load(tmp_path))
    plan = loader.plan(tmp_path)
    smallest = None
    for staging in (TINY_STAGING, 1 << 16, 1 << 30):
        with recorded(tmp_path, way, monkeypatch) as source:
            experts = loader.load(source, staging_bytes=staging)
        numbers = experts.report.to_dict()["memory"]
        assert numbers["staging"] <= staging
        assert same_bits(banks_of(experts), whole)
        smallest = numbers["staging"] if smallest is None else smallest
    assert smallest is not None and smallest < plan.staging_bytes


def test_only_the_layers_asked_for_are_read(tmp_path: Path) -> None:
    make(tmp_path, layers=3)
    with RecordingSource(tmp_path) as source:
        experts = loader.load(source, layers=[2])
        read = sum(entry[3] for entry in source.log)
    assert list(experts) == [2]
    assert read == experts.report.to_dict()["layers"][0]["bytes"]["source"]


def test_the_report_counts_releases_and_bytes(tmp_path: Path) -> None:
    make(tmp_path, layers=3)
    report = loader.load(tmp_path).report
    content = json.loads(json.dumps(report.to_dict()))
    assert [entry["releases"] for entry in content["layers"]] == [1, 1, 1]
    assert content["bytes_read"] == sum(entry["bytes"]["source"] for entry in content["layers"])
    numbers = content["memory"]
    assert numbers["overhead"] == numbers["peak"] - numbers["baseline"] - numbers["resident"]


def test_a_source_of_the_caller_stays_open(tmp_path: Path) -> None:
    make(tmp_path)
    with RecordingSource(tmp_path) as source:
        first = banks_of(loader.load(source))
        assert same_bits(banks_of(loader.load(source)), first)
        with pytest.raises(CapacityError):
            loader.load(source, card_memory=1)
        assert source.size("config.json") > 0


# Failures


def fail_read(kind: str, path: Path) -> Callable[[], None]:
    """What happens to a file, or to the reader, in the middle of a load."""

    def act() -> None:
        if kind == "io":
            raise OSError(5, "Input/output error")
        if kind == "short":
            raise CheckpointError("file ends before the range that was asked for", file=path.name)
        if kind == "truncated":
            os.truncate(path, path.stat().st_size - 64)
        if kind == "rewritten":
            with open(path, "r+b") as file:
                file.write(b"\0")
            os.utime(path, ns=(1, 1))
        if kind == "replaced":  # in place: the same name, other bytes
            path.write_bytes(bytes(path.stat().st_size))
            os.utime(path, ns=(1, 1))
        if kind == "interrupt":
            raise KeyboardInterrupt

    return act


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("kind", ["io", "short", "truncated", "rewritten", "replaced"])
def test_a_read_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, kind: str, layer: int
) -> None:
    if way == "direct" and kind in ("io", "short"):
        pytest.skip("native code makes these errors itself: see the tests of the core")
    made = make(tmp_path / "bad", layers=3)
    make(tmp_path / "good", layers=3, seed=1)
    act = fail_read(kind, made.files()[0])
    raiser = Raiser()
    allocations = Allocations(monkeypatch)

    def before(number: int) -> None:
        if number == layer:
            act()

    with nothing_left(allocations):
        with (
            recorded(made.folder, way, monkeypatch, before=before) as source,
            pytest.raises(CheckpointError) as caught,
        ):
            loader.load(source, observers=[raiser])
        assert allocations.alive() == 0
    assert caught.value.layer == layer
    assert caught.value.file == "model.safetensors"
    assert [raiser.states(number)[-1] for number in range(3)] == ["failed"] * 3
    assert "ready" not in raiser.states(layer)
    assert len(loader.load(tmp_path / "good")) == 3


def test_a_file_that_changes_between_two_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Asking for the next chunk is only a hint: the error comes with the layer that is due."""
    made = make(tmp_path, layers=3)
    allocations = Allocations(monkeypatch)

    def change(event: Any) -> None:
        if (event.layer, event.state) == (0, "ready"):
            os.utime(made.files()[0], ns=(1, 1))

    with (
        nothing_left(allocations),
        recorded(tmp_path, way, monkeypatch) as source,
        pytest.raises(CheckpointError, match="changed while loading") as caught,
    ):
        loader.load(source, observers=[change])
    # What had been read ahead of the change by then is still what it was.
    assert caught.value.layer in ((1,) if way == "direct" else (1, 2))


def test_a_file_that_is_replaced_by_another_is_not_read(tmp_path: Path) -> None:
    """Renamed over: the open file is still the old one, and so is everything that is loaded."""
    made = make(tmp_path / "old", layers=2)
    other = make(tmp_path / "new", layers=2, seed=9)
    wanted = banks_of(loader.load(made.folder))

    def before(number: int) -> None:
        if number == 1:
            os.replace(other.files()[0], made.files()[0])

    with RecordingSource(made.folder, before=before) as source:
        assert same_bits(banks_of(loader.load(source)), wanted)


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("stage", ["write", "finish"])
@pytest.mark.parametrize("error", [RuntimeError("kernel"), KeyboardInterrupt(), SystemExit(1)])
def test_a_converter_that_raises(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    stage: str,
    layer: int,
    error: BaseException,
) -> None:
    make(tmp_path, layers=3)
    allocations = Allocations(monkeypatch)
    if stage == "write" and way == "direct":
        stage = "read"
    inner, calls = getattr(native, stage), iter(range(99))

    def broken(*args: Any) -> Any:
        result = inner(*args)
        if next(calls) == layer:
            raise error
        return result

    monkeypatch.setattr(native, stage, broken)
    wanted = ConversionError if isinstance(error, Exception) else type(error)
    with (
        nothing_left(allocations),
        recorded(tmp_path, way, monkeypatch) as source,
        pytest.raises(wanted) as caught,
    ):
        loader.load(source)
    if isinstance(error, Exception):
        assert caught.value.layer == layer and caught.value.__cause__ is error
    monkeypatch.setattr(native, stage, inner)
    assert len(loader.load(tmp_path)) == 3


def test_every_allocation_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "modelopt-nvfp4", layers=2)
    allocations = Allocations(monkeypatch)
    policy = Policy(layout="wide")
    loader.load(tmp_path, policy=policy)
    count = len(allocations.storages)
    assert count == 1 + 2 + 2 * 5, "workspace, staging, and of each layer four tensors and a cache"
    errors = (MemoryError("a"), OSError(12, "b"), torch.OutOfMemoryError("c"), KeyboardInterrupt())
    for number in range(count):
        allocations.storages.clear()
        allocations.fail_at, error = number, errors[number % 4]
        allocations.error = error
        wanted = CapacityError if isinstance(error, Exception) else KeyboardInterrupt
        with nothing_left(allocations), pytest.raises(wanted) as caught:
            loader.load(tmp_path, policy=policy)
        assert allocations.alive() == 0
        if isinstance(error, Exception):
            assert caught.value.__cause__ is error
            assert caught.value.layer == (None if number < 3 else (number - 3) // 5)
    allocations.fail_at = None
    assert len(loader.load(tmp_path, policy=policy)) == 2


@pytest.mark.parametrize("state", ["planned", "reading", "prepared", "ready"])
def test_an_interrupt_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    make(tmp_path, layers=2)
    allocations = Allocations(monkeypatch)
    witness = Raiser()
    with nothing_left(allocations), pytest.raises(KeyboardInterrupt):
        loader.load(tmp_path, observers=[Raiser(state, 1, error=KeyboardInterrupt()), witness])
    assert [witness.states(layer)[-1] for layer in range(2)] == ["failed", "failed"]


def test_a_bad_value_in_the_last_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(tmp_path, layers=3)
    name = made.name(2, 1, "up", "scales")

    def poison(scales: Any) -> None:
        scales[0, 5] = np.nan

    edit_tensor(made.folder, name, poison)
    allocations = Allocations(monkeypatch)
    with nothing_left(allocations), pytest.raises(ConversionError) as caught:
        loader.load(tmp_path)
    assert (caught.value.layer, caught.value.tensor) == (2, name)
    experts = loader.load(tmp_path, policy=Policy(nonfinite="warn"))
    assert len(experts.report.nonfinite) == 1 and name in experts.report.nonfinite[0]


def test_a_short_file_is_refused_before_anything_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(tmp_path)
    truncate_file(made.files()[0], drop=64)
    allocations = Allocations(monkeypatch)
    with nothing_left(allocations), pytest.raises(CheckpointError):
        loader.load(tmp_path)
    assert not allocations.storages


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"card_memory": 1000}, CapacityError),
        ({"staging_bytes": 64}, CapacityError),
        ({"layers": [7]}, LoaderError),
        ({"shard": Shard(tp_size=3)}, LoaderError),
        ({"policy": Policy(layout="record")}, LoaderError),
        ({"device": "meta"}, LoaderError),
    ],
)
def test_a_refusal_comes_before_any_allocation_event_or_payload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Any, error: type[LoaderError]
) -> None:
    make(tmp_path, "modelopt-nvfp4")
    allocations, raiser = Allocations(monkeypatch), Raiser()
    with nothing_left(allocations), RecordingSource(tmp_path) as source, pytest.raises(error):
        loader.load(source, observers=[raiser], **settings)
    assert not raiser.events and not source.log and not allocations.storages


def test_a_load_that_fails_while_another_error_is_handled_leaves_that_one_alone(
    tmp_path: Path,
) -> None:
    make(tmp_path)

    def mine() -> None:
        precious = [1, 2, 3]
        raise ValueError(len(precious))

    try:
        mine()
    except ValueError as outer:
        with pytest.raises(LifecycleError):
            loader.load(tmp_path, observers=[Raiser("ready")])
        assert outer.__traceback__ is not None and outer.__traceback__.tb_next is not None
        assert outer.__traceback__.tb_next.tb_frame.f_locals["precious"] == [1, 2, 3]


# Several at once


def test_two_loads_at_once(tmp_path: Path) -> None:
    folders = [make(tmp_path / str(i), d, seed=i).folder for i, d in enumerate(DIALECTS[::3])]
    wanted = [banks_of(loader.load(folder)) for folder in folders]
    barrier = threading.Barrier(len(folders))

    def work(folder: Path) -> list[torch.Tensor]:
        barrier.wait(300)
        return banks_of(loader.load(folder, staging_bytes=TINY_STAGING))

    with ThreadPoolExecutor(len(folders)) as pool:
        for _ in range(3):
            for found, right in zip(pool.map(work, folders), wanted, strict=True):
                assert same_bits(found, right)


def test_one_load_fails_while_another_runs(tmp_path: Path) -> None:
    good, bad = make(tmp_path / "good").folder, make(tmp_path / "bad", seed=1).folder
    wanted = banks_of(loader.load(good))
    barrier = threading.Barrier(2)
    at_reading = Raiser()

    def meet(event: Any) -> None:
        if (event.layer, event.state) == (0, "converting"):
            barrier.wait(300)

    def failing() -> LoaderError:
        with pytest.raises(LifecycleError) as caught:
            loader.load(bad, observers=[meet, Raiser("prepared"), at_reading])
        return caught.value

    with ThreadPoolExecutor(2) as pool:
        error, experts = pool.submit(failing), pool.submit(loader.load, good, observers=[meet])
        assert same_bits(banks_of(experts.result(300)), wanted)
        assert error.result(300).layer == 0


def test_forward_runs_while_another_load_does(tmp_path: Path) -> None:
    layer = loader.load(make(tmp_path / "a").folder)[0]
    other = make(tmp_path / "b", seed=3).folder
    x, ids = torch.randn(5, SMALL["hidden"]), torch.randint(0, 4, (5, 2))
    weights = torch.rand(5, 2)
    wanted = layer(x, ids, weights)
    running, stop = threading.Event(), threading.Event()
    wrong: list[int] = []

    def run() -> int:
        calls = 0
        while not stop.is_set():
            calls += 1
            if bits(layer(x, ids, weights)) != bits(wanted):
                wrong.append(calls)
            running.set()
        return calls

    with ThreadPoolExecutor(1) as pool:
        calls = pool.submit(run)
        assert running.wait(300)
        for _ in range(3):
            loader.load(other)
        stop.set()
        assert calls.result(300) > 0
    assert not wrong


def test_a_failed_load_leaves_a_loaded_one_alone(tmp_path: Path) -> None:
    folder = make(tmp_path).folder
    experts = loader.load(folder)
    before = [(t.data_ptr(), bits(t)) for t in banks_of(experts)]
    with pytest.raises(LifecycleError):
        loader.load(folder, observers=[Raiser("released", 1)])
    assert [(t.data_ptr(), bits(t)) for t in banks_of(experts)] == before

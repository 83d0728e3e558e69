"""A whole load: what it holds, and that it keeps out of everyone's way."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from load_fakes import (
    SMALL,
    TINY_STAGING,
    Raiser,
    RecordingSource,
    banks_of,
    bits,
    recorded,
    same_bits,
)
from pipeline_fakes import DIALECTS, SHARDS, make

import loader
from loader import (
    CapacityError,
    LifecycleError,
    LoaderError,
    Policy,
    Shard,
    native,
)

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

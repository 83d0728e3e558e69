"""Faults in the middle of a load to a card: its memory is back, and the next load succeeds."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from card import CARD, needs_card
from card_faults import POLICY, as_it_was, failing, on_host
from fault_cells import LAYERS, STAGING, make_checkpoint, right_banks
from fault_kinds import KINDS, LAYER, STATES, Bench, BenchSource, Kind, _acting
from load_fakes import banks_of, same_bits

import loader
from loader import memory
from loader.card import card_memory
from loader.cuda_core import CudaCore, CudaError
from loader.testing.checkpoint import TinyCheckpoint, tiny_checkpoint

pytestmark = needs_card()

MIB = 1 << 20


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "checkpoint"
    make_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def little(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """A load of 100 KB that fits where others did not."""
    folder = tmp_path_factory.mktemp("little")
    return tiny_checkpoint(folder, hidden=128, intermediate=96, experts=2, group=32, layers=1)


@pytest.fixture(autouse=True)
def _card_as_it_was() -> Iterator[None]:
    yield from as_it_was()


def load(source: Any, **more: Any) -> loader.LoadedExperts:
    given = {"policy": POLICY, "staging_bytes": STAGING, **more}
    return loader.load(source, CARD, **given)


def same_as_on_the_host(experts: loader.LoadedExperts, good: Path) -> bool:
    return same_bits(on_host(banks_of(experts)), right_banks(good))


def next_loads_are_right(good: Path, little: TinyCheckpoint) -> None:
    assert len(load(little.folder, policy=None)) == 1
    assert same_as_on_the_host(load(good), good)


# The matrix of faults, by native threads into a ring and by chunks that a source fills

SIGINT = Kind(
    "SIGINT",
    _acting(lambda bench: os.kill(os.getpid(), signal.SIGINT)),
    ("KeyboardInterrupt", ""),
)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("way", ("direct", "ahead"))
def test_a_fault_leaves_nothing_on_the_card(
    good: Path, little: TinyCheckpoint, tmp_path: Path, way: str, state: str
) -> None:
    for kind in (*KINDS, SIGINT):
        if way not in kind.ways:
            continue
        folder = tmp_path / "bench"
        shutil.copytree(good, folder)
        bench = Bench(folder, state, way)
        if kind.ends is None:
            with kind.setup(bench) as source:
                assert same_as_on_the_host(load(source, observers=[bench.observe]), good), kind.name
        else:
            with failing(kind.ends[0]) as found, kind.setup(bench) as source:
                load(source, observers=[bench.observe])
            assert kind.ends[1] in str(found[0]), (kind.name, found[0])
            assert getattr(found[0], "layer", None) in (None, 0, LAYER, LAYER + 1)
            last = {event.layer: event.state for event in bench.events}
            assert set(last.values()) == {"failed"}, (kind.name, last)
        assert bench.struck, kind.name
        shutil.rmtree(folder)
    next_loads_are_right(good, little)


@pytest.mark.parametrize("step", ("submit", "take", "release"))
def test_a_fault_of_the_ring_leaves_nothing(
    good: Path, little: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """CUDA refuses what it is asked in the middle of the stream, with copies under way."""
    from loader.ring import Ring

    inner = getattr(Ring, step)
    for number in (0, 1, 5, 9):
        left = iter(range(1 << 30))

        def refused(*args: Any, left: Any = left, number: int = number) -> Any:
            if next(left) == number:
                raise CudaError("a copy to the card failed", found="CUDA error 719")
            return inner(*args)

        with monkeypatch.context() as patch, failing("CudaError"):
            patch.setattr(Ring, step, refused)
            load(good)
    next_loads_are_right(good, little)


# Out of memory


def test_every_allocation_may_fail(
    good: Path, little: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says which layer, how much was asked for, and what the plan had predicted."""
    fresh = memory.fresh
    plan = loader.plan(good, policy=POLICY, device=CARD, staging_bytes=STAGING)
    said = set()
    for number in range(1 << 30):
        left = iter(range(1 << 30))

        def failing_fresh(*args: Any, left: Any = left, number: int = number) -> torch.Tensor:
            if next(left) == number:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a lot")
            return fresh(*args)

        done: list[Any] = []
        with monkeypatch.context() as patch:
            patch.setattr(memory, "fresh", failing_fresh)
            try:
                with failing("CapacityError") as found:
                    done = [same_as_on_the_host(load(good), good)]
            except AssertionError:
                if done == [True]:  # no allocation was left to fail
                    break
                raise
        error: Any = found[0]
        assert "CUDA out of memory" in str(error)
        assert "bytes" in str(error.expected)
        if "staging" not in error.what:
            assert str(plan.predicted_peak) in str(error.expected), error
        said.add((error.what, error.layer))
    for what, layer in (
        ("memory for the workspace could not be allocated", None),
        ("memory for the banks could not be allocated", 0),
        ("memory for the banks could not be allocated", LAYERS - 1),
        ("memory for staging could not be allocated", None),
        ("memory for the conversion cache could not be allocated", LAYERS - 1),
    ):
        assert (what, layer) in said, said
    next_loads_are_right(good, little)


@pytest.mark.parametrize("tenths", range(1, 10))
def test_a_card_that_is_full_is_said_with_what_was_predicted(
    tmp_path_factory: pytest.TempPathFactory, little: TinyCheckpoint, tenths: int
) -> None:
    """The allocator itself refuses, at any point of a load of 36 MiB."""
    folder = tmp_path_factory.getbasetemp() / "full"
    if not folder.exists():
        tiny_checkpoint(folder, hidden=1024, intermediate=1024, experts=6, layers=4, payload="fast")
    plan = loader.plan(folder, device=CARD)
    own, total = card_memory(CARD).reserved, torch.cuda.mem_get_info(CARD)[1]
    allowed = own + plan.predicted_peak * tenths // 10
    torch.cuda.set_per_process_memory_fraction(allowed / total, CARD)
    try:
        with failing("CapacityError") as found:
            loader.load(folder, CARD)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, CARD)
    error: Any = found[0]
    assert "out of memory" in str(error).lower() and "bytes" in str(error.expected)
    assert "staging" in error.what or str(plan.predicted_peak) in str(error.expected)
    assert len(load(little.folder, policy=None)) == 1


# Pinning


def test_memory_is_pinned_again_after_a_failure(good: Path, little: TinyCheckpoint) -> None:
    pinned = load(good).report.memory.host_pinned
    assert pinned > 0
    for state in STATES[1:]:

        def fails(event: loader.LayerEvent, state: str = state) -> None:
            if (event.layer, event.state) == (LAYER, state):
                raise ValueError(state)

        with failing("LifecycleError"):
            load(good, observers=[fails])
    assert load(good).report.memory.host_pinned == pinned
    next_loads_are_right(good, little)


def test_a_failure_where_pinning_is_refused(
    good: Path, little: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: CudaCore, memory: torch.Tensor, device: torch.device) -> None:
        raise CudaError("host memory could not be pinned", found="CUDA error 2")

    def fails(event: loader.LayerEvent) -> None:
        if (event.layer, event.state) == (LAYER, "converting"):
            raise ValueError("no")

    with monkeypatch.context() as patch:
        patch.setattr(CudaCore, "pin", refused)
        with failing("LifecycleError"):
            load(good, observers=[fails])
        assert load(good).report.memory.host_pinned == 0
    next_loads_are_right(good, little)


# Signals


def test_a_second_interrupt_waits_until_the_card_is_given_back(
    good: Path, little: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loader.ring import Ring

    close, closed = Ring.close, []

    def interrupted(self: Ring) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        close(self)
        closed.append(1)

    for state in STATES[1:]:
        bench = Bench(good, state, "direct", act=lambda: os.kill(os.getpid(), signal.SIGINT))
        with monkeypatch.context() as patch, failing("KeyboardInterrupt"):
            patch.setattr(Ring, "close", interrupted)
            with BenchSource(bench) as source:
                load(source, observers=[bench.observe])
        assert closed, state
        closed.clear()
    next_loads_are_right(good, little)


# Loads beside each other


def test_two_loads_at_once_to_one_card(good: Path) -> None:
    barrier = threading.Barrier(2)

    def work(_: int) -> bool:
        barrier.wait(60)
        return same_as_on_the_host(load(good), good)

    right_banks(good)
    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(work, range(8)))


def test_a_load_that_fails_leaves_one_beside_it_alone(good: Path) -> None:
    barrier = threading.Barrier(2)

    def meet(event: loader.LayerEvent) -> None:
        if (event.layer, event.state) == (LAYER, "converting"):
            barrier.wait(60)

    def fails(event: loader.LayerEvent) -> None:
        meet(event)
        if (event.layer, event.state) == (LAYER, "prepared"):
            raise ValueError("no")

    def failed() -> str:
        try:
            load(good, observers=[fails])
        except loader.LoaderError as error:
            return str(error)
        return "it went on"

    right_banks(good)
    with ThreadPoolExecutor(2) as pool:
        other, mine = pool.submit(failed), pool.submit(load, good, observers=[meet])
        assert "observer" in other.result(60)
        assert same_as_on_the_host(mine.result(60), good)
        del mine


def test_a_step_in_one_thread_while_another_loads(good: Path) -> None:
    layer = load(good)[0]
    x = torch.randn(3, 512, dtype=torch.float16, device=CARD)
    ids = torch.tensor([[0, 1], [2, 3], [6, 7]], device=CARD)
    weights = torch.ones(3, 2, device=CARD)
    wanted = layer(x, ids, weights)
    with ThreadPoolExecutor(1) as pool:
        loads = [pool.submit(load, good) for _ in range(3)]
        while not all(one.done() for one in loads):
            assert torch.equal(layer(x, ids, weights), wanted)
        assert all(same_as_on_the_host(one.result(), good) for one in loads)
        del loads

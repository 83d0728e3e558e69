"""Where tensors live, failed allocations and what errors keep, and the bounds of a whole load."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from loader import memory
from loader.errors import CapacityError, CheckpointError, LoaderError
from loader.memory import nothing_kept

CPU = torch.device("cpu")
MIB = 1 << 20


def status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10
    raise AssertionError(name)


# Tensors


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    st.sampled_from([torch.uint8, torch.float16, torch.bfloat16, torch.int32, torch.float32]),
)
def test_a_fresh_tensor_is_exactly_its_bytes(shape: list[int], dtype: torch.dtype) -> None:
    tensor = memory.fresh(tuple(shape), dtype, CPU)
    assert tensor.shape == tuple(shape) and tensor.dtype == dtype and tensor.is_contiguous()
    assert tensor.untyped_storage().nbytes() == tensor.numel() * dtype.itemsize


@pytest.mark.parametrize("nbytes", [MIB - 4, MIB, MIB + 4, 5 * MIB + 12])
def test_fresh_memory_at_the_size_from_which_it_is_mapped(nbytes: int) -> None:
    tensor = memory.fresh((nbytes // 4,), torch.int32, CPU)
    assert tensor.untyped_storage().nbytes() == nbytes
    tensor.fill_(7)
    assert int(tensor.sum(dtype=torch.int64)) == 7 * (nbytes // 4)


def test_large_tensors_go_back_to_the_system_at_once() -> None:
    before = status("RssAnon")
    tensor = memory.fresh((32 * MIB,), torch.uint8, CPU).fill_(1)
    view = tensor[5:]
    del tensor
    assert status("RssAnon") - before > 31 * MIB
    assert int(view[-1]) == 1
    del view
    assert status("RssAnon") - before < 2 * MIB


def test_the_heap_is_trimmed() -> None:
    keep = [bytes(40_000) for _ in range(1500)]
    pins = [bytes(40_000) for _ in range(3)]  # above it, so that the heap cannot shrink by itself
    full = status("RssAnon")
    del keep
    memory.return_to_system()
    assert full - status("RssAnon") > 40 * MIB
    assert len(pins) == 3


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), max_size=12))
def test_a_storage_is_counted_once_however_many_views_it_has(views: list[tuple[int, int]]) -> None:
    bases = [torch.empty(100 + 10 * i, dtype=torch.int16) for i in range(4)]
    chosen = [bases[base][start:] for base, start in views]
    wanted = sum(2 * (100 + 10 * base) for base in {base for base, _ in views})
    assert memory.storage_bytes(chosen) == wanted


# Failed allocations and errors


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("none"),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"),
        RuntimeError("CUDA error: out of memory"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
)
def test_a_failed_allocation_says_what_for(error: Exception) -> None:
    with pytest.raises(CapacityError) as caught, memory.allocating("the banks", 123, layer=4):
        raise error
    found = caught.value
    assert found.__cause__ is error
    assert (found.layer, found.expected) == (4, "123 bytes")
    assert "the banks" in str(found) and str(error) in str(found)


def failure_of(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing failed")


def test_what_torch_and_the_system_say_when_memory_runs_out() -> None:
    for call in (
        lambda: torch.empty(1 << 50, dtype=torch.uint8),
        lambda: mmap.mmap(-1, 1 << 60),
        lambda: bytearray(1 << 60),
    ):
        assert memory.is_out_of_memory(failure_of(call))
    for call in (
        lambda: torch.empty(1 << 62, dtype=torch.float64),
        lambda: torch.empty(-1),
        lambda: torch.empty(4).view(3),
        lambda: os.stat("/proc/self/none"),
    ):
        assert not memory.is_out_of_memory(failure_of(call))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("Trying to create tensor with negative dimension -1: [-1]"),
        OSError(13, "Permission denied"),
    ],
)
def test_an_allocation_that_fails_otherwise_keeps_its_words(error: Exception) -> None:
    with pytest.raises(LoaderError) as caught, memory.allocating("the banks", 123, layer=4):
        raise error
    found = caught.value
    assert type(found) is LoaderError and found.__cause__ is error
    assert str(found) == (
        f"the banks could not be made; layer 4; found {type(error).__name__}: {error}"
    )


@pytest.mark.parametrize("error", [MemoryError("a"), torch.OutOfMemoryError("b"), OSError(12, "c")])
def test_memory_that_ran_out_anywhere_is_an_error_of_the_library(error: Exception) -> None:
    with pytest.raises(CapacityError, match="^memory ran out; found") as caught, nothing_kept():
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [CheckpointError("a"), KeyError("b"), KeyboardInterrupt()])
def test_other_errors_pass_as_they_are(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, memory.allocating("the banks", 1):
        raise error
    assert caught.value is error


class Deep:
    """Raises from a frame that holds a tensor, through a generator and with a cause and context."""

    def __init__(self) -> None:
        self.refs: list[StorageWeakRef] = []

    def tensor(self) -> torch.Tensor:
        made = torch.ones(10)
        self.refs.append(StorageWeakRef(made.untyped_storage()))
        return made

    def stream(self) -> Iterator[torch.Tensor]:
        held = self.tensor()
        yield held
        self.fail()

    def fail(self) -> None:
        held = self.tensor()
        raise ValueError(f"{held.numel()}")

    def run(self) -> None:
        held, suspended = self.tensor(), self.stream()
        next(suspended)
        try:
            next(self.again())
        except ValueError as error:
            raise LoaderError(f"{held.numel()}") from error

    def again(self) -> Iterator[None]:
        for _ in self.stream():
            pass
        yield


def test_an_error_keeps_no_tensor_alive() -> None:
    deep = Deep()
    with pytest.raises(LoaderError) as caught, memory.nothing_kept():
        deep.run()
    assert isinstance(caught.value.__cause__, ValueError)
    assert len(deep.refs) == 4 and all(ref.expired() for ref in deep.refs)


def test_an_error_gives_the_heap_back() -> None:
    pins: list[bytes] = []  # above what is freed, so that the heap cannot shrink by itself

    def work() -> None:
        held = [bytes(40_000) for _ in range(1500)]
        pins.extend(bytes(40_000) for _ in range(3))
        raise ValueError(len(held))

    before = status("RssAnon")
    with pytest.raises(ValueError, match="1500"), memory.nothing_kept():
        work()
    assert status("RssAnon") - before < 20 * MIB


def test_the_error_that_its_caller_handles_keeps_its_frames() -> None:
    deep = Deep()
    try:
        deep.fail()
    except ValueError as mine:
        with pytest.raises(LoaderError) as caught, memory.nothing_kept():
            raise LoaderError("another")  # noqa: B904 - its context is what is tested
        assert caught.value.__context__ is mine
        assert not deep.refs[0].expired(), "the caller's own frames are left for its debugger"


def test_python_without_memory_is_a_capacity_error() -> None:
    deep = Deep()

    def work() -> None:
        held = deep.tensor()
        raise MemoryError(f"no room beside {held.numel()}")

    with pytest.raises(CapacityError, match="memory ran out") as caught, memory.nothing_kept():
        work()
    assert isinstance(caught.value.__cause__, MemoryError) and "no room" in str(caught.value)
    assert deep.refs[0].expired()


def test_a_thread_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def no(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads = threading.enumerate()
    monkeypatch.setattr(threading.Thread, "start", no)
    with pytest.raises(CapacityError, match="could not be started"), memory.HostPeak():
        raise AssertionError("not reached")
    assert threading.enumerate() == threads


def test_an_interrupt_while_the_sampling_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs by then, and nobody would ever leave the block that ends it."""
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    threads = threading.enumerate()
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt), memory.HostPeak():
        raise AssertionError("not reached")
    assert threading.enumerate() == threads


# A whole load, in a process of its own


def probe(name: str, folder: Path) -> list[dict[str, Any]]:
    result = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("memory_probe.py")), name, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert result.returncode == 0, result.stderr
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


ERRORS = {
    "observer": ("LifecycleError", "observer"),
    "converter": ("ConversionError", "converter"),
    "allocation": ("CapacityError", "no memory"),
    "interrupt": ("KeyboardInterrupt", "interrupt"),
    "io_error": ("CheckpointError", "Input/output error"),
    "truncated": ("CheckpointError", "changed while loading"),
    "touched": ("CheckpointError", "changed while loading"),
    "changed": ("CheckpointError", "changed while loading"),
    "bad_scale": ("ConversionError", "not finite"),
    "refused": ("CapacityError", "does not fit"),
}


def test_failed_loads_leave_nothing_and_the_next_load_succeeds(tmp_path: Path) -> None:
    found = probe("failures", tmp_path)
    failed = [entry for entry in found if entry["fault"]]
    assert {entry["fault"] for entry in failed} == set(ERRORS)
    for entry in failed:
        kind, words = ERRORS[entry["fault"]]
        assert entry["type"] == kind and words in entry["error"], entry
        if entry["fault"] not in ("interrupt", "refused"):
            # What was read ahead of a change is still good.
            assert entry["layer"] in ((6, 7) if entry["fault"] == "changed" else (6,)), entry
        assert entry["kept"] < 8 * MIB, entry
        assert entry["threads"] == 0 and not entry["files"], entry
    good = [entry for entry in found if not entry["fault"]]
    assert [entry["round"] for entry in good] == list(range(5))
    assert all(abs(entry["good"]) < 8 * MIB and entry["kept"] < 8 * MIB for entry in good), good
    assert good[-1]["kept"] - good[0]["kept"] < 4 * MIB, "five rounds are flat"


def test_the_bounds_of_a_load_hold_and_do_not_grow_with_layers(tmp_path: Path) -> None:
    found = probe("growth", tmp_path)
    for entry in found:
        numbers = entry["memory"]
        assert numbers["predicted_resident"] == numbers["resident"]
        peak = numbers["peak"] - numbers["baseline"]
        assert peak <= numbers["predicted_peak"] <= peak + 32 * MIB, entry
        assert numbers["overhead"] == peak - numbers["resident"]
        assert numbers["staging"] <= 32 * MIB
        assert numbers["overhead"] <= numbers["staging"] + 64 * MIB
        assert entry["file_backed"] <= 2 * numbers["staging"]
        assert abs(entry["after"] - numbers["resident"]) < 8 * MIB
        assert entry["dropped"] < 8 * MIB
        fixed = numbers["workspace"] + numbers["staging"] + numbers["conversion"]
        for number, held in enumerate(entry["at_ready"], 1):
            stays = number * entry["layer_bytes"]
            assert stays - 8 * MIB < held < stays + fixed + 8 * MIB, (number, entry)
    overheads = [e["memory"]["overhead"] for e in found[:3]]
    assert [e["layers"] for e in found[:3]] == [4, 8, 16]
    assert max(overheads) - min(overheads) < 8 * MIB, overheads
    assert found[-1]["code"] == "reference"


def test_in_place_the_sources_are_freed_or_spoken_of(tmp_path: Path) -> None:
    alone, held = probe("in_place", tmp_path)
    for entry, stays in ((alone, 0), (held, 1)):
        banks = entry["banks"] - (0 if stays else entry["sources"])
        for number, delta in enumerate(entry["deltas"]):
            wanted = banks + (entry["workspace"] if number == 0 else 0)
            assert abs(delta - wanted) < 4 * MIB, entry
        layers = len(entry["deltas"])
        wanted = layers * (entry["banks"] + stays * entry["sources"]) + entry["workspace"]
        assert abs(entry["total"] - wanted) < 8 * MIB, entry

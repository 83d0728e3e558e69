"""Counters of host memory: what they count, peaks that are over, and loads beside other memory."""

from __future__ import annotations

import mmap
import resource
import threading
from pathlib import Path

import pytest
import torch

import loader
from loader import memory
from loader.errors import LoaderError
from loader.table import human_bytes
from loader.testing.checkpoint import tiny_checkpoint

CPU = torch.device("cpu")

MIB = 1 << 20


def test_anonymous_memory_is_counted() -> None:
    before = memory.host_memory()
    tensor = memory.fresh((24 * MIB,), torch.uint8, CPU).fill_(1)
    after = memory.host_memory()
    assert 23 * MIB < after.anonymous - before.anonymous < 26 * MIB
    assert abs(after.file - before.file) < 2 * MIB
    assert tensor.numel() == 24 * MIB
    assert memory.host_uss() > 24 * MIB


def test_shared_memory_counts_as_anonymous_and_files_apart(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(16 * MIB))
    before = memory.host_memory()
    shared = mmap.mmap(-1, 16 * MIB)
    for at in range(0, 16 * MIB, 4096):
        shared[at] = 1
    middle = memory.host_memory()
    assert 15 * MIB < middle.anonymous - before.anonymous < 18 * MIB
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[::4096]) == 0
        after = memory.host_memory()
    assert 15 * MIB < after.file - middle.file < 18 * MIB
    shared.close()


def test_a_peak_that_is_over_is_remembered() -> None:
    before = memory.host_memory().anonymous
    with memory.HostPeak(interval_seconds=60) as peak:
        tensor = memory.fresh((32 * MIB,), torch.uint8, CPU).fill_(1)
        now = peak.sample()
        del tensor
    assert peak.anonymous >= now.anonymous >= before + 31 * MIB
    assert memory.host_memory().anonymous < before + 4 * MIB
    assert peak.file > 0


@pytest.mark.parametrize("error", [None, ValueError("x"), KeyboardInterrupt()])
def test_the_sampling_thread_ends(error: BaseException | None) -> None:
    threads = threading.enumerate()
    try:
        with memory.HostPeak():
            assert len(threading.enumerate()) == len(threads) + 1
            if error is not None:
                raise error
    except (ValueError, KeyboardInterrupt):
        pass
    assert threading.enumerate() == threads


def test_the_thread_samples_by_itself() -> None:
    seen = threading.Event()

    class Watching(memory.HostPeak):
        def sample(self) -> memory.HostMemory:
            if threading.current_thread() is not threading.main_thread():
                seen.set()
            return super().sample()

    with Watching(interval_seconds=0.001):
        assert seen.wait(300)


# A load in a process that holds more


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Loads to 39 MiB."""
    made = tmp_path_factory.mktemp("held")
    sizes = {"hidden": 512, "intermediate": 512, "experts": 8, "group": 128, "layers": 12}
    tiny_checkpoint(made, payload="fast", **sizes)
    return made


def test_free_pages_of_the_heap_do_not_hide_what_a_load_takes(folder: Path) -> None:
    loader.load(folder)  # what the first load of a process takes for good is no matter here
    alone = loader.load(folder).report.memory.overhead
    freed = [bytes(40_000) for _ in range(3000)]
    pins = [bytes(40_000) for _ in range(3)]  # above it, so that the heap cannot shrink by itself
    del freed
    beside = loader.load(folder).report.memory.overhead
    assert len(pins) == 3 and beside >= 0 and abs(beside - alone) < 8 * MIB


def test_what_others_give_back_meanwhile_is_spoken_of(folder: Path) -> None:
    held = [memory.fresh((96 * MIB,), torch.uint8, CPU).fill_(1)]
    report = loader.load(folder, observers=[lambda event: held.clear()]).report
    assert -report.memory.overhead > 32 * MIB
    assert f"at least {human_bytes(-report.memory.overhead)} from before" in report.memory_line()


def test_counters_that_cannot_be_read_are_an_error_of_ours(folder: Path) -> None:
    """Without a free descriptor, ``/proc`` cannot be opened either."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(LoaderError, match="cannot be counted; file /proc/self/status"):
            loader.load(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert loader.load(folder)

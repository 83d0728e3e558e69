"""The staging ring and the reads that run one chunk ahead."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from loader import memory
from loader.chunks import Chunk, Read
from loader.errors import CapacityError, CheckpointError
from loader.pieces import PIECE
from loader.stream import Filled, ReadAhead, Scheduled, Staging

FILES = ("a.safetensors", "b.safetensors")
CONTENT = {
    name: bytes(np.random.default_rng(seed).integers(0, 256, 1 << 16, np.uint8))
    for seed, name in enumerate(FILES)
}
PATIENCE = 300.0
"""Seconds until a test gives up on an event that must come; never waited out in a good run."""


class MemorySource:
    """Files in memory; ``before`` runs in the reading thread ahead of each read."""

    name, folder = "memory", None

    def __init__(self, before: Callable[[int], None] = lambda number: None) -> None:
        self.before = before
        self.reads: list[tuple[str, int, int]] = []

    def list(self) -> list[str]:
        return list(FILES)

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        self.before(len(self.reads))
        self.reads.append((file, offset, len(buffer)))
        buffer[:] = CONTENT[file][offset : offset + len(buffer)]


def chunk(*reads: tuple[int, int, int, int]) -> Chunk:
    return Chunk(tuple(Read(*read) for read in reads), np.zeros(1, PIECE))


def one(offset: int, length: int = 64, layer: int = 0) -> Scheduled:
    return Scheduled(layer, chunk((0, offset, length, 0)), False)


def expected(item: Scheduled) -> dict[int, bytes]:
    return {
        read.at: CONTENT[FILES[read.file]][read.offset : read.offset + read.length]
        for read in item.chunk.reads
    }


def drain(source: Any, items: Sequence[Scheduled], staging: Staging) -> Iterator[Filled]:
    reader = ReadAhead(source, FILES, staging)
    try:
        yield from reader.stream(iter(items))
    finally:
        reader.close()


# Staging


@pytest.mark.parametrize(("buffers", "size"), [(1, 100), (2, 1 << 20), (3, 3 << 20)])
def test_staging_is_as_large_as_it_says(buffers: int, size: int) -> None:
    staging = Staging(buffers, size)
    views = [staging.buffer(number, size) for number in range(2 * buffers)]
    assert memory.storage_bytes(views) == staging.nbytes == buffers * size
    assert [v.data_ptr() for v in views[:buffers]] == [v.data_ptr() for v in views[buffers:]]
    assert all(view.dtype == torch.uint8 and view.shape == (size,) for view in views)
    assert staging.buffer(1, 7).shape == (7,)


def test_staging_is_gone_after_close() -> None:
    staging = Staging(2, 1 << 20)
    refs = [StorageWeakRef(staging.buffer(i, 1).untyped_storage()) for i in range(2)]
    assert not any(ref.expired() for ref in refs)
    staging.close()
    assert all(ref.expired() for ref in refs)
    staging.close()


def test_staging_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> torch.Tensor:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(memory, "fresh", fails)
    with pytest.raises(CapacityError, match="staging") as caught:
        Staging(2, 1 << 20)
    assert caught.value.expected == f"{2 << 20} bytes"


# Reading ahead


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_chunk_holds_its_bytes(data: st.DataObject) -> None:
    items = []
    for layer in range(data.draw(st.integers(0, 6))):
        reads, at = [], 0
        for _ in range(data.draw(st.integers(1, 3))):
            length = data.draw(st.integers(1, 300))
            offset = data.draw(st.integers(0, (1 << 16) - length))
            reads.append((data.draw(st.integers(0, 1)), offset, length, at))
            at += length + data.draw(st.integers(0, 9))
        items.append(Scheduled(layer, chunk(*reads), True))
    largest = max((item.chunk.buffer_bytes for item in items), default=1)
    seen = 0
    for item, filled in zip(items, drain(MemorySource(), items, Staging(2, largest)), strict=True):
        assert filled.scheduled is item
        assert filled.data.shape == (item.chunk.buffer_bytes,)
        for at, wanted in expected(item).items():
            assert filled.data[at : at + len(wanted)].numpy().tobytes() == wanted
        assert filled.read_seconds >= 0
        seen += 1
    assert seen == len(items)


def test_reads_run_one_chunk_ahead_and_no_further() -> None:
    started = [threading.Event() for _ in range(6)]
    source = MemorySource(lambda number: started[number].set())
    items = [one(64 * i, layer=i // 2) for i in range(5)]
    stream = drain(source, items, Staging(2, 64))
    for number, filled in enumerate(stream):
        assert filled.scheduled is items[number]
        if number < 4:  # the chunk ahead is on its way, also where it is the next layer's
            assert started[number + 1].wait(PATIENCE)
        assert not started[min(number + 2, 5)].is_set(), "its buffer is still in use"
        assert filled.data.numpy().tobytes() == expected(items[number])[0]
    assert len(source.reads) == 5


def test_the_chunk_in_hand_is_not_overwritten_by_the_one_ahead() -> None:
    done = threading.Event()
    source = MemorySource()
    plain = source.read_into

    def signalling(file: str, offset: int, buffer: memoryview) -> None:
        plain(file, offset, buffer)
        if len(source.reads) == 2:
            done.set()

    source.read_into = signalling  # type: ignore[method-assign]  # a method is watched
    items = [one(0), one(1000)]
    stream = drain(source, items, Staging(2, 64))
    first = next(stream)
    assert done.wait(PATIENCE)
    assert first.data.numpy().tobytes() == expected(items[0])[0]
    stream.close()  # type: ignore[attr-defined]  # a generator


def test_nobody_else_holds_the_view() -> None:
    import weakref

    stream = drain(MemorySource(), [one(0), one(64)], Staging(2, 64))
    for filled in stream:
        view = weakref.ref(filled.data)
        del filled
        assert view() is None


class Faulty(MemorySource):
    def __init__(self, at: int, error: Exception) -> None:
        super().__init__()
        self.at, self.error = at, error

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        if len(self.reads) == self.at:
            raise self.error
        super().read_into(file, offset, buffer)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_failed_read_is_raised_when_its_chunk_is_due(at: int) -> None:
    error = CheckpointError("file ends before the range", file="a.safetensors", found="3 bytes")
    got = []
    with pytest.raises(CheckpointError, match="file ends") as caught:
        for filled in drain(
            Faulty(at, error), [one(64 * i, layer=10 + i) for i in range(3)], Staging(2, 64)
        ):
            got.append(filled.scheduled.layer)
    assert got == [10 + i for i in range(at)]
    assert (caught.value.layer, caught.value.file) == (10 + at, "a.safetensors")
    assert caught.value.found == "3 bytes"


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), ValueError("of HTTP")])
def test_what_a_foreign_source_raises_becomes_an_error_of_the_library(error: Exception) -> None:
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        list(drain(Faulty(1, error), [one(0), one(128, layer=4)], Staging(2, 64)))
    assert caught.value.__cause__ is error
    assert (caught.value.layer, caught.value.file) == (4, FILES[0])
    assert "64 bytes at offset 128" in str(caught.value) and str(error) in str(caught.value)


def test_close_waits_for_the_read_that_still_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, closing = threading.Event(), threading.Event()

    def block(number: int) -> None:
        if number == 1:
            reading.set()
            assert closing.wait(PATIENCE)
            assert sum(range(1_000_000))  # a while longer, so that not waiting shows

    source = MemorySource(block)
    reader = ReadAhead(source, FILES, Staging(2, 64))
    stream = reader.stream(iter([one(0), one(64), one(128)]))
    next(stream)
    assert reading.wait(PATIENCE)
    join = threading.Thread.join

    def told(thread: threading.Thread, timeout: float | None = None) -> None:
        closing.set()
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", told)
    reader.close()
    assert [read[1] for read in source.reads] == [0, 64], "what was not begun is not read"
    assert not [t for t in threading.enumerate() if t.name.startswith("qpn-read")]

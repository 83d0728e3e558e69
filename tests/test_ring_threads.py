"""The ring's threads, over a CUDA that is not there: every byte in its place, whatever the order.

``tests/native/fake_cuda`` runs streams as threads, so that slots and chunks are reused while copies
and their users are still under way, as on a card.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from fake_ring import FakeRing
from host_card import COMPILER, build
from hypothesis import given, settings
from hypothesis import strategies as st

from loader import cuda_core
from loader.core import DescriptorError, ReadError
from loader.cuda_core import CudaCore, CudaError
from loader.errors import LoaderError

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no g++ to compile it with")

FILE_BYTES = 300_000


@pytest.fixture(scope="session")
def core(tmp_path_factory: pytest.TempPathFactory) -> CudaCore:
    return build(tmp_path_factory.mktemp("ring"))


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, torch.Tensor]]:
    """A descriptor, and the bytes behind it."""
    content = np.random.default_rng(7).integers(0, 256, FILE_BYTES, np.uint8)
    path = tmp_path_factory.mktemp("files") / "file"
    path.write_bytes(content.tobytes())
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor, torch.from_numpy(content)
    os.close(descriptor)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_chunk_holds_its_bytes(
    core: CudaCore, file: tuple[int, torch.Tensor], data: st.DataObject
) -> None:
    descriptor, content = file
    threads, slots = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 8))
    chunks, slot_bytes = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3000))
    each = 20_000
    ring = FakeRing(core, slots, slot_bytes, threads, chunks, each)
    items: list[tuple[list[tuple[int, int, int, int]], int]] = []
    for _ in range(data.draw(st.integers(0, 12))):
        reads, at = [], 0
        for _ in range(data.draw(st.integers(1, 3))):
            length = data.draw(st.integers(1, 6000))
            reads.append((descriptor, data.draw(st.integers(0, FILE_BYTES - 6000)), length, at))
            at += length + data.draw(st.integers(0, 60))
        items.append((reads, reads[-1][3] + reads[-1][2]))
    got = [torch.zeros(nbytes, dtype=torch.uint8) for _, nbytes in items]
    try:
        for turn in range(len(items) + chunks):
            due = turn - chunks
            if due >= 0:
                ring.take(due % chunks)
                ring.use(due % chunks, got[due])
            if turn < len(items):
                ring.submit(turn % chunks, items[turn][0])
    finally:
        ring.close()
    for (reads, _), found in zip(items, got, strict=True):
        for _, offset, length, at in reads:
            assert torch.equal(found[at : at + length], content[offset : offset + length])


def test_a_short_read_says_which_and_the_ring_goes_on(
    core: CudaCore, file: tuple[int, torch.Tensor]
) -> None:
    descriptor, content = file
    ring = FakeRing(core, 4, 1000, 3, 2, 50_000)
    try:
        ring.submit(0, [(descriptor, 0, 10_000, 0), (descriptor, FILE_BYTES - 500, 30_000, 10_000)])
        ring.submit(1, [(descriptor, 700, 9_000, 0)])
        with pytest.raises(ReadError, match="a read came up short") as caught:
            ring.take(0)
        assert caught.value.expected in (
            f"1000 bytes at offset {FILE_BYTES - 500 + 1000 * n}" for n in range(30)
        )
        ring.take(1)
        core.library.qpn_test_wait()
        assert torch.equal(ring.chunks[1][:9_000], content[700:9_700])
    finally:
        ring.close()


def test_a_descriptor_that_is_closed_says_why(core: CudaCore) -> None:
    closed = os.open(os.devnull, os.O_RDONLY)
    os.close(closed)
    ring = FakeRing(core, 2, 1000, 1, 1, 5000)
    try:
        ring.submit(0, [(closed, 0, 5000, 0)])
        with pytest.raises(ReadError, match="Bad file descriptor"):
            ring.take(0)
    finally:
        ring.close()


def test_a_ring_may_close_with_reads_under_way(
    core: CudaCore, file: tuple[int, torch.Tensor]
) -> None:
    for threads in (1, 4):
        ring = FakeRing(core, 4, 512, threads, 2, 100_000)
        for chunk in (0, 1):
            ring.submit(chunk, [(file[0], 0, 100_000, 0)])
        ring.close()


def test_what_reaches_outside_is_refused(core: CudaCore, file: tuple[int, torch.Tensor]) -> None:
    ring = FakeRing(core, 2, 1000, 1, 1, 5000)
    try:
        for place in ((-1, 10, 0), (0, 0, 0), (0, 5001, 0), (0, 10, 4991), (0, 1, -1)):
            with pytest.raises(ValueError, match="outside the chunk"):
                ring.submit(0, [(0, *place)])
        with pytest.raises(ValueError, match="no such chunk"):
            ring.take(1)
    finally:
        ring.close()
    for slots, threads, chunks in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises((ValueError, LoaderError)):
            FakeRing(core, slots, 10, threads, chunks, 10)


# What CUDA refuses


@contextmanager
def failing(core: CudaCore, name: str, before: int = 0, times: int = 1) -> Iterator[None]:
    """Inside, calls of CUDA fail: so many ``times``, after ``before`` calls of that name."""
    core.library.qpn_test_fail(name.encode(), ctypes.c_long(before), ctypes.c_long(times))
    try:
        yield
    finally:
        core.library.qpn_test_fail(b"", ctypes.c_long(0), ctypes.c_long(0))


@pytest.mark.parametrize(
    ("name", "before", "words"),
    [
        ("cudaSetDevice", 1, "the card cannot be used"),
        ("cudaStreamCreateWithFlags", 0, "a stream could not be made"),
        ("cudaEventCreateWithFlags", 0, "an event could not be made"),
        ("cudaEventCreateWithFlags", 5, "an event could not be made"),
    ],
)
def test_a_ring_that_cuda_does_not_make(core: CudaCore, name: str, before: int, words: str) -> None:
    """Nothing stays of it, whatever was made before; the next one works."""
    for _ in range(3):
        with failing(core, name, before), pytest.raises(CudaError, match=f"{words}: a fault of"):
            FakeRing(core, 4, 1000, 2, 2, 5000)
    FakeRing(core, 4, 1000, 2, 2, 5000).close()


@pytest.mark.parametrize(
    ("name", "before", "words"),
    [
        ("cudaStreamWaitEvent", 0, "the copies could not be ordered"),
        ("cudaMemcpyAsync", 0, "a copy to the card failed"),
        ("cudaMemcpyAsync", 7, "a copy to the card failed"),
        ("cudaEventRecord", 3, "a copy could not be marked"),
        ("cudaEventRecord", 10, "the copies could not be marked"),
        ("cudaStreamWaitEvent", 1, "a stream could not wait"),
        ("cudaEventRecord", 11, "the chunk could not be released"),
    ],
)
def test_what_cuda_refuses_in_the_stream_is_told_and_the_ring_goes_on(
    core: CudaCore, file: tuple[int, torch.Tensor], name: str, before: int, words: str
) -> None:
    """Ten slots are copied and marked for one chunk, then the chunk is, then its release."""
    descriptor, content = file
    ring = FakeRing(core, 4, 1000, 2, 2, 10_000)
    got = torch.zeros(10_000, dtype=torch.uint8)
    reads = [(descriptor, 500, 10_000, 0)]
    try:
        with failing(core, name, before), pytest.raises(CudaError, match=words) as caught:
            ring.submit(0, reads)
            ring.take(0)
            ring.use(0, got)
        assert "CUDA error 1" in str(caught.value)
        core.library.qpn_test_wait()
        ring.submit(1, reads)
        ring.take(1)
        ring.use(1, got)
        core.library.qpn_test_wait()
        assert torch.equal(got, content[500:10_500])
    finally:
        ring.close()


def test_a_copying_thread_without_a_card_says_so(
    core: CudaCore, file: tuple[int, torch.Tensor]
) -> None:
    # The call that gives the caller its own card back may come before the thread's.
    with failing(core, "cudaSetDevice", 2, times=2):
        ring = FakeRing(core, 4, 1000, 1, 1, 5000)
        try:
            ring.submit(0, [(file[0], 0, 5000, 0)])
            with pytest.raises(CudaError, match="the copying thread cannot use the card"):
                ring.take(0)
        finally:
            ring.close()


def test_a_chunk_on_its_way_is_not_filled_again(
    core: CudaCore, file: tuple[int, torch.Tensor]
) -> None:
    ring = FakeRing(core, 1, 100, 1, 1, 90_000)
    try:
        ring.submit(0, [(file[0], 0, 90_000, 0)])
        with pytest.raises(DescriptorError, match="still on its way"):
            ring.submit(0, [(file[0], 0, 90_000, 0)])
        with pytest.raises(DescriptorError, match="no such chunk"):
            ring.submit(5, [(file[0], 0, 10, 0)])
    finally:
        ring.close()


def test_pinning_that_cuda_refuses(core: CudaCore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_core, "index_of", lambda device: device.index or 0)
    memory, card = torch.zeros(4096, dtype=torch.uint8), torch.device("cuda", 0)
    core.pin(memory, card)
    with failing(core, "cudaHostRegister"), pytest.raises(CudaError, match="not be pinned"):
        core.pin(memory, card)
    with failing(core, "cudaHostUnregister"), pytest.raises(CudaError, match="not be unpinned"):
        core.unpin(memory)
    with pytest.raises(CudaError, match="the card cannot be used"):
        core.pin(memory, torch.device("cuda", 7))

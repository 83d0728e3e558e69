"""The ring's threads, over a CUDA that is not there: every byte in its place, whatever the order.

``tests/native/fake_cuda`` runs streams as threads, so that slots and chunks are reused while copies
and their users are still under way, as on a card.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from host_card import COMPILER, build
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.core import ReadError
from loader.cuda_core import CudaCore
from loader.errors import LoaderError
from loader.structs import Error

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


class FakeRing:
    """``loader.ring.Ring`` without a card: chunks lie on the host."""

    def __init__(
        self, core: CudaCore, slots: int, slot_bytes: int, threads: int, chunks: int, each: int
    ) -> None:
        self.core, self.chunks = core, torch.zeros((chunks, each), dtype=torch.uint8)
        self._slots = torch.zeros((slots, slot_bytes), dtype=torch.uint8)
        self._ring = ctypes.c_void_p()
        error = Error()
        code = core.library.qpn_ring_open(
            0,
            ctypes.c_void_p(self._slots.data_ptr()),
            ctypes.c_int64(slot_bytes),
            ctypes.c_int64(slots),
            threads,
            chunks,
            ctypes.byref(self._ring),
            ctypes.byref(error),
        )
        core.check(code, error)

    def submit(self, chunk: int, reads: list[tuple[int, int, int, int]]) -> None:
        table = torch.tensor(reads, dtype=torch.int64).reshape(-1, 4)
        error = Error()
        place = self.chunks[chunk]
        code = self.core.library.qpn_ring_submit(
            self._ring,
            chunk,
            ctypes.c_void_p(place.data_ptr()),
            ctypes.c_int64(place.nbytes),
            ctypes.c_void_p(table.data_ptr()),
            ctypes.c_int64(len(table)),
            ctypes.byref(error),
        )
        self.core.check(code, error)

    def take(self, chunk: int) -> None:
        error = Error()
        code = self.core.library.qpn_ring_arrive(self._ring, chunk, None, ctypes.byref(error))
        self.core.check(code, error)

    def use(self, chunk: int, to: torch.Tensor) -> None:
        """Read the chunk in the order of the stream, then let it be filled again."""
        self.core.library.qpn_test_use(
            ctypes.c_void_p(self.chunks[chunk].data_ptr()),
            ctypes.c_void_p(to.data_ptr()),
            ctypes.c_int64(to.nbytes),
        )
        error = Error()
        code = self.core.library.qpn_ring_release(self._ring, chunk, None, ctypes.byref(error))
        self.core.check(code, error)

    def close(self) -> None:
        self.core.library.qpn_test_wait()
        self.core.library.qpn_ring_close(self._ring)


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

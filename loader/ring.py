"""Ring: the staging of one load to a card: host slots that files are read into, chunks on the card.

Native threads fill the slots by ``pread``; one copy stream moves each slot to its chunk as soon as
it is full. Slots are pinned once for a load, in place, page by page; where the system refuses that,
pageable memory serves and the report says so. All of it is the staging budget, and all of it is
gone after :meth:`Ring.close`.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from loader import memory
from loader.card import CardPool
from loader.core import ReadError
from loader.cuda_core import CudaCore, CudaError, index_of, stream_of
from loader.structs import Error

_LOG = logging.getLogger(__name__)

CHUNKS = 3
"""Chunks on the card: one is converted, the others are on their way."""

PARTS = CHUNKS + 1
"""The budget in parts: one for each chunk, and one for the slots, which are copied in no time."""

MOST_THREADS = 10
"""Reading threads: more of them were no faster on 16 cores, whose cache the slots should fit."""

SLOTS_EACH = 2
"""Slots for each reading thread: it fills one while the other is copied."""

KEPT_BYTES = 16 << 20
"""Most that a plan keeps of tables, so that a ring need not wait for them to be made again."""

_LEAST_SLOT_BYTES = 64 << 10
_QUANTUM = 64


@dataclass(frozen=True)
class RingShape:
    """Sizes of a ring, in bytes; ``threads`` 0 where another source fills the slots."""

    chunk_bytes: int
    chunks: int
    slot_bytes: int
    slots: int
    threads: int

    @property
    def host_bytes(self) -> int:
        """Host memory, pinned where it can be."""
        return self.slot_bytes * self.slots

    @property
    def card_bytes(self) -> int:
        """Memory of the card."""
        return self.chunk_bytes * self.chunks

    @property
    def nbytes(self) -> int:
        """All of the ring."""
        return self.host_bytes + self.card_bytes


def ring_shape(budget: int, chunk_bytes: int, cores: int, direct: bool) -> RingShape:
    """A ring within ``budget`` for chunks of ``chunk_bytes``, a part of the budget at most.

    ``direct``: native threads read the files; else slots hold whole chunks, for a source that
    fills them itself.
    """
    chunk_bytes = -(-chunk_bytes // _QUANTUM) * _QUANTUM
    if not direct:
        return RingShape(chunk_bytes, 1, chunk_bytes, 2, 0)
    part = budget // PARTS
    threads = max(1, min(MOST_THREADS, cores, part // (SLOTS_EACH * _LEAST_SLOT_BYTES)))
    slot_bytes = max(part // (SLOTS_EACH * threads) // _QUANTUM * _QUANTUM, _QUANTUM)
    return RingShape(chunk_bytes, CHUNKS, slot_bytes, SLOTS_EACH * threads, threads)


class Ring:
    """See the module. ``pinned_bytes`` is 0, and ``why_pageable`` says why, without pinning."""

    def __init__(self, core: CudaCore, device: torch.device, shape: RingShape) -> None:
        self._core = core
        self._device = device
        self.shape = shape
        self.nbytes = shape.nbytes
        self.pinned_bytes = 0
        self.why_pageable = ""
        self._pinned = False
        self._ring = ctypes.c_void_p()
        self._slots = self._chunks = torch.empty((0, 0), dtype=torch.uint8, device="cpu")
        self._pool = CardPool(device)
        try:
            with memory.allocating("staging", self.nbytes):
                self._slots = memory.mapped((shape.slots, shape.slot_bytes))
                with self._pool.allocating():
                    size = (shape.chunks, shape.chunk_bytes)
                    self._chunks = memory.fresh(size, torch.uint8, device)
            self._pin()
            if shape.threads:
                self._open()
        except BaseException:
            self.close()
            raise

    def _pin(self) -> None:
        try:
            self._core.pin(self._slots, self._device)
            self.pinned_bytes = self._slots.nbytes
            self._pinned = True
        except CudaError as error:
            self.why_pageable = str(error)
            # Its words alone: a log keeps what it is given, and an error keeps frames and tensors.
            _LOG.warning("staging is pageable memory, and slower to copy: %s", self.why_pageable)

    def _open(self) -> None:
        error = Error()
        code = self._core.library.qpn_ring_open(
            ctypes.c_int(index_of(self._device)),
            ctypes.c_void_p(self._slots.data_ptr()),
            ctypes.c_int64(self.shape.slot_bytes),
            ctypes.c_int64(self.shape.slots),
            ctypes.c_int(self.shape.threads),
            ctypes.c_int(self.shape.chunks),
            ctypes.byref(self._ring),
            ctypes.byref(error),
        )
        self._core.check(code, error)

    def buffer(self, number: int, nbytes: int) -> torch.Tensor:
        """The first ``nbytes`` of a slot as uint8, for a source that fills it itself."""
        return self._slots[number % len(self._slots), :nbytes]

    def arrived(self, buffer: torch.Tensor) -> torch.Tensor:
        """A filled slot as a chunk on the card; the slot may be filled again afterwards."""
        chunk = self._chunks[0, : buffer.numel()]
        chunk.copy_(buffer, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()
        return chunk

    def submit(self, chunk: int, nbytes: int, reads: Sequence[tuple[int, int, int, int]]) -> None:
        """Begin the reads of a chunk: (descriptor, file offset, length, offset in the chunk).

        The descriptors stay open until the chunk was taken by :meth:`take`.
        """
        table = torch.tensor(reads, dtype=torch.int64, device="cpu")
        error = Error()
        code = self._core.library.qpn_ring_submit(
            self._ring,
            ctypes.c_int(chunk),
            ctypes.c_void_p(self._chunks[chunk].data_ptr()),
            ctypes.c_int64(nbytes),
            ctypes.c_void_p(table.data_ptr()),
            ctypes.c_int64(len(table)),
            ctypes.byref(error),
        )
        self._core.check(code, error)

    def take(self, chunk: int, nbytes: int, files: Mapping[int, str]) -> torch.Tensor:
        """The bytes of a chunk on the card, for what is enqueued on the current stream next.

        Blocks until the reads are done, not until they are copied. Raises :class:`ReadError`
        with the name that ``files`` has for the descriptor.
        """
        error = Error()
        code = self._core.library.qpn_ring_arrive(
            self._ring, ctypes.c_int(chunk), stream_of(self._device), ctypes.byref(error)
        )
        try:
            self._core.check(code, error)
        except ReadError as failure:
            raise failure.at(file=files.get(int(error.subject))) from None
        return self._chunks[chunk, :nbytes]

    def release(self, chunk: int) -> None:
        """Let the chunk be filled again, after what is on the current stream by now."""
        error = Error()
        code = self._core.library.qpn_ring_release(
            self._ring, ctypes.c_int(chunk), stream_of(self._device), ctypes.byref(error)
        )
        self._core.check(code, error)

    def close(self) -> None:
        """Stop the threads, wait for what reads the chunks, drop all; may be called again."""
        if self._ring.value is not None:
            self._core.library.qpn_ring_close(self._ring)
            self._ring = ctypes.c_void_p()
        if self._chunks.numel():
            torch.cuda.current_stream(self._device).synchronize()
        if self._pinned:
            self._core.unpin(self._slots)
            self._pinned = False
        self._slots = self._chunks = torch.empty((0, 0), dtype=torch.uint8, device="cpu")
        self._pool.close()

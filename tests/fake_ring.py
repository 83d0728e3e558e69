"""A ring of the library for cards over a CUDA that is not there (``tests/native/fake_cuda``)."""

from __future__ import annotations

import ctypes

import torch

from loader.cuda_core import CudaCore
from loader.structs import Error


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
        place = self.chunks[chunk % len(self.chunks)]
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

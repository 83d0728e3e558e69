"""Memory and threads that the library for cards asks for and does not get; prints JSON.

Run by tests, with ``failing_new.cpp`` preloaded and that library over a CUDA that is not there as
its argument. A ring must fail in words, leave no thread, and work the next time.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# Run as a script: the folder above holds what all tests share.
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from fake_ring import FakeRing
from fault_cells import Outcome

from loader import CapacityError
from loader.cuda_core import CudaCore, CudaError
from loader.errors import LoaderError
from loader.structs import Error

SHIM = ctypes.CDLL(os.environ["QPN_TEST_SHIM"])
MOST = 4000
"""Allocations of one run, at most."""
NO_MEMORY = "memory ran out inside native code"
NBYTES = 30_000
"""Of one chunk: 60 segments, so that every queue of the ring grows past its first block."""
SLOTS, SLOT_BYTES, THREADS, CHUNKS = 4, 500, 3, 2


def native_threads() -> int:
    """Threads of this process, of whatever library."""
    return len(os.listdir("/proc/self/task"))


class Bench:
    """The library, a file, and what is right."""

    def __init__(self, core: CudaCore, path: Path) -> None:
        self.core = core
        generator = torch.Generator().manual_seed(5)
        self.content = torch.randint(
            0, 256, (NBYTES,), dtype=torch.uint8, generator=generator, device="cpu"
        )
        path.write_bytes(self.content.numpy().tobytes())
        self.file = os.open(path, os.O_RDONLY)

    def ring(self) -> FakeRing:
        """A new ring; the caller closes it."""
        return FakeRing(self.core, SLOTS, SLOT_BYTES, THREADS, CHUNKS, NBYTES)

    def submit(self, ring: FakeRing, chunk: int) -> None:
        """The file in three reads, into one chunk."""
        third = NBYTES // 3
        ring.submit(chunk, [(self.file, n * third, third, n * third) for n in range(3)])

    def wrong_in(self, ring: FakeRing, chunk: int) -> list[str]:
        """What is wrong of a chunk that is read now."""
        ring.chunks[chunk].zero_()
        self.submit(ring, chunk)
        ring.take(chunk)
        self.core.library.qpn_test_wait()
        return [] if torch.equal(ring.chunks[chunk], self.content) else ["wrong bytes"]

    def wrong_next(self) -> list[str]:
        """What is wrong of a whole new ring."""
        ring = self.ring()
        try:
            return self.wrong_in(ring, 0)
        finally:
            ring.close()


def refused_threads(bench: Bench) -> Outcome:
    """A ring gets fewer threads than it asks for: one of the stream, one that copies, readers."""
    wrong, needed = [], 2 + THREADS
    before = native_threads()
    for allowed in range(needed):
        SHIM.allow_threads(ctypes.c_long(allowed))
        try:
            bench.ring().close()
            wrong.append(f"opened with {allowed} threads")
        except CapacityError as error:
            wrong += [] if str(error) == "a reading thread could not be started" else [str(error)]
        except CudaError as error:
            wrong += [] if not allowed and "stream" in str(error) else [str(error)]
        finally:
            SHIM.allow_threads(ctypes.c_long(-1))
        wrong += [] if native_threads() == before else ["threads"]
        wrong += bench.wrong_next()
    return Outcome("no thread for a ring", "any", "card", f"{needed} points", wrong)


class Failing:
    """From the first call of ``name`` on, allocation ``number`` fails: in the thread of that call,
    or ``everywhere``; until ``end``, which what may allocate of its own comes after.
    """

    def __init__(self, core: CudaCore, name: str, number: int, everywhere: bool) -> None:
        self._library, self._name, self._number = core.library, name, number
        self._arm = SHIM.arm if everywhere else SHIM.arm_here
        self.began = self.ended = self.reached = False

    def __enter__(self) -> Failing:
        inner = self._inner = getattr(self._library, self._name)

        def call(*args: Any) -> Any:
            if not self.began:
                self.began = True
                self._arm(ctypes.c_long(self._number))
            return inner(*args)

        setattr(self._library, self._name, call)
        return self

    def end(self) -> None:
        """Nothing fails any more; may be called again."""
        if self.began and not self.ended:
            self.ended, self.reached = True, not SHIM.disarm()

    def __exit__(self, *error: object) -> None:
        self.end()
        setattr(self._library, self._name, self._inner)


def sweep(
    bench: Bench,
    what: str,
    name: str,
    run: Callable[[Failing], list[str]],
    everywhere: bool = False,
) -> Outcome:
    """Fail each allocation from a call on in turn, until none is left; ``run`` judges."""
    wrong: list[str] = []
    before = native_threads()
    for number in range(MOST):
        with Failing(bench.core, name, number, everywhere) as fault:
            wrong += run(fault)
        wrong += [] if native_threads() == before else [f"threads after allocation {number}"]
        if not fault.reached:
            return Outcome(f"no memory in {what}", "any", "card", f"{number} points", wrong)
        wrong += bench.wrong_next()
    return Outcome(f"no memory in {what}", "any", "card", "endless", ["never ended"])


def wrong_of(error: LoaderError) -> list[str]:
    """Nothing where an error says that memory ran out: the library's own, or CUDA's."""
    if isinstance(error, CudaError):
        told = "CUDA error 2" in str(error)
    else:
        told = isinstance(error, CapacityError) and str(error) == NO_MEMORY
    return [] if told else [f"{type(error).__name__}: {error}"]


def layer_refused(core: CudaCore, fault: Failing) -> list[str]:
    """The sentence of a refusal takes memory, too."""
    error, numbers = Error(), (ctypes.c_int64 * 21)()
    numbers[1] = numbers[11] = 3  # absent: no tensors
    code = core.library.qpn_card_finish(
        0, None, numbers, None, None, ctypes.c_int64(0), None, ctypes.c_int64(0),
        ctypes.byref(error),
    )  # fmt: skip
    fault.end()
    try:
        core.check(code, error)
    except CapacityError as failure:
        return wrong_of(failure)
    except ValueError as refusal:
        return [] if "not those of a layer" in str(refusal) else [str(refusal)]
    return ["accepted"]


def all_probes(core: CudaCore, folder: Path) -> list[Outcome]:
    """Rings that get no memory or no thread, at every point; and a layer that is refused."""
    bench = Bench(core, folder / "file")
    wrong = bench.wrong_next()  # first: the usual stream has its thread from now on
    assert not wrong, wrong

    def opened(fault: Failing) -> list[str]:
        try:
            bench.ring().close()
        except LoaderError as error:
            return wrong_of(error)
        return []

    def submitted(fault: Failing) -> list[str]:
        """Nothing of what is refused is on its way, and the ring goes on."""
        ring, wrong = bench.ring(), []
        try:
            try:
                bench.submit(ring, 0)
            except LoaderError as error:
                fault.end()
                wrong += wrong_of(error)
            ring.take(0)
            fault.end()
            core.library.qpn_test_wait()
            if fault.reached:
                wrong += ["a part was read"] if ring.chunks[0].any() else []
                wrong += bench.wrong_in(ring, 0)
            return wrong
        finally:
            ring.close()

    def at_work(fault: Failing) -> list[str]:
        """Threads of the ring and of the CUDA included: all that ask for memory are told."""
        ring, wrong = bench.ring(), []
        try:
            try:
                bench.submit(ring, 0)
                ring.take(0)
            except LoaderError as error:
                wrong += wrong_of(error)
            fault.end()
            return wrong + bench.wrong_in(ring, 1)
        finally:
            fault.end()
            ring.close()

    return [
        refused_threads(bench),
        sweep(bench, "qpn_ring_open", "qpn_ring_open", opened),
        sweep(bench, "qpn_ring_submit", "qpn_ring_submit", submitted),
        sweep(bench, "a ring at work", "qpn_ring_submit", at_work, everywhere=True),
        sweep(bench, "qpn_card_finish, refused", "qpn_card_finish", partial(layer_refused, core)),
    ]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        outcomes = all_probes(CudaCore(Path(sys.argv[1])), Path(name))
    print(json.dumps([vars(outcome) for outcome in outcomes]))

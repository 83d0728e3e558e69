"""Runs one cell of the matrix: a load with one fault in it, and what is left afterwards."""

from __future__ import annotations

import gc
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from fault_kinds import LAYER, Bench, BenchSource, Kind, patched
from load_fakes import banks_of, same_bits
from torch.multiprocessing.reductions import StorageWeakRef

import loader
from loader import memory, native
from loader.testing.checkpoint import TinyCheckpoint, tiny_checkpoint

LAYERS = 3
STAGING = 1 << 20
"""Small, so that a layer is several chunks and a fault can strike between two of them."""

LEAK = 2 << 20
"""Anonymous bytes that may stay after a failure: less than the banks of one layer, 3.3 MB."""


def make_checkpoint(folder: Path) -> TinyCheckpoint:
    """The checkpoint of all cells; NVFP4, so that closing a layer is a pass of its own."""
    return tiny_checkpoint(
        folder,
        dialect="modelopt-nvfp4",
        hidden=512,
        intermediate=512,
        experts=8,
        layers=LAYERS,
        payload="fast",
        attention=False,
    )


def load(source: Path | BenchSource, **more: Any) -> loader.experts.LoadedExperts:
    """A load as every cell does it; ``wide`` fills the conversion cache."""
    policy = loader.Policy(layout="wide")
    return loader.load(source, policy=policy, staging_bytes=STAGING, **more)


def serving(way: str) -> Any:
    """What converts: the native core, or the reference."""
    return native.serving(native.REFERENCE) if way == "reference" else nullcontext()


def open_descriptors() -> list[str]:
    """What every open descriptor of the process points to."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue  # the one that lists the folder
    return sorted(found)


def live_threads() -> list[int]:
    """Identities of the threads that run; one that was interrupted at its start never did."""
    return [thread.ident or 0 for thread in threading.enumerate() if thread.is_alive()]


@dataclass(frozen=True)
class Left:
    """What a process holds: anonymous bytes, descriptors, threads, storages of loads."""

    anonymous: int
    descriptors: list[str]
    threads: list[int]
    storages: int

    def beyond(self, before: Left) -> list[str]:
        """What is held now that was not before, in words; nothing after a clean failure."""
        wrong = []
        if self.anonymous - before.anonymous > LEAK:
            wrong.append(f"{self.anonymous - before.anonymous} anonymous bytes")
        if self.descriptors != before.descriptors:
            wrong.append(f"descriptors {self.descriptors}, not {before.descriptors}")
        if not set(self.threads) <= set(before.threads):
            wrong.append("threads")
        if self.storages > before.storages:
            wrong.append(f"{self.storages - before.storages} tensors")
        return wrong


class Witness:
    """Counts what loads hold; watches every tensor that ``memory.fresh`` makes, weakly."""

    def __init__(self) -> None:
        self._storages: list[StorageWeakRef] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        fresh = memory.fresh

        def spy(*args: Any) -> torch.Tensor:
            tensor = fresh(*args)
            self._storages.append(StorageWeakRef(tensor.untyped_storage()))
            return tensor

        with patched(memory, "fresh", spy):
            yield

    def left(self) -> Left:
        # What has expired goes: a weak reference keeps a little of each storage.
        self._storages = [one for one in self._storages if not one.expired()]
        memory.return_to_system()
        return Left(
            memory.host_memory().anonymous,
            open_descriptors(),
            live_threads(),
            len(self._storages),
        )


@dataclass(frozen=True)
class Outcome:
    """How one cell ended. ``wrong`` is empty where everything that is promised held."""

    kind: str
    state: str
    way: str
    ended: str
    wrong: list[str]


@cache
def right_banks(good: Path) -> list[torch.Tensor]:
    """The banks of an undisturbed load of the checkpoint, kept for all cells."""
    gc.collect()
    gc.freeze()  # what is older than the cells need not be walked by every collection of theirs
    with native.serving(native.REFERENCE):
        return banks_of(load(good))


def run_cell(good: Path, scratch: Path, kind: Kind, state: str, way: str) -> Outcome:
    """One load with one fault; ``good`` is the checkpoint, ``scratch`` a folder for a copy."""
    wanted = right_banks(good)
    folder = scratch / "bench"
    shutil.copytree(good, folder)
    bench = Bench(folder, state, way)
    witness = Witness()
    wrong: list[str] = []
    error: BaseException | None = None
    with serving(way):
        gc.collect()
        before = witness.left()
        gc.disable()  # what only a collection would free is held
        try:
            # Watching last, so that a fault of `fresh` stands before it.
            with witness.watching(), kind.setup(bench) as source:
                try:
                    experts = load(source, observers=[bench.observe])
                except BaseException as caught:
                    error = caught
            if error is None:
                wrong += [] if same_bits(banks_of(experts), wanted) else ["wrong banks"]
                del experts
            wrong += witness.left().beyond(before)
        finally:
            gc.enable()
        again = load(good)
        wrong += [] if same_bits(banks_of(again), wanted) else ["next load is wrong"]
    wrong += _judge(kind, bench, error)
    shutil.rmtree(folder)
    return Outcome(
        kind.name, state, way, "loaded" if error is None else type(error).__name__, wrong
    )


def _judge(kind: Kind, bench: Bench, error: BaseException | None) -> list[str]:
    """What is wrong about how the load ended."""
    wrong = [] if bench.struck else ["the fault never struck"]
    last = {event.layer: event.state for event in bench.events}
    if set(last.values()) != {"ready" if kind.ends is None else "failed"}:
        wrong.append(f"layers ended as {last}")
    if kind.ends is None:
        return wrong if error is None else [*wrong, f"the load failed: {error!r}"]
    if error is None:
        return [*wrong, "the load went on"]
    name, words = kind.ends
    if name not in {one.__name__ for one in type(error).__mro__} or words not in str(error):
        wrong.append(f"another error: {error!r}")
    blamed = getattr(error, "layer", None)
    if blamed is not None and blamed not in (0, LAYER, LAYER + 1):
        wrong.append(f"layer {blamed} is blamed")
    return wrong

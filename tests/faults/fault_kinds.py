"""The kinds of fault that are put into a load, each armed at one state of one layer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loader import LayerEvent, memory, native
from loader.checkpoint.source import LocalSource

STATES = ("planned", "reading", "converting", "prepared", "released", "ready")
LAYER = 1
"""The layer whose states arm faults: one layer is loaded before it and one comes after it."""


@dataclass(eq=False)
class Bench:
    """One load that is to fail: its files, and whether its fault is armed and has struck."""

    folder: Path
    state: str
    way: str
    act: Callable[[], None] = lambda: None
    armed: bool = False
    struck: bool = False
    events: list[LayerEvent] = field(default_factory=list)

    @property
    def file(self) -> Path:
        return self.folder / "model.safetensors"

    def observe(self, event: LayerEvent) -> None:
        """An observer: arms the fault at its state, which some faults are all there is to."""
        self.events.append(event)
        if not self.armed and (event.layer, event.state) == (LAYER, self.state):
            self.armed = True
            self.act()

    def strike(self) -> bool:
        """True from the moment on at which the fault is armed; notes that it struck."""
        self.struck |= self.armed
        return self.armed


class BenchSource(LocalSource):
    """The local folder; lends descriptors only where native code is to read.

    ``lend``, where set, says which descriptor to lend instead of the file's own.
    """

    def __init__(self, bench: Bench, lend: Callable[[], int] | None = None) -> None:
        super().__init__(bench.folder)
        self._bench, self._lend = bench, lend

    @property
    def lends_descriptors(self) -> bool:
        return self._bench.way == "direct"

    @contextmanager
    def descriptor(self, file: str) -> Iterator[int]:
        if self._lend is None or not self._bench.strike():
            with super().descriptor(file) as own:
                yield own
            return
        other = self._lend()
        try:
            yield other
        finally:
            os.close(other)


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


Setup = Callable[[Bench], AbstractContextManager[BenchSource]]


@dataclass(frozen=True)
class Kind:
    """One kind of fault: how it is set up, and how the load must end.

    ``ends``: the error's class and a part of its text; None where the load must succeed.
    """

    name: str
    setup: Setup
    ends: tuple[str, str] | None
    ways: tuple[str, ...] = ("direct", "ahead", "reference")


def _acting(act: Callable[[Bench], None]) -> Setup:
    """A fault that happens at the very moment at which it is armed."""

    @contextmanager
    def setup(bench: Bench) -> Iterator[BenchSource]:
        def strike() -> None:
            bench.strike()
            act(bench)

        bench.act = strike
        with BenchSource(bench) as source:
            yield source

    return setup


def _calling(names: tuple[str, ...], owner: Any, error: Callable[[], BaseException]) -> Setup:
    """A fault of the next call of some functions."""

    @contextmanager
    def setup(bench: Bench) -> Iterator[BenchSource]:
        def faulty(inner: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                if bench.strike():
                    raise error()
                return inner(*args)

            return call

        with ExitStack() as stack:
            source = stack.enter_context(BenchSource(bench))
            for name in names:
                stack.enter_context(patched(owner, name, faulty(getattr(owner, name))))
            yield source

    return setup


def _reading(preadv: Callable[..., int], lend: Callable[[], int] | None) -> Setup:
    """A fault of reads: of ``preadv``, or of the descriptor that native code is lent."""

    @contextmanager
    def setup(bench: Bench) -> Iterator[BenchSource]:
        inner = os.preadv

        def faulty(descriptor: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
            # With flags it only asks whether a page is there: it may be told so, and no read fails.
            if flags or not bench.strike():
                return inner(descriptor, buffers, offset, flags)
            return preadv(inner, descriptor, buffers, offset)

        with patched(os, "preadv", faulty), BenchSource(bench, lend) as source:
            yield source

    return setup


def _fail(inner: Any, descriptor: int, buffers: list[memoryview], offset: int) -> int:
    raise OSError(5, os.strerror(5))


def _nothing(inner: Any, descriptor: int, buffers: list[memoryview], offset: int) -> int:
    return 0


def _little(inner: Any, descriptor: int, buffers: list[memoryview], offset: int) -> int:
    with buffers[0][:1000] as little:
        return int(inner(descriptor, [little], offset))


def _unreadable() -> int:
    return os.open("/", os.O_RDONLY | os.O_DIRECTORY)


def _empty() -> int:
    return os.memfd_create("empty")


def _truncate(bench: Bench) -> None:
    os.truncate(bench.file, bench.file.stat().st_size - 64)


def _empty_file(bench: Bench) -> None:
    os.truncate(bench.file, 0)


def _rewrite(bench: Bench) -> None:
    bench.file.write_bytes(bytes(bench.file.stat().st_size))


def _rename_over(bench: Bench) -> None:
    other = bench.folder / "other"
    other.write_bytes(bytes(bench.file.stat().st_size))
    os.replace(other, bench.file)


def _unlink(bench: Bench) -> None:
    bench.file.unlink()


def _raise(bench: Bench) -> None:
    raise ValueError("the observer says no")


def _interrupt(bench: Bench) -> None:
    raise KeyboardInterrupt


def _exit(bench: Bench) -> None:
    raise SystemExit(3)


_CONVERT = ("read", "write")
_READS = "CheckpointError"

KINDS = (
    Kind("reads fail", _reading(_fail, _unreadable), (_READS, "")),
    Kind("reads end early", _reading(_nothing, _empty), (_READS, "found 0 bytes")),
    Kind("reads return little", _reading(_little, None), None, ("ahead", "reference")),
    Kind("file cut short", _acting(_truncate), (_READS, "changed while loading")),
    Kind("file emptied", _acting(_empty_file), (_READS, "changed while loading")),
    Kind("file overwritten", _acting(_rewrite), (_READS, "changed while loading")),
    Kind("file renamed over", _acting(_rename_over), None),
    Kind("file deleted", _acting(_unlink), None),
    Kind(
        "no memory",
        _calling(("fresh",), memory, lambda: OSError(12, os.strerror(12))),
        ("CapacityError", "Cannot allocate memory"),
    ),
    Kind(
        "no memory, converter",
        _calling(_CONVERT, native, MemoryError),
        ("CapacityError", "memory ran out"),
    ),
    Kind(
        "converter raises",
        _calling(_CONVERT, native, lambda: RuntimeError("kernel")),
        ("ConversionError", "kernel"),
    ),
    Kind(
        "closing pass raises",
        _calling(("finish",), native, lambda: RuntimeError("kernel")),
        ("ConversionError", "kernel"),
    ),
    Kind("observer raises", _acting(_raise), ("LifecycleError", "the observer says no")),
    Kind("interrupt raised", _acting(_interrupt), ("KeyboardInterrupt", "")),
    Kind("exit raised", _acting(_exit), ("SystemExit", "3")),
)

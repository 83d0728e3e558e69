"""Signals in the middle of a load, in processes of their own; run by tests, prints JSON.

SIGINT, and SIGTERM where the application handles it, unwind the load like any exception; one that
comes while a load is unwound waits until that is done. SIGTERM without a handler ends the process:
then no file may be left that was not there before.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

# Run as a script: the folder above holds what all tests share.
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from fault_cells import (
    Outcome,
    Witness,
    live_threads,
    load,
    make_checkpoint,
    right_banks,
    run_cell,
    serving,
)
from fault_kinds import STATES, Bench, BenchSource, Kind, Setup, _acting, patched
from load_fakes import banks_of, same_bits

from loader import memory, native
from loader.converter import ConversionCache
from loader.ledger import Ledger
from loader.lifecycle import Lifecycle
from loader.stream import DirectReads, ReadAhead, Staging

torch.set_num_threads(1)
WAYS = ("ahead", "reference") if native.HOST is None else ("direct", "ahead", "reference")
STORM = 120
"""Loads that a signal strikes at a random moment."""
BURSTS = 60
"""Loads that several signals strike, one soon after the other."""
# A shell starts what runs in the background with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

STEPS: tuple[tuple[Any, str], ...] = (
    (Ledger, "stop"),
    (DirectReads, "close"),
    (ReadAhead, "close"),
    (Staging, "close"),
    (ConversionCache, "discard"),
    (Lifecycle, "fail"),
    (memory, "clear_frames"),
    (memory, "return_to_system"),
)
"""What a load that failed does to give everything back; a signal strikes before and after each."""


class Terminated(BaseException):
    """What an application's own handler of SIGTERM raises."""


def _raise(number: int, frame: FrameType | None) -> None:
    raise Terminated


def _send(number: signal.Signals) -> Callable[[Bench], None]:
    def send(bench: Bench) -> None:
        os.kill(os.getpid(), number)

    return send


INTERRUPT = Kind("SIGINT", _acting(_send(signal.SIGINT)), ("KeyboardInterrupt", ""))
HANDLED = Kind("SIGTERM, handled", _acting(_send(signal.SIGTERM)), ("Terminated", ""))


def _again(first: Callable[[Bench], None], second: Callable[[Bench], None]) -> Setup:
    """``first`` at the moment at which the fault is armed, ``second`` at every step of undoing it.

    The load in hand is the only one that is undone: the one afterwards succeeds.
    """

    @contextmanager
    def setup(bench: Bench) -> Iterator[BenchSource]:
        def strike() -> None:
            bench.strike()
            first(bench)

        def around(inner: Callable[..., Any]) -> Callable[..., Any]:
            def step(*args: Any) -> Any:
                if bench.struck:
                    second(bench)
                done = inner(*args)
                if bench.struck:
                    second(bench)
                return done

            return step

        bench.act = strike
        with ExitStack() as stack:
            source = stack.enter_context(BenchSource(bench))
            for owner, name in STEPS:
                stack.enter_context(patched(owner, name, around(getattr(owner, name))))
            yield source

    return setup


def _refuse(bench: Bench) -> None:
    raise ValueError("the observer says no")


AGAIN = (
    Kind(
        "SIGINT twice",
        _again(_send(signal.SIGINT), _send(signal.SIGINT)),
        ("KeyboardInterrupt", ""),
    ),
    Kind(
        "SIGINT, then SIGTERM, handled",
        _again(_send(signal.SIGINT), _send(signal.SIGTERM)),
        ("Terminated", ""),
    ),
    Kind(
        "SIGINT while a failure is undone",
        _again(_refuse, _send(signal.SIGINT)),
        ("KeyboardInterrupt", ""),
    ),
)


def again(good: Path, scratch: Path) -> list[Outcome]:
    """A second signal at every step of undoing the first, or of undoing an error."""
    before = signal.signal(signal.SIGTERM, _raise)
    try:
        return [
            run_cell(good, scratch, kind, state, way)
            for kind in AGAIN
            for way in WAYS
            for state in STATES
        ]
    finally:
        signal.signal(signal.SIGTERM, before)


def handled(good: Path, scratch: Path) -> list[Outcome]:
    """Signals that become exceptions, at every state."""
    cells = [
        (kind, way, state) for kind in (INTERRUPT, HANDLED) for way in WAYS for state in STATES
    ]
    before = signal.signal(signal.SIGTERM, _raise)
    try:
        return [run_cell(good, scratch, kind, state, way) for kind, way, state in cells]
    finally:
        signal.signal(signal.SIGTERM, before)


DEADLY = (
    Kind("SIGTERM", _acting(_send(signal.SIGTERM)), None),
    Kind("SIGINT, then SIGTERM", _again(_send(signal.SIGINT), _send(signal.SIGTERM)), None),
)


def unhandled(good: Path, scratch: Path) -> list[Outcome]:
    """SIGTERM with no handler, in a child for each state: dead by the signal, no file left."""
    return [
        _killed(good, scratch, kind, state, way)
        for kind in DEADLY
        for way in WAYS
        for state in STATES
    ]


def _killed(good: Path, scratch: Path, kind: Kind, state: str, way: str) -> Outcome:
    here = Path(tempfile.mkdtemp(dir=scratch))
    before = _files(good, here)
    child = os.fork()
    if child == 0:
        os.chdir(here)
        os.environ["TMPDIR"] = tempfile.tempdir = str(here)
        bench = Bench(good, state, way)
        with serving(way), kind.setup(bench) as source:
            load(source, observers=[bench.observe])
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    by_signal = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM
    wrong = [] if by_signal else [f"wait status {status}"]
    wrong += [] if _files(good, here) == before else ["files were left"]
    return Outcome(kind.name, state, way, "died of it", wrong)


def _files(*folders: Path) -> list[tuple[str, int]]:
    return sorted(
        (str(path), path.stat().st_size) for folder in folders for path in folder.rglob("*")
    )


def storm(good: Path, scratch: Path) -> list[Outcome]:
    """SIGINT at random moments of many loads, by a timer: not only where an observer stands.

    Some are struck once; some again and again, also while they are undone.
    """
    strikes = Strikes()
    once = _storm("SIGINT at random", good, strikes, STORM, 1)
    return [once, _storm("SIGINTs at random", good, strikes, BURSTS, 6)]


def _storm(name: str, good: Path, strikes: Strikes, loads: int, most: int) -> Outcome:
    wanted = right_banks(good)
    generator = random.Random(20260101)
    ends = {"loaded": 0, "KeyboardInterrupt": 0}
    wrong: list[str] = []
    started = time.perf_counter()
    load(good)
    longest = 1.5 * (time.perf_counter() - started)
    witness = Witness()
    with witness.watching():
        before = witness.left()
        for number in range(loads):
            way = (*WAYS, "path")[number % (len(WAYS) + 1)]
            delay, apart = generator.uniform(0.0005, longest), generator.uniform(0.00005, 0.002)
            begin = partial(strikes.begin, delay, apart, generator.randint(1, most))
            end = _struck(good, way, begin, strikes, wanted, wrong)
            ends[end] = ends.get(end, 0) + 1
            _wait_for_threads(before.threads)
            gc.collect()
            wrong += witness.left().beyond(before)
    last = load(good)
    wrong += [] if same_bits(banks_of(last), wanted) else ["the next load is wrong"]
    if not ends["KeyboardInterrupt"]:
        wrong.append("no signal struck")
    ended = ", ".join(f"{count} {name}" for name, count in ends.items())
    return Outcome(name, "any", "all", ended, wrong)


class Strikes:
    """A timer that interrupts this process, a few times, until it is stopped.

    Its handler stays: a signal may reach a thread that sleeps, and be seen long after its timer.
    """

    def __init__(self) -> None:
        self._left = 0
        signal.signal(signal.SIGALRM, self._strike)

    def _strike(self, number: int, frame: FrameType | None) -> None:
        self._left -= 1
        if self._left >= 0:
            raise KeyboardInterrupt

    def begin(self, delay: float, apart: float, most: int) -> None:
        """The first strike comes after ``delay`` seconds, the next ones so far ``apart``."""
        self._left = most
        signal.setitimer(signal.ITIMER_REAL, delay, apart)

    def stop(self) -> None:
        """No strike comes any more."""
        self._left = 0
        signal.setitimer(signal.ITIMER_REAL, 0)


def _wait_for_threads(known: list[int]) -> None:
    """A thread that was being started when the signal struck ends by itself."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and set(live_threads()) - set(known):
        time.sleep(0.001)


def _struck(
    good: Path,
    way: str,
    begin: Callable[[], None],
    strikes: Strikes,
    wanted: list[Any],
    wrong: list[str],
) -> str:
    """One load with a timer set; how it ended. ``path``: the library opens the source itself."""
    experts = None
    try:
        try:
            with ExitStack() as stack:
                source: Any = good
                if way != "path":
                    stack.enter_context(serving(way))
                    source = stack.enter_context(BenchSource(Bench(good, "", way)))
                begin()
                try:
                    experts = load(source)
                finally:
                    strikes.stop()
        finally:
            strikes.stop()
    except KeyboardInterrupt:
        strikes.stop()
        return "KeyboardInterrupt"
    if not same_bits(banks_of(experts), wanted):
        wrong.append("wrong banks")
    return "loaded"


PROBES = (handled, again, unhandled, storm)

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        checkpoint = Path(name) / "good"
        make_checkpoint(checkpoint)
        room = Path(name) / "scratch"
        room.mkdir()
        chosen = [probe for probe in PROBES if probe.__name__ in sys.argv[1:]]
        print(json.dumps([asdict(o) for probe in chosen for o in probe(checkpoint, room)]))

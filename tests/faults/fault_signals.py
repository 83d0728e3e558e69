"""Signals in the middle of a load, in processes of their own; run by tests, prints JSON.

SIGINT, and SIGTERM where the application handles it, unwind the load like any exception. SIGTERM
without a handler ends the process: then no file may be left that was not there before.
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
from collections.abc import Callable
from dataclasses import asdict
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
from fault_kinds import STATES, Bench, BenchSource, Kind, _acting
from load_fakes import banks_of, same_bits

from loader import native

torch.set_num_threads(1)
WAYS = ("ahead", "reference") if native.HOST is None else ("direct", "ahead", "reference")
STORM = 120
"""Loads that a signal strikes at a random moment."""


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


def unhandled(good: Path, scratch: Path) -> list[Outcome]:
    """SIGTERM with no handler, in a child for each state: dead by the signal, no file left."""
    found = []
    for way in WAYS:
        for state in STATES:
            here = Path(tempfile.mkdtemp(dir=scratch))
            before = _files(good, here)
            child = os.fork()
            if child == 0:
                os.chdir(here)
                os.environ["TMPDIR"] = tempfile.tempdir = str(here)
                bench = Bench(good, state, way)
                bench.act = lambda: os.kill(os.getpid(), signal.SIGTERM)
                with serving(way), BenchSource(bench) as source:
                    load(source, observers=[bench.observe])
                os._exit(0)
            status = os.waitpid(child, 0)[1]
            by_signal = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM
            wrong = [] if by_signal else [f"wait status {status}"]
            wrong += [] if _files(good, here) == before else ["files were left"]
            found.append(Outcome("SIGTERM", state, way, "died of it", wrong))
    return found


def _files(*folders: Path) -> list[tuple[str, int]]:
    return sorted(
        (str(path), path.stat().st_size) for folder in folders for path in folder.rglob("*")
    )


def storm(good: Path, scratch: Path) -> list[Outcome]:
    """SIGINT at a random moment of many loads, by a timer: not only where an observer stands."""
    wanted = right_banks(good)
    generator = random.Random(20260101)
    ends = {"loaded": 0, "KeyboardInterrupt": 0}
    wrong: list[str] = []
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    started = time.perf_counter()
    load(good)
    longest = 1.5 * (time.perf_counter() - started)
    witness = Witness()
    with witness.watching():
        before = witness.left()
        for number in range(STORM):
            way = WAYS[number % len(WAYS)]
            end = _struck(good, way, generator.uniform(0.0005, longest), wanted, wrong)
            ends[end] = ends.get(end, 0) + 1
            _wait_for_threads(before.threads)
            gc.collect()
            wrong += witness.left().beyond(before)
    last = load(good)
    wrong += [] if same_bits(banks_of(last), wanted) else ["the next load is wrong"]
    if not ends["KeyboardInterrupt"]:
        wrong.append("no signal struck")
    ended = ", ".join(f"{count} {name}" for name, count in ends.items())
    return [Outcome("SIGINT at random", "any", "all", ended, wrong)]


def _wait_for_threads(known: list[int]) -> None:
    """A thread that was being started when the signal struck ends by itself."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and set(live_threads()) - set(known):
        time.sleep(0.001)


def _struck(good: Path, way: str, delay: float, wanted: list[Any], wrong: list[str]) -> str:
    """One load with a timer set; how it ended."""
    try:
        try:
            with serving(way), BenchSource(Bench(good, "", way)) as source:
                signal.setitimer(signal.ITIMER_REAL, delay)
                experts = load(source)
                signal.setitimer(signal.ITIMER_REAL, 0)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return "KeyboardInterrupt"
    if not same_bits(banks_of(experts), wanted):
        wrong.append("wrong banks")
    return "loaded"


PROBES = (handled, unhandled, storm)

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        checkpoint = Path(name) / "good"
        make_checkpoint(checkpoint)
        room = Path(name) / "scratch"
        room.mkdir()
        chosen = [probe for probe in PROBES if probe.__name__ in sys.argv[1:]]
        print(json.dumps([asdict(o) for probe in chosen for o in probe(checkpoint, room)]))

"""Recorder: an observer that remembers what a load did, and says in one line that it did it right.

Each assertion raises ``AssertionError`` with a table of what was expected and what was found.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from loader.lifecycle import LayerEvent
from loader.plan import Plan
from loader.report import LoadReport
from loader.testing.difference import Fact, at_most, require
from loader.testing.watch import Allocations, Storages, counters, files_in_use

TOLERANCE_BYTES = 8 << 20
"""What the memory counters of a process may move by on their own."""

_ONCE = ("planned", "reading", "converting", "prepared", "released", "ready")
_ENDS = ("ready", "failed")
_CATEGORIES = ("weight", "metadata", "globals", "unquantized")


class LifecycleRecorder:
    """An observer of what one card loads: ``loader.load(..., observers=[recorder])``.

    It takes one load, or ``prepare_module`` of one layer after the other. A layer that is planned
    again begins anew; ``events`` keeps everything.
    """

    def __init__(self) -> None:
        self.events: list[LayerEvent] = []
        self._layers: dict[int, list[LayerEvent]] = {}
        self._call: list[LayerEvent] = []
        self._baseline = counters()
        self._allocations = Allocations()
        self._modules: dict[int, Storages] = {}
        self._left: dict[int, int] = {}
        self._folders: list[str | os.PathLike[str]] = []
        self._lock = threading.Lock()

    def __call__(self, event: LayerEvent) -> None:
        """Remember one event; called by the load."""
        with self._lock:
            if event.state == "planned":
                if self._idle():
                    self._begin()
                self._layers[event.layer] = []
            for log in (self.events, self._call, self._layers.setdefault(event.layer, [])):
                log.append(event)
            if event.state == "released" and event.layer in self._modules:
                self._left[event.layer] = self._modules[event.layer].alive()
            if self._idle():
                self._allocations.stop()

    def _idle(self) -> bool:
        """True where every layer that was planned came to an end."""
        return all(events[-1].state in _ENDS for events in self._layers.values())

    def _begin(self) -> None:
        """The first event of a call, which has allocated nothing yet."""
        failed = [n for n, events in self._layers.items() if events[-1].state == "failed"]
        for layer in failed:
            del self._layers[layer]
        self._call = []
        self._baseline = counters()
        self._allocations.start()

    def states(self, layer: int) -> tuple[str, ...]:
        """States of a layer since it was last planned; chunks do not repeat ``reading``."""
        return tuple(state for state, _ in groupby(e.state for e in self._layers.get(layer, [])))

    def watch(self, source: torch.nn.Module | str | os.PathLike[str], layer: int = 0) -> None:
        """Watch sources for :meth:`assert_sources_gone`, without keeping them.

        A module that ``prepare_module`` is to convert as ``layer``: its parameters and buffers. A
        folder: its safetensors files, which nobody may have open or mapped after the load.
        """
        if isinstance(source, torch.nn.Module):
            self._modules[layer] = Storages([*source.parameters(), *source.buffers()])
        else:
            self._folders.append(source)

    def assert_released_once(self) -> None:
        """Every layer took every step in order, and released its cache exactly once."""
        __tracebackhide__ = True
        require("a layer was not released once, in its turn", self._release_facts())

    def _release_facts(self) -> Iterator[Fact]:
        for layer, events in self._seen(self._layers).items():
            releases = sum(event.state == "released" for event in events)
            yield Fact(layer, "releases", 1, releases)
            yield Fact(layer, "states", " ".join(_ONCE), " ".join(self.states(layer)))

    def assert_sources_gone(self) -> None:
        """The sources of every layer were consumed, and went before it was released.

        All bytes that were planned were read; of the watched modules no source tensor was left
        when the layer was released; of the watched folders no file is open or mapped now.
        """
        __tracebackhide__ = True
        require("sources outlived the conversion", self._source_facts())

    def _source_facts(self) -> Iterator[Fact]:
        for layer, events in self._seen(self._layers).items():
            planned = sum(e.bytes for e in events if e.state == "planned")
            read = max((e.bytes for e in events if e.state == "reading"), default=0)
            yield Fact(layer, "source bytes consumed", planned, read)
        for layer in self._modules:
            left: object = self._left.get(layer, "no release")
            yield Fact(layer, "source bytes left on the module", 0, left)
        for folder in self._folders:
            held = ", ".join(files_in_use(folder)) or "none"
            yield Fact("", f"files in use of {Path(folder).name}", "none", held)

    def assert_nothing_left(self, tolerance_bytes: int = TOLERANCE_BYTES) -> None:
        """The last call failed and left nothing: no layer, no release after it, no memory.

        Each of its layers was told ``failed``, last. Nothing that the call allocated lives, to the
        byte. The counters of the process, which others move, too, are back within
        ``tolerance_bytes`` of where they were.
        """
        __tracebackhide__ = True
        require("a failed load left something", self._failure_facts(tolerance_bytes))

    def _failure_facts(self, tolerance_bytes: int) -> Iterator[Fact]:
        states = [event.state for event in self._call]
        for layer in self._seen({event.layer: [event] for event in self._call}):
            yield Fact(layer, "last state", "failed", self._layers[layer][-1].state)
        late = states[states.index("failed") :].count("released") if "failed" in states else 0
        yield Fact("", "releases after the failure", 0, late)
        yield Fact("", "bytes that are still allocated", 0, self._allocations.storages.alive())
        for name, now in counters().items():
            yield at_most("", f"{name} bytes", tolerance_bytes, now - self._baseline.get(name, 0))

    def assert_bytes(self, expected: Plan | LoadReport | Mapping[int, int]) -> None:
        """Each layer's banks, and their sum over the card, are those of a plan or a report.

        For a report, what was measured is what was planned, too, and what the load allocated holds
        no more than that now. ``expected`` may also be bytes by layer, as for prepared modules.
        """
        __tracebackhide__ = True
        require("the bytes of the card are not those expected", self._byte_facts(expected))

    def _byte_facts(self, expected: Plan | LoadReport | Mapping[int, int]) -> Iterator[Fact]:
        found = {
            layer: sum(event.bytes for event in events if event.state == "ready")
            for layer, events in self._seen(self._layers).items()
        }
        report = expected.to_dict() if isinstance(expected, (Plan, LoadReport)) else {}
        wanted = dict(expected) if isinstance(expected, Mapping) else _bank_bytes(report)
        for layer in sorted({*wanted, *found}):
            where = "not loaded", "not expected"
            yield Fact(layer, "bank bytes", wanted.get(layer, where[1]), found.get(layer, where[0]))
        total = sum(found.values())
        yield Fact("all", "bank bytes", sum(wanted.values()), total)
        if not report:
            return
        memory = report["memory"]
        resident = memory["predicted_resident"]
        yield Fact("all", "banks and workspace", resident, total + memory["workspace"])
        if "resident" in memory:
            yield Fact("all", "resident as measured", resident, memory["resident"])
            yield at_most("all", "bytes held now", resident, self._allocations.storages.alive())

    def _seen(self, layers: dict[int, list[LayerEvent]]) -> dict[int, list[LayerEvent]]:
        """The layers in order; nothing was asserted of a load that nobody saw."""
        require(
            "the recorder saw no load", [Fact("", "layers", "some", "some" if layers else "none")]
        )
        return dict(sorted(layers.items()))


def _bank_bytes(report: Mapping[str, Any]) -> dict[int, int]:
    """Bytes of the banks by layer, from a plan's or a report's dictionary."""
    return {
        entry["layer"]: sum(entry["bytes"][category] for category in _CATEGORIES)
        for entry in report["layers"]
    }


def lifecycle_recorder() -> LifecycleRecorder:
    """A new :class:`LifecycleRecorder`."""
    return LifecycleRecorder()

"""Report: what one load did, as a value: the plan's own form with what was measured beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import get_ident
from typing import Any

from loader.card import CardMemory, CardPeak, nvml_used
from loader.errors import LoaderError
from loader.render import load_text, overhead_text
from loader.route import RouteRange
from loader.table import human_bytes


@dataclass
class LayerMeasured:
    """Measured facts of one layer: seconds by phase, and how often its cache was released."""

    read_seconds: float = 0.0
    convert_seconds: float = 0.0
    release_seconds: float = 0.0
    releases: int = 0
    routes: tuple[RouteRange, ...] = ()
    """What serves the layer, where that was measured; else empty, and the plan's routes hold."""


@dataclass(frozen=True)
class CardMeasured:
    """Counters of a card before, during and after one load, in bytes; see ``loader/card.py``.

    ``nvml_used`` is None without NVML; ``why_pageable`` says why staging was not pinned, or "".
    """

    baseline: CardMemory
    peak: CardMemory
    after: CardMemory
    nvml_used: int | None = None
    why_pageable: str = ""

    @property
    def rounding(self) -> int:
        """What the allocator added to this load's requests to fill its blocks."""
        before = self.baseline.allocated - self.baseline.requested
        return self.after.allocated - self.after.requested - before

    @property
    def unused(self) -> int:
        """What the allocator holds beyond what is allocated: for whoever asks next."""
        return self.after.reserved - self.after.allocated

    @property
    def foreign(self) -> int:
        """Used, but not by the allocator: CUDA's context, loaded kernels, other processes."""
        return self.after.used - self.after.reserved

    def to_dict(self) -> dict[str, Any]:
        """The ``counters`` object of the report."""
        return {
            **asdict(self),
            "rounding": self.rounding,
            "unused": self.unused,
            "foreign": self.foreign,
        }


@dataclass
class MemoryMeasured:
    """Measured memory of one load, in bytes, each by the counter that its name says.

    ``baseline``, ``peak`` and ``after`` are anonymous + shared resident memory of the process on
    the host, bytes requested of the allocator on a card. Device counters are None on the host, and
    as the load left them on a card.
    """

    resident: int = 0
    baseline: int = 0
    peak: int = 0
    after: int = 0
    host_pinned: int = 0
    allocated: int | None = None
    reserved: int | None = None
    device_used: int | None = None
    host_anonymous_peak: int = 0
    host_file_peak: int = 0
    host_file_baseline: int = 0
    host_uss_peak: int = 0
    counters: CardMeasured | None = None

    def use_card(self, peak: CardPeak, pinned_bytes: int, why_pageable: str) -> None:
        """Put a card's counters in place of the host's."""
        after = peak.sample()
        self.baseline, self.peak = peak.baseline.requested, peak.highest.requested
        self.after, self.host_pinned = after.requested, pinned_bytes
        self.allocated, self.reserved, self.device_used = (
            after.allocated,
            after.reserved,
            after.used,
        )
        self.counters = CardMeasured(
            peak.baseline, peak.highest, after, nvml_used(peak.device), why_pageable
        )

    @property
    def overhead(self) -> int:
        """peak - baseline - resident (docs/memory.md).

        The counters are the whole process's: below 0 where others gave memory back meanwhile.
        """
        return self.peak - self.baseline - self.resident


@dataclass(frozen=True)
class LoadReport:
    """``planned`` is ``Plan.to_dict()``; everything else was measured."""

    planned: Mapping[str, Any] = field(repr=False)
    layers: Mapping[int, LayerMeasured]
    memory: MemoryMeasured
    seconds: float
    bytes_read: int
    nonfinite: tuple[str, ...] = ()

    @property
    def gb_per_s(self) -> float:
        """Bytes read per second of the whole call, in units of 1e9."""
        return self.bytes_read / self.seconds / 1e9

    def to_dict(self) -> dict[str, Any]:
        """The JSON report: the plan's own form, and what was measured."""
        layers = []
        for entry in self.planned["layers"]:
            measured = self.layers[entry["layer"]]
            seconds = {
                "read": measured.read_seconds,
                "convert": measured.convert_seconds,
                "release": measured.release_seconds,
            }
            settled = {"routes": [r.to_dict() for r in measured.routes]} if measured.routes else {}
            layers.append({**entry, **settled, "seconds": seconds, "releases": measured.releases})
        memory = {**self.planned["memory"], **asdict(self.memory), "overhead": self.memory.overhead}
        counters = self.memory.counters
        memory["counters"] = None if counters is None else counters.to_dict()
        return {
            **self.planned,
            "layers": layers,
            "memory": memory,
            "seconds": self.seconds,
            "gb_per_s": self.gb_per_s,
            "bytes_read": self.bytes_read,
            "nonfinite": list(self.nonfinite),
        }

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_dict` to a file."""
        write_json(self.to_dict(), path)

    def memory_line(self) -> str:
        """One line for a log: what the card holds and what the load took beyond it."""
        return (
            f"{self.planned['device']}: resident {human_bytes(self.memory.resident)} "
            f"(predicted {human_bytes(self.planned['memory']['predicted_resident'])}), "
            f"{overhead_text(self.memory.overhead)}, "
            f"{self.gb_per_s:.2f} GB/s in {self.seconds:.2f} s"
        )

    def __str__(self) -> str:
        return load_text(self.to_dict())


def write_json(value: object, path: str | os.PathLike[str]) -> None:
    """Write a report as indented JSON: the whole file, or none where writing fails.

    Raises :class:`LoaderError`, which names the file.
    """
    check_target(path)
    path, text = Path(path), json.dumps(value, indent=2) + "\n"
    try:
        if not _replaceable(path):
            path.write_text(text)
            return
        # A name may be 255 bytes long, and this one is longer by a few.
        partial = path.with_name(f".{path.name[:40]}.{os.getpid()}.{get_ident()}")
        try:
            partial.write_text(text)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise _not_written(path, error) from error


def check_target(path: str | os.PathLike[str]) -> None:
    """Refuse what is no name of a file in a folder, before there is anything to write."""
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise _not_written(path, "no name of a file")
    if not os.path.isdir(Path(path).absolute().parent):
        raise _not_written(path, "a name in no folder")
    if os.path.isdir(path):
        raise _not_written(path, "a folder")


def _not_written(path: object, found: object) -> LoaderError:
    return LoaderError(
        "the report cannot be written",
        file=repr(path) if isinstance(path, str) and not path else str(path),
        expected="a file that can be written",
        found=found,
    )


def _replaceable(path: Path) -> bool:
    """A name that may be renamed over: a plain file or nothing yet, no device, pipe or link."""
    return not path.is_symlink() and (path.is_file() or not path.exists())

"""Report: what one load did, as a value: the plan's own form with what was measured beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loader.render import load_text
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


@dataclass
class MemoryMeasured:
    """Measured memory of one load, in bytes, each by the counter that its name says.

    ``baseline``, ``peak`` and ``after`` are anonymous + shared resident memory of the process on
    the host, allocated bytes on a card. Device counters are None on the host.
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

    @property
    def overhead(self) -> int:
        """peak - baseline - resident (DESIGN section 8)."""
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
        """The JSON report of DESIGN section 9."""
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
            f"overhead {human_bytes(self.memory.overhead)}, "
            f"{self.gb_per_s:.2f} GB/s in {self.seconds:.2f} s"
        )

    def __str__(self) -> str:
        return load_text(self.to_dict())


def write_json(value: object, path: str | os.PathLike[str]) -> None:
    """Write a report as indented JSON: the whole file, or none where writing fails."""
    path = Path(path)
    if not _replaceable(path):
        path.write_text(json.dumps(value, indent=2) + "\n")
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(value, indent=2) + "\n")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _replaceable(path: Path) -> bool:
    """A name that may be renamed over: a plain file or nothing yet, no device, pipe or link."""
    return not path.is_symlink() and (path.is_file() or not path.exists())

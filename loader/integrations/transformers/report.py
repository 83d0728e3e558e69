"""Report: what one model is made of, every tensor of the checkpoint accounted for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from loader.render import overhead_text
from loader.report import LoadReport
from loader.table import human_bytes


@dataclass
class ModelMemory:
    """Bytes of one card. ``plain`` is what the model keeps as Transformers keeps it.

    ``baseline`` and ``peak`` are the process's own counters; the baseline is taken when the model
    stands on meta, the peak counts until everything is loaded.
    """

    experts: int = 0
    linears: int = 0
    plain: int = 0
    workspace: int = 0
    predicted_resident: int = 0
    predicted_peak: int = 0
    resident: int = 0
    baseline: int = 0
    peak: int = 0

    @property
    def overhead(self) -> int:
        """peak - baseline - resident; below 0 where others gave memory back meanwhile."""
        return self.peak - self.baseline - self.resident


@dataclass(frozen=True)
class ModelReport:
    """``experts`` is the report of the routed experts, ``linears`` one entry for each linear.

    ``plain`` names the checkpoint tensors that Transformers loaded, ``unused`` those that its model
    has no place for (draft layers, say), ``read_bytes`` what was read in all.
    """

    source: str
    device: str
    dtype: str
    framework: str
    experts: LoadReport = field(repr=False)
    linears: tuple[Mapping[str, Any], ...]
    plain: tuple[str, ...]
    unused: tuple[str, ...]
    memory: ModelMemory
    seconds: float
    read_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {
            "schema": 1,
            "source": self.source,
            "device": self.device,
            "dtype": self.dtype,
            "framework": self.framework,
            "experts": self.experts.to_dict(),
            "linears": [dict(one) for one in self.linears],
            "plain": list(self.plain),
            "unused": list(self.unused),
            "memory": {**asdict(self.memory), "overhead": self.memory.overhead},
            "seconds": self.seconds,
            "read_bytes": self.read_bytes,
        }

    def memory_line(self) -> str:
        """One line for a log: what the card holds, of which kind, and what the load took beside."""
        m = self.memory
        return (
            f"{self.device}: resident {human_bytes(m.resident)} "
            f"(predicted {human_bytes(m.predicted_resident)}): "
            f"experts {human_bytes(m.experts)}, linears {human_bytes(m.linears)}, "
            f"plain {human_bytes(m.plain)}, workspace {human_bytes(m.workspace)}; "
            f"{overhead_text(m.overhead)}, {self.seconds:.2f} s"
        )

"""The outcome of a check, as a value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from loader.verify.layer import Projection

LISTED = 20  # how many findings of each sort a report holds; the rest are only counted


@dataclass(frozen=True)
class Mismatch:
    """One weight that is not what the checkpoint says; ``column`` and ``k`` are the card's own.

    So the value is ``dequantize(expert)[projection][column, k]``.
    """

    layer: int
    expert: int
    projection: Projection
    column: int
    k: int
    expected: float
    found: float


@dataclass(frozen=True)
class ForwardCase:
    """One call of a layer against fp64; ``relative_error`` is the norm's, and NaN never passes."""

    layer: int
    tokens: int
    dtype: str
    route: str | None
    relative_error: float
    bound: float

    @property
    def ok(self) -> bool:
        """Within the bound."""
        return self.relative_error <= self.bound

    @property
    def severity(self) -> float:
        """Error in units of its bound; NaN counts as infinite."""
        ratio = self.relative_error / self.bound
        return math.inf if math.isnan(ratio) else ratio


@dataclass(frozen=True)
class VerifyReport:
    """What was compared and what was found; ``ok`` is false also if nothing was compared.

    ``samples`` is what was asked, ``columns`` what was checked (fewer where the card holds fewer),
    ``values`` the single weights in them, ``columns_by_format`` the same columns by dialect.
    ``mismatches`` and ``problems`` (sentences: wrong shapes, an impossible slice) hold at most
    ``LISTED`` each beside their full counts. ``forward_worst`` holds the failures, at most
    ``LISTED``, and otherwise the worst case of each dtype.
    """

    source: str
    seed: int
    samples: int
    layers: tuple[int, ...]
    experts: int
    columns: int
    values: int
    columns_by_format: tuple[tuple[str, int], ...]
    mismatch_count: int
    mismatches: tuple[Mismatch, ...]
    problem_count: int
    problems: tuple[str, ...]
    forward_count: int
    forward_failures: int
    forward_worst: tuple[ForwardCase, ...]
    forward_skipped: tuple[str, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Something was compared, and nothing differs."""
        faults = self.mismatch_count + self.problem_count + self.forward_failures
        return self.columns > 0 and faults == 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; NaN and infinities, which JSON lacks, as strings."""
        plain = _plain({"ok": self.ok, **asdict(self)})
        assert isinstance(plain, dict)
        plain["columns_by_format"] = dict(self.columns_by_format)
        return plain

    def __str__(self) -> str:
        spread = ", ".join(f"{name} {count:,}" for name, count in self.columns_by_format)
        rows = [
            ("result", "ok" if self.ok else "FAILED"),
            ("source", self.source),
            ("weights", f"{self.columns:,} columns of {self.samples:,} asked (seed {self.seed})"),
            ("", f"{self.values:,} values in {len(self.layers)} layers, {self.experts:,} experts"),
            ("formats", spread or "none"),
            ("mismatches", f"{self.mismatch_count:,}"),
            ("problems", f"{self.problem_count:,}"),
            ("forward", f"{self.forward_count} calls, {self.forward_failures} beyond the bound"),
            ("seconds", f"{self.seconds:.2f}"),
        ]
        lines = [f"{label:<12}{text}" for label, text in rows]
        lines += [f"{'skipped':<12}{reason}" for reason in self.forward_skipped]
        lines += [f"{'problem':<12}{problem}" for problem in self.problems]
        lines += _forward_table(self.forward_worst)
        lines += _mismatch_table(self.mismatches)
        return "\n".join(lines)


def _forward_table(cases: Sequence[ForwardCase]) -> list[str]:
    if not cases:
        return []
    head = ("worst calls", "layer", "tokens", "dtype", "route", "error", "bound", "")
    rows = [
        (
            "",
            str(case.layer),
            str(case.tokens),
            case.dtype,
            case.route or "-",
            f"{case.relative_error:.2e}",
            f"{case.bound:.0e}",
            "" if case.ok else "beyond",
        )
        for case in cases
    ]
    return _aligned([head, *rows])


def _mismatch_table(mismatches: Sequence[Mismatch]) -> list[str]:
    if not mismatches:
        return []
    head = ("mismatches", "layer", "expert", "projection", "column", "k", "expected", "found")
    rows = [
        (
            "",
            str(item.layer),
            str(item.expert),
            item.projection,
            str(item.column),
            str(item.k),
            f"{item.expected:.9g}",
            f"{item.found:.9g}",
        )
        for item in mismatches
    ]
    return _aligned([head, *rows])


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    widths[0] = max(widths[0], 10)
    return [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value

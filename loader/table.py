"""Table: columns that line up, for people, on a terminal or in a string."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

_GAP = "  "
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Table:
    """Rows under named columns; ``text`` names the columns of words, the others hold numbers.

    Numbers stand to the right and are never broken; words stand to the left and may wrap.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    text: Sequence[str] = ()


def render(*parts: str | Table, width: int = 120) -> str:
    """Paragraphs and tables as plain text of ``width`` columns, a blank line between them.

    Only what cannot be broken is wider: a long path, a table whose numbers need more room.
    """
    return "\n\n".join(
        _drawn(part, width) if isinstance(part, Table) else _wrapped(part, width) for part in parts
    )


def _wrapped(text: str, width: int) -> str:
    return "\n".join(
        textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    )


def _drawn(table: Table, width: int) -> str:
    cells = [table.columns, *([str(cell) for cell in row] for row in table.rows)]
    words = [name in table.text for name in table.columns]
    widths = _widths(cells, words, width)
    lines = [table.title, ""]
    for number, row in enumerate(cells):
        blocks = [
            _wrapped(cell, size).split("\n") if wraps else cell.split("\n")
            for cell, size, wraps in zip(row, widths, words, strict=True)
        ]
        for line in zip_longest(*blocks, fillvalue=""):
            placed = [
                text.ljust(size) if left else text.rjust(size)
                for text, size, left in zip(line, widths, words, strict=True)
            ]
            lines.append(f" {_GAP.join(placed)}".rstrip())
        if number == 0:
            lines.append(" " + "─" * (sum(widths) + len(_GAP) * (len(widths) - 1)))
    return "\n".join(lines)


def _widths(cells: Sequence[Sequence[str]], words: Sequence[bool], width: int) -> list[int]:
    """Width of each column: what it holds, and less where words wrap to fit the whole."""
    columns = list(zip(*cells, strict=True))
    widths = [max(len(line) for cell in column for line in cell.split("\n")) for column in columns]
    least = [
        max(len(word) for cell in column for word in cell.split() or [""]) if wraps else size
        for column, wraps, size in zip(columns, words, widths, strict=True)
    ]
    room = width - 1 - len(_GAP) * (len(widths) - 1)
    while sum(widths) > room:
        spare = [size if size > low else 0 for size, low in zip(widths, least, strict=True)]
        if not any(spare):
            break
        widths[spare.index(max(spare))] -= 1
    return widths


def human_bytes(count: int | float | None) -> str:
    """``1536`` as ``1.50 KiB``; None as a dash."""
    if count is None:
        return "-"
    size = float(count)
    for unit in _UNITS:
        if abs(size) < 1024 or unit == _UNITS[-1]:
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"


def merged_layers(numbers: Sequence[int]) -> str:
    """Layer indices as runs: ``0-2, 5``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)

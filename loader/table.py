"""Table: columns that line up, for people, on a terminal or in a string."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

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
    # Imported here: a server that never prints a table does not pay for it.
    import rich.table
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.text import Text

    grid = rich.table.Table(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False
    )
    columns = zip(table.columns, zip(table.columns, *table.rows, strict=True), strict=True)
    for name, cells in columns:
        words = name in table.text
        # Words may wrap between words only, numbers never: a cell is at least its longest piece.
        pieces = [
            piece for cell in cells for piece in (str(cell).split() if words else [str(cell)])
        ]
        least = max((len(line) for piece in pieces for line in piece.split("\n")), default=1)
        grid.add_column(
            Text(name),
            justify="left" if words else "right",
            no_wrap=not words,
            min_width=max(least, 1),
        )
    for row in table.rows:
        grid.add_row(*(Text(str(cell)) for cell in row))
    # Wide enough to measure what cannot be broken, then as wide as asked or as that needs.
    console = Console(width=1 << 16, color_system=None, legacy_windows=False)
    needed = Measurement.get(console, console.options, grid).minimum
    console.width = max(width, needed)
    with console.capture() as drawn:
        console.print(grid)
    lines = [line.rstrip() for line in drawn.get().splitlines()]
    return "\n".join([table.title, "", *lines])


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

"""Table: columns that line up, for people, on a terminal or in a string."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO

from rich import box
from rich.console import Console
from rich.table import Table

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def human_bytes(count: int | float | None) -> str:
    """``1536`` as ``1.5 KiB``; None as a dash."""
    if count is None:
        return "-"
    size = float(count)
    for unit in _UNITS:
        if abs(size) < 1024 or unit == _UNITS[-1]:
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], left: Sequence[str] = ()
) -> Table:
    """A table with numbers to the right; ``left`` names the columns of text."""
    result = Table(
        title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False
    )
    for column in columns:
        result.add_column(column, justify="left" if column in left else "right", overflow="fold")
    for row in rows:
        result.add_row(*(str(cell) for cell in row))
    return result


def render(*parts: object, width: int = 120) -> str:
    """Tables and lines as plain text."""
    buffer = StringIO()
    console = Console(file=buffer, width=width, highlight=False, color_system=None)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()).rstrip()


def merged_layers(numbers: Sequence[int]) -> str:
    """Layer indices as runs: ``0-2, 5``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)

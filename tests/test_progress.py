"""The progress bar: bytes that reach the total, quiet where nobody looks."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import loader
from loader import LayerEvent
from loader.progress import ProgressBar
from loader.testing.checkpoint import TinyCheckpoint, tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    sizes: dict[str, Any] = {"hidden": 64, "intermediate": 64, "experts": 5, "group": 32}
    return tiny_checkpoint(tmp_path_factory.mktemp("bar"), layers=3, **sizes)


def _bar(terminal: bool) -> tuple[ProgressBar, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100, color_system=None)
    return ProgressBar(console), out


def test_on_a_terminal_the_bytes_reach_the_total(checkpoint: TinyCheckpoint) -> None:
    bar, out = _bar(terminal=True)
    seen: list[tuple[float, float | None]] = []

    def watch(event: LayerEvent) -> None:
        seen.append((bar.completed, bar.total))

    with bar:
        experts = loader.load(checkpoint.folder, observers=[bar, watch], staging_bytes=1 << 14)
    total = experts.report.bytes_read
    assert (bar.completed, bar.total) == (total, total)
    done = [completed for completed, _ in seen]
    assert done == sorted(done) and done[-2] > 0 and len(set(done)) > 5
    assert {known for _, known in seen[2:]} == {total}  # every layer is planned before any reads
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    last = [line for line in re.split(r"[\r\n]+", text) if line.strip()][-1]
    assert "layer   2" in last
    assert re.search(r"(\d+\.\d)/\1 KiB", last)
    assert re.search(r"\d [kMG]?i?B/s|\d+\.\d+ ?[kMG]?B/s", last)


def test_off_a_terminal_nothing_is_written(checkpoint: TinyCheckpoint) -> None:
    bar, out = _bar(terminal=False)
    with bar:
        loader.load(checkpoint.folder, observers=[bar])
    assert out.getvalue() == ""


def test_a_failed_load_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path, layers=1, experts=2)
    bar, out = _bar(terminal=True)

    def refuse(event: LayerEvent) -> None:
        if event.state == "converting":
            raise ValueError("no")

    with pytest.raises(loader.LifecycleError), bar:
        loader.load(checkpoint.folder, observers=[bar, refuse])
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h") == 1


def test_a_layer_that_is_read_in_many_chunks_counts_once() -> None:
    bar, _ = _bar(terminal=True)
    for layer in (4, 7):
        bar(LayerEvent(layer, "planned", 0.0, 100))
    found = []
    for layer in (4, 7):
        for state, nbytes in (
            ("reading", 0),
            ("reading", 60),
            ("reading", 100),
            ("converting", 0),
            ("prepared", 9999),
            ("released", 5),
            ("ready", 9999),
        ):
            bar(LayerEvent(layer, state, 0.0, nbytes))
            found.append(bar.completed)
    assert found == [0, 60, *[100] * 6, 160, *[200] * 5]
    assert bar.total == 200

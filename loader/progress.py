"""Progress: a bar by bytes, with layer and rate, as an observer; quiet where nobody looks."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from loader.lifecycle import LayerEvent


class ProgressBar:
    """An observer that draws on stderr; a context manager. Draws nothing off a terminal.

    ``completed`` of ``total`` bytes have been consumed.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar = Progress(
            TextColumn("layer {task.fields[layer]:>3}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("load", total=0, layer="-")
        self.total = 0
        self.completed = 0
        self._before = 0  # of the layers that were finished

    def __call__(self, event: LayerEvent) -> None:
        if event.state == "planned":
            self.total += event.bytes
            self._bar.update(self._task, total=self.total)
        elif event.state == "reading":
            self.completed = self._before + event.bytes
            self._bar.update(self._task, completed=self.completed, layer=event.layer)
        elif event.state == "prepared":
            self._before = self.completed

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

"""How much of a load is Python: time outside native calls, the plan apart.

    python benchmarks/python_time.py [--folder KEEP] [--rounds 5] [--json FILE]

One layer of 512 experts (H=2560, I=640, group 32: 4,608 tensors), the case with the most tensors
for its bytes. Native calls are timed where operators hand over to the implementation; ``pages``
are the kernel making a bank's pages present. Medians, files in the page cache.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import loader
from loader import native
from loader.core import CORE
from loader.table import Table, render
from loader.testing.checkpoint import PRESETS, tiny_checkpoint

PRESET = "experts-512"
PARTS = ("plan", "native", "pages", "counters", "python")


class Clock:
    """Seconds spent inside wrapped calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, its time added."""

        def timed(*args: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*args, **named)
            finally:
                self.seconds += time.perf_counter() - started

        return timed


def one_load(folder: Path) -> dict[str, float]:
    """Seconds of one load by part."""
    host = native.HOST
    assert host is not None and host.read is not None and CORE is not None
    clocks = {part: Clock() for part in ("plan", "native", "pages", "counters")}
    code = clocks["native"]
    timed = replace(
        host,
        read=code.around(host.read),
        write=code.around(host.write),
        finish=code.around(host.finish),
    )
    pipeline = loader.pipeline
    with (
        native.serving(timed),
        mock.patch.object(CORE, "populate", clocks["pages"].around(CORE.populate)),
        mock.patch.object(
            pipeline, "plan_checkpoint", clocks["plan"].around(pipeline.plan_checkpoint)
        ),
        mock.patch.object(
            pipeline, "open_checkpoint", clocks["plan"].around(pipeline.open_checkpoint)
        ),
        mock.patch("loader.memory.host_uss", clocks["counters"].around(loader.memory.host_uss)),
    ):
        started = time.perf_counter()
        kept = loader.load(folder)
        total = time.perf_counter() - started
    del kept  # after the clock: unmapping is no part of a load
    parts = {part: clock.seconds for part, clock in clocks.items()}
    return {**parts, "python": total - sum(parts.values()), "total": total}


def main() -> None:
    """Measure, print a table and JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="keep (and reuse) the checkpoint here")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if CORE is None:
        raise SystemExit("the native core was not built")
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.folder or Path(scratch)) / PRESET
        if not folder.exists():
            tiny_checkpoint(folder, **PRESETS[PRESET])
        one_load(folder)
        rounds = [one_load(folder) for _ in range(options.rounds)]
    total = median(r["total"] for r in rounds)
    result = {part: median(r[part] for r in rounds) for part in PARTS}
    rows = [(part, f"{s * 1e3:.1f}", f"{s / total:.1%}") for part, s in result.items()]
    rows.append(("whole load", f"{total * 1e3:.1f}", ""))
    title = f"{PRESET}: median of {options.rounds}"
    print(render(Table(title, ["part", "ms", "share"], rows, ("part",))))
    if options.json:
        options.json.write_text(json.dumps({**result, "total": total}, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""What tests of several ranks share: their checkpoints, and worlds of real processes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from load_fakes import SMALL
from worlds import HERE, finish, start

from loader.testing.checkpoint import TinyCheckpoint, tiny_checkpoint

SHORT = 3.0
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "awq": {"layers": 2},
    "nvfp4": {"layers": 1, "dialect": "ct-nvfp4", "group": 16},
    "plain": {"layers": 2, "excluded": (0,)},
    "longer": {"layers": 3},
    "large": {"layers": 2, "hidden": 512, "intermediate": 512, "experts": 8, "group": 128},
}


def make(folder: Path) -> dict[str, TinyCheckpoint]:
    """The checkpoints in a folder, and ``short``, whose file ends too soon."""
    made = {
        name: tiny_checkpoint(folder / name, **{**SMALL, **more})
        for name, more in CHECKPOINTS.items()
    }
    short = folder / "short"
    shutil.copytree(folder / "awq", short)
    file = max(short.glob("*.safetensors"))
    with open(file, "r+b") as opened:
        opened.truncate(file.stat().st_size - 16)
    return made


def world(scenario: str, folder: Path, size: int = 4) -> list[Any]:
    """Run one scenario of ``ranks_worker.py``; what each rank found."""
    worker = [str(HERE / "ranks_worker.py"), scenario, str(folder)]
    ended = finish(start([worker] * size))
    assert [code for code, _, _ in ended] == [0] * size, ended
    return [json.loads((folder / f"out.{rank}.json").read_text()) for rank in range(size)]

"""What tests of the lifecycle share: dialects, and their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from load_fakes import (
    SMALL,
)

from loader.testing.checkpoint import TinyCheckpoint, tiny_checkpoint

DIALECTS = ("awq-gemm", "awq-gptqmodel", "ct-int4-asym", "ct-nvfp4", "modelopt-nvfp4")


def checkpoint(folder: Path, dialect: str = "awq-gemm", **more: Any) -> TinyCheckpoint:
    given = dict(SMALL, dialect=dialect, attention=False, **more)
    if "nvfp4" in dialect:
        given["group"] = None
    return tiny_checkpoint(folder, **given)

"""What tests of a plan share: small checkpoints of every format, ranks of TP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loader import Shard
from loader.testing.checkpoint import TinyCheckpoint, tiny_checkpoint


def small(folder: Path, **more: Any) -> TinyCheckpoint:
    sizes: dict[str, Any] = {"hidden": 72, "intermediate": 64, "experts": 5, "layers": 2}
    sizes["attention"] = "plain"
    if "nvfp4" not in more.get("dialect", ""):
        sizes["group"] = 32
    else:
        sizes["hidden"] = 80
    if more.get("group") == -1:
        sizes["hidden"] = 80
    return tiny_checkpoint(folder, **{**sizes, **more})


def ranks(size: int) -> list[Shard]:
    return [Shard(rank, size) for rank in range(size)]

"""What tests of whole loads share: dialects, shards, and their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from load_fakes import (
    SMALL,
)

from loader import (
    Shard,
)
from loader.testing.checkpoint import TinyCheckpoint, tiny_checkpoint

DIALECTS = (
    "awq-gemm",
    "awq-gptqmodel",
    "ct-int4",
    "ct-int4-asym",
    "ct-nvfp4",
    "modelopt-nvfp4",
)
SHARDS = (
    Shard(),
    Shard(tp_size=2, tp_rank=1),
    Shard(tp_size=4, tp_rank=3),
    Shard(ep_size=2, ep_rank=1),
    Shard(expert_ids=[2]),
    Shard(expert_ids=[3, 1], tp_size=2),
)


def make(folder: Path, dialect: str = "awq-gemm", **more: Any) -> TinyCheckpoint:
    settings: dict[str, Any] = dict(SMALL, dialect=dialect, attention=False)
    if "nvfp4" in dialect:
        settings["group"] = None
    else:
        settings["scale_dtype"] = "F16"
    return tiny_checkpoint(folder, **{**settings, **more})

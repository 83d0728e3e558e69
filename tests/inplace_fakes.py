"""What tests of the conversion in place share: checkpoints, and what a module holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from load_fakes import (
    SMALL,
    bits,
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


def make(folder: Path, dialect: str = "awq-gemm", **more: Any) -> TinyCheckpoint:
    given: dict[str, Any] = dict(SMALL, dialect=dialect, attention=False)
    if "nvfp4" in dialect:
        given["group"] = None
        given["input_scale"] = True
    else:
        given["scale_dtype"] = "F16"
    return tiny_checkpoint(folder, **{**given, **more})


def sources(module: torch.nn.Module) -> dict[str, tuple[int, bytes, bool]]:
    """Everything that ``prepare_module`` must leave alone until it succeeds."""
    named = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return {n: (t.data_ptr(), bits(t), isinstance(t, torch.nn.Parameter)) for n, t in named}

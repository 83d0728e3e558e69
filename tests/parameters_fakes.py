"""What tests of parameters share: checkpoints, modules, and a call that must be refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from load_fakes import (
    SMALL,
    Allocations,
    Raiser,
)

import loader
from loader import LoaderError
from loader.testing.checkpoint import TinyCheckpoint, tiny_checkpoint

DIALECTS = ("awq-gemm", "awq-gptqmodel", "ct-int4", "ct-int4-asym", "ct-nvfp4", "modelopt-nvfp4")
TABLES = ("input_scale", "input_global_scale", "weight_shape")
"""Parts that frameworks keep for themselves: not needed, and not read."""


def make(folder: Path, dialect: str, **more: Any) -> TinyCheckpoint:
    given: dict[str, Any] = dict(SMALL, dialect=dialect, attention=False, layers=1)
    if "nvfp4" in dialect:
        given["group"] = None
    return tiny_checkpoint(folder, **{**given, **more})


def module_with(values: dict[str, torch.Tensor]) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, value in values.items():
        module.register_buffer(name, value)
    return module


class Refused:
    """Runs ``prepare_module`` and checks that a refusal leaves everything as it was."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocations = Allocations(monkeypatch)

    def __call__(
        self, values: dict[str, torch.Tensor], quantization: Any, **more: Any
    ) -> LoaderError:
        module, raiser = module_with(values), Raiser()
        with pytest.raises(LoaderError) as caught:
            loader.prepare_module(
                module, quantization=quantization, layer=11, observers=[raiser], **more
            )
        assert not raiser.events and not self.allocations.storages
        after = dict(module.named_buffers())
        assert {name: id(value) for name, value in after.items()} == {
            name: id(value) for name, value in values.items()
        }
        return caught.value

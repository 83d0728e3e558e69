"""Values that Transformers asks for are read then, once, in the dtype that it wants."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from loader.errors import CheckpointError
from loader.integrations.transformers.values import Unread


def test_nothing_is_read_before_it_is_asked_for() -> None:
    asked: list[tuple[torch.dtype, torch.device]] = []

    def read(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        asked.append((dtype, device))
        return torch.ones(2, 3, dtype=dtype)

    value = Unread(read, (2, 3), torch.bfloat16, lambda error: None)
    assert value.shape == (2, 3) and value.is_floating_point() and value.read_as is None
    whole = value[...]
    assert asked == []
    assert whole.to(device="cpu", dtype=torch.float32).dtype == torch.float32
    assert asked == [(torch.float32, torch.device("cpu"))] and value.read_as == torch.float32
    assert value.to().dtype == torch.bfloat16


def test_a_failed_read_is_told_and_raised() -> None:
    failed: list[Exception] = []

    def read(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        raise CheckpointError("broken")

    value = Unread(read, (1,), torch.float32, failed.append)
    with pytest.raises(CheckpointError, match="broken"):
        value[...].to(dtype=torch.float32)
    assert [str(error) for error in failed] == ["broken"] and value.read_as is None


def test_the_door_imports_no_framework_before_it_is_used() -> None:
    code = (
        "import sys, loader, loader.linears; "
        "assert 'loader.integrations' not in sys.modules; "
        "import loader.integrations.transformers; "
        "assert 'transformers' not in sys.modules, 'imported early'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

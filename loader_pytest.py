"""Fixtures of pytest for projects that use ``loader``; pytest finds them by an entry point.

This module is on its own, beside the package: pytest imports it in every project of an environment
where the package is installed, so it imports nothing but pytest until a fixture is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from loader.testing import LifecycleRecorder, Settings, Stubs, TinyCheckpoint


class CheckpointFactory(Protocol):
    """What the fixture ``tiny_checkpoint`` is: as the function, in a new folder for each call."""

    def __call__(
        self, *, config_overrides: dict[str, Any] | None = None, **settings: Unpack[Settings]
    ) -> TinyCheckpoint:
        """Write a checkpoint; see ``loader.testing.tiny_checkpoint``."""


@pytest.fixture
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> CheckpointFactory:
    """Write synthetic checkpoints: tiny_checkpoint(dialect="ct-nvfp4", experts=4)."""
    from loader.testing import tiny_checkpoint as write

    def make(**settings: Any) -> TinyCheckpoint:
        return write(tmp_path_factory.mktemp("checkpoint"), **settings)

    return make


@pytest.fixture
def stub_kernels() -> Iterator[Stubs]:
    """For this test the operators that run experts compute nothing, and record their calls."""
    from loader.testing import stub_kernels as stub

    with stub() as stubs:
        yield stubs


@pytest.fixture
def stub_converters() -> Iterator[Stubs]:
    """For this test the operators that convert read and compute nothing, and record their calls."""
    from loader.testing import stub_converters as stub

    with stub() as stubs:
        yield stubs


@pytest.fixture
def lifecycle_recorder() -> LifecycleRecorder:
    """An observer for loads, with assertions about what they did."""
    from loader.testing import lifecycle_recorder as new

    return new()

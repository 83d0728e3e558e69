"""Staging plan: what a plan says of its staging, whatever it is a plan of."""

from __future__ import annotations

from typing import Protocol

import torch

from loader.checkpoint.folder import Checkpoint
from loader.implementation import Implementation
from loader.ring import RingShape


class StagingPlan(Protocol):
    """``loader.plan.Plan``, and that of linears."""

    @property
    def checkpoint(self) -> Checkpoint:
        """The open checkpoint."""

    @property
    def device(self) -> torch.device:
        """Where the banks lie."""

    @property
    def implementation(self) -> Implementation:
        """What serves there."""

    @property
    def direct(self) -> bool:
        """Native code reads the files itself."""

    @property
    def buffers(self) -> int:
        """Buffers of staging."""

    @property
    def buffer_bytes(self) -> int:
        """Bytes of each."""

    @property
    def ring(self) -> RingShape | None:
        """Slots and chunks, where a card takes them."""

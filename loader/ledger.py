"""Ledger: the counters of one load, sampled while it runs."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import torch

from loader import memory
from loader.card import CardPeak
from loader.plan import Plan
from loader.report import MemoryMeasured
from loader.ring import Ring
from loader.stream import Staging

_HOST_SECONDS, _CARD_SECONDS = 0.004, 0.02
"""Between samples of host memory; a load to a card holds little of it."""


class Ledger:
    """Host memory by a thread, inside the ``with`` block, and a card's where allocations happen.

    ``baseline`` is the host's before the load; a card's is taken here, before anything is
    allocated.
    """

    def __init__(self, plan: Plan, baseline: memory.HostMemory) -> None:
        on_card = plan.ring is not None
        self._baseline = baseline
        self._host = memory.HostPeak(_CARD_SECONDS if on_card else _HOST_SECONDS)
        self._card = CardPeak(plan.device) if on_card else None

    @property
    def on_card(self) -> bool:
        """Whether the load is to a card."""
        return self._card is not None

    def __enter__(self) -> Ledger:
        self._host.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._host.__exit__(kind, error, trace)

    def stop(self) -> None:
        """End the sampling of a load that failed; may be called again."""
        self._host.stop()

    def after_chunk(self) -> None:
        """A chunk was converted: what it took on the host is highest now."""
        if self._card is None:
            self._host.sample()

    def after_allocation(self) -> None:
        """A layer has all it allocates: the card's counters are highest now."""
        if self._card is not None:
            self._card.sample()

    def measured(
        self, tensors: Iterable[torch.Tensor], uss: int, staging: Staging | Ring | None
    ) -> MemoryMeasured:
        """What was counted, once the load is over; ``tensors`` are all that stays of it."""
        measured = MemoryMeasured(
            resident=memory.storage_bytes(tensors),
            baseline=self._baseline.anonymous,
            peak=self._host.anonymous,
            after=memory.host_memory().anonymous,
            host_anonymous_peak=self._host.anonymous,
            host_file_peak=self._host.file,
            host_file_baseline=self._baseline.file,
            host_uss_peak=uss,
        )
        if self._card is not None and isinstance(staging, Ring):
            measured.use_card(self._card, staging.pinned_bytes, staging.why_pageable)
        return measured

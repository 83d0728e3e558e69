"""Counters of a card as values, and what their differences are called."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from card import CARD, needs_card

from loader.card import CardFacts, CardMemory, CardPeak, CardPool, card_memory, nvml_used
from loader.report import CardMeasured, MemoryMeasured
from loader.table import human_bytes


def test_the_highest_of_each_counter() -> None:
    a, b = CardMemory(1, 5, 3, 9), CardMemory(2, 4, 3, 8)
    assert a.highest(b) == b.highest(a) == CardMemory(2, 5, 3, 9)


def test_differences_have_names_and_add_up() -> None:
    before = CardMemory(requested=100, allocated=512, reserved=2048, used=5000)
    after = CardMemory(requested=1100, allocated=2048, reserved=4096, used=9000)
    counters = CardMeasured(before, after, after, nvml_used=None)
    assert counters.rounding == (2048 - 1100) - (512 - 100)
    assert counters.unused == 2048 and counters.foreign == 4904
    assert after.allocated + counters.unused + counters.foreign == after.used
    told = counters.to_dict()
    assert told["baseline"]["used"] == 5000 and told["rounding"] == counters.rounding
    assert set(told) >= {"baseline", "peak", "after", "rounding", "unused", "foreign", "nvml_used"}


def test_the_host_has_no_counters_of_a_card() -> None:
    measured = MemoryMeasured()
    assert measured.counters is None
    assert (measured.allocated, measured.reserved, measured.device_used) == (None, None, None)
    assert human_bytes(0)


@pytest.mark.parametrize(("architecture", "bf16"), [(70, False), (75, False), (80, True)])
def test_facts(architecture: int, bf16: bool) -> None:
    assert CardFacts("card", architecture).has_bf16 == bf16


def on_card(test: Callable[..., None]) -> Callable[..., None]:
    for mark in needs_card():
        test = mark(test)
    return test


@on_card
def test_a_pool_gives_everything_back_to_the_driver() -> None:
    torch.empty(1, device=CARD)
    torch.cuda.empty_cache()
    before = card_memory(CARD)
    for nbytes in (1000, 5 << 20, 100 << 20):
        pool = CardPool(CARD)
        with pool.allocating():
            held = torch.empty(nbytes, dtype=torch.uint8, device=CARD)
        assert card_memory(CARD).requested == before.requested + nbytes
        del held
        pool.close()
        after = card_memory(CARD)
        assert after.reserved == before.reserved and after.used == before.used


@on_card
def test_a_peak_is_the_highest_of_its_samples() -> None:
    peak = CardPeak(CARD)
    held = torch.empty(10 << 20, dtype=torch.uint8, device=CARD)
    peak.sample()
    del held
    assert peak.highest.requested == peak.baseline.requested + (10 << 20)
    used = nvml_used(CARD)
    assert used is None or used > 0

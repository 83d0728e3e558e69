"""A crossover that is measured on a card: by its own clock, on experts that no cache holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from card import CARD, needs_card

import loader
from loader import crossover
from loader.route import MEASURED_GROUPED_MOST
from loader.testing.checkpoint import tiny_checkpoint

pytestmark = needs_card()


@pytest.mark.parametrize("dialect", ("awq-gemm", "ct-nvfp4"))
def test_a_load_measures_its_crossover(tmp_path: Path, dialect: str) -> None:
    tiny_checkpoint(tmp_path, dialect=dialect, hidden=512, intermediate=512, experts=8, layers=2)
    experts = loader.load(tmp_path, CARD, policy=loader.Policy(grouped_max_tokens="measure"))
    last = {route.route: route.last or 0 for route in experts[0].routes}
    tokens = last.get("qpn_grouped", 1)
    assert 1 <= tokens <= MEASURED_GROUPED_MOST and tokens & (tokens - 1) == 0
    assert experts[0].routes == experts[1].routes
    assert "measured at load" in experts[0].routes[-1].reason
    x = torch.randn((tokens, 512), device=CARD).half()
    ids = torch.randint(0, 8, (tokens, 2), device=CARD)
    assert experts[1](x, ids, torch.full((tokens, 2), 0.5, device=CARD)).isfinite().all()


def test_the_clock_is_the_cards() -> None:
    """Work that is enqueued in no time still takes the time that the card needs for it."""
    x = torch.randn((8192, 8192), device=CARD)
    for _ in range(2):
        with crossover._Clock(CARD) as clock:
            for _ in range(4):
                x @ x
    done = torch.cuda.Event()
    done.record()
    done.synchronize()
    assert clock.seconds > 4 * 2 * 8192**3 / 1e15  # no card multiplies fp32 that fast

"""The card that GPU tests run on, or why there is none."""

from __future__ import annotations

import pytest
import torch

from loader import native

CARD = torch.device("cuda", 0)


def why_no_card() -> str:
    """Empty where a card can be loaded to."""
    if not torch.cuda.is_available():
        return "there is no CUDA card"
    return native.why_nothing_serves(CARD)


def needs_card() -> list[pytest.MarkDecorator]:
    """Marks of a module whose tests need a card."""
    reason = why_no_card()
    return [pytest.mark.gpu, pytest.mark.skipif(bool(reason), reason=reason or "-")]

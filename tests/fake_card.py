"""A card that is not there: facts and a core for plans and admission, which touch no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from loader import card_serving, native
from loader.card import CardFacts
from loader.cuda_core import CudaCore


class FakeCore(CudaCore):
    """What a build for some architectures says of itself; it has no code."""

    def __init__(self, *targets: str) -> None:
        self.architectures = tuple(int(t) for t in targets if not t.endswith("+"))
        self.portable = tuple(int(t[:-1]) for t in targets if t.endswith("+"))
        self.library: Any = SimpleNamespace(
            qpn_cuda_moe_scratch=lambda *numbers: 4096,
            qpn_cuda_moe_most_rows=lambda *numbers: 1 << 16,
        )


def card(architecture: int = 90, *targets: str) -> native.Implementation:
    """What serves a card of that architecture, by a build for it."""
    core = FakeCore(*(targets or (str(architecture),)))
    made, why = card_serving.card_implementation(CardFacts("a card", architecture), core)
    assert made is not None, why
    return made


@contextmanager
def plans_for_a_card(**settings: Any) -> Iterator[torch.device]:
    """Inside, plans can be made for a card: pass ``card_memory``, since nobody can be asked."""
    with native.serving(card(**settings)):
        yield torch.device("cuda", 0)

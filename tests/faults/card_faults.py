"""What tests of faults on a card share: its memory before and after, and a call that fails."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from card import CARD
from fault_cells import Witness

import loader
from loader.card import CardMemory, card_memory

POLICY = loader.Policy(layout="wide")


def as_it_was() -> Iterator[None]:
    """For a fixture: after a test the card holds what it held before, asked for and reserved."""
    before = settled()
    yield
    after = settled()
    assert (after.requested, after.reserved) == (before.requested, before.reserved)


def settled() -> CardMemory:
    torch.empty(1, device=CARD)
    gc.collect()
    torch.cuda.empty_cache()
    return card_memory(CARD)


def on_host(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.cpu() for tensor in tensors]


@contextmanager
def failing(wanted: str = "") -> Iterator[list[BaseException]]:
    """A load inside the block fails, and leaves nothing while its error is still held."""
    found: list[BaseException] = []
    settled()
    witness = Witness()
    before, held = card_memory(CARD), witness.left()
    gc.disable()
    try:
        with witness.watching():
            try:
                yield found
            except BaseException as error:
                found.append(error)
        after = card_memory(CARD)
        assert after.requested == before.requested, "bytes of the card are held"
        assert after.reserved <= before.reserved, "the allocator keeps what the load reserved"
        assert [line for line in witness.left().beyond(held) if "anonymous" not in line] == []
    finally:
        gc.enable()
    assert found, "the load went on"
    names = {one.__name__ for one in type(found[0]).__mro__}
    assert not wanted or wanted in names, repr(found[0])

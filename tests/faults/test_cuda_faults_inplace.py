"""Faults while a module on a card is prepared: it keeps its sources, the card its memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from card import CARD, needs_card
from card_faults import POLICY, as_it_was, failing, on_host
from fault_kinds import STATES
from load_fakes import banks_of, module_of, parameters_of, quantization_of, same_bits

import loader
from loader import CapacityError, memory, native
from loader.testing.checkpoint import TinyCheckpoint, tiny_checkpoint

pytestmark = needs_card()


@pytest.fixture(autouse=True)
def _card_as_it_was() -> Iterator[None]:
    yield from as_it_was()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    folder = tmp_path_factory.mktemp("inplace")
    return tiny_checkpoint(
        folder, dialect="modelopt-nvfp4", hidden=256, intermediate=256, experts=4, layers=1,
        attention=False, input_scale=True,
    )  # fmt: skip


def prepare(module: torch.nn.Module, made: TinyCheckpoint, **more: Any) -> Any:
    quantization = quantization_of(made)
    return loader.prepare_module(module, quantization=quantization, policy=POLICY, **more)


def assert_untouched(module: torch.nn.Module, made: TinyCheckpoint) -> None:
    wanted = parameters_of(made, 0, loader.Shard())
    found = {name: tensor.detach().cpu() for name, tensor in module.named_parameters()}
    assert list(found) == list(wanted) and not list(module.children())
    assert same_bits(list(found.values()), list(wanted.values()))


def _raises(error: BaseException) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        raise error

    return call


@pytest.mark.parametrize("what", ("write", "finish", "fresh", "observer", "SIGINT", "too large"))
def test_a_module_on_the_card_keeps_its_sources(
    made: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    module = module_of(made).to(CARD)
    for state in STATES[:4] if what in ("observer", "SIGINT") else ("planned",):

        def act(event: loader.LayerEvent, state: str = state) -> None:
            if event.state == state and what == "observer":
                raise ValueError("no")
            if event.state == state and what == "SIGINT":
                os.kill(os.getpid(), signal.SIGINT)

        with monkeypatch.context() as patch, failing() as found:
            if what in ("write", "finish"):
                patch.setattr(native, what, _raises(RuntimeError("kernel")))
            elif what == "fresh":
                patch.setattr(memory, what, _raises(torch.OutOfMemoryError("CUDA out of memory")))
            room = 1000 if what == "too large" else None
            prepare(module, made, observers=[act], card_memory=room)
        assert_untouched(module, made)
        if what in ("fresh", "too large"):
            assert isinstance(found[0], CapacityError)
    wanted = loader.load(made.folder, policy=POLICY)
    assert same_bits(on_host(banks_of(prepare(module, made))), banks_of(wanted))

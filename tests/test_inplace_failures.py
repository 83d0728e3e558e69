"""A conversion in place that fails leaves the module as it was; what observers are told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from inplace_fakes import make, sources
from load_fakes import (
    Allocations,
    Raiser,
    banks_of,
    module_of,
    nothing_left,
    parameters_of,
    quantization_of,
    same_bits,
)

import loader
from loader import (
    CapacityError,
    ConversionError,
    Policy,
    Shard,
    native,
)

# Failures
from loader.memory import storage_bytes


def assert_untouched(
    module: torch.nn.Module, before: dict[str, Any], allocations: Allocations, made: Any
) -> None:
    assert sources(module) == before
    assert not list(module.children())
    assert allocations.alive() == 0
    allocations.fail_at = None
    prepared = loader.prepare_module(module, quantization=quantization_of(made))
    assert same_bits(banks_of(prepared), banks_of(loader.load(made.folder)))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("call", [("write", 0), ("write", 3), ("write", 5), ("finish", 0)])
@pytest.mark.parametrize("dialect", ["awq-gemm", "ct-int4-asym", "modelopt-nvfp4"])
def test_a_converter_that_raises(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dialect: str,
    call: tuple[str, int],
    error: type[BaseException],
) -> None:
    made = make(tmp_path, dialect, layers=1)
    allocations = Allocations(monkeypatch)
    stage, at = call
    inner, left = getattr(native, stage), iter(range(99))

    def broken(*args: Any) -> Any:
        result = inner(*args)
        if next(left) == at:
            raise error("kernel")
        return result

    module = module_of(made, buffers=bool(at % 2))
    before = sources(module)
    wanted = ConversionError if issubclass(error, Exception) else error
    with monkeypatch.context() as patch, nothing_left(allocations):
        patch.setattr(native, stage, broken)
        with pytest.raises(wanted, match="kernel") as caught:
            loader.prepare_module(module, quantization=quantization_of(made), layer=2)
        assert allocations.alive() == 0
    assert "layer 2" in str(caught.value) or not issubclass(error, Exception)
    assert_untouched(module, before, allocations, made)


def test_every_allocation_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(tmp_path, "modelopt-nvfp4", layers=1)
    allocations = Allocations(monkeypatch)
    policy = Policy(layout="wide")
    first = loader.prepare_module(
        module_of(made), quantization=quantization_of(made), policy=policy
    )
    banks, beside = first.spec.nbytes(), storage_bytes(first.workspace.tensors())
    del first
    count = len(allocations.storages)
    assert count == 7, "two of the workspace, four bank tensors, the cache"
    for number in range(count):
        allocations.storages.clear()
        allocations.fail_at = number
        module = module_of(made)
        before = sources(module)
        with nothing_left(allocations), pytest.raises(CapacityError) as caught:
            loader.prepare_module(
                module, quantization=quantization_of(made), layer=4, policy=policy
            )
        assert caught.value.layer == 4 and caught.value.__cause__ is allocations.error
        asked, predicted = map(int, re.findall(r"(\d+) bytes", str(caught.value.expected)))
        assert asked == banks and banks + beside < predicted < banks + beside + (64 << 20)
        assert_untouched(module, before, allocations, made)


def test_a_bad_value_names_the_parameter_and_the_global_expert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(tmp_path, layers=1)
    shard = Shard(ep_size=2, ep_rank=1)
    module = module_of(made, 0, shard)
    with torch.no_grad():
        module.w13_scales[1, 0, 3] = float("inf")
    before, allocations = sources(module), Allocations(monkeypatch)
    with pytest.raises(ConversionError, match="not finite") as caught:
        loader.prepare_module(module, quantization=quantization_of(made), layer=6, shard=shard)
    error = caught.value
    assert (error.layer, error.tensor, error.experts) == (6, "w13_scales", "3")
    assert sources(module) == before and allocations.alive() == 0


@pytest.mark.parametrize("at", [0, 1, 5])
def test_an_interrupt_while_the_sources_are_taken_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The module always holds the sources or the result, whatever a signal does between."""
    made = make(tmp_path, layers=1)

    class Interrupted(torch.nn.Module):
        left = at

        def __delattr__(self, name: str) -> None:
            if self.left == 0:
                Interrupted.left = -1
                raise KeyboardInterrupt
            Interrupted.left -= 1
            super().__delattr__(name)

    module: Any = Interrupted()
    for name, value in parameters_of(made, 0, Shard()).items():
        module.register_buffer(name, value)
    with pytest.raises(KeyboardInterrupt):
        loader.prepare_module(module, quantization=quantization_of(made))
    assert same_bits(banks_of(module.experts), banks_of(loader.load(tmp_path)))


@pytest.mark.parametrize("late", [False, True])
def test_a_module_that_takes_no_submodule_keeps_its_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    class Closed(torch.nn.Module):
        def add_module(self, name: str, module: torch.nn.Module | None) -> None:
            if late:
                super().add_module(name, module)
            raise TypeError("closed")

    made = make(tmp_path, layers=1)
    module = Closed()
    for name, value in parameters_of(made, 0, Shard()).items():
        module.register_buffer(name, value)
    before, allocations = sources(module), Allocations(monkeypatch)
    with nothing_left(allocations), pytest.raises(TypeError, match="closed"):
        loader.prepare_module(module, quantization=quantization_of(made))
    assert sources(module) == before and not list(module.children())


def test_events_carry_bytes(tmp_path: Path) -> None:
    made = make(tmp_path, layers=1)
    raiser, module = Raiser(), module_of(made)
    total = sum(tensor.nbytes for tensor in module.parameters())
    prepared = loader.prepare_module(
        module, quantization=quantization_of(made), layer=5, observers=[raiser]
    )
    assert {event.layer for event in raiser.events} == {5}
    states = [event.state for event in raiser.events]
    assert states == ["planned", *["reading"] * 7, "converting", "prepared", "released", "ready"]
    reading = [event.bytes for event in raiser.events if event.state == "reading"]
    assert reading[0] == 0 and reading == sorted(set(reading)) and reading[-1] == total
    by_state = {event.state: event.bytes for event in raiser.events}
    assert by_state["planned"] == by_state["released"] == total
    banks = sum(tensor.nbytes for tensor in prepared.banks())
    assert by_state["prepared"] == by_state["ready"] == banks

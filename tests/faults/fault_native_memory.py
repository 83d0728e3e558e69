"""Memory and threads that native code asks for and does not get; run by tests, prints JSON.

Needs ``failing_new.cpp`` built and preloaded: its ``operator new`` fails at a chosen call, and its
``pthread_create`` while it is told to. The process must live, and the load fail like any other.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Run as a script: the folder above holds what all tests share.
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from fault_cells import Outcome, Witness, load, make_checkpoint, right_banks
from fault_kinds import Bench, BenchSource, patched
from load_fakes import banks_of, bits, same_bits

import loader
from loader import CapacityError, memory, native
from loader.bank import ABSENT, BankSpec, LayerSpec
from loader.converter import LayerBanks
from loader.experts import LoadedExperts
from loader.testing.checkpoint import tiny_checkpoint

torch.set_num_threads(1)
assert native.CORE is not None
LIBRARY = native.CORE._library
SHIM = ctypes.CDLL(os.environ["QPN_TEST_SHIM"])
MOST = 400
"""Allocations of one native call, at most."""


def failing_at(number: int, inner: Callable[..., Any]) -> Callable[..., Any]:
    """``inner`` with allocation ``number`` of its first call failing."""
    calls = iter(range(1 << 30))

    def call(*args: Any) -> Any:
        if next(calls):
            return inner(*args)
        SHIM.arm(ctypes.c_long(number))
        try:
            return inner(*args)
        finally:
            SHIM.disarm()

    return call


def sweep(
    name: str, run: Callable[[], Any], right: Callable[[Any], bool], how: str = ""
) -> Outcome:
    """Fail each allocation of the first native call of ``run`` in turn, until none is left."""
    inner, kind = getattr(LIBRARY, name), f"no memory in {name}" + (how and f", {how}")
    wrong: list[str] = []
    run()
    witness = Witness()
    before = witness.left()
    for number in range(MOST):
        try:
            with witness.watching(), patched(LIBRARY, name, failing_at(number, inner)):
                result = run()
        except CapacityError as error:
            wrong += [] if "memory ran out inside native code" in str(error) else [str(error)]
            wrong += witness.left().beyond(before)
            wrong += [] if right(run()) else [f"the next one is wrong after allocation {number}"]
            continue
        wrong += [] if right(result) else ["wrong without a failure"]
        return Outcome(kind, "any", "direct", f"{number} points", wrong)
    return Outcome(kind, "any", "direct", "endless", ["never ended"])


def left_to_python(name: str, run: Callable[[], Any], right: Callable[[Any], bool]) -> Outcome:
    """Fail each allocation of a native reader in turn: the reader in Python does its work."""
    inner = getattr(LIBRARY, name)
    wrong: list[str] = []
    for number in range(MOST):
        missed = []

        def failing(*args: Any, number: int = number, missed: list[bool] = missed) -> Any:
            SHIM.arm(ctypes.c_long(number))
            try:
                return inner(*args)
            finally:
                missed.append(bool(SHIM.disarm()))

        with patched(LIBRARY, name, failing):
            wrong += [] if right(run()) else [f"wrong after allocation {number}"]
        if all(missed):
            wrong += [] if missed else ["never called"]
            return Outcome(f"no memory in {name}", "any", "direct", f"{number} points", wrong)
    return Outcome(f"no memory in {name}", "any", "direct", "endless", ["never ended"])


def threads(good: Path, wanted: list[torch.Tensor]) -> Outcome:
    """A native call that may have no more threads goes on with those it has."""
    inner = native.read

    def refused(*args: Any) -> Any:
        SHIM.allow_threads(ctypes.c_long(0))
        try:
            return inner(*args)
        finally:
            SHIM.allow_threads(ctypes.c_long(-1))

    with patched(native, "read", refused):
        experts = load(good)
    wrong = [] if same_bits(banks_of(experts), wanted) else ["wrong banks"]
    return Outcome("no thread for native code", "reading", "direct", "loaded", wrong)


def no_python_thread(good: Path) -> Outcome:
    """Where Python is to start the thread, the load is refused."""
    wrong = []
    for way in ("direct", "ahead"):
        before = Witness().left()
        with BenchSource(Bench(good, "", way)) as source:
            SHIM.allow_threads(ctypes.c_long(0))
            try:
                load(source)
                wrong.append("the load went on")
            except CapacityError as error:
                wrong += [] if "thread could not be started" in str(error) else [str(error)]
            finally:
                SHIM.allow_threads(ctypes.c_long(-1))
        wrong += Witness().left().beyond(before)
    return Outcome("no thread", "planned", "direct, ahead", "CapacityError", wrong)


def all_probes(good: Path, parts: Path) -> list[Outcome]:
    """Plans, loads, closing passes and steps, with every native allocation failing once."""
    wanted = right_banks(good)
    found = [threads(good, wanted), no_python_thread(good)]  # first: no thread is there yet

    def right(experts: LoadedExperts) -> bool:
        return same_bits(banks_of(experts), wanted)

    planned = loader.plan(parts).to_dict()
    for name in ("qpn_headers", "qpn_index", "qpn_kinds", "qpn_owned"):
        found.append(
            left_to_python(
                name, lambda: loader.plan(parts).to_dict(), lambda plan: same_plan(plan, planned)
            )
        )
    shape = (2 << 20,)
    found.append(
        left_to_python(
            "qpn_populate",
            lambda: memory.fresh(shape, torch.uint8, torch.device("cpu")),
            lambda made: made.zero_().shape == shape,
        )
    )
    for name in ("qpn_write", "qpn_finish"):
        found.append(sweep(name, lambda: load(good), right))
    return found + steps(load(good))


def steps(experts: LoadedExperts) -> list[Outcome]:
    """Calls that compute from banks; refused ones too, whose sentence takes memory."""
    core, layer, linear = native.CORE, experts[0], Linear()
    assert core is not None
    x = torch.randn(4, 512)
    ids = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]])
    given = (x, ids, torch.ones(4, 2), torch.arange(8, dtype=torch.int32))
    banks, spec = layer.banks(), layer.spec.to_ints()
    none, out = torch.empty(0), torch.empty(1 << 16)
    calls: dict[str, tuple[Callable[[], torch.Tensor], Callable[[], Any]]] = {
        "qpn_moe": (
            lambda: layer(*given[:3]),
            lambda: core.moe(torch.empty_like(x), none, *given, banks, spec),
        ),
        "qpn_linear": (lambda: linear(linear.scratch), lambda: linear(none)),
        "qpn_dequantize": (
            lambda: layer.dequantize(1)["down"],
            lambda: core.dequantize(out, 7, 0, (0, 1), banks, spec),
        ),
    }
    found = []
    for name, (good, bad) in calls.items():
        wanted = bits(good())
        found.append(sweep(name, good, lambda result, wanted=wanted: bits(result) == wanted))
        found.append(sweep(name, sentence_of(bad), bool, "refused"))
    return found


class Linear:
    """One linear outside the experts, on scales of 1."""

    def __init__(self) -> None:
        bank = BankSpec("int4", "compact", 1, 256, 96, 32, 0, 1, torch.float16)
        layer = LayerSpec(ABSENT, bank)
        self.spec = layer.to_ints()
        self.banks = LayerBanks.allocate(layer, torch.device("cpu"), 8).tensors
        words, scales = self.banks[:2]
        words.copy_(torch.randint(-(1 << 31), 1 << 31, words.shape))
        scales.fill_(1)
        self.x, self.bias = torch.randn(9, 256), torch.randn(96)
        assert native.CORE is not None
        self.scratch = torch.empty(native.CORE.linear_scratch_bytes(self.spec, 9) // 4 + 16)

    def __call__(self, scratch: torch.Tensor) -> torch.Tensor:
        """The product, with ``scratch``."""
        assert native.CORE is not None
        out = torch.full((9, 96), float("nan"))
        native.CORE.linear(out, scratch, self.x, self.bias, self.banks, self.spec)
        return out


def sentence_of(call: Callable[[], Any]) -> Callable[[], str]:
    """What a call that does not fit is refused with."""

    def refused() -> str:
        try:
            call()
        except ValueError as error:
            return str(error)
        return ""

    return refused


def same_plan(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two plans say the same but for what the machine has left."""
    return all(one[key] == other[key] for key in one if key != "memory")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        make_checkpoint(Path(name) / "good")
        tiny_checkpoint(Path(name) / "parts", hidden=64, intermediate=64, group=32, shards=2)
        outcomes = all_probes(Path(name) / "good", Path(name) / "parts")
    print(json.dumps([vars(outcome) for outcome in outcomes]))

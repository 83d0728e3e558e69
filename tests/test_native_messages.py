"""What the native core of the host refuses, message by message; addresses are never followed."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from test_core import HOST, descriptor, small_layer

from loader import native
from loader.bank import ABSENT, BankSpec, LayerSpec
from loader.converter import LayerBanks, cache_bytes
from loader.core import Core, DescriptorError, ReadError
from loader.structs import Linear, Moe

pytestmark = pytest.mark.skipif(native.CORE is None, reason="the native core is not built")

W13, W2 = 1, 11
"""Where the numbers of a bank begin."""


def core() -> Core:
    assert native.CORE is not None
    return native.CORE


def layer_of(kind: str, layout: str) -> LayerSpec:
    def bank(k: int, n: int, projections: int) -> BankSpec:
        group = 16 if kind == "e2m1" else 32
        sense = "multiplier" if kind == "e2m1" else "none"
        return BankSpec(kind, layout, 2, k, n, group, 0, projections, torch.float16, sense)

    return LayerSpec(bank(64, 64, 2), bank(32, 64, 1))


def finish(numbers: list[int], banks: list[torch.Tensor], cache: torch.Tensor) -> None:
    core().finish(banks, cache, numbers)


def test_banks_that_are_not_those_of_the_layer() -> None:
    spec = small_layer()
    banks, none = LayerBanks.allocate(spec, HOST, None).tensors, torch.empty((0, 3))
    with pytest.raises(ValueError, match="a bank tensor does not have the bytes of its layout"):
        finish(spec.to_ints(), [*banks[:-1], banks[-1].view(-1)[1:]], none)
    odd = spec.to_ints()
    odd[W2 + 4] = 63
    with pytest.raises(ValueError, match="packed zero points need an even number of columns"):
        finish(odd, banks, none)


def test_a_cache_that_is_too_small() -> None:
    spec = layer_of("e2m1", "wide")
    banks = LayerBanks.allocate(spec, HOST, None).tensors
    cache = torch.zeros(cache_bytes(spec) // 4 - 1)
    with pytest.raises(ValueError, match="the conversion cache is smaller than the layer needs"):
        finish(spec.to_ints(), banks, cache)


def test_a_read_that_its_buffer_does_not_hold(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    spec = small_layer()
    banks = LayerBanks.allocate(spec, HOST, None).tensors
    buffers = torch.zeros((1, 64), dtype=torch.uint8)
    with path.open("rb") as file, pytest.raises(ReadError, match="larger than its buffer"):
        core().read(
            file.fileno(), 4096, descriptor(), banks, torch.empty((0, 3)), buffers, spec.to_ints()
        )


@pytest.mark.parametrize(
    ("tiles", "floats", "words"),
    [((0, 9), 1 << 20, "tiles are outside the bank"), ((0, 1), 10, "the output is smaller")],
)
def test_tiles_that_do_not_fit(tiles: tuple[int, int], floats: int, words: str) -> None:
    spec = small_layer()
    banks = LayerBanks.allocate(spec, HOST, 8).tensors
    with pytest.raises(ValueError, match=words):
        core().dequantize(torch.zeros(floats), 0, 0, tiles, banks, spec.to_ints())


@pytest.mark.parametrize("tokens", [-1, (1 << 30) + 1])
def test_a_number_of_tokens_that_no_step_has(tokens: int) -> None:
    """The addresses are never followed."""
    spec, linear = small_layer(), small_layer().w2
    banks = LayerBanks.allocate(spec, HOST, 8).tensors
    library, words = core()._library, "^the number of tokens is not that of a step$"
    experts = spec.w13.experts
    step = Moe(tokens=tokens, top_k=1, experts=experts, scratch_bytes=1 << 60)
    with pytest.raises(ValueError, match=words):
        core()._run(library.qpn_moe, (ctypes.byref(step),), banks, spec.to_ints())
    call = Linear(tokens=tokens, scratch_bytes=1 << 60)
    numbers = LayerSpec(ABSENT, linear).to_ints()
    with pytest.raises(ValueError, match=words):
        core()._run(library.qpn_linear, (ctypes.byref(call),), banks[3:], numbers)


def test_plain_weights_are_not_dequantized() -> None:
    def bank(k: int, n: int, projections: int) -> BankSpec:
        return BankSpec("plain", "plain", 2, k, n, k, 0, projections, torch.float16)

    spec = LayerSpec(bank(64, 64, 2), bank(32, 64, 1))
    banks = LayerBanks.allocate(spec, HOST, None).tensors
    with pytest.raises(ValueError, match="plain weights are not dequantized"):
        core().dequantize(torch.zeros(1 << 20), 1, 0, (0, 1), banks, spec.to_ints())


def test_an_absent_bank_is_not_written() -> None:
    spec = small_layer()
    banks = LayerBanks.allocate(spec, HOST, 8).tensors
    numbers = spec.to_ints()
    numbers[W13] = 3  # absent
    own = banks[3:]
    with pytest.raises(DescriptorError, match="the bank is absent"):
        core().write(
            torch.zeros(1024, dtype=torch.uint8), descriptor(), own, torch.empty((0, 3)), numbers
        )

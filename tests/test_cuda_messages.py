"""What the library for cards refuses before any launch, message by message.

The numbers of a call are checked on the host, so that most of this needs the library and no card;
the addresses are never followed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from card import CARD, needs_card

from loader import cuda_core, native
from loader.bank import ABSENT, BankSpec, LayerSpec
from loader.converter import LayerBanks, card_cache_bytes
from loader.cuda_core import CUDA_CORE, CudaError
from loader.cuda_routes import FAMILIES, _Call
from loader.pieces import DESCRIPTOR_FIELDS
from loader.structs import FLOATS, CardLinear, Error

pytestmark = pytest.mark.skipif(
    CUDA_CORE is None, reason=cuda_core.WHY_NO_CUDA_CORE or "native code for cards was not built"
)

EXPERTS, HIDDEN, WIDTH = 4, 64, 32
SOMEWHERE = 1 << 20
"""An address on a boundary of 16 bytes."""


def spec_of(experts: int = EXPERTS) -> LayerSpec:
    def bank(k: int, n: int, projections: int) -> BankSpec:
        return BankSpec("int4", "compact", experts, k, n, 32, 0, projections, torch.float16)

    return LayerSpec(bank(HIDDEN, 2 * WIDTH, 2), bank(WIDTH, HIDDEN, 1))


class Layer:
    """The numbers, addresses and sizes of a layer, each of which a test may spoil."""

    def __init__(self, experts: int = EXPERTS, spec: LayerSpec | None = None) -> None:
        spec = spec or spec_of(experts)
        self.numbers = spec.to_ints()
        shapes = [t for bank in spec.banks for t in bank.tensors()]
        self.addresses = [SOMEWHERE * (n + 1) for n in range(len(shapes))]
        self.sizes = [torch.Size(t.shape).numel() * t.dtype.itemsize for t in shapes]
        self.count = len(shapes)

    def arguments(self) -> tuple[Any, ...]:
        count = len(self.addresses)
        return (
            (ctypes.c_int64 * 21)(*self.numbers),
            (ctypes.c_void_p * count)(*self.addresses),
            (ctypes.c_int64 * count)(*self.sizes),
            ctypes.c_int64(self.count),
        )


def call_of(**changes: int) -> _Call:
    tokens, top_k = 2, 2
    wanted = {
        "tokens": tokens,
        "top_k": top_k,
        "experts": EXPERTS,
        "dtype": FLOATS[torch.float16],
        "weight_dtype": FLOATS[torch.float32],
        "ids_are_64": 1,
        "family": FAMILIES.index("m16n8k16"),
        "in_router_order": 0,
        "x_bytes": tokens * HIDDEN * 2,
        "ids_bytes": tokens * top_k * 8,
        "weights_bytes": tokens * top_k * 4,
        "expert_map_bytes": EXPERTS * 4,
        "out_bytes": tokens * HIDDEN * 2,
        "scratch_bytes": 1 << 30,
        **dict.fromkeys(("x", "ids", "weights", "expert_map", "out", "scratch"), SOMEWHERE),
        **changes,
    }
    return _Call(**wanted)


def moe(layer: Layer, call: _Call) -> None:
    assert CUDA_CORE is not None
    error = Error()
    code = CUDA_CORE.library.qpn_cuda_moe(
        ctypes.byref(call), *layer.arguments(), None, ctypes.byref(error)
    )
    CUDA_CORE.check(code, error)


def set_number(index: int, value: int) -> Callable[[Layer], None]:
    def spoil(layer: Layer) -> None:
        layer.numbers[index] = value

    return spoil


def fewer(layer: Layer) -> None:
    layer.count -= 1


def smaller(layer: Layer) -> None:
    layer.sizes[4] -= 1


def shifted(layer: Layer) -> None:
    layer.addresses[1] += 8


W13, W2 = 1, 11
"""Where the numbers of a bank begin."""

LAYERS: dict[str, Callable[[Layer], None]] = {
    "the kernels read int4 and e2m1 banks only": set_number(W13, 2),
    "the metadata layout is not one that the kernels read": set_number(W2 + 1, 9),
    "the sizes of a bank are out of range": set_number(W13 + 2, 0),
    "K of a bank is no multiple of 8": set_number(W13 + 3, 60),
    "tensors of a bank are missing": fewer,
    "a tensor of a bank is too small": smaller,
    "a tensor of a bank is off its boundary of 16 bytes": shifted,
    "the banks of the layer do not belong together": set_number(W2 + 2, EXPERTS - 1),
}


@pytest.mark.parametrize("message", LAYERS)
def test_a_layer_that_is_none_is_refused(message: str) -> None:
    layer = Layer()
    LAYERS[message](layer)
    with pytest.raises(ValueError, match=f"^{message}$"):
        moe(layer, call_of())


CALLS: dict[str, dict[str, int]] = {
    "the number of rows is not that of a decode step": {"tokens": 0},
    "the kernels take fp16 and bf16 activations": {"dtype": FLOATS[torch.float32]},
    "no such family of kernels": {"family": 7},
    "the quadpair kernels take fp16 activations only": {
        "family": FAMILIES.index("quadpair"),
        "dtype": FLOATS[torch.bfloat16],
    },
    "router weights of this dtype are not read": {"weight_dtype": 9},
    "an input or the output is smaller than its shape": {"ids_bytes": 31},
    "the scratch is smaller than this many tokens need": {"scratch_bytes": 64},
    "activations, output or scratch are off their boundary of 16 bytes": {"out": SOMEWHERE + 8},
}


@pytest.mark.parametrize("message", CALLS)
def test_a_step_that_does_not_fit_is_refused(message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        moe(Layer(), call_of(**CALLS[message]))


# Linears


def linear_of(experts: int = 1, projections: int = 1) -> Layer:
    bank = BankSpec("int4", "compact", experts, HIDDEN, 64, 32, 0, projections, torch.float16)
    return Layer(spec=LayerSpec(ABSENT, bank))


def linear(layer: Layer, **changes: int) -> None:
    assert CUDA_CORE is not None
    wanted = {
        "tokens": 2,
        "dtype": FLOATS[torch.float16],
        "family": FAMILIES.index("m16n8k16"),
        "x_bytes": 2 * HIDDEN * 2,
        "out_bytes": 2 * 64 * 2,
        "x": SOMEWHERE,
        "out": SOMEWHERE,
        **changes,
    }
    error = Error()
    code = CUDA_CORE.library.qpn_cuda_linear(
        ctypes.byref(CardLinear(**wanted)), *layer.arguments(), None, ctypes.byref(error)
    )
    CUDA_CORE.check(code, error)


LINEARS: dict[str, dict[str, int]] = {
    "the number of tokens is not that of a decode step": {"tokens": 1025},
    "the kernels take fp16 and bf16 activations": {"dtype": FLOATS[torch.float32]},
    "no such family of kernels": {"family": 7},
    "the quadpair kernels take fp16 activations only": {
        "family": FAMILIES.index("quadpair"),
        "dtype": FLOATS[torch.bfloat16],
    },
    "the input or the output is smaller than its shape": {"out_bytes": 255},
    "activations or output are off their boundary of 16 bytes": {"x": SOMEWHERE + 8},
}


@pytest.mark.parametrize("message", LINEARS)
def test_a_linear_that_does_not_fit_is_refused(message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        linear(linear_of(), **LINEARS[message])


def test_a_bank_that_is_none_of_a_linear_is_refused() -> None:
    with pytest.raises(ValueError, match="^the numbers are those of a layer, not of a linear$"):
        linear(Layer())
    for layer in (linear_of(experts=2), linear_of(projections=2)):
        with pytest.raises(ValueError, match="^the bank of a linear has one expert and one proj"):
            linear(layer)


# Conversion


def convert(layer: Layer) -> None:
    assert CUDA_CORE is not None
    error = Error()
    code = CUDA_CORE.library.qpn_card_finish(
        0, None, *layer.arguments(), None, ctypes.c_int64(0), ctypes.byref(error)
    )
    CUDA_CORE.check(code, error)


def test_a_layer_that_is_none_is_not_converted() -> None:
    for spoil in (smaller, set_number(W13 + 2, EXPERTS + 1)):
        layer = Layer()
        spoil(layer)
        with pytest.raises(ValueError, match="^a bank tensor does not have the bytes of its lay"):
            convert(layer)
    layer = Layer()
    layer.addresses[0] += 16
    with pytest.raises(ValueError, match="^weight words do not start on a 32-byte boundary$"):
        convert(layer)


def on_card(test):  # type: ignore[no-untyped-def]
    for mark in needs_card():
        test = mark(test)
    return test


@on_card
def test_more_than_one_step_takes_is_refused() -> None:
    """Compaction counts every expert in one block's shared memory."""
    with pytest.raises(ValueError, match="more rows or experts than one step"):
        moe(Layer(experts=100_000), call_of(experts=EXPERTS))


@on_card
@pytest.mark.parametrize("call", ("write", "finish"))
def test_a_launch_that_cuda_refuses_is_told(call: str) -> None:
    """A capture that was broken takes no launch any more; the card goes on afterwards. In a process
    of its own: PyTorch aborts at the end of the next pool of memory, whoever made it."""
    process = get_context("spawn").Process(target=refused_launch, args=(call,))
    process.start()
    process.join()
    assert process.exitcode == 0


def refused_launch(call: str) -> None:
    def bank(k: int, n: int, projections: int) -> BankSpec:
        dtype = torch.float16
        return BankSpec("e2m1", "wide", 2, k, n, 16, 0, projections, dtype, "multiplier")

    spec = spec_of(2) if call == "write" else LayerSpec(bank(64, 64, 2), bank(32, 64, 1))
    tensors = LayerBanks.allocate(spec, CARD, None).tensors
    state = torch.zeros(card_cache_bytes(spec), dtype=torch.uint8, device=CARD)
    chunk = torch.zeros(1024, dtype=torch.uint8, device=CARD)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        with pytest.raises(RuntimeError):
            stream.synchronize()  # no capture outlives it
        with pytest.raises(CudaError, match="could not be launched"):
            if call == "write":
                piece = {"rows": HIDDEN, "row_bytes": 16, "cols": 32}
                rows = torch.tensor([[piece.get(name, 0) for name in DESCRIPTOR_FIELDS]])
                native.write(chunk, rows, tensors, state, spec.to_ints())
            else:
                native.finish(tensors, state, spec.to_ints())
        with pytest.raises(RuntimeError):
            graph.capture_end()
    torch.cuda.synchronize()

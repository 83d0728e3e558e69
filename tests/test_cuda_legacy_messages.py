"""What ``legacy`` on a card refuses before any launch, message by message.

This needs the library and no card: the numbers of a call are checked on the host, and the addresses
are never followed.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from loader import cuda_core
from loader.bank import BankSpec, LayerSpec
from loader.cuda_core import CUDA_CORE
from loader.cuda_legacy_calls import _Call, _Places, _Span, _Weights
from loader.structs import FLOATS, Error

pytestmark = pytest.mark.skipif(
    CUDA_CORE is None, reason=cuda_core.WHY_NO_CUDA_CORE or "native code for cards was not built"
)

TOKENS, TOP_K, EXPERTS, HIDDEN, WIDTH, COUNT, PLACES = 3, 2, 4, 64, 32, 2, 3
ROWS = TOKENS * TOP_K
FP16, FP32, FP64 = (FLOATS[d] for d in (torch.float16, torch.float32, torch.float64))
ROUTE, GATHER, INNER, RESULTS, SUM = range(5)
SOMEWHERE = 1 << 20
"""An address on a boundary of 16 bytes."""

STEP_BYTES = {
    "x": TOKENS * HIDDEN * 2,
    "out": TOKENS * HIDDEN * 2,
    "ids": ROWS * 8,
    "weights": ROWS * 4,
    "expert_map": EXPERTS * 4,
    "keys": ROWS * 4,
    "source": ROWS * 4,
    "order": ROWS * 4,
    "starts": EXPERTS * 4,
    "counts": EXPERTS * 4,
    "ranked": EXPERTS * 8,
    "ranked_counts": EXPERTS * 4,
    "results": ROWS * HIDDEN * 2,
}
PLACES_BYTES = {
    "ranked": COUNT * 8,
    "counts": COUNT * 4,
    "rows": COUNT * PLACES * HIDDEN * 2,
    "sums": COUNT * PLACES * 2 * WIDTH * 4,
    "inner": COUNT * PLACES * WIDTH * 2,
}


def spans(sizes: dict[str, int], changes: dict[str, int]) -> dict[str, _Span]:
    return {name: _Span(SOMEWHERE, changes.get(name, size)) for name, size in sizes.items()}


def run(stage: int, step: dict[str, int], places: dict[str, int] | None = None) -> None:
    """One stage, with some sizes changed: of tensors in bytes, of others as they are."""
    assert CUDA_CORE is not None
    numbers = {
        "tokens": TOKENS,
        "top_k": TOP_K,
        "experts": EXPERTS,
        "slots": EXPERTS,
        "hidden": HIDDEN,
        "width": WIDTH,
        "dtype": FP16,
        "weight_dtype": FP32,
        "ids_are_64": 1,
    }
    given = {name: step.get(name, value) for name, value in numbers.items()}
    call = _Call(**given, **spans(STEP_BYTES, step))
    some = places or {}
    sizes = {"count": COUNT, "first": 0, "places": PLACES}
    factors = (some.get("factors13", COUNT * 2 * WIDTH * 4), some.get("factors2", COUNT * 256))
    chunk = _Places(
        **{name: some.get(name, value) for name, value in sizes.items()},
        **spans(PLACES_BYTES, some),
        factors=(_Span * 2)(*(_Span(SOMEWHERE, nbytes) for nbytes in factors)),
    )
    error = Error()
    code = CUDA_CORE.library.qpn_cuda_legacy(
        stage, ctypes.byref(call), ctypes.byref(chunk), None, ctypes.byref(error)
    )
    CUDA_CORE.check(code, error)


def refused(message: str, *arguments: Any) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        run(*arguments)


@pytest.mark.parametrize("stage", [-1, 5])
def test_a_stage_that_is_none(stage: int) -> None:
    refused("there is no such stage", stage, {})


@pytest.mark.parametrize("stage", range(5))
def test_sizes_that_no_step_has(stage: int) -> None:
    for name in ("tokens", "top_k", "experts", "slots", "hidden", "width"):
        for value in (0, 1 << 31):
            refused("the sizes of the step are out of range", stage, {name: value})
    rows = {"tokens": 1 << 20, "top_k": 1 << 20}
    refused("the sizes of the step are out of range", stage, rows)


@pytest.mark.parametrize("change", [("dtype", FP64), ("dtype", -1), ("weight_dtype", FP64 + 1)])
def test_dtypes_that_are_not_read(change: tuple[str, int]) -> None:
    what = "activations or router weights are of a dtype that is not read"
    refused(what, ROUTE, dict([change]))


@pytest.mark.parametrize("name", STEP_BYTES)
def test_a_tensor_of_the_step_that_is_too_small(name: str) -> None:
    what = "an input or the output is smaller than its shape"
    refused(what, SUM, {name: STEP_BYTES[name] - 1})


@pytest.mark.parametrize("stage", (GATHER, INNER, RESULTS))
def test_sizes_that_no_chunk_has(stage: int) -> None:
    for change in ({"count": 0}, {"count": 65536}, {"first": -1}, {"places": 0}):
        refused("the sizes of the chunk are out of range", stage, {}, change)
    refused("the sizes of the chunk are out of range", stage, {}, {"first": (1 << 31) - PLACES})


CHUNKS = [
    ("the experts of the chunk are fewer than it says", GATHER, "ranked"),
    ("the experts of the chunk are fewer than it says", RESULTS, "counts"),
    ("the gathered rows do not fit", GATHER, "rows"),
    ("the sums are smaller than the chunk", INNER, "sums"),
    ("the sums are smaller than the chunk", RESULTS, "sums"),
    ("the outputs of SwiGLU do not fit", INNER, "inner"),
    ("the factors are smaller than the chunk", INNER, "factors13"),
    ("the factors are smaller than the chunk", RESULTS, "factors2"),
]


@pytest.mark.parametrize(("message", "stage", "name"), CHUNKS)
def test_a_tensor_of_the_chunk_that_is_too_small(message: str, stage: int, name: str) -> None:
    columns = {INNER: 2 * WIDTH, RESULTS: HIDDEN}.get(stage, 0)
    needed = {
        **PLACES_BYTES,
        "sums": COUNT * PLACES * columns * 4,
        "factors13": COUNT * 2 * WIDTH * 4,
        "factors2": COUNT * HIDDEN * 4,
    }
    refused(message, stage, {}, {name: needed[name] - 1})


# Weights


def unpack(number: int = 1, address: int = SOMEWHERE, **changes: int) -> None:
    """Tile 0 of two experts of one bank, as fp16."""
    assert CUDA_CORE is not None

    def bank(k: int, n: int, projections: int) -> BankSpec:
        return BankSpec("int4", "compact", EXPERTS, k, n, 32, 0, projections, torch.float16)

    spec = LayerSpec(bank(HIDDEN, 2 * WIDTH, 2), bank(WIDTH, HIDDEN, 1))
    tensors = [tensor for own in spec.banks for tensor in own.tensors()]
    numbers = {"count": COUNT, "first_tile": 0, "last_tile": 1, "dtype": FP16}
    sizes = {
        "out": COUNT * 32 * spec.banks[number].k * 2,
        "factors": COUNT * spec.banks[number].n * 4,
        "ranked": COUNT * 8,
        "counts": COUNT * 4,
    }
    weights = _Weights(
        **{name: changes.get(name, value) for name, value in numbers.items()},
        **spans(sizes, {name: sizes[name] - 1 for name in changes if name in sizes}),
    )
    weights.out.at = address
    error = Error()
    code = CUDA_CORE.library.qpn_cuda_dequantize(
        number,
        ctypes.byref(weights),
        (ctypes.c_int64 * 21)(*spec.to_ints()),
        (ctypes.c_void_p * len(tensors))(*(SOMEWHERE for _ in tensors)),
        (ctypes.c_int64 * len(tensors))(*(tensor.nbytes for tensor in tensors)),
        ctypes.c_int64(len(tensors)),
        None,
        ctypes.byref(error),
    )
    CUDA_CORE.check(code, error)


@pytest.mark.parametrize("dtype", (-1, FP64))
def test_weights_of_another_dtype(dtype: int) -> None:
    with pytest.raises(ValueError, match="^weights are made fp16, bf16 or fp32$"):
        unpack(dtype=dtype)


@pytest.mark.parametrize(
    "change",
    [{"count": 0}, {"count": 65536}, {"first_tile": -1}, {"first_tile": 1}, {"last_tile": 3}],
)
def test_experts_or_tiles_that_are_not_there(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="^there are no such experts or tiles$"):
        unpack(**change)


@pytest.mark.parametrize("number", (0, 1))
@pytest.mark.parametrize("name", ("out", "factors", "ranked", "counts"))
def test_room_for_weights_that_is_too_small(name: str, number: int) -> None:
    with pytest.raises(ValueError, match="^the room for weights is too small$"):
        unpack(number, **{name: 0})


def test_room_for_weights_off_its_boundary() -> None:
    with pytest.raises(ValueError, match="^the room for weights is off its boundary of 16 bytes$"):
        unpack(address=SOMEWHERE + 8)

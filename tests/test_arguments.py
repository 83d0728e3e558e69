"""What a call on a card is checked for, on the host: tensors that say they lie on a card."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loader.arguments import BOUNDARY, Arguments
from loader.bank import ABSENT, BankSpec, LayerSpec, TensorSpec
from loader.card import CardFacts
from loader.cuda_linears import CudaLinears
from loader.cuda_routes import CudaRoutes
from loader.errors import LoaderError, UnsupportedError

CARD = torch.device("cuda", 0)
OWN = Arguments("step", CARD)


class OnCard(torch.Tensor):
    """Memory of the host under the name of a card."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # that is the disguise
        """The card."""
        return CARD


def on_card(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype).as_subclass(OnCard)


def refused(what: str, call: Callable[[], object]) -> LoaderError:
    with pytest.raises(LoaderError, match=f"^{what} does not match the ") as caught:
        call()
    return caught.value


def test_what_fits_is_accepted() -> None:
    x = on_card(4, 64)
    OWN.require("x", x, (4, 64), (torch.float16, torch.bfloat16), BOUNDARY)
    OWN.require_banks([TensorSpec("words", (4, 64), torch.float16, "weight")], [x])
    OWN.require_apart(on_card(4, 64), {"x": x})
    OWN.require_apart(x[:2], {"the rest": x[2:]})


@pytest.mark.parametrize(
    ("what", "x", "found"),
    [
        ("the shape of x", on_card(4, 63), (4, 63)),
        ("the dtype of x", on_card(4, 64, dtype=torch.float32), torch.float32),
        ("the device of x", torch.zeros(4, 64, dtype=torch.float16), torch.device("cpu")),
        ("the strides of x", on_card(64, 4).t(), (1, 4)),
        ("the address of x", on_card(4 * 64 + 1)[1:].view(4, 64), None),
    ],
)
def test_each_property_of_a_tensor_is_named(what: str, x: torch.Tensor, found: Any) -> None:
    error = refused(what, lambda: OWN.require("x", x, (4, 64), (torch.float16,), BOUNDARY))
    assert error.found == (x.data_ptr() if found is None else found)


def test_a_host_is_no_card() -> None:
    x = torch.zeros(4)
    own = Arguments("step", x.device)
    refused("the device of x", lambda: own.require("x", x, (4,), (torch.float32,)))


def test_banks_of_another_spec_or_place() -> None:
    spec = TensorSpec("words", (4, 64), torch.float16, "weight")
    for banks in ([], [on_card(4, 63)], [on_card(4, 64, dtype=torch.float32)]):
        refused("the banks", lambda banks=banks: OWN.require_banks([spec], banks))
    for bank in (on_card(64, 4).t(), torch.zeros(4, 64, dtype=torch.float16)):
        refused("a bank", lambda bank=bank: OWN.require_banks([spec], [bank]))


def test_an_output_over_an_input() -> None:
    room = on_card(8, 64)
    error = refused("out", lambda: OWN.require_apart(room[3:5], {"ids": room[6:], "x": room[:4]}))
    assert (error.expected, error.found) == ("memory apart from x", "an overlap")


# Linears

BANK = BankSpec("int4", "compact", 1, 64, 64, 32, 0, 1, torch.float16)


def linear(dtypes: tuple[torch.dtype, ...] = (torch.float16,), **changes: Any) -> None:
    """The operator of a card whose library is never reached."""
    given: dict[str, Any] = {
        "out": on_card(2, 64),
        "scratch": on_card(32 * 64, dtype=torch.float32),
        "x": on_card(2, 64),
        "bias": None,
        "banks": [on_card(*t.shape, dtype=t.dtype) for t in BANK.tensors()],
        "spec": LayerSpec(ABSENT, BANK).to_ints(),
        "routes": [1, 64],
        **changes,
    }
    core: Any = SimpleNamespace(library=None)
    CudaLinears(core, 90, dtypes).linear(**given)


def test_a_linear_is_w2_of_a_layer_without_w13() -> None:
    layer = LayerSpec(BankSpec("int4", "compact", 1, 64, 128, 32, 0, 2, torch.float16), BANK)
    error = refused("the spec", lambda: linear(spec=layer.to_ints()))
    assert error.found == "int4"


def test_a_linear_needs_room_for_a_tile() -> None:
    room = on_card(32 * 64 - 4, dtype=torch.float32)
    error = refused("the scratch", lambda: linear(scratch=room))
    assert (error.expected, error.found) == ("8192 bytes at least", "8176 bytes")


def test_a_bias_is_one_number_for_each_output() -> None:
    refused("the shape of bias", lambda: linear(bias=on_card(63)))


def test_activations_that_the_kernels_do_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    x, out = (on_card(2, 64, dtype=torch.float32) for _ in range(2))
    with pytest.raises(UnsupportedError, match="do not take activations of this dtype") as caught:
        linear(x=x, out=out)
    assert caught.value.found == torch.float32


# Layers

LAYER = LayerSpec(BankSpec("int4", "compact", 4, 64, 128, 32, 0, 2, torch.float16), BANK)


def moe(architecture: int = 90, **changes: Any) -> None:
    """The operator of a card whose library is never reached."""
    given: dict[str, Any] = {
        "out": on_card(2, 64),
        "scratch": on_card(4096, dtype=torch.float32),
        "x": on_card(2, 64),
        "topk_ids": on_card(2, 2, dtype=torch.int64),
        "topk_weights": on_card(2, 2, dtype=torch.float32),
        "expert_map": on_card(4, dtype=torch.int32),
        "banks": [on_card(*t.shape, dtype=t.dtype) for b in LAYER.banks for t in b.tensors()],
        "spec": LAYER.to_ints(),
        "routes": [1, 64],
        **changes,
    }
    core: Any = SimpleNamespace(library=None)
    CudaRoutes(core, CardFacts("a card", architecture)).moe(**given)


def test_ids_have_a_row_for_each_token_and_a_column_for_each_expert() -> None:
    ids, weights = on_card(2, dtype=torch.int64), on_card(2, dtype=torch.float32)
    error = refused("the shape of topk_ids", lambda: moe(topk_ids=ids, topk_weights=weights))
    assert (error.expected, error.found) == ("(tokens, k)", (2,))
    three = on_card(3, 2, dtype=torch.int64)
    refused("the shape of topk_ids", lambda: moe(topk_ids=three))


@pytest.mark.parametrize(
    ("architecture", "dtype"), [(90, torch.float32), (70, torch.float32), (70, torch.bfloat16)]
)
def test_activations_that_the_kernels_of_a_layer_do_not_take(
    monkeypatch: pytest.MonkeyPatch, architecture: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    x, out = (on_card(2, 64, dtype=dtype) for _ in range(2))
    with pytest.raises(UnsupportedError, match="do not take activations of this dtype") as caught:
        moe(architecture, x=x, out=out)
    assert caught.value.found == dtype
    assert ("bfloat16" in str(caught.value.expected)) == (architecture == 90)

"""A prepared linear stands where a linear stood: shapes, dtypes, state, casts, compilation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from linear_oracle import decode, quantization, tensors_of

from loader import Policy, native
from loader.checkpoint.folder import open_checkpoint
from loader.checkpoint.linears import find_linears
from loader.checkpoint.source import LocalSource
from loader.errors import LifecycleError, LoaderError
from loader.linears import LinearLoader, PreparedLinear, plan_linear
from loader.pieces import Places

FOLDER = Path(__file__).parents[2] / "fixtures" / "checkpoints" / "qwen3moe-awq-gemm-g128"
K = "model.layers.0.self_attn.k_proj"
CPU = torch.device("cpu")
BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def loaded(policy: Policy | None = None, code: Any = None) -> PreparedLinear:
    resolved = (policy or Policy()).resolve()
    serving = code or native.implementation_for(CPU)
    with LocalSource(FOLDER) as source:
        checkpoint = open_checkpoint(source)
        places = Places(checkpoint.catalog.file, checkpoint.catalog.begin)
        one = find_linears(checkpoint)[K]
        plan = plan_linear(one, resolved, serving, places, torch.float32)
        with LinearLoader(checkpoint, [plan], CPU, serving, resolved) as loader:
            return loader.bank(plan)


@pytest.fixture(scope="module")
def linear() -> PreparedLinear:
    return loaded()


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    return decode(tensors_of(FOLDER), K, quantization(FOLDER)).double()


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 8, 9, 33])
@pytest.mark.parametrize("by", ["serving", "reference"])
def test_products_are_within_tolerance_at_every_token_count(
    dtype: torch.dtype, tokens: int, by: str, linear: PreparedLinear, weight: torch.Tensor
) -> None:
    x = torch.randn(tokens, 256, generator=torch.Generator().manual_seed(tokens)).to(dtype)
    exact = x.double() @ weight.t()
    if by == "reference":
        with native.serving(native.REFERENCE):
            y = linear(x)
    else:
        y = linear(x)
    assert y.dtype == dtype and y.shape == (tokens, 128)
    assert (y.double() - exact).norm() <= BOUNDS[dtype] * exact.norm()


@pytest.mark.parametrize("rounding", ["exact", "fused_bias"])
@pytest.mark.parametrize("layout", ["compact", "record", "wide"])
def test_every_layout_and_rounding_serves(rounding: str, layout: str, weight: torch.Tensor) -> None:
    module = loaded(Policy(layout=layout, awq_rounding=rounding))
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(4))
    exact = x.double() @ weight.t()
    bound = 1e-5 if rounding == "exact" else 1e-3  # of fp16 weights, which are not the file's
    for few in (x, x.repeat(5, 1)):
        y = module(few).double()
        wanted = exact.repeat(len(few) // 3, 1)
        assert (y - wanted).norm() <= bound * wanted.norm()


@pytest.mark.parametrize("shape", [(256,), (1, 256), (2, 3, 256), (2, 1, 5, 256)])
def test_leading_axes_pass_through(shape: tuple[int, ...], linear: PreparedLinear) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    y = linear(x)
    assert y.shape == (*shape[:-1], 128)
    assert torch.allclose(y.reshape(-1, 128), linear(x.reshape(-1, 256)), atol=1e-6)


def test_strided_activations_are_taken_as_they_are(linear: PreparedLinear) -> None:
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(6))
    assert torch.equal(linear(x[:, ::2]), linear(x[:, ::2].contiguous()))


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.zeros(2, 255), "255"),
        (torch.zeros(2, 256, dtype=torch.float64), "float64"),
        (torch.zeros(2, 256, dtype=torch.int32), "int32"),
        (torch.zeros((2, 256), device="meta"), "meta"),
        (torch.zeros(()), "()"),
        (torch.zeros(2, 256).to_sparse(), "sparse_coo"),
        (None, "NoneType"),
    ],
)
def test_what_does_not_match_is_refused(
    x: torch.Tensor, words: str, linear: PreparedLinear
) -> None:
    with pytest.raises(LoaderError, match="does not match the linear") as caught:
        linear(x)
    assert words in str(caught.value) and K in str(caught.value)


def test_no_gradient_is_recorded(linear: PreparedLinear) -> None:
    x = torch.randn(2, 256, requires_grad=True)
    assert not linear(x).requires_grad


def test_casts_change_no_bit_and_moves_raise(linear: PreparedLinear) -> None:
    before = [tensor.clone() for tensor in linear.banks()]
    torch.nn.Sequential(linear).to(torch.bfloat16).half().double()
    assert all(torch.equal(a, b) for a, b in zip(before, linear.banks(), strict=True))
    with pytest.raises(LifecycleError, match="prepared linears do not move"):
        linear.to("meta")


def test_the_weight_is_not_offered_as_numbers(linear: PreparedLinear) -> None:
    with pytest.raises(AttributeError):
        _ = linear.weight


def test_decisions_do_not_change(linear: PreparedLinear) -> None:
    for name in ("routes", "spec", "out_features", "layer"):
        with pytest.raises(LifecycleError, match=name):
            setattr(linear, name, None)
    assert (linear.layer, linear.name, linear.format) == (0, K, "awq-gemm")
    assert "in_features=256, out_features=128" in repr(linear)


def test_state_goes_round_and_a_foreign_one_is_refused_whole(linear: PreparedLinear) -> None:
    state = linear.state_dict()
    other = loaded()
    for tensor in other.banks():
        tensor.zero_()
    addresses = [tensor.data_ptr() for tensor in other.banks()]
    other.load_state_dict(state)
    assert [tensor.data_ptr() for tensor in other.banks()] == addresses
    assert all(torch.equal(a, b) for a, b in zip(linear.banks(), other.banks(), strict=True))
    wide = loaded(Policy(layout="wide"))
    kept = [tensor.clone() for tensor in wide.banks()]
    with pytest.raises(RuntimeError, match="prepared linears refuse the state"):
        wide.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(kept, wide.banks(), strict=True))


def test_one_graph_holds_a_linear(linear: PreparedLinear) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (1, 4, 12):
        x = torch.randn(tokens, 256, generator=torch.Generator().manual_seed(tokens))
        assert torch.equal(compiled(x), linear(x))


def test_an_implementation_without_linears_says_so(linear: PreparedLinear) -> None:
    from dataclasses import replace

    with (
        native.serving(replace(native.REFERENCE, linear=None)),
        pytest.raises(LoaderError, match="serves no linear from a bank"),
    ):
        linear(torch.zeros(1, 256))

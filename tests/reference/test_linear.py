"""The reference of a linear: codes times scales up to a limit, dequantized runs beyond it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loader import native
from loader.bank import ABSENT, BankSpec, LayerSpec, pack_codes, pack_zeros
from loader.reference import linear as reference

GROUP = 32


def bank_of(
    n: int, k: int, phase: int, seed: int
) -> tuple[LayerSpec, list[torch.Tensor], torch.Tensor]:
    """A compact int4 bank and the weight ``(n, k)`` fp64 that it holds."""
    random = torch.Generator().manual_seed(seed)
    bank = BankSpec("int4", "compact", 1, k, n, GROUP, phase, 1, torch.float16)
    codes = torch.randint(0, 16, (k, n), generator=random, dtype=torch.uint8)
    scales = (torch.rand(bank.groups, n, generator=random) + 0.5).half()
    zeros = torch.randint(0, 16, (bank.groups, n), generator=random, dtype=torch.uint8)
    pad = bank.n_padded - n
    planes = [torch.nn.functional.pad(one, (0, pad)) for one in (scales, zeros)]
    # Words are kept on the boundary that native code asks for.
    words = torch.empty(pack_codes(codes).shape, dtype=torch.int32).copy_(pack_codes(codes))
    tensors = [words[None], planes[0][None].contiguous(), pack_zeros(planes[1])[None].contiguous()]
    group = (torch.arange(k) + phase) // GROUP
    weight = (codes.double() - zeros.double()[group]) * scales.double()[group]
    return LayerSpec(ABSENT, bank), tensors, weight.t()


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 40).map(lambda half: 2 * half),
    k=st.integers(1, 90),
    phase=st.sampled_from((0, 16)),
    tokens=st.integers(1, 11),
    routes=st.sampled_from(([0, 0], [1, 0], [0, 8], [1, 8])),
    biased=st.booleans(),
    by=st.sampled_from(("reference", "serving")),
    seed=st.integers(0, 1 << 16),
)
def test_every_route_gives_the_product(
    n: int,
    k: int,
    phase: int,
    tokens: int,
    routes: list[int],
    biased: bool,
    by: str,
    seed: int,
) -> None:
    spec, tensors, weight = bank_of(n, k, phase, seed)
    random = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(tokens, k, generator=random)
    bias = torch.randn(n, generator=random).half() if biased else None
    exact = x.double() @ weight.t() + (0 if bias is None else bias.double())
    code = native.REFERENCE if by == "reference" else native.implementation_for(x.device)
    assert code is not None and code.linear_scratch_bytes is not None
    scratch = torch.empty(code.linear_scratch_bytes(spec.to_ints(), 8) // 4)
    out = torch.full((tokens, n), torch.nan)
    with native.serving(code):
        native.linear(out, scratch, x, bias, tensors, spec.to_ints(), routes)
    size = (x.double().abs() @ weight.abs().t()).norm() + exact.norm()
    assert (out - exact).norm() <= 1e-6 * size


def test_weights_come_back_tile_by_tile() -> None:
    spec, tensors, weight = bank_of(70, 50, 16, 3)
    for code in (native.REFERENCE, native.implementation_for(torch.device("cpu"))):
        assert code is not None and code.dequantize is not None
        for first, last in ((0, 1), (1, 3), (0, 3)):
            columns = slice(first * 32, min(last * 32, 70))
            out = torch.empty(columns.stop - columns.start, 50)
            code.dequantize(out, 1, 0, (first, last), tensors, spec.to_ints())
            assert torch.equal(out.double(), weight[columns])


def test_scratch_is_a_tile_of_k_at_least() -> None:
    spec, _, _ = bank_of(64, 80, 0, 1)
    assert reference.linear_scratch_bytes(spec.to_ints(), 8) >= 32 * 80 * 4


@pytest.mark.skipif(native.HOST is None, reason="the native core is not built")
def test_native_code_refuses_what_is_no_linear() -> None:
    from loader.core import CORE

    assert CORE is not None
    spec, tensors, _ = bank_of(64, 64, 0, 2)
    x, out = torch.zeros(1, 64), torch.zeros(1, 64)
    with pytest.raises(ValueError, match="scratch is smaller"):
        CORE.linear(out, torch.empty(4), x, None, tensors, spec.to_ints())
    with pytest.raises(ValueError, match="tensors are not those"):
        CORE.linear(out, torch.empty(4096), x, None, tensors[:2], spec.to_ints())
    numbers = spec.to_ints()
    numbers[11 + 7] = 2  # projections of W2
    with pytest.raises(ValueError):
        CORE.linear(out, torch.empty(4096), x, None, tensors, numbers)
    empty = LayerSpec(ABSENT, ABSENT)
    with pytest.raises(ValueError, match="quantized banks only"):
        CORE.linear(out, torch.empty(4096), x, None, [], empty.to_ints())
    with pytest.raises(ValueError, match="quantized banks only"):
        ids = torch.zeros((1, 1), dtype=torch.int64)
        table = torch.zeros(1, dtype=torch.int32)
        CORE.moe(out, torch.empty(99999), x, ids, torch.ones(1, 1), table, tensors, spec.to_ints())

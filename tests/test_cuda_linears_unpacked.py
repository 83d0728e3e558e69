"""Linears on a card beyond their fast routes: what is unpacked when, on the host.

The launches are those of ``fake_legacy.py``; ``test_cuda_linears.py`` runs on a card.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest
import torch
from fake_legacy import FakeCalls
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.bank import ABSENT, TILE, BankSpec, LayerSpec, pack_codes, pack_zeros
from loader.cuda_linears import WORKSPACE_BYTES, CudaLinears
from loader.reference import linear as reference_linear

DTYPES = (torch.float16, torch.bfloat16)
BOUND = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-5}


def linears() -> tuple[CudaLinears, FakeCalls]:
    core: Any = None
    made, calls = CudaLinears(core, 90, DTYPES), FakeCalls()
    made._calls = calls
    return made, calls


def bank_of(n: int, k: int, rounding: str) -> tuple[LayerSpec, list[torch.Tensor], torch.Tensor]:
    random = torch.Generator().manual_seed(n + k)
    bank = BankSpec("int4", "compact", 1, k, n, 32, 0, 1, torch.float16)
    codes = torch.randint(0, 16, (k, n), generator=random, dtype=torch.uint8)
    scales = (torch.rand(bank.groups, n, generator=random) / 50 + 0.005).half()
    zeros = torch.randint(0, 16, (bank.groups, n), generator=random, dtype=torch.uint8)
    pad = bank.n_padded - n
    planes = [torch.nn.functional.pad(one, (0, pad)) for one in (scales, zeros)]
    layer = LayerSpec(ABSENT, bank, rounding)
    tensors = [pack_codes(codes)[None], planes[0][None], pack_zeros(planes[1])[None]]
    weight = torch.empty(n, k)
    tiles = (0, bank.n_padded // TILE)
    reference_linear.dequantize(weight, 1, 0, tiles, tensors, layer.to_ints())
    return layer, tensors, weight.double()


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 60).map(lambda half: 2 * half),
    k=st.integers(2, 12).map(lambda eighth: 8 * eighth),
    tokens=st.integers(1, 12),
    dtype=st.sampled_from(sorted(BOUND, key=str)),
    rounding=st.sampled_from(("exact", "fused_bias")),
    tiles=st.integers(1, 5),
    biased=st.booleans(),
)
def test_runs_of_columns_make_the_product(
    n: int, k: int, tokens: int, dtype: torch.dtype, rounding: str, tiles: int, biased: bool
) -> None:
    layer, tensors, weight = bank_of(n, k, rounding)
    made, calls = linears()
    scratch = torch.full((tiles * TILE * k,), float("nan"))
    x = torch.randn(tokens, k, generator=torch.Generator().manual_seed(tokens)).to(dtype)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(n)) if biased else None
    out = torch.full((tokens, n), float("nan"), dtype=dtype)
    spec = layer.to_ints()
    product = made._dequantized(scratch, tensors, spec, dtype)
    reference_linear.multiply(out, x, bias, tensors, spec, product)
    wanted = x.double() @ weight.t() + (0 if bias is None else bias.double())
    assert (out.double() - wanted).norm() <= BOUND[dtype] * wanted.norm()
    parts = 2 if rounding == "fused_bias" and dtype == torch.bfloat16 else 1
    room = tiles * TILE * k * 4 // dtype.itemsize // (TILE * k * parts)
    assert calls.made.count("unpack") == ceil(ceil(n / TILE) / room)


@pytest.mark.parametrize(("n", "k", "nbytes"), [(64, 128, 64 * 128 * 2), (32, 128, 32 * 128 * 4)])
def test_scratch_holds_a_small_linear_whole(n: int, k: int, nbytes: int) -> None:
    layer, _, _ = bank_of(n, k, "exact")
    assert linears()[0].scratch_bytes(layer.to_ints(), 8) == nbytes


def test_scratch_of_a_large_linear_is_bounded() -> None:
    bank = BankSpec("int4", "compact", 1, 8192, 65536, 128, 0, 1, torch.float16)
    assert linears()[0].scratch_bytes(LayerSpec(ABSENT, bank).to_ints(), 8) == WORKSPACE_BYTES

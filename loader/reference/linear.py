"""The reference of a linear outside the experts: its bank is W2 of a layer whose W13 is absent."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from loader.bank import TILE, layer_spec_from_ints, split_banks
from loader.reference.routes import Product, group_product, legacy_product, product_scratch_bytes
from loader.reference.weights import Columns
from loader.reference.weights import dequantize as weights_of


def linear(
    out: torch.Tensor,
    scratch: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    banks: Sequence[torch.Tensor],
    spec: list[int],
    routes: list[int],
) -> None:
    """``out = x @ W.T + bias``, rounded once from the fp32 sum.

    ``x`` (T, K), ``out`` (T, N) fp16, bf16 or fp32; ``bias`` (N,) any float; ``scratch`` fp32;
    ``routes`` as in ``moe``: up to so many tokens the bank is multiplied as it is, beyond them it
    is dequantized in runs of columns that fit into ``scratch``.
    """
    tokens = x.shape[0]
    fast = tokens <= routes[0] or 2 <= tokens <= routes[1]
    multiply(out, x, bias, banks, spec, group_product if fast else legacy_product(scratch))


def multiply(
    out: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    banks: Sequence[torch.Tensor],
    spec: list[int],
    product: Product,
) -> None:
    """:func:`linear` by one product of activations and a bank."""
    layer = layer_spec_from_ints(spec)
    _, bank = split_banks(layer, banks)
    y = product(x.float(), layer, layer.w2, bank, 0)
    if bias is not None:
        y += bias.float()
    out.copy_(y)


def dequantize(
    out: torch.Tensor,
    bank: int,
    slot: int,
    tiles: tuple[int, int],
    banks: Sequence[torch.Tensor],
    spec: list[int],
) -> None:
    """Weights of tiles [first, last) of one expert into ``out`` fp32 (columns, K)."""
    layer = layer_spec_from_ints(spec)
    one = layer.banks[bank]
    columns = Columns(slot, tiles[0] * TILE, min(tiles[1] * TILE, one.n))
    out.copy_(weights_of(one, layer.awq_rounding, split_banks(layer, banks)[bank], columns))


def linear_scratch_bytes(spec: list[int], tokens: int) -> int:
    """fp32 scratch that a linear uses: one tile of its K at least, whatever ``tokens``."""
    return product_scratch_bytes(layer_spec_from_ints(spec).w2)

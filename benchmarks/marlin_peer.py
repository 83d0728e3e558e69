"""Marlin: the int4 MoE kernel in vLLM's compiled library, as a peer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from decode_layer import CARD, Layer, Numbers
from peers import Absent, Prepared, Rows, rows_by_expert, swiglu

_TILE = 16
_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)
_UINT4 = 4 << 8 | 1 << 50
"""Its number for unsigned 4-bit codes with zero points: four bits of mantissa, no exponent."""


def order_of_codes() -> torch.Tensor:
    """Places of a 16 x 64 run of codes in the order that a warp's lanes hold their fragments."""
    places = []
    for lane in range(32):
        for tile in range(4):
            rows = [2 * (lane % 4) + i for i in (0, 1, 8, 9)]
            own = [256 * tile + 16 * row + lane // 4 + 8 * half for half in (0, 1) for row in rows]
            places += [own[i] for i in _NIBBLES]
    return torch.tensor(places)


def _packed(nibbles: torch.Tensor) -> torch.Tensor:
    """Eight neighbours of the last axis in one int32, the first lowest."""
    eight = nibbles.reshape(*nibbles.shape[:-1], -1, 8).int()
    word = torch.zeros(eight.shape[:-1], dtype=torch.int32, device=nibbles.device)
    for i in range(8):
        word |= eight[..., i] << (4 * i)
    return word


class _MarlinBank:
    def __init__(self, numbers: Sequence[Numbers]) -> None:
        order = order_of_codes().to(CARD)
        columns = torch.tensor([i + 8 * j for i in range(8) for j in range(8)], device=CARD)
        nibbles = torch.tensor(_NIBBLES, device=CARD)
        words, scales, zeros = [], [], []
        for own in numbers:
            k, n = own.codes.shape
            if k % _TILE or n % 64:
                raise Absent(f"Marlin takes no matrix of {k} x {n}")
            tiles = own.codes.view(k // _TILE, _TILE, n // _TILE, _TILE).permute(0, 2, 1, 3)
            codes = tiles.reshape(-1, order.numel())[:, order]
            words.append(_packed(codes.reshape(k // _TILE, -1)))
            scales.append(own.scales.reshape(-1, 64)[:, columns].view(own.scales.shape))
            turned = own.zeros.reshape(-1, 64)[:, columns].reshape(-1, 8)[:, nibbles]
            zeros.append(_packed(turned.reshape(own.zeros.shape)))
        self.k, self.n = k, n
        self.words, self.zeros = torch.stack(words), torch.stack(zeros)
        self._scales = torch.stack(scales)
        self._of_dtype: dict[torch.dtype, torch.Tensor] = {}

    def scales(self, dtype: torch.dtype) -> torch.Tensor:
        """The kernel takes scales of the dtype of the activations."""
        if dtype not in self._of_dtype:
            self._of_dtype[dtype] = self._scales.to(dtype)
        return self._of_dtype[dtype]


class Marlin:
    """The compiled library, loaded from a path."""

    name = "Marlin"

    def __init__(self, path: Path | None) -> None:
        if path is None:
            raise Absent("no library was named (--marlin)")
        try:
            torch.ops.load_library(str(path))
            self._product = torch.ops._moe_C.moe_wna16_marlin_gemm.default
        except (OSError, AttributeError, RuntimeError) as error:
            raise Absent(f"its library does not load here: {error}") from error

    def prepare(self, layer: Layer) -> Prepared:
        """The layer's numbers in Marlin's layout."""
        return _MarlinLayer(self._product, layer)


class _MarlinLayer:
    def __init__(self, product: Any, layer: Layer) -> None:
        self._product = product
        self._geometry = layer.geometry
        numbers = zip(*map(layer.numbers, range(layer.geometry.experts)), strict=True)
        self._banks = [_MarlinBank(bank) for bank in numbers]
        processors = torch.cuda.get_device_properties(CARD).multi_processor_count
        self._locks = torch.zeros(4 * processors, dtype=torch.int32, device=CARD)

    def rows(self, ids: torch.Tensor) -> Rows:
        experts = self._geometry.experts
        blocks = (8, 16, 32, 48, 64)
        fits = (block for block in blocks if ids.numel() / experts / block < 0.9)
        return rows_by_expert(ids, experts, next(fits, blocks[-1]))

    def run(self, out: torch.Tensor, x: torch.Tensor, router: torch.Tensor, rows: Rows) -> None:
        tokens, top_k = router.shape
        both = x.new_empty((tokens * top_k, self._banks[0].n))
        inner = x.new_empty((tokens * top_k, self._banks[1].k))
        results = x.new_empty((tokens * top_k, self._banks[1].n))
        self._multiply(both, x, self._banks[0], router, rows, False)
        swiglu(inner, both)
        self._multiply(results, inner, self._banks[1], router, rows, True)
        torch.sum(results.view(tokens, top_k, -1), 1, out=out)

    def _multiply(
        self,
        out: torch.Tensor,
        rows_in: torch.Tensor,
        bank: _MarlinBank,
        router: torch.Tensor,
        rows: Rows,
        weighted: bool,
    ) -> None:
        values: dict[str, object] = {
            "a": rows_in,
            "c_or_none": out,
            "b_q_weight": bank.words,
            "b_bias_or_none": None,
            "b_scales": bank.scales(rows_in.dtype),
            "a_scales": None,
            "global_scale": None,
            "b_zeros_or_none": bank.zeros,
            "g_idx_or_none": None,
            "perm_or_none": None,
            "workspace": self._locks,
            "sorted_token_ids": rows.rows,
            "expert_ids": rows.experts,
            "num_tokens_past_padded": rows.padded,
            "topk_weights": router,
            "moe_block_size": rows.block,
            "top_k": 1 if weighted else router.shape[1],
            "mul_topk_weights": weighted,
            "is_ep": False,
            "b_type_id": _UINT4,
            "b_q_type_id": _UINT4,
            "size_m": rows_in.shape[0],
            "size_n": bank.n,
            "size_k": bank.k,
            "is_k_full": True,
            "is_full_k": True,
            "use_atomic_add": False,
            "use_fp32_reduce": True,
            "is_zp_float": False,
            "thread_k": -1,
            "thread_n": -1,
            "blocks_per_sm": -1,
        }
        names = [argument.name for argument in self._product._schema.arguments]
        unknown = [name for name in names if name not in values]
        if unknown:
            raise Absent(f"this Marlin takes arguments that are not known: {unknown}")
        try:
            self._product(*(values[name] for name in names))
        except RuntimeError as error:
            raise Absent(f"Marlin cannot run it: {str(error).splitlines()[0]}") from error

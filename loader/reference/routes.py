"""The reference routes: one MoE layer in PyTorch operators, straight from the banks.

``qpn_m1`` and ``qpn_grouped`` multiply the codes and apply scales to the fp32 group sums, as the
kernels do; ``legacy`` dequantizes bounded chunks and multiplies. All three round where
docs/routes.md says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from loader.bank import TILE, BankSpec, LayerSpec, Tensors, layer_spec_from_ints, split_banks
from loader.reference.weights import Columns, dequantize, scaled_codes

_TEMPORARY_FLOATS = 1 << 21
"""fp32 numbers that one step of the fast routes unpacks at a time (8 MiB)."""

Product = Callable[[torch.Tensor, LayerSpec, BankSpec, Tensors, int], torch.Tensor]


def moe(
    out: torch.Tensor,
    scratch: torch.Tensor,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor,
    banks: Sequence[torch.Tensor],
    spec: list[int],
    routes: list[int],
) -> None:
    """One MoE layer: ``out[t] = sum_j topk_weights[t, j] * expert(topk_ids[t, j])(x[t])``.

    ``x``, ``out`` (T, H) fp16, bf16 or fp32; ``topk_ids`` (T, k) int32 or int64, global ids;
    ``topk_weights`` (T, k) any float; ``expert_map`` (E,) int32, slot or -1; ``scratch`` fp32;
    ``routes`` = [last token count of qpn_m1 (0 or 1), last token count of qpn_grouped (0: off),
    family of a card's kernels (0 or absent: the implementation's choice)].
    """
    layer = layer_spec_from_ints(spec)
    tokens = x.shape[0]
    product = legacy_product(scratch)
    if tokens <= routes[0] or 2 <= tokens <= routes[1]:
        product = group_product
    slots = local_slots(topk_ids, expert_map)
    if tokens == 1 and routes[0]:
        _in_router_order(out, x, slots, topk_weights, layer, banks, product)
    else:
        by_expert(out, x, slots, topk_weights, layer, banks, product)


def local_slots(topk_ids: torch.Tensor, expert_map: torch.Tensor) -> torch.Tensor:
    """Slot of each selected expert, -1 where the id is negative, out of range or elsewhere."""
    inside = (topk_ids >= 0) & (topk_ids < expert_map.numel())
    slots = expert_map[torch.where(inside, topk_ids, 0).long()]
    return torch.where(inside, slots, -1)


def _in_router_order(
    out: torch.Tensor,
    x: torch.Tensor,
    slots: torch.Tensor,
    weights: torch.Tensor,
    layer: LayerSpec,
    banks: Sequence[torch.Tensor],
    product: Product,
) -> None:
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for position, slot in enumerate(slots[0].tolist()):
        if slot >= 0:
            y = _expert(x, layer, banks, slot, product)
            total += weights[0, position].float() * y.float()
    out.copy_(total)


def by_expert(
    out: torch.Tensor,
    x: torch.Tensor,
    slots: torch.Tensor,
    weights: torch.Tensor,
    layer: LayerSpec,
    banks: Sequence[torch.Tensor],
    product: Product,
) -> None:
    """Rows compacted by active expert; the sum is taken in router order afterwards."""
    results = x.new_zeros((*slots.shape, x.shape[1]))
    for slot in torch.unique(slots[slots >= 0]).tolist():
        token, position = (slots == slot).nonzero(as_tuple=True)
        results[token, position] = _expert(x[token], layer, banks, slot, product)
    _sum_in_router_order(out, slots, weights, results)


def _sum_in_router_order(
    out: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, results: torch.Tensor
) -> None:
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for position in range(slots.shape[1]):
        # A skipped slot is not multiplied: its weight may be NaN.
        used = (slots[:, position] >= 0).unsqueeze(1)
        weighted = weights[:, position, None].float() * results[:, position].float()
        total += torch.where(used, weighted, 0.0)
    out.copy_(total)


def _expert(
    x: torch.Tensor,
    layer: LayerSpec,
    banks: Sequence[torch.Tensor],
    slot: int,
    product: Product,
) -> torch.Tensor:
    """W2 @ (silu(gate) * up), rounded to x's dtype after W13, after SwiGLU and after W2."""
    w13, w2 = split_banks(layer, banks)
    both = product(x.float(), layer, layer.w13, w13, slot).to(x.dtype).float()
    gate, up = both[:, 0::2], both[:, 1::2]
    hidden = (torch.nn.functional.silu(gate) * up).to(x.dtype).float()
    return product(hidden, layer, layer.w2, w2, slot).to(x.dtype)


def _column_runs(bank: BankSpec, floats: int) -> Iterator[Columns]:
    """Runs of whole tiles whose fp32 weights fit into ``floats`` numbers, at least one tile."""
    each = max(floats // bank.k // TILE, 1) * TILE
    for first in range(0, bank.n, each):
        yield Columns(0, first, min(first + each, bank.n))


def group_product(
    x: torch.Tensor, layer: LayerSpec, bank: BankSpec, tensors: Tensors, slot: int
) -> torch.Tensor:
    """``x (rows, K) fp32`` times one expert, scales on the fp32 group sums: ``(rows, N) fp32``."""
    y = x.new_empty((x.shape[0], bank.n))
    for run in _column_runs(bank, _TEMPORARY_FLOATS):
        at = run._replace(slot=slot)
        if bank.kind == "int4" and layer.awq_rounding == "fused_bias":
            # The fused weight is rounded to fp16 one by one: there is no scale to factor out.
            y[:, at.first : at.last] = x @ dequantize(bank, layer.awq_rounding, tensors, at).t()
            continue
        parts = scaled_codes(bank, tensors, at)
        rows = bank.groups * bank.group
        pads = (bank.phase, rows - bank.phase - bank.k)
        grouped = torch.nn.functional.pad(x, pads).view(-1, bank.groups, bank.group)
        codes = torch.nn.functional.pad(parts.codes, (0, 0, *pads))
        sums = torch.bmm(grouped.transpose(0, 1), codes.view(bank.groups, bank.group, -1))
        total = (sums * parts.scale[:, None, :]).sum(0)
        if parts.whole is not None:
            total = total / parts.whole if parts.divides else total * parts.whole
        y[:, at.first : at.last] = total
    return y


def legacy_product(scratch: torch.Tensor) -> Product:
    """Dequantize tiles into ``scratch``, which bounds what is unpacked at once, and multiply."""

    def product(
        x: torch.Tensor, layer: LayerSpec, bank: BankSpec, tensors: Tensors, slot: int
    ) -> torch.Tensor:
        y = x.new_empty((x.shape[0], bank.n))
        for run in _column_runs(bank, scratch.numel()):
            at = run._replace(slot=slot)
            weights = scratch[: (at.last - at.first) * bank.k].view(-1, bank.k)
            weights.copy_(dequantize(bank, layer.awq_rounding, tensors, at))
            y[:, at.first : at.last] = x @ weights.t()
        return y

    return product


LEGACY_SCRATCH_BYTES = 16 << 20
"""Most scratch that the reference ``legacy`` route asks for."""


def least_scratch_bytes(layer: LayerSpec) -> int:
    """Scratch without which ``legacy`` cannot run a layer: one tile of its widest K, fp32."""
    return max(TILE * bank.k * 4 for bank in layer.banks)


def scratch_bytes(layers: Sequence[LayerSpec], tokens: int, top_k: int) -> int:
    """fp32 scratch that ``legacy`` uses for a set of layers: one tile of the widest K at least.

    The fast routes of the reference use none, whatever ``tokens`` and ``top_k``.
    """
    return max((product_scratch_bytes(bank) for layer in layers for bank in layer.banks), default=0)


def product_scratch_bytes(bank: BankSpec) -> int:
    """fp32 scratch that dequantizing one bank in runs of columns uses."""
    tile = TILE * bank.k * 4
    return max(tile, min(LEGACY_SCRATCH_BYTES // tile * tile, bank.n_padded * bank.k * 4))

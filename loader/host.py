"""Host: the operators served by the native core.

Fast routes run in one native call; ``legacy`` dequantizes natively and multiplies with PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from loader.bank import TILE, BankSpec, LayerSpec, Tensors, layer_spec_from_ints
from loader.core import Core
from loader.reference import linear as reference_linear
from loader.reference import routes as reference


class HostRoutes:
    """The ``moe`` and ``linear`` operators on the host, by one core."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def moe(
        self,
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
        """One MoE layer; see ``loader/reference/routes.py`` for the contract."""
        if not topk_ids.numel():  # no token, or no expert for any: nothing to launch
            out.zero_()
            return
        layer = layer_spec_from_ints(spec)
        tokens = x.shape[0]
        if not (tokens <= routes[0] or 2 <= tokens <= routes[1]):
            product = self._legacy(scratch, banks, spec)
            slots = reference.local_slots(topk_ids, expert_map)
            reference.by_expert(out, x, slots, topk_weights, layer, banks, product)
            return
        needed = self._core.moe_scratch_bytes(spec, tokens, topk_ids.shape[1])
        if scratch.nbytes < needed:  # a wider top-k than the plan knew of
            scratch = torch.empty(needed // 4 + 1, dtype=torch.float32, device=x.device)
        target = out if out.is_contiguous() else torch.empty_like(x)
        self._core.moe(
            target,
            scratch,
            x.contiguous(),
            topk_ids.contiguous(),
            topk_weights.contiguous(),
            expert_map,
            banks,
            spec,
        )
        if target is not out:
            out.copy_(target)

    def _legacy(
        self, scratch: torch.Tensor, banks: Sequence[torch.Tensor], spec: list[int]
    ) -> reference.Product:
        plain = reference.legacy_product(scratch)

        def product(
            x: torch.Tensor, layer: LayerSpec, bank: BankSpec, tensors: Tensors, slot: int
        ) -> torch.Tensor:
            if bank.kind == "plain":
                return plain(x, layer, bank, tensors, slot)
            number = 0 if bank.projections == 2 else 1
            y = x.new_empty((x.shape[0], bank.n))
            each = max(scratch.numel() // (TILE * bank.k), 1)
            for first in range(0, bank.n_padded // TILE, each):
                tiles = (first, min(first + each, bank.n_padded // TILE))
                columns = slice(tiles[0] * TILE, min(tiles[1] * TILE, bank.n))
                weights = scratch[: (columns.stop - columns.start) * bank.k].view(-1, bank.k)
                self._core.dequantize(weights, number, slot, tiles, banks, spec)
                y[:, columns] = x @ weights.t()
            return y

        return product

    def linear(
        self,
        out: torch.Tensor,
        scratch: torch.Tensor,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        banks: Sequence[torch.Tensor],
        spec: list[int],
        routes: list[int],
    ) -> None:
        """One linear; see ``loader/reference/linear.py`` for the contract."""
        tokens = x.shape[0]
        if not tokens:
            return
        if not (tokens <= routes[0] or 2 <= tokens <= routes[1]):
            product = self._legacy(scratch, banks, spec)
            reference_linear.multiply(out, x, bias, banks, spec, product)
            return
        target = out if out.is_contiguous() else torch.empty_like(out)
        bias = None if bias is None else bias.contiguous()
        self._core.linear(target, scratch, x.contiguous(), bias, banks, spec)
        if target is not out:
            out.copy_(target)

    def linear_scratch_bytes(self, spec: list[int], tokens: int) -> int:
        """Scratch that a linear needs for steps of up to ``tokens`` tokens, and for ``legacy``."""
        least = reference_linear.linear_scratch_bytes(spec, tokens)
        return max(least, self._core.linear_scratch_bytes(spec, tokens))

    def scratch_bytes(self, layers: Sequence[LayerSpec], tokens: int, top_k: int) -> int:
        """Scratch that steps of up to ``tokens`` tokens, and ``legacy``, need."""
        fast = [
            self._core.moe_scratch_bytes(layer.to_ints(), tokens, top_k)
            for layer in layers
            if layer.w13.kind != "plain"
        ]
        return max([reference.scratch_bytes(layers, tokens, top_k), *fast])

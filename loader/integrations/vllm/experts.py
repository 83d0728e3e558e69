"""Experts: the MoE layers of a vLLM model, served by prepared experts instead of parameters."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import (
    FusedMoEConfig,
    FusedMoEMethodBase,
    MoEActivation,
    RoutedExperts,
)
from vllm.model_executor.models.utils import extract_layer_index

from loader.errors import CheckpointError, UnsupportedError
from loader.experts import LoadedExperts, PreparedExperts
from loader.shard import Shard

SUBMODULE = "prepared"
"""Name under which a layer's prepared experts are registered on vLLM's ``RoutedExperts``."""


class PreparedExpertsMethod(FusedMoEMethodBase):
    """Runs a MoE layer from its banks: registers no parameter, takes the router's choice.

    Raises :class:`UnsupportedError` for a layer that the operator does not compute.
    """

    def __init__(self, moe: FusedMoEConfig, layer_name: str) -> None:
        super().__init__(moe)
        parallel = moe.moe_parallel_config
        for what, expected, found in (
            ("the experts' activation", MoEActivation.SILU, moe.activation),
            ("a clamped or scaled SwiGLU", (None,) * 3, _swiglu(moe)),
            ("expert biases", False, moe.has_bias),
            ("LoRA on experts", False, moe.is_lora_enabled),
            ("data parallel ranks", 1, parallel.dp_size),
            ("prefill context parallel ranks", 1, parallel.pcp_size),
            ("sequence parallel MoE ranks", 1, parallel.sp_size),
        ):
            if found != expected:
                raise UnsupportedError(
                    f"{what}: not served by --load-format qpn",
                    tensor=layer_name,
                    expected=expected,
                    found=found,
                )

    def create_weights(self, layer: RoutedExperts, *sizes: Any, **more: Any) -> None:
        """Nothing: the banks are allocated when the layer is loaded."""
        if layer.apply_router_weight_on_input:
            raise UnsupportedError(
                "router weights on the experts' input: not served by --load-format qpn",
                tensor=layer.layer_name,
                expected="weights on their output",
                found="apply_router_weight_on_input",
            )

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *more: Any, **named: Any
    ) -> tuple[int, int]:
        """Sizes stay as they are: a bank pads its own columns."""
        return hidden_size, intermediate_size_per_partition

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        """None: no kernel of vLLM's reads these experts."""

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``(T, H)``, ``(T, k)``, ``(T, k)`` -> this rank's part of ``(T, H)``; ids are global."""
        result: torch.Tensor = layer.prepared(x, topk_ids, topk_weights)
        return result


def _swiglu(moe: FusedMoEConfig) -> tuple[Any, Any, Any]:
    return moe.swiglu_limit, moe.swiglu_alpha, moe.swiglu_beta


def moe_layers(model: torch.nn.Module) -> dict[int, RoutedExperts]:
    """Layer index -> the module that is to get prepared experts; pipeline ranks hold some each.

    Raises :class:`UnsupportedError` where the model has none.
    """
    found = {
        extract_layer_index(module.layer_name): module
        for module in model.modules()
        if isinstance(module, RoutedExperts)
        and isinstance(module.quant_method, PreparedExpertsMethod)
    }
    if not found:
        raise UnsupportedError(
            "this vLLM model has no MoE layers for --load-format qpn",
            expected="a Mixture-of-Experts model; serve others with --load-format auto",
            found=type(model).__name__,
        )
    return {layer: found[layer] for layer in sorted(found)}


def shard_of(layers: dict[int, RoutedExperts]) -> Shard:
    """What this rank holds of every layer, as vLLM has cut it.

    Raises :class:`UnsupportedError` where layers are cut differently.
    """
    shards = {layer: _shard(module) for layer, module in layers.items()}
    first = next(iter(shards.values()))
    for layer, shard in shards.items():
        if shard != first:
            raise UnsupportedError(
                "MoE layers are spread differently over the ranks",
                layer=layer,
                expected=first.to_dict(),
                found=shard.to_dict(),
            )
    return first


def _shard(module: RoutedExperts) -> Shard:
    parallel = module.moe_config.moe_parallel_config
    slots = module.expert_map
    ids = None
    if slots is not None:
        held = [(slot, expert) for expert, slot in enumerate(slots.tolist()) if slot >= 0]
        ids = tuple(expert for _, expert in sorted(held))
    return Shard(tp_rank=parallel.tp_rank, tp_size=parallel.tp_size, expert_ids=ids)


def install(layers: dict[int, RoutedExperts], experts: LoadedExperts) -> None:
    """Register each layer's prepared experts on vLLM's module, as its submodule.

    Raises :class:`CheckpointError` where vLLM and the checkpoint disagree on a size.
    """
    for layer, module in layers.items():
        _check_sizes(layer, module, experts[layer])
        module.add_module(SUBMODULE, experts[layer])


def _check_sizes(layer: int, module: RoutedExperts, prepared: PreparedExperts) -> None:
    moe = module.moe_config
    expected = (moe.hidden_dim, moe.intermediate_size_per_partition, moe.num_local_experts)
    found = (prepared.hidden_size, prepared.intermediate_size, len(prepared.expert_ids))
    if expected != found:
        raise CheckpointError(
            "vLLM's model and the checkpoint differ in (hidden, intermediate on this rank, "
            "experts on this rank)",
            layer=layer,
            expected=expected,
            found=found,
        )

"""Quantization: the checkpoint's own config in vLLM, with the MoE layers taken over.

A config is taken over by a subclass of its own class, so that vLLM finds in it whatever it looks
for. What stays vLLM's: attention, caches, and the linears that it can run on this platform.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import (
    WEIGHT_LOADER_V2_SUPPORTED,
    LinearBase,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)

from loader.errors import UnsupportedError
from loader.integrations.vllm.experts import PreparedExpertsMethod
from loader.integrations.vllm.linear_method import UNABLE, OwnLinearMethod, reason_of


class _TakenOver(QuantizationConfig):
    """Mixed in before the class of a checkpoint's config; see :func:`take_over`."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Banks for MoE layers; for linears vLLM's own method where it has one, else ours."""
        if isinstance(layer, RoutedExperts):
            return PreparedExpertsMethod(layer.moe_config, prefix)
        try:
            method = super().get_quant_method(layer, prefix)
        except UNABLE as error:
            if isinstance(layer, LinearBase):
                return OwnLinearMethod(None, reason_of(error))
            if isinstance(layer, ParallelLMHead):
                return UnquantizedEmbeddingMethod()
            raise
        if not isinstance(layer, LinearBase) or isinstance(method, UnquantizedLinearMethod):
            return method
        # Any other kind gets its weights loaded in a way that only its own name stands for.
        by_name = type(method).__name__ in WEIGHT_LOADER_V2_SUPPORTED
        return OwnLinearMethod(method) if by_name else method


def take_over(config: VllmConfig) -> VllmConfig:
    """A shallow copy of vLLM's config whose quantization leaves the MoE layers to this library.

    Raises :class:`UnsupportedError` where nothing is quantized.
    """
    own = config.quant_config
    if own is None:
        raise UnsupportedError(
            "the checkpoint is not quantized: --load-format qpn has nothing to do",
            expected="a quantization_config; serve others with --load-format auto",
            found="none",
        )
    kind: Any = type(own)
    taken: Any = type(f"TakenOver{kind.__name__}", (_TakenOver, kind), {})
    replaced = taken.__new__(taken)
    vars(replaced).update(vars(own))
    result = copy.copy(config)
    result.quant_config = replaced
    return result

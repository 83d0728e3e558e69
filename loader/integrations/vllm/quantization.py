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
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)

from loader.errors import LoaderError, UnsupportedError
from loader.integrations.vllm.experts import PreparedExpertsMethod

UNABLE = (ValueError, NotImplementedError, RuntimeError, AssertionError, ImportError)
"""How vLLM says that it has no kernel for a linear on this platform."""

Reasons = dict[str, str]
"""Linear (name in vLLM's model) -> why vLLM cannot run its quantized form here."""


class _TakenOver(QuantizationConfig):
    """Mixed in before the class of a checkpoint's config; see :func:`take_over`."""

    reasons: Reasons

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Banks for MoE layers; for linears vLLM's own method where there is one."""
        if isinstance(layer, RoutedExperts):
            return PreparedExpertsMethod(layer.moe_config, prefix)
        if not isinstance(layer, LinearBase):
            return super().get_quant_method(layer, prefix)  # type: ignore[safe-super]
        try:
            method = super().get_quant_method(layer, prefix)  # type: ignore[safe-super]
        except UNABLE as error:
            return self.plain(prefix, error)
        if isinstance(method, UnquantizedLinearMethod):
            return method
        if type(method).__name__ not in WEIGHT_LOADER_V2_SUPPORTED:
            return method
        return _FirstAble(method, self, prefix)

    def plain(self, prefix: str, error: BaseException) -> UnquantizedLinearMethod:
        """The method of a linear that is dequantized, since vLLM has none for its codes."""
        self.reasons[prefix] = " ".join(str(error).split()) or type(error).__name__
        return UnquantizedLinearMethod()


@register_weight_loader_v2_supported_method
class _FirstAble(LinearMethodBase):
    """Stands on a linear until its sizes are known: then vLLM's method, or none fits and it is
    dequantized. Kernels refuse sizes in ``create_weights`` only."""

    def __init__(self, method: LinearMethodBase, config: _TakenOver, prefix: str) -> None:
        self._method = method
        self._config = config
        self._prefix = prefix

    def create_weights(self, layer: torch.nn.Module, *sizes: Any, **named: Any) -> None:
        """Create the weights of the method that the linear keeps."""
        before = set(layer._parameters)
        chosen = self._method
        try:
            chosen.create_weights(layer, *sizes, **named)
        except UNABLE as error:
            for name in set(layer._parameters) - before:
                delattr(layer, name)
            chosen = self._config.plain(self._prefix, error)
            chosen.create_weights(layer, *sizes, **named)
        layer.quant_method = chosen

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Never reached: ``create_weights`` has left another method on the layer."""
        raise LoaderError("a linear ran before its weights were created", tensor=self._prefix)


def take_over(config: VllmConfig) -> tuple[VllmConfig, Reasons]:
    """A shallow copy of vLLM's config whose quantization leaves the MoE layers to this library.

    Also returns the linears that vLLM cannot run, a dict that fills while the model is built.
    Raises :class:`UnsupportedError` where nothing is quantized.
    """
    own = config.quant_config
    if own is None:
        raise UnsupportedError(
            "the checkpoint is not quantized: --load-format qpn has nothing to do",
            expected="a quantization_config; serve others with --load-format auto",
            found="none",
        )
    kind = type(own)
    taken = type(f"TakenOver{kind.__name__}", (_TakenOver, kind), {})
    replaced = taken.__new__(taken)
    vars(replaced).update(vars(own))
    replaced.reasons = {}
    result = copy.copy(config)
    result.quant_config = replaced
    return result, replaced.reasons

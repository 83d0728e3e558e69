"""Linear method: what stands on a linear of vLLM's whose quantized form vLLM cannot run here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)

SUBMODULE = "prepared"
"""Name under which a linear's banks are registered on vLLM's layer."""

UNABLE = (ValueError, NotImplementedError, RuntimeError, AssertionError, ImportError)
"""How vLLM says that it has no kernel for a linear on this platform."""


def reason_of(error: BaseException) -> str:
    """What vLLM said, on one line."""
    return " ".join(str(error).split()).removesuffix(" Reasons:") or type(error).__name__


@dataclass(frozen=True)
class Cut:
    """A linear as vLLM has cut it: ``outs`` are this rank's features of each fused part, ``ins``
    this rank's inputs of ``inputs`` in all; ``named`` is what else vLLM gives its methods."""

    ins: int
    outs: tuple[int, ...]
    inputs: int
    outputs: int
    dtype: torch.dtype
    named: dict[str, Any]


@register_weight_loader_v2_supported_method
class OwnLinearMethod(LinearMethodBase):
    """Gives a linear vLLM's own method where that accepts the sizes, else serves it from banks.

    ``method`` is vLLM's, None where it has none; ``why`` says what it lacks. Nothing is created
    before the checkpoint is asked: then :meth:`install` or :meth:`make_plain` decides.
    """

    def __init__(self, method: LinearMethodBase | None, why: str = "") -> None:
        self._method = method
        # Made here: it reads vLLM's current config, which is set while the model is built.
        self._plain = UnquantizedLinearMethod()
        self.why = why
        self.cut: Cut | None = None

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **named: Any,
    ) -> None:
        """Create vLLM's weights; kernels refuse sizes only here. Else keep the cut."""
        cut = Cut(
            input_size_per_partition,
            tuple(output_partition_sizes),
            input_size,
            output_size,
            params_dtype,
            named,
        )
        before = set(layer._parameters)
        if self._method is not None:
            try:
                _create(self._method, layer, cut)
            except UNABLE as error:
                self.why = reason_of(error)
                for name in set(layer._parameters) - before:
                    delattr(layer, name)
            else:
                layer.quant_method = self._method
                return
        self.cut = cut

    def make_plain(self, layer: LinearBase, device: torch.device) -> None:
        """Create plain weights, which vLLM's loading then fills."""
        assert self.cut is not None
        with device:
            _create(self._plain, layer, self.cut)
        layer.quant_method = self._plain
        layer.update_param_tp_status()

    def install(self, layer: LinearBase, banks: Iterable[torch.nn.Module]) -> None:
        """Serve the linear from banks, in the order of its parts."""
        layer.add_module(SUBMODULE, torch.nn.ModuleList(banks))

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``(..., K)`` -> ``(..., N)`` of this rank."""
        parts = [bank(x) for bank in layer.get_submodule(SUBMODULE).children()]
        result: torch.Tensor = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return result if bias is None else result + bias


def _create(method: LinearMethodBase, layer: torch.nn.Module, cut: Cut) -> None:
    outs = list(cut.outs)
    method.create_weights(
        layer, cut.ins, outs, cut.inputs, cut.outputs, cut.dtype, **dict(cut.named)
    )

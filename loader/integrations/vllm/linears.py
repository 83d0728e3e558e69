"""Linears: which quantized linears of a checkpoint a vLLM model wants dequantized, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.models.interfaces import SupportsQuant

from loader.checkpoint.folder import Checkpoint
from loader.checkpoint.linears import find_linears
from loader.linears import LinearPlan, plan_linear
from loader.native import Implementation
from loader.pieces import Places
from loader.policy import ResolvedPolicy

PLAIN_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
BY_THE_MODEL = "vLLM's model keeps it in 16 or 32 bits"


@dataclass(frozen=True)
class PlainLinear:
    """A linear that is quantized on disk and plain in vLLM's model."""

    plan: LinearPlan
    dtype: torch.dtype
    place: str
    reason: str


class Names:
    """Where the modules of a checkpoint stand in vLLM's model: renamed, and some fused."""

    def __init__(self, model: torch.nn.Module, config: QuantizationConfig) -> None:
        self._modules = dict(model.named_modules())
        self._mapper = model.hf_to_vllm_mapper if isinstance(model, SupportsQuant) else None
        self._fused = [
            (part, whole)
            for whole, parts in config.packed_modules_mapping.items()
            for part in parts
        ]

    def find(self, name: str) -> tuple[str, torch.nn.Module] | None:
        """Name and module that serve a module of the checkpoint; None where vLLM has none."""
        weight = f"{name}.weight"
        mapped = weight if self._mapper is None else self._mapper.map_name(weight)
        if mapped is None:
            return None
        place = mapped.removesuffix(".weight")
        parent, _, last = place.rpartition(".")
        for one in (place, *(f"{parent}.{whole}" for part, whole in self._fused if part == last)):
            if one in self._modules:
                return one, self._modules[one]
        return None


def plain_linears(
    checkpoint: Checkpoint,
    names: Names,
    reasons: Mapping[str, str],
    policy: ResolvedPolicy,
    implementation: Implementation,
) -> dict[str, PlainLinear]:
    """Checkpoint name -> each quantized linear whose place in vLLM's model takes plain weights.

    Raises a :class:`loader.LoaderError` for one whose format is not known.
    """
    wanted: dict[str, tuple[str, torch.nn.Module]] = {}

    def plain(name: str) -> bool:
        found = names.find(name)
        if found is None or not isinstance(vars(found[1]).get("quant_method"), PLAIN_METHODS):
            return False
        wanted[name] = found
        return True

    places = Places(checkpoint.catalog.file, checkpoint.catalog.begin)
    result = {}
    for name, source in find_linears(checkpoint, plain).items():
        place, module = wanted[name]
        dtype = module.get_parameter("weight").dtype
        reason = reasons.get(place, BY_THE_MODEL)
        plan = plan_linear(source, policy, implementation, places, dtype, plain_because=reason)
        result[name] = PlainLinear(plan, dtype, place, reason)
    return result

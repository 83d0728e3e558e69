"""Support: the vLLM this plugin is written for, checked piece by piece before anything is used.

The plugin stands on classes that vLLM does not promise to keep. So the version is asked first, and
then each class, method and field by name: what differs is one sentence, not a trace from below.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from dataclasses import dataclass

from loader.errors import UnsupportedError

SUPPORTED = ("0.32",)
"""Versions (major.minor) that the plugin was tested with."""


@dataclass(frozen=True)
class Piece:
    """One name of vLLM's: a function or method with parameters ``takes``, or a dataclass with
    fields ``holds``."""

    module: str
    name: str
    takes: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()

    def fault(self) -> str | None:
        """What is wrong with it in the vLLM that is installed; None where nothing is."""
        whole = f"{self.module}.{self.name}"
        try:
            found: object = importlib.import_module(self.module)
            for part in self.name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            return f"no {whole} ({error})"
        if self.takes:
            if not callable(found):
                return f"{whole} cannot be called"
            known = inspect.signature(found).parameters
            lacking = [name for name in self.takes if name not in known]
            if lacking:
                return f"{whole} takes no {', '.join(lacking)}"
        if self.holds:
            if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
                return f"{whole} is no dataclass"
            fields = {field.name for field in dataclasses.fields(found)}
            lacking = [name for name in self.holds if name not in fields]
            if lacking:
                return f"{whole} has no {', '.join(lacking)}"
        return None


_MODEL_LOADER = "vllm.model_executor.model_loader.base_loader"
_MOE = "vllm.model_executor.layers.fused_moe"
_LINEAR = "vllm.model_executor.layers.linear"
_QUANTIZATION = "vllm.model_executor.layers.quantization.base_config"
_SIZES = (
    "input_size_per_partition",
    "output_partition_sizes",
    "input_size",
    "output_size",
    "params_dtype",
)

PIECES = (
    Piece("vllm.config", "VllmConfig", holds=("quant_config", "load_config")),
    Piece("vllm.config", "ModelConfig", holds=("model", "revision", "runner")),
    Piece("vllm.config.load", "LoadConfig", holds=("model_loader_extra_config",)),
    Piece(_MODEL_LOADER, "BaseModelLoader.load_model", ("vllm_config", "model_config", "prefix")),
    Piece(_MODEL_LOADER, "BaseModelLoader.load_weights", ("model", "model_config")),
    Piece(_MODEL_LOADER, "BaseModelLoader.download_model", ("model_config",)),
    Piece(_QUANTIZATION, "QuantizationConfig.get_quant_method", ("layer", "prefix")),
    Piece(_LINEAR, "LinearBase.__init__", ("quant_config", "prefix", "tp_rank", "tp_size")),
    Piece(_LINEAR, "LinearBase.update_param_tp_status"),
    Piece(_LINEAR, "LinearMethodBase.create_weights", _SIZES),
    Piece(_LINEAR, "LinearMethodBase.apply", ("layer", "x", "bias")),
    Piece(_LINEAR, "UnquantizedLinearMethod.create_weights", _SIZES),
    Piece(_LINEAR, "WEIGHT_LOADER_V2_SUPPORTED"),
    Piece(_LINEAR, "register_weight_loader_v2_supported_method"),
    Piece(
        "vllm.model_executor.layers.vocab_parallel_embedding",
        "UnquantizedEmbeddingMethod",
    ),
    Piece(
        _MOE,
        "RoutedExperts.__init__",
        ("layer_name", "moe_config", "quant_config", "apply_router_weight_on_input"),
    ),
    Piece(_MOE, "RoutedExperts.expert_map"),
    Piece(_MOE, "FusedMoEMethodBase.create_weights", ("layer",)),
    Piece(
        _MOE,
        "FusedMoEMethodBase.apply",
        ("layer", "x", "topk_weights", "topk_ids", "shared_experts", "shared_experts_input"),
    ),
    Piece(_MOE, "FusedMoEMethodBase.get_fused_moe_quant_config", ("layer",)),
    Piece(
        _MOE,
        "FusedMoEConfig",
        holds=(
            "activation",
            "swiglu_limit",
            "swiglu_alpha",
            "swiglu_beta",
            "has_bias",
            "is_lora_enabled",
            "device",
            "hidden_dim",
            "intermediate_size_per_partition",
            "num_experts",
            "moe_parallel_config",
        ),
    ),
    Piece(
        _MOE,
        "FusedMoEParallelConfig",
        holds=("tp_rank", "tp_size", "ep_size", "dp_size", "pcp_size", "sp_size"),
    ),
    Piece("vllm.model_executor.models.utils", "extract_layer_index", ("layer_name",)),
    Piece("vllm.model_executor.models.utils", "WeightsMapper.map_name", ("key",)),
    Piece("vllm.model_executor.models.interfaces", "SupportsQuant.hf_to_vllm_mapper"),
)


def require_support(pieces: tuple[Piece, ...] = PIECES) -> None:
    """Refuse a vLLM that this plugin is not written for.

    Raises :class:`UnsupportedError` naming the versions that work and what differs.
    """
    version = str(importlib.import_module("vllm").__version__)
    faults = [fault for piece in pieces if (fault := piece.fault()) is not None]
    if ".".join(version.split(".")[:2]) in SUPPORTED and not faults:
        return
    differs = f": {'; '.join(faults[:3])}" if faults else ""
    raise UnsupportedError(
        "the vLLM plugin of qpn-loader does not work with this vLLM; install a version that it "
        "supports, or serve with another --load-format",
        expected=" or ".join(f"vllm {one}.*" for one in SUPPORTED),
        found=f"vllm {version}{differs}",
    )

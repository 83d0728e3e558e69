"""config.json and hf_quant_config.json of a synthetic checkpoint, as each tool writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from loader.testing.model import HEADS, KEY_HEADS, Linear, modules
from loader.testing.spec import Spec


def model_config(spec: Spec) -> dict[str, Any]:
    """The text model's config, without the quantization."""
    family = spec.naming
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "hidden_act": "silu",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.dense_width,
        family.width_key: spec.intermediate,
        family.experts_key: spec.experts,
        "num_experts_per_tok": spec.top_k,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "head_dim": spec.hidden // HEADS,
        "max_position_embeddings": 512,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": spec.vocabulary,
        "torch_dtype": "bfloat16" if spec.plain_dtype == "BF16" else "float16",
        **family.extra,
    }
    if family.dense_key == "first_k_dense_replace":
        config["first_k_dense_replace"] = len(spec.dense)
    elif spec.dense or family.width_key == "moe_intermediate_size":
        config["mlp_only_layers"] = list(spec.dense)
    if spec.extra_layers:
        config["num_nextn_predict_layers"] = spec.extra_layers
    if spec.shared_expert != "none" and family.shared == "shared_expert":
        config["shared_expert_intermediate_size"] = spec.intermediate
    if not family.nested:
        return config
    outer = {"architectures": config.pop("architectures"), "model_type": family.model_type}
    return outer | {"text_config": config | {"model_type": f"{family.model_type}_text"}}


def _ignored_modules(spec: Spec) -> list[str]:
    """Exact names of what stays plain below ``num_hidden_layers``; draft layers are not named."""
    return [
        module.name
        for module in modules(spec)
        if isinstance(module, Linear) and not module.quantized and module.layer < spec.layers
    ]


def _awq(spec: Spec) -> dict[str, Any]:
    excluded = [f"{spec.prefix}layers.{layer}." for layer in spec.excluded]
    excluded.append(f"{spec.naming.block}.gate")
    if spec.shared_expert == "bf16":
        excluded.append(spec.naming.shared)
    if spec.attention == "plain":
        excluded.append("self_attn")
    config: dict[str, Any] = {
        "bits": 4,
        "group_size": spec.group,
        "modules_to_not_convert": excluded,
        "quant_method": "awq",
        "version": "gemm",
        "zero_point": not spec.symmetric,
    }
    if spec.dialect == "awq-gptqmodel":
        config |= {"checkpoint_format": "gemm", "format": "gemm", "method": "awq"}
        config |= {"desc_act": False, "lm_head": False, "pack_dtype": "int32"}
        config["meta"] = {"quantizer": ["gptqmodel:7.7.0"]}
    return config


def _compressed(spec: Spec) -> dict[str, Any]:
    floats = spec.writer.kind == "e2m1"
    channel = spec.group == -1
    scheme: dict[str, Any] = {
        "num_bits": 4,
        "type": "float" if floats else "int",
        "strategy": "tensor_group" if floats else "channel" if channel else "group",
        "group_size": None if channel else spec.group,
        "symmetric": spec.symmetric,
        "dynamic": False,
        "actorder": None,
    }
    name = "nvfp4-pack-quantized" if floats else "pack-quantized"
    group = {
        "format": name,
        "targets": ["Linear"],
        "weights": scheme,
        "input_activations": scheme | {"dynamic": "local"} if spec.input_scale else None,
        "output_activations": None,
    }
    return {
        "config_groups": {"group_0": group},
        "format": name,
        "ignore": _ignored_modules(spec),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "version": "0.19.0",
    }


def _modelopt_exclusions(spec: Spec) -> list[str]:
    """Exact names, but one glob for the experts of an excluded layer, as the tool writes."""
    names = [name for name in _ignored_modules(spec) if ".experts." not in name]
    block = spec.naming.block
    globs = [f"{spec.prefix}layers.{layer}.{block}.experts*" for layer in spec.excluded]
    return names + globs


def _modelopt(spec: Spec) -> dict[str, Any]:
    scheme = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": spec.group}
    group: dict[str, Any] = {"weights": scheme, "targets": ["Linear"]}
    if spec.input_scale:
        group["input_activations"] = scheme
    return {
        "config_groups": {"group_0": group},
        "ignore": _modelopt_exclusions(spec),
        "quant_algo": "NVFP4" if spec.input_scale else "W4A16_NVFP4",
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "quant_method": "modelopt",
    }


def _merge(config: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    merged = dict(config)
    for key, value in overrides.items():
        old = merged.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        merged[key] = _merge(old, value) if both and isinstance(old, dict) else value
    return merged


def write_configs(folder: Path, spec: Spec, overrides: dict[str, Any]) -> None:
    """Write config.json (``overrides`` merged in, key by key) and what else the tool writes."""
    writers = {"awq": _awq, "modelopt": _modelopt}
    writer = spec.dialect.split("-")[0]
    quantization = writers.get(writer, _compressed)(spec)
    config = _merge(model_config(spec) | {"quantization_config": quantization}, overrides)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if writer == "modelopt":
        hf = {
            "producer": quantization["producer"],
            "quantization": {
                "quant_algo": quantization["quant_algo"],
                "kv_cache_quant_algo": None,
                "group_size": spec.group,
                "exclude_modules": quantization["ignore"],
            },
        }
        (folder / "hf_quant_config.json").write_text(json.dumps(hf, indent=2))

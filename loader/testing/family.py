"""Model families as data: what a family calls its modules and its config keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_NUMBERS = {"gate": "w1", "up": "w3", "down": "w2"}


@dataclass(frozen=True)
class Family:
    """One row: ``block`` is the module that holds router and experts in a layer.

    ``experts_key``, ``width_key``: config keys of E and I. ``dense_key``: how the config tells
    dense layers, ``first_k_dense_replace`` (a count) or ``mlp_only_layers`` (a list).
    ``router_bias``: name of the correction bias under the block. ``shared``: name of the shared
    expert, ``shared_default`` its precision where nobody asks. ``nested``: whether the text
    model's config is in ``text_config``.
    """

    model_type: str
    architecture: str
    block: str = "mlp"
    projections: dict[str, str] = field(default_factory=lambda: _NAMES)
    experts_key: str = "num_experts"
    width_key: str = "moe_intermediate_size"
    dense_key: str = "mlp_only_layers"
    router_bias: str = ""
    shared: str = "shared_expert"
    shared_gate: str = ""
    shared_default: str = "none"
    prefix: str = "model."
    nested: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


_SIGMOID = {
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "n_shared_experts": 1,
}
_LATENT = {
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
}
_LINEAR = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 32,
    "full_attention_interval": 1,
}
_STEP = {"decoder_sparse_step": 1}

FAMILIES: dict[str, Family] = {
    "qwen3-moe": Family("qwen3_moe", "Qwen3MoeForCausalLM", extra=_STEP),
    "qwen3-next": Family(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        shared_gate="shared_expert_gate",
        shared_default="bf16",
        extra=_STEP | _LINEAR,
    ),
    "qwen3.5": Family(
        "qwen3_5_moe",
        "Qwen3_5MoeForConditionalGeneration",
        shared_gate="shared_expert_gate",
        shared_default="bf16",
        prefix="model.language_model.",
        nested=True,
        extra=_LINEAR,
    ),
    "mixtral": Family(
        "mixtral",
        "MixtralForCausalLM",
        block="block_sparse_moe",
        projections=_NUMBERS,
        experts_key="num_local_experts",
        width_key="intermediate_size",
    ),
    "mixtral-hf5": Family(
        "mixtral",
        "MixtralForCausalLM",
        block="block_sparse_moe",
        experts_key="num_local_experts",
        width_key="intermediate_size",
    ),
    "minimax": Family(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        block="block_sparse_moe",
        projections=_NUMBERS,
        experts_key="num_local_experts",
        width_key="intermediate_size",
        router_bias="e_score_correction_bias",
        extra={"scoring_func": "sigmoid", "use_routing_bias": True},
    ),
    "deepseek-v3": Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        experts_key="n_routed_experts",
        dense_key="first_k_dense_replace",
        router_bias="gate.e_score_correction_bias",
        shared="shared_experts",
        shared_default="bf16",
        extra=_SIGMOID | _LATENT | {"topk_method": "noaux_tc"},
    ),
    "glm4-moe": Family(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        experts_key="n_routed_experts",
        dense_key="first_k_dense_replace",
        router_bias="gate.e_score_correction_bias",
        shared="shared_experts",
        shared_default="bf16",
        extra=_SIGMOID | {"use_qk_norm": True, "partial_rotary_factor": 0.5},
    ),
}

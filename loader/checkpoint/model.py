"""Model: the few facts of ``config.json`` that a load needs, wherever the writer nested them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loader.errors import CheckpointError, UnsupportedError

CONFIG = "config.json"
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_ACTIVATIONS = ("hidden_act", "hidden_activation", "mlp_hidden_act", "moe_hidden_act")
_LIMITS = ("swiglu_limit", "swiglu_limits")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k")
USUAL_TOP_K = 8


@dataclass(frozen=True)
class Model:
    """Facts of the model; None where the config does not state one."""

    model_type: str
    hidden_size: int | None
    moe_intermediate_size: int | None
    experts: int
    layers: int | None
    top_k: int
    quantization: Mapping[str, Any] | None


def read_model(config: Mapping[str, Any]) -> Model:
    """Read the facts from a parsed ``config.json``.

    Raises :class:`CheckpointError` where a fact has the wrong type, :class:`UnsupportedError` where
    the config declares no experts or an activation other than silu.
    """
    text = config.get("text_config")
    nested: Mapping[str, Any] = text if isinstance(text, Mapping) else {}

    def whole(*names: str, least: int = 0) -> int | None:
        for name in names:
            for place in (nested, config):
                value = place.get(name)
                if value is None:
                    continue
                if not isinstance(value, int) or isinstance(value, bool) or value < least:
                    raise CheckpointError(
                        f"config key {name} is not valid",
                        file=CONFIG,
                        expected="a whole number" + f" of {least} or more" * bool(least),
                        found=repr(value),
                    )
                return value
        return None

    experts = whole(*_EXPERT_COUNTS)
    if not experts:
        raise UnsupportedError(
            "the config declares no experts: this is not a Mixture-of-Experts checkpoint, and the "
            "framework alone loads it",
            file=CONFIG,
            expected=" or ".join(_EXPERT_COUNTS),
            found=f"model_type {config.get('model_type')!r}",
        )
    _require_silu(nested, config)
    return Model(
        model_type=str(nested.get("model_type", config.get("model_type", ""))),
        hidden_size=whole("hidden_size", least=1),
        moe_intermediate_size=whole("moe_intermediate_size", least=1),
        experts=experts,
        layers=whole("num_hidden_layers"),
        top_k=min(whole(*_TOP_K) or USUAL_TOP_K, experts),
        quantization=_quantization(config, nested),
    )


def _require_silu(nested: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Refuse another function between W13 and W2 than silu(gate) * up, however it is spelled."""
    for name in _ACTIVATIONS:
        for place in (nested, config):
            if name in place:
                value = place[name]
                # Other spellings are null where hidden_act speaks.
                if value != "silu" and (name == _ACTIVATIONS[0] or value is not None):
                    raise UnsupportedError(
                        "the experts' activation is not supported",
                        file=CONFIG,
                        expected=f"{name} 'silu'",
                        found=repr(value),
                    )
                break
    for name in _LIMITS:
        limits = nested.get(name, config.get(name))
        if any(one is not None for one in (limits if isinstance(limits, list) else [limits])):
            raise UnsupportedError(
                "a limit on gate and up is not supported",
                file=CONFIG,
                expected=f"{name} null",
                found=repr(limits),
            )


def _quantization(config: Mapping[str, Any], nested: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for place in (config, nested):
        found = place.get("quantization_config")
        if found is None:
            continue
        if not isinstance(found, Mapping):
            raise CheckpointError(
                "quantization_config is not an object",
                file=CONFIG,
                expected="a JSON object",
                found=type(found).__name__,
            )
        return found
    return None

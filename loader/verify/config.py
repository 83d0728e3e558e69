"""The few facts of ``config.json`` and ``hf_quant_config.json`` that the values depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from loader.errors import CheckpointError
from loader.verify.raw import RawCheckpoint

_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_TOPK_KEYS = ("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_top_k")


@dataclass(frozen=True)
class Scheme:
    """One way of quantizing that the config declares: a group size (None: the whole row)."""

    group_size: int | None
    symmetric: bool

    def fits(self, k: int, groups: int) -> bool:
        """Whether ``groups`` scales along ``k`` inputs are what this scheme writes."""
        return groups == (1 if self.group_size is None else -(-k // self.group_size))


@dataclass(frozen=True)
class RawConfig:
    """``schemes`` as declared; ``expert_count`` and ``top_k`` where the config says them."""

    schemes: tuple[Scheme, ...]
    expert_count: int | None
    top_k: int | None

    def scheme(self, k: int, groups: int, tensor: str) -> Scheme:
        """The declared scheme that explains ``groups`` scales along ``k`` inputs.

        Where two fit, both group the row alike (power-of-two sizes agree only on one group), so
        only symmetry can differ, and a symmetric one is preferred: it asks for less.
        Without any declared size the shape decides, if it can.
        """
        fitting = [scheme for scheme in self.schemes if scheme.fits(k, groups)]
        if fitting:
            return next((scheme for scheme in fitting if scheme.symmetric), fitting[0])
        if not self.schemes and groups and k % groups == 0:
            return Scheme(k // groups, symmetric=True)
        declared = ", ".join(str(scheme.group_size or "one per row") for scheme in self.schemes)
        raise CheckpointError(
            "the scales do not have the declared group size",
            tensor=tensor,
            expected=f"group size {declared or 'declared in config.json'}",
            found=f"{groups} groups along {k} inputs",
        )


def _scheme(group_size: Any, symmetric: bool) -> Scheme:
    size = group_size if isinstance(group_size, int) and group_size > 0 else None
    return Scheme(size, symmetric)


def _schemes(quantization: dict[str, Any]) -> tuple[Scheme, ...]:
    groups = quantization.get("config_groups")
    if isinstance(groups, dict):
        weights = [group.get("weights") for group in groups.values() if isinstance(group, dict)]
        return tuple(
            _scheme(entry.get("group_size"), bool(entry.get("symmetric", True)))
            for entry in weights
            if isinstance(entry, dict)
        )
    if "group_size" not in quantization:
        return ()
    zero_point = quantization.get("zero_point", not quantization.get("sym", False))
    return (_scheme(quantization["group_size"], not zero_point),)


def read_config(checkpoint: RawCheckpoint) -> RawConfig:
    """Reads both files; raises :class:`CheckpointError` if config.json is missing or broken."""
    config = checkpoint.read_json("config.json", required=True)
    text = config.get("text_config")
    scopes = [config, text] if isinstance(text, dict) else [config]
    declared = [
        scope[key]
        for scope in scopes
        for key in ("quantization_config", "compression_config")
        if isinstance(scope.get(key), dict)
    ]
    exported = checkpoint.read_json("hf_quant_config.json", required=False).get("quantization")
    if isinstance(exported, dict):
        declared.append(exported)
    return RawConfig(
        schemes=next((found for found in map(_schemes, declared) if found), ()),
        expert_count=_first_int(scopes, _EXPERT_KEYS),
        top_k=_first_int(scopes, _TOPK_KEYS),
    )


def _first_int(scopes: list[dict[str, Any]], keys: tuple[str, ...]) -> int | None:
    values = (scope.get(key) for scope in scopes for key in keys)
    return next((value for value in values if isinstance(value, int) and value > 0), None)

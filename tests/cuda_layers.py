"""What tests of the routes on a card share: one small layer of each kind, a step, and the truth."""

from __future__ import annotations

from pathlib import Path

import torch
from card import CARD

import loader
from loader import native
from loader.experts import PreparedExperts
from loader.testing.checkpoint import tiny_checkpoint

BOUND = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
EXPERTS, TOP_K, HIDDEN = 6, 3, 256


def layer_on(
    device: str | torch.device, folder: Path, dialect: str, layout: str, rounding: str, tp: int
) -> PreparedExperts:
    if not (folder / "config.json").exists():
        tiny_checkpoint(
            folder, dialect=dialect, hidden=HIDDEN, intermediate=704, experts=EXPERTS, layers=1
        )
    policy = loader.Policy(layout=layout, awq_rounding=rounding, grouped_max_tokens=64)
    shard = loader.Shard(tp_rank=tp - 1, tp_size=tp)
    return loader.load(folder, device, shard=shard, policy=policy)[0]


def step(tokens: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Activations, ids (some out of range, some twice) and weights, on the card."""
    generator = torch.Generator().manual_seed(100 * seed + tokens)
    x = torch.randn((tokens, HIDDEN), generator=generator).to(dtype)
    ids = torch.randint(-1, EXPERTS + 1, (tokens, TOP_K), generator=generator)
    ids[-1] = ids[-1, :1].clamp(0, EXPERTS - 1)
    weights = torch.rand((tokens, TOP_K), generator=generator)
    return x.to(CARD), ids.to(CARD), weights.to(CARD)


Weights = list[dict[str, torch.Tensor]]


def weights_of(layer: PreparedExperts) -> Weights:
    """fp64 weights of every expert, from a load to the host."""
    return [
        {name: w.double() for name, w in layer.dequantize(expert).items()}
        for expert in range(EXPERTS)
    ]


def moe64(
    weights: Weights,
    x: torch.Tensor,
    ids: torch.Tensor,
    router: torch.Tensor,
) -> torch.Tensor:
    """``(T, H) float64`` on the host."""
    x, ids, router = x.double().cpu(), ids.cpu(), router.double().cpu()
    y = torch.zeros_like(x)
    for expert, one in enumerate(weights):
        hidden = torch.nn.functional.silu(x @ one["gate"].t()) * (x @ one["up"].t())
        share = torch.where(ids == expert, router, 0.0).sum(1, keepdim=True)
        y += share * (hidden @ one["down"].t())
    return y


def run(
    layer: PreparedExperts,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    routes: tuple[int, ...] = (1, 64),
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The operator itself, on a poisoned output."""
    out = torch.full_like(x, float("nan")) if out is None else out
    layer.workspace.scratch.fill_(float("nan"))
    native.moe(
        out,
        layer.workspace.scratch,
        x,
        ids,
        weights,
        layer.workspace.expert_map,
        layer.banks(),
        layer.spec.to_ints(),
        list(routes),
    )
    return out


def error_of(y: torch.Tensor, y64: torch.Tensor) -> float:
    return float((y.double().cpu() - y64).norm() / y64.norm())

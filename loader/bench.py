"""Bench: how fast a checkpoint loads and its layers step on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from loader import memory
from loader.experts import LoadedExperts, PreparedExperts
from loader.table import Table, render

REPEATS = 5


@dataclass(frozen=True)
class Step:
    """Median seconds of one forward of one layer at one token count."""

    tokens: int
    route: str
    implementation: str
    seconds: float


def bench_steps(
    experts: LoadedExperts, tokens: Sequence[int], top_k: int, dtype: torch.dtype
) -> list[Step]:
    """Time each token count over all layers (so that caches are left), median of five rounds."""
    generator = torch.Generator("cpu").manual_seed(0)
    steps = []
    for count in tokens:
        rounds = []
        for _ in range(REPEATS + 1):  # the first round warms up
            width = max(layer.hidden_size for layer in experts.values())
            with memory.allocating(f"activations of {count} tokens", 4 * count * width):
                inputs = [_inputs(one, count, top_k, dtype, generator) for one in experts.values()]
            started = time.perf_counter()
            for layer, (x, ids, weights) in zip(experts.values(), inputs, strict=True):
                layer(x, ids, weights)
            rounds.append((time.perf_counter() - started) / len(experts))
        route = route_of(next(iter(experts.values())), count)
        steps.append(Step(count, route[0], route[1], median(rounds[1:])))
    return steps


def route_of(layer: PreparedExperts, tokens: int) -> tuple[str, str]:
    """Route and implementation that serve one token count."""
    for route in layer.routes:
        if route.first <= tokens and (route.last is None or tokens <= route.last):
            return route.route, route.implementation
    raise AssertionError("routes cover every token count from 1")


def _inputs(
    layer: PreparedExperts,
    tokens: int,
    top_k: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kind: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    held = torch.tensor(layer.expert_ids, device="cpu")
    x = torch.randn((tokens, layer.hidden_size), generator=generator, **kind).to(dtype)
    order = torch.rand((tokens, len(held)), generator=generator, **kind).argsort(dim=1)
    ids = held[order[:, : min(top_k, len(held))]]
    weights = torch.rand(ids.shape, generator=generator, **kind)
    return x, ids, weights / weights.sum(1, keepdim=True)


def bench_text(steps: Sequence[Step]) -> str:
    """The steps as a table."""
    rows = [(s.tokens, s.route, s.implementation, f"{s.seconds * 1e3:.3f}") for s in steps]
    columns = ("tokens", "route", "code", "ms a layer")
    return render(Table(f"Steps, median of {REPEATS} rounds", columns, rows, ("route", "code")))


def bench_dict(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """The steps for JSON."""
    return [vars(step) for step in steps]

"""Layers that stand in for loaded ones, made of the writing tools' own reference weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

FIXTURES = Path(__file__).parents[1] / "fixtures" / "checkpoints"
REFUSED = "qwen3moe-modelopt-int4-awq"
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/reference.safetensors"))
LOADABLE = [name for name in NAMES if name != REFUSED]
AWQ, INT4 = "mixtral-awq-gemm-g32", "qwen3moe-ct-w4a16asym-g32"
DIVISOR, MULTIPLIER = "mixtral-ct08-nvfp4", "qwen3moe-modelopt-nvfp4"
Weights = dict[str, torch.Tensor]


@dataclass
class FakeShard:
    tp_rank: int = 0
    tp_size: int = 1


@dataclass
class FakeLayer:
    """A layer that keeps its float32 weights as they are and computes by the contract's rounding.

    ``twist`` stands for a fault in the kernels: it changes what ``forward`` multiplies by.
    """

    weights: dict[int, Weights]
    shard: FakeShard = field(default_factory=FakeShard)
    metadata_layout: str = "compact"
    awq_rounding: str = "exact"
    twist: Callable[[torch.Tensor], torch.Tensor] = lambda y: y

    @property
    def expert_ids(self) -> tuple[int, ...]:
        return tuple(self.weights)

    @property
    def hidden_size(self) -> int:
        return next(iter(self.weights.values()))["down"].shape[0]

    @property
    def intermediate_size(self) -> int:
        return next(iter(self.weights.values()))["down"].shape[1]

    def dequantize(self, expert_id: int, /) -> Weights:
        return self.weights[expert_id]

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(x.shape, dtype=torch.float32)
        for token, slot in np.ndindex(*ids.shape):
            held = self.weights.get(int(ids[token, slot]))
            if held is None:
                continue
            row = x[token].double()
            gate = (held["gate"].double() @ row).to(x.dtype).double()
            up = (held["up"].double() @ row).to(x.dtype).double()
            inner = (torch.nn.functional.silu(gate) * up).to(x.dtype).double()
            out = (held["down"].double() @ inner).to(x.dtype).float()
            total[token] += scores[token, slot] * out
        return self.twist(total.to(x.dtype))


def reference(name: str) -> dict[int, dict[int, Weights]]:
    """layer -> expert -> projection, as the tool dequantizes it."""
    layers: dict[int, dict[int, Weights]] = {}
    for key, value in load_file(FIXTURES / name / "reference.safetensors").items():
        _, layer, _, expert, projection = key.split(".")
        experts = layers.setdefault(int(layer), {})
        experts.setdefault(int(expert), {})[projection.removesuffix("_proj")] = value
    return {
        layer: {expert: experts[expert] for expert in sorted(experts)}
        for layer, experts in sorted(layers.items())
    }


def fakes(name: str, **options: Any) -> dict[int, FakeLayer]:
    return {layer: FakeLayer(held, **options) for layer, held in reference(name).items()}


def copied(name: str, folder: Path) -> Path:
    """A writable copy of a fixture, without its reference."""
    target = folder / name
    shutil.copytree(FIXTURES / name, target, copy_function=shutil.copyfile)
    target.chmod(0o755)
    (target / "reference.safetensors").unlink()
    return target


def edit(
    folder: Path,
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    file: str = "model.safetensors",
) -> None:
    tensors = {key: value.clone() for key, value in load_file(folder / file).items()}
    save_file(change(tensors), folder / file)


def swap_gate_and_up(layers: dict[int, FakeLayer]) -> None:
    held = layers[max(layers)].weights
    expert = max(held)
    held[expert] = {**held[expert], "gate": held[expert]["up"], "up": held[expert]["gate"]}

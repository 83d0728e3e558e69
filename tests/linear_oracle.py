"""Weights of single modules, decoded from the formats' own descriptions: no code of the package.

Every formula is that of the README in ``fixtures/checkpoints``; tests compare it with the tools'
own ``reference.safetensors`` first.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the model in ``folder`` by name; other files are no part of it."""
    index = folder / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.exists():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    found = {}
    for file in files:
        with safe_open(folder / file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - a handle is no mapping
    return found


def quantization(folder: Path) -> dict:
    """``quantization_config`` of a checkpoint, as it stands."""
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def modules_of(tensors: dict[str, torch.Tensor]) -> list[str]:
    """Names of the quantized modules, in order."""
    ends = (".qweight", ".weight_packed")
    packed = {n.rpartition(".")[0] for n in tensors if n.endswith(ends)}
    packed |= {
        n.rpartition(".")[0]
        for n, t in tensors.items()
        if n.endswith(".weight") and t.dtype == torch.uint8
    }
    return sorted(packed)


def decode(tensors: dict[str, torch.Tensor], module: str, config: dict) -> torch.Tensor:
    """The weight ``(n, k)`` fp32 of one quantized module."""
    own = {n.rpartition(".")[2]: t for n, t in tensors.items() if n.rpartition(".")[0] == module}
    if "qweight" in own:
        return _awq(own)
    if "weight_packed" in own and own["weight_packed"].dtype == torch.int32:
        return _int4(own)
    codes = own["weight_packed"] if "weight_packed" in own else own["weight"]
    values = torch.tensor([*E2M1, *(-v for v in E2M1)])
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()
    block = own["weight_scale"].view(torch.float8_e4m3fn).float()
    if "weight_global_scale" in own:
        scale = block / own["weight_global_scale"].float().reshape(())
    else:
        scale = block * own["weight_scale_2"].float().reshape(())
    return values[nibbles] * scale.repeat_interleave(16, 1)[:, : nibbles.shape[1]]


def _awq(own: dict[str, torch.Tensor]) -> torch.Tensor:
    def columns(words: torch.Tensor) -> torch.Tensor:
        out = torch.empty((*words.shape, 8), dtype=torch.int32)
        for nibble, column in enumerate(AWQ_ORDER):
            out[..., column] = (words >> (4 * nibble)) & 15
        return out.flatten(1)

    codes, scales = columns(own["qweight"]), own["scales"].float()
    k, groups = codes.shape[0], scales.shape[0]
    zeros = columns(own["qzeros"]) if "qzeros" in own else torch.full_like(scales, 8).int()
    row = torch.arange(k) // (-(-k // groups))
    return ((codes - zeros[row]).float() * scales[row]).t().contiguous()


def _int4(own: dict[str, torch.Tensor]) -> torch.Tensor:
    words, scales = own["weight_packed"], own["weight_scale"].float()
    codes = torch.stack([(words >> (4 * i)) & 15 for i in range(8)], -1).flatten(1)
    zeros = torch.full(scales.shape, 8, dtype=torch.int32)
    if "weight_zero_point" in own:
        packed = own["weight_zero_point"]
        zeros = torch.stack([(packed >> (4 * i)) & 15 for i in range(8)], 1).flatten(0, 1)
    column = torch.arange(codes.shape[1]) // (-(-codes.shape[1] // scales.shape[1]))
    return (codes - zeros[:, column]).float() * scales[:, column]

"""One MoE layer in fp64 from given weights, and the tolerance of docs/routes.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bank_oracle import E2M1, fused_bias_weight, small

import loader
from loader.experts import PreparedExperts
from loader.testing.checkpoint import TinyCheckpoint
from loader.testing.encode import from_bits

TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-5}

Weights = dict[str, torch.Tensor]


def weights_of(
    checkpoint: TinyCheckpoint, expert: int, rounding: str = "exact", layout: str = "compact"
) -> Weights:
    """fp64 weights that a layer is measured by: the checkpoint's own, or those that it rounds to"""
    found = {}
    for name in ("gate", "up", "down"):
        codes = None if checkpoint.plain(0) else checkpoint.codes(0, expert, name)
        if codes is not None and codes.z is not None and rounding == "fused_bias":
            array = fused_bias_weight(checkpoint, 0, expert, name)
        elif codes is not None and codes.z is None and layout == "wide":
            block = from_bits(codes.scale, "F8_E4M3")
            whole = codes.global_scale
            value = block / whole if checkpoint.writer.divisor else block * whole
            held = value.astype(np.float16).astype(np.float32)
            array = E2M1[codes.q] * np.repeat(held, 16, axis=1)
        else:
            array = checkpoint.weight(0, expert, name)
        found[name] = torch.from_numpy(np.asarray(array, np.float64))
    return found


def moe64(
    weights: Mapping[int, Weights], x: torch.Tensor, ids: torch.Tensor, router: torch.Tensor
) -> torch.Tensor:
    """``(T, H) float64``; experts that ``weights`` does not have are skipped."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    for row, position in np.ndindex(*ids.shape):
        expert = int(ids[row, position])
        if expert in weights:
            w, one = weights[expert], x[row].double()
            hidden = torch.nn.functional.silu(w["gate"] @ one) * (w["up"] @ one)
            y[row] += float(router[row, position]) * (w["down"] @ hidden)
    return y


def error_of(y: torch.Tensor, y64: torch.Tensor) -> float:
    """Relative error; NaN where y has one."""
    return float((y.double() - y64).norm() / y64.norm())


def assert_close(y: torch.Tensor, y64: torch.Tensor, dtype: torch.dtype, what: str = "") -> None:
    """That of docs/routes.md; NaN never passes."""
    assert y.shape == y64.shape
    error = error_of(y, y64)
    assert error <= TOLERANCE[dtype], f"{what} {dtype}: {error:.2e}"


def routing(
    tokens: int, experts: int, top_k: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct ids a row, and weights that are no round numbers: ``(T, k)`` int64 and fp32."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator)
    router, ids = scores.topk(top_k, dim=1)
    return ids, torch.softmax(3 * router, dim=1)


def activations(tokens: int, hidden: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """rms 1."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(tokens, hidden, generator=generator).to(dtype)


LAYERS = ["awq-compact", "awq-record", "awq-wide", "ct-nvfp4-compact", "ct-nvfp4-wide", "plain"]


def make(folder: Path, name: str = "awq-compact", **more: Any) -> PreparedExperts:
    """The one layer of a small checkpoint: ``dialect-layout`` (``awq`` is awq-gemm), or plain."""
    shard = more.pop("shard", None)
    if name == "plain":
        checkpoint = small(folder, layers=2, excluded=(0,), **more)
        return loader.load(checkpoint.folder, layers=[0], shard=shard)[0]
    dialect, _, layout = name.rpartition("-")
    checkpoint = small(folder, dialect="awq-gemm" if dialect == "awq" else dialect, **more)
    policy = loader.Policy(layout=layout)
    return loader.load(checkpoint.folder, policy=policy, shard=shard)[0]


def call(module: PreparedExperts, tokens: int = 3, **more: Any) -> torch.Tensor:
    """The layer on bf16 activations that depend on the token count alone."""
    x = activations(tokens, module.hidden_size, torch.bfloat16)
    return module(x, *routing(tokens, 4, 2), **more)


def snapshot(module: PreparedExperts) -> dict[str, Any]:
    """Address, dtype, strides and bytes of every buffer."""
    return {
        name: (t.data_ptr(), t.dtype, t.stride(), t.view(torch.uint8).flatten().tolist())
        for name, t in module.named_buffers()
    }

"""Decode steps of one MoE layer on a card, in CUDA graphs, beside the floor by bytes.

    python benchmarks/cuda_decode.py [--json docs/evidence/decode-h200.json] [--quick]

One graph of at least 32 layer calls on uniform random experts that touch over 200 MB; time divided
by calls, medians of replays; the floor is the bytes of the distinct active experts over 4.29 TB/s.
Every output that is timed is checked against fp64 from the banks first. ``legacy`` stands beside a
bf16 grouped matrix product of the same shape.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import evidence
import torch

from loader import native
from loader.bank import BankSpec, LayerSpec, layer_spec_from_ints, split_banks, unpack_zeros
from loader.table import Table, render

CARD = torch.device("cuda", 0)
FLOOR_BYTES_PER_S = 4.29e12
BOUND = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
WARM_SECONDS = 0.1


@dataclass(frozen=True)
class Geometry:
    """Sizes of a layer, and how many calls one graph holds."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    group: int
    calls: int


GEOMETRIES = (
    Geometry("H4096 I1536 E128 k8", 4096, 1536, 128, 8, 128, 32),
    Geometry("H2048 I768 E128 k8", 2048, 768, 128, 8, 128, 48),
    Geometry("H2560 I160 E512 k10", 2560, 160, 512, 10, 32, 64),
)
FORMATS = (
    ("AWQ compact", "int4", "compact", torch.float16),
    ("AWQ wide", "int4", "wide", torch.float16),
    ("NVFP4 compact", "e2m1", "compact", torch.uint8),
)


class Layer:
    """Banks of random codes with sane scales on the card."""

    def __init__(self, geometry: Geometry, kind: str, layout: str, scales: torch.dtype) -> None:
        group = 16 if kind == "e2m1" else geometry.group
        sense = "multiplier" if kind == "e2m1" else "none"

        def bank(k: int, n: int, projections: int) -> BankSpec:
            return BankSpec(
                kind, layout, geometry.experts, k, n, group, 0, projections, scales, sense
            )

        self.spec = LayerSpec(
            bank(geometry.hidden, 2 * geometry.intermediate, 2),
            bank(geometry.intermediate, geometry.hidden, 1),
        )
        self.tensors = [tensor for one in self.spec.banks for tensor in _random(one)]
        self.map = torch.arange(geometry.experts, dtype=torch.int32, device=CARD)
        self.bytes_each = sum(t.nbytes for t in self.tensors) / geometry.experts

    def weights(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """W13 (H, 2I) and W2 (I, H) of one expert, fp64."""
        parts = split_banks(layer_spec_from_ints(self.spec.to_ints()), self.tensors)
        w13, w2 = (
            _weights64(bank, tensors, expert)
            for bank, tensors in zip(self.spec.banks, parts, strict=True)
        )
        return w13, w2


def _random(bank: BankSpec) -> list[torch.Tensor]:
    tensors = []
    for spec in bank.tensors():
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device=CARD)
        typical = 1.0 / (4.6 * math.sqrt(bank.k))
        if spec.name == "weight":
            tensor.random_(-(2**31), 2**31)
        elif spec.name == "scales" and bank.kind == "int4":
            tensor.copy_((torch.rand(spec.shape, device=CARD) + 0.5) * typical)
        elif spec.name == "scales":
            tensor.random_(0x20, 0x50)
        elif spec.name == "globals":
            tensor.fill_(typical * 1.4)
        elif spec.name == "zeros":
            tensor.random_(0, 256)
        else:
            scale = ((torch.rand(spec.shape, device=CARD) + 0.5) * typical).half()
            zero = torch.randint(0, 16, spec.shape, device=CARD)
            halves = torch.stack((scale, (-zero * scale.float()).half()), dim=-1)
            tensor.copy_(halves.view(torch.int32).squeeze(-1))
        tensors.append(tensor)
    return tensors


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


def _weights64(bank: BankSpec, tensors: dict[str, torch.Tensor], expert: int) -> torch.Tensor:
    words = tensors["weight"][expert]
    codes = torch.stack([words >> (4 * p) & 15 for p in _NIBBLES], 2)
    codes = codes.permute(1, 2, 0, 3).reshape(words.shape[1] * 8, -1)[: bank.k, : bank.n].long()
    group = torch.arange(bank.k, device=CARD) // bank.group
    if bank.kind == "e2m1":
        table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=CARD).double()
        scale = tensors["scales"][expert].view(torch.float8_e4m3fn).double()
        whole = tensors["globals"][expert].double().repeat(bank.columns)
        return table[codes] * scale[group][:, : bank.n] * whole
    if bank.layout == "compact":
        scale = tensors["scales"][expert].double()
        zero = unpack_zeros(tensors["zeros"][expert]).double()
    else:
        halves = tensors["metadata"][expert].view(torch.float16)
        halves = halves.view(*tensors["metadata"][expert].shape, 2).double()
        scale, zero = halves[..., 0], torch.round(-halves[..., 1] / halves[..., 0])
    return (codes - zero[group][:, : bank.n]) * scale[group][:, : bank.n]


def moe64(layer: Layer, x: torch.Tensor, ids: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    """The layer in fp64, expert by expert."""
    y = torch.zeros(x.shape, dtype=torch.float64, device=CARD)
    for expert in ids.unique().tolist():
        rows, places = (ids == expert).nonzero(as_tuple=True)
        w13, w2 = layer.weights(expert)
        both = x[rows].double() @ w13
        hidden = torch.nn.functional.silu(both[:, 0::2]) * both[:, 1::2]
        y.index_add_(0, rows, router[rows, places].double()[:, None] * (hidden @ w2))
    return y


def replay_us(run: Callable[[], None], calls: int, rounds: int = 15) -> float:
    """Median microseconds of one of ``calls`` calls that ``run`` enqueues, in a graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return timed_us(graph.replay, rounds) / calls


def timed_us(run: Callable[[], None], rounds: int) -> float:
    """Median microseconds by events, after a warm-up."""
    started = time.perf_counter()
    while time.perf_counter() - started < WARM_SECONDS:
        run()
        torch.cuda.synchronize()
    times = []
    for _ in range(rounds):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) * 1e3)
    return median(times)


def steps(
    layer: Layer, geometry: Geometry, tokens: int, dtype: torch.dtype, fast: bool = True
) -> dict[str, Any]:
    """One row: microseconds a layer call, the floor, the rate, the error."""
    generator = torch.Generator(device=CARD).manual_seed(tokens)
    scores = [
        torch.rand((tokens, geometry.experts), device=CARD, generator=generator)
        for _ in range(geometry.calls if fast else 1)
    ]
    ids = [score.topk(geometry.top_k, 1).indices for score in scores]
    x = torch.randn((tokens, geometry.hidden), device=CARD, generator=generator).to(dtype)
    router = torch.softmax(torch.randn((tokens, geometry.top_k), device=CARD), 1)
    outs = [torch.full_like(x, float("nan")) for _ in ids]
    code = native.implementation_for(CARD)
    assert code is not None
    nbytes = code.scratch_bytes([layer.spec], tokens if fast else 1, geometry.top_k)
    scratch = torch.full((nbytes // 4,), float("nan"), device=CARD)
    numbers, routes = layer.spec.to_ints(), [1, tokens] if fast else [0, 0]

    def run() -> None:
        for chosen, out in zip(ids, outs, strict=True):
            native.moe(out, scratch, x, chosen, router, layer.map, layer.tensors, numbers, routes)

    us = replay_us(run, len(ids)) if fast else timed_us(run, 3)
    error = max(
        float((outs[i].double() - wanted).norm() / wanted.norm())
        for i in {0, len(ids) - 1}
        for wanted in [moe64(layer, x, ids[i], router)]
    )
    if not error <= BOUND[dtype]:
        raise RuntimeError(f"T={tokens} {dtype}: relative error {error}")
    active = sum(len(chosen.unique()) for chosen in ids) / len(ids)
    moved = active * layer.bytes_each
    return {
        "tokens": tokens,
        "dtype": str(dtype).removeprefix("torch."),
        "route": ("qpn_m1" if tokens == 1 else "qpn_grouped") if fast else "legacy",
        "experts": round(active, 2),
        "us": round(us, 2),
        "floor_us": round(moved / FLOOR_BYTES_PER_S * 1e6, 2),
        "tb_per_s": round(moved / us / 1e6, 3),
        "error": error,
    }


def grouped_product_us(geometry: Geometry, tokens: int) -> float:
    """bf16 grouped matrix products of the same shape (W13, SwiGLU, W2), rows already sorted."""
    rows, width = tokens * geometry.top_k, geometry.intermediate
    x = torch.randn((rows, geometry.hidden), device=CARD).bfloat16()
    w13 = torch.randn((geometry.experts, 2 * width, geometry.hidden), device=CARD).bfloat16()
    w2 = torch.randn((geometry.experts, geometry.hidden, width), device=CARD).bfloat16()
    ends = torch.linspace(0, rows, geometry.experts + 1, device=CARD)[1:].to(torch.int32)

    def run() -> None:
        both = torch._grouped_mm(x, w13.transpose(1, 2), offs=ends)
        hidden = torch.nn.functional.silu(both[:, :width]) * both[:, width:]
        torch._grouped_mm(hidden, w2.transpose(1, 2), offs=ends)

    return timed_us(run, 5)


def measure(quick: bool) -> list[dict[str, Any]]:
    """All rows."""
    rows = []
    for geometry in GEOMETRIES:
        for name, kind, layout, scales in FORMATS:
            layer = Layer(geometry, kind, layout, scales)
            counts = (1, 8) if quick or layout == "wide" else (1, 2, 4, 8, 16, 32, 64)
            dtypes = (torch.float16, torch.bfloat16) if layout == "compact" else (torch.float16,)
            for dtype in dtypes:
                for tokens in counts:
                    row = steps(layer, geometry, tokens, dtype)
                    rows.append({"geometry": geometry.name, "format": name, **row})
            if name == "AWQ compact" and not quick:
                for tokens in (512, 4096):
                    row = steps(layer, geometry, tokens, torch.bfloat16, fast=False)
                    row["bf16_grouped_us"] = round(grouped_product_us(geometry, tokens), 1)
                    rows.append({"geometry": geometry.name, "format": name, **row})
            del layer
            torch.cuda.empty_cache()
    return rows


def as_text(rows: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    columns = ["geometry", "format", "dtype", "T", "route", "us", "floor", "ratio", "TB/s", "error"]
    cells = [
        (
            row["geometry"],
            row["format"],
            row["dtype"],
            row["tokens"],
            row["route"],
            f"{row['us']:.2f}",
            f"{row['floor_us']:.2f}",
            f"{row['us'] / row['floor_us']:.2f}",
            f"{row['tb_per_s']:.2f}",
            f"{row['error']:.1e}",
        )
        for row in rows
    ]
    title = f"One MoE layer on {torch.cuda.get_device_name(0)}"
    return render(Table(title, columns, cells, ("geometry", "format", "dtype", "route")))


def main() -> None:
    """Measure, print a table, write evidence."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if native.implementation_for(CARD) is None:
        raise SystemExit(native.why_nothing_serves(CARD))
    rows = measure(options.quick)
    if options.json:
        evidence.write(options.json, "decode", rows)
    print(as_text(rows))


if __name__ == "__main__":
    main()

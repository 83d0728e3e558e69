"""Decode steps of one MoE layer on the CPU, straight from the banks.

    python benchmarks/decode.py [--json FILE]

H=4096, I=1536, k=8, bf16, rotating over enough experts to leave the caches. Beside the routes: the
machine's own read rate (a multi-threaded sum over as many bytes), PyTorch's int4 operator for the
CPU on matrices of the same sizes, and dequantize + matmul. Bytes are bank bytes of the distinct
active experts. Medians; all in one run; every output is checked before its time counts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from loader.bank import BankSpec, LayerSpec
from loader.converter import LayerBanks
from loader.core import CORE, Core
from loader.reference import routes
from loader.table import Table, render
from loader.workspace import Workspace

HIDDEN, INTERMEDIATE, TOP_K, EXPERTS = 4096, 1536, 8, 64
ROUNDS = 12
FORMATS = {
    "AWQ g128 compact": ("int4", "compact", 128, torch.float16),
    "AWQ g128 wide": ("int4", "wide", 128, torch.float16),
    "AWQ g32 compact": ("int4", "compact", 32, torch.float16),
    "NVFP4 compact": ("e2m1", "compact", 16, torch.uint8),
}


def build(kind: str, layout: str, group: int, dtype: torch.dtype) -> LayerBanks:
    """Banks of random codes with sane scales."""

    def bank(k: int, n: int, projections: int) -> BankSpec:
        sense = "multiplier" if kind == "e2m1" else "none"
        return BankSpec(kind, layout, EXPERTS, k, n, group, 0, projections, dtype, sense)

    spec = LayerSpec(bank(HIDDEN, 2 * INTERMEDIATE, 2), bank(INTERMEDIATE, HIDDEN, 1))
    banks = LayerBanks.allocate(spec, torch.device("cpu"), 8)
    names = [tensor.name for one in spec.banks for tensor in one.tensors()]
    for name, tensor in zip(names, banks.tensors, strict=True):
        if name == "weight":
            tensor.random_()
        elif name == "scales" and kind == "int4":
            tensor.copy_(torch.rand(tensor.shape) * 0.01 + 0.005)
        elif name == "scales":
            tensor.random_(32, 80)
        elif name == "globals":
            tensor.fill_(0.01)
        elif name == "metadata":
            scale = (torch.rand(tensor.shape) * 0.01 + 0.005).half()
            bias = (-8 * scale.float()).half()
            halves = torch.stack((scale, bias), dim=-1)
            tensor.copy_(halves.view(torch.int32).squeeze(-1))
    return banks


def read_rate(nbytes: int) -> float:
    """GB/s of a multi-threaded sum over so many bytes."""
    data = torch.ones(nbytes // 8, dtype=torch.int64)
    return nbytes / median(timed(lambda: data.sum(), 5)) / 1e9


def timed(run: Callable[[], Any], rounds: int) -> list[float]:
    """Seconds of each round, after one that warms up."""
    run()
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return seconds


def step_seconds(core: Core, banks: LayerBanks, tokens: int, same: bool) -> tuple[float, int]:
    """Median seconds of a step and its distinct experts; ids rotate over all experts."""
    spec = banks.spec
    workspace = Workspace(
        core.moe_scratch_bytes(spec.to_ints(), tokens, TOP_K),
        range(EXPERTS),
        EXPERTS,
        torch.device("cpu"),
    )
    x = torch.randn(tokens, HIDDEN).bfloat16()
    weights = torch.rand(tokens, TOP_K)
    out = torch.empty_like(x)
    turn = 0

    def ids() -> torch.Tensor:
        nonlocal turn
        turn += 1
        rows = TOP_K if same else tokens * TOP_K
        chosen = (torch.arange(rows) + turn * rows) % EXPERTS
        return chosen.expand(tokens, TOP_K).contiguous() if same else chosen.view(tokens, TOP_K)

    def run(chosen: torch.Tensor) -> None:
        core.moe(
            out,
            workspace.scratch,
            x,
            chosen,
            weights,
            workspace.expert_map,
            banks.tensors,
            spec.to_ints(),
        )

    chosen = ids()
    run(chosen)
    wanted = torch.empty_like(x)
    scratch = torch.empty(4 << 20)
    routes.moe(
        wanted,
        scratch,
        x,
        chosen,
        weights,
        workspace.expert_map,
        banks.tensors,
        spec.to_ints(),
        [0, 0],
    )
    error = ((out.float() - wanted.float()).norm() / wanted.float().norm()).item()
    if not error < 1.6e-2:
        raise RuntimeError(f"the step is wrong: relative error {error}")
    seconds = []
    for _ in range(ROUNDS):
        chosen = ids()
        started = time.perf_counter()
        run(chosen)
        seconds.append(time.perf_counter() - started)
    return median(seconds), len(chosen.unique())


def int4_operator_seconds() -> float:
    """PyTorch's int4 matrix product for the CPU on the matrices of one token's eight experts."""
    experts = []
    for _ in range(EXPERTS // 2):
        pair = []
        for n, k in ((2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)):
            packed = torch.randint(0, 255, (n, k // 2), dtype=torch.uint8)
            scales = torch.rand(k // 128, n, 2).bfloat16()
            pair.append((packed, scales))
        experts.append(pair)
    turn = 0

    def run() -> None:
        nonlocal turn
        for _ in range(TOP_K):
            (p13, s13), (p2, s2) = experts[turn % len(experts)]
            turn += 1
            x = torch.ones(1, HIDDEN, dtype=torch.bfloat16)
            both = torch.ops.aten._weight_int4pack_mm_for_cpu(x, p13, 128, s13)
            gate, up = both[:, 0::2], both[:, 1::2]
            hidden = torch.nn.functional.silu(gate) * up
            torch.ops.aten._weight_int4pack_mm_for_cpu(hidden, p2, 128, s2)

    return median(timed(run, ROUNDS))


def dequantize_seconds(core: Core, banks: LayerBanks) -> float:
    """Dequantize + matmul of one token's eight experts: what ``legacy`` does."""
    from loader.host import HostRoutes

    scratch = torch.empty(4 << 20)
    x = torch.randn(1, HIDDEN).bfloat16()
    out = torch.empty_like(x)
    ids, weights = torch.arange(TOP_K).view(1, TOP_K), torch.rand(1, TOP_K)
    expert_map = torch.arange(EXPERTS, dtype=torch.int32)
    host, numbers = HostRoutes(core), banks.spec.to_ints()

    def run() -> None:
        host.moe(out, scratch, x, ids, weights, expert_map, banks.tensors, numbers, [0, 0])

    return median(timed(run, 3))


def as_text(results: list[dict[str, Any]], threads: int) -> str:
    """The results as a table."""
    rows = [
        (
            r["format"],
            r["isa"],
            r["tokens"],
            r["experts"],
            f"{r['ms']:.2f}",
            f"{r['gb_per_s']:.2f}",
            f"{r['read_gb_per_s']:.2f}",
            f"{r['gb_per_s'] / r['read_gb_per_s']:.2f}",
        )
        for r in results
    ]
    columns = ["format", "code", "tokens", "experts", "ms", "GB/s", "read GB/s", "ratio"]
    sizes = f"H={HIDDEN} I={INTERMEDIATE} k={TOP_K}"
    title = f"Steps of {sizes} bf16, {threads} threads, median of {ROUNDS}"
    return render(Table(title, columns, rows, ("format", "code")))


def main() -> None:
    """Measure, print tables and JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if CORE is None:
        raise SystemExit("the native core was not built")
    core = CORE
    torch.set_num_threads(core.threads)
    results: list[dict[str, Any]] = []
    for name, settings in FORMATS.items():
        banks = build(*settings)
        each = banks.spec.nbytes() / EXPERTS
        rate = read_rate(banks.spec.nbytes())
        for isa in range(1, core.best_isa + 1):
            core.isa = isa
            for tokens, same in ((1, False), (8, False), (8, True)):
                seconds, experts = step_seconds(core, banks, tokens, same)
                results.append(
                    {
                        "format": name,
                        "isa": core.isa_name(),
                        "tokens": tokens,
                        "experts": experts,
                        "ms": seconds * 1e3,
                        "gb_per_s": experts * each / seconds / 1e9,
                        "read_gb_per_s": rate,
                    }
                )
        if name.startswith("AWQ g128 compact"):
            for peer, seconds in (
                ("PyTorch int4 operator", int4_operator_seconds()),
                ("dequantize + matmul", dequantize_seconds(core, banks)),
            ):
                results.append(
                    {
                        "format": peer,
                        "isa": "-",
                        "tokens": 1,
                        "experts": TOP_K,
                        "ms": seconds * 1e3,
                        "gb_per_s": TOP_K * each / seconds / 1e9,
                        "read_gb_per_s": rate,
                    }
                )
        del banks
    print(as_text(results, core.threads))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

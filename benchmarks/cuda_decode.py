"""Decode steps of one MoE layer on a card, in CUDA graphs, beside the floor by bytes and peers.

    python benchmarks/cuda_decode.py [--json docs/evidence/decode-h200.json] [--quick]
        [--marlin _moe_C.abi3.so] [--vllm site-packages/vllm]

One graph of at least 32 layer calls on uniform random experts that touch over 200 MB; time divided
by calls, medians of replays; the floor is the bytes of the distinct active experts over 4.29 TB/s.
Every output that is timed is checked against fp64 from the banks. ``legacy`` stands beside a bf16
grouped matrix product of the same shape. Peers (``peers.py``) run from an installation of vLLM;
where there is none they are absent, and the output says so.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import evidence
import torch
from decode_layer import CARD, Geometry, Layer, moe64
from marlin_peer import Marlin
from peers import Absent, Peer, Prepared
from triton_peer import Triton

from loader import native
from loader.cuda_legacy import LEGACY_CAPTURED_TOKENS
from loader.table import Table, render

FLOOR_BYTES_PER_S = 4.29e12
BOUND = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
PEER_BOUND = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Peers round more often: router weights into results, partial sums."""
WARM_SECONDS = 0.05

GEOMETRIES = (
    Geometry("H4096 I1536 E128 k8", 4096, 1536, 128, 8, 128, 32),
    Geometry("H2048 I768 E128 k8", 2048, 768, 128, 8, 128, 48),
    Geometry("H2560 I160 E512 k10", 2560, 160, 512, 10, 32, 64),
    Geometry("H2560 I640 E512 k10", 2560, 640, 512, 10, 32, 32),
)
FORMATS = (
    ("AWQ compact", "int4", "compact", torch.float16),
    ("AWQ wide", "int4", "wide", torch.float16),
    ("NVFP4 compact", "e2m1", "compact", torch.uint8),
)
MANY_TOKENS = (1, 2, 4, 8, 16, 32, 64)
LEGACY_TOKENS = (512, 4096)


@dataclass(frozen=True)
class Inputs:
    """Inputs of the calls of one graph: each its own ids and its own poisoned output."""

    x: torch.Tensor
    router: torch.Tensor
    ids: list[torch.Tensor]
    outs: list[torch.Tensor]

    @staticmethod
    def of(geometry: Geometry, tokens: int, dtype: torch.dtype, calls: int) -> Inputs:
        """Uniform random: the same for every implementation of one cell."""
        generator = torch.Generator(device=CARD).manual_seed(tokens)

        def random(make: Callable[..., torch.Tensor], width: int) -> torch.Tensor:
            return make((tokens, width), device=CARD, generator=generator)

        ids = [
            random(torch.rand, geometry.experts).topk(geometry.top_k, 1).indices
            for _ in range(calls)
        ]
        x = random(torch.randn, geometry.hidden).to(dtype)
        router = torch.softmax(random(torch.randn, geometry.top_k), 1)
        return Inputs(x, router, ids, [torch.full_like(x, float("nan")) for _ in ids])

    def error(self, layer: Layer, bound: float) -> float:
        """Relative error of the first and the last output. Raises where it is beyond the bound."""
        error = max(
            float((self.outs[i].double() - wanted).norm() / wanted.norm())
            for i in {0, len(self.ids) - 1}
            for wanted in [moe64(layer, self.x, self.ids[i], self.router)]
        )
        if not error <= bound:
            raise RuntimeError(f"T={len(self.x)} {self.x.dtype}: relative error {error}")
        return error


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


def row_of(layer: Layer, inputs: Inputs, name: str, route: str, us: float) -> dict[str, Any]:
    """One row: what ran, microseconds a layer call, the floor, the rate."""
    moved = sum(len(chosen.unique()) for chosen in inputs.ids) / len(inputs.ids)
    moved *= layer.bytes_each
    return {
        "geometry": layer.geometry.name,
        "format": name,
        "tokens": len(inputs.x),
        "dtype": str(inputs.x.dtype).removeprefix("torch."),
        "route": route,
        "experts": round(moved / layer.bytes_each, 2),
        "us": round(us, 2),
        "floor_us": round(moved / FLOOR_BYTES_PER_S * 1e6, 2),
        "tb_per_s": round(moved / us / 1e6, 3),
    }


def ours(layer: Layer, inputs: Inputs, routes: list[int]) -> Callable[[], None]:
    """What enqueues the calls of one graph by the operator."""
    code = native.implementation_for(CARD)
    assert code is not None
    tokens, top_k = inputs.router.shape
    nbytes = code.scratch_bytes([layer.spec], tokens if routes[1] else 1, top_k)
    scratch = torch.full((nbytes // 4,), float("nan"), device=CARD)
    numbers = layer.spec.to_ints()

    def run() -> None:
        for ids, out in zip(inputs.ids, inputs.outs, strict=True):
            native.moe(
                out,
                scratch,
                inputs.x,
                ids,
                inputs.router,
                layer.map,
                layer.tensors,
                numbers,
                routes,
            )

    return run


def fast(layer: Layer, name: str, tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    """A decode step by our kernels."""
    inputs = Inputs.of(layer.geometry, tokens, dtype, layer.geometry.calls)
    us = replay_us(ours(layer, inputs, [1, tokens]), len(inputs.ids))
    route = "qpn_m1" if tokens == 1 else "qpn_grouped"
    row = row_of(layer, inputs, name, route, us)
    return {**row, "error": inputs.error(layer, BOUND[dtype])}


def legacy(layer: Layer, name: str, tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    """One step of ``legacy``; up to the limit of a capture, in a graph too."""
    inputs = Inputs.of(layer.geometry, tokens, dtype, 1)
    run = ours(layer, inputs, [0, 0])
    row = row_of(layer, inputs, name, "legacy", timed_us(run, 5))
    row["error"] = inputs.error(layer, BOUND[dtype])
    if tokens <= LEGACY_CAPTURED_TOKENS:
        inputs.outs[0].fill_(float("nan"))
        row["captured_us"] = round(replay_us(run, 1, 5), 2)
        row["captured_error"] = inputs.error(layer, BOUND[dtype])
    row["bf16_grouped_us"] = round(grouped_product_us(layer.geometry, tokens), 1)
    return row


def beside(
    peer: Prepared, layer: Layer, name: str, tokens: int, dtype: torch.dtype
) -> dict[str, Any]:
    """The same decode step by a peer: rows are sorted for it before the clock runs."""
    inputs = Inputs.of(layer.geometry, tokens, dtype, layer.geometry.calls)
    router = inputs.router.float()
    rows = [peer.rows(ids) for ids in inputs.ids]

    def run() -> None:
        for out, own in zip(inputs.outs, rows, strict=True):
            peer.run(out, inputs.x, router, own)

    us = replay_us(run, len(inputs.ids))
    row = row_of(layer, inputs, "int4", name, us)
    return {**row, "error": inputs.error(layer, PEER_BOUND[dtype])}


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


def measure_peer(peer: Peer, layer: Layer) -> Iterator[dict[str, Any]]:
    """Rows of a peer at one geometry; a cell that it cannot run, or gets wrong, says why."""
    cell: dict[str, Any] = {"geometry": layer.geometry.name, "format": "int4", "route": peer.name}
    try:
        prepared = peer.prepare(layer)
        for dtype, tokens in product((torch.float16, torch.bfloat16), (1, 8)):
            cell = {**cell, "tokens": tokens, "dtype": str(dtype).removeprefix("torch.")}
            yield beside(prepared, layer, peer.name, tokens, dtype)
    except (Absent, RuntimeError) as error:
        yield {**cell, "absent": str(error).split("\n")[0]}


def measure(quick: bool) -> Iterator[dict[str, Any]]:
    """Rows of our kernels."""
    for geometry, (name, kind, layout, scales) in product(GEOMETRIES, FORMATS):
        whole = geometry is not GEOMETRIES[-1]
        if not whole and name != "AWQ compact":
            continue
        layer = Layer(geometry, kind, layout, scales)
        counts = (1, 8) if quick or layout == "wide" or not whole else MANY_TOKENS
        dtypes = (torch.float16, torch.bfloat16) if layout == "compact" else (torch.float16,)
        for dtype, tokens in product(dtypes, counts):
            yield fast(layer, name, tokens, dtype)
        if name == "AWQ compact" and not quick:
            for dtype, tokens in product(dtypes, LEGACY_TOKENS):
                yield legacy(layer, name, tokens, dtype)
        del layer
        torch.cuda.empty_cache()


def measure_peers(peers: Sequence[Peer]) -> Iterator[dict[str, Any]]:
    """Rows of the peers, after ours: what breaks the card here has cost none of them."""
    for geometry, peer in product(GEOMETRIES, peers):
        yield from measure_peer(peer, Layer(geometry, "int4", "compact", torch.float16))
        torch.cuda.empty_cache()


def peers_of(options: argparse.Namespace) -> tuple[list[Peer], dict[str, str]]:
    """The peers that are there, and of each whether it is, or why not."""
    found: list[Peer] = []
    said = {}
    for make, path in ((Marlin, options.marlin), (Triton, options.vllm)):
        try:
            found.append(make(path))
            said[make.name] = "present"
        except Absent as error:
            said[make.name] = f"absent: {error}"
    return found, said


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
        if "absent" not in row
    ]
    title = f"One MoE layer on {torch.cuda.get_device_name(0)}"
    text = render(Table(title, columns, cells, ("geometry", "format", "dtype", "route")))
    lines = [
        f"{row['geometry']} {row['dtype']} T={row['tokens']}: legacy {row['us'] / 1e3:.2f} ms, "
        f"a bf16 grouped product {row['bf16_grouped_us'] / 1e3:.2f} ms"
        + (f", in a graph {row['captured_us'] / 1e3:.2f} ms" if "captured_us" in row else "")
        for row in rows
        if "bf16_grouped_us" in row
    ]
    lines += [
        f"{row['geometry']} {row['route']}: absent: {row['absent']}"
        for row in rows
        if "absent" in row
    ]
    return "\n".join([text, *lines])


def main() -> None:
    """Measure, print a table, write evidence."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--marlin", type=Path, help="vLLM's compiled _moe_C library")
    parser.add_argument("--vllm", type=Path, help="the folder vllm of an installation")
    options = parser.parse_args()
    if native.implementation_for(CARD) is None:
        raise SystemExit(native.why_nothing_serves(CARD))
    peers, said = peers_of(options)
    rows: list[dict[str, Any]] = []
    for some in (measure(options.quick), measure_peers(peers)):
        rows += some
        if options.json:
            evidence.write(options.json, "decode", {"peers": said, "rows": rows})
        print(as_text(rows), flush=True)
    for name, what in said.items():
        print(f"{name}: {what}")


if __name__ == "__main__":
    main()

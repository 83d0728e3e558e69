"""``qpn_grouped`` and ``legacy`` side by side on a card, and the rows of the crossover table.

    python benchmarks/cuda_crossover.py [--json FILE] [--seconds 0.1]

Three geometries, int4 and NVFP4 codes, bf16 activations (fp16 before SM80), T = 1 to 512 in powers
of two, every step on experts of its own, chosen uniformly. Both routes are timed alike: a burst of
steps as a server would enqueue them, from event to event; medians, in microseconds a step. The two
outputs are compared before any time counts. The last lines are rows for
``loader/crossover_table.py``. Under 40 seconds.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import median

import evidence
import torch
from cuda_decode import FORMATS, GEOMETRIES
from decode_layer import CARD, Geometry, Layer

from loader import native
from loader.card import card_facts
from loader.crossover_table import KnownCrossover
from loader.table import Table, render

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SETS = 4
"""Steps of a burst, each with experts of its own."""

AGREE = {torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Most that the outputs of two routes may differ, relative: twice the bound of each, and a bit."""


@dataclass(frozen=True)
class Pair:
    """What one token count took under both routes, in microseconds a step."""

    geometry: str
    kind: str
    tokens: int
    rows_per_expert: float
    grouped_us: float
    legacy_us: float
    error: float


class Bursts:
    """Steps of one layer at one token count."""

    def __init__(
        self,
        layer: Layer,
        geometry: Geometry,
        tokens: int,
        dtype: torch.dtype,
        scratch: torch.Tensor,
    ) -> None:
        generator = torch.Generator(device=CARD).manual_seed(tokens)
        shape = (tokens, geometry.experts)
        scores = [torch.rand(shape, device=CARD, generator=generator) for _ in range(SETS)]
        self._ids = [score.topk(geometry.top_k, 1).indices for score in scores]
        self._x = torch.randn((tokens, geometry.hidden), device=CARD, generator=generator).to(dtype)
        self._router = torch.softmax(torch.randn((tokens, geometry.top_k), device=CARD), 1)
        self._layer, self._scratch = layer, scratch
        self._numbers = layer.spec.to_ints()
        self.outs = [torch.full_like(self._x, float("nan")) for _ in self._ids]

    def run(self, routes: list[int]) -> None:
        """Enqueue one burst."""
        layer = self._layer
        for ids, out in zip(self._ids, self.outs, strict=True):
            native.moe(
                out, self._scratch, self._x, ids, self._router, layer.map, layer.tensors,
                self._numbers, routes,
            )  # fmt: skip

    def us(self, routes: list[int], seconds: float) -> float:
        """Median microseconds of a step: of all bursts within ``seconds``, of one at least."""
        times: list[float] = []
        until = time.perf_counter() + seconds
        while not times or time.perf_counter() < until:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            self.run(routes)
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) * 1e3 / SETS)
        return median(times)


def pair(bursts: Bursts, tokens: int, geometry: Geometry, kind: str, seconds: float) -> Pair:
    """Both routes at one token count. Raises RuntimeError where their outputs do not agree."""
    grouped, legacy = [1, tokens], [0, 0]
    bursts.run(legacy)
    wanted = [out.double() for out in bursts.outs]
    bursts.run(grouped)
    error = max(
        float((out.double() - y).norm() / y.norm())
        for out, y in zip(bursts.outs, wanted, strict=True)
    )
    most = AGREE[bursts.outs[0].dtype]
    if not error <= most:
        raise RuntimeError(f"{geometry.name} {kind} T={tokens}: the routes differ by {error:.1e}")
    return Pair(
        geometry.name,
        kind,
        tokens,
        tokens * geometry.top_k / geometry.experts,
        bursts.us(grouped, seconds),
        bursts.us(legacy, seconds),
        error,
    )


def measure(seconds: float) -> list[Pair]:
    """All pairs: every geometry, every kind of codes, every token count."""
    code = native.implementation_for(CARD)
    assert code is not None
    dtype = torch.bfloat16 if torch.bfloat16 in code.dtypes else torch.float16
    pairs = []
    for geometry in GEOMETRIES[:3]:
        for _, kind, layout, scales in FORMATS:
            if layout != "compact":
                continue
            layer = Layer(geometry, kind, layout, scales)
            nbytes = code.scratch_bytes([layer.spec], max(TOKENS), geometry.top_k)
            scratch = torch.empty(nbytes // 4, device=CARD)
            for tokens in TOKENS:
                bursts = Bursts(layer, geometry, tokens, dtype, scratch)
                pairs.append(pair(bursts, tokens, geometry, kind, seconds))
            del layer, bursts, scratch
            torch.cuda.empty_cache()
    return pairs


def table_rows(pairs: list[Pair], architecture: int, measured_on: str) -> list[KnownCrossover]:
    """For each kind of codes the row that holds for every geometry that was measured."""
    rows = []
    for kind in dict.fromkeys(pair.kind for pair in pairs):
        own = [pair for pair in pairs if pair.kind == kind and pair.tokens > 1]
        lost = [pair.rows_per_expert for pair in own if pair.grouped_us > pair.legacy_us]
        won = [pair for pair in own if pair.rows_per_expert < min(lost, default=float("inf"))]
        most = max((pair.rows_per_expert for pair in won), default=0.0)
        rows.append(KnownCrossover(architecture, kind, most, max(TOKENS), measured_on))
    return rows


def as_text(pairs: list[Pair], name: str) -> str:
    """The pairs as a table."""
    columns = ["geometry", "codes", "T", "rows", "grouped", "legacy", "legacy/grouped", "differ"]
    cells = [
        (
            one.geometry,
            one.kind,
            one.tokens,
            f"{one.rows_per_expert:.2f}",
            f"{one.grouped_us:.1f}",
            f"{one.legacy_us:.1f}",
            f"{one.legacy_us / one.grouped_us:.2f}",
            f"{one.error:.0e}",
        )
        for one in pairs
    ]
    return render(Table(f"Microseconds a step on {name}", columns, cells, ("geometry", "codes")))


def main() -> None:
    """Measure, print the table and its rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=0.1, help="for each median")
    options = parser.parse_args()
    if native.implementation_for(CARD) is None:
        raise SystemExit(native.why_nothing_serves(CARD))
    facts = card_facts(CARD)
    pairs = measure(options.seconds)
    if options.json:
        evidence.write(options.json, "crossover", [asdict(one) for one in pairs])
    print(as_text(pairs, facts.name))
    print("\nRows of loader/crossover_table.py:")
    measured_on = f"{facts.name}, {datetime.now(timezone.utc):%Y-%m-%d}"
    for row in table_rows(pairs, facts.architecture, measured_on):
        print(f"    {row},")


if __name__ == "__main__":
    main()

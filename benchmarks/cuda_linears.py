"""4-bit linears on a card: straight from the bank, unpacked, and PyTorch's bf16 linear.

    python benchmarks/cuda_linears.py [--json FILE]

int4 and NVFP4 codes, bf16 activations; each step multiplies by weights of its own, so that no cache
holds them; in a CUDA graph, medians in microseconds a step. The floor is the bytes of one bank over
4.29 TB/s. Outputs are checked against fp64 first.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import evidence
import torch
from cuda_decode import BOUND, FLOOR_BYTES_PER_S, replay_us
from decode_layer import CARD, Geometry, Layer

from loader import native
from loader.bank import ABSENT, LayerSpec
from loader.table import Table, render

SIZES = ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336))
TOKENS = (1, 8, 16, 32, 64, 128)
KINDS = (("int4", torch.float16), ("e2m1", torch.uint8))
ROTATED_BYTES = 256 << 20
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Row:
    """One linear at one token count, in microseconds."""

    n: int
    k: int
    kind: str
    tokens: int
    fast_us: float
    unpacked_us: float
    bf16_us: float
    floor_us: float
    error: float


class Linears:
    """Linears of one size with random numbers: the W2 of each expert of a layer."""

    def __init__(self, n: int, k: int, kind: str, scales: torch.dtype) -> None:
        count = max(4, ROTATED_BYTES // (n * k // 2))
        self.layer = Layer(Geometry("", n, k, count, 1, 128, 1), kind, "compact", scales)
        one = self.layer.spec.w2
        self.spec = LayerSpec(ABSENT, replace(one, experts=1))
        own = self.layer.tensors[len(self.layer.spec.w13.tensors()) :]
        # Each on a boundary of its own, as a loaded bank is.
        self.banks = [[tensor[i : i + 1].clone() for tensor in own] for i in range(count)]
        self.nbytes = sum(tensor.nbytes for tensor in self.banks[0])
        code = native.implementation_for(CARD)
        assert code is not None and code.linear_scratch_bytes is not None
        nbytes = code.linear_scratch_bytes(self.spec.to_ints(), 8)
        self.scratch = torch.empty(nbytes // 4, device=CARD)

    def us(self, x: torch.Tensor, routes: list[int]) -> tuple[float, float]:
        """Microseconds of a step, and the relative error of one."""
        numbers = self.spec.to_ints()
        outs = [x.new_empty((len(x), self.spec.w2.n)).fill_(float("nan")) for _ in self.banks]

        def run() -> None:
            for out, bank in zip(outs, self.banks, strict=True):
                native.linear(out, self.scratch, x, None, bank, numbers, routes)

        us = replay_us(run, len(self.banks))
        last = len(self.banks) - 1
        wanted = x.double() @ self.layer.weights(last)[1]
        error = float((outs[last].double() - wanted).norm() / wanted.norm())
        if not error <= BOUND[DTYPE]:
            raise RuntimeError(f"T={len(x)} {self.spec.w2.kind} {routes}: relative error {error}")
        return us, error


def bf16_us(n: int, k: int, x: torch.Tensor) -> float:
    """PyTorch's linear with bf16 weights."""
    count = max(4, ROTATED_BYTES // (2 * n * k))
    weights = torch.randn((count, n, k), device=CARD, dtype=DTYPE)

    def run() -> None:
        for weight in weights:
            torch.nn.functional.linear(x, weight)

    return replay_us(run, count)


def measure() -> list[Row]:
    """All rows."""
    rows = []
    for n, k in SIZES:
        plain: dict[int, float] = {}
        for kind, scales in KINDS:
            linears = Linears(n, k, kind, scales)
            for tokens in TOKENS:
                x = torch.randn((tokens, k), device=CARD).to(DTYPE)
                fast, error = linears.us(x, [1, tokens])
                unpacked, other = linears.us(x, [0, 0])
                plain.setdefault(tokens, bf16_us(n, k, x))
                floor = linears.nbytes / FLOOR_BYTES_PER_S * 1e6
                rows.append(
                    Row(n, k, kind, tokens, fast, unpacked, plain[tokens], floor, max(error, other))
                )
            del linears
            torch.cuda.empty_cache()
    return rows


def as_text(rows: list[Row]) -> str:
    """The rows as a table."""
    columns = ["N", "K", "codes", "T", "fast", "unpacked", "bf16", "floor", "error"]
    cells: list[tuple[Any, ...]] = [
        (
            row.n,
            row.k,
            row.kind,
            row.tokens,
            f"{row.fast_us:.1f}",
            f"{row.unpacked_us:.1f}",
            f"{row.bf16_us:.1f}",
            f"{row.floor_us:.1f}",
            f"{row.error:.0e}",
        )
        for row in rows
    ]
    title = f"Microseconds a linear on {torch.cuda.get_device_name(0)}"
    return render(Table(title, columns, cells, ("codes",)))


def main() -> None:
    """Measure, print a table, write evidence."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if native.implementation_for(CARD) is None:
        raise SystemExit(native.why_nothing_serves(CARD))
    rows = measure()
    if options.json:
        evidence.write(options.json, "linears", [asdict(row) for row in rows])
    print(as_text(rows))


if __name__ == "__main__":
    main()

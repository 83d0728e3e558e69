"""Load and convert against loaders that only load, and against load-then-convert.

    python benchmarks/load.py [--folder KEEP] [--rounds 5] [--json FILE]

Files are in the page cache, two threads each, sides alternating in one process that has touched and
freed as much memory once before. Sides:

``qpn``     ``loader.load``, headers, plan and conversion included
``clone``   ``safetensors.safe_open`` ``get_tensor`` + ``clone``, all clones kept to the end
``usual``   get_tensor + clone of a layer, then each expert converted by itself, then stacked
``tp4``     ``qpn`` for rank 0 of TP=4

Every round checks what it loaded (a checksum of the banks) before its time counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors import safe_open

import loader
from loader.converter import ConversionCache, LayerBanks, LayerConverter
from loader.layer_plan import LayerPlan
from loader.pieces import descriptors_of
from loader.table import Table, render
from loader.testing.checkpoint import PRESETS, tiny_checkpoint

CHECKPOINTS = ("awq-1.2gb", "nvfp4-1.2gb", "experts-512")
THREADS = 2


def clone_all(folder: Path, names: dict[str, str]) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, cloned, by two threads."""
    wanted = list(names.items())
    kept: dict[str, torch.Tensor] = {}

    def work(part: list[tuple[str, str]]) -> None:
        files = {file: safe_open(folder / file, "pt") for file in {f for _, f in part}}
        for name, file in part:
            kept[name] = files[file].get_tensor(name).clone()

    workers = [
        threading.Thread(target=work, args=(wanted[number::THREADS],)) for number in range(THREADS)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return kept


def usual(folder: Path, names: dict[str, str]) -> list[list[torch.Tensor]]:
    """Layer by layer: sources resident, experts converted one by one into lists, lists stacked."""
    plan = loader.plan(folder)
    catalog = plan.checkpoint.catalog
    layers = []
    for layer in plan.layers:
        pieces = layer.pieces()
        own = {catalog.names[row] for row in pieces["tensor"].tolist()}
        sources = clone_all(folder, {name: names[name] for name in own})
        experts = [
            _one_expert(layer, pieces[pieces["slot"] == slot], sources, catalog.names)
            for slot in range(layer.spec.w13.experts)
        ]
        layers.append([torch.cat(parts) for parts in zip(*experts, strict=True)])
        del sources, experts
    return layers


def _one_expert(
    layer: LayerPlan, pieces: Any, sources: dict[str, torch.Tensor], names: list[str]
) -> list[torch.Tensor]:
    from dataclasses import replace

    w13, w2 = (replace(bank, experts=1) for bank in layer.spec.banks)
    spec = replace(layer.spec, w13=w13, w2=w2)
    banks = LayerBanks.allocate(spec, torch.device("cpu"), layer.zero_point)
    converter = LayerConverter(banks, ConversionCache(spec, torch.device("cpu")))
    for number in range(len(pieces)):
        one = pieces[number : number + 1].copy()
        one["slot"] = one["offset"] = 0
        data = sources[names[int(one["tensor"][0])]].reshape(-1).view(torch.uint8)
        converter.write(data, torch.from_numpy(descriptors_of(one)))
    converter.finish()
    return banks.tensors


def checksum(tensors: list[torch.Tensor]) -> int:
    """A sum over all bytes, by 64-bit words where there are some."""
    total = 0
    for tensor in tensors:
        flat = tensor.reshape(-1).view(torch.uint8)
        whole = len(flat) // 8 * 8
        total += int(flat[:whole].view(torch.int64).sum()) + int(flat[whole:].sum())
    return total & (1 << 64) - 1


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Medians of all sides, in seconds."""
    plan = loader.plan(folder)
    names = dict(
        zip(
            plan.checkpoint.catalog.names,
            (plan.checkpoint.catalog.files[n] for n in plan.checkpoint.catalog.file.tolist()),
            strict=True,
        )
    )
    nbytes = sum((folder / file).stat().st_size for file in set(names.values()))
    warm = torch.empty(int(nbytes * 1.2), dtype=torch.uint8).fill_(1)
    del warm
    sums: dict[str, int] = {}
    sides: dict[str, Callable[[], list[torch.Tensor]]] = {
        "clone": lambda: list(clone_all(folder, names).values()),
        "qpn": lambda: [t for m in loader.load(folder).values() for t in m.banks()],
        "tp4": lambda: [
            t
            for m in loader.load(folder, shard=loader.Shard(tp_size=4)).values()
            for t in m.banks()
        ],
        "usual": lambda: [t for layer in usual(folder, names) for t in layer],
    }
    times: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds):
        for side, run in sides.items():
            if side == "usual" and number:
                continue  # an order of magnitude slower: once is enough to see it
            gc.collect()
            started = time.perf_counter()
            kept = run()
            times[side].append(time.perf_counter() - started)
            found = checksum(kept)
            if sums.setdefault(side, found) != found:
                raise RuntimeError(f"{side} loaded other bytes than before")
            del kept
    if sums["usual"] != sums["qpn"]:
        raise RuntimeError("qpn and usual disagree on the banks")
    started = time.perf_counter()
    loader.plan(folder)
    planned = time.perf_counter() - started
    return {
        "bytes": nbytes,
        "tensors": len(names),
        "plan_seconds": planned,
        **{side: median(seconds) for side, seconds in times.items()},
    }


def main() -> None:
    """Make the checkpoints, measure, print a table and JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="keep (and reuse) the checkpoints here")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        root = options.folder or Path(scratch)
        for preset in CHECKPOINTS:
            folder = root / preset
            if not folder.exists():
                tiny_checkpoint(folder, **PRESETS[preset])
            results[preset] = measure(folder, options.rounds)
    rows = []
    for preset, r in results.items():
        rate = {side: r["bytes"] / r[side] / 1e9 for side in ("qpn", "clone", "usual")}
        rows.append(
            (
                preset,
                r["tensors"],
                f"{rate['qpn']:.2f}",
                f"{rate['clone']:.2f}",
                f"{rate['qpn'] / rate['clone']:.2f}",
                f"{rate['usual']:.2f}",
                f"{r['tp4'] / r['qpn']:.2f}",
                f"{r['plan_seconds'] * 1e3:.0f}",
            )
        )
    columns = ["checkpoint", "tensors", "qpn GB/s", "clone GB/s", "qpn / clone"]
    columns += ["usual GB/s", "tp4 / tp1 time", "plan ms"]
    title = f"Load, files in the page cache, {THREADS} threads, median of {options.rounds}"
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    print(render(Table(title, columns, rows, ("checkpoint",)), versions))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Load and convert to a card, beside loaders that only load.

    python benchmarks/cuda_load.py [--folder KEEP] [--rounds 5] [--json FILE]

Files are in the page cache; all sides run in one process, one after another. The clock runs from
the call to the last byte on the card (converted, for ``qpn``), headers and plan included. Sides:

``qpn``              ``loader.load``
``safetensors``      ``safe_open(device=...)``, all tensors, 1 and 8 threads over the files
``fastsafetensors``  files to the card by its own threads, then every tensor
``runai``            ``SafetensorsStreamer.stream_files``, every tensor to the card
``instanttensor``    ``safe_open``, its backends for buffered files

A peer that is not installed is left out and said so; of several settings of one the best counts.
Every round is checked: the sum of all bytes for peers, which must be the files' own; for ``qpn`` a
checksum of the banks, and in the first round the bits of two layers against the host's.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import loader  # noqa: E402 - after the path is set
from benchmarks.evidence import stamp, write  # noqa: E402 - after the path is set
from loader.table import Table, render  # noqa: E402 - after the path is set
from loader.testing.checkpoint import tiny_checkpoint  # noqa: E402 - after the path is set

CARD = "cuda:0"
GEOMETRY: dict[str, Any] = {
    "hidden": 2048,
    "intermediate": 768,
    "experts": 128,
    "layers": 24,
    "shards": 24,
    "payload": "fast",
}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "awq": {**GEOMETRY, "dialect": "awq-gemm", "group": 128},
    "nvfp4": {**GEOMETRY, "dialect": "modelopt-nvfp4"},
}
Tensors = dict[str, torch.Tensor]


def by_safetensors(files: list[str], threads: int) -> Tensors:
    """Every tensor of every file by ``safe_open``."""

    def one(file: str) -> Tensors:
        with safe_open(file, "pt", device=CARD) as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - a handle is no mapping

    with ThreadPoolExecutor(threads) as pool:
        return {name: t for part in pool.map(one, files) for name, t in part.items()}


def by_fastsafetensors(files: list[str], threads: int) -> Tensors:
    """All files at once, without GPUDirect (they are in the page cache)."""
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    opened = SafeTensorsFileLoader(SingleGroup(), CARD, max_threads=threads, nogds=True)
    opened.add_filenames({0: files})
    buffers = opened.copy_files_to_device()
    found = {name: buffers.get_tensor(name) for name in opened.get_keys()}
    opened.close()
    return found


def by_runai(files: list[str], threads: int) -> Tensors:
    """Streamed with so many readers, each tensor as it comes."""
    from runai_model_streamer import SafetensorsStreamer

    os.environ["RUNAI_STREAMER_CONCURRENCY"] = str(threads)
    os.environ["RUNAI_STREAMER_LOG_LEVEL"] = "WARNING"
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(files, device=CARD)
        return {name: tensor.to(CARD) for name, tensor in streamer.get_tensors()}


def by_instanttensor(files: list[str], backend: str) -> Tensors:
    """All files in one call."""
    import instanttensor

    chosen = instanttensor.Backend[backend]
    with instanttensor.safe_open(files, framework="pt", device=0, backend=chosen) as opened:
        return dict(opened.tensors())


PEERS: dict[str, tuple[str, Callable[..., Tensors], tuple[Any, ...]]] = {
    "safetensors": ("safetensors", by_safetensors, (1, 8)),
    "fastsafetensors": ("fastsafetensors", by_fastsafetensors, (8, 16)),
    "runai": ("runai_model_streamer", by_runai, (8, 16)),
    "instanttensor": ("instanttensor", by_instanttensor, ("MMAP", "URING_BUFFERED")),
}
"""Package, call, and its settings."""


def byte_sum(tensors: list[torch.Tensor]) -> int:
    """Sum of all bytes, each as an unsigned number."""
    total = torch.zeros((), dtype=torch.int64, device=CARD)
    for tensor in tensors:
        total += tensor.contiguous().view(-1).view(torch.uint8).sum(dtype=torch.int64)
    return int(total)


def sum_of_files(files: list[str]) -> int:
    """The same of the payload as it lies in the files."""
    total = 0
    for file in files:
        data = torch.from_file(file, size=os.path.getsize(file), dtype=torch.uint8)
        start = 8 + int.from_bytes(bytes(data[:8].tolist()), "little")
        total += byte_sum([data[start:].to(CARD)])
    return total


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds until the card is done, and what came back."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    started = time.perf_counter()
    kept = call()
    torch.cuda.synchronize()
    return time.perf_counter() - started, kept


def measure_qpn(folder: Path, rounds: int) -> dict[str, Any]:
    """Seconds of each round, and the report's own figures of the last."""
    seconds, clocks, plans, sums = [], [], [], set()
    first_layers = [0, 23]
    for number in range(rounds + 1):  # the first is not counted: it loads CUDA's modules
        plan_seconds, _ = timed(lambda: loader.plan(folder, device=CARD).predicted_peak)
        elapsed, experts = timed(lambda: loader.load(folder, CARD))
        banks = [tensor for module in experts.values() for tensor in module.banks()]
        sums.add(byte_sum(banks))
        if number == 0:
            wanted = loader.load(folder, layers=first_layers)
            for layer, module in wanted.items():
                for a, b in zip(experts[layer].banks(), module.banks(), strict=True):
                    if not torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8)):
                        raise RuntimeError(f"layer {layer} has other bits than on the host")
        else:
            seconds.append(elapsed)
            clocks.append(experts.report.seconds)
            plans.append(plan_seconds)
        report = experts.report.to_dict()
        del banks, experts
    if len(sums) != 1:
        raise RuntimeError("loads of one checkpoint differ")
    return {
        "seconds": clocks,
        "call_seconds": seconds,
        "plan_seconds": plans,
        "bytes_read": report["bytes_read"],
        "memory": report["memory"],
        "release_seconds": sum(layer["seconds"]["release"] for layer in report["layers"]),
    }


def measure_peer(name: str, files: list[str], wanted: int, rounds: int) -> dict[str, Any]:
    """Seconds by setting, or why there are none."""
    package, call, settings = PEERS[name]
    if find_spec(package) is None:
        return {"error": "not installed"}
    found: dict[str, Any] = {}
    for setting in settings:
        times = []
        try:
            for _ in range(rounds):
                elapsed, tensors = timed(lambda setting=setting: call(files, setting))
                if byte_sum(list(tensors.values())) != wanted:
                    raise RuntimeError("other bytes than the files hold")
                times.append(elapsed)
                del tensors
        except Exception as error:  # a peer that fails is a result, not the end of the run
            found[str(setting)] = f"{type(error).__name__}: {error}"[:200]
            continue
        found[str(setting)] = times
    return found


def measure(folder: Path, rounds: int, peer_rounds: int, peers: list[str]) -> dict[str, Any]:
    """All sides of one checkpoint."""
    files = sorted(str(path) for path in folder.glob("*.safetensors"))
    nbytes = sum(os.path.getsize(file) for file in files)
    wanted = sum_of_files(files)  # this also brings the files into the page cache
    result: dict[str, Any] = {"bytes": nbytes, "files": len(files)}
    result["qpn"] = measure_qpn(folder, rounds)
    for name in peers:
        result[name] = measure_peer(name, files, wanted, peer_rounds)
    return result


def rows_of(checkpoint: str, result: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Lines of the table: side, setting, median seconds, GB/s."""
    qpn = result["qpn"]
    rows: list[tuple[Any, ...]] = []
    for label, times, nbytes in (
        ("qpn", qpn["seconds"], qpn["bytes_read"]),
        ("  until load returns", qpn["call_seconds"], qpn["bytes_read"]),
        ("  of it headers and plan", qpn["plan_seconds"], None),
    ):
        rate = f"{nbytes / median(times) / 1e9:.1f}" if nbytes else "-"
        rows.append((checkpoint, label, "", f"{median(times):.3f}", rate))
    for name in PEERS:
        for setting, times in result.get(name, {}).items():
            if isinstance(times, str):
                rows.append((checkpoint, name, setting, times[:40], "-"))
            else:
                rate = f"{result['bytes'] / median(times) / 1e9:.1f}"
                rows.append((checkpoint, name, setting, f"{median(times):.3f}", rate))
    return rows


def main() -> None:
    """Make the checkpoints, measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="keep (and reuse) the checkpoints here")
    parser.add_argument("--checkpoints", nargs="*", default=list(CHECKPOINTS), choices=CHECKPOINTS)
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--with-peers", nargs="*", default=list(CHECKPOINTS), choices=CHECKPOINTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results, rows = {}, []
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.checkpoints:
            folder = (options.folder or Path(scratch)) / name
            if not folder.exists():
                tiny_checkpoint(folder, **CHECKPOINTS[name])
            peers = options.peers if name in options.with_peers else []
            results[name] = measure(folder, options.rounds, options.peer_rounds, peers)
            rows += rows_of(name, results[name])
            if options.json:  # as it comes: a later side may not end
                write(options.json, "load to a card", results)
    facts = stamp("load to a card", None)
    title = f"Load to {facts['card']}, files in the page cache, medians"
    columns = ["checkpoint", "side", "setting", "seconds", "GB/s"]
    versions = f"torch {facts['torch']}, CUDA {facts['cuda']}, driver {facts['driver']}"
    text = ("checkpoint", "side", "setting")
    print(render(Table(title, columns, rows, text), versions))


if __name__ == "__main__":
    main()

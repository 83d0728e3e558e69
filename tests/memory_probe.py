"""Measures resident memory in a process of its own; run by ``test_memory.py``, prints JSON.

Counts by itself (``/proc/self/status``), and keeps every exception that it provokes.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from load_fakes import RecordingSource, descriptors, module_of, quantization_of

import loader
from loader import LayerEvent, Policy, memory, native
from loader.testing.checkpoint import TinyCheckpoint, tiny_checkpoint
from loader.testing.container import read_header

torch.set_num_threads(1)
LAYERS = 8
BAD_LAYER = 6
CUT = 4096
"""Bytes that a truncation takes off; small, since the frame that keeps them is kept itself."""
CONVERT = "write" if native.HOST is None else "read"
"""What a load of a local folder calls for each chunk."""


def resident(*names: str) -> int:
    kib = 0
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in names:
            kib += int(value.split()[0])
    return kib << 10


def anonymous() -> int:
    return resident("RssAnon", "RssShmem")


def settled() -> int:
    """What is resident once the heap has given back what earlier steps freed."""
    gc.collect()
    memory.return_to_system()
    return anonymous()


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def nth(number: int, error: BaseException, inner: Callable[..., Any]) -> Callable[..., Any]:
    calls = iter(range(1 << 30))

    def call(*args: Any) -> Any:
        if next(calls) == number:
            raise error
        return inner(*args)

    return call


# Ways to fail in layer BAD_LAYER


def observer(folder: Path, counts: dict[str, int]) -> None:
    def hook(event: LayerEvent) -> None:
        if event.layer == BAD_LAYER and event.state == "released":
            raise ValueError("observer")

    loader.load(folder, observers=[hook])


def converter(folder: Path, counts: dict[str, int]) -> None:
    number = counts[CONVERT] * 7 // 8 - 1
    broken = nth(number, RuntimeError("converter"), getattr(native, CONVERT))
    with patched(native, CONVERT, broken):
        loader.load(folder)


def allocation(folder: Path, counts: dict[str, int]) -> None:
    with patched(
        memory, "fresh", nth(counts["fresh"] * 7 // 8, OSError(12, "no memory"), memory.fresh)
    ):
        loader.load(folder)


def interrupt(folder: Path, counts: dict[str, int]) -> None:
    with patched(native, "finish", nth(BAD_LAYER, KeyboardInterrupt("interrupt"), native.finish)):
        loader.load(folder)


def reading(folder: Path, error: Callable[[], None], number: int) -> None:
    def before(read: int) -> None:
        if read == number:
            error()

    with RecordingSource(folder, before=before) as source:
        loader.load(source)


def io_error(folder: Path, counts: dict[str, int]) -> None:
    def fail() -> None:
        raise OSError(5, "Input/output error")

    reading(folder, fail, counts["payload"] * 7 // 8 - 1)


def truncated(folder: Path, counts: dict[str, int]) -> None:
    path = folder / "model.safetensors"
    size = path.stat().st_size
    with open(path, "rb") as file:
        file.seek(size - CUT)
        tail = file.read()
    try:
        reading(folder, lambda: os.truncate(path, size - CUT), counts["payload"] * 7 // 8 - 1)
    finally:
        with open(path, "ab") as file:
            file.write(tail)


def touched(folder: Path, counts: dict[str, int]) -> None:
    path = folder / "model.safetensors"
    reading(folder, lambda: os.utime(path, (1, 1)), counts["payload"] * 7 // 8 - 1)


def bad_scale(folder: Path, counts: dict[str, int]) -> None:
    path = folder / "model.safetensors"
    header, start = read_header(path)
    name = f"model.layers.{BAD_LAYER}.mlp.experts.3.up_proj.weight_scale"
    at = start + header[name]["data_offsets"][0] + 100
    with open(path, "r+b") as file:
        file.seek(at)
        before = file.read(1)
        file.seek(at)
        file.write(b"\x7f")  # NaN
    try:
        loader.load(folder)
    finally:
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(before)


def changed(folder: Path, counts: dict[str, int]) -> None:
    path = folder / "model.safetensors"

    def hook(event: LayerEvent) -> None:
        if event.layer == BAD_LAYER - 1 and event.state == "ready":
            os.utime(path, (2, 2))

    loader.load(folder, observers=[hook])


def refused(folder: Path, counts: dict[str, int]) -> None:
    loader.load(folder, card_memory=1 << 20)


# fmt: off
FAULTS = (
    observer, converter, allocation, interrupt, io_error,
    truncated, touched, changed, bad_scale, refused,
)
# fmt: on


def count_calls(folder: Path) -> dict[str, int]:
    """How often a good load writes, allocates and reads, so that faults can be placed."""
    counts = {CONVERT: 0, "fresh": 0, "payload": 0}

    def counting(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            counts[name] += 1
            return inner(*args)

        return call

    with (
        patched(native, CONVERT, counting(CONVERT, getattr(native, CONVERT))),
        patched(memory, "fresh", counting("fresh", memory.fresh)),
    ):
        loader.load(folder)
    with RecordingSource(folder) as source:
        loader.load(source)
        counts["payload"] = source.payload_reads
    return counts


def failures(folder: Path) -> list[dict[str, Any]]:
    """Five rounds of failed loads, each followed by a good one; all exceptions stay alive."""
    # fmt: off
    tiny_checkpoint(
        folder, dialect="modelopt-nvfp4", hidden=1024, intermediate=512, experts=16,
        layers=LAYERS, payload="fast", attention=False,
    )
    # fmt: on
    counts = count_calls(folder)
    held: list[BaseException] = []
    found = []
    threads, files = threading.active_count(), descriptors()
    start = settled()
    for round_ in range(5):
        for fault in FAULTS if round_ == 0 else FAULTS[round_::4]:
            try:
                fault(folder, counts)
            except BaseException as error:
                held.append(error)
            found.append(
                {
                    "fault": fault.__name__,
                    "round": round_,
                    "error": str(held[-1]),
                    "type": type(held[-1]).__name__,
                    "layer": getattr(held[-1], "layer", None),
                    "kept": anonymous() - start,
                    "threads": threading.active_count() - threads,
                    "files": descriptors() != files,
                }
            )
        experts = loader.load(folder)
        resident_bytes = experts.report.to_dict()["memory"]["resident"]
        good = anonymous() - start - resident_bytes
        del experts
        found.append({"fault": None, "round": round_, "good": good, "kept": settled() - start})
    return found


def growth(folder: Path) -> list[dict[str, Any]]:
    """Loads of 4, 8 and 16 equal layers, with the resident size at each finished layer."""
    found = []
    # fmt: off
    tiny_checkpoint(
        folder, dialect="awq-gemm", hidden=1024, intermediate=768, experts=16, layers=16,
        payload="fast", attention=False, symmetric=False, group=64,
    )
    # fmt: on
    loader.load(folder, layers=[0])
    host = native.implementation_for(torch.device("cpu"))
    assert host is not None
    for layers, layout, code in (
        (4, "compact", host),
        (8, "compact", host),
        (16, "compact", host),
        (4, "wide", host),
        (4, "compact", native.REFERENCE),
        (8, "wide", native.REFERENCE),
    ):
        start, file_start = settled(), resident("RssFile")
        file_peak = file_start
        at_ready: list[int] = []

        def observe(event: LayerEvent, start: int = start, at: list[int] = at_ready) -> None:
            nonlocal file_peak
            file_peak = max(file_peak, resident("RssFile"))
            if event.state == "ready":
                at.append(anonymous() - start)

        with native.serving(code):
            experts = loader.load(
                folder,
                layers=range(layers),
                observers=[observe],
                staging_bytes=32 << 20,
                policy=Policy(layout=layout),
            )
        report = experts.report.to_dict()
        found.append(
            {
                "layers": layers,
                "layout": layout,
                "code": code.name,
                "at_ready": at_ready,
                "layer_bytes": sum(t.nbytes for t in experts[0].banks()),
                "memory": report["memory"],
                "file_backed": file_peak - file_start,
                "after": anonymous() - start,
            }
        )
        del experts
        found[-1]["dropped"] = settled() - start
    return found


def in_place(folder: Path) -> list[dict[str, Any]]:
    """Layers converted one by one, first with nobody else holding the parameters, then with."""
    # fmt: off
    made = tiny_checkpoint(
        folder, dialect="awq-gemm", hidden=1024, intermediate=1024, experts=8, layers=3,
        payload="fast", attention=False,
    )
    # fmt: on
    warm = module_of(made, 0)
    loader.prepare_module(warm, quantization=quantization_of(made))
    del warm
    return [_convert_all(made, hold) for hold in (False, True)]


def _convert_all(made: TinyCheckpoint, hold: bool) -> dict[str, Any]:
    start = settled()
    modules = [module_of(made, layer) for layer in range(made.layers)]
    settled()
    outside = [dict(module.named_parameters()) for module in modules] if hold else []
    sources = sum(tensor.nbytes for tensor in modules[0].parameters())
    workspace = None
    deltas = []
    for layer, module in enumerate(modules):
        before = anonymous()
        prepared = loader.prepare_module(
            module, quantization=quantization_of(made), layer=layer, workspace=workspace
        )
        workspace = prepared.workspace
        deltas.append(anonymous() - before)
    banks = sum(tensor.nbytes for tensor in prepared.banks())
    fixed = sum(tensor.nbytes for tensor in workspace.tensors()) if workspace else 0
    total = anonymous() - start
    del outside
    return {
        "hold": hold,
        "deltas": deltas,
        "sources": sources,
        "banks": banks,
        "workspace": fixed,
        "total": total,
    }


if __name__ == "__main__":
    probe = {probe.__name__: probe for probe in (failures, growth, in_place)}[sys.argv[1]]
    print(json.dumps(probe(Path(sys.argv[2]))))

"""What tests of a load share: sources that record or fail, a log of events, modules to convert."""

from __future__ import annotations

import gc
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from loader import LayerEvent, Shard, memory, native
from loader.checkpoint.source import LocalSource
from loader.pieces import DESCRIPTOR_FIELDS
from loader.testing.checkpoint import TinyCheckpoint
from loader.testing.container import RawTensor, read_header

SMALL: dict[str, Any] = {"hidden": 64, "intermediate": 64, "experts": 4, "group": 32}
TINY_STAGING = 16 << 10
STATES = ("planned", "reading", "converting", "prepared", "released", "ready")


class RecordingSource(LocalSource):
    """A folder that logs every read of payload bytes as ``("read", file, offset, length)``.

    ``before`` runs ahead of each payload read, with the read's number, and may raise. It lends no
    descriptors, so that every byte goes through it.
    """

    def __init__(
        self,
        folder: Path,
        log: list[Any] | None = None,
        before: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(folder)
        self.log: list[Any] = [] if log is None else log
        self.before = before
        self.payload_reads = 0
        self.starts = {path.name: read_header(path)[1] for path in folder.glob("*.safetensors")}

    @property
    def lends_descriptors(self) -> bool:
        return False

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        if offset >= self.starts.get(file, 1 << 62):
            number, self.payload_reads = self.payload_reads, self.payload_reads + 1
            if self.before is not None:
                self.before(number)
            self.log.append(("read", file, offset, len(buffer)))
        super().read_into(file, offset, buffer)


def recorded(
    folder: Path,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
    log: list[Any] | None = None,
    before: Callable[[int], None] | None = None,
) -> LocalSource:
    """A source that logs payload reads, also those of native code: the bytes of their pieces."""
    if way != "direct":
        return RecordingSource(folder, log, before)
    read, numbers = native.read, iter(range(1 << 30))
    rows, row_bytes = (DESCRIPTOR_FIELDS.index(name) for name in ("rows", "row_bytes"))

    def recording(file: int, nbytes: int, descriptors: torch.Tensor, *rest: Any) -> Any:
        if before is not None:
            before(next(numbers))
        if log is not None:
            size = int((descriptors[:, rows] * descriptors[:, row_bytes]).sum())
            log.append(("read", file, 0, size))
        return read(file, nbytes, descriptors, *rest)

    monkeypatch.setattr(native, "read", recording)
    return LocalSource(folder)


class Raiser:
    """An observer that logs every event and raises ``error`` at one of them."""

    def __init__(self, state: str | None = None, layer: int | None = None, **more: Any) -> None:
        self.state, self.layer = state, layer
        self.error: BaseException = more.get("error", ValueError("observer says no"))
        self.also_failed = more.get("also_failed", False)
        self.events: list[LayerEvent] = []

    def __call__(self, event: LayerEvent) -> None:
        self.events.append(event)
        if event.state == self.state and self.layer in (None, event.layer):
            raise self.error
        if event.state == "failed" and self.also_failed:
            raise RuntimeError("and again at failed")

    def states(self, layer: int) -> list[str]:
        return [event.state for event in self.events if event.layer == layer]


class Allocations:
    """Every storage that ``memory.fresh`` made since, weakly."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.storages: list[StorageWeakRef] = []
        self.fail_at: int | None = None
        self.error: BaseException = MemoryError("no more")
        fresh = memory.fresh

        def spy(*args: Any) -> torch.Tensor:
            if len(self.storages) == self.fail_at:
                raise self.error
            tensor = fresh(*args)
            self.storages.append(StorageWeakRef(tensor.untyped_storage()))
            return tensor

        monkeypatch.setattr(memory, "fresh", spy)

    def alive(self) -> int:
        return sum(not storage.expired() for storage in self.storages)


def descriptors() -> list[str]:
    """What the open descriptors of this process point to."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue
    return sorted(path for path in found if path.endswith((".safetensors", ".json")))


@contextmanager
def nothing_left(allocations: Allocations | None = None) -> Iterator[None]:
    """No thread, descriptor or tensor of the block outlives it, without any garbage collection."""
    threads, files = set(threading.enumerate()), descriptors()
    gc.disable()
    try:
        yield
        if allocations is not None:
            assert allocations.alive() == 0
    finally:
        gc.enable()
    assert set(threading.enumerate()) <= threads
    assert descriptors() == files


def banks_of(experts: Any) -> list[torch.Tensor]:
    """All bank tensors as bits, in layer order."""
    layers = experts.values() if hasattr(experts, "values") else [experts]
    return [tensor for layer in layers for tensor in layer.banks()]


def same_bits(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(
        a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
        for a, b in zip(first, second, strict=True)
    )


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


_TORCH = {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn}


def to_torch(raw: RawTensor) -> torch.Tensor:
    array = raw.array()
    if raw.dtype == "BF16":
        array = array.view(np.int16)
    tensor = torch.from_numpy(array)
    return tensor.view(_TORCH[raw.dtype]) if raw.dtype in _TORCH else tensor


def quantization_of(checkpoint: TinyCheckpoint) -> dict[str, Any]:
    """The checkpoint's own ``quantization_config``."""
    config = json.loads((checkpoint.folder / "config.json").read_text())
    return dict(config["quantization_config"])


def module_of(
    checkpoint: TinyCheckpoint,
    layer: int = 0,
    shard: Shard | None = None,
    buffers: bool = False,
    tables: bool = True,
) -> torch.nn.Module:
    """One layer as a serving framework stacks it: experts on axis 0, gate before up.

    ``buffers`` registers buffers in place of parameters; ``tables`` keeps the parts that only the
    framework uses (input scales, shapes).
    """
    shard = shard or Shard()
    module = torch.nn.Module()
    for name, tensor in parameters_of(checkpoint, layer, shard).items():
        if not tables and name.endswith(("input_scale", "input_global_scale", "weight_shape")):
            continue
        if buffers:
            module.register_buffer(name, tensor)
        else:
            module.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    return module


def parameters_of(checkpoint: TinyCheckpoint, layer: int, shard: Shard) -> dict[str, torch.Tensor]:
    header = read_header(checkpoint.files()[0])
    stem = checkpoint.name(layer, 0, "gate", "")
    parts = [name[len(stem) :] for name in header[0] if name.startswith(stem)]
    ids = shard.experts_of(checkpoint.experts)
    count = checkpoint.intermediate // shard.tp_size
    first = shard.tp_rank * count
    found: dict[str, torch.Tensor] = {}
    for part in parts:

        def stacked(projection: str, part: str = part) -> torch.Tensor:
            names = [checkpoint.name(layer, expert, projection, part) for expert in ids]
            read = checkpoint._read(names)
            return torch.stack([to_torch(read[name]) for name in names])

        gate, up, down = (stacked(p) for p in ("gate", "up", "down"))
        if gate[0].numel() == 1:
            found[f"w13_{part}"] = torch.cat((gate.view(-1, 1), up.view(-1, 1)), 1)
            found[f"w2_{part}"] = down.view(-1)
        elif part == "weight_shape":
            found[f"w13_{part}"], found[f"w2_{part}"] = gate, down
        else:
            n_axis = 2 if part in ("qweight", "qzeros", "scales") else 1
            found[f"w13_{part}"] = torch.cat(
                [_cut(t, n_axis, checkpoint.intermediate, first, count) for t in (gate, up)], n_axis
            )
            k = checkpoint.intermediate
            if "scale" in part or "zero" in part:  # groups: whole ones that the slice touches
                group = k if checkpoint.group == -1 else checkpoint.group
                begin, end = first // group, -(-(first + count) // group)
                down = down.narrow(3 - n_axis, begin, end - begin)
            else:
                down = _cut(down, 3 - n_axis, k, first, count)
            found[f"w2_{part}"] = down.contiguous()
    return found


def _cut(tensor: torch.Tensor, axis: int, features: int, first: int, count: int) -> torch.Tensor:
    per = features // tensor.shape[axis]
    return tensor.narrow(axis, first // per, count // per).contiguous()

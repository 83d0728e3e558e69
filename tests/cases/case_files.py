"""What a case works on: checkpoints written once, a reader that takes notes, memory full of NaN."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch

from loader import memory
from loader.checkpoint.source import LocalSource
from loader.testing.checkpoint import TinyCheckpoint, tiny_checkpoint
from loader.testing.container import edit_json

#: The four formats of the cases, and the generator's name of each.
DIALECTS = {"A": "awq-gemm", "P": "ct-int4", "N": "ct-nvfp4", "M": "modelopt-nvfp4"}
SMALL: dict[str, Any] = {"hidden": 64, "intermediate": 96, "experts": 4, "attention": False}


@lru_cache(maxsize=64)
def _built(settings: tuple[tuple[str, Any], ...]) -> TinyCheckpoint:
    folder = Path(mkdtemp(prefix="qpn-case-"))
    weakref.finalize(_built, shutil.rmtree, folder, ignore_errors=True)
    return tiny_checkpoint(folder, **dict(settings))


def case(
    folder: Path, dialect: str, config: dict[str, Any] | None = None, **settings: Any
) -> TinyCheckpoint:
    """The base input of the cases (two shards) under ``folder``; equal ones are written once.

    ``config`` is merged into config.json, ``settings`` are those of the generator.
    """
    settings = {"shards": 2, "attention": False, "dialect": DIALECTS.get(dialect, dialect)} | {
        key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()
    }
    built = _built(tuple(sorted(settings.items())))
    shutil.copytree(built.folder, folder, dirs_exist_ok=True)
    if config:
        edit_json(folder, "config.json", lambda old: _merge(old, config))
    return TinyCheckpoint(**{**built.__dict__, "folder": folder})


def small(folder: Path, dialect: str, **settings: Any) -> TinyCheckpoint:
    """The same with few and small experts, group 32 where the format leaves a choice."""
    if dialect in ("A", "P") or dialect.startswith(("awq", "ct-int4")):
        settings.setdefault("group", 32)
    return case(folder, dialect, **{**SMALL, **settings})


def _merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    return old | {
        key: _merge(old[key], value)
        if isinstance(value, dict) and isinstance(old.get(key), dict)
        else value
        for key, value in new.items()
    }


class Recorder:
    """A folder that notes each read as (file, offset, length), and lends no descriptor past it."""

    lends_descriptors = False

    def __init__(self, folder: Path) -> None:
        self._inner = LocalSource(folder)
        self.reads: list[tuple[str, int, int]] = []

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def folder(self) -> Path | None:
        return self._inner.folder

    def list(self) -> list[str]:
        return self._inner.list()

    def size(self, file: str) -> int:
        return self._inner.size(file)

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        self.reads.append((file, offset, len(buffer)))
        self._inner.read_into(file, offset, buffer)

    def descriptor(self, file: str) -> Any:
        raise AssertionError("no descriptor is lent")

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def payload_reads(self) -> list[tuple[str, int, int]]:
        """Reads behind the header, in the order in which they came."""
        begins: dict[str, int] = {}
        found = []
        for file, offset, length in self.reads:
            if not file.endswith(".safetensors"):
                continue
            if file not in begins:
                path = Path(self.name) / file
                with open(path, "rb") as opened:
                    begins[file] = 8 + int.from_bytes(opened.read(8), "little")
            if offset >= 8 and offset + length > begins[file]:
                found.append((file, offset, length))
        return found


class Fresh:
    """Stands for ``memory.fresh``: memory full of NaN bytes, each storage watched."""

    def __init__(self) -> None:
        self.calls = 0
        self._storages: list[weakref.ref[Any]] = []

    def __call__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        assert device.type == "cpu"
        self.calls += 1
        if not prod(shape):
            return torch.empty(shape, dtype=dtype)
        nbytes = prod(shape) * dtype.itemsize
        buffer = np.full(nbytes + 64, 0xFF, np.uint8)
        # As torch's own allocator does: on a line of the cache.
        buffer = buffer[-buffer.ctypes.data % 64 :][:nbytes]
        self._storages.append(weakref.ref(buffer))
        return torch.from_numpy(buffer).view(dtype).view(shape)

    @property
    def alive(self) -> int:
        """Storages that something still holds."""
        return sum(reference() is not None for reference in self._storages)


@contextmanager
def nan_memory() -> Iterator[Fresh]:
    """All memory that the library takes is full of NaN bytes inside the block."""
    fresh = Fresh()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "fresh", fresh)
        yield fresh

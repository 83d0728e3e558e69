"""One safetensors file, read and never mapped: a mapped file that is cut ends the process."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from loader.errors import CheckpointError

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}

_PIECE = 64 << 20
"""Bytes of one read."""


def require_regular(path: Path) -> None:
    """A pipe would be waited for without end; what does not exist fails at its own open."""
    if path.exists() and not path.is_file():
        raise CheckpointError("not a regular file", file=str(path), expected="a regular file")


class RawFile:
    """A file whose header ``safetensors`` has found valid; a context manager that owns it.

    Raises :class:`CheckpointError` for a file that is none, and for one that ends early.
    """

    def __init__(self, path: Path) -> None:
        require_regular(path)
        self._path = path
        try:
            with safe_open(path, framework="pt", device="cpu"):
                pass  # its checks are all that is wanted of it
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by __exit__
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                "a file cannot be opened as safetensors",
                file=str(path),
                expected="a whole safetensors file",
                found=error,
            ) from error
        try:
            self._first, self._entries = self._header()
        except BaseException:
            self._file.close()
            raise

    def _header(self) -> tuple[int, dict[str, Any]]:
        """Where the payload begins, and what the header says of each tensor."""
        length = int.from_bytes(self._bytes(0, 8, "the header"), "little")
        try:
            entries: dict[str, Any] = json.loads(self._bytes(8, length, "the header"))
        except ValueError:  # valid a moment ago
            raise self._ended("the header", "its JSON", "something else") from None
        entries.pop("__metadata__", None)
        return 8 + length, entries

    def __enter__(self) -> RawFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def names(self) -> list[str]:
        """Tensors of this file."""
        return list(self._entries)

    def dtype(self, name: str) -> str:
        """As the header spells it."""
        return str(self._entry(name)["dtype"])

    def shape(self, name: str) -> list[int]:
        """As the header has it."""
        return list(self._entry(name)["shape"])

    def read(self, name: str, lead: int | None) -> torch.Tensor:
        """The tensor; with ``lead``, that index of its leading axis only."""
        begin, end = self._entry(name)["data_offsets"]
        shape = self.shape(name)
        if lead is not None:
            each = (end - begin) // shape[0]
            begin, shape = begin + lead * each, shape[1:]
            end = begin + each
        kind = _DTYPES.get(self.dtype(name))
        if kind is None:
            raise CheckpointError(
                "a tensor has a dtype that the check does not know",
                file=str(self._path),
                tensor=name,
                expected=", ".join(_DTYPES),
                found=self.dtype(name),
            )
        if not math.prod(shape):
            return torch.empty(shape, dtype=kind, device="cpu")
        data = self._bytes(self._first + begin, end - begin, name)
        return torch.frombuffer(data, dtype=torch.uint8).view(kind).view(shape)

    def _entry(self, name: str) -> dict[str, Any]:
        try:
            entry: dict[str, Any] = self._entries[name]
        except KeyError:
            raise CheckpointError(
                "the index names a file that does not hold the tensor",
                file=str(self._path),
                tensor=name,
                expected="present",
                found="absent",
            ) from None
        return entry

    def _bytes(self, offset: int, length: int, of: str) -> bytearray:
        wanted, data = f"{length} bytes at offset {offset}", bytearray()
        while (got := len(data)) < length:
            try:
                piece = os.pread(self._file.fileno(), min(length - got, _PIECE), offset + got)
            except OSError as error:
                raise self._ended(of, wanted, error.strerror) from error
            if not piece:
                raise self._ended(of, wanted, f"{got} bytes: it was cut since it was opened")
            data += piece
        return data

    def _ended(self, of: str, expected: str, found: str | None) -> CheckpointError:
        what = "a file can no longer be read"
        return CheckpointError(
            what, file=str(self._path), tensor=of, expected=expected, found=found
        )

"""A file that the check reads: one that changes once it is open, and what it has no name for."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from loader.errors import CheckpointError
from loader.verify import raw_file
from loader.verify.raw_file import RawFile


def written(folder: Path, dtype: str = "F32", nbytes: int = 8) -> Path:
    header = json.dumps({"a": {"dtype": dtype, "shape": [2], "data_offsets": [0, nbytes]}}).encode()
    path = folder / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(nbytes))
    return path


def test_a_dtype_that_the_check_does_not_know(tmp_path: Path) -> None:
    path = written(tmp_path, "F8_E8M0", 2)
    with RawFile(path) as file:
        assert file.names() == ["a"] and file.dtype("a") == "F8_E8M0"
        with pytest.raises(CheckpointError, match="dtype that the check does not know") as caught:
            file.read("a", None)
    assert (caught.value.tensor, caught.value.found) == ("a", "F8_E8M0")
    assert "F32" in str(caught.value.expected)


def test_a_header_that_is_another_by_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Overwritten after its checks, before it is read."""
    path = written(tmp_path)
    path.write_bytes((4).to_bytes(8, "little") + b"{no}")
    monkeypatch.setattr(raw_file, "safe_open", lambda *a, **k: nullcontext())
    before = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    with pytest.raises(CheckpointError, match="can no longer be read") as caught:
        RawFile(path)
    assert caught.value.file == str(path)
    assert not before or os.listdir("/proc/self/fd") == before  # while the error is held, too


def test_a_read_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> bytes:
        raise OSError(5, "Input/output error")

    with RawFile(written(tmp_path)) as file:
        assert file.read("a", None).tolist() == [0.0, 0.0]
        monkeypatch.setattr(os, "pread", fails)
        with pytest.raises(CheckpointError, match="can no longer be read") as caught:
            file.read("a", None)
    assert "Input/output error" in str(caught.value)

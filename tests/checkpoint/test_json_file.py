"""The strict reader of JSON files: index, config, quantization config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loader.checkpoint.json_file import load_json
from loader.checkpoint.source import LocalSource, MissingFileError
from loader.errors import CheckpointError


class Unreadable(LocalSource):
    """Fails the test when anything is read."""

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        raise AssertionError(f"read of {file}")


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def from_bytes(content: bytes, **options: bool) -> dict[str, Any]:
        (tmp_path / "config.json").write_bytes(content)
        with LocalSource(tmp_path) as source:
            return load_json(source, "config.json", **options)

    return from_bytes


def test_load_json(load: Callable[..., dict[str, Any]]) -> None:
    assert load('{"a":[1,{"b":"ü"}],"c":"\\ud83d\\ude00"}'.encode()) == {
        "a": [1, {"b": "ü"}],
        "c": "😀",
    }
    assert load(b'{"a":Infinity}', allow_nonfinite=True) == {"a": float("inf")}
    with pytest.raises(CheckpointError, match="Infinity is not JSON"):
        load(b'{"a":Infinity}')
    with pytest.raises(CheckpointError, match="more than once: b") as caught:
        load(b'{"a":{"b":1,"b":2}}')
    assert caught.value.file == "config.json"
    with pytest.raises(CheckpointError, match="LFS pointer for 12 bytes"):
        load(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    for half in (b'{"a":["\\ud800"]}', b'{"\\udc00":1}'):
        with pytest.raises(CheckpointError, match="surrogates"):
            load(half)
    with pytest.raises(CheckpointError, match="found list"):
        load(b"[]")
    with pytest.raises(CheckpointError, match="nested too deeply"):
        load(b'{"a":' * 100_000)


def test_load_json_is_bounded(tmp_path: Path) -> None:
    with open(tmp_path / "config.json", "wb") as file:
        file.truncate((256 << 20) + 1)
    with Unreadable(tmp_path) as source, pytest.raises(CheckpointError, match="too large"):
        load_json(source, "config.json")
    with LocalSource(tmp_path) as source, pytest.raises(MissingFileError):
        load_json(source, "absent.json")

"""Which files are the model, and whether their headers agree with the index."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader.checkpoint.header import Header
from loader.checkpoint.index import (
    INDEX_FILE,
    Index,
    read_headers,
    select_files,
)
from loader.checkpoint.source import LocalSource, MissingFileError
from loader.errors import CheckpointError


def shard_bytes(names: list[str], fill: int = 0) -> bytes:
    header = {
        name: {"dtype": "U8", "shape": [4], "data_offsets": [4 * i, 4 * i + 4]}
        for i, name in enumerate(names)
    }
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes([fill]) * (4 * len(names))


def tensor(layer: int, expert: int, part: str = "qweight") -> str:
    return f"model.layers.{layer}.mlp.experts.{expert}.up_proj.{part}"


class Recorder(LocalSource):
    """Notes which files are opened and which ranges are read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.sizes: list[str] = []
        self.reads: list[tuple[str, int, int]] = []

    def size(self, file: str) -> int:
        self.sizes.append(file)
        return super().size(file)

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        self.reads.append((file, offset, len(buffer)))
        super().read_into(file, offset, buffer)


SHARDS = {
    "model-00001-of-00002.safetensors": [tensor(0, e) for e in range(3)],
    "model-00002-of-00002.safetensors": [tensor(1, e) for e in range(5)],
}
WEIGHT_MAP = {name: file for file, names in SHARDS.items() for name in names}


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two shards and their index."""
    for file, names in SHARDS.items():
        (tmp_path / file).write_bytes(shard_bytes(names))
    write_index(tmp_path, WEIGHT_MAP)
    return tmp_path


def read(folder: Path) -> tuple[Index, list[Header]]:
    with LocalSource(folder) as source:
        index = select_files(source)
        return index, read_headers(source, index)


def refused(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read(folder)
    assert "\n" not in str(caught.value)
    return caught.value


def test_index_names_the_files(model: Path) -> None:
    (model / "model-00009-of-00009.safetensors").write_bytes(b"another split, never opened")
    (model / "model.safetensors").write_bytes(b"never opened either")
    index, headers = read(model)
    assert index == Index(tuple(SHARDS), WEIGHT_MAP)
    assert {header.file: header.names for header in headers} == SHARDS


def test_only_headers_are_read_and_once(model: Path) -> None:
    with Recorder(model) as source:
        index = select_files(source)
        assert {file for file, *_ in source.reads} == {INDEX_FILE}
        source.reads.clear()
        read_headers(source, index)
    ranges: dict[str, list[tuple[int, int]]] = {}
    for file, offset, length in source.reads:
        ranges.setdefault(file, []).append((offset, length))
    for file, names in SHARDS.items():
        header_bytes = len(shard_bytes(names)) - 4 * len(names)
        assert ranges.pop(file) == [(0, 8), (8, header_bytes - 8)]
    assert not ranges


# --- which files -----------------------------------------------------------------------------


def put(folder: Path, *files: str, names: list[str] | None = None) -> None:
    for i, file in enumerate(files):
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(shard_bytes(names or [tensor(i, 0)]))


@pytest.mark.parametrize(
    ("present", "chosen"),
    [
        (["model.safetensors", "a.safetensors", "model-1-of-2.safetensors"], ["model.safetensors"]),
        (
            ["model-2-of-2.safetensors", "model-1-of-2.safetensors", "reference.safetensors"],
            ["model-1-of-2.safetensors", "model-2-of-2.safetensors"],
        ),
        (
            ["model-00000-of-00002.safetensors", "model-00001-of-00002.safetensors"],
            ["model-00000-of-00002.safetensors", "model-00001-of-00002.safetensors"],
        ),
        (["experts.safetensors", "original/a.safetensors", "x.bin"], ["experts.safetensors"]),
    ],
)
def test_without_an_index(tmp_path: Path, present: list[str], chosen: list[str]) -> None:
    put(tmp_path, *present)
    index, headers = read(tmp_path)
    assert index == Index(tuple(chosen), None)
    assert [header.file for header in headers] == chosen


@pytest.mark.parametrize(
    ("present", "named", "text"),
    [
        (["a.safetensors", "b.safetensors"], "a.safetensors, b.safetensors", "several"),
        (
            ["model-00001-of-00004.safetensors", "model-00003-of-00004.safetensors"],
            "model-00002-of-00004.safetensors, model-00004-of-00004.safetensors",
            "missing",
        ),
        (
            ["model-00001-of-999999999.safetensors"],
            "model-00002-of-999999999.safetensors, model-00003-of-999999999.safetensors, "
            "model-00004-of-999999999.safetensors",
            "999999998 missing",
        ),
        (["model-1-of-1.safetensors", "model-1-of-2.safetensors"], "model-1-of-1", "not one split"),
        (["model-1-of-2.safetensors", "model-01-of-2.safetensors"], "model-01", "not one split"),
        (["model-1-of-2.safetensors", "model-2-of-3.safetensors"], "model-2-of-3", "not one split"),
        (["model-0-of-3.safetensors", "model-2-of-3.safetensors"], "model-1-of-3", "1 missing"),
        ([f"model-{i}-of-2.safetensors" for i in range(3)], "model-2-of-2", "beyond"),
        (["model-a-of-b.safetensors"], "model-a-of-b", "not one split"),
        (["model-1-of-2.safetensors", "model-3-of-2.safetensors"], "model-3-of-2", "beyond"),
        (["pytorch_model-1.bin", "pytorch_model.bin.index.json"], "pytorch_model-1.bin", "pickles"),
        (["model.pt"], "model.pt", "never opened"),
        (["original/a.safetensors", "README.md"], "", "no safetensors file"),
        ([], "", "no safetensors file"),
    ],
)
def test_no_telling_which_files(tmp_path: Path, present: list[str], named: str, text: str) -> None:
    put(tmp_path, *present)
    with Recorder(tmp_path) as source, pytest.raises(CheckpointError) as caught:
        select_files(source)
    assert named in str(caught.value.file)
    assert text in str(caught.value)
    assert source.reads == [] and source.sizes == []


def test_pickles_beside_safetensors_are_not_opened(model: Path) -> None:
    (model / "pytorch_model-1.bin").write_bytes(b"PK\x03\x04")
    (model / "pytorch_model.bin.index.json").write_text("{}")
    with Recorder(model) as source:
        read_headers(source, select_files(source))
    assert {file for file, *_ in source.reads} == {INDEX_FILE, *SHARDS}


# --- the index file --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{",
        b'{"weight_map":[]}',
        b'{"weight_map":{}}',
        b'{"metadata":{}}',
        b'{"weight_map":{"a":1}}',
        b'{"weight_map":{"a":null}}',
        b'{"weight_map":{"a":"model-00001-of-00002.safetensors","a":"x.safetensors"}}',
        b'{"weight_map":{"a":"b.safetensors"},"weight_map":{}}',
        b'{"weight_map":{"\xff":"b.safetensors"}}',
        b'{"weight_map":{"\\ud800":"b.safetensors"}}',
        b'{"total":NaN,"weight_map":{"a":"b.safetensors"}}',
        b'\xef\xbb\xbf{"weight_map":{"a":"b.safetensors"}}',
        b"[" * 100_000,
        b'{"n":' + b"1" * 5000 + b"}",
    ],
)
def test_broken_index(model: Path, text: bytes) -> None:
    (model / INDEX_FILE).write_bytes(text)
    error = refused(model)
    assert not isinstance(error, MissingFileError)
    assert len(str(error)) < 1000


def test_index_may_not_name_pickles(model: Path) -> None:
    (model / "weights.bin").write_bytes(shard_bytes(["a"]))
    write_index(model, {"a": "weights.bin"})
    error = refused(model)
    assert "no safetensors" in error.what and "never opened" in str(error.expected)


@pytest.mark.parametrize(
    "name", ["../x/model.safetensors", "/tmp/model.safetensors", "", "a\0.safetensors", "a/../b"]
)
def test_unsafe_names_are_refused_before_any_open(model: Path, name: str) -> None:
    write_index(model, {"a": "model-00001-of-00002.safetensors", "b": name})
    with Recorder(model) as source, pytest.raises(CheckpointError, match="unsafe file name"):
        select_files(source)
    assert set(source.sizes) == {INDEX_FILE}


def test_nested_names_are_legal(model: Path) -> None:
    deep = "part/one/two/three/four/model-1.safetensors"
    (model / deep).parent.mkdir(parents=True)
    (model / deep).write_bytes(shard_bytes([tensor(2, 0)]))
    write_index(model, WEIGHT_MAP | {tensor(2, 0): deep})
    index, headers = read(model)
    assert index.files == (*SHARDS, deep)
    assert headers[-1].names == [tensor(2, 0)]


def test_missing_files_make_one_error(model: Path) -> None:
    absent = "model-00003-of-00003.safetensors"
    lost = [tensor(1, e, part) for e in (6, 7) for part in ("qweight", "scales")]
    write_index(model, WEIGHT_MAP | dict.fromkeys(lost, absent))
    with Recorder(model) as source, pytest.raises(CheckpointError) as caught:
        select_files(source)
    error = caught.value
    assert error.what.startswith("1 of the 3 files")
    assert (error.file, error.layer, error.experts) == (absent, 1, "6-7")
    assert error.expected == "4 tensors in them, of layers 1"
    assert {file for file, *_ in source.reads} == {INDEX_FILE}
    for file in SHARDS:
        (model / file).unlink()
    error = refused(model)
    assert error.what.startswith("3 of the 3 files")
    assert error.file == ", ".join([*SHARDS, absent])
    assert (error.layer, error.experts) == (None, "0-4, 6-7")
    assert error.expected == "12 tensors in them, of layers 0-1"


def test_a_link_out_of_the_folder_is_not_called_missing(model: Path) -> None:
    file = next(iter(SHARDS))
    (model / file).rename(model.parent / "elsewhere.safetensors")
    (model / file).symlink_to(model.parent / "elsewhere.safetensors")
    assert "outside the model folder" in refused(model).what


# --- index and headers -----------------------------------------------------------------------


@pytest.mark.parametrize("stale", list(SHARDS))
def test_extra_copies_stay_in_the_header_and_are_not_owned(model: Path, stale: str) -> None:
    other = next(file for file in SHARDS if file != stale)
    names = [*SHARDS[other][:2], *SHARDS[stale], "unnamed"]
    (model / stale).write_bytes(shard_bytes(names, fill=9))
    index, headers = read(model)
    by_file = {header.file: header for header in headers}
    assert by_file[stale].names == names
    assert index.weight_map is not None
    mask = index.weight_map.owned([by_file[stale]])
    assert mask.dtype == np.bool_
    assert mask.tolist() == [False, False] + [True] * len(SHARDS[stale]) + [False]
    assert index.weight_map.owned([by_file[other]]).all()


def test_a_tensor_that_its_file_lacks(model: Path) -> None:
    first, second = SHARDS
    moved = {tensor(1, 0): first, tensor(1, 3): first}
    write_index(model, WEIGHT_MAP | moved | {"nowhere": second})
    error = refused(model)
    assert "index and headers disagree" in error.what
    assert (error.file, error.tensor, error.layer, error.experts) == (first, tensor(1, 0), 1, "0")
    assert f"it in {second}" in str(error.found)
    assert f"3 such tensors: {tensor(1, 0)}, {tensor(1, 3)}, nowhere" in str(error.found)
    # An extra copy elsewhere must not make up for the count.
    (model / first).write_bytes(shard_bytes([*SHARDS[first], "extra"]))
    assert "disagree" in refused(model).what


def test_one_name_in_two_files_without_an_index(tmp_path: Path) -> None:
    put(tmp_path, "model-1-of-2.safetensors", "model-2-of-2.safetensors", names=[tensor(0, 3)])
    error = refused(tmp_path)
    assert "several files" in error.what
    assert error.tensor == tensor(0, 3)
    assert error.file == "model-1-of-2.safetensors, model-2-of-2.safetensors"


# --- files that are not what they say --------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4976698672\n",
            "a Git LFS pointer for 4976698672 bytes",
        ),
        (b"PK\x03\x04" + bytes(26) + b"archive/data.pkl", "a zip archive"),
        (b"<html><body>404</body></html>", "an HTML page"),
        (b"Repository not found", "text that begins 'Repository"),
        (b"", "file is empty"),
        (b"1234567", "too short"),
    ],
)
def test_says_what_the_file_is(model: Path, content: bytes, text: str) -> None:
    file = "model-00002-of-00002.safetensors"
    (model / file).write_bytes(content)
    error = refused(model)
    assert error.file == file
    assert text in str(error)


def test_several_bad_files_make_one_message(model: Path) -> None:
    for file in SHARDS:
        (model / file).write_bytes((model / file).read_bytes()[:-5])
    first, second = SHARDS
    error = refused(model)
    assert "cut short" in error.what
    assert (error.file, error.tensor) == (first, tensor(0, 1))
    assert f"1 more files are refused: {second}" in str(error.found)

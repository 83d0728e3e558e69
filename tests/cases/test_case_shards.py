"""Cases, section 1: short, absent and stale shards; the index alone says who supplies what."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from case_checks import PRESENT, Recorder, case, header_end, ok, refuse
from case_shards import FIRST, SECOND, place

import loader
from loader.testing.checkpoint import TinyCheckpoint
from loader.testing.container import (
    INDEX,
    edit_json,
    read_file,
    read_header,
    truncate_file,
    write_file,
)

# 1.1 Short shard


@pytest.mark.parametrize("shard", [FIRST, SECOND])
@pytest.mark.parametrize("dialect", ["M", "A"])
def test_a_short_shard_is_refused_before_any_payload(
    tmp_path: Path, dialect: str, shard: str
) -> None:
    case(tmp_path, dialect)
    path = tmp_path / shard
    declared = path.stat().st_size
    truncate_file(path, drop=4096)
    header, begin = read_header(path)
    beyond = [name for name in header if begin + header[name]["data_offsets"][1] > declared - 4096]
    first = min(beyond, key=lambda name: header[name]["data_offsets"][0])
    facts: dict[str, Any] = {}
    if ".experts." in first:
        facts["layer"], facts["experts"] = place(first)
    refuse(
        tmp_path,
        file=shard,
        tensor=first,
        expected=declared,
        found=f"{declared - 4096} bytes",
        **facts,
    )


def test_a_cut_inside_one_scale_names_that_scale(tmp_path: Path) -> None:
    checkpoint = case(tmp_path, "M", order="random")
    name = checkpoint.name(1, 5, "down", "weight_scale")
    path = checkpoint.file_of(name)
    begin, end = read_header(path)[0][name]["data_offsets"]
    truncate_file(path, size=header_end(path) + (begin + end) // 2)
    refuse(tmp_path, file=path.name, tensor=name, layer=1, experts="5", says=("such tensors",))


@pytest.mark.parametrize("size, says", [("header", "inside its header"), (7, "7 bytes"), (0, "")])
def test_a_shard_without_a_whole_header(tmp_path: Path, size: Any, says: str) -> None:
    case(tmp_path, "M")
    path = tmp_path / SECOND
    truncate_file(path, size=header_end(path) // 2 if size == "header" else size)
    refuse(tmp_path, file=SECOND, says=(says,) if says else ("empty",))


def test_several_short_shards_make_one_message(tmp_path: Path) -> None:
    case(tmp_path, "M", shards=3)
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    for name in names:
        truncate_file(tmp_path / name, drop=100)
    refuse(tmp_path, file=names[0], says=("2 more files", *names))


# 1.2 Shard named but absent


def third_shard(folder: Path, checkpoint: TinyCheckpoint) -> list[str]:
    """Gives layer 1, experts 6 and 7, to a shard that is not on disk; returns their tensors."""
    names = [n for n in checkpoint.tensor_names() if any(f".1.mlp.experts.{e}." in n for e in "67")]

    def edit(index: dict[str, Any]) -> None:
        index["weight_map"].update(dict.fromkeys(names, "model-00003-of-00003.safetensors"))

    edit_json(folder, INDEX, edit)
    return names


@pytest.mark.parametrize("dialect", ["A", "P", "N", "M"])
def test_an_absent_shard_is_named_with_what_it_holds(tmp_path: Path, dialect: str) -> None:
    names = third_shard(tmp_path, case(tmp_path, dialect))
    refuse(
        tmp_path,
        file="model-00003-of-00003.safetensors",
        layer=1,
        experts="6-7",
        expected=f"{len(names)} tensors",
        found="no such file",
    )


def test_no_indexed_shard_on_disk(tmp_path: Path) -> None:
    checkpoint = case(tmp_path, "A")
    names = checkpoint.tensor_names()
    for path in checkpoint.files():
        path.unlink()
    error = refuse(tmp_path, file=FIRST, experts="0-7", expected=f"{len(names)} tensors")
    assert SECOND in str(error.file) and "layers 0-1" in str(error.expected)


# 1.3 Extra copies


def stale_copies(checkpoint: TinyCheckpoint, layer: int, part: str) -> list[str]:
    """Other values of some tensors in every file that the index does not give them to."""
    copied = []
    files = checkpoint.files()
    content = {path: read_file(path) for path in files}
    for path in files:
        for other in files:
            for name, tensor in list(content[path].items()):
                stale = f"layers.{layer}.mlp.experts." in name and name.endswith(part)
                if stale and other != path and name not in read_header(other)[0]:
                    values = ~tensor.array()
                    content[other][name] = type(tensor)(
                        tensor.dtype, tensor.shape, values.tobytes()
                    )
                    copied.append(name)
        write_file(path, content[path])
    for path in files:
        write_file(path, content[path])
    return copied


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("dialect, part", [("A", "qweight"), ("M", "weight"), ("P", "_packed")])
def test_stale_copies_are_never_read(tmp_path: Path, dialect: str, part: str, layer: int) -> None:
    checkpoint = case(tmp_path, dialect)
    copied = stale_copies(checkpoint, layer, part)
    owner = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    stale = [
        (path.name, begin + entry["data_offsets"][0], begin + entry["data_offsets"][1])
        for path in checkpoint.files()
        for header, begin in [read_header(path)]
        for name, entry in header.items()
        if owner[name] != path.name
    ]
    assert len(stale) == len(copied) > 0
    ok(checkpoint, truth=indexed(checkpoint), dtypes=())
    source = Recorder(tmp_path)
    loader.load(source)
    source.close()
    for file, begin, end in stale:
        reads = [r for r in source.payload_reads() if r[0] == file]
        assert not any(offset < end and begin < offset + length for _, offset, length in reads)


def indexed(checkpoint: TinyCheckpoint) -> Any:
    """The generated numbers: what the index means, whatever stale copies the files hold."""
    return checkpoint.codes


def test_swapped_file_names_change_nothing(tmp_path: Path) -> None:
    checkpoint = case(tmp_path, "A")
    stale_copies(checkpoint, 0, "qweight")
    first, second, aside = tmp_path / FIRST, tmp_path / SECOND, tmp_path / "aside"
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    swap = {FIRST: SECOND, SECOND: FIRST}

    def edit(index: dict[str, Any]) -> None:
        index["weight_map"] = {name: swap[file] for name, file in index["weight_map"].items()}

    edit_json(tmp_path, INDEX, edit)
    ok(checkpoint, truth=checkpoint.codes, dtypes=())


def test_a_name_in_two_files_without_an_index_is_refused(tmp_path: Path) -> None:
    checkpoint = case(tmp_path, "A")
    copied = stale_copies(checkpoint, 0, "qweight")
    (tmp_path / INDEX).unlink()
    error = refuse(tmp_path, file=FIRST, tensor="qweight", layer=0, experts=PRESENT)
    assert SECOND in str(error.file) and error.tensor in copied
    assert f"{len(copied)} such tensors" in str(error)


@pytest.mark.parametrize("dialect", ["A", "M"])
def test_of_two_splits_only_the_indexed_one_is_opened(tmp_path: Path, dialect: str) -> None:
    checkpoint = case(tmp_path, dialect)
    other = case(tmp_path / "other", dialect, shards=3, seed=9)
    for path in other.files():
        shutil.move(path, tmp_path / path.name)
    shutil.rmtree(tmp_path / "other")
    ok(checkpoint, dtypes=())
    source = Recorder(tmp_path)
    loader.load(source)
    source.close()
    assert {file for file, *_ in source.reads if file.endswith(".safetensors")} == {FIRST, SECOND}

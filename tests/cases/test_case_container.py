"""Cases, section 1: header and index are untrusted, and files may be anything."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from case_checks import PRESENT, Recorder, case, nan_memory, ok, refuse, small
from case_shards import FIRST, SECOND, place

import loader
from loader.testing.container import (
    INDEX,
    edit_json,
    read_file,
    replace_header,
    truncate_file,
    write_file,
)

# 1.4 Broken header


def first_expert(header: dict[str, Any], part: str = "qweight") -> str:
    """One expert tensor of a header."""
    return next(name for name in header if name.endswith(part) and ".experts." in name)


def test_a_tensor_twice_in_one_header(tmp_path: Path) -> None:
    case(tmp_path, "A")
    names = []

    def edit(header: dict[str, Any]) -> str:
        names.append(first_expert(header))
        text = json.dumps(header)
        return f"{text[:-1]}, {json.dumps(names[0])}: {json.dumps(header[names[0]])}}}"

    replace_header(tmp_path / FIRST, edit)
    layer, expert = place(names[0])
    refuse(
        tmp_path,
        file=FIRST,
        tensor=names[0],
        layer=layer,
        experts=expert,
        says=("more than once",),
    )


def break_entry(folder: Path, change: Any) -> tuple[str, dict[str, Any]]:
    """Change one ``qweight`` entry of the first file's header; returns its name and entry."""
    kept: list[Any] = []

    def edit(header: dict[str, Any]) -> None:
        name = first_expert(header)
        change(header[name])
        kept.extend((name, header[name]))

    replace_header(folder / FIRST, edit)
    return kept[0], kept[1]


def twice_the_shape(entry: dict[str, Any]) -> None:
    entry["shape"][0] *= 2


def backwards(entry: dict[str, Any]) -> None:
    entry["data_offsets"].reverse()


@pytest.mark.parametrize(
    "change, rule",
    [
        (twice_the_shape, "do not match the shape"),
        (backwards, "ends before it begins"),
        (lambda entry: entry["data_offsets"].__setitem__(0, -8), "data_offsets have the wrong"),
        (lambda entry: entry["data_offsets"].__setitem__(1, 1.5), "data_offsets have the wrong"),
        (lambda entry: entry["data_offsets"].__setitem__(0, "0"), "data_offsets have the wrong"),
        (lambda entry: entry["data_offsets"].__setitem__(0, True), "data_offsets have the wrong"),
        (lambda entry: entry["data_offsets"].append(9), "data_offsets have the wrong"),
        (lambda entry: entry.update(shape=[-1, 4]), "shape has the wrong type"),
        (lambda entry: entry.update(dtype="I4"), "unknown dtype"),
    ],
)
def test_a_broken_entry_says_which_rule_broke(tmp_path: Path, change: Any, rule: str) -> None:
    case(tmp_path, "A")
    name, entry = break_entry(tmp_path, change)
    layer, expert = place(name)
    error = refuse(
        tmp_path,
        file=FIRST,
        tensor=name,
        layer=layer,
        experts=expert,
        expected=PRESENT,
        found=PRESENT,
        says=(rule,),
    )
    if change is twice_the_shape:
        begin, end = entry["data_offsets"]
        assert f"{2 * (end - begin)} bytes" in str(error.expected)
        assert f"{end - begin} bytes" in str(error.found)


def test_a_header_that_is_a_list(tmp_path: Path) -> None:
    case(tmp_path, "A")
    replace_header(tmp_path / FIRST, lambda header: list(header))
    refuse(tmp_path, file=FIRST, expected="a JSON object")


def test_the_index_gives_a_tensor_to_a_file_without_it(tmp_path: Path) -> None:
    checkpoint = case(tmp_path, "P")
    name = checkpoint.name(0, 3, "up", "weight_scale")
    edit_json(tmp_path, INDEX, lambda index: index["weight_map"].update({name: SECOND}))
    refuse(tmp_path, file=SECOND, tensor=name, layer=0, experts="3", found=FIRST)


# 1.5 Shard names that leave the folder


@pytest.mark.parametrize(
    "value",
    ["../x/model.safetensors", "/tmp/model.safetensors", "", "a\0b.safetensors", "a/../../b"],
)
def test_a_shard_name_that_leaves_the_folder(tmp_path: Path, value: str) -> None:
    checkpoint = case(tmp_path / "in", "P")
    (tmp_path / "x").mkdir()
    shutil.copy(checkpoint.files()[0], tmp_path / "x" / "model.safetensors")
    name = checkpoint.name(1, 0, "gate", "weight_packed")
    edit_json(tmp_path / "in", INDEX, lambda index: index["weight_map"].update({name: value}))
    source = Recorder(tmp_path / "in")
    with pytest.raises(loader.CheckpointError):
        loader.plan(source)
    source.close()
    assert not [file for file, *_ in source.reads if file.endswith(".safetensors")]
    refuse(tmp_path / "in", file=PRESENT, expected="inside the model folder", says=("unsafe",))


def test_a_shard_in_a_folder_of_its_own_is_legal(tmp_path: Path) -> None:
    checkpoint = case(tmp_path, "P")
    (tmp_path / "part").mkdir()
    shutil.move(tmp_path / FIRST, tmp_path / "part" / "model-1.safetensors")

    def edit(index: dict[str, Any]) -> None:
        moved = {FIRST: "part/model-1.safetensors"}
        index["weight_map"] = {n: moved.get(f, f) for n, f in index["weight_map"].items()}

    edit_json(tmp_path, INDEX, edit)
    ok(checkpoint, dtypes=())


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    checkpoint = case(tmp_path / "in", "P")
    shutil.move(checkpoint.files()[0], tmp_path / "outside.safetensors")
    checkpoint.files()[0].symlink_to(tmp_path / "outside.safetensors")
    refuse(tmp_path / "in", file=FIRST, says=("outside",))


# 1.6 Not safetensors at all


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("kind", ["lfs", "zip", "pickle", "html", "text"])
def test_a_shard_that_is_something_else_is_named(tmp_path: Path, kind: str) -> None:
    folder, mark = tmp_path / "in", tmp_path / "mark"
    case(folder, "A")
    path = folder / SECOND
    says = {
        "lfs": ("Git LFS pointer", "5000000000 bytes"),
        "zip": ("zip",),
        "pickle": ("pickle",),
        "html": ("HTML",),
        "text": ("text",),
    }[kind]
    if kind == "lfs":
        oid = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "ab" * 32
        path.write_text(f"{oid}\nsize 5000000000\n")
    elif kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(Bomb(mark)))
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(Bomb(mark), protocol=2))
    elif kind == "html":
        path.write_text("<!DOCTYPE html>\n<html><head><title>404</title></head></html>\n")
    else:
        path.write_text("This file was moved to another server.\n")
    refuse(folder, file=SECOND, found=says[0], says=says)
    assert not mark.exists()


def test_a_folder_of_pickles_alone_is_refused(tmp_path: Path) -> None:
    folder, mark = tmp_path / "in", tmp_path / "mark"
    checkpoint = case(folder, "A")
    names = checkpoint.tensor_names()
    for path in [*checkpoint.files(), folder / INDEX]:
        path.unlink()
    pickles = [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
    for file in pickles:
        (folder / file).write_bytes(pickle.dumps(Bomb(mark)))
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, pickles[0])}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    refuse(folder, file=pickles[0], found="pickles, which are never opened")
    assert not mark.exists()


def test_an_index_that_names_pickles_is_refused(tmp_path: Path) -> None:
    case(tmp_path, "A", shards=1)
    index = {"metadata": {}, "weight_map": {"a": "pytorch_model-00001-of-00001.bin"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    refuse(tmp_path, file="pytorch_model-00001-of-00001.bin", says=("pickles are never opened",))


def test_safetensors_beside_pickles(tmp_path: Path) -> None:
    folder, mark = tmp_path / "in", tmp_path / "mark"
    checkpoint = case(folder, "A")
    (folder / "pytorch_model-00001-of-00001.bin").write_bytes(pickle.dumps(Bomb(mark)))
    (folder / "pytorch_model.bin.index.json").write_text('{"weight_map": {}}')
    ok(checkpoint, dtypes=())
    assert not mark.exists()


# Faults that only the payload's reading meets


@pytest.mark.parametrize("dialect", ["A", "M"])
def test_a_file_that_shrinks_after_planning_is_refused(tmp_path: Path, dialect: str) -> None:
    checkpoint = small(tmp_path, dialect)

    def cut(event: loader.LayerEvent) -> None:
        if event.state == "planned" and event.layer == 0:
            truncate_file(checkpoint.files()[-1], drop=8)

    with nan_memory() as fresh:
        with pytest.raises(loader.CheckpointError) as caught:
            loader.load(tmp_path, observers=[cut])
        assert fresh.calls and not fresh.alive
    assert caught.value.file == SECOND and caught.value.layer is not None


def test_names_with_line_breaks_make_one_line(tmp_path: Path) -> None:
    checkpoint = small(tmp_path, "A", shards=1)
    path = checkpoint.files()[0]
    tensors = read_file(path)
    extra = type(next(iter(tensors.values())))("U8", (1,), np.zeros(1, np.uint8).tobytes())
    write_file(path, {**tensors, "model.layers.0.mlp.experts.0.what\nis\x1b[31m.this": extra})
    refuse(tmp_path, loader.UnsupportedError, says=("experts",))


def test_the_command_line_of_a_real_process(tmp_path: Path) -> None:
    """One line on stderr, nothing on stdout, exit 1, with everything that imports may say."""
    checkpoint = small(tmp_path, "A")
    truncate_file(checkpoint.files()[1], drop=8)
    call = [sys.executable, "-m", "loader", "load", str(tmp_path)]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("qpn: file is cut short; ")

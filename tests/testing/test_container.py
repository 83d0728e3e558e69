"""Files: order, shards, headers, holes, and the edits that break them on purpose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from formulas import assert_same_bits, load, small
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from loader.errors import CheckpointError, UnsupportedError
from loader.testing.checkpoint import PRESETS, tiny_checkpoint
from loader.testing.container import (
    INDEX,
    edit_json,
    edit_tensor,
    read_file,
    read_header,
    replace_header,
    rewrite,
    truncate_file,
)


@pytest.mark.parametrize("dialect", ["ct-int4", "modelopt-nvfp4"])
def test_dtype_order_is_that_of_the_safetensors_package(tmp_path: Path, dialect: str) -> None:
    made = small(tmp_path / "made", dialect, order="dtype")
    save_file(load(made.folder), tmp_path / "theirs.safetensors")
    theirs = read_file(tmp_path / "theirs.safetensors")
    assert list(read_file(made.files()[0])) == list(theirs)


def test_orders(tmp_path: Path) -> None:
    names = {
        order: list(read_file(small(tmp_path / order, "awq-gemm", order=order).files()[0]))
        for order in ("name", "random")
    }
    assert names["name"] == sorted(names["name"])
    assert names["random"] != names["name"] and set(names["random"]) == set(names["name"])
    layers = [name.split(".")[2] for name in names["random"] if ".layers." in name]
    assert layers == sorted(layers)


def test_shards_cut_by_size_and_index(tmp_path: Path) -> None:
    made = small(tmp_path, "ct-nvfp4", shards=3)
    index = json.loads((tmp_path / INDEX).read_text())
    headers = {path.name: read_header(path)[0] for path in made.files()}
    assert len(headers) == 3
    sizes = [path.stat().st_size for path in made.files()]
    assert max(sizes) < 1.5 * min(sizes)
    held = {name: file for file, header in headers.items() for name in header}
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == sum(
        entry["data_offsets"][1] - entry["data_offsets"][0]
        for header in headers.values()
        for entry in header.values()
    )


def test_header_lengths(tmp_path: Path) -> None:
    lengths = (99_990, 99_997)
    made = small(tmp_path, "modelopt-nvfp4", shards=2, header_lengths=lengths)
    for path, length in zip(made.files(), lengths, strict=True):
        assert int.from_bytes(path.read_bytes()[:8], "little") == length
        with safe_open(path, "pt") as opened:
            assert len(list(opened.keys())) > 10
    assert_same_bits(made.stored_codes(1, 2, "down").q, made.codes(1, 2, "down").q)


def test_sparse_has_full_size_and_no_payload(tmp_path: Path) -> None:
    full = small(tmp_path / "full", "awq-gemm", shards=2)
    hole = small(tmp_path / "hole", "awq-gemm", shards=2, payload="sparse")
    assert [p.stat().st_size for p in full.files()] == [p.stat().st_size for p in hole.files()]
    with pytest.raises(UnsupportedError):
        hole.weight(0, 0, "up")
    big = tiny_checkpoint(tmp_path / "big", **{**PRESETS["reference-geometry"], "layers": 1})
    size = sum(path.stat().st_size for path in big.files())
    assert 1.4e9 < size < 1.6e9
    assert sum(path.stat().st_blocks * 512 for path in big.files()) < 0.01 * size
    assert len(big.tensor_names()) > 4608


def test_rewrite_drops_renames_and_adds(tmp_path: Path) -> None:
    made = small(tmp_path, "awq-gemm", shards=2)
    gone, old = made.name(0, 1, "up", "qzeros"), made.name(0, 0, "gate", "scales")

    def edit(tensors: dict[str, Any]) -> None:
        del tensors[gone]
        tensors["renamed"] = tensors.pop(old)
        tensors["added"] = np.arange(6, dtype=np.float32).reshape(2, 3)

    before = load(tmp_path)
    rewrite(tmp_path, edit)
    after = load(tmp_path)
    assert before.keys() - after.keys() == {gone, old}
    assert after.keys() - before.keys() == {"renamed", "added"}
    assert torch.equal(after["renamed"], before[old])
    assert after["added"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert all(torch.equal(after[name], before[name]) for name in before.keys() & after.keys())


def test_edit_tensor_and_json(tmp_path: Path) -> None:
    made = small(tmp_path, "ct-nvfp4")
    name = made.name(1, 2, "down", "weight_global_scale")
    edit_tensor(tmp_path, name, lambda value: value * np.nan)
    assert np.isnan(made.stored_codes(1, 2, "down").global_scale)
    assert np.isfinite(made.codes(1, 2, "down").global_scale)
    edit_json(tmp_path, "config.json", lambda config: config.update(hidden_act="gelu"))
    assert json.loads((tmp_path / "config.json").read_text())["hidden_act"] == "gelu"
    with pytest.raises(CheckpointError, match="absent"):
        edit_tensor(tmp_path, "absent", lambda value: value)


def test_broken_headers_and_short_files(tmp_path: Path) -> None:
    made = small(tmp_path, "modelopt-nvfp4", shards=2)
    first, second = made.files()
    size = second.stat().st_size
    truncate_file(second, drop=4096)
    assert second.stat().st_size == size - 4096
    replace_header(first, lambda header: [])
    for path in (first, second):
        with pytest.raises(SafetensorError), safe_open(path, "pt"):
            pass
    truncate_file(second, size=7)
    assert second.stat().st_size == 7

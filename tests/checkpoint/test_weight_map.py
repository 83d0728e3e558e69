"""The weight map: the index as columns, and as the mapping that it is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from loader.checkpoint import scan
from loader.checkpoint.header import Header
from loader.checkpoint.source import LocalSource
from loader.checkpoint.weight_map import INDEX_FILE, WeightMap, read_weight_map

FILE_OF = {"b": "2.safetensors", "a": "1.safetensors", "ü": "2.safetensors", "": "1.safetensors"}


@pytest.fixture(params=["native", "Python"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "Python":
        monkeypatch.setattr(scan, "LIBRARY", None)
    elif scan.LIBRARY is None:
        pytest.skip("the native core was not built")
    return str(request.param)


def header(file: str, *names: str) -> Header:
    count = len(names)
    zeros = np.zeros(count, np.int64)
    return Header(
        file, [*names], zeros.astype(np.uint8), zeros.astype(np.int32), [()], zeros, zeros
    )


def read(folder: Path, index: object) -> WeightMap:
    (folder / INDEX_FILE).write_text(json.dumps(index, ensure_ascii=False))
    with LocalSource(folder) as source:
        return read_weight_map(source)


@pytest.mark.usefixtures("reader")
def test_it_is_the_mapping_that_the_index_holds(tmp_path: Path) -> None:
    weight_map = read(tmp_path, {"metadata": {"total_size": 8}, "weight_map": FILE_OF})
    assert weight_map == FILE_OF and list(weight_map) == list(FILE_OF)
    assert weight_map.files == ("1.safetensors", "2.safetensors") and len(weight_map) == 4
    assert weight_map["ü"] == "2.safetensors" and "c" not in weight_map
    assert weight_map == WeightMap.of(FILE_OF)


@pytest.mark.usefixtures("reader")
def test_what_a_file_supplies() -> None:
    weight_map = WeightMap.of(FILE_OF)
    headers = [
        header("1.safetensors", "b", "a", "c"),
        header("3.safetensors", "a", "b"),
        header("2.safetensors", "ü", "", "b"),
        header("1.safetensors"),
    ]
    owned = weight_map.owned(headers)
    assert owned.dtype == np.bool_
    assert owned.tolist() == [False, True, False, False, False, True, False, True]
    assert weight_map.owned([]).tolist() == []


@pytest.mark.usefixtures("reader")
def test_a_name_with_a_newline(tmp_path: Path) -> None:
    weight_map = read(tmp_path, {"weight_map": {"a\nb": "1.safetensors", "a": "2.safetensors"}})
    owned = weight_map.owned([header("1.safetensors", "a\nb", "a"), header("2.safetensors", "a")])
    assert owned.tolist() == [True, False, True]

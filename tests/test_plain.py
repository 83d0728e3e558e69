"""Unquantized tensors are read into their dtype, in pieces where it changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from loader import plain
from loader.checkpoint.catalog import Catalog, build_catalog
from loader.checkpoint.index import read_headers, select_files
from loader.checkpoint.source import LocalSource
from loader.errors import CapacityError, CheckpointError, UnsupportedError

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8)


def catalog_of(source: LocalSource) -> Catalog:
    index = select_files(source)
    return build_catalog(read_headers(source, index), index)


def read(folder: Path, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    with LocalSource(folder) as source:
        catalog = catalog_of(source)
        return plain.read_tensor(source, catalog, catalog.names.index(name), dtype)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(0, 7), max_size=3),
    own=st.sampled_from(DTYPES),
    wanted=st.sampled_from((None, torch.float32, torch.bfloat16)),
    piece=st.sampled_from((8, 64, 4 << 20)),
    seed=st.integers(0, 99),
)
def test_a_tensor_is_what_the_file_holds_in_the_dtype_that_was_asked_for(
    tmp_path_factory: pytest.TempPathFactory,
    shape: list[int],
    own: torch.dtype,
    wanted: torch.dtype | None,
    piece: int,
    seed: int,
) -> None:
    folder = tmp_path_factory.mktemp("plain")
    value = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(50).abs().to(own)
    save_file({"a": torch.ones(3), "b": value}, folder / "model.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain, "PIECE_BYTES", piece)
        found = read(folder, "b", wanted)
    assert found.dtype == (wanted or own)
    assert torch.equal(found, value.to(wanted or own))


def test_a_dtype_that_is_no_number_here_is_named(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(4).to(torch.float8_e5m2)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match="x.*F8_E5M2"):
        read(tmp_path, "x")


def test_a_file_that_ends_early_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.zeros(4000)}, path)
    with LocalSource(tmp_path) as source:
        catalog = catalog_of(source)
        with open(path, "r+b") as file:
            file.truncate(path.stat().st_size - 8)
        with pytest.raises(CheckpointError, match="model.safetensors"):
            plain.read_tensor(source, catalog, 0)


def test_memory_that_is_not_there_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*args: object) -> torch.Tensor:
        raise MemoryError

    save_file({"x": torch.zeros(4)}, tmp_path / "model.safetensors")
    monkeypatch.setattr("loader.memory.fresh", none)
    with pytest.raises(CapacityError, match="memory for x"):
        read(tmp_path, "x")

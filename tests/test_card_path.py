"""Loads by the way of a card, on the host: ring, chunks, conversion, findings, failures.

What only a card can show, its memory and its speed, is in ``test_cuda_stream.py``.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from bank_oracle import small
from host_card import COMPILER, build, host_as_card
from load_fakes import RecordingSource

import loader
from loader.checkpoint.source import LocalSource
from loader.core import ReadError
from loader.cuda_core import CudaCore, CudaError
from loader.errors import CheckpointError, ConversionError, LoaderError
from loader.testing.checkpoint import tiny_checkpoint
from loader.testing.container import edit_tensor

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no g++ to compile it with")

LITTLE = 128 << 10


@pytest.fixture(scope="session")
def core(tmp_path_factory: pytest.TempPathFactory) -> CudaCore:
    return build(tmp_path_factory.mktemp("card"))


def load(core: CudaCore, source: Any, **settings: Any) -> loader.LoadedExperts:
    with pytest.MonkeyPatch.context() as patch, host_as_card(core, patch):
        return loader.load(source, **settings)


def assert_same(core: CudaCore, source: Any, **settings: Any) -> loader.LoadedExperts:
    mine = load(core, source, **settings)
    folder = source.folder if isinstance(source, RecordingSource) else source
    wanted = loader.load(folder, **settings)
    assert list(mine) == list(wanted)
    for layer in wanted:
        for a, b in zip(mine[layer].banks(), wanted[layer].banks(), strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    planned = mine.report.planned["memory"]
    assert mine.report.memory.resident == planned["predicted_resident"]
    return mine


@pytest.mark.parametrize("staging", (LITTLE, 64 << 20))
@pytest.mark.parametrize("dialect", ("awq-gemm", "ct-int4-asym", "ct-nvfp4"))
def test_the_bits_are_those_of_the_host(
    tmp_path: Path, core: CudaCore, dialect: str, staging: int
) -> None:
    group = {} if "nvfp4" in dialect else {"group": 32}
    made = tiny_checkpoint(
        tmp_path, dialect=dialect, hidden=128, intermediate=96, experts=4, layers=3, shards=3,
        order="random", **group,
    )  # fmt: skip
    layouts = ("compact", "wide") if "nvfp4" in dialect else ("compact", "wide", "record")
    for layout in layouts:
        policy = loader.Policy(layout=layout)
        report = assert_same(core, made.folder, policy=policy, staging_bytes=staging).report
        assert report.memory.host_pinned > 0
        assert "host pinned" in str(report)
        assert report.to_dict()["memory"]["counters"]["why_pageable"] == ""


def test_a_source_that_lends_no_descriptor(tmp_path: Path, core: CudaCore) -> None:
    made = small(tmp_path, layers=2, excluded=(1,))
    assert_same(core, RecordingSource(made.folder), staging_bytes=LITTLE)
    assert_same(core, made.folder, staging_bytes=LITTLE)


def test_where_pinning_is_refused_the_report_says_so(
    tmp_path: Path, core: CudaCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = small(tmp_path)

    def refused(memory: torch.Tensor, device: torch.device) -> None:
        raise CudaError("host memory could not be pinned", found="CUDA error 1")

    monkeypatch.setattr(core, "pin", refused)
    report = assert_same(core, made.folder).report
    assert report.memory.host_pinned == 0
    assert "Staging is pageable memory: host memory could not be pinned" in str(report)


def test_what_is_wrong_is_said_as_by_the_host(tmp_path: Path, core: CudaCore) -> None:
    made = tiny_checkpoint(tmp_path, hidden=128, intermediate=96, experts=3, group=32, layers=2)

    def spoil(scales: Any) -> Any:
        scales = scales.copy()
        scales.reshape(-1).view("uint16")[[77, 80]] = 0x7E00
        return scales

    edit_tensor(made.folder, made.name(1, 2, "up", made.writer.scale), spoil)
    said = []
    for one in (lambda: load(core, made.folder), lambda: loader.load(made.folder)):
        with pytest.raises(ConversionError) as caught:
            one()
        said.append(str(caught.value))
    assert said[0] == said[1] and "2 such values" in said[0]
    policy = loader.Policy(nonfinite="warn")
    kept = load(core, made.folder, policy=policy).report.nonfinite
    assert kept == loader.load(made.folder, policy=policy).report.nonfinite != ()


def test_a_file_that_is_cut_is_named_with_its_layer(tmp_path: Path, core: CudaCore) -> None:
    made = tiny_checkpoint(tmp_path, hidden=256, intermediate=256, experts=6, layers=3)
    file = made.files()[0]

    def cut(event: loader.LayerEvent) -> None:
        if event.layer == 1 and event.state == "reading":
            with file.open("r+b") as open_file:
                open_file.truncate(50_000)

    with pytest.raises(CheckpointError) as caught:
        load(core, made.folder, observers=[cut], staging_bytes=LITTLE)
    assert caught.value.layer in (1, 2) and caught.value.file == file.name


@pytest.mark.parametrize("state", ("reading", "converting", "prepared", "released", "ready"))
def test_a_failed_load_lets_go_of_everything(tmp_path: Path, core: CudaCore, state: str) -> None:
    made = tiny_checkpoint(tmp_path, hidden=256, intermediate=256, experts=6, layers=3)

    def fails(event: loader.LayerEvent) -> None:
        if event.layer == 1 and event.state == state:
            raise RuntimeError(state)

    def tensors() -> int:
        gc.collect()
        return sum(type(item) is torch.Tensor for item in gc.get_objects())

    before = tensors()
    with pytest.raises(LoaderError, match=state):
        load(core, made.folder, observers=[fails], staging_bytes=LITTLE)
    assert tensors() == before


def test_a_read_that_fails_in_a_native_thread_names_the_file(
    tmp_path: Path, core: CudaCore
) -> None:
    made = small(tmp_path, layers=1)

    class Unreadable(LocalSource):
        @contextmanager
        def descriptor(self, file: str) -> Iterator[int]:
            other = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
            try:
                yield other
            finally:
                os.close(other)

    with Unreadable(made.folder) as source, pytest.raises(ReadError) as caught:
        load(core, source)
    assert caught.value.file == made.files()[0].name and "Is a directory" in str(caught.value)

"""How a ring is kept full: order, files that stay open, and what is let go of after a failure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.checkpoint.source import LocalSource
from loader.chunks import Chunk, Read
from loader.errors import CheckpointError
from loader.pieces import PIECE
from loader.stream import FILES_AT_ONCE, Arriving, RingReads, Scheduled

FILES = tuple(f"{name}.safetensors" for name in "abcdefg")
FILE_BYTES = 4096


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ring-reads")
    for seed, name in enumerate(FILES):
        content = np.random.default_rng(seed).integers(0, 256, FILE_BYTES, np.uint8)
        (made / name).write_bytes(content.tobytes())
    return made


class HostRing:
    """A ring whose reads happen when their chunk is taken, from descriptors that must be open."""

    def __init__(self, chunks: int) -> None:
        self.shape = SimpleNamespace(chunks=chunks)
        self._places = [bytearray(FILE_BYTES) for _ in range(chunks)]
        self._reads: list[list[tuple[int, int, int, int]]] = [[] for _ in range(chunks)]
        self.under_way: list[int] = []
        self.most_under_way = 0
        self.closed = 0

    def submit(self, place: int, nbytes: int, reads: Sequence[tuple[int, int, int, int]]) -> None:
        assert not self._reads[place]
        self._reads[place] = list(reads)
        if place not in self.under_way:
            self.under_way.append(place)
        self.most_under_way = max(self.most_under_way, len(self.under_way))

    def take(self, place: int, nbytes: int, files: Mapping[int, str]) -> torch.Tensor:
        for file, offset, length, at in self._reads[place]:
            assert file in files
            self._places[place][at : at + length] = os.pread(file, length, offset)
        self._reads[place] = []
        return torch.frombuffer(self._places[place], dtype=torch.uint8)[:nbytes]

    def release(self, place: int) -> None:
        self.under_way.remove(place)

    def close(self) -> None:
        self.closed += 1


def scheduled(*reads: tuple[int, int, int, int], layer: int = 0) -> Scheduled:
    return Scheduled(layer, Chunk(tuple(Read(*r) for r in reads), np.zeros(1, PIECE)), False)


def bytes_of(arriving: Arriving) -> torch.Tensor:
    """What the converter is given of one chunk."""
    got: list[torch.Tensor] = []

    def write(data: torch.Tensor, descriptors: torch.Tensor) -> torch.Tensor:
        got.append(data.clone())
        return torch.empty((0, 6), dtype=torch.int64, device="cpu")

    arriving.convert(SimpleNamespace(write=write), str)  # type: ignore[arg-type]  # a stand-in
    return got[0]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_chunks_come_in_order_with_their_bytes(folder: Path, data: st.DataObject) -> None:
    """Also where a chunk has reads from more files than may be open."""
    items = []
    for _ in range(data.draw(st.integers(0, 8))):
        reads, at = [], 0
        for file in data.draw(st.lists(st.integers(0, len(FILES) - 1), min_size=1, max_size=9)):
            length = data.draw(st.integers(1, 300))
            reads.append((file, data.draw(st.integers(0, FILE_BYTES - 300)), length, at))
            at += length
        items.append(scheduled(*reads))
    ring = HostRing(chunks := data.draw(st.integers(1, 3)))
    with LocalSource(folder, descriptors=FILES_AT_ONCE * chunks) as source:
        reader: Any = RingReads(source, FILES, ring)  # type: ignore[arg-type]  # a ring of the host as a stand-in
        seen = 0
        for item, arriving in zip(items, reader.stream(iter(items)), strict=True):
            assert arriving.scheduled is item
            found = bytes_of(arriving).numpy().tobytes()
            for read in item.chunk.reads:
                content = (folder / FILES[read.file]).read_bytes()
                wanted = content[read.offset : read.offset + read.length]
                assert found[read.at : read.at + read.length] == wanted
            seen += 1
        assert seen == len(items) and not ring.under_way
        assert ring.most_under_way == min(len(items), chunks)
        reader.close()
    assert ring.closed == 1


def test_a_failure_lets_go_of_every_file(folder: Path) -> None:
    items = [scheduled((number, 0, 10, 0), layer=number) for number in range(5)]
    ring = HostRing(3)
    source = LocalSource(folder)
    reader: Any = RingReads(source, (*FILES[:3], "gone.safetensors", FILES[4]), ring)  # type: ignore[arg-type]  # a ring of the host as a stand-in
    stream = reader.stream(iter(items))
    bytes_of(next(stream))
    with pytest.raises(CheckpointError, match="does not exist") as caught:
        next(stream)
    assert caught.value.layer == 3
    reader.close()
    assert ring.closed == 1
    source.close()  # would wait for ever for a file that is still in use


def test_a_file_that_changes_while_it_is_read_is_found(tmp_path: Path) -> None:
    path = tmp_path / FILES[0]
    path.write_bytes(bytes(1000))
    ring = HostRing(2)
    source = LocalSource(tmp_path)
    reader: Any = RingReads(source, FILES, ring)  # type: ignore[arg-type]  # a ring of the host as a stand-in
    arriving = next(reader.stream(iter([scheduled((0, 0, 10, 0))])))
    path.write_bytes(bytes(2000))
    with pytest.raises(CheckpointError, match="changed while loading"):
        bytes_of(arriving)
    reader.close()
    source.close()

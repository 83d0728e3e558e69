"""What the ranks of one host read: together every byte, each rank a byte once."""

from __future__ import annotations

from pathlib import Path

import pytest
from load_fakes import RecordingSource
from ranks_fakes import make

import loader
from loader import ranks
from loader.testing.checkpoint import TinyCheckpoint
from loader.testing.container import read_header


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def checkpoints(folder: Path) -> dict[str, TinyCheckpoint]:
    return make(folder)


def _read(checkpoint: TinyCheckpoint, shard: loader.Shard) -> dict[str, set[int]]:
    """Offsets of the payload bytes that one rank reads, by file, each of which it reads once."""
    source = RecordingSource(checkpoint.folder)
    loader.load(source, shard=shard)
    found: dict[str, list[int]] = {}
    for _, file, offset, length in source.log:
        found.setdefault(file, []).extend(range(offset, offset + length))
    assert all(len(set(offsets)) == len(offsets) for offsets in found.values())
    return {file: set(offsets) for file, offsets in found.items()}


def _expert_bytes(checkpoint: TinyCheckpoint) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for path in checkpoint.folder.glob("*.safetensors"):
        header, start = read_header(path)
        for name, entry in header.items():
            if ".experts." in name:
                begin, end = entry["data_offsets"]
                found.setdefault(path.name, set()).update(range(start + begin, start + end))
    return found


@pytest.mark.parametrize("name", ["awq", "nvfp4"])
@pytest.mark.parametrize("sizes", [(4, 1), (1, 4), (2, 2)], ids=["tp", "ep", "both"])
def test_the_ranks_together_need_every_byte_and_each_reads_a_byte_once(
    sizes: tuple[int, int], name: str, checkpoints: dict[str, TinyCheckpoint]
) -> None:
    """So the host reads each byte from disk once: what two ranks need lies in the page cache."""
    checkpoint = checkpoints[name]
    each = [_read(checkpoint, ranks.shard_of(rank, 4, *sizes)) for rank in range(4)]
    experts = _expert_bytes(checkpoint)
    for file, wanted in experts.items():
        union = set().union(*(read.get(file, set()) for read in each))
        assert wanted - union <= _unused(checkpoint, file)
        gaps = union - wanted
        assert len(gaps) < 4096 * 8  # small gaps are read along, nothing else
    total = sum(len(offsets) for read in each for offsets in read.values())
    needed = sum(map(len, experts.values()))
    if sizes == (1, 4):  # experts are nobody else's
        assert total <= needed + 4096 * 8
    assert total <= 4 * (needed + 4096 * 8)


def _unused(checkpoint: TinyCheckpoint, file: str) -> set[int]:
    """Parts of experts that no format loads (activation scales)."""
    header, start = read_header(checkpoint.folder / file)
    found: set[int] = set()
    for name, entry in header.items():
        if name.endswith(("input_scale", "input_global_scale", "weight_shape")):
            begin, end = entry["data_offsets"]
            found.update(range(start + begin, start + end))
    return found

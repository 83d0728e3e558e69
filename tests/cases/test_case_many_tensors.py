"""Cases, section 9: very many tensors cost no open, read or pass of their own."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from case_checks import Recorder, small
from case_reads import merged, needed, reads_by_layer

import loader
from loader.checkpoint import source as source_module
from loader.testing.checkpoint import TinyCheckpoint, tiny_checkpoint
from loader.testing.container import RawTensor, read_header, rewrite

# 9.2 Very many tensors

LENGTHS = [*range(99_990, 100_011), 20_000_000]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """70 sparse shards of one model, the first with long headers."""
    return tiny_checkpoint(
        tmp_path_factory.mktemp("many"),
        dialect="awq-gemm",
        hidden=128,
        intermediate=256,
        experts=24,
        layers=10,
        shards=70,
        payload="sparse",
        attention=False,
        header_lengths=LENGTHS,
    )


def count_opens(patch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file is opened from here on."""
    opened: Counter[str] = Counter()
    plain = source_module._open_regular

    def counting(path: str, file: str) -> int:
        opened[file] += 1
        return plain(path, file)

    patch.setattr(source_module, "_open_regular", counting)
    return opened


def test_headers_of_every_length_are_read(many: TinyCheckpoint) -> None:
    lengths = [read_header(path)[1] - 8 for path in many.files()]
    assert lengths[: len(LENGTHS)] == LENGTHS and len(lengths) == 70
    planned = loader.plan(many.folder)
    assert [layer.layer for layer in planned.layers] == list(range(10))
    assert sum(len(layer.source.tables) for layer in planned.layers) == 10 * 9


def test_one_open_for_each_file(many: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = count_opens(monkeypatch)
    loader.load(many.folder, shard=loader.Shard(ep_rank=3, ep_size=8))
    files = {path.name for path in many.files()}
    assert {file: opened[file] for file in files} == dict.fromkeys(files, 1)


def test_bytes_read_are_headers_and_this_ranks_experts(many: TinyCheckpoint) -> None:
    shard = loader.Shard(ep_rank=3, ep_size=8)
    assert shard.experts_of(24) == (9, 10, 11)
    with Recorder(many.folder) as source:
        report = loader.load(source, shard=shard).report
    payload = sum(length for *_, length in source.payload_reads())
    wanted = [i for layer in range(10) for i in needed(many, layer, (9, 10, 11))]
    exact = sum(last - first for _, first, last in wanted)
    runs = sum(last - first for _, first, last in merged(wanted))
    assert payload == report.bytes_read == runs
    assert exact <= payload <= 1.02 * exact
    headers = (
        sum(length for file, _, length in source.reads if file.endswith(".safetensors")) - payload
    )
    assert headers == sum(read_header(path)[1] for path in many.files())


def test_planning_reads_headers_once_and_nothing_else(many: TinyCheckpoint) -> None:
    with Recorder(many.folder) as source:
        loader.plan(source)
    reads = [read for read in source.reads if read[0].endswith(".safetensors")]
    assert not source.payload_reads()
    assert sum(length for *_, length in reads) == sum(read_header(p)[1] for p in many.files())
    assert len(reads) == 2 * 70


def test_the_work_of_planning_grows_with_the_tensors(tmp_path: Path) -> None:
    """Twice the layers, twice the calls: nothing in planning looks at all tensors per layer."""
    counts = []
    for layers in (4, 8, 16):
        checkpoint = small(tmp_path / str(layers), "A", layers=layers, shards=1)
        calls = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        loader.plan(checkpoint.folder)
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            loader.plan(checkpoint.folder)
        finally:
            sys.setprofile(before)
        counts.append(calls)
    first, second = counts[1] - counts[0], counts[2] - counts[1]
    assert second <= 2.2 * first, counts


def test_a_tensor_that_is_not_the_models_costs_nothing(tmp_path: Path) -> None:
    checkpoint = small(tmp_path, "A", shards=1)
    big = RawTensor("U8", (1 << 20,), bytes(1 << 20))
    rewrite(tmp_path, lambda tensors: tensors.update({"vision.tower.weight": big}))
    by_layer, report = reads_by_layer(checkpoint)
    assert report.bytes_read < 1 << 20
    assert sorted(by_layer) == [0, 1]

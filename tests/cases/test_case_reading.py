"""Cases, section 9: each byte that a rank needs is read once, in file order, in large pieces."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from case_checks import Recorder, case, nan_memory, small
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import loader
from loader.checkpoint import source as source_module
from loader.testing.checkpoint import TinyCheckpoint, tiny_checkpoint
from loader.testing.container import RawTensor, read_header, rewrite, truncate_file

GAP = 4096
MIB = 1 << 20
UNUSED = ("input_scale", "input_global_scale")
Interval = tuple[str, int, int]


def needed(checkpoint: TinyCheckpoint, layer: int, experts: tuple[int, ...]) -> list[Interval]:
    """(file, first byte, last byte) of every expert tensor that a rank needs, in file order."""
    found = []
    for path in checkpoint.files():
        header, begin = read_header(path)
        for name, entry in header.items():
            words = name.split(".")
            if f".layers.{layer}." not in name or "experts" not in words:
                continue
            expert = words[words.index("experts") + 1]
            if words[-1] in UNUSED or (expert.isdecimal() and int(expert) not in experts):
                continue
            first, last = entry["data_offsets"]
            found.append((path.name, begin + first, begin + last))
    return sorted(found)


def merged(intervals: list[Interval], gap: int = GAP) -> list[Interval]:
    """Runs of intervals that lie no further apart than ``gap``."""
    runs: list[Interval] = []
    for file, first, last in sorted(intervals):
        if runs and runs[-1][0] == file and first - runs[-1][2] <= gap:
            runs[-1] = (file, runs[-1][1], max(last, runs[-1][2]))
        else:
            runs.append((file, first, last))
    return runs


def reads_by_layer(
    checkpoint: TinyCheckpoint, **settings: Any
) -> tuple[dict[int, list[Interval]], loader.LoadReport]:
    """Payload reads of a load, by the layer whose tensors they begin with."""
    layer_at: dict[str, list[tuple[int, int]]] = {}
    for path in checkpoint.files():
        header, begin = read_header(path)
        layer_at[path.name] = sorted(
            (begin + entry["data_offsets"][0], int(name.split(".layers.")[1].split(".")[0]))
            for name, entry in header.items()
            if ".experts." in name and entry["data_offsets"][0] < entry["data_offsets"][1]
        )
    source = Recorder(checkpoint.folder)
    with source, nan_memory():
        report = loader.load(source, **settings).report
    by_layer: dict[int, list[Interval]] = {}
    for file, offset, length in source.payload_reads():
        layer = max((at, n) for at, n in layer_at[file] if at <= offset)[1]
        by_layer.setdefault(layer, []).append((file, offset, offset + length))
    return by_layer, report


def check_reads(reads: list[Interval], wanted: list[Interval], *, sliced: bool = False) -> None:
    """In file order, no byte twice, all that is needed, and small gaps but nothing else beside."""
    assert reads == sorted(reads), "not in file order"
    for (file, _, last), (other, first, _) in zip(reads, reads[1:], strict=False):
        assert file != other or last <= first, "a byte is read twice"
    runs = merged(wanted)
    for file, first, last in reads:
        inside = any(f == file and a <= first and last <= b for f, a, b in runs)
        assert inside, "more is read than the runs that are needed"
    for file, first, last in [] if sliced else wanted:
        inside = any(f == file and a <= first and last <= b for f, a, b in merged(reads, 0))
        assert inside, "a byte that is needed is not read"


# 9.1 Slow mounts


def test_scattered_tensors_are_read_in_file_order_and_merged(tmp_path: Path) -> None:
    checkpoint = small(tmp_path, "A", layers=40, shards=4, order="random")
    by_layer, report = reads_by_layer(checkpoint)
    assert sorted(by_layer) == list(range(40))
    total = 0
    for layer, reads in by_layer.items():
        wanted = needed(checkpoint, layer, range(4))
        check_reads(reads, wanted)
        assert reads == merged(wanted), "a run is read in more pieces than it must"
        total += sum(last - first for _, first, last in reads)
    assert report.bytes_read == total
    # Layer after layer, each of its files once.
    assert sum(map(len, by_layer.values())) <= 40 + 3


@pytest.mark.parametrize("dialect", ["A", "M"])
def test_large_layers_are_read_in_large_pieces(tmp_path: Path, dialect: str) -> None:
    checkpoint = case(tmp_path, dialect, experts=16, order="random", layers=3)
    by_layer, _ = reads_by_layer(checkpoint)
    for layer, reads in by_layer.items():
        runs = merged(needed(checkpoint, layer, range(16)))
        assert reads == runs
        assert sum(last - first >= MIB for _, first, last in reads) >= len(reads) - 1


def test_a_small_staging_budget_cuts_runs_and_nothing_else(tmp_path: Path) -> None:
    checkpoint = case(tmp_path, "A", order="random")
    budget = 512 << 10
    by_layer, _ = reads_by_layer(checkpoint, staging_bytes=budget)
    for layer, reads in by_layer.items():
        check_reads(reads, needed(checkpoint, layer, range(8)))
        assert all(last - first <= budget // 2 for _, first, last in reads)
        # Pieces are whole runs of rows: at most one of them is left out of a buffer.
        assert len(reads) <= 3 * sum(last - first for _, first, last in reads) // (budget // 2) + 4


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    dialect=st.sampled_from(["A", "P", "N", "M", "ct-int4-asym"]),
    fused=st.booleans(),
    order=st.sampled_from(["name", "dtype", "random"]),
    shards=st.integers(1, 3),
    kib=st.sampled_from([24, 40, 100, 65536]),
    tp=st.sampled_from([(0, 1), (0, 2), (1, 2), (2, 3)]),
    ep=st.sampled_from([(0, 1), (1, 2), (2, 3)]),
)
def test_no_byte_is_read_twice(
    tmp_path_factory: pytest.TempPathFactory,
    dialect: str,
    fused: bool,
    order: str,
    shards: int,
    kib: int,
    tp: tuple[int, int],
    ep: tuple[int, int],
) -> None:
    checkpoint = small(
        tmp_path_factory.mktemp("ck"), dialect, fused=fused, order=order, shards=shards
    )
    shard = loader.Shard(*tp, *ep)
    by_layer, _ = reads_by_layer(checkpoint, shard=shard, staging_bytes=kib << 10)
    for layer, reads in by_layer.items():
        ids = shard.experts_of(4)
        wanted = needed(checkpoint, layer, ids)
        check_reads(reads, wanted, sliced=tp[1] > 1 or (fused and ep[1] > 1))


@pytest.mark.parametrize("dialect", ["A", "P", "N", "M", "ct-int4-asym"])
@pytest.mark.parametrize("fused", [False, True])
def test_both_ways_of_reading_give_the_same(tmp_path: Path, dialect: str, fused: bool) -> None:
    """By descriptors that a local folder lends, and by reads alone, as from a network."""
    small(tmp_path, dialect, order="random", fused=fused)
    for shard in (loader.Shard(), loader.Shard(1, 3)):
        with nan_memory(), Recorder(tmp_path) as source:
            local = loader.load(tmp_path, shard=shard)
            remote = loader.load(source, shard=shard)
        assert source.payload_reads()
        for layer, module in local.items():
            for one, other in zip(module.banks(), remote[layer].banks(), strict=True):
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def characters_read() -> int:
    """Bytes that this process has read through system calls."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("ep_size", [1, 4])
def test_lent_descriptors_are_read_once_too(tmp_path: Path, ep_size: int) -> None:
    checkpoint = case(tmp_path, "A", experts=16)
    shard = loader.Shard(ep_rank=ep_size - 1, ep_size=ep_size)
    ids = shard.experts_of(16)
    loader.load(tmp_path, shard=shard)
    before = characters_read()
    loader.load(tmp_path, shard=shard)
    taken = characters_read() - before
    wanted = [i for layer in (0, 1) for i in needed(checkpoint, layer, ids)]
    exact = sum(last - first for _, first, last in wanted)
    # Headers, gaps and what watches the memory are the rest.
    assert exact <= taken <= 1.1 * exact + (512 << 10)


def test_no_file_of_the_model_is_mapped(tmp_path: Path) -> None:
    """Reading never maps, on any mount: a file that shrinks cannot end the process."""
    small(tmp_path, "A")
    seen: list[str] = []

    def look(event: loader.LayerEvent) -> None:
        seen.append(event.state)
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()

    loader.load(tmp_path, observers=[look])
    assert "reading" in seen


@pytest.mark.parametrize("when", ["planned", "reading"])
def test_a_file_that_shrinks_meanwhile_is_an_error(tmp_path: Path, when: str) -> None:
    checkpoint = small(tmp_path, "A", layers=3, shards=3)

    def cut(event: loader.LayerEvent) -> None:
        if event.state == when and event.layer == 0:
            truncate_file(checkpoint.files()[2], size=10)

    with pytest.raises(loader.CheckpointError) as caught:
        loader.load(tmp_path, observers=[cut])
    assert caught.value.file == "model-00003-of-00003.safetensors"
    assert caught.value.expected and caught.value.found


def test_a_file_that_is_replaced_meanwhile_is_an_error_or_the_old_one(tmp_path: Path) -> None:
    """A new file under the old name is not read half and half: the open one stays."""
    checkpoint = small(tmp_path, "A", layers=3, shards=3)

    def replace(event: loader.LayerEvent) -> None:
        if event.state == "planned" and event.layer == 2:
            path = checkpoint.files()[1]
            fresh = path.with_name("fresh")
            fresh.write_bytes(path.read_bytes()[:-64] + bytes(64))
            fresh.rename(path)

    with nan_memory():
        experts = loader.load(tmp_path, observers=[replace])
    whole = experts[1].dequantize(3)["up"].double().numpy()
    assert (whole == checkpoint.weight(1, 3, "up")).all()


@pytest.mark.parametrize("kind", [OSError(5, "Input/output error"), ValueError("odd")])
def test_a_source_that_fails_is_one_clear_error(tmp_path: Path, kind: Exception) -> None:
    small(tmp_path, "M")

    class Failing(Recorder):
        def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
            super().read_into(file, offset, buffer)
            if self.payload_reads():
                raise kind

    with Failing(tmp_path) as source, nan_memory() as fresh:
        with pytest.raises(loader.LoaderError) as caught:
            loader.load(source)
        assert fresh.calls and not fresh.alive
    assert caught.value.file == "model-00001-of-00002.safetensors"
    assert caught.value.layer == 0 and str(kind) in str(caught.value)


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

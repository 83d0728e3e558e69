"""Cases, section 9: each byte that a rank needs is read once, in file order, in large pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from case_checks import Recorder, case, nan_memory, small
from case_reads import MIB, check_reads, merged, needed, reads_by_layer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import loader
from loader.testing.container import truncate_file

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

"""Weak views of memory: they count what is alive, keep nothing alive, and know whose it is."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from loader import memory
from loader.testing.watch import Allocations, Storages, counters, files_in_use

CPU = torch.device("cpu")


@given(st.lists(st.tuples(st.integers(1, 1000), st.booleans()), max_size=12))
def test_bytes_that_are_alive_are_those_of_the_storages_still_held(
    sizes: list[tuple[int, bool]],
) -> None:
    tensors = [torch.empty(size, dtype=torch.int16) for size, _ in sizes]
    watched = Storages(tensors)
    assert watched.alive() == sum(2 * size for size, _ in sizes)
    # A view keeps the whole of its storage, and counts once beside another.
    views = [tensor[:1] for tensor, (_, kept) in zip(tensors, sizes, strict=True) if kept]
    for view in views:
        watched.add(view)
    del tensors
    assert watched.alive() == sum(2 * size for size, kept in sizes if kept)


def test_only_what_the_thread_of_the_load_makes_is_counted() -> None:
    watched = Allocations()
    assert memory.fresh((5,), torch.uint8, CPU).nbytes == 5  # not started
    watched.start()
    kept = [memory.fresh((7,), torch.uint8, CPU), memory.fresh((2 << 20,), torch.uint8, CPU)]
    other = threading.Thread(target=lambda: kept.append(memory.fresh((9,), torch.uint8, CPU)))
    other.start()
    other.join()
    watched.stop()
    kept.append(memory.fresh((11,), torch.uint8, CPU))
    assert watched.storages.alive() == 7 + (2 << 20)
    del kept[1]
    assert watched.storages.alive() == 7
    watched.start()
    assert watched.storages.alive() == 0


def test_a_watcher_that_is_gone_is_told_nothing() -> None:
    watched = Allocations()
    watched.start()
    storages = watched.storages
    del watched
    gc.collect()
    kept = memory.fresh((7,), torch.uint8, CPU)
    assert storages.alive() == 0 and kept.nbytes == 7
    for _ in range(10):
        Allocations()
    assert len(memory._watchers) < 10  # those that are gone are forgotten


def test_the_host_has_a_counter() -> None:
    before = counters()["host anonymous"]
    # Pages of its own: what the C allocator hands out may have been resident before.
    held = memory.mapped((32 << 20,)).fill_(1)
    assert counters()["host anonymous"] - before > 16 << 20
    del held


def test_files_in_use_are_those_below_the_folder(tmp_path: Path) -> None:
    inside, outside = tmp_path / "a" / "b", tmp_path / "c"
    for folder in (inside, outside):
        folder.mkdir(parents=True)
        for name in ("x.safetensors", "y.safetensors", "config.json"):
            (folder / name).write_bytes(bytes(64))
    mapped = torch.from_file(str(inside / "y.safetensors"), size=64, dtype=torch.uint8)
    with (
        open(inside / "x.safetensors", "rb"),
        open(inside / "config.json", "rb"),
        open(outside / "x.safetensors", "rb"),
    ):
        assert files_in_use(tmp_path / "a") == ["x.safetensors", "y.safetensors"]
        assert files_in_use(inside) == ["x.safetensors", "y.safetensors"]
        assert files_in_use(outside) == ["x.safetensors"]
    del mapped
    assert files_in_use(tmp_path) == []

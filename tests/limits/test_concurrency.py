"""Loads beside loads, beside steps of loaded layers, and on both sides of a fork."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from load_fakes import banks_of, nothing_left, same_bits

import loader
from loader import LifecycleError
from loader.checkpoint.source import LocalSource
from loader.testing.checkpoint import tiny_checkpoint

SMALL: dict[str, Any] = {"hidden": 64, "intermediate": 64, "group": 32, "attention": False}


def test_two_loads_share_one_source(tmp_path: Path, way: str) -> None:
    """One folder, one set of descriptors, two loads that read it at once, four times over."""
    tiny_checkpoint(tmp_path, **SMALL, layers=3, shards=9)
    wanted = banks_of(loader.load(tmp_path))
    barrier = threading.Barrier(2)

    class Few(LocalSource):
        @property
        def lends_descriptors(self) -> bool:
            return way == "direct"

    with nothing_left(), Few(tmp_path, descriptors=2) as source:

        def work(_: int) -> list[torch.Tensor]:
            barrier.wait(300)
            return banks_of(loader.load(source, staging_bytes=64 << 10))

        with ThreadPoolExecutor(2) as pool:
            for found in pool.map(work, range(8)):
                assert same_bits(found, wanted)
            del found
        assert len(source._open) <= 2


def test_a_load_that_fails_leaves_one_beside_it_alone(tmp_path: Path, way: str) -> None:
    """They share the source: what the failed one gives back is not the other's."""
    tiny_checkpoint(tmp_path, **SMALL, layers=3, shards=3)
    wanted = banks_of(loader.load(tmp_path))
    barrier = threading.Barrier(2)

    def meet(event: loader.LayerEvent) -> None:
        if (event.layer, event.state) == (1, "converting"):
            barrier.wait(300)

    def fail(event: loader.LayerEvent) -> None:
        meet(event)
        if (event.layer, event.state) == (1, "prepared"):
            raise ValueError("no")

    def failing(source: LocalSource) -> str:
        try:
            loader.load(source, observers=[fail])
        except LifecycleError as error:
            return str(error)
        return "it went on"

    with LocalSource(tmp_path) as source, ThreadPoolExecutor(2) as pool:
        failed = pool.submit(failing, source)
        good = pool.submit(loader.load, source, observers=[meet])
        assert "observer" in failed.result(300)
        assert same_bits(banks_of(good.result(300)), wanted)


def test_a_fork_after_a_load(tmp_path: Path) -> None:
    """The child runs the layers that its parent loaded, and loads on its own."""
    tiny_checkpoint(tmp_path, **SMALL)
    repository = Path(__file__).parents[2]
    probe = Path(__file__).with_name("fork_probe.py")
    result = subprocess.run(
        [sys.executable, str(probe), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert result.returncode == 0, (result.returncode, result.stderr[-3000:])

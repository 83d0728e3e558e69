"""Ranks from the command line: under torchrun, and as processes without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks_fakes import make
from worlds import DEADLINE, HERE, finish, start

from loader import ranks
from loader.testing.checkpoint import TinyCheckpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def checkpoints(folder: Path) -> dict[str, TinyCheckpoint]:
    return make(folder)


def _torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    return subprocess.run(
        [*run, *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        cwd=HERE.parent,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "120",
            "PYTHONPATH": f"{HERE.parent}:{HERE}",
        },
    )


def test_torchrun_loads_all_ranks_and_rank_0_shows_them(
    folder: Path, checkpoints: dict[str, TinyCheckpoint], tmp_path: Path
) -> None:
    written = tmp_path / "cards.json"
    options = ["load", str(folder / "awq"), "--tp", "2", "--ep", "2", "--backend", "gloo"]
    ran = _torchrun("4", "-m", "loader", *options, "--json", str(written))
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.count("Memory of all cards") == 1
    for card in ("tp 0/2 ep 0/2", "tp 1/2 ep 0/2", "tp 0/2 ep 1/2", "tp 1/2 ep 1/2"):
        assert card in ran.stdout
    cards = json.loads(written.read_text())["cards"]
    assert [card["memory"]["resident"] > 0 for card in cards] == [True] * 4
    assert not torch.distributed.is_initialized()


def test_a_killed_rank_under_torchrun_ends_the_run(
    folder: Path, checkpoints: dict[str, TinyCheckpoint], tmp_path: Path
) -> None:
    (tmp_path / "dies").write_text("1")
    (tmp_path / "awq").symlink_to(folder / "awq")
    ran = _torchrun("2", str(HERE / "ranks_worker.py"), "killed", str(tmp_path))
    assert ran.returncode != 0 and "SIGKILL" in ran.stderr


def test_a_flag_that_differs_is_one_line_on_every_rank(
    folder: Path, checkpoints: dict[str, TinyCheckpoint]
) -> None:
    command = ["-m", "loader", "load", str(folder / "awq"), "--tp", "2", "--backend", "gloo"]
    ended = finish(start([command, [*command, "--layout", "wide"]]))
    for rank, (code, out, err) in enumerate(ended):
        assert (code, out) == (1, "")
        (line,) = err.splitlines()
        assert line == (
            f"qpn: rank {rank}: the ranks do not agree on policy.layout; expected the same on "
            "every rank, found None on rank 0; wide on rank 1"
        )


def test_without_a_launcher_the_error_names_torchrun(folder: Path) -> None:
    with pytest.raises(ranks.RankError, match="there is no process group.*torchrun"):
        ranks.load(folder / "awq")
    (ended,) = finish(
        [
            subprocess.Popen(
                [sys.executable, "-m", "loader", "load", str(folder), "--backend", "gloo"],
                env={**os.environ, "PYTHONPATH": str(HERE.parent)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        ]
    )
    assert ended[0] == 1 and "processes that torchrun starts" in ended[2]

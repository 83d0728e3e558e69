"""Processes that are the ranks of one world, without a launcher."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
DEADLINE = 300


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def start(
    commands: Sequence[Sequence[str]], environment: Mapping[str, str] | None = None
) -> list[subprocess.Popen[str]]:
    """One process for each command, as the ranks of one world."""
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(len(commands)),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{HERE.parent}:{HERE}",
    }
    return [
        subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, **common, **(environment or {}), "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, command in enumerate(commands)
    ]


def finish(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each; a process that hangs fails the test."""
    try:
        found = []
        for process in processes:
            out, err = process.communicate(timeout=DEADLINE)
            found.append((process.returncode, out, err))
        return found
    finally:
        for process in processes:
            process.kill()
            process.wait()

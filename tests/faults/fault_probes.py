"""Starts the probes that need a process of their own, and reads what they found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from fault_cells import Outcome
from host_card import COMPILER, LIBRARY, build

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]


def run_probe(script: str, *arguments: str, **variables: str) -> list[Outcome]:
    """The outcomes that a script of this folder prints as JSON."""
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return [Outcome(**found) for found in json.loads(result.stdout)]


def run_native_memory(folder: Path) -> list[Outcome]:
    """The probe of native allocations, with its shim built in ``folder`` and preloaded."""
    return run_probe("fault_native_memory.py", **_preloaded(folder))


def run_ring_memory(folder: Path) -> list[Outcome]:
    """The same of the library for cards, built in ``folder`` over a CUDA that is not there."""
    build(folder)
    return run_probe("fault_ring_memory.py", str(folder / LIBRARY), **_preloaded(folder))


def _preloaded(folder: Path) -> dict[str, str]:
    assert COMPILER is not None
    shim = folder / "failing_new.so"
    command = [COMPILER, "-shared", "-fPIC", "-O1", str(HERE / "failing_new.cpp"), "-o", str(shim)]
    subprocess.run([*command, "-ldl"], check=True, timeout=300)
    return {"LD_PRELOAD": str(shim), "QPN_TEST_SHIM": str(shim)}

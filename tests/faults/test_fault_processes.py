"""Faults that need a process of their own: signals, and memory that native code does not get."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_kinds import STATES
from fault_probes import COMPILER, run_native_memory, run_probe, run_ring_memory

from loader import native


@pytest.mark.parametrize("probe", ["handled", "again", "unhandled", "storm"])
def test_signals(probe: str) -> None:
    found = run_probe("fault_signals.py", probe)
    assert [outcome for outcome in found if outcome.wrong] == []
    ways = 2 if native.HOST is None else 3
    states = ways * len(STATES)
    wanted = {"handled": 2 * states, "again": 3 * states, "unhandled": 2 * states, "storm": 2}
    assert len(found) == wanted[probe]


@pytest.mark.skipif(native.HOST is None, reason="the native core is not built")
@pytest.mark.skipif(COMPILER is None, reason="no g++ builds the shim that makes allocations fail")
def test_native_code_that_gets_no_memory(tmp_path: Path) -> None:
    found = run_native_memory(tmp_path)
    assert [outcome for outcome in found if outcome.wrong] == []
    points = {outcome.kind: outcome.ended for outcome in found}
    assert len(points) == len(found) == 15
    for name in ("qpn_moe", "qpn_linear", "qpn_dequantize"):
        assert points[f"no memory in {name}"] == "0 points", "a step allocates nothing"
        assert points[f"no memory in {name}, refused"] == "1 points"


@pytest.mark.skipif(COMPILER is None, reason="no g++ builds the shim that makes allocations fail")
def test_a_ring_that_gets_no_memory_or_no_thread(tmp_path: Path) -> None:
    found = run_ring_memory(tmp_path)
    assert [outcome for outcome in found if outcome.wrong] == []
    points = {outcome.kind: int(outcome.ended.split()[0]) for outcome in found}
    assert points["no thread for a ring"] == 5
    assert points["no memory in qpn_ring_submit"] > 3 < points["no memory in qpn_ring_open"]
    assert points["no memory in a ring at work"] > 60
    assert points["no memory in qpn_card_finish, refused"] == 1

"""Prints the matrix of faults as Markdown, with totals; exits 1 where anything was lost.

python tests/faults/fault_table.py
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

# Run as a script: the folder above holds what all tests share.
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from fault_cells import Outcome, make_checkpoint, run_cell
from fault_inplace import INPLACE_KINDS, InPlace, run_inplace_cell
from fault_kinds import KINDS, STATES
from fault_probes import COMPILER, run_native_memory, run_probe, run_ring_memory

from loader import native

_ENDS = {
    "CheckpointError": "refused",
    "ReadError": "refused",
    "CapacityError": "refused",
    "ConversionError": "refused",
    "LifecycleError": "refused",
    "KeyboardInterrupt": "unwound",
    "SystemExit": "unwound",
    "Terminated": "unwound",
    "died of it": "dead",
}


def collect() -> list[Outcome]:
    """Every cell of the matrix, and the probes in processes of their own."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        good = Path(name) / "good"
        make_checkpoint(good)
        for kind in KINDS:
            for state in STATES:
                for way in kind.ways:
                    if way != "direct" or native.HOST is not None:
                        found.append(run_cell(good, Path(name), kind, state, way))
        bed = InPlace(Path(name) / "inplace")
        for kind in INPLACE_KINDS:
            for state in STATES:
                for way in ("direct", "reference"):
                    if way != "direct" or native.HOST is not None:
                        found.append(run_inplace_cell(bed, kind, state, way))
        for probe in ("handled", "again", "unhandled", "storm"):
            found += run_probe("fault_signals.py", probe)
        if COMPILER is not None and native.HOST is not None:
            found += run_native_memory(Path(name))
        if COMPILER is not None:
            found += run_ring_memory(Path(name))
    return found


def _words(ended: str) -> str:
    return ended.replace("KeyboardInterrupt", "unwound")


def table(found: list[Outcome]) -> str:
    """Kinds by state; each cell says how the loads of all ways ended, and how many of them."""
    lines = [f"| fault | {' | '.join(STATES)} |", "| --- |" + " --- |" * len(STATES)]
    for kind in dict.fromkeys(outcome.kind for outcome in found):
        own = [outcome for outcome in found if outcome.kind == kind]
        cells = []
        for state in STATES:
            ends = Counter(
                "LOST" if one.wrong else _ENDS.get(one.ended, one.ended)
                for one in own
                if one.state == state
            )
            cells.append(", ".join(f"{count} {end}" for end, count in ends.items()) or "-")
        anywhere = [one for one in own if one.state not in STATES]
        if anywhere:
            cells[0] = "; ".join("LOST" if one.wrong else _words(one.ended) for one in anywhere)
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    torch.set_num_threads(1)
    found = collect()
    print(table(found))
    lost = [outcome for outcome in found if outcome.wrong]
    print(f"\ncells: {len(found)}, survived: {len(found) - len(lost)}, lost: {len(lost)}")
    for outcome in lost:
        print(outcome, file=sys.stderr)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())

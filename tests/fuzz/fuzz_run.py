"""The recorded run: hostile inputs by seed, counted by the stage that refused them.

    python tests/fuzz/fuzz_run.py [--files N] [--checkpoints N] [--seed N]

Exits 1 at the first input that does not end as it must, and says its seed.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from fuzz_checkpoints import make_checkpoint, read_bases
from fuzz_choices import SeededChoices
from fuzz_files import make_file
from fuzz_judge import STAGES as CHECKPOINT_STAGES
from fuzz_judge import Opened, judge
from fuzz_oracle import AFTER_JSON, STAGES, check_against_safetensors

from loader import native

TRACED = 50
"""Every so-manieth checkpoint is loaded with Python's own allocations traced, which is slow."""


class Tally:
    """Inputs by stage, and the two shares that a run must reach."""

    def __init__(self) -> None:
        self.stages: Counter[str] = Counter()
        self.accepted = self.after_json = 0

    def add(self, stage: str, accepted: bool, after_json: bool) -> None:
        self.stages[stage] += 1
        self.accepted += accepted
        self.after_json += after_json


def fuzz_files(count: int, seed: int, tally: Tally) -> None:
    """Headers and shards, each held against safetensors."""
    for number in range(count):
        data = make_file(SeededChoices(f"file {seed} {number}"))
        try:
            accepted, stage = check_against_safetensors(data)
        except BaseException:
            print(f"file {seed} {number}: {data!r}", file=sys.stderr)
            raise
        tally.add(f"file: {stage}", accepted, stage in AFTER_JSON)


def fuzz_checkpoints(count: int, seed: int, tally: Tally) -> None:
    """Whole checkpoints, planned and loaded."""
    opened = Opened()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name).resolve()
        bases = read_bases(scratch / "bases")
        for number in range(count):
            made = make_checkpoint(SeededChoices(f"checkpoint {seed} {number}"), bases)
            try:
                found = judge(made, scratch, opened, trace=number % TRACED == 0)
            except BaseException:
                print(f"checkpoint {seed} {number}: {made.configs.keys()}", file=sys.stderr)
                raise
            tally.add(f"checkpoint: {found.stage}", found.safetensors, found.after_json)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run hostile inputs by seed.")
    parser.add_argument("--files", type=int, default=88_000)
    parser.add_argument("--checkpoints", type=int, default=12_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable()
    tally, started = Tally(), time.monotonic()
    fuzz_files(options.files, options.seed, tally)
    fuzz_checkpoints(options.checkpoints, options.seed, tally)
    total = options.files + options.checkpoints
    print(f"core: {native.CORE.isa_name() if native.CORE else 'none, the reference serves'}")
    print("| stage | inputs |\n| --- | --- |")
    for stage in [f"file: {s}" for s in STAGES] + [f"checkpoint: {s}" for s in CHECKPOINT_STAGES]:
        print(f"| {stage} | {tally.stages[stage]} |")
    print(f"inputs: {total}, in {time.monotonic() - started:.0f} s, crashed: 0")
    print(f"accepted by safetensors: {tally.accepted} ({tally.accepted / total:.1%})")
    print(f"refused after their JSON parsed: {tally.after_json} ({tally.after_json / total:.1%})")
    return 0


if __name__ == "__main__":
    sys.exit(main())

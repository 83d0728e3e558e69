"""Whole checkpoints with faults put in: loaded, or refused in one line, and nothing else."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz_checkpoints import Checkpoint, make_checkpoint, read_bases
from fuzz_choices import DrawnChoices
from fuzz_judge import Opened, judge
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def opened() -> Opened:
    return Opened()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("fuzz").resolve()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def bases(scratch: Path) -> list[Checkpoint]:
    return read_bases(scratch / "bases")


def test_the_bases_load(bases: list[Checkpoint], scratch: Path, opened: Opened) -> None:
    for base in bases:
        found = judge(base, scratch, opened, trace=True)
        assert (found.stage, found.safetensors) == ("loaded", True)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_hostile_checkpoint_is_loaded_or_refused(
    bases: list[Checkpoint], scratch: Path, opened: Opened, data: st.DataObject
) -> None:
    @st.composite
    def checkpoints(draw: st.DrawFn) -> Checkpoint:
        return make_checkpoint(DrawnChoices(draw), bases)

    judge(data.draw(checkpoints()), scratch, opened)


def test_the_judge_sees_what_is_opened(scratch: Path, opened: Opened) -> None:
    """The audit hook is what says that nothing outside is read: it must not be blind."""
    path = scratch / "seen"
    with opened.watching():
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
        pickle.loads(pickle.dumps(Path("x")))
    assert str(path) in opened.paths and opened.unpickled
    opened.unpickled = False

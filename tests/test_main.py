"""The command line as a program: its exit codes, its two streams, and one line for an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from load_fakes import SMALL

from loader.testing.checkpoint import TinyCheckpoint, tiny_checkpoint
from loader.testing.container import edit_tensor


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return tiny_checkpoint(tmp_path_factory.mktemp("command"), layers=2, **SMALL)


@pytest.fixture
def folder(checkpoint: TinyCheckpoint) -> str:
    return str(checkpoint.folder)


def test_a_warning_of_the_load_is_a_line_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_checkpoint(tmp_path, layers=1, excluded=(0,), **SMALL)
    ran = _run("load", str(tmp_path))
    assert ran.returncode == 0
    assert [line.split()[0] for line in ran.stderr.splitlines()] == ["WARNING"] * 2


def _run(
    *arguments: str, stdout: int = subprocess.PIPE, **environment: str
) -> subprocess.CompletedProcess[str]:
    asked = ("COLUMNS", "QPN_M1", "QPN_GROUPED", "QPN_COMPACT_METADATA")
    kept = {name: value for name, value in os.environ.items() if name not in asked}
    ran = subprocess.run(
        [sys.executable, "-m", "loader", *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env={**kept, **environment},
        check=False,
    )
    # Said of the installation, not of the call, where it was installed without a compiler.
    lines = ran.stderr.splitlines(keepends=True)
    ran.stderr = "".join(line for line in lines if "native core was not built" not in line)
    return ran


def test_as_a_program_a_plan_goes_to_stdout(folder: str) -> None:
    ran = _run("plan", folder, "--tp", "4", COLUMNS="80")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "tp 3/4" in ran.stdout and ran.stdout.endswith(".\n")


def test_as_a_program_an_error_is_one_line_and_a_traceback_with_debug(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path, layers=1, **SMALL)

    def spoil(values: Any) -> None:
        values[0, 0] = float("inf")

    edit_tensor(tmp_path, checkpoint.name(0, 3, "up", "scales"), spoil)
    ran = _run("load", str(tmp_path))
    assert (ran.returncode, ran.stdout) == (1, "")
    (line,) = ran.stderr.splitlines()
    assert "a scale is not finite" in line and checkpoint.name(0, 3, "up", "scales") in line
    ran = _run("load", str(tmp_path), "--debug")
    assert ran.returncode == 1
    assert "Traceback" in ran.stderr and "ConversionError" in ran.stderr


def test_as_a_program_a_wrong_call_exits_2(folder: str) -> None:
    ran = _run("plan", folder, "--rank", "3")
    assert ran.returncode == 2 and "tp_rank is outside tp_size" in ran.stderr


def test_a_reader_that_goes_away_is_no_error_and_the_json_is_written(
    folder: str, tmp_path: Path
) -> None:
    written = tmp_path / "plan.json"
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        ran = _run("plan", folder, "--json", str(written), stdout=write_end)
    finally:
        os.close(write_end)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert json.loads(written.read_text())["schema"] == 1

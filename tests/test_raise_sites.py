"""The tool that says which error messages a run never reached."""

from __future__ import annotations

import json
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest
import raise_sites

from loader import Policy, PolicyError
from loader.core import raise_native
from loader.errors import LoaderError
from loader.structs import Error


def test_every_place_is_found_once() -> None:
    found = raise_sites.sites()
    python = [site for site in found if not site.native]
    assert len(python) > 250 and len(found) - len(python) > 70
    assert len({(site.file, site.first) for site in python}) == len(python)
    assert {"policy.py", "checkpoint/header.py", "checkpoint/tables.py"} <= {s.file for s in python}
    assert len({site.key for site in found if site.native}) == len(found) - len(python)
    assert "card: a stream could not wait" in {site.key for site in found}
    assert "host: a read came up short" in {site.key for site in found}


@pytest.mark.parametrize("key", raise_sites.ELSEWHERE)
def test_what_is_excused_is_still_there(key: str) -> None:
    assert any(site.key.startswith(key) for site in raise_sites.sites())


@pytest.mark.parametrize("test", [one.test for one in raise_sites.ELSEWHERE.values()])
def test_what_needs_an_environment_has_a_test_there(test: str) -> None:
    file, _, name = test.partition("::")
    assert f"def {name or 'test_'}" in (raise_sites.HERE / file).read_text()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> raise_sites.Reached:
    """What is recorded inside a test, and no longer afterwards."""
    monkeypatch.setattr(LoaderError, "__init__", LoaderError.__init__)
    monkeypatch.setattr(Error, "what", vars(Error)["what"])
    reached = raise_sites.Reached()
    raise_sites.record(reached)
    return reached


def test_what_a_run_reached_is_no_longer_listed(
    tmp_path: Path, recorded: raise_sites.Reached, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(PolicyError):
        Policy(grouped_max_tokens=1)
    recorded.write(tmp_path)
    assert json.loads(next(tmp_path.glob("*.json")).read_text())
    assert raise_sites.main([tmp_path]) == 1
    missed = capsys.readouterr().out
    assert (
        missed.count("loader/policy.py")
        == sum(site.file == "policy.py" for site in raise_sites.sites()) - 1
    )


def test_a_sentence_counts_where_native_code_said_it(recorded: raise_sites.Reached) -> None:
    with pytest.raises(ValueError, match="made up"):
        raise_native(1, Error(subject=-1, what=b"made up by a test"))
    assert recorded.sentences == {}
    said = Error(subject=-1)
    memory = bytearray(b"slot is outside the bank")
    offset = next(value.offset for name, value in _fields() if name == "what")
    (raise_sites.ctypes.c_char * 128).from_buffer(said, offset)[: len(memory)] = bytes(memory)
    with pytest.raises(ValueError, match="slot is outside"):
        raise_native(1, said)
    assert recorded.sentences == {"host": {"slot is outside the bank"}}


def _fields() -> list[tuple[str, raise_sites.Any]]:
    class Same(raise_sites.ctypes.Structure):
        _fields_ = Error._fields_

    return [(name, vars(Same)[name]) for name, _ in Same._fields_]


def test_a_process_that_a_test_starts_records_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess.Popen, "__init__", subprocess.Popen.__init__)
    for name in (raise_sites.FOLDER, "PYTHONPATH"):
        monkeypatch.setenv(name, "")
    raise_sites.follow_children(tmp_path)
    code = "import loader\ntry: loader.Policy(layout='none')\nexcept loader.PolicyError: pass"
    root = str(raise_sites.PACKAGE.parent)
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": root})
    reached = raise_sites.Reached()
    reached.add(next(tmp_path.glob("*.json")))
    assert "policy.py" in reached.lines


def test_a_process_of_multiprocessing_records_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess.Popen, "__init__", subprocess.Popen.__init__)
    for name in (raise_sites.FOLDER, "PYTHONPATH"):
        monkeypatch.setenv(name, "")
    raise_sites.follow_children(tmp_path)
    process = get_context("spawn").Process(target=refuse_a_policy)
    process.start()
    process.join()
    assert process.exitcode == 0
    reached = raise_sites.Reached()
    for path in tmp_path.glob("*.json"):
        reached.add(path)
    assert "policy.py" in reached.lines


def refuse_a_policy() -> None:
    with pytest.raises(PolicyError):
        Policy(grouped_max_tokens=1)

"""The native library: opened where it is of these sources, else there is a reason."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from loader import library
from loader.library import find_library, open_library, usable_cores


def compiled(folder: Path, source: str) -> Path:
    path = folder / "_core.so"
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)
    return path


def test_what_was_built_is_opened() -> None:
    assert (library.LIBRARY is None) == bool(library.WHY_NO_LIBRARY)
    assert usable_cores() >= 1


@pytest.mark.parametrize(
    ("source", "found"),
    [('extern "C" int qpn_interface() { return 1; }', 1), ("int other;", 0)],
)
def test_a_library_of_other_sources_is_not_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, found: int
) -> None:
    path = compiled(tmp_path, source)
    with pytest.raises(OSError, match=f"it has interface {found}, not "):
        open_library(path)
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    opened, why = find_library()
    assert opened is None and why.startswith("the native core cannot be used: it has interface")


def test_no_library_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    assert find_library() == (None, f"the native core was not built: there is no {tmp_path}/_core*")
    (tmp_path / "_core.so").write_bytes(b"no library")
    assert "cannot be used" in find_library()[1]

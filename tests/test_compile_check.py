"""What the compile-only check reads from ptxas, and what the evidence check calls stale."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, loaded)
    spec.loader.exec_module(loaded)
    return loaded


REPORT = """\
ptxas info    : Function properties for first
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers
ptxas info    : Function properties for second
    16 bytes stack frame, 12 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 128 registers
"""


def test_registers_and_spills_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    check = module("compile_check", monkeypatch)
    first, second = check.kernels_of(REPORT)
    assert (first.name, first.registers, first.spilled) == ("first", 64, 0)
    assert (second.name, second.registers, second.spilled) == ("second", 128, 16)
    assert check.show("both", [first, second]) == 1
    assert check.show("conversion", [check.KernelUse("x_convert_y", 48, 28)]) == 0


def test_evidence_of_other_code_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = module("evidence_check", monkeypatch)
    for name, digest in (("new", "a" * 64), ("old", "b" * 64)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"csrc_sha256": digest}))
    (tmp_path / "none.json").write_text("{}")
    found = check.stale(tmp_path, "a" * 64)
    assert [line.split(":")[0] for line in found] == ["none.json", "old.json"]

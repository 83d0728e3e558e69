"""The device's constants and index maths, compiled by g++, against ``loader/bank.py``."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.bank import (
    GLOBAL_SENSES,
    KINDS,
    LAYOUTS,
    NIBBLE_OF_ROW,
    ROWS_PER_WORD,
    SCALE_DTYPES,
    TILE,
    BankSpec,
    group_of_rows,
)
from loader.cuda_routes import FAMILIES, family_of

SOURCE = Path(__file__).parent / "native/qpn_host.cpp"
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    made = tmp_path_factory.mktemp("device") / "qpn.so"
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", str(SOURCE)]
    subprocess.run([*command, "-o", str(made)], check=True)
    library = ctypes.CDLL(str(made))
    for name in ("qpn_constant", "qpn_nibble", "qpn_index"):
        getattr(library, name).restype = ctypes.c_int64
    return library


def test_constants_are_those_of_the_bank(device: ctypes.CDLL) -> None:
    named = [len(part) for part in (KINDS[:3], LAYOUTS, SCALE_DTYPES, GLOBAL_SENSES, FAMILIES)]
    wanted = [TILE, ROWS_PER_WORD] + [number for count in named for number in range(count)]
    assert [device.qpn_constant(i) for i in range(len(wanted))] == wanted
    assert tuple(device.qpn_nibble(row) for row in range(8)) == NIBBLE_OF_ROW


def test_families_by_architecture() -> None:
    chosen = {number: FAMILIES[family_of(number)] for number in (70, 75, 80, 90, 100)}
    assert chosen == {70: "quadpair", 75: "quadpair", **dict.fromkeys((80, 90, 100), "m16n8k16")}


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_groups_of_rows(device: ctypes.CDLL, data: st.DataObject) -> None:
    k = 8 * data.draw(st.integers(1, 900))
    group = 16 * data.draw(st.integers(1, 600))
    phase = 16 * data.draw(st.integers(0, group // 16 - 1))
    spec = BankSpec("int4", "compact", 1, k, 64, group, phase, 1, torch.float16)
    call = [ctypes.c_int64(number) for number in (k, 64, group, phase)]

    def ask(what: int, a: int = 0, b: int = 0) -> int:
        return int(device.qpn_index(what, *call, ctypes.c_int64(a), ctypes.c_int64(b)))

    assert ask(0) == spec.groups
    groups = group_of_rows(spec, torch.device("cpu")).tolist()
    assert [ask(1, row) for row in range(0, k, 16)] == groups[::16]


def test_offsets_are_64_bit(device: ctypes.CDLL) -> None:
    sizes = [ctypes.c_int64(number) for number in (8192, 65536, 128, 0, 900, 2000)]
    assert device.qpn_index(2, *sizes) == (900 * 2048 + 2000) * (8192 // 8) * 32


@pytest.mark.parametrize(
    ("group", "phase"), [(8, 0), (24, 0), (0, 0), (32, 8), (32, 32), (32, -16)]
)
def test_groups_that_the_kernels_cannot_serve_are_refused(
    device: ctypes.CDLL, group: int, phase: int
) -> None:
    sizes = [ctypes.c_int64(number) for number in (256, 256, group, phase, 0, 0)]
    assert device.qpn_index(0, *sizes) == -1

"""Room: which limit of the machine counts, and how much is left under it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loader import room
from loader.room import Room, group_rooms, room_of

CPU = torch.device("cpu")
MIB = 1 << 20


def group(folder: Path, version: int, limit: int | str, usage: int, cache: int) -> None:
    """One control group as the kernel shows it."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes",) * 2
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1].replace("limit", "usage")).write_text(f"{usage}\n")
    head = "" if version == 2 else "total_"
    half = cache // 2
    stat = f"{head}inactive_file {half}\n{head}active_file {cache - half}\nanon 5\n"
    (folder / "memory.stat").write_text(stat)


def rooms(tmp_path: Path, *lines: str) -> list[Room]:
    table = tmp_path / "cgroup"
    table.write_text("".join(f"{line}\n" for line in lines))
    return list(group_rooms(table, tmp_path / "mount"))


@pytest.mark.parametrize("version", [1, 2])
def test_every_ancestor_counts(tmp_path: Path, version: int) -> None:
    top = tmp_path / "mount" / ("" if version == 2 else "memory")
    group(top / "a" / "b", version, 100 * MIB, 60 * MIB, 20 * MIB)
    group(top / "a", version, 70 * MIB, 65 * MIB, 0)
    group(top, version, "max" if version == 2 else (1 << 63) - 4096, MIB, 0)
    line = "0::/a/b" if version == 2 else "4:cpu,memory:/a/b"
    found = rooms(tmp_path, "3:cpu:/elsewhere", line)
    assert [one.nbytes for one in found] == [60 * MIB, 5 * MIB]
    assert str(70 * MIB) in found[1].limit and found[1].limit.endswith("/a)")


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    group(tmp_path / "mount", 2, 8 * MIB, 3 * MIB, 0)
    assert [one.nbytes for one in rooms(tmp_path, "0::/not/to/be/seen")] == [5 * MIB]


def test_no_group_no_limit(tmp_path: Path) -> None:
    assert rooms(tmp_path, "0::/", "1:name=systemd:/") == []
    assert list(group_rooms(tmp_path / "nothing", tmp_path)) == []


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_room_is_never_negative_nor_beyond_the_limit(
    tmp_path_factory: pytest.TempPathFactory, limit: int, usage: int, cache: int
) -> None:
    folder = tmp_path_factory.mktemp("group")
    group(folder / "mount", 2, limit, usage, cache)
    (found,) = rooms(folder, "0::/")
    assert 0 <= found.nbytes <= limit
    assert found.nbytes == max(0, limit - max(0, usage - cache))


def test_the_least_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = room_of(CPU)
    assert 0 < whole.nbytes < 1 << 48
    monkeypatch.setattr(room, "group_rooms", lambda *_: [Room(7, "one"), Room(9, "other")])
    assert room_of(CPU) == Room(7, "one")


def test_the_limit_of_the_address_space_counts() -> None:
    code = """
import resource
import torch
from loader.room import room_of

resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
room = room_of(torch.device("cpu"))
assert room.nbytes < 6 << 30 and "address space" in room.limit, room
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_a_card_says_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (123, 456))
    assert room_of(torch.device("cuda:1")) == Room(123, "free memory of cuda:1")

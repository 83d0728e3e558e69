"""The descriptors that a local folder holds, and files that change under it."""

from __future__ import annotations

import gc
import os
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import loader.checkpoint.source as source_module
from loader.checkpoint.open_file import OpenFile
from loader.checkpoint.source import LocalSource, read_bytes
from loader.errors import CheckpointError, LifecycleError


def descriptors() -> list[str]:
    """Targets of this process's open descriptors, without the one that lists them."""
    targets = []
    for number in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue
    return sorted(targets)


def open_below(folder: Path) -> list[str]:
    return [target for target in descriptors() if target.startswith(str(folder) + "/")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten files of different bytes, one of them nested."""
    model = tmp_path / "model"
    (model / "part").mkdir(parents=True)
    for i in range(10):
        (model / f"f{i}").write_bytes(bytes((i * 7 + j) % 251 for j in range(1000 + i)))
    (model / "part" / "model-1.safetensors").write_bytes(b"nested")
    return model


@pytest.fixture
def source(folder: Path) -> Iterator[LocalSource]:
    with LocalSource(folder) as opened:
        yield opened


def count_opens(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    real, opens = os.open, []

    def counted(path: str, *args: int) -> int:
        opens.append(os.path.basename(path))
        return real(path, *args)

    monkeypatch.setattr(source_module.os, "open", counted)
    return opens


def test_one_open_per_file_and_none_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # what an earlier test left is not to go meanwhile
    baseline = descriptors()
    opens = count_opens(monkeypatch)
    with LocalSource(folder) as source:
        assert descriptors() == baseline  # lazily
        for _ in range(3):
            for i in range(10):
                source.size(f"f{i}")
                read_bytes(source, f"f{i}", i, 10)
        assert sorted(opens) == [f"f{i}" for i in range(10)]
        assert len(open_below(folder)) == 10
        for number in os.listdir("/proc/self/fd"):
            target = f"/proc/self/fd/{number}"
            if os.path.exists(target) and os.readlink(target).startswith(str(folder)):
                assert not os.get_inheritable(int(number))
                assert os.stat(target).st_size > 0
                flags = int(Path(f"/proc/self/fdinfo/{number}").read_text().split()[3], 8)
                assert flags & os.O_ACCMODE == os.O_RDONLY
    assert descriptors() == baseline
    source.close()
    source.close()
    assert descriptors() == baseline


def test_least_recently_used_makes_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opens = count_opens(monkeypatch)
    with LocalSource(folder, descriptors=3) as source:
        for name in ("f0", "f1", "f2", "f0", "f3", "f0", "f1"):
            source.size(name)
            assert len(open_below(folder)) <= 3
        # f3 took the place of f1, since f0 had been used after it.
        assert opens == ["f0", "f1", "f2", "f3", "f1"]
        assert sorted(os.path.basename(f) for f in open_below(folder)) == ["f0", "f1", "f3"]


def test_bound_is_a_quarter_of_the_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, bound in ((1024, 256), (20, 8), (resource.RLIM_INFINITY, 1024)):
        monkeypatch.setattr(
            resource, "getrlimit", lambda _, soft=soft: (soft, resource.RLIM_INFINITY)
        )
        with LocalSource(folder) as source:
            assert source.max_descriptors == bound


def test_lent_descriptors_stay_open_while_lent(folder: Path) -> None:
    with LocalSource(folder, descriptors=3) as source:
        with source.descriptor("f0") as first, source.descriptor("f1") as second:
            with source.descriptor("f0") as again:
                assert again == first
            for i in range(10):
                read_bytes(source, f"f{i}", 0, 10)
            assert len(open_below(folder)) == 3
            for name, descriptor in (("f0", first), ("f1", second)):
                assert os.pread(descriptor, 5, 2) == (folder / name).read_bytes()[2:7]
        for i in range(2, 10):
            read_bytes(source, f"f{i}", 0, 10)
        assert {Path(path).name for path in open_below(folder)} == {"f7", "f8", "f9"}
    assert open_below(folder) == []


def test_a_file_that_changes_while_its_descriptor_is_lent_is_refused(folder: Path) -> None:
    with (
        LocalSource(folder) as source,
        pytest.raises(CheckpointError, match="changed while loading"),
        source.descriptor("f0"),
    ):
        os.truncate(folder / "f0", 10)


def test_threads_share_few_descriptors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open, real_close = os.open, OpenFile.close
    held: set[int] = set()  # /proc is no snapshot: it would count a closed file with its successor
    most: list[int] = []

    def counted_open(path: str, flags: int) -> int:
        descriptor = real_open(path, flags)
        held.add(descriptor)
        most.append(len(held))
        return descriptor

    def counted_close(self: OpenFile) -> None:
        held.remove(self.use().descriptor)
        real_close(self)

    contents = {f"f{i}": (folder / f"f{i}").read_bytes() for i in range(10)}
    with LocalSource(folder, descriptors=2) as source, ThreadPoolExecutor(8) as pool:
        monkeypatch.setattr(source_module.os, "open", counted_open)
        monkeypatch.setattr(OpenFile, "close", counted_close)

        def read(i: int) -> bool:
            name, offset = f"f{i % 10}", i % 700
            return read_bytes(source, name, offset, 300) == contents[name][offset : offset + 300]

        assert all(pool.map(read, range(2000)))
    assert max(most) == 2 and held == set()


def test_one_open_for_many_threads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opens = count_opens(monkeypatch)
    together = threading.Barrier(8)
    with LocalSource(folder) as source, ThreadPoolExecutor(8) as pool:

        def read(i: int) -> int:
            together.wait()
            return len(read_bytes(source, "f1", i, 100))

        assert list(pool.map(read, range(8))) == [100] * 8
    assert opens == ["f1"]


def test_none_in_use_is_closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that hangs keeps its descriptor, also against ``close``; the others go on."""
    real = os.preadv
    inside, go_on = threading.Event(), threading.Event()

    def slow(descriptor: int, views: list[memoryview], offset: int) -> int:
        if offset == 777:
            inside.set()
            assert go_on.wait(10)
        return real(descriptor, views, offset)

    monkeypatch.setattr(source_module.os, "preadv", slow)
    source = LocalSource(folder, descriptors=2)
    with ThreadPoolExecutor(2) as pool:
        hanging = pool.submit(read_bytes, source, "f0", 777, 100)
        assert inside.wait(10)
        for i in range(1, 6):
            assert read_bytes(source, f"f{i}", 0, 1) == (folder / f"f{i}").read_bytes()[:1]
        assert "f0" in {os.path.basename(f) for f in open_below(folder)}
        closing = pool.submit(source.close)
        with pytest.raises(TimeoutError):
            closing.result(0.1)
        go_on.set()
        assert hanging.result(10) == (folder / "f0").read_bytes()[777:877]
        closing.result(10)
    assert open_below(folder) == []


def test_errors_give_the_descriptor_back(folder: Path) -> None:
    with LocalSource(folder, descriptors=1) as source:
        for _ in range(3):
            with pytest.raises(CheckpointError):
                read_bytes(source, "f0", 990, 50)
        assert read_bytes(source, "f1", 0, 1)  # would wait for ever


def test_closed_means_closed(folder: Path) -> None:
    source = LocalSource(folder)
    source.close()
    for use in (source.list, lambda: source.size("f0"), lambda: read_bytes(source, "f0", 0, 1)):
        with pytest.raises(LifecycleError):
            use()
    assert open_below(folder) == []


# --- files that change -----------------------------------------------------------------------


def replace_with_other(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"\0" * path.stat().st_size)
    status = path.stat()
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(other, path)


def test_a_replaced_file_is_refused_when_it_is_opened_again(folder: Path) -> None:
    with LocalSource(folder, descriptors=1) as source:
        source.size("f0")
        replace_with_other(folder / "f0")
        before = (folder / "f0").read_bytes()
        assert read_bytes(source, "f0", 0, 9) != before[:9]  # the file that was opened
        source.size("f1")
        with pytest.raises(CheckpointError, match="changed while loading") as caught:
            read_bytes(source, "f0", 0, 9)
        assert caught.value.file == "f0" and "inode" in str(caught.value.expected)


@pytest.mark.parametrize("size", [10, 5000])
def test_a_resized_file_is_refused(source: LocalSource, folder: Path, size: int) -> None:
    source.size("f0")
    os.truncate(folder / "f0", size)
    for use in (
        lambda: read_bytes(source, "f0", 0, 5),
        lambda: source.size("f0"),
        lambda: source.descriptor("f0").__enter__(),
    ):
        with pytest.raises(CheckpointError, match="changed while loading") as caught:
            use()
        assert "size 1000" in str(caught.value.expected)
        assert f"size {size}" in str(caught.value.found)


def test_a_file_cut_during_the_read_is_not_called_short(
    source: LocalSource, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def racing(descriptor: int, views: list[memoryview], offset: int) -> int:
        os.truncate(folder / "f0", 10)
        return real(descriptor, views, offset)

    monkeypatch.setattr(source_module.os, "preadv", racing)
    with pytest.raises(CheckpointError, match="changed while loading"):
        read_bytes(source, "f0", 500, 5)


def test_a_file_written_during_the_read_is_refused(
    source: LocalSource, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def racing(descriptor: int, views: list[memoryview], offset: int) -> int:
        count = real(descriptor, views, offset)
        with open(folder / "f0", "r+b") as file:
            file.write(b"new")
        os.utime(folder / "f0", ns=(1, 1))
        return count

    source.size("f0")
    monkeypatch.setattr(source_module.os, "preadv", racing)
    with pytest.raises(CheckpointError, match="changed while loading"):
        read_bytes(source, "f0", 0, 5)


class Struck:
    """A lock at whose numbered call, entering or leaving its block, an interrupt strikes."""

    def __init__(self, inner: AbstractContextManager[bool], strike: int) -> None:
        self._inner = inner
        self._left = strike

    def __enter__(self) -> bool:
        self._strike()
        return self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        self._strike()

    def _strike(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("strike", [2, 3])
def test_a_read_that_an_interrupt_cut_off_does_not_hold_up_the_close(
    folder: Path, monkeypatch: pytest.MonkeyPatch, strike: int
) -> None:
    """The interrupt strikes where the read has just begun, or where it is to end."""
    source = LocalSource(folder)
    monkeypatch.setattr(source, "_lock", Struck(source._lock, strike))
    with pytest.raises(KeyboardInterrupt):
        read_bytes(source, "f0", 0, 5)
    source.close()
    assert open_below(folder) == []


def test_descriptors_that_someone_else_closed(folder: Path) -> None:
    """As a process does that becomes a daemon: the read is refused, and the close goes on."""
    source = LocalSource(folder)
    files = source.list()[:3]
    for file in files:
        read_bytes(source, file, 0, 1)
    for number in map(int, os.listdir("/proc/self/fd")):
        if os.path.exists(f"/proc/self/fd/{number}"):
            target = os.readlink(f"/proc/self/fd/{number}")
            if target.endswith(tuple(files[:2])):
                os.close(number)
    with pytest.raises(CheckpointError, match="cannot be looked at; .* found Bad file descriptor"):
        read_bytes(source, files[0], 0, 1)
    source.close()
    assert open_below(folder) == []

"""The local folder: what may be opened, what is read, and how many descriptors are held."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import loader
import loader.checkpoint.source as source_module
from loader.checkpoint.source import (
    LocalSource,
    MissingFileError,
    check_name,
    open_source,
    read_bytes,
)
from loader.errors import CheckpointError, LoaderError
from loader.testing.checkpoint import tiny_checkpoint


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


def test_lists_sizes_and_reads(source: LocalSource, folder: Path) -> None:
    assert source.list() == [f"f{i}" for i in range(10)] + ["part/model-1.safetensors"]
    assert source.name == str(folder)
    assert source.folder == folder.resolve()
    assert source.size("f3") == 1003
    assert read_bytes(source, "f3", 5, 20) == (folder / "f3").read_bytes()[5:25]
    assert read_bytes(source, "part/model-1.safetensors", 0, 6) == b"nested"
    assert read_bytes(source, "f3", 1003, 0) == b""
    buffer = bytearray(b"\xff" * 12)
    source.read_into("f4", 1, memoryview(buffer)[4:8])
    assert bytes(buffer) == b"\xff" * 4 + (folder / "f4").read_bytes()[1:5] + b"\xff" * 4


def test_fills_a_buffer_of_wide_items(source: LocalSource, folder: Path) -> None:
    buffer = memoryview(bytearray(40)).cast("i")
    source.read_into("f1", 8, buffer)
    assert buffer.tobytes() == (folder / "f1").read_bytes()[8:48]


def test_short_read_says_what_was_asked_and_what_came(source: LocalSource) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_bytes(source, "f0", 990, 50)
    assert caught.value.file == "f0"
    assert caught.value.expected == "50 bytes at offset 990"
    assert caught.value.found == "10 bytes"
    with pytest.raises(CheckpointError, match="0 bytes"):
        read_bytes(source, "f0", 5000, 1)
    with pytest.raises(CheckpointError, match="negative offset"):
        read_bytes(source, "f0", -1, 1)


def test_partial_reads_are_continued(
    source: LocalSource, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv
    calls = []

    def little(descriptor: int, views: list[memoryview], offset: int) -> int:
        calls.append(offset)
        return real(descriptor, [views[0][:7]], offset)

    monkeypatch.setattr(source_module.os, "preadv", little)
    assert read_bytes(source, "f2", 3, 100) == (folder / "f2").read_bytes()[3:103]
    assert calls == list(range(3, 103, 7))


def test_a_failed_read_is_our_error(source: LocalSource, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(source_module.os, "preadv", broken)
    buffer = bytearray(8)
    with pytest.raises(CheckpointError) as caught:
        source.read_into("f2", 16, memoryview(buffer))
    assert "8 bytes at offset 16" in str(caught.value) and "Input/output" in str(caught.value)
    buffer.extend(b"x")  # a view that an error still holds would forbid this


# --- names and links -------------------------------------------------------------------------

UNSAFE = {
    "": "empty",
    "../x/model.safetensors": "leaves the folder",
    "a/../../x": "leaves the folder",
    "a/..": "leaves the folder",
    "..": "leaves the folder",
    "/etc/passwd": "absolute",
    "a\0b": "NUL",
    "./f0": "plain form",
    "part//f0": "plain form",
    "part/": "plain form",
    ".": "plain form",
    "a\nb": "cannot be printed",
    "\ud800": "cannot be printed",
}


@pytest.mark.parametrize("name", UNSAFE)
def test_unsafe_names_are_refused_before_any_open(
    source: LocalSource, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[object] = []
    monkeypatch.setattr(source_module.os, "open", lambda *args: opened.append(args))
    for use in (check_name, source.size, lambda file: source.descriptor(file).__enter__()):
        with pytest.raises(CheckpointError, match="unsafe file name") as caught:
            use(name)
        assert UNSAFE[name] in caught.value.what
        str(caught.value).encode()  # can be printed
        assert "\n" not in str(caught.value)
    assert opened == []


@pytest.mark.parametrize("name", ["f0", "part/model-1.safetensors", "a..b", "ä b", "...x"])
def test_safe_names(name: str) -> None:
    check_name(name)


def test_links_may_not_leave_the_folder(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    sibling = tmp_path / "model-other"  # the folder's own path is a prefix of this one
    sibling.mkdir()
    (sibling / "x").write_bytes(b"x")
    (folder / "out").symlink_to(secret)
    (folder / "beside").symlink_to(sibling / "x")
    (folder / "outdir").symlink_to(tmp_path)
    (folder / "in").symlink_to("part/model-1.safetensors")
    (folder / "dangling").symlink_to("nothing")
    (folder / "circle").symlink_to("circle")
    with LocalSource(folder) as source:
        for name in ("out", "beside", "outdir/secret"):
            with pytest.raises(CheckpointError, match="outside the model folder") as caught:
                source.size(name)
            assert caught.value.file == name
        assert read_bytes(source, "in", 0, 6) == b"nested"
        listed = source.list()
        assert "outdir/secret" not in listed and "dangling" not in listed and "circle" not in listed
        with pytest.raises(MissingFileError):
            source.size("dangling")
        with pytest.raises(CheckpointError, match="cannot be opened"):
            source.size("circle")
        assert len(open_below(tmp_path)) == 1


def test_the_folder_itself_may_be_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    with LocalSource(tmp_path / "link") as source:
        assert source.size("f1") == 1001


def hub_cache(tmp_path: Path) -> Path:
    """``models--x/snapshots/abc`` with links into ``models--x/blobs``."""
    repo = tmp_path / "models--x"
    snapshot = repo / "snapshots" / "abc"
    (snapshot / "part").mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "blobs" / "1234").write_bytes(b"blob")
    (repo / "elsewhere").write_bytes(b"no")
    (snapshot / "model.safetensors").symlink_to("../../blobs/1234")
    (snapshot / "part" / "m.safetensors").symlink_to("../../../blobs/1234")
    (snapshot / "bad").symlink_to("../../elsewhere")
    (snapshot / "worse").symlink_to("../../blobs/../elsewhere")
    return snapshot


def test_hub_cache_layout(tmp_path: Path) -> None:
    with LocalSource(hub_cache(tmp_path)) as source:
        assert read_bytes(source, "model.safetensors", 0, 4) == b"blob"
        assert read_bytes(source, "part/m.safetensors", 0, 4) == b"blob"
        assert source.list()[-3:] == ["model.safetensors", "part/m.safetensors", "worse"]
        for name in ("bad", "worse"):
            with pytest.raises(CheckpointError, match="outside"):
                source.size(name)


def test_blobs_beside_an_ordinary_folder_are_outside(tmp_path: Path) -> None:
    model = tmp_path / "versions" / "abc"
    model.mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "1").write_bytes(b"blob")
    (model / "m").symlink_to("../../blobs/1")
    with LocalSource(model) as source, pytest.raises(CheckpointError, match="outside"):
        source.size("m")


def test_only_regular_files(folder: Path) -> None:
    os.mkfifo(folder / "fifo")
    with LocalSource(folder) as source:
        assert "fifo" not in source.list()
        for name in ("fifo", "part"):
            with pytest.raises(CheckpointError, match="not a regular file"):
                source.size(name)  # would wait for a writer if the open could block
        assert open_below(folder) == []


def test_missing_files_have_their_own_error(source: LocalSource) -> None:
    for name in ("nothing", "nowhere/nothing", "f0/below-a-file"):
        with pytest.raises(MissingFileError) as caught:
            source.size(name)
        assert caught.value.file == name


# --- open_source -----------------------------------------------------------------------------


def test_open_source(folder: Path, source: LocalSource) -> None:
    assert open_source(source) is source
    for path in (folder, str(folder)):
        with open_source(path) as opened:
            assert opened.size("f1") == 1001


@pytest.mark.parametrize("name", ["org/model", "", "a\0b"])
def test_no_such_folder(name: str) -> None:
    with pytest.raises(LoaderError, match="no such folder"):
        open_source(name)


def test_a_file_is_no_source(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="not a folder"):
        open_source(folder / "f0")


def test_an_unreadable_subfolder_is_left_out(folder: Path) -> None:
    real = os.scandir

    def guarded(path: str) -> object:
        if str(path).endswith("part"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    with pytest.MonkeyPatch.context() as patch, LocalSource(folder) as source:
        patch.setattr(source_module.os, "scandir", guarded)
        assert source.list() == [f"f{i}" for i in range(10)]


# --- sources of someone else's -------------------------------------------------------------------


class Foreign(LocalSource):
    """A folder whose reads, or sizes, fail with an error that is none of ours."""

    def __init__(self, folder: Path, error: Exception, sizes: bool) -> None:
        super().__init__(folder)
        self.error, self.sizes = error, sizes

    def size(self, file: str) -> int:
        if self.sizes and file.endswith(".safetensors"):
            raise self.error
        return super().size(file)

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        if file.endswith(".safetensors") and not self.sizes:
            raise self.error
        super().read_into(file, offset, buffer)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), ValueError("of HTTP")])
@pytest.mark.parametrize("sizes", [False, True], ids=["read", "size"])
def test_what_a_foreign_source_raises_while_planning_becomes_an_error_of_the_library(
    error: Exception, sizes: bool, tmp_path: Path
) -> None:
    made = tiny_checkpoint(tmp_path, hidden=64, intermediate=64, experts=4, group=32, layers=1)
    # Closed here: `error` outlives the test, and with it the frames that hold the source.
    with (
        Foreign(made.folder, error, sizes) as source,
        pytest.raises(CheckpointError, match="file cannot be read") as caught,
    ):
        loader.plan(source)
    assert caught.value.file == "model.safetensors"
    assert caught.value.expected == ("its size" if sizes else "8 bytes at offset 0")
    assert str(error) in str(caught.value) and caught.value.__cause__ is error


def test_a_source_has_the_name_that_reports_call_it(folder: Path) -> None:
    with LocalSource(folder, name="own/model") as source:
        assert source.name == "own/model" and source.folder == folder.resolve()


@pytest.mark.parametrize("kind", ["pipe", "folder", "link to nothing", "circle", "device"])
@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "model.safetensors.index.json",
        "config.json",
        "hf_quant_config.json",
    ],
)
def test_a_part_of_the_checkpoint_that_is_no_file_is_not_passed_over(
    kind: str, name: str, tmp_path: Path
) -> None:
    """Another file would take its place: ``reference.safetensors``, or no index at all."""
    tiny_checkpoint(tmp_path, hidden=64, intermediate=32, experts=2, group=32)
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    if name != "model.safetensors":
        os.link(tmp_path / "other.safetensors", tmp_path / "model.safetensors")
    path = tmp_path / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        targets = {"link to nothing": "nowhere", "circle": name, "device": "/dev/zero"}
        path.symlink_to(targets[kind])
    for call in (loader.plan, loader.load):
        with pytest.raises(CheckpointError) as caught:
            call(tmp_path)
        assert caught.value.file == name
        assert str(caught.value).startswith(
            ("not a regular file", "file does not exist", "file cannot be opened", "file lies out")
        )

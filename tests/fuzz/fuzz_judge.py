"""Loads one hostile checkpoint and says at which stage it ended; everything else is a failure.

What must hold of every input: success or one ``LoaderError`` of one line; no file outside the
folder and no pickle is opened; no memory is taken by a number that only the file claims.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import traceback
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
from fuzz_checkpoints import Checkpoint

import loader
from loader import memory
from loader.errors import LoaderError

STAGING = 1 << 20
CARD = 1 << 28

_STAGE_OF_MODULE = {
    "config": "checkpoint.model checkpoint.scheme checkpoint.awq checkpoint.compressed "
    "checkpoint.modelopt",
    "files": "checkpoint.source checkpoint.index",
    "header": "checkpoint.header checkpoint.entries",
    "tensors": "checkpoint.catalog checkpoint.tables checkpoint.layers checkpoint.family "
    "checkpoint.folder",
    "plan": "plan layer_plan layer_choice route shard pieces chunks bank policy",
    "payload": "verdict stream converter core native pipeline",
}
_STAGES = {module: stage for stage, names in _STAGE_OF_MODULE.items() for module in names.split()}
STAGES = (*_STAGE_OF_MODULE, "loaded")
AFTER_JSON = ("tensors", "plan", "payload")
PACKAGE = Path(loader.__file__).parent


class Opened:
    """Paths that the process opens, by Python's own audit events; installed once, for good."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.unpickled = False
        self._on = False
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._on:
            return
        if event == "open" and isinstance(arguments[0], (str, bytes)):
            self.paths.append(os.fsdecode(arguments[0]))
        self.unpickled |= event == "pickle.find_class"

    @contextmanager
    def watching(self) -> Iterator[None]:
        self.paths, self._on = [], True
        try:
            yield
        finally:
            self._on = False


@dataclass(frozen=True)
class Verdict:
    """``stage`` at which the input ended; whether safetensors accepts all of its shards."""

    stage: str
    safetensors: bool
    after_json: bool


def judge(made: Checkpoint, scratch: Path, opened: Opened, trace: bool = False) -> Verdict:
    """Write, plan and load one checkpoint; raises AssertionError where anything was not right."""
    root = scratch / "input"
    folder = root / "model"
    made.write(folder)
    try:
        accepted = _safetensors_accepts(folder)
        on_disk = sum(len(data) for data in _regular(folder).values())
        if trace:
            tracemalloc.start()
        taken: list[int] = []
        with opened.watching(), _counting(taken):
            error = _load(folder)
        if trace:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 40 * on_disk + (16 << 20), f"{peak} bytes for {on_disk} on disk"
        assert sum(taken) < 8 * on_disk + 4 * STAGING, f"{sum(taken)} bytes for {on_disk} on disk"
        _check_opened(opened, root, folder)
        if error is None:
            assert accepted or _unused_is_bad(folder), "loaded what safetensors refuses"
            return Verdict("loaded", accepted, False)
        assert "\n" not in str(error) and len(str(error)) < 6000, "not one line"
        stage, function = _stage_of(error)
        late = stage in AFTER_JSON or function in (
            "_refuse_entries",
            "_check_sizes",
            "_check_ranges",
        )
        return Verdict(stage, accepted, late)
    finally:
        shutil.rmtree(root)


def _load(folder: Path) -> LoaderError | None:
    try:
        loader.load(folder, staging_bytes=STAGING, card_memory=CARD)
    except LoaderError as error:
        return error
    return None


@contextmanager
def _counting(taken: list[int]) -> Iterator[None]:
    fresh = memory.fresh

    def spy(*args: Any) -> Any:
        tensor = fresh(*args)
        taken.append(tensor.nbytes)
        return tensor

    memory.fresh = spy
    try:
        yield
    finally:
        memory.fresh = fresh


def _stage_of(error: BaseException) -> tuple[str, str]:
    """The stage and function of the innermost frame of the package that has a stage."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if PACKAGE in path.parents:
            module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
            if module in _STAGES:
                return _STAGES[module], frame.name
    raise AssertionError(f"no stage raised {error!r}")


def _regular(folder: Path) -> dict[str, bytes]:
    found = {}
    for path in folder.iterdir():
        if path.exists() and stat.S_ISREG(path.stat().st_mode):
            found[path.name] = path.read_bytes()
    return found


def _accepts(data: bytes) -> bool:
    try:
        safetensors.deserialize(data)
    except safetensors.SafetensorError:
        return False
    return True


def _safetensors_accepts(folder: Path) -> bool:
    shards = {n: d for n, d in _regular(folder).items() if n.endswith(".safetensors")}
    return bool(shards) and all(map(_accepts, shards.values()))


def _unused_is_bad(folder: Path) -> bool:
    """The files of the model are good; what safetensors refuses is no part of it."""
    files = loader.plan(folder, card_memory=CARD).checkpoint.catalog.files
    return all(_accepts((folder / file).read_bytes()) for file in files)


def _check_opened(opened: Opened, root: Path, folder: Path) -> None:
    assert not opened.unpickled, "a pickle was opened"
    for path in opened.paths:
        real = os.path.realpath(path)
        if real.startswith(f"{root}{os.sep}"):
            assert real.startswith(f"{folder}{os.sep}"), f"opened {path} outside the folder"
        assert not path.endswith((".bin", ".pt")), f"opened the pickle {path}"
        assert real != "/etc/hostname", "followed an absolute path"

"""Disk: what the operating system says of the files of a folder, with errors of our own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from loader.checkpoint.wording import shown
from loader.errors import CheckpointError

_PART_SUFFIXES = (".safetensors", ".json")
_SHARED_BLOBS_MARK = ".huggingface-shared-blobs"


def hub_blobs(root: Path) -> list[str]:
    """Where a folder of the Hub's cache, which holds links, may have its bytes; else nowhere.

    The cache links from ``snapshots/<commit>/`` to the repo's ``blobs/``, and from there, where it
    shares them, to ``blobs/`` of the whole cache.
    """
    for folder in root.parents:
        if folder.name == "snapshots":
            shared = folder.parent.parent / "blobs"  # of all repos, where the cache has made one
            marked = (shared / _SHARED_BLOBS_MARK).is_file()
            return [os.path.realpath(folder.parent / "blobs")] + [str(shared)] * marked
    return []


def regular_files(folder: str, prefix: str, depth: int) -> Iterator[str]:
    """Names of the files below ``folder``, ``depth`` folders deep, each behind ``prefix``.

    What is named like a part of a checkpoint and is no file (a link to nothing, a pipe, a folder)
    is among them: opening it says so, where leaving it out would let another file take its place.

    Raises CheckpointError where ``folder`` itself cannot be listed.
    """
    try:
        entries = list(os.scandir(folder))
    except OSError as error:
        if prefix:
            return  # such as lost+found: a file in it that is needed fails at its own open
        raise CheckpointError(
            "folder cannot be listed", file=shown(folder), found=error.strerror
        ) from error
    for entry in entries:
        # False, not an error, for a broken or circular link.
        if os.path.isfile(entry.path) or entry.name.endswith(_PART_SUFFIXES):
            yield prefix + entry.name
        elif depth and entry.is_dir(follow_symlinks=False):
            yield from regular_files(entry.path, f"{prefix}{entry.name}/", depth - 1)


def stat_of(descriptor: int, file: str) -> os.stat_result:
    """What an open file is now. Raises CheckpointError."""
    try:
        return os.fstat(descriptor)
    except OSError as error:  # such as a descriptor that someone else has closed
        raise CheckpointError(
            "file cannot be looked at", file=shown(file), found=error.strerror
        ) from error


def read_at(descriptor: int, view: memoryview, offset: int, file: str) -> int:
    """One read into ``view``; the bytes that came. Raises CheckpointError."""
    try:
        return os.preadv(descriptor, [view], offset)
    except OSError as error:
        raise CheckpointError(
            "file cannot be read",
            file=file,
            expected=f"{len(view)} bytes at offset {offset}",
            found=error.strerror,
        ) from error

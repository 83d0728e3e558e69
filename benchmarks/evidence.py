"""Evidence: what a benchmark showed on a card, with all that says on what and when.

A file of evidence holds for the native code that it was taken with: ``csrc_sha256`` says which.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[1]
PARTS = ("device", "launch", "rtc")
"""Folders of ``csrc/`` whose code runs on, or for, a card."""


def csrc_sha256(repository: Path = REPOSITORY) -> str:
    """Hash of the native code for cards: of each file its path and its bytes, in order of paths."""
    digest = hashlib.sha256()
    csrc = repository / "csrc"
    files = [path for part in PARTS for path in (csrc / part).rglob("*") if path.is_file()]
    for path in sorted(files, key=lambda path: path.relative_to(csrc).as_posix()):
        digest.update(path.relative_to(csrc).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def stamp(topic: str, results: Any) -> dict[str, Any]:
    """The form of a file of evidence."""
    return {
        "schema": 1,
        "topic": topic,
        "command": _command(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "card": torch.cuda.get_device_name(0),
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "csrc_sha256": csrc_sha256(),
        "results": results,
    }


def _command() -> str:
    """The call as anyone may repeat it: folders of one machine by their names alone."""
    script = Path(sys.argv[0]).resolve()
    inside = script.is_relative_to(REPOSITORY)
    words = [script.relative_to(REPOSITORY).as_posix() if inside else script.name]
    words += [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    return shlex.join(["python", *words])


def _driver() -> str | None:
    """Version of the card's driver, where the system shows it."""
    path = Path("/proc/driver/nvidia/version")
    if not path.exists():
        return None
    words = path.read_text().split("\n", 1)[0].split()
    return next((word for word in words if word[0].isdigit() and "." in word), None)


def write(path: Path, topic: str, results: Any) -> None:
    """Write :func:`stamp` as indented JSON."""
    path.write_text(json.dumps(stamp(topic, results), indent=2) + "\n")

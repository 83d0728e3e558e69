"""What the cases of section 2 share: tensors that are dropped or renamed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from loader.testing.container import rewrite

NAMES = ("gate", "up", "down")


def drop(folder: Path, pattern: str) -> list[str]:
    """Takes the tensors whose whole name matches out of files and index; returns their names."""
    gone: list[str] = []

    def edit(tensors: dict[str, Any]) -> None:
        gone.extend(name for name in tensors if re.fullmatch(pattern, name))
        for name in gone:
            del tensors[name]

    rewrite(folder, edit)
    assert gone, pattern
    return gone


def rename(folder: Path, pattern: str, replacement: str) -> None:
    """Renames tensors, by ``re.sub``."""

    def edit(tensors: dict[str, Any]) -> None:
        renamed = {re.sub(pattern, replacement, name): value for name, value in tensors.items()}
        assert renamed.keys() != tensors.keys() and len(renamed) == len(tensors)
        tensors.clear()
        tensors.update(renamed)

    rewrite(folder, edit)

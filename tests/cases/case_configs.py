"""Edits of the quantization config of a case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loader.testing.container import edit_json


def quantization(folder: Path, **keys: Any) -> None:
    """Changes keys of ``quantization_config``; None takes one away."""

    def edit(content: dict[str, Any]) -> None:
        section = content["quantization_config"]
        for key, value in keys.items():
            section.pop(key, None)
            if value is not None:
                section[key] = value

    edit_json(folder, "config.json", edit)


def weights_of(folder: Path, **keys: Any) -> None:
    """Changes keys of the one config group's ``weights``."""

    def edit(content: dict[str, Any]) -> None:
        group = content["quantization_config"]["config_groups"]["group_0"]
        group["weights"].update(keys)

    edit_json(folder, "config.json", edit)

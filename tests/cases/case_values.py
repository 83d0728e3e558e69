"""What the cases of section 4 share: names of parts, and a value written over a tensor."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from loader.testing.container import edit_tensor

NAMES = ("gate", "up", "down")
GLOBALS = {"N": "weight_global_scale", "M": "weight_scale_2"}


def set_float(folder: Path, name: str, value: float) -> None:
    """Writes one fp32 value over a whole tensor."""
    edit_tensor(folder, name, lambda array: np.full_like(array, np.float32(value)))

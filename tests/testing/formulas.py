"""What every test of the generator needs: small checkpoints, and the formats' formulas once more.

Written out from the formats' descriptions with plain numpy, and torch's own bf16 and e4m3; nothing
here comes from the generator's encoder or from the loader.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from loader.testing.checkpoint import TinyCheckpoint, tiny_checkpoint
from loader.testing.container import INDEX

SMALL = {"hidden": 64, "intermediate": 96, "experts": 3}
FLOATS = ("ct-nvfp4", "modelopt-nvfp4")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def small(folder: Path, dialect: str, **settings: Any) -> TinyCheckpoint:
    """A checkpoint of a few hundred KB; group 32 where the format leaves a choice."""
    if dialect not in FLOATS:
        settings.setdefault("group", 32)
    return tiny_checkpoint(folder, dialect=dialect, **{**SMALL, **settings})


def load(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model as the safetensors package reads them."""
    index = folder / INDEX
    files = ["model.safetensors"]
    if index.exists():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(folder / file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - a handle is no mapping
    return tensors


def nibbles(words: np.ndarray, order: tuple[int, ...], axis: int) -> np.ndarray:
    """Nibble i of a word along ``axis`` to place ``8 * word + order[i]``."""
    words = np.moveaxis(words, axis, -1).astype(np.uint32)
    spread = np.empty((*words.shape, 8), np.int64)
    for i, place in enumerate(order):
        spread[..., place] = (words >> np.uint32(4 * i)) & np.uint32(15)
    return np.moveaxis(spread.reshape(*words.shape[:-1], -1), -1, axis)


def decode(
    tensors: dict[str, torch.Tensor], group: int, precision: type, half: str = ""
) -> np.ndarray:
    """(out, in) of one projection in ``precision``; ``half`` picks gate or up of a fused one."""
    part = {name: tensor.numpy() for name, tensor in tensors.items() if tensor.dtype.itemsize > 2}
    part |= {name: t.float().numpy() for name, t in tensors.items() if t.dtype.itemsize <= 2}
    if "qweight" in part:
        q = nibbles(part["qweight"].view(np.uint32), (0, 2, 4, 6, 1, 3, 5, 7), 1).T
        z = np.full(part["scales"].shape, 8).T
        if "qzeros" in part:
            z = nibbles(part["qzeros"].view(np.uint32), (0, 2, 4, 6, 1, 3, 5, 7), 1).T
        scale = part["scales"].T
    elif "weight_packed" in part and tensors["weight_packed"].dtype == torch.int32:
        q = nibbles(part["weight_packed"].view(np.uint32), tuple(range(8)), 1)
        scale = part["weight_scale"]
        z = np.full(scale.shape, 8)
        if "weight_zero_point" in part:
            z = nibbles(part["weight_zero_point"].view(np.uint32), tuple(range(8)), 0)
    elif "pre_quant_scale" in part:
        packed = part["weight"].astype(np.int64)
        q = np.stack([packed & 15, packed >> 4], axis=1).reshape(-1, packed.shape[1])
        q, z, scale = (q ^ 8) - 8, np.zeros(part["weight_scale"].shape), part["weight_scale"]
    else:
        return decode_floats(part, group, precision, half)
    size = q.shape[0] // 2
    if half:
        q, z, scale = (x[:size] if half == "gate" else x[size:] for x in (q, z, scale))
    columns = np.arange(q.shape[1]) // (group if group > 0 else q.shape[1])
    return (q - z[:, columns]).astype(precision) * scale[:, columns].astype(precision)


def decode_floats(
    part: dict[str, np.ndarray], group: int, precision: type, half: str
) -> np.ndarray:
    """NVFP4 of either writer; in float32 the global scale meets the block scale first."""
    packed = part["weight_packed" if "weight_packed" in part else "weight"].astype(np.int64)
    value = E2M1[np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1)]
    scale, size = part["weight_scale"].astype(precision), packed.shape[0] // 2
    if half:
        value, scale = (x[:size] if half == "gate" else x[size:] for x in (value, scale))
    divides = "weight_global_scale" in part
    wide = part["weight_global_scale" if divides else "weight_scale_2"].reshape(-1)
    wide = wide[-1 if half == "up" else 0].astype(precision)
    columns = np.arange(value.shape[1]) // group
    if precision is np.float32:
        block = scale / wide if divides else scale * wide
        return value.astype(np.float32) * block[:, columns]
    product = value * scale[:, columns]
    return product / wide if divides else product * wide


def of_module(tensors: dict[str, torch.Tensor], module: str) -> dict[str, torch.Tensor]:
    """The parts of one module by their last name."""
    begin = module + "."
    return {n[len(begin) :]: t for n, t in tensors.items() if n.startswith(begin)}


def assert_same_bits(found: np.ndarray, wanted: np.ndarray) -> None:
    """Equal shape, dtype and bits, -0 included; the message shows the first difference."""
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    unit = f"u{found.dtype.itemsize}"
    bits = [np.ascontiguousarray(array).view(unit) for array in (found, wanted)]
    different = np.argwhere(bits[0] != bits[1])
    if len(different):
        at = tuple(different[0])
        raise AssertionError(f"{len(different)} differ, first {at}: {found[at]!r} {wanted[at]!r}")

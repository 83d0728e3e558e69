"""Plain: unquantized tensors of a checkpoint, read in bounded pieces straight into their dtype.

A tensor whose dtype stays is read into its own memory; another is converted a piece at a time, so
that it never lies in memory twice.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from loader import memory
from loader.checkpoint.catalog import Catalog
from loader.checkpoint.source import Source
from loader.errors import UnsupportedError

PIECE_BYTES = 4 << 20
"""Bytes that are read at a time where the dtype or the device changes."""

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


def read_tensor(
    source: Source,
    catalog: Catalog,
    row: int,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """The tensor of one catalog row, in ``dtype`` (None: as on disk); the caller owns it.

    Raises :class:`UnsupportedError` for a dtype on disk that is no number of PyTorch's.
    """
    device = device or torch.device("cpu")
    name, on_disk, shape = catalog.describe(row)
    file = catalog.files[int(catalog.file[row])]
    own = DTYPES.get(on_disk)
    if own is None:
        raise UnsupportedError(
            "a tensor outside the experts is in a dtype that is not loaded",
            file=file,
            tensor=name,
            expected=", ".join(DTYPES),
            found=on_disk,
        )
    begin = int(catalog.begin[row])
    with memory.allocating(name, torch.Size(shape).numel() * (dtype or own).itemsize):
        result = memory.fresh(shape, dtype or own, device)
    flat = result.view(-1)
    if result.dtype == own and device.type == "cpu":
        _read(source, file, begin, flat)
        return result
    each = PIECE_BYTES // own.itemsize
    piece = torch.empty(min(each, flat.numel()), dtype=own, device="cpu")
    for first in range(0, flat.numel(), each):
        some = piece[: min(each, flat.numel() - first)]
        _read(source, file, begin + first * own.itemsize, some)
        flat[first : first + some.numel()].copy_(some)
    return result


def _read(source: Source, file: str, offset: int, into: torch.Tensor) -> None:
    if into.numel():
        source.read_into(file, offset, memoryview(into.view(torch.uint8).numpy()))

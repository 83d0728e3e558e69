"""Safetensors files as plain bytes: read, write, and break on purpose.

The writer is our own because tests need what the package refuses: BF16 and F8_E4M3 without
torch, any order of payloads, headers of any length, and files that lie about themselves.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loader.errors import CheckpointError

INDEX = "model.safetensors.index.json"

NUMPY_DTYPES: dict[str, str] = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "F8_E4M3": "u1",
    "I64": "<i8",
    "I32": "<i4",
    "U8": "u1",
}
"""The numpy dtype that holds the bytes of each safetensors dtype; BF16 and F8_E4M3 stay bits."""

_FROM_NUMPY = {
    np.dtype(code): name for name, code in NUMPY_DTYPES.items() if name not in ("BF16", "F8_E4M3")
}


def byte_count(dtype: str, shape: Iterable[int]) -> int:
    """Bytes that a tensor of this dtype and shape takes."""
    count = np.dtype(NUMPY_DTYPES[dtype]).itemsize
    for size in shape:
        count *= size
    return count


@dataclass
class RawTensor:
    """One stored tensor: safetensors dtype name, shape, little-endian bytes, and its file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes
    file: str = ""

    def array(self) -> NDArray[Any]:
        """A writable copy, dtype as in :data:`NUMPY_DTYPES` (BF16 as uint16, F8 as uint8)."""
        return np.frombuffer(self.data, NUMPY_DTYPES[self.dtype]).reshape(self.shape).copy()


def raw(array: NDArray[Any], dtype: str | None = None, file: str = "") -> RawTensor:
    """A :class:`RawTensor` from an array; name the dtype where the array holds bits."""
    name = dtype or _FROM_NUMPY[array.dtype]
    return RawTensor(name, array.shape, np.ascontiguousarray(array).tobytes(), file)


def header_bytes(
    entries: Iterable[tuple[str, str, tuple[int, ...]]], length: int = 0
) -> tuple[bytes, int]:
    """The framed header for ``(name, dtype, shape)`` in payload order, and the payload's bytes.

    ``length`` is the least length of the JSON text; it is filled with spaces, as the format
    allows, and without it the text is filled to a multiple of eight.
    """
    pieces = ['{"__metadata__":{"format":"pt"}']
    offset = 0
    for name, dtype, shape in entries:
        end = offset + byte_count(dtype, shape)
        sizes = ",".join(map(str, shape))
        pieces.append(
            f'{json.dumps(name)}:{{"dtype":"{dtype}","shape":[{sizes}],'
            f'"data_offsets":[{offset},{end}]}}'
        )
        offset = end
    text = (",".join(pieces) + "}").encode()
    text = text.ljust(length) if length else text.ljust(-(-len(text) // 8) * 8)
    return struct.pack("<Q", len(text)) + text, offset


def write_file(path: Path, tensors: Mapping[str, RawTensor], *, header_length: int = 0) -> None:
    """Write tensors in the mapping's order; shapes are believed, so that a test may lie."""
    entries = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    header = header_bytes(entries, header_length)[0]
    _replace(path, [header, *(tensor.data for tensor in tensors.values())])


def _replace(path: Path, pieces: Iterable[bytes]) -> None:
    """A new file under the old name: tensors mapped from the old one keep their bytes."""
    fresh = path.with_name(path.name + ".writing")
    with open(fresh, "wb") as file:
        file.writelines(pieces)
    os.replace(fresh, path)


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header as a dict without ``__metadata__``, and where the payload begins."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length


def read_tensor(path: Path, name: str, header: tuple[dict[str, Any], int]) -> RawTensor:
    """One tensor of a file whose header was read before."""
    entry = header[0][name]
    begin, end = entry["data_offsets"]
    with open(path, "rb") as file:
        file.seek(header[1] + begin)
        data = file.read(end - begin)
    return RawTensor(entry["dtype"], tuple(entry["shape"]), data, path.name)


def read_file(path: Path) -> dict[str, RawTensor]:
    """All tensors of a file, in payload order."""
    header = read_header(path)
    names = sorted(header[0], key=lambda name: header[0][name]["data_offsets"])
    return {name: read_tensor(path, name, header) for name in names}


def model_files(folder: Path) -> list[Path]:
    """The model's files: those of the index, else ``model.safetensors``."""
    if (folder / INDEX).exists():
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        return [folder / name for name in sorted(set(weight_map.values()))]
    return [folder / "model.safetensors"]


def write_index(folder: Path, files: Mapping[str, str], total_bytes: int) -> None:
    """Write ``model.safetensors.index.json`` for tensor name to file name."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(files)}
    (folder / INDEX).write_text(json.dumps(index, indent=1))


def rewrite(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Load every tensor, let ``edit`` change the dict, write files and index back, all valid.

    Values are :class:`RawTensor`; ``edit`` may drop, rename, replace or add entries, and may put
    in numpy arrays whose dtype says it all. A tensor without a file goes to the last file. Each
    file keeps the order of the dict; a file that loses every tensor stays, with an empty header.
    """
    paths = model_files(folder)
    tensors: dict[str, Any] = {}
    for path in paths:
        tensors.update(read_file(path))
    edit(tensors)
    shards: dict[str, dict[str, RawTensor]] = {path.name: {} for path in paths}
    for name, value in tensors.items():
        tensor = value if isinstance(value, RawTensor) else raw(value)
        shards.setdefault(tensor.file or paths[-1].name, {})[name] = tensor
    for file, content in shards.items():
        write_file(folder / file, content)
    if len(shards) > 1 or (folder / INDEX).exists():
        files = {name: file for file, content in shards.items() for name in content}
        total = sum(len(tensor.data) for content in shards.values() for tensor in content.values())
        write_index(folder, files, total)


def edit_tensor(
    folder: Path, name: str, edit: Callable[[NDArray[Any]], NDArray[Any] | None]
) -> None:
    """Change one tensor's values in place or by the returned array; its dtype name stays."""

    def apply(tensors: dict[str, Any]) -> None:
        if name not in tensors:
            raise CheckpointError("no tensor to edit", file=str(folder), tensor=name)
        old = tensors[name]
        array = old.array()
        changed = edit(array)
        tensors[name] = raw(array if changed is None else changed, old.dtype, old.file)

    rewrite(folder, apply)


def edit_json(folder: Path, name: str, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Load a JSON file of the folder, change it (in place, or by the returned value), save it."""
    path = folder / name
    content = json.loads(path.read_text())
    changed = edit(content)
    path.write_text(json.dumps(content if changed is None else changed, indent=2))


def replace_header(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Replace a file's header and keep its payload bytes, whatever the header then claims.

    ``edit`` gets the parsed header and changes it in place, or returns any JSON value, or ``str``
    or ``bytes`` that become the header text as they are (duplicate names, broken JSON).
    """
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    changed = edit(header)
    value = header if changed is None else changed
    text = value if isinstance(value, bytes) else None
    if text is None:
        text = (value if isinstance(value, str) else json.dumps(value)).encode()
    _replace(path, [struct.pack("<Q", len(text)), text, content[8 + length :]])


def truncate_file(path: Path, *, size: int | None = None, drop: int = 0) -> None:
    """Cut a file to ``size`` bytes or by ``drop`` bytes, in place, so that open readers see it."""
    os.truncate(path, path.stat().st_size - drop if size is None else size)

"""Scan: headers, the index and names read by native code, as columns.

Native code knows the plain subset in which tools write checkpoints. Whatever it does not take, it
leaves (None here) to the readers in Python, which are the reference: they take it after all, or say
in one sentence what is wrong. What native code takes, they take with the same result.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loader.library import LIBRARY, usable_cores

_PREFIX_BYTES = 8
_LEAST_ENTRY_BYTES = 49
"""Of ``"":{"dtype":"U8","shape":[],"data_offsets":[0,0]}``: a JSON holds no more of them."""
_LEAST_MAPPING_BYTES = 5
"""Of ``"":""`` in the index."""
_MOST_DIMENSIONS = 1 << 16
"""Of all distinct shapes of one file; a checkpoint has a few of them."""

if LIBRARY is not None:
    LIBRARY.qpn_kinds.restype = ctypes.c_int64

NO_EXPERT, ALONE = -1, -2
"""Kinds of names that have no ``.experts.``, and that must be looked at one by one."""


class _HeaderTable(ctypes.Structure):
    """``qpn::HeaderTable`` of csrc/host/header.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
        ("file_bytes", ctypes.c_int64),
        ("most_tensors", ctypes.c_int64),
        ("most_names", ctypes.c_int64),
        ("most_dims", ctypes.c_int64),
        *(
            (name, ctypes.c_void_p)
            for name in ("names", "dtypes", "shape_ids", "begins", "ends", "dims", "ranks")
        ),
        *((name, ctypes.c_int64) for name in ("tensors", "names_bytes", "shapes", "accepted")),
    ]


class _IndexTable(ctypes.Structure):
    """``qpn::IndexTable`` of csrc/host/names.h."""

    _fields_ = [
        ("json", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
        ("most_tensors", ctypes.c_int64),
        ("most_text", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("names", "files", "file_ids")),
        *(
            (name, ctypes.c_int64)
            for name in ("tensors", "names_bytes", "file_count", "files_bytes", "accepted")
        ),
    ]


@dataclass(frozen=True, eq=False)
class Columns:
    """The tensors of one header in the order of their bytes; see ``Header`` of header.py."""

    names: list[str]
    dtypes: npt.NDArray[np.uint8]
    shape_ids: npt.NDArray[np.int32]
    shapes: list[tuple[int, ...]]
    begins: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class IndexColumns:
    """The index: ``names`` of tensors, ``file_ids`` int32 [n] of their files in ``files``."""

    names: list[str]
    files: list[str]
    file_ids: npt.NDArray[np.int32]


class _HeaderScan:
    """The arrays of one native call, as large as the bytes of the header allow for."""

    def __init__(self, data: bytes, file_bytes: int) -> None:
        json_bytes = max(len(data) - _PREFIX_BYTES, 0)
        most = json_bytes // _LEAST_ENTRY_BYTES + 1
        self._data = np.frombuffer(data, np.uint8)
        self._arrays: dict[str, npt.NDArray[Any]] = {
            "names": np.empty(json_bytes + 1, np.uint8),
            "dtypes": np.empty(most, np.uint8),
            "shape_ids": np.empty(most, np.int32),
            "begins": np.empty(most, np.int64),
            "ends": np.empty(most, np.int64),
            "dims": np.empty(min(json_bytes // 2 + 1, _MOST_DIMENSIONS), np.uint64),
            "ranks": np.empty(most, np.int32),
        }
        self._sizes = {
            "bytes": len(data),
            "file_bytes": file_bytes,
            "most_tensors": most,
            "most_names": json_bytes + 1,
            "most_dims": len(self._arrays["dims"]),
        }

    def fill(self, table: _HeaderTable) -> None:
        """Say to native code where the arrays are."""
        table.data = self._data.ctypes.data
        for name, size in self._sizes.items():
            setattr(table, name, size)
        for name, array in self._arrays.items():
            setattr(table, name, array.ctypes.data)

    def columns(self, table: _HeaderTable) -> Columns | None:
        """What native code has written; None where it left the header to Python."""
        if not table.accepted:
            return None
        count, arrays = int(table.tensors), self._arrays
        ranks = arrays["ranks"][: table.shapes].tolist()
        dims = iter(arrays["dims"][: sum(ranks)].tolist())
        return Columns(
            names=_texts(arrays["names"], table.names_bytes),
            dtypes=arrays["dtypes"][:count].copy(),
            shape_ids=arrays["shape_ids"][:count].copy(),
            shapes=[tuple(next(dims) for _ in range(rank)) for rank in ranks],
            begins=arrays["begins"][:count].copy(),
            ends=arrays["ends"][:count].copy(),
        )


def _texts(array: npt.NDArray[np.uint8], nbytes: int) -> list[str]:
    """Texts that are each followed by a newline, and hold none."""
    return array[:nbytes].tobytes().decode("utf-8").split("\n")[:-1]


def scan_headers(headers: Sequence[tuple[bytes, int]]) -> list[Columns | None]:
    """Columns of some headers, each its bytes (prefix and JSON) and its file's size; see above."""
    if LIBRARY is None or not headers:
        return [None] * len(headers)
    scans = [_HeaderScan(data, size) for data, size in headers]
    tables = (_HeaderTable * len(scans))()
    for scan, table in zip(scans, tables, strict=True):
        scan.fill(table)
    LIBRARY.qpn_headers(tables, ctypes.c_int64(len(scans)), ctypes.c_int(usable_cores()))
    return [scan.columns(table) for scan, table in zip(scans, tables, strict=True)]


def scan_index(json_bytes: bytes) -> IndexColumns | None:
    """The ``weight_map`` of an index file that is well-formed and not empty; see above."""
    if LIBRARY is None:
        return None
    most = len(json_bytes) // _LEAST_MAPPING_BYTES + 1
    data = np.frombuffer(json_bytes, np.uint8)
    names, files = (np.empty(len(json_bytes) + 1, np.uint8) for _ in range(2))
    file_ids = np.empty(most, np.int32)
    pointers = (array.ctypes.data for array in (names, files, file_ids))
    table = _IndexTable(data.ctypes.data, len(json_bytes), most, len(json_bytes) + 1, *pointers)
    LIBRARY.qpn_index(ctypes.byref(table))
    if not table.accepted:
        return None
    return IndexColumns(
        _texts(names, table.names_bytes),
        _texts(files, table.files_bytes),
        file_ids[: table.tensors].copy(),
    )


def _joined(names: Sequence[str]) -> bytes:
    return ("\n".join(names) + "\n" * bool(names)).encode()


def scan_owned(
    index: IndexColumns, names: Sequence[str], file_ids: npt.NDArray[np.int32]
) -> npt.NDArray[np.bool_] | None:
    """Which ``names`` the index gives to the file that ``file_ids`` says (-1: to none)."""
    if LIBRARY is None:
        return None
    known, texts = _joined(index.names), _joined(names)
    owned = np.empty(len(names), np.bool_)
    wanted = np.ascontiguousarray(file_ids, np.int32)
    done = LIBRARY.qpn_owned(
        known,
        ctypes.c_int64(len(known)),
        ctypes.c_int64(len(index.names)),
        ctypes.c_void_p(index.file_ids.ctypes.data),
        texts,
        ctypes.c_int64(len(texts)),
        ctypes.c_int64(len(names)),
        ctypes.c_void_p(wanted.ctypes.data),
        ctypes.c_void_p(owned.ctypes.data),
    )
    return owned if done else None


def scan_kinds(
    names: Sequence[str],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], list[int]] | None:
    """For each name its kind and the number behind ``.experts.``; the first name of each kind.

    Names of one kind differ in that number alone. ``NO_EXPERT``: no such component; ``ALONE``: no
    plain number behind it, or more such components. See above.
    """
    if LIBRARY is None:
        return None
    texts, count = _joined(names), len(names)
    kinds, experts = np.empty(count, np.int32), np.empty(count, np.int64)
    firsts = np.empty(count, np.int64)
    number = LIBRARY.qpn_kinds(
        texts,
        ctypes.c_int64(len(texts)),
        ctypes.c_int64(count),
        *(ctypes.c_void_p(array.ctypes.data) for array in (kinds, experts, firsts)),
    )
    return None if number < 0 else (kinds, experts, firsts[:number].tolist())

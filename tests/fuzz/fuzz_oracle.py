"""The opinion of safetensors itself, and the list of points in which the reader is stricter."""

from __future__ import annotations

import json
import traceback
from typing import Any

import safetensors

from loader.checkpoint.header import (
    DTYPES,
    HeaderBytes,
    header_length,
    parse_header,
    read_table,
)
from loader.checkpoint.scan import Columns, scan_headers
from loader.errors import CheckpointError

View = dict[str, tuple[str, tuple[int, ...], bytes]]

#: Function of the header reader that refused -> the stage it belongs to.
_STAGES = {
    "header_length": "length",
    "_loads": "JSON",
    "_refuse_duplicates": "names",
    "_check_metadata": "types",
    "_refuse_entries": "types",
    "_check_sizes": "sizes",
    "_check_ranges": "ranges",
}
STAGES = ("accepted", *dict.fromkeys(_STAGES.values()))
AFTER_JSON = ("names", "types", "sizes", "ranges")


def safetensors_view(data: bytes) -> View | None:
    """What safetensors reads from a whole file, None where it refuses."""
    try:
        tensors = safetensors.deserialize(data)
    except safetensors.SafetensorError:
        return None
    return {
        name: (info["dtype"], tuple(info["shape"]), bytes(info["data"])) for name, info in tensors
    }


def our_view(data: bytes) -> View | str:
    """What our reader reads from a whole file, or the stage that refused it."""
    try:
        length = header_length(data[:8], len(data), "f")
        twins(data[:length], len(data))
        header = parse_header(data[:length], len(data), "f")
    except CheckpointError as error:
        return stage_of(error)
    assert sorted(header.begins.tolist()) == header.begins.tolist()
    return {
        name: (DTYPES[d], header.shapes[s], data[b:e])
        for name, d, s, b, e in zip(
            header.names,
            header.dtypes,
            header.shape_ids,
            header.begins.tolist(),
            header.ends.tolist(),
            strict=True,
        )
    }


def twins(data: bytes, file_size: int) -> tuple[Columns | None, Columns | None]:
    """What native code and Python read from one header, None for each that does not take it.

    What native code takes, Python must take with the same result.
    """
    (native,) = scan_headers([(data, file_size)])
    try:
        python = read_table(HeaderBytes(data, file_size, "f"))
    except CheckpointError:
        python = None
    if native is not None:
        assert python is not None, "native code takes a header that Python refuses"
        for name in ("names", "shapes"):
            assert getattr(native, name) == getattr(python, name)
        for name in ("dtypes", "shape_ids", "begins", "ends"):
            ours, theirs = getattr(native, name), getattr(python, name)
            assert ours.dtype == theirs.dtype and ours.tolist() == theirs.tolist()
    return native, python


def stage_of(error: CheckpointError) -> str:
    """The stage of the header reader that raised."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.name in _STAGES:
            return _STAGES[frame.name]
    raise AssertionError(f"no stage of the reader raised {error!r}")


def documented_as_stricter(data: bytes) -> bool:
    """The list in header.py's docstring, said again in the plainest way."""
    raw = data[8 : 8 + int.from_bytes(data[:8], "little")]
    if not raw.startswith(b"{"):
        return True
    objects: list[list[tuple[str, Any]]] = []

    def note(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        objects.append(pairs)
        return dict(pairs)

    top = json.loads(raw, object_pairs_hook=note)
    if any(len({key for key, _ in pairs}) != len(pairs) for pairs in objects):
        return True
    entries = [value for name, value in top.items() if name != "__metadata__"]
    return any(
        not isinstance(value, dict)
        or set(value) != {"dtype", "shape", "data_offsets"}
        or not isinstance(value["dtype"], str)
        for value in entries
    )


def check_against_safetensors(data: bytes) -> tuple[bool, str]:
    """Hold our reader against safetensors: whether that accepts, and the stage of ours."""
    theirs, ours = safetensors_view(data), our_view(data)
    if isinstance(ours, str):
        if theirs is not None:
            assert documented_as_stricter(data), "refused what safetensors accepts"
        return theirs is not None, ours
    assert theirs is not None, "accepted what safetensors refuses"
    assert not documented_as_stricter(data)
    assert ours == theirs
    return True, "accepted"

"""The header of a safetensors file: untrusted bytes in, checked columns out.

A file is eight bytes (the length of the JSON, little-endian), the JSON, and the tensors' bytes.
This module takes bytes and a file size, never a path, and refuses whatever safetensors refuses:
types, bounds, order, holes, overlaps, and bytes that are not shape x bits.

It is stricter than safetensors on purpose in these points, each of which safetensors lets pass:

- the JSON must begin with ``{`` (no white space before it);
- a tensor name, or a key in ``__metadata__``, that occurs twice is refused (safetensors keeps the
  last one in silence);
- a tensor entry has exactly the keys ``dtype``, ``shape`` and ``data_offsets`` (safetensors drops
  unknown ones);
- an entry is a JSON object and a dtype a JSON string (safetensors takes ``["U8", [1], [0, 1]]``
  and ``{"U8": null}`` as well).

A header is kept as columns, because planning time per tensor is part of every load. Native code
(scan.py) reads what tools plainly write; :func:`read_table` is the reference, and speaks where
native code does not take a header.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from loader.checkpoint.entries import Entries, parse_entries
from loader.checkpoint.scan import Columns, scan_headers
from loader.checkpoint.wording import describe_foreign, shown, shown_few, tensor_error
from loader.errors import CheckpointError

PREFIX_BYTES = 8
MAX_JSON_BYTES = 100_000_000  # the cap of safetensors itself

DTYPE_BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
DTYPES: tuple[str, ...] = tuple(DTYPE_BITS)

_INT64_MAX = (1 << 63) - 1


@dataclass(frozen=True, eq=False)
class Header:
    """The tensors of one file, in the order of their bytes. The caller owns it; treat it as fixed.

    ``dtypes`` uint8 [n], index into ``DTYPES``; ``shape_ids`` int32 [n], index into ``shapes``;
    ``begins`` and ``ends`` int64 [n], absolute offsets in the file, in bytes.
    """

    file: str
    names: list[str]
    dtypes: npt.NDArray[np.uint8]
    shape_ids: npt.NDArray[np.int32]
    shapes: list[tuple[int, ...]]
    begins: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]


def header_length(prefix: bytes, file_size: int, file: str) -> int:
    """The bytes of prefix and JSON together, checked against ``file_size`` and the cap.

    ``prefix`` holds the first bytes of the file; more than eight of them help only to say what a
    file is that is no safetensors. Raises CheckpointError.
    """
    if file_size == 0:
        raise CheckpointError("file is empty", file=file, expected="a safetensors file")
    seen = min(file_size, len(prefix))
    if seen < PREFIX_BYTES:
        raise CheckpointError(
            "file is too short for a safetensors header",
            file=file,
            expected=f"at least {PREFIX_BYTES} bytes",
            found=f"{seen} bytes",
        )
    json_bytes = int.from_bytes(prefix[:PREFIX_BYTES], "little")
    starts_json = prefix[PREFIX_BYTES : PREFIX_BYTES + 1] in (b"{", b"")
    if json_bytes > MAX_JSON_BYTES or not starts_json:
        foreign = describe_foreign(prefix)
        if foreign is not None:
            raise CheckpointError(
                "not a safetensors file", file=file, expected="a safetensors header", found=foreign
            )
    if json_bytes > MAX_JSON_BYTES:
        raise CheckpointError(
            "header length is not believable: no safetensors file, or a damaged one",
            file=file,
            expected=f"at most {MAX_JSON_BYTES} bytes",
            found=f"{json_bytes} bytes",
        )
    if PREFIX_BYTES + json_bytes > file_size:
        raise CheckpointError(
            "file is cut short inside its header",
            file=file,
            expected=f"{PREFIX_BYTES + json_bytes} bytes of header",
            found=f"a file of {file_size} bytes",
        )
    if not starts_json or json_bytes == 0:
        raise CheckpointError(
            "header does not begin with '{'",
            file=file,
            expected="a JSON object",
            found=repr(prefix[PREFIX_BYTES : PREFIX_BYTES + min(16, json_bytes)]),
        )
    return PREFIX_BYTES + json_bytes


@dataclass(frozen=True)
class HeaderBytes:
    """The bytes of one header (prefix and JSON, whole), and of which file of which size."""

    data: bytes
    file_size: int
    file: str


def parse_header(data: bytes, file_size: int, file: str) -> Header:
    """The header in ``data`` (prefix and JSON, whole), checked against the file's size.

    The result owns its columns. Raises CheckpointError naming file, tensor, expected and found.
    """
    found = parse_headers([HeaderBytes(data, file_size, file)])[0]
    if isinstance(found, CheckpointError):
        raise found
    return found


def parse_headers(headers: Sequence[HeaderBytes]) -> list[Header | CheckpointError]:
    """Several headers at once, by all cores; in the place of a header its error."""
    scanned = scan_headers([(header.data, header.file_size) for header in headers])
    found: list[Header | CheckpointError] = []
    for header, columns in zip(headers, scanned, strict=True):
        try:
            found.append(_header(header.file, columns or read_table(header)))
        except CheckpointError as error:
            found.append(error)
    return found


def _header(file: str, columns: Columns) -> Header:
    return Header(
        file=file,
        names=columns.names,
        dtypes=columns.dtypes,
        shape_ids=columns.shape_ids,
        shapes=columns.shapes,
        begins=columns.begins,
        ends=columns.ends,
    )


def read_table(header: HeaderBytes) -> Columns:
    """The columns of one header, read in Python. Raises as :func:`parse_header` does."""
    data, file_size, file = header.data, header.file_size, header.file
    header_bytes = header_length(data, file_size, file)
    if len(data) != header_bytes:
        raise CheckpointError(
            "header bytes are not whole",
            file=file,
            expected=f"{header_bytes} bytes",
            found=f"{len(data)} bytes",
        )
    entries = _in_file_order(parse_entries(data[PREFIX_BYTES:], file))
    _check_sizes(entries, file)
    _check_ranges(entries, header_bytes, file_size, file)
    shapes = {kind[1:]: 0 for kind in entries.kinds}
    for i, shape in enumerate(shapes):
        shapes[shape] = i
    kind_dtypes = [DTYPES.index(kind[0]) for kind in entries.kinds]
    kind_shapes = [shapes[kind[1:]] for kind in entries.kinds]
    return Columns(
        names=entries.names,
        dtypes=np.array(kind_dtypes, dtype=np.uint8)[entries.kind_ids],
        shape_ids=np.array(kind_shapes, dtype=np.int32)[entries.kind_ids],
        shapes=list(shapes),
        begins=entries.begins + header_bytes,
        ends=entries.ends + header_bytes,
    )


def _in_file_order(entries: Entries) -> Entries:
    """Sorted by (begin, end): an empty tensor stands before the one that begins where it does."""
    order = np.lexsort((entries.ends, entries.begins))
    return Entries(
        names=list(map(entries.names.__getitem__, order.tolist())),
        kinds=entries.kinds,
        kind_ids=entries.kind_ids[order],
        begins=entries.begins[order],
        ends=entries.ends[order],
    )


def _check_sizes(entries: Entries, file: str) -> None:
    """Known dtypes, and bytes = shape x bits: whole bytes, no step beyond 64 bits."""
    wanted = np.zeros(len(entries.kinds), dtype=np.int64)
    for i, (dtype, *shape) in enumerate(entries.kinds):
        of_kind = entries.kind_ids == i if dtype not in DTYPE_BITS else None
        if of_kind is not None:
            _refuse(entries, of_kind, "unknown dtype", file, shown_few(DTYPES, 99), shown(dtype))
        bits = _bits(shape, DTYPE_BITS[dtype])
        if bits is None or bits % 8:
            rule = "overflows 64 bits" if bits is None else "does not fill whole bytes"
            kind = shown(f"{dtype} {shape}")
            _refuse(entries, entries.kind_ids == i, f"shape {rule}", file, None, kind)
        # A size beyond int64 equals no range's length: both ends of a range are below 2^63.
        wanted[i] = min(bits // 8, _INT64_MAX)
    backward = entries.ends < entries.begins
    if backward.any():
        at = int(backward.argmax())
        found = f"begin {entries.begins[at]}, end {entries.ends[at]}"
        _refuse(entries, backward, "tensor ends before it begins", file, "begin <= end", found)
    other = (entries.ends - entries.begins) != wanted[entries.kind_ids]
    if other.any():
        at = int(other.argmax())
        dtype, *shape = entries.kinds[int(entries.kind_ids[at])]
        expected = f"{wanted[entries.kind_ids[at]]} bytes for {shown(f'{dtype} {shape}')}"
        found = f"{entries.ends[at] - entries.begins[at]} bytes"
        _refuse(entries, other, "data_offsets do not match the shape", file, expected, found)


def _bits(shape: list[int], bits: int) -> int | None:
    """Bits of a tensor; None where a step of the product does not fit 64 bits.

    The order matters: [2^63, 4, 0] overflows on the way to nothing, as it does in safetensors.
    """
    product = 1
    for factor in (*shape, bits):
        product *= factor
        if product >= 1 << 64:
            return None
    return product


def _check_ranges(entries: Entries, header_bytes: int, file_size: int, file: str) -> None:
    """The ranges follow one another from 0 without hole or overlap, and end where the file does."""
    follows = np.concatenate((np.zeros(1, dtype=np.int64), entries.ends))
    apart = entries.begins != follows[:-1]
    if apart.any():
        at = int(apart.argmax())
        rule = "overlaps" if entries.begins[at] < follows[at] else "leaves a hole after"
        before = shown(entries.names[at - 1]) if at else "the header"
        raise tensor_error(
            f"tensor {rule} what stands before it",
            file,
            [entries.names[at]],
            expected=f"begin {follows[at]}, the end of {before}",
            found=f"begin {entries.begins[at]}",
        )
    declared = header_bytes + int(follows[-1])
    if declared > file_size:
        beyond = entries.ends > file_size - header_bytes
        found = f"{file_size} bytes, this tensor is the first beyond the end"
        _refuse(entries, beyond, "file is cut short", file, f"{declared} bytes", found)
    if declared < file_size:
        raise CheckpointError(
            "file has bytes that belong to no tensor",
            file=file,
            expected=f"{declared} bytes",
            found=f"{file_size} bytes",
        )


def _refuse(
    entries: Entries,
    wrong: npt.NDArray[np.bool_],
    what: str,
    file: str,
    expected: str | None,
    found: str,
) -> NoReturn:
    """Refuses the tensors that ``wrong`` marks."""
    names = [entries.names[i] for i in np.flatnonzero(wrong)]
    raise tensor_error(what, file, names, expected=expected, found=found)

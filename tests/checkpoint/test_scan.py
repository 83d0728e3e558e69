"""Native readers of headers and index against those in Python: the same, or nothing."""

from __future__ import annotations

import ctypes
import json
import struct
from itertools import islice, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.checkpoint import scan
from loader.checkpoint.header import DTYPE_BITS, HeaderBytes, parse_header, read_table
from loader.checkpoint.json_file import decode_json
from loader.checkpoint.scan import (
    Columns,
    IndexColumns,
    scan_headers,
    scan_index,
    scan_kinds,
    scan_owned,
)
from loader.errors import CheckpointError
from loader.library import LIBRARY

pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the native core was not built")

FIXTURES = Path(__file__).parents[2] / "fixtures" / "checkpoints"


def with_prefix(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def entry(name: str, dtype: str, shape: str, begin: int, end: int) -> str:
    return f'"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}'


def both(text: bytes, payload_bytes: int) -> tuple[Columns | None, Columns | None]:
    """What native code and Python read, None where refused; native is never alone or other."""
    data = with_prefix(text)
    size = len(data) + payload_bytes
    (native,) = scan_headers([(data, size)])
    try:
        python = read_table(HeaderBytes(data, size, "f"))
    except CheckpointError:
        python = None
    if native is not None:
        assert python is not None, f"native code takes what Python refuses: {text!r}"
        assert (native.names, native.shapes) == (python.names, python.shapes), text
        for name in ("dtypes", "shape_ids", "begins", "ends"):
            ours, theirs = getattr(native, name), getattr(python, name)
            assert ours.dtype == theirs.dtype and ours.tolist() == theirs.tolist(), text
    return native, python


# --- headers ---------------------------------------------------------------------------------

SMALL = (
    '{"__metadata__":{"é":"\\u00e9\\ud83d\\ude00"},'
    + entry("z", "F16", "[2, 3]", 5, 17)
    + " ,\n"
    + entry("e", "U8", "[0]", 5, 5)
    + ","
    + '"ü":{"shape":[5],"data_offsets":[0,5],"dtype":"I8"}}  '
)


def test_what_tools_write_is_read_natively() -> None:
    seen = 0
    for file in sorted(FIXTURES.glob("*/*.safetensors")):
        data = file.read_bytes()
        length = 8 + int.from_bytes(data[:8], "little")
        native, python = both(data[8:length], len(data) - length)
        assert native is not None and python is not None, file
        seen += 1
    assert seen > 5


def test_a_header_with_everything_in_it() -> None:
    native, _ = both(SMALL.encode(), 17)
    assert native is not None
    assert native.names == ["ü", "e", "z"] and native.shapes == [(2, 3), (0,), (5,)]
    assert both(b"{}", 0)[0] is not None and both(b'{"__metadata__":null}', 0)[0] is not None


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_dtypes_have_the_same_numbers_and_sizes(dtype: str) -> None:
    text = "{" + entry("a", dtype, "[8]", 0, DTYPE_BITS[dtype]) + "}"
    native, _ = both(text.encode(), DTYPE_BITS[dtype])
    assert native is not None
    assert both(text.encode(), DTYPE_BITS[dtype] + 1) == (None, None)


BYTES = [*b'\0\n\x1f "\\/{}[]:,.+-019eENnull\x7f', 0x80, 0xC1, 0xC3, 0xED, 0xF0, 0xF5, 0xFF]


@pytest.mark.parametrize("change", ["replaced", "put in", "taken out", "cut"])
def test_no_change_of_one_byte_divides_the_readers(change: str) -> None:
    text, taken = SMALL.encode(), 0
    for at in range(len(text)):
        for byte in (0,) if change in ("taken out", "cut") else BYTES:
            more = {"replaced": bytes([byte]), "put in": bytes([byte]) + text[at : at + 1]}
            end = len(text) if change == "cut" else at + 1
            changed = text[:at] + more.get(change, b"") + text[end:]
            native, python = both(changed, 17)
            taken += python is not None
            # Python alone takes escapes where native code knows none, and a number such as `-0`
            # nowhere: but for these, both take or neither does.
            assert native is not None or python is None or b"\\" in changed.split(b"}", 1)[1]
    assert taken or change == "cut"


@pytest.mark.parametrize(
    "text",
    [
        b'{"\\u0061":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}',
        b'{"a":{"\\u0064type":"U8","shape":[],"data_offsets":[0,1]}}',
        b'{"a":{"dtype":"\\u00558","shape":[],"data_offsets":[0,1]}}',
        b'{"__metadata__":{"\\u0061":""},"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}',
    ],
)
def test_escapes_are_left_to_python(text: bytes) -> None:
    native, python = both(text, 1)
    assert native is None and python is not None
    data = with_prefix(text)
    assert parse_header(data, len(data) + 1, "f").names == ["a"]


@pytest.mark.parametrize(
    "number",
    [
        *("0", "00", "01", "-0", "-1", "1.0", "1e0", "1E2", "+1", "0x1", "true", "null", '"1"'),
        *(str(2**power + more) for power in (31, 32, 63, 64, 65) for more in (-1, 0, 1)),
        "9" * 5000,
    ],
)
@pytest.mark.parametrize("place", ["shape", "begin", "end"])
def test_numbers(number: str, place: str) -> None:
    values = {"shape": "0", "begin": "0", "end": "0", place: number}
    text = (
        f'{{"a":{{"dtype":"U8","shape":[{values["shape"]},0],'
        f'"data_offsets":[{values["begin"]},{values["end"]}]}}}}'
    )
    native, python = both(text.encode(), 0)
    assert (native is None) == (python is None)


@pytest.mark.parametrize("depth", [10, 100_000])
def test_nested_values_are_refused(depth: int) -> None:
    assert both(b'{"a":' * depth + b"1" + b"}" * depth, 0) == (None, None)
    assert both(b'{"__metadata__":{"a":' + b"[" * depth + b"]" * depth + b"}}", 0) == (None, None)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=80))
def test_random_bytes(raw: bytes) -> None:
    both(raw, 0)
    both(b'{"' + raw + b'":{"dtype":"U8","shape":[],"data_offsets":[0,0]}}', 0)
    both(b'{"__metadata__":{"a":"' + raw + b'"}}', 0)


def test_a_prefix_that_says_another_length() -> None:
    data = with_prefix(SMALL.encode())
    size = len(data) + 17
    whole = scan_headers([(data, size)])
    assert whole[0] is not None
    for wrong in (data[:-1], data + b" ", data[:8], data[:7], b""):
        assert scan_headers([(wrong, size)]) == [None]


def test_arrays_that_are_too_small_are_not_written_beyond() -> None:
    text = "{" + ",".join(entry(f"n{i}", "U8", f"[{i},1]", 0, 0) for i in range(1)) + "}"
    data = with_prefix(text.replace("[0,1]", "[0,7]", 1).encode())
    assert scan_headers([(data, len(data))])[0] is not None
    for field, most in (("most_tensors", 0), ("most_names", 2), ("most_dims", 1)):
        made = scan._HeaderScan(data, len(data))
        table = scan._HeaderTable()
        made.fill(table)
        setattr(table, field, most)
        assert LIBRARY is not None
        LIBRARY.qpn_headers(ctypes.byref(table), ctypes.c_int64(1), ctypes.c_int(1))
        assert not table.accepted, field


def test_more_dimensions_than_there_is_room_for() -> None:
    shape = "[" + ",".join(["1"] * 70_000) + "]"
    native, python = both(("{" + entry("a", "U8", shape, 0, 1) + "}").encode(), 1)
    assert native is None and python is not None


def test_many_headers_at_once_keep_their_order() -> None:
    texts = ["{" + entry(f"n{i}", "U8", f"[{i}]", 0, i) + ("}" if i % 3 else "") for i in range(40)]
    headers = [with_prefix(text.encode()) for text in texts]
    found = scan_headers([(data, len(data) + i) for i, data in enumerate(headers)])
    assert [one and one.names for one in found] == [[f"n{i}"] if i % 3 else None for i in range(40)]


# --- names that collide ----------------------------------------------------------------------

_MASK = (1 << 64) - 1
_A, _B = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03


def mix(a: int, b: int) -> int:
    whole = a * b
    return (whole & _MASK) ^ (whole >> 64)


def is_plain(word: int) -> bool:
    raw = word.to_bytes(8, "little")
    return all(0x20 <= byte < 0x7F and byte not in b'"\\' for byte in raw)


def colliding(count: int) -> list[str]:
    """Names of one hash in csrc/host/interner.h: each word takes the hash back to zero."""
    length = next(n for n in range(8, 1 << 20, 8) if is_plain(mix(_A, n ^ _B)))
    first = mix(_A, length ^ _B).to_bytes(8, "little")
    letters = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_=+;:<>()"
    words = (bytes(word) for word in product(letters, repeat=8))
    pairs = (
        word + back.to_bytes(8, "little")
        for word in words
        if is_plain(back := mix(int.from_bytes(word, "little"), _B))
    )
    return [(first + pair).ljust(length, b"x").decode() for pair in islice(pairs, count)]


def test_names_chosen_to_collide_are_left_to_python() -> None:
    names = colliding(300)
    assert len(set(names)) == 300 and len(set(map(len, names))) == 1
    for count, taken in ((200, True), (300, False)):
        entries = (entry(name, "U8", "[]", i, i + 1) for i, name in enumerate(names[:count]))
        native, python = both(("{" + ",".join(entries) + "}").encode(), count)
        assert python is not None and (native is not None) == taken
        index = {"weight_map": dict.fromkeys(names[:count], "f")}
        assert (scan_index(json.dumps(index).encode()) is not None) == taken
        columns = IndexColumns(names[:count], ["f"], np.zeros(count, np.int32))
        owned = scan_owned(columns, names[:1], np.zeros(1, np.int32))
        assert (owned is not None) == taken


# --- the index -------------------------------------------------------------------------------

INDEX = (
    ' {"metadata": {"total_size": 12e3, "a": [null, true, {"b": "\\n\\u00e9"}, -0.5, []], "é": {}},'
    '\n "weight_map": {"b": "m-2.safetensors", "a": "m-1.safetensors", "ü": "m-2.safetensors"}} '
)


def index_of(raw: bytes) -> dict[str, str] | None:
    """The weight map as Python reads it, None where it is none of names."""
    try:
        found = decode_json(raw, "f").get("weight_map")
    except CheckpointError:
        return None
    return (
        found
        if isinstance(found, dict) and found and {*map(type, found.values())} == {str}
        else None
    )


def check_index(raw: bytes) -> bool:
    """Holds the two readers against one another; whether native code took it."""
    native, python = scan_index(raw), index_of(raw)
    if native is None:
        assert python is None or b"\\" in raw, raw
        return False
    files = [native.files[n] for n in native.file_ids.tolist()]
    assert python is not None, f"native code takes what Python refuses: {raw!r}"
    assert list(python.items()) == list(zip(native.names, files, strict=True)), raw
    assert native.files == list(dict.fromkeys(files))
    return True


def test_an_index_is_read_natively() -> None:
    assert check_index(INDEX.encode())
    for file in FIXTURES.glob("*/*.index.json"):
        assert check_index(file.read_bytes()), file


@pytest.mark.parametrize("change", ["replaced", "put in", "taken out", "cut"])
def test_no_change_of_one_byte_divides_the_readers_of_the_index(change: str) -> None:
    text = INDEX.encode()
    for at in range(len(text)):
        for byte in (0,) if change in ("taken out", "cut") else BYTES:
            more = {"replaced": bytes([byte]), "put in": bytes([byte]) + text[at : at + 1]}
            end = len(text) if change == "cut" else at + 1
            check_index(text[:at] + more.get(change, b"") + text[end:])


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{}",
        b'{"weight_map": {}}',
        b'{"weight_map": []}',
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": {"a": "f"}, "weight_map": {"a": "f"}}',
        b'{"weight_map": {"a": "f", "a": "f"}}',
        b'{"metadata": {"a": 1, "a": 1}, "weight_map": {"a": "f"}}',
        b'{"metadata": [NaN], "weight_map": {"a": "f"}}',
        b'{"metadata": [Infinity], "weight_map": {"a": "f"}}',
        b'{"metadata": "\xff", "weight_map": {"a": "f"}}',
        b'\xef\xbb\xbf{"weight_map": {"a": "f"}}',
        b'{"weight_map": {"a": "f"}} {}',
    ],
)
def test_an_index_that_python_must_judge(raw: bytes) -> None:
    assert index_of(raw) is None and scan_index(raw) is None


def test_an_index_nested_too_deeply_is_left_to_python() -> None:
    raw = b'{"a": ' + b"[" * 40 + b"]" * 40 + b', "weight_map": {"a": "f"}}'
    assert index_of(raw) == {"a": "f"} and scan_index(raw) is None


def test_without_native_code_all_is_left_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "LIBRARY", None)
    one = IndexColumns(["a"], ["f"], np.zeros(1, np.int32))
    assert both(SMALL.encode(), 17)[0] is None and scan_index(INDEX.encode()) is None
    assert scan_kinds(["a"]) is None and scan_owned(one, ["a"], one.file_ids) is None

"""The header against safetensors itself, and one golden case for each rule."""

from __future__ import annotations

import struct
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from loader.checkpoint.header import (
    DTYPES,
    MAX_JSON_BYTES,
    Header,
    header_length,
    parse_header,
)
from loader.errors import CheckpointError


def with_prefix(text: bytes | str) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def parse(text: bytes | str, payload_bytes: int, file: str = "f.safetensors") -> Header:
    data = with_prefix(text)
    return parse_header(data, len(data) + payload_bytes, file)


def entry(dtype: str, shape: str, begin: Any, end: Any) -> str:
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}'


def refused(text: bytes | str, payload_bytes: int) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        parse(text, payload_bytes)
    assert caught.value.file == "f.safetensors"
    assert "f.safetensors" in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


def test_columns_stand_in_the_order_of_the_bytes() -> None:
    text = (
        '{"z":{"shape":[2,3],"dtype":"F16","data_offsets":[5,17]},'
        '"empty":{"dtype":"U8","shape":[0],"data_offsets":[5,5]},'
        '"__metadata__":{"format":"pt"},'
        '"a":{"dtype":"U8","data_offsets":[0,5],"shape":[5]},'
        '"scalar":{"dtype":"F32","shape":[],"data_offsets":[17,21]}}  '
    )
    header = parse(text, 21)
    start = 8 + len(text)
    assert header.file == "f.safetensors"
    assert header.names == ["a", "empty", "z", "scalar"]
    assert [DTYPES[i] for i in header.dtypes] == ["U8", "U8", "F16", "F32"]
    assert [header.shapes[i] for i in header.shape_ids] == [(5,), (0,), (2, 3), ()]
    assert header.begins.tolist() == [start, start + 5, start + 5, start + 17]
    assert header.ends.tolist() == [start + 5, start + 5, start + 17, start + 21]
    assert (header.dtypes.dtype, header.shape_ids.dtype) == (np.uint8, np.int32)
    assert (header.begins.dtype, header.ends.dtype) == (np.int64, np.int64)


def test_no_tensors_at_all() -> None:
    header = parse("{}", 0)
    assert header.names == [] and header.shapes == [] and len(header.begins) == 0
    assert "no tensor" in str(refused("{}", 1))


EXPERT = "model.layers.1.mlp.experts.6.up_proj.qweight"


@pytest.mark.parametrize(
    ("body", "payload_bytes", "what", "expected", "found"),
    [
        (entry("I32", "[2,2]", 0, 8), 8, "do not match the shape", "16 bytes", "8 bytes"),
        (entry("U8", "[4]", 4, 0), 4, "ends before it begins", "begin <= end", "begin 4, end 0"),
        (entry("U8", "[4]", -4, 0), 4, "data_offsets have the wrong type", "integers", "-4"),
        (entry("U8", "[4]", "0.0", 4), 4, "data_offsets have the wrong type", "integers", "0.0"),
        (entry("U8", "[4]", "false", 4), 4, "data_offsets have the wrong type", "", "False"),
        (entry("U8", "[4]", 0, 1 << 63), 4, "data_offsets have the wrong type", "", "9223"),
        (entry("U8", "[1.0]", 0, 1), 1, "shape has the wrong type", "integers", "1.0"),
        (entry("U8", "[true]", 0, 1), 1, "shape has the wrong type", "integers", "True"),
        (entry("U8", "[-0]", 0, 0), 0, "shape has the wrong type", "integers", "-0.0"),
        (entry("U8", "[-1]", 0, 1), 1, "shape has the wrong type", "integers", "-1"),
        (entry("U8", "[4]", 1, 5), 5, "leaves a hole", "begin 0", "begin 1"),
        (entry("U4", "[4]", 0, 4), 4, "unknown dtype", "F8_E4M3", "U4"),
        (entry("F4", "[3]", 0, 1), 1, "whole bytes", "", "F4 [3]"),
        (entry("U8", "[4294967296,4294967296]", 0, 1), 1, "overflows", "", "4294967296"),
        ('["U8",[1],[0,1]]', 1, "tensor entry has the wrong type", "a JSON object", "U8"),
        ("7", 0, "tensor entry has the wrong type", "a JSON object", "7"),
        ('{"dtype":"U8","shape":[1]}', 1, "wrong keys", "data_offsets", "dtype, shape"),
        (entry("U8", "[1]", 0, 1)[:-1] + ',"x":1}', 1, "wrong keys", "data_offsets", "x"),
        ('{"dtype":{"U8":null},"shape":[1],"data_offsets":[0,1]}', 1, "dtype has", "a string", ""),
    ],
)
def test_a_broken_entry_is_named(
    body: str, payload_bytes: int, what: str, expected: str, found: str
) -> None:
    error = refused(f'{{"{EXPERT}":{body}}}', payload_bytes)
    assert what in error.what
    assert error.tensor == EXPERT
    assert (error.layer, error.experts) == (1, "6")
    assert expected in str(error.expected)
    assert found in str(error.found)


def test_ranges_of_two_tensors() -> None:
    first = entry("U8", "[4]", 0, 4)
    overlap = refused(f'{{"a":{first},"b":{entry("U8", "[4]", 3, 7)}}}', 7)
    assert "overlaps" in overlap.what and overlap.tensor == "b"
    assert (overlap.expected, overlap.found) == ("begin 4, the end of a", "begin 3")
    hole = refused(f'{{"a":{first},"b":{entry("U8", "[4]", 6, 10)}}}', 10)
    assert "hole" in hole.what and hole.tensor == "b"
    same = refused(f'{{"a":{first},"b":{first}}}', 4)
    assert "overlaps" in same.what


def test_duplicates_are_refused() -> None:
    one = f'"{EXPERT}":{entry("U8", "[1]", 0, 1)}'
    error = refused(f"{{{one},{one}}}", 1)
    assert "more than once" in error.what and error.tensor == EXPERT
    assert "more than once" in refused('{"__metadata__":{"a":"b","a":"c"}}', 0).what
    assert "more than once" in refused('{"__metadata__":null,"__metadata__":null}', 0).what
    body = '{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    assert "wrong keys" in refused(f'{{"a":{body}}}', 1).what


@pytest.mark.parametrize("metadata", ['{"a":1}', "[]", '"x"', '{"a":{}}', "{}{}", "NaN"])
def test_metadata_that_is_no_map_of_strings(metadata: str) -> None:
    refused(f'{{"__metadata__":{metadata}}}', 0)


def test_metadata_that_looks_like_an_entry() -> None:
    text = '{"__metadata__":{"dtype":"U8","shape":"x","data_offsets":"y"}}'
    assert parse(text, 0).names == []
    refused(f'{{"__metadata__":{entry("U8", "[1]", 0, 1)}}}', 1)
    # A header whose own three tensors carry the names of an entry's keys.
    body = entry("U8", "[0]", 0, 0)
    assert len(parse(f'{{"dtype":{body},"shape":{body},"data_offsets":{body}}}', 0).names) == 3
    assert refused('{"dtype":"U8","shape":[1],"data_offsets":[0,1]}', 1).tensor == "dtype"


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b' {"a":1}',
        b"\xef\xbb\xbf{}",
        b"{",
        b"{}x",
        b"{}\0",
        b'{"\xff":1}',
        b'{"\\ud800":1}',
        b"{'a':1}",
        b'{"__metadata__":{"a":"\\udc00"}}',
        b'{"__metadata__":{"\n":"b"}}',
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' + b"9" * 5000 + b"}",
    ],
)
def test_what_is_no_json_object(text: bytes) -> None:
    error = refused(text, 0)
    assert "header" in error.what
    assert len(str(error)) < 1000


def test_several_faults_make_one_message() -> None:
    text = ",".join(f'"t{i}":{entry("U8", "[2]", i, i + 1)}' for i in range(5))
    error = refused(f"{{{text}}}", 5)
    assert error.tensor == "t0"
    assert error.found == "1 bytes; 5 such tensors: t0, t1, t2 and 2 more"
    text = ",".join(f'"t{i}":{entry("U8", "[1.5]", i, i + 1)}' for i in range(5))
    assert "5 such tensors: t0" in str(refused(f"{{{text}}}", 5).found)


def test_names_cannot_break_the_message() -> None:
    error = refused(f'{{"a\\n{"x" * 10_000}":7}}', 0)
    assert len(str(error)) < 1000


# --- the file around the header --------------------------------------------------------------


def test_short_file_names_the_first_tensor_beyond_the_end() -> None:
    names = [f"model.layers.1.mlp.experts.{e}.up_proj.weight_scale" for e in range(4)]
    text = ",".join(f'"{n}":{entry("U8", "[8]", 8 * i, 8 * i + 8)}' for i, n in enumerate(names))
    data = with_prefix(f"{{{text}}}")
    whole = len(data) + 32
    messages = set()
    for _ in range(2):
        with pytest.raises(CheckpointError) as caught:
            parse_header(data, whole - 20, "s.safetensors")
        messages.add(str(caught.value))
    error = caught.value
    assert len(messages) == 1
    assert "cut short" in error.what
    assert (error.tensor, error.layer, error.experts) == (names[1], 1, "1")
    assert error.expected == f"{whole} bytes"
    assert str(error.found).startswith(f"{whole - 20} bytes") and "3 such" in str(error.found)
    with pytest.raises(CheckpointError, match="cut short inside its header"):
        parse_header(data, len(data) - 1, "s.safetensors")
    with pytest.raises(CheckpointError, match="not whole"):
        parse_header(data[:-1], whole, "s.safetensors")


@pytest.mark.parametrize(
    ("prefix", "size", "text"),
    [
        (b"", 0, "empty"),
        (b"1234567", 7, "too short"),
        (b"1234567", 100, "too short"),
        (struct.pack("<Q", 0) + b"{}", 10, "begin with '{'"),
        (struct.pack("<Q", 2**64 - 1), 1 << 40, "not believable"),
        (struct.pack("<Q", MAX_JSON_BYTES + 1) + b"{", 1 << 40, "not believable"),
        (b"\xff\xfe" * 4 + b"binary, with letters in it", 1 << 20, "not believable"),
        (struct.pack("<Q", 640) + b"{", 300, "cut short inside its header"),
        (struct.pack("<Q", 640), 300, "cut short inside its header"),
        (struct.pack("<Q", 0x0280) + b"{", 648 - 1, "expected 648 bytes"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 4976698672\n",
            130,
            "a Git LFS pointer for 4976698672 bytes",
        ),
        (b"PK\x03\x04\0\0\0\0\0\0rest", 500, "a zip archive"),
        (b"PK\x03\x04\0\0\x08\x08\0\0rest", 500, "a zip archive"),
        (b"\x80\x02}q\x00(X\x06\0\0\0weight", 500, "a pickle (never opened)"),
        (b"\x80\x04\x95\x10\0\0\0\0\0\0\0}", 500, "a pickle (never opened)"),
        (b"\n<!DOCTYPE html><html><title>404</title>", 40, "an HTML page"),
        (b'{"error":"Repository not found"}', 32, 'text that begins \'{"error"'),
        ("zugriff verweigert: für alle".encode()[:22], 22, "text that begins"),
    ],
)
def test_what_a_file_is_instead(prefix: bytes, size: int, text: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        header_length(prefix, size, "x.safetensors")
    assert text in str(caught.value)
    assert caught.value.file == "x.safetensors"


def test_header_length_of_a_sound_prefix() -> None:
    assert header_length(struct.pack("<Q", 640), 648, "f") == 648
    assert header_length(struct.pack("<Q", MAX_JSON_BYTES) + b"{", 1 << 40, "f") == 100_000_008


def test_a_low_recursion_limit_is_an_ordinary_refusal() -> None:
    caught: list[BaseException] = []

    def deep() -> None:
        try:
            parse('{"a":' + '{"a":' * 5000 + "1" + "}" * 5001, 0)
        except BaseException as error:
            caught.append(error)

    limit = sys.getrecursionlimit()
    thread = threading.Thread(target=deep)
    thread.start()
    thread.join()
    assert sys.getrecursionlimit() == limit
    assert isinstance(caught[0], CheckpointError) and "nested" in str(caught[0].found)


def large(count: int) -> tuple[bytes, int]:
    parts = []
    for i in range(count):
        name = f"model.layers.{i // 4608}.mlp.experts.{i // 9 % 512}.{i % 9}_proj.qweight"
        body = entry("I32", "[20,80]" if i % 2 else "[40,40]", 6400 * i, 6400 * (i + 1))
        parts.append(f'"{name}":{body}')
    return with_prefix("{" + ",".join(parts) + "}"), 6400 * count


def test_time_is_linear_in_the_number_of_tensors() -> None:
    seconds = []
    for count in (20_000, 80_000):
        data, payload_bytes = large(count)
        best = float("inf")
        for _ in range(3):
            begin = time.perf_counter()
            header = parse_header(data, len(data) + payload_bytes, "f")
            best = min(best, time.perf_counter() - begin)
        assert len(header.names) == count and len(header.shapes) == 2
        seconds.append(best)
    # A square would make it 16 times; the machine may be busy.
    assert seconds[1] < 10 * seconds[0] + 0.1, seconds


@pytest.mark.parametrize("size", [*range(99_990, 100_011), 20_000_000])
def test_header_of_every_size(size: int) -> None:
    text = f'{{"a":{entry("U8", "[3]", 0, 3)}}}'
    header = parse(text + " " * (size - len(text)), 3)
    assert header.begins.tolist() == [8 + size]

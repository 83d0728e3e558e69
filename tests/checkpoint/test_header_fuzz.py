"""The header reader against safetensors itself, on valid files with faults put in."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loader.checkpoint.header import DTYPE_BITS, DTYPES, header_length, parse_header
from loader.errors import CheckpointError


def with_prefix(text: bytes | str) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def entry(dtype: str, shape: str, begin: int, end: int) -> str:
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}'


def safetensors_view(data: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]] | None:
    """What safetensors reads from a whole file, None where it refuses."""
    try:
        tensors = safetensors.deserialize(data)
    except safetensors.SafetensorError:
        return None
    return {
        name: (info["dtype"], tuple(info["shape"]), bytes(info["data"])) for name, info in tensors
    }


def our_view(data: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]] | None:
    try:
        length = header_length(data[:8], len(data), "f")
        header = parse_header(data[:length], len(data), "f")
    except CheckpointError:
        return None
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


def check_against_safetensors(data: bytes) -> None:
    theirs, ours = safetensors_view(data), our_view(data)
    if theirs is None:
        assert ours is None, "accepted what safetensors refuses"
    elif ours is None:
        assert documented_as_stricter(data), "refused what safetensors accepts"
    else:
        assert not documented_as_stricter(data)
        assert ours == theirs


NAMES = st.sampled_from(
    ["a", "b", "", "c.d", "dtype", "shape", "data_offsets", "é", "\x00", "__metadata", "😀"]
)
INTEGERS = "0 1 2 3 7 8 16 4294967296 9223372036854775807 9223372036854775808"
BEYOND = "18446744073709551615 18446744073709551616 36893488147419103232"
OTHERS = '-0 -1 0.0 1.0 1e0 -0.0 true false null NaN Infinity 01 1e999 "1" [] [1] {} {"a":1}'
LITERALS = st.sampled_from(f"{INTEGERS} {BEYOND} {OTHERS}".split())


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A valid file, then up to three faults in its JSON text, sizes or bytes."""
    rows: list[dict[str, Any]] = []
    offset = 0
    for name in draw(st.lists(NAMES, max_size=4, unique=True)):
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        bits = DTYPE_BITS[dtype] * int(np.prod(shape, dtype=np.int64))
        if bits % 8:
            shape.append(8)
            bits *= 8
        fields = {
            "dtype": json.dumps(dtype),
            "shape": [str(n) for n in shape],
            "data_offsets": [str(offset), str(offset + bits // 8)],
        }
        offset += bits // 8
        rows.append({"name": name, "form": "object", "fields": fields, "extra": ""})
    metadata = draw(st.sampled_from([None, None, "null", "{}", '{"a":"b"}', '{"format":"pt"}']))
    payload_bytes = offset
    faults = draw(st.lists(st.integers(0, 11), max_size=3))
    for fault in faults:
        if fault == 0:
            payload_bytes = max(0, payload_bytes + draw(st.integers(-2, 2)))
        elif fault == 1:
            metadata = draw(
                st.sampled_from(['{"a":1}', '{"a":null}', "[]", '{"a":"b","a":"c"}', '"x"', "1"])
            )
        elif rows:
            break_row(draw, rows, fault)
    text = "{" + ",".join(text_of(draw, rows, metadata)) + "}"
    raw = text.encode("utf-8", "surrogatepass") + draw(st.sampled_from([b"", b" ", b"\n\t "]))
    raw = draw(st.sampled_from([b""] * 8 + [b" ", b"\xef\xbb\xbf"])) + raw
    if draw(st.integers(0, 5)) == 0 and raw:
        at = draw(st.integers(0, len(raw) - 1))
        raw = raw[:at] + draw(st.binary(max_size=2)) + raw[at + draw(st.integers(0, 2)) :]
    declared = len(raw) + draw(st.sampled_from([0] * 12 + [-1, 1]))
    payload = bytes(i * 37 % 251 for i in range(payload_bytes))
    return struct.pack("<Q", max(0, declared)) + raw + payload


def break_row(draw: st.DrawFn, rows: list[dict[str, Any]], fault: int) -> None:
    row = draw(st.sampled_from(rows))
    fields = row["fields"]
    if fault == 2:
        row["name"] = draw(st.one_of(NAMES, st.just("__metadata__"), st.just("\\ud800")))
    elif fault == 3:
        row["form"] = "array"
    elif fault == 4:
        row["extra"] = draw(st.sampled_from(['"z":1', '"dtype":"U8"', '"shape":[]']))
    elif fault == 5:
        fields.pop(draw(st.sampled_from(sorted(fields))), None) if len(fields) == 3 else None
    elif fault == 6 and "dtype" in fields:
        fields["dtype"] = draw(
            st.sampled_from(['"U8"', '"I16"', '"F4"', '"U4"', '"f32"', "1", '{"U8":null}', "[]"])
        )
    elif fault in (7, 8) and isinstance(fields.get("shape"), list):
        shape = fields["shape"]
        shape.insert(draw(st.integers(0, len(shape))), draw(LITERALS))
    elif fault in (9, 10) and isinstance(fields.get("data_offsets"), list):
        offsets = fields["data_offsets"]
        how = draw(st.integers(0, 4))
        if how == 0:
            offsets.reverse()
        elif how == 1:
            offsets.append("0")
        elif how == 2:
            offsets.pop()
        elif how == 3 and offsets:
            offsets[draw(st.integers(0, len(offsets) - 1))] = draw(LITERALS)
        elif draw(st.booleans()) and all(number.isdigit() for number in offsets):
            fields["data_offsets"] = [str(int(n) + draw(st.integers(0, 2))) for n in offsets]
    elif fault == 11:
        fields[draw(st.sampled_from(["shape", "data_offsets"]))] = draw(LITERALS)


def text_of(draw: st.DrawFn, rows: list[dict[str, Any]], metadata: str | None) -> list[str]:
    parts = [] if metadata is None else [f'"__metadata__":{metadata}']
    for row in rows:
        values = {
            key: f"[{','.join(value)}]" if isinstance(value, list) else value
            for key, value in row["fields"].items()
        }
        if row["form"] == "array":
            body = "[" + ",".join(values.values()) + "]"
        else:
            keys = draw(st.permutations(sorted(values)))
            pairs = [f'"{key}":{values[key]}' for key in keys]
            body = "{" + ",".join(pairs + ([row["extra"]] if row["extra"] else [])) + "}"
        name = row["name"]
        quoted = f'"{name}"' if name.startswith("\\") else json.dumps(name, ensure_ascii=False)
        parts.append(f"{quoted}:{body}")
    return list(draw(st.permutations(parts)))


@settings(max_examples=1500, deadline=None)
@given(files())
def test_accepts_what_safetensors_accepts(data: bytes) -> None:
    check_against_safetensors(data)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64))
@example(b"\x02" + bytes(7) + b"{}")
@example(b"\x00" * 8)
def test_random_bytes_are_judged_as_safetensors_does(raw: bytes) -> None:
    check_against_safetensors(raw)
    check_against_safetensors(with_prefix(raw))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_each_dtype(dtype: str) -> None:
    nbytes = DTYPE_BITS[dtype]  # eight elements
    data = with_prefix(f'{{"a":{entry(dtype, "[8]", 0, nbytes)}}}') + bytes(nbytes)
    assert safetensors_view(data) is not None
    assert our_view(data) == safetensors_view(data)


def test_dtypes_are_all_that_safetensors_names() -> None:
    bad = with_prefix(f'{{"a":{entry("X", "[1]", 0, 1)}}}') + b"0"
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.deserialize(bad)
    named = str(caught.value).split("expected one of ")[1].split(" at line")[0]
    assert tuple(named.replace("`", "").split(", ")) == DTYPES


@pytest.mark.parametrize(
    "shape",
    [
        "[9223372036854775808,4,0]",  # overflows on the way to nothing
        "[0,9223372036854775808,4]",
        "[18446744073709551615,0]",
        "[18446744073709551616,0]",
        "[0,18446744073709551616]",
        "[2305843009213693952,8,0]",
        "[2305843009213693951,0]",
    ],
)
@pytest.mark.parametrize("dtype", ["F4", "U8", "I64"])
def test_overflow_is_judged_step_by_step(shape: str, dtype: str) -> None:
    check_against_safetensors(with_prefix(f'{{"a":{entry(dtype, shape, 0, 0)}}}'))

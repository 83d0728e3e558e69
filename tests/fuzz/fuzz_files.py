"""Safetensors files that are valid but for a few faults in their JSON text, sizes or bytes."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from math import prod

from fuzz_choices import Choices, chance, several, shuffled

from loader.checkpoint.header import DTYPE_BITS, DTYPES

NAMES = ("a", "b", "", "c.d", "dtype", "shape", "data_offsets", "é", "\x00", "__metadata", "😀")
_INTEGERS = "0 1 2 3 7 8 16 4294967296 9223372036854775807 9223372036854775808"
_BEYOND = "18446744073709551615 18446744073709551616 36893488147419103232"
_OTHERS = '-0 -1 0.0 1.0 1e0 -0.0 true false null NaN Infinity 01 1e999 "1" [] [1] {} {"a":1}'
LITERALS = tuple(f"{_INTEGERS} {_BEYOND} {_OTHERS}".split())
METADATA = ('{"a":1}', '{"a":null}', "[]", '{"a":"b","a":"c"}', '"x"', "1")


@dataclass
class Row:
    """One tensor entry as text: its name, its fields, and what is put in beside them."""

    name: str
    fields: dict[str, str | list[str]]
    extra: str = ""
    as_array: bool = False
    quoted: bool = field(default=False)
    """The name is JSON text already."""


def make_file(choices: Choices) -> bytes:
    """A whole file: none to three faults in something that was valid."""
    rows, payload_bytes = valid_rows(choices)
    metadata = choices.pick((None, None, "null", "{}", '{"a":"b"}', '{"format":"pt"}'))
    for _ in range(choices.pick((0, 0, 1, 1, 1, 2, 3))):
        fault = choices.integer(0, 11)
        if fault == 0:
            payload_bytes = max(0, payload_bytes + choices.integer(-2, 2))
        elif fault == 1:
            metadata = choices.pick(METADATA)
        elif rows:
            break_row(choices, choices.pick(rows), fault)
    return whole_file(choices, rows, metadata, payload_bytes)


def valid_rows(choices: Choices) -> tuple[list[Row], int]:
    """Entries without fault, and the bytes of their payload."""
    rows, offset = [], 0
    for name in several(choices, NAMES, 4):
        dtype = choices.pick(DTYPES)
        shape = [choices.integer(0, 5) for _ in range(choices.integer(0, 3))]
        bits = DTYPE_BITS[dtype] * prod(shape)
        if bits % 8:
            shape.append(8)
            bits *= 8
        end = offset + bits // 8
        fields: dict[str, str | list[str]] = {
            "dtype": json.dumps(dtype),
            "shape": [str(n) for n in shape],
            "data_offsets": [str(offset), str(end)],
        }
        rows.append(Row(name, fields))
        offset = end
    return rows, offset


def break_row(choices: Choices, row: Row, fault: int) -> None:
    """One fault, of the kinds 2 to 11, in one entry."""
    fields = row.fields
    if fault == 2:
        row.name = choices.pick((*NAMES, "__metadata__", '"\\ud800"'))
        row.quoted = row.name.startswith('"')
    elif fault == 3:
        row.as_array = True
    elif fault == 4:
        row.extra = choices.pick(('"z":1', '"dtype":"U8"', '"shape":[]'))
    elif fault == 5:
        fields.pop(choices.pick(("dtype", "shape", "data_offsets")), None)
    elif fault == 6 and "dtype" in fields:
        fields["dtype"] = choices.pick(
            ('"U8"', '"I16"', '"F4"', '"U4"', '"f32"', "1", '{"U8":null}', "[]")
        )
    elif fault in (7, 8) and isinstance(shape := fields.get("shape"), list):
        shape.insert(choices.integer(0, len(shape)), choices.pick(LITERALS))
    elif fault in (9, 10) and isinstance(offsets := fields.get("data_offsets"), list):
        fields["data_offsets"] = broken_offsets(choices, offsets)
    elif fault == 11:
        fields[choices.pick(("shape", "data_offsets"))] = choices.pick(LITERALS)


def broken_offsets(choices: Choices, offsets: list[str]) -> list[str]:
    """The offsets of an entry, turned, longer, shorter, moved, or not numbers."""
    how = choices.integer(0, 4)
    if how == 0:
        return offsets[::-1]
    if how == 1:
        return [*offsets, "0"]
    if how == 2:
        return offsets[:-1]
    if how == 3 and offsets:
        at = choices.integer(0, len(offsets) - 1)
        return [*offsets[:at], choices.pick(LITERALS), *offsets[at + 1 :]]
    if all(number.isdigit() and number.isascii() for number in offsets):
        return [str(int(number) + choices.integer(0, 2)) for number in offsets]
    return offsets


def whole_file(
    choices: Choices, rows: list[Row], metadata: str | None, payload_bytes: int
) -> bytes:
    """Length, text and payload, each sometimes with a fault of its own."""
    parts = [] if metadata is None else [f'"__metadata__":{metadata}']
    parts += [row_text(choices, row) for row in rows]
    text = "{" + ",".join(shuffled(choices, parts)) + "}"
    raw = text.encode("utf-8", "surrogatepass") + choices.pick((b"", b"", b" ", b"\n\t "))
    raw = choices.pick((*[b""] * 14, b" ", b"\xef\xbb\xbf")) + raw
    if chance(choices, 12) and raw:
        at = choices.integer(0, len(raw) - 1)
        raw = raw[:at] + choices.data(2) + raw[at + choices.integer(0, 2) :]
    declared = len(raw) + choices.pick((*[0] * 24, -1, 1))
    if chance(choices, 100):
        declared = choices.pick((0, 1, 1 << 20, 100_000_001, 1 << 40, 1 << 63, (1 << 64) - 1))
    payload = bytes(i * 37 % 251 for i in range(payload_bytes))
    return struct.pack("<Q", max(0, declared)) + raw + payload


def row_text(choices: Choices, row: Row) -> str:
    """One entry as JSON text, its keys in some order."""
    values = {
        key: f"[{','.join(value)}]" if isinstance(value, list) else value
        for key, value in row.fields.items()
    }
    if row.as_array:
        body = "[" + ",".join(values.values()) + "]"
    else:
        pairs = [f'"{key}":{values[key]}' for key in shuffled(choices, sorted(values))]
        body = "{" + ",".join(pairs + ([row.extra] if row.extra else [])) + "}"
    return f"{row.name if row.quoted else json.dumps(row.name, ensure_ascii=False)}:{body}"

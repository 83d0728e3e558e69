"""The JSON of a safetensors header as typed columns: who is named, of what kind, which range.

This half checks the JSON and its types; ``header.py`` checks what the numbers mean. The checks run
over whole columns; only when one fails is the JSON read a second time, entry by entry, to name the
offender.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from loader.checkpoint.wording import shown, shown_few, tensor_error
from loader.errors import CheckpointError

_KEYS = ("dtype", "shape", "data_offsets")


class _Pairs(tuple[tuple[str, Any], ...]):
    """A JSON object that is no well-formed tensor entry, nothing in it lost."""


@dataclass(frozen=True, eq=False)
class Entries:
    """The tensors of one header, in the order of the JSON; types are checked, numbers are not.

    ``kinds`` holds the distinct (dtype, dimension, dimension, ...), ``kind_ids`` int64 [n] indexes
    it; ``begins`` and ``ends`` int64 [n] are the data_offsets as the file gives them, in bytes.
    """

    names: list[str]
    kinds: list[tuple[Any, ...]]
    kind_ids: npt.NDArray[np.int64]
    begins: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]


def parse_entries(json_bytes: bytes, file: str) -> Entries:
    """The entries of the tensors; ``__metadata__`` is checked and dropped.

    The result owns its columns. Raises CheckpointError.
    """
    top = _loads(json_bytes, _entry, file)
    if type(top) is not _Pairs:
        _refuse_entries(json_bytes, file)
    names, entries = _split(top, file)
    if not _all_of(tuple, entries):
        _refuse_entries(json_bytes, file)
    # Types come before every lookup: 1.0 and True are equal to 1, and would find its entry.
    numbers = chain.from_iterable(map(itemgetter(slice(1, None)), entries))
    if not (_all_of(str, map(itemgetter(0), entries)) and _all_of(int, numbers)):
        _refuse_entries(json_bytes, file)
    count = len(entries)
    kind_of = list(map(itemgetter(slice(None, -2)), entries))
    distinct = {kind: i for i, kind in enumerate(dict.fromkeys(kind_of))}
    try:
        begins = np.fromiter(map(itemgetter(-2), entries), np.int64, count)
        ends = np.fromiter(map(itemgetter(-1), entries), np.int64, count)
    except OverflowError:
        _refuse_entries(json_bytes, file)
    if not all(map(_fits_u64, chain.from_iterable(kind[1:] for kind in distinct))):
        _refuse_entries(json_bytes, file)
    kind_ids = np.fromiter(map(distinct.__getitem__, kind_of), np.int64, count)
    return Entries(names, list(distinct), kind_ids, begins, ends)


def _entry(pairs: list[tuple[str, Any]]) -> tuple[Any, ...]:
    """A tensor entry as one flat tuple (dtype, *shape, begin, end), any other object as _Pairs.

    A flat tuple of atoms is nothing that the garbage collector keeps walking: with nested lists
    half the time of a large header went into collections.
    """
    if len(pairs) == 3:
        (key_a, dtype), (key_b, shape), (key_c, offsets) = pairs
        if (key_a, key_b, key_c) != _KEYS:
            dtype, shape, offsets = map(dict(pairs).get, _KEYS)
        if type(shape) is list and type(offsets) is list and len(offsets) == 2:
            return (dtype, *shape, *offsets)
    return _Pairs(pairs)


def _fits_u64(number: int) -> bool:
    return number < 1 << 64


def _all_of(kind: type, values: Iterable[Any]) -> bool:
    return set(map(type, values)) <= {kind}


def _loads(json_bytes: bytes, hook: Callable[[list[tuple[str, Any]]], Any], file: str) -> Any:
    # JSON has a negative zero, Python's int has none, and safetensors refuses it. As floats all
    # negative numbers are refused by the type checks, which can name the tensor: no int is below 0.
    negative = b"-" in json_bytes and re.search(rb"[\s,:\[]-", json_bytes) is not None
    try:
        text = json_bytes.decode("utf-8")
        value = json.loads(text, object_pairs_hook=hook, parse_int=_number if negative else None)
        if "\\u" in text:
            # Half of a surrogate pair, which no UTF-8 can say, makes this raise a ValueError.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:  # ValueError: JSON, UTF-8, an endless integer
        kind = "nested too deeply" if isinstance(error, RecursionError) else shown(str(error))
        raise CheckpointError(
            "header is no valid JSON", file=file, expected="JSON in UTF-8", found=kind
        ) from None
    return value


def _number(digits: str) -> int | float:
    return float(digits) if digits.startswith("-") else int(digits)


def _split(top: _Pairs, file: str) -> tuple[list[str], list[Any]]:
    """Names and entries of the tensors; duplicates are refused, ``__metadata__`` is taken out."""
    names = list(map(itemgetter(0), top))
    entries = list(map(itemgetter(1), top))
    if len(set(names)) != len(names):
        _refuse_duplicates("a tensor name occurs more than once", file, names)
    if "__metadata__" in names:
        at = names.index("__metadata__")
        del names[at]
        _check_metadata(entries.pop(at), file)
    return names, entries


def _check_metadata(metadata: Any, file: str) -> None:
    if metadata is None:
        return
    if type(metadata) is not _Pairs or not _all_of(str, map(itemgetter(1), metadata)):
        raise CheckpointError(
            "__metadata__ has the wrong type",
            file=file,
            expected="a JSON object of strings, or null",
            found="a JSON object" if isinstance(metadata, tuple) else shown(repr(metadata)),
        )
    keys = [key for key, _ in metadata]
    if len(set(keys)) != len(keys):
        _refuse_duplicates("a key of __metadata__ occurs more than once", file, keys)


def _refuse_duplicates(what: str, file: str, names: list[str]) -> NoReturn:
    twice = [name for name, count in Counter(names).items() if count > 1]
    raise tensor_error(what, file, twice, expected="every name once")


def _refuse_entries(json_bytes: bytes, file: str) -> NoReturn:
    """Reads the JSON once more, entry by entry, and names what breaks the first rule broken."""
    names, entries = _split(_loads(json_bytes, _Pairs, file), file)
    faults = [
        (name, *fault)
        for name, entry in zip(names, entries, strict=True)
        if (fault := _fault(entry)) is not None
    ]
    _, what, expected, found = faults[0]
    alike = [name for name, other, *_ in faults if other == what]
    raise tensor_error(what, file, alike, expected=expected, found=found)


def _fault(entry: Any) -> tuple[str, str, str] | None:
    """What is wrong with one entry: the rule, what it wants, what is there."""
    if type(entry) is not _Pairs:
        return "tensor entry has the wrong type", "a JSON object", _described(entry)
    keys = [key for key, _ in entry]
    if sorted(keys) != sorted(_KEYS):
        return "tensor entry has the wrong keys", ", ".join(_KEYS), shown_few(keys, 8)
    fields = dict(entry)
    dtype, shape, offsets = (fields[key] for key in _KEYS)
    if type(dtype) is not str:
        return "dtype has the wrong type", "a string", _described(dtype)
    if type(shape) is not list or not all(type(n) is int and _fits_u64(n) for n in shape):
        return "shape has the wrong type", "integers from 0 to 2^64 - 1", _described(shape)
    two = type(offsets) is list and len(offsets) == 2
    if not two or not all(type(n) is int and n < 1 << 63 for n in offsets):
        return "data_offsets have the wrong type", "two integers, 0 or more", _described(offsets)
    return None


def _described(value: Any) -> str:
    if type(value) is _Pairs:
        return "a JSON object"
    if type(value) is list and len(value) > 16:
        return f"a JSON list of {len(value)} values"
    return shown(repr(value))

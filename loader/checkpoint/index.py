"""Which files are the model: the index, or the folder's own names where there is none.

The index, where present, is the only authority on which file supplies a tensor. Other files are no
part of the model and are not opened.
"""

from __future__ import annotations

import json
import operator
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from loader.checkpoint.header import PREFIX_BYTES, Header, header_length, parse_header
from loader.checkpoint.source import (
    MissingFileError,
    Source,
    check_name,
    file_size,
    read_bytes,
)
from loader.checkpoint.wording import (
    SNIFF_BYTES,
    describe_foreign,
    place_of,
    shown,
    shown_few,
    shown_ranges,
    tensor_error,
)
from loader.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_JSON_FILE_BYTES = 256 << 20

_PART = re.compile(r"model-([0-9]{1,9})-of-([0-9]{1,9})\.safetensors")
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class Index:
    """The files of the model, sorted, and tensor -> file; None without an index file."""

    files: tuple[str, ...]
    weight_map: dict[str, str] | None


def load_json(source: Source, file: str, *, allow_nonfinite: bool = False) -> dict[str, Any]:
    """The JSON object in ``file``, strictly: no key twice, UTF-8, at most 256 MiB.

    ``allow_nonfinite`` lets the literals ``Infinity`` and ``NaN`` pass, which Python writes into
    config files. Raises CheckpointError.
    """
    size = file_size(source, file)
    if size > MAX_JSON_FILE_BYTES:
        raise CheckpointError(
            "JSON file is too large",
            file=file,
            expected=f"at most {MAX_JSON_FILE_BYTES} bytes",
            found=f"{size} bytes",
        )
    data = read_bytes(source, file, 0, size)
    try:
        text = data.decode("utf-8")
        value = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=float if allow_nonfinite else _refuse_constant,
        )
        if "\\u" in text:
            # Half of a surrogate pair, which no UTF-8 can say, makes this raise a ValueError.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        is_pointer = data.startswith(b"version https://git-lfs")
        found = describe_foreign(data) if is_pointer else None
        if isinstance(error, RecursionError):
            found = "nested too deeply"
        raise CheckpointError(
            "not a valid JSON file",
            file=file,
            expected="a JSON object in UTF-8, every key once",
            found=found or shown(str(error)),
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(
            "not a valid JSON file",
            file=file,
            expected="a JSON object",
            found=type(value).__name__,
        )
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        twice = [key for key, n in Counter(key for key, _ in pairs).items() if n > 1]
        raise ValueError(f"keys that occur more than once: {shown_few(twice)}")
    return value


def _refuse_constant(literal: str) -> NoReturn:
    raise ValueError(f"{literal} is not JSON")


def select_files(source: Source) -> Index:
    """The files of the model, all of which exist. Reads the index, no other file.

    Raises CheckpointError.
    """
    listed = source.list()
    if INDEX_FILE in listed:
        weight_map = _weight_map(source)
        files = tuple(sorted(set(weight_map.values())))
        _check_files_exist(source, files, weight_map)
        return Index(files, weight_map)
    top = [file for file in listed if "/" not in file]
    if SINGLE_FILE in top:
        return Index((SINGLE_FILE,), None)
    tensors = [file for file in top if file.endswith(".safetensors")]
    parts = [file for file in tensors if file.startswith("model-") and "-of-" in file]
    if parts:
        _check_parts(parts)
        return Index(tuple(sorted(parts)), None)
    if len(tensors) == 1:
        return Index((tensors[0],), None)
    if tensors:
        raise CheckpointError(
            "several safetensors files and nothing that says which are the model",
            file=shown_few(tensors, 5),
            expected=f"{INDEX_FILE}, {SINGLE_FILE} or model-*-of-*.safetensors",
            found=f"{len(tensors)} files",
        )
    pickles = [file for file in top if file.endswith(_PICKLE_SUFFIXES)]
    raise CheckpointError(
        "folder holds no safetensors file",
        file=shown_few(pickles, 5) if pickles else shown(source.name),
        expected=f"{INDEX_FILE} or *.safetensors",
        found="only pickles, which are never opened" if pickles else f"{len(listed)} other files",
    )


def _weight_map(source: Source) -> dict[str, str]:
    """The index's tensor -> file, with every file name safe to open."""
    weight_map = load_json(source, INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            "index has no weight_map",
            file=INDEX_FILE,
            expected="a JSON object: tensor -> file",
            found="an empty one" if weight_map == {} else type(weight_map).__name__,
        )
    if not set(map(type, weight_map.values())) <= {str}:
        names = [name for name, file in weight_map.items() if type(file) is not str]
        found = shown(repr(weight_map[names[0]]))
        raise tensor_error(
            "index gives no file name", INDEX_FILE, names, expected="a string", found=found
        )
    for file in sorted(set(weight_map.values())):
        check_name(file)
        if not file.endswith(".safetensors"):
            pickle = " (pickles are never opened)" if file.endswith(_PICKLE_SUFFIXES) else ""
            raise CheckpointError(
                "index names a file that is no safetensors",
                file=shown(file),
                expected=f"*.safetensors{pickle}",
            )
    return weight_map


def _check_files_exist(source: Source, files: tuple[str, ...], weight_map: dict[str, str]) -> None:
    missing = []
    for file in files:
        try:
            file_size(source, file)
        except MissingFileError:
            missing.append(file)
    if not missing:
        return
    absent = set(missing)
    names = [name for name, file in weight_map.items() if file in absent]
    places = [place_of(name) for name in names]
    layers = {layer for layer, _ in places if layer is not None}
    experts = {expert for _, expert in places if expert is not None}
    raise CheckpointError(
        f"{len(missing)} of the {len(files)} files that the index names do not exist",
        file=shown_few(missing, 8),
        layer=min(layers) if len(layers) == 1 else None,
        experts=shown_ranges(experts) if experts else None,
        expected=f"{len(names)} tensors in them"
        + (f", of layers {shown_ranges(layers)}" if layers else ""),
        found="no such file",
    )


def _check_parts(parts: list[str]) -> None:
    """The parts are one complete split: all of one total, each number once."""
    matches = [_PART.fullmatch(file) for file in parts]
    numbers = [int(match[1]) for match in matches if match is not None]
    totals = sorted({int(match[2]) for match in matches if match is not None})
    if len(numbers) != len(parts) or len(totals) != 1 or len(set(numbers)) != len(numbers):
        raise CheckpointError(
            "model-*-of-*.safetensors are not one split, and there is no index",
            file=shown_few(sorted(parts), 8),
            expected="each number of one total once",
            found=f"{len(parts)} files, totals {totals}",
        )
    total = totals[0]
    first = 0 if min(numbers) == 0 else 1  # some tools count from zero
    odd = [file for file, n in zip(parts, numbers, strict=True) if n >= first + total]
    if odd:
        raise CheckpointError(
            "a part's number is beyond the total",
            file=shown_few(sorted(odd)),
            expected=f"{first} to {first + total - 1}",
        )
    if len(numbers) == total:
        return
    # The total is the file name's own claim: only a few of the missing numbers are looked for.
    present, width = set(numbers), parts[0].index("-of-") - len("model-")
    tail = parts[0][parts[0].index("-of-") :]
    missing: list[str] = []
    number = first
    while len(missing) < 3 and number < first + total:
        if number not in present:
            missing.append(f"model-{number:0{width}d}{tail}")
        number += 1
    raise CheckpointError(
        "files of the split are missing",
        file=", ".join(missing),
        expected=f"{total} files",
        found=f"{len(numbers)} files, {total - len(numbers)} missing",
    )


def read_headers(source: Source, index: Index) -> list[Header]:
    """The headers of the index's files, in its order, and nothing else of them.

    The headers agree with the index; without one, no name occurs in two files. A tensor that the
    index gives to another file stays in its header: see ``owned_mask``. Raises CheckpointError.
    """
    headers: list[Header] = []
    failures: list[CheckpointError] = []
    for file in index.files:
        try:
            headers.append(_read_header(source, file))
        except CheckpointError as error:
            failures.append(error)
    if failures:
        _refuse_files(failures)
    if index.weight_map is None:
        _check_names_once(headers)
    else:
        _check_index(headers, index.weight_map)
    return headers


def _read_header(source: Source, file: str) -> Header:
    size = file_size(source, file)
    prefix = read_bytes(source, file, 0, min(size, PREFIX_BYTES))
    try:
        length = header_length(prefix, size, file)
    except CheckpointError:
        # No header, so a little more can be read to say what the file is instead.
        header_length(read_bytes(source, file, 0, min(size, SNIFF_BYTES)), size, file)
        raise
    rest = read_bytes(source, file, PREFIX_BYTES, length - PREFIX_BYTES)
    return parse_header(prefix + rest, size, file)


def _refuse_files(failures: list[CheckpointError]) -> NoReturn:
    """The first failure in its own words, with the other files that failed counted and named."""
    first = failures[0]
    if len(failures) == 1:
        raise first
    others = shown_few([error.file or "" for error in failures[1:]])
    more = f"{len(failures) - 1} more files are refused: {others}"
    raise CheckpointError(
        first.what,
        file=first.file,
        layer=first.layer,
        experts=first.experts,
        tensor=first.tensor,
        expected=first.expected,
        found=more if first.found is None else f"{first.found}; {more}",
    )


def owned_mask(header: Header, weight_map: Mapping[str, str] | None) -> npt.NDArray[np.bool_]:
    """bool [n]: which tensors of ``header`` its file supplies. Without an index, all of them."""
    count = len(header.names)
    if weight_map is None:
        return np.ones(count, dtype=np.bool_)
    files = map(weight_map.get, header.names)
    return np.fromiter(map(operator.eq, files, repeat(header.file)), np.bool_, count)


def _check_index(headers: list[Header], weight_map: dict[str, str]) -> None:
    """Every tensor is in the file that the index gives it to."""
    # Names are distinct within a header, so equal counts leave none missing.
    if sum(int(owned_mask(header, weight_map).sum()) for header in headers) == len(weight_map):
        return
    names_of = {header.file: set(header.names) for header in headers}
    absent = [name for name, file in weight_map.items() if name not in names_of[file]]
    first = absent[0]
    elsewhere = [file for file, names in names_of.items() if first in names]
    raise tensor_error(
        "index and headers disagree: a tensor is not in the file that the index gives it to",
        shown(weight_map[first]),
        absent,
        expected=f"it in {shown(weight_map[first])}",
        found=f"it in {shown_few(elsewhere)}" if elsewhere else "it in no file",
    )


def _check_names_once(headers: list[Header]) -> None:
    if len(set(chain.from_iterable(header.names for header in headers))) == sum(
        len(header.names) for header in headers
    ):
        return
    files_of: dict[str, list[str]] = {}
    for header in headers:
        for name in header.names:
            files_of.setdefault(name, []).append(header.file)
    twice = [name for name, files in files_of.items() if len(files) > 1]
    raise tensor_error(
        "a tensor is in several files, and no index says which one supplies it",
        shown_few(files_of[twice[0]]),
        twice,
        expected=f"each tensor once, or {INDEX_FILE}",
    )

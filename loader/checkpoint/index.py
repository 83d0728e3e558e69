"""Which files are the model: the index, or the folder's own names where there is none.

The index, where present, is the only authority on which file supplies a tensor. Other files are no
part of the model and are not opened.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NoReturn

from loader.checkpoint.header import (
    PREFIX_BYTES,
    Header,
    HeaderBytes,
    header_length,
    parse_headers,
)
from loader.checkpoint.source import (
    MissingFileError,
    Source,
    file_size,
    read_bytes,
)
from loader.checkpoint.weight_map import INDEX_FILE, PICKLE_SUFFIXES, WeightMap, read_weight_map
from loader.checkpoint.wording import (
    SNIFF_BYTES,
    place_of,
    shown,
    shown_few,
    shown_ranges,
    tensor_error,
)
from loader.errors import CheckpointError

SINGLE_FILE = "model.safetensors"

_PART = re.compile(r"model-([0-9]{1,9})-of-([0-9]{1,9})\.safetensors")
_BATCH_BYTES = 16 << 20
"""Headers are parsed together, by all cores, when so many bytes of them were read."""


@dataclass(frozen=True)
class Index:
    """The files of the model, sorted, and tensor -> file; None without an index file."""

    files: tuple[str, ...]
    weight_map: WeightMap | None


def select_files(source: Source) -> Index:
    """The files of the model, all of which exist. Reads the index, no other file.

    Raises CheckpointError.
    """
    listed = source.list()
    if INDEX_FILE in listed:
        weight_map = read_weight_map(source)
        _check_files_exist(source, weight_map)
        return Index(weight_map.files, weight_map)
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
    pickles = [file for file in top if file.endswith(PICKLE_SUFFIXES)]
    raise CheckpointError(
        "folder holds no safetensors file",
        file=shown_few(pickles, 5) if pickles else shown(source.name),
        expected=f"{INDEX_FILE} or *.safetensors",
        found="only pickles, which are never opened" if pickles else f"{len(listed)} other files",
    )


def _check_files_exist(source: Source, weight_map: WeightMap) -> None:
    files, missing = weight_map.files, []
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
    index gives to another file stays in its header: see ``WeightMap.owned``.

    Raises CheckpointError.
    """
    found = list(_parsed(source, index.files))
    headers = [one for one in found if isinstance(one, Header)]
    failures = [one for one in found if isinstance(one, CheckpointError)]
    if failures:
        _refuse_files(failures)
    if index.weight_map is None:
        _check_names_once(headers)
    else:
        _check_index(headers, index.weight_map)
    return headers


def _parsed(source: Source, files: tuple[str, ...]) -> Iterator[Header | CheckpointError]:
    """The header of each file, or its error, in the order of the files."""
    batch: list[HeaderBytes] = []
    for file in files:
        try:
            batch.append(_read_header(source, file))
        except CheckpointError as error:
            yield from parse_headers(batch)
            batch.clear()
            yield error
        if sum(len(header.data) for header in batch) >= _BATCH_BYTES:
            yield from parse_headers(batch)
            batch.clear()
    yield from parse_headers(batch)


def _read_header(source: Source, file: str) -> HeaderBytes:
    size = file_size(source, file)
    prefix = read_bytes(source, file, 0, min(size, PREFIX_BYTES))
    try:
        length = header_length(prefix, size, file)
    except CheckpointError:
        # No header, so a little more can be read to say what the file is instead.
        header_length(read_bytes(source, file, 0, min(size, SNIFF_BYTES)), size, file)
        raise
    rest = read_bytes(source, file, PREFIX_BYTES, length - PREFIX_BYTES)
    return HeaderBytes(prefix + rest, size, file)


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


def _check_index(headers: list[Header], weight_map: WeightMap) -> None:
    """Every tensor is in the file that the index gives it to."""
    # Names are distinct within a header, so equal counts leave none missing.
    if int(weight_map.owned(headers).sum()) == len(weight_map):
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

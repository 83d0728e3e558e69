"""JSON file: configs and the index, read strictly."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn

from loader.checkpoint.source import Source, file_size, read_bytes
from loader.checkpoint.wording import describe_foreign, shown, shown_few
from loader.errors import CheckpointError

MAX_JSON_FILE_BYTES = 256 << 20


def load_json(source: Source, file: str, *, allow_nonfinite: bool = False) -> dict[str, Any]:
    """The JSON object in ``file``, strictly: no key twice, UTF-8, at most 256 MiB.

    ``allow_nonfinite`` lets the literals ``Infinity`` and ``NaN`` pass, which Python writes into
    config files. Raises CheckpointError.
    """
    return decode_json(read_json(source, file), file, allow_nonfinite=allow_nonfinite)


def read_json(source: Source, file: str) -> bytes:
    """The bytes of a JSON file, at most 256 MiB. Raises CheckpointError."""
    size = file_size(source, file)
    if size > MAX_JSON_FILE_BYTES:
        raise CheckpointError(
            "JSON file is too large",
            file=file,
            expected=f"at most {MAX_JSON_FILE_BYTES} bytes",
            found=f"{size} bytes",
        )
    return read_bytes(source, file, 0, size)


def decode_json(data: bytes, file: str, *, allow_nonfinite: bool = False) -> dict[str, Any]:
    """The JSON object that ``data`` holds; see :func:`load_json`."""
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

"""How messages speak of things that a file chose: names, places, and files that are no shards.

Nothing here decides anything; a name is read loosely, and only to tell a user where to look.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from loader.errors import CheckpointError

SNIFF_BYTES = 1024  # enough to tell what a file is that is no safetensors

# Bounded digits: a name may hold thousands of them. The lazy middle is bounded alike, so that a
# long name costs linear time.
_LAYER = re.compile(r"(?:^|\.)layers\.([0-9]{1,9})(?:\.|$)")
_EXPERT = re.compile(r"(?:^|\.)experts\.([0-9]{1,9})(?:\.|$)")
_MAGICS = (
    (b"PK\x03\x04", "a zip archive, as torch.save writes (pickles are never opened)"),
    (b"PK\x05\x06", "an empty zip archive"),
    (b"GGUF", "a GGUF file"),
    *((bytes((0x80, version)), "a pickle (never opened)") for version in (2, 3, 4, 5)),
)


def describe_foreign(start: bytes) -> str | None:
    """What a file is that begins with ``start`` and is no safetensors; None where unknown."""
    start = start[:SNIFF_BYTES]
    if start.startswith(b"version https://git-lfs"):
        size = re.search(rb"\nsize ([0-9]{1,20})\s", start + b"\n")
        declared = f" for {int(size[1])} bytes" if size else ""
        return f"a Git LFS pointer{declared} (the file itself was never downloaded)"
    for magic, description in _MAGICS:
        if start.startswith(magic):
            return description
    text = start.decode("utf-8", "ignore")
    # A character may be cut at the end of ``start``; more that is not UTF-8 is not text.
    whole = len(text.encode()) >= len(start) - 3
    if not whole or not text.strip() or any(c < " " and c not in "\t\r\n\f" for c in text):
        return None
    is_html = re.match(r"\s*<(!doctype|html|head)", text, re.IGNORECASE)
    return f"{'an HTML page' if is_html else 'text'} that begins {text.strip()[:40]!r}"


def place_of(name: str) -> tuple[int | None, int | None]:
    """Layer and expert that ``name`` seems to speak of: for messages only, never for decisions."""
    layer, expert = _LAYER.search(name), _EXPERT.search(name)
    return int(layer[1]) if layer else None, int(expert[1]) if expert else None


def shown(text: str) -> str:
    """``text`` as a message may carry it: one line, and bounded."""
    short = text if len(text) <= 200 else text[:200] + "..."
    return short if short.isprintable() else ascii(short)


def shown_few(texts: Sequence[str], few: int = 3) -> str:
    """The first ``few`` of ``texts``, with the number of the others."""
    rest = f" and {len(texts) - few} more" if len(texts) > few else ""
    return ", ".join(map(shown, texts[:few])) + rest


def shown_ranges(numbers: Iterable[int]) -> str:
    """Numbers as ranges: ``0-3, 7``."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return shown_few([f"{a}-{b}" if a != b else str(a) for a, b in ranges], 16)


def tensor_error(
    what: str, file: str, names: Sequence[str], *, expected: Any = None, found: Any = None
) -> CheckpointError:
    """An error about one tensor, the first of ``names``, that counts and lists its fellows."""
    layer, expert = place_of(names[0])
    if len(names) > 1:
        fellows = f"{len(names)} such tensors: {shown_few(names)}"
        found = fellows if found is None else f"{found}; {fellows}"
    return CheckpointError(
        what,
        file=file,
        layer=layer,
        experts=None if expert is None else str(expert),
        tensor=shown(names[0]),
        expected=expected,
        found=found,
    )

"""Wildcard: whether an entry of a config's lists can tell modules apart by their numbers.

The experts of one layer are thousands of modules whose names differ in a number. Where no entry of
an ignore list can take one of them and leave another, one module speaks for all.

An entry is loosened: each digit, ``?`` and set of characters becomes ``*``. What the entry takes the
loose one takes too, and that one, whose letters are no digits, takes all names that differ in
numbers alone, or none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

_NUMBERS = re.compile("[0-9]+")
_SIMPLE = re.compile(r"\^?((?:[A-Za-z0-9_-]|\\\.|\.\*|\.)*)(\$?)")
"""Expressions that are read here: letters, digits, dots and ``.*``."""
_TOKEN = re.compile(r"\\\.|\.\*|.", re.DOTALL)


@dataclass(frozen=True)
class Wildcard:
    """A loose entry as the texts between its stars; ``blind`` where it had nothing to loosen."""

    texts: tuple[str, ...]
    blind: bool

    def takes(self, name: str) -> bool:
        """Whether the whole of ``name`` matches."""
        first, last = self.texts[0], self.texts[-1]
        if len(self.texts) == 1:
            return name == first
        end = len(name) - len(last)
        if not name.startswith(first) or not name.endswith(last) or end < len(first):
            return False
        at = len(first)
        for text in self.texts[1:-1]:
            at = name.find(text, at, end) + len(text)
            if at < len(text):
                return False
        return True


ANYTHING = Wildcard(("", ""), False)


def loosen(glob: str) -> Wildcard:
    """The loose form of a glob as ``fnmatch`` reads it."""
    glob, is_set, _ = glob.partition("[")  # what comes behind a set is not looked at
    loose = re.sub("[0-9?]", "*", glob)
    return Wildcard(tuple((loose + "*" * bool(is_set)).split("*")), loose == glob and not is_set)


def loosen_expression(pattern: str) -> Wildcard:
    """The loose form of an expression that is matched from the start on."""
    simple = _SIMPLE.fullmatch(pattern)
    if simple is None:
        return ANYTHING
    tokens = _TOKEN.findall(simple[1])
    as_glob = {"\\.": ".", ".*": "*", ".": "?"}
    found = "".join(as_glob.get(token, token) for token in tokens)
    return loosen(found if simple[2] else f"{found}*")


@dataclass(frozen=True)
class Numbered:
    """The entries of a config that may tell names apart by their numbers."""

    entries: tuple[Wildcard, ...]
    _known: dict[str, bool] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, entries: Iterable[Wildcard]) -> Numbered:
        """Those of ``entries`` that are not blind."""
        return cls(tuple(entry for entry in entries if not entry.blind))

    def tell_apart(self, module: str) -> bool:
        """Whether any entry may take some, not all, of the names that differ in numbers alone."""
        if not self.entries:
            return False
        alike = _NUMBERS.sub("0", module)
        known = self._known.get(alike)
        if known is None:
            # `$` of an expression also stands before a newline at the end.
            found = "\n" in alike or any(entry.takes(alike) for entry in self.entries)
            known = self._known[alike] = found
        return known

"""Wildcard: whether an entry of a config's lists can tell the experts of one layer apart.

They are thousands of modules whose names differ in a number. Where no entry of an ignore list can
take one of them and leave another, one module speaks for all.

An entry is loosened: each digit, ``?`` and set of characters becomes ``*``. What the entry takes,
the loose one takes too; and that one, whose texts hold no digit, takes all names that differ in
numbers alone, or none of them. What stands in an entry before its first wildcard, or around its own
numbers, rules out most of the others: an entry of one layer speaks of no other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

_NUMBERS = re.compile("[0-9]+")
_EXPERT = re.compile(r"(.*\.experts\.)[0-9]+(\..*)", re.DOTALL)
_SIMPLE = re.compile(r"\^?((?:[A-Za-z0-9_-]|\\\.|\.\*|\.)*)(\$?)")
"""Expressions that are read here: letters, digits, dots and ``.*``."""
_TOKEN = re.compile(r"\\\.|\.\*|.", re.DOTALL)


@dataclass(frozen=True)
class Wildcard:
    """A loose entry: ``texts`` between its stars, and what its ``entry`` was.

    ``blind`` where it had nothing to loosen; ``inside`` where the entry is a text found anywhere.
    """

    texts: tuple[str, ...]
    entry: str
    blind: bool
    inside: bool = False

    def takes(self, name: str) -> bool:
        """Whether the whole of ``name`` matches the loose entry."""
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

    def may_divide(self, head: str, tail: str) -> bool:
        """Whether the entry may take some names ``head``, number, ``tail`` and not others."""
        if self.inside:
            # One of its own numbers must be the one between them.
            return any(
                head.endswith(self.entry[: number.start()])
                and tail.startswith(self.entry[number.end() :])
                for number in _NUMBERS.finditer(self.entry)
            )
        start = re.split(r"[*?[]", self.entry, maxsplit=1)[0]
        return head.startswith(start) or start.startswith(head)


def loosen(glob: str, *, whole: bool = True) -> Wildcard:
    """The loose form of a glob as ``fnmatch`` reads it; not ``whole``: of a text found anywhere."""
    text, is_set, _ = glob.partition("[")  # what comes behind a set is not looked at
    loose = re.sub("[0-9?]", "*", text)
    texts = (loose + "*" * bool(is_set)).split("*")
    blind = loose == text and not is_set
    return Wildcard(tuple(texts if whole else ["", *texts, ""]), glob, blind, not whole)


def loosen_expression(pattern: str) -> Wildcard:
    """The loose form of an expression that is matched from the start on."""
    simple = _SIMPLE.fullmatch(pattern)
    if simple is None:
        return loosen("[")
    tokens = _TOKEN.findall(simple[1])
    as_glob = {"\\.": ".", ".*": "*", ".": "?"}
    found = "".join(as_glob.get(token, token) for token in tokens)
    return loosen(found if simple[2] else f"{found}*")


@dataclass(frozen=True)
class Numbered:
    """The entries of a config that may tell names apart by their numbers."""

    entries: tuple[Wildcard, ...]
    _known: dict[str, tuple[Wildcard, ...]] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, entries: Iterable[Wildcard]) -> Numbered:
        """Those of ``entries`` that are not blind."""
        return cls(tuple(entry for entry in entries if not entry.blind))

    def tell_apart(self, module: str) -> bool:
        """Whether any entry may take some and not all modules of the experts beside this one."""
        if not self.entries:
            return False
        if "\n" in module:  # before which `$` of an expression stands too
            return True
        alike = _NUMBERS.sub("0", module)
        if alike not in self._known:
            self._known[alike] = tuple(entry for entry in self.entries if entry.takes(alike))
        parts = _EXPERT.fullmatch(module)
        if parts is None:
            return bool(self._known[alike])
        return any(entry.may_divide(parts[1], parts[2]) for entry in self._known[alike])

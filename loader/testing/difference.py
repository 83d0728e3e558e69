"""Difference: what was expected beside what was found, as the small table of a failed assertion."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from loader.table import Table, render


@dataclass(frozen=True)
class Fact:
    """One thing that was checked: ``where`` is a layer or the card; equal means it holds."""

    where: object
    what: str
    expected: object
    found: object

    @property
    def holds(self) -> bool:
        """True where what was found is what was expected."""
        return self.expected == self.found


def at_most(where: object, what: str, most: int, found: int) -> Fact:
    """A fact that also holds below ``most``."""
    bound = f"at most {most}"
    return Fact(where, what, bound, bound if found <= most else found)


def require(sentence: str, facts: Iterable[Fact]) -> None:
    """Raise ``AssertionError`` with ``sentence`` and a table of the facts that do not hold."""
    __tracebackhide__ = True  # pytest shows the line of the test
    checked = list(facts)
    wrong = [fact for fact in checked if not fact.holds]
    if wrong:
        rows = [(fact.where, fact.what, fact.expected, fact.found) for fact in wrong]
        columns = ("layer", "what", "expected", "found")
        title = f"{sentence}: {len(wrong)} of {len(checked)} checks"
        raise AssertionError(render(Table(title, columns, rows, text=("what",))))

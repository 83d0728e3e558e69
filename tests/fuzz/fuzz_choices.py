"""Where a fuzzer's choices come from: a seed, hypothesis, or the bytes of a coverage-guided run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from hypothesis import strategies as st

T = TypeVar("T")


class Choices(Protocol):
    """One source of choices; the generators know nothing else of who drives them."""

    def integer(self, low: int, high: int) -> int:
        """A whole number from ``low`` to ``high``, both included."""
        ...

    def pick(self, options: Sequence[T]) -> T:
        """One of some options."""
        ...

    def data(self, most: int) -> bytes:
        """Up to ``most`` bytes."""
        ...


def chance(choices: Choices, one_in: int) -> bool:
    """True about once in so many times."""
    return choices.integer(1, one_in) == one_in


def several(choices: Choices, options: Sequence[T], most: int) -> list[T]:
    """Up to ``most`` different options, in the order of ``options``."""
    kept = [option for option in options if chance(choices, 2)]
    return kept[:most]


def shuffled(choices: Choices, items: Sequence[T]) -> list[T]:
    """The items in some order."""
    rest, order = list(items), []
    while rest:
        order.append(rest.pop(choices.integer(0, len(rest) - 1)))
    return order


class SeededChoices:
    """Choices of a seed: the recorded runs."""

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def pick(self, options: Sequence[T]) -> T:
        return self._random.choice(options)

    def data(self, most: int) -> bytes:
        return self._random.randbytes(self._random.randint(0, most))


class DrawnChoices:
    """Choices of hypothesis, which shrinks them when a check fails."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    def pick(self, options: Sequence[T]) -> T:
        return self._draw(st.sampled_from(options))

    def data(self, most: int) -> bytes:
        return self._draw(st.binary(max_size=most))


class ProvidedChoices:
    """Choices taken from a fuzzer's bytes, by atheris' ``FuzzedDataProvider``."""

    def __init__(self, provider: Any) -> None:
        self._provider = provider

    def integer(self, low: int, high: int) -> int:
        return int(self._provider.ConsumeIntInRange(low, high))

    def pick(self, options: Sequence[T]) -> T:
        return options[self.integer(0, len(options) - 1)]

    def data(self, most: int) -> bytes:
        return bytes(self._provider.ConsumeBytes(self.integer(0, most)))

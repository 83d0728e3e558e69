"""Request: what a caller asked of a load, held to its type before anything is opened.

Each function returns what the library works with and raises a :class:`loader.LoaderError` for what
is nothing of the kind. None stands for the default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from operator import index
from typing import Any, NoReturn, TypeVar

from loader.checkpoint.family import FAMILIES, Family
from loader.errors import LoaderError
from loader.policy import Policy, ResolvedPolicy
from loader.shard import Shard

MOST_LAYERS = 1 << 16
"""Layers that a request may name: a slip must not fill the memory."""

_MOST = (1 << 63) - 1
_Kind = TypeVar("_Kind")


def asked_number(name: str, value: Any, least: int = 0, most: int = _MOST) -> int:
    """``value`` as a plain int; any kind of whole number is one, a float is none."""
    try:
        number = index(value)
    except TypeError:
        _refuse(name, f"a whole number from {least} on", value)
    if not least <= number <= most:
        _refuse(name, f"a whole number from {least} to {most}", value)
    return number


def asked_budget(name: str, value: Any, least: int = 0) -> int | None:
    """A number where one is given."""
    return None if value is None else asked_number(name, value, least)


def asked_layers(layers: Any) -> list[int] | None:
    """Layer indices, or None for all."""
    if layers is None:
        return None
    found = list(islice(_items("layers", layers), MOST_LAYERS + 1))
    if len(found) > MOST_LAYERS:
        _refuse("layers", f"at most {MOST_LAYERS} layers", layers)
    # Anything below 0 is no layer of any model, which is said where the layers are known.
    return [asked_number("layers", layer, least=-_MOST) for layer in found]


def asked_observers(observers: Any) -> tuple[Callable[[Any], None], ...]:
    """Callables."""
    found = tuple(_items("observers", observers))
    for one in found:
        if not callable(one):
            _refuse("observers", "callables", one)
    return found


def asked_policy(policy: Any) -> ResolvedPolicy:
    """The policy in force, with the environment filled in."""
    return asked_of(Policy, "policy", policy, Policy()).resolve()


def asked_shard(shard: Any) -> Shard:
    """The shard, one whole card by default."""
    return asked_of(Shard, "shard", shard, Shard())


def asked_families(family: Any) -> Iterable[Family]:
    """The families to try, the caller's own first."""
    if family is None:
        return FAMILIES
    return (asked_of(Family, "family", family, None), *FAMILIES)


def asked_of(kind: type[_Kind], name: str, value: Any, default: _Kind | None) -> _Kind:
    """``value`` where it is of its kind, ``default`` (if there is one) for None."""
    given = default if value is None else value
    if not isinstance(given, kind):
        _refuse(name, f"a {kind.__name__}", value)
    return given


def asked_or_none(kind: type[_Kind], name: str, value: Any) -> _Kind | None:
    """The same, or None."""
    return None if value is None else asked_of(kind, name, value, None)


def _items(name: str, values: Any) -> Iterator[Any]:
    try:
        return iter(values)
    except TypeError:
        _refuse(name, "something to iterate over", values)


def _refuse(name: str, expected: str, value: Any) -> NoReturn:
    """``repr`` tells 1 from "1", and None from nothing said."""
    raise LoaderError(f"{name} is not valid", expected=expected, found=repr(value))

"""Call: what a stub saw of one call of an operator, under the names of the operator's schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, eq=False, repr=False)
class Seen:
    """A tensor as a stub saw it. No memory is held, but for the copy in ``value`` where asked."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    value: torch.Tensor | None = None

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True, eq=False)
class Call:
    """One call of an operator.

    ``arguments`` holds every argument of the schema by its name, defaults filled in: a tensor as
    :class:`Seen`, a list as a tuple, anything else as it is. ``thread`` is the name of the thread
    that called.
    """

    operator: str
    arguments: Mapping[str, Any]
    thread: str

    def __str__(self) -> str:
        told = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return f"{self.operator}({told})"

    def __getitem__(self, argument: str) -> Any:
        """One argument by its name in the schema; ``KeyError`` where the schema has none."""
        return self.arguments[argument]


def named_arguments(
    name: str,
    schema: torch.FunctionSchema,
    positional: Sequence[Any],
    by_name: Mapping[str, Any],
) -> dict[str, Any]:
    """The arguments of a call by the names of the schema, in its order, defaults filled in.

    Raises ``TypeError`` for arguments that the schema does not have, and for one that it demands
    and that is not there.
    """
    places = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    every = {argument.name for argument in schema.arguments}
    if len(positional) > len(places) or not by_name.keys() <= every:
        found = [*map(type, positional[len(places) :]), *sorted(by_name.keys() - every)]
        raise TypeError(f"qpn::{name} has no such arguments: {found}")
    given = dict(zip(places, positional, strict=False)) | dict(by_name)
    arguments = {}
    for argument in schema.arguments:
        if argument.name in given:
            arguments[argument.name] = given[argument.name]
        elif argument.has_default_value():
            arguments[argument.name] = argument.default_value
        else:
            raise TypeError(f"qpn::{name} was called without its argument {argument.name!r}")
    return arguments


def seen(value: Any, copy: bool) -> Any:
    """What a call keeps of one argument; ``copy`` keeps the numbers of tensors, too."""
    if isinstance(value, torch.Tensor):
        kept = value.detach().clone() if copy else None
        return Seen(tuple(value.shape), value.dtype, value.device, kept)
    if isinstance(value, (list, tuple)):
        return tuple(seen(one, copy) for one in value)
    return value

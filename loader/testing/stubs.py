"""Stubs: stand-ins for the operators, made from their schemas, so that they cannot go stale.

Every operator that torch knows in the library's namespace gets a stub: one that works on a
conversion cache is a converter, any other a kernel. Arguments are recorded under the names of the
schema, and results are shaped by the operator's own fake implementation.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from loader import native
from loader.errors import UnsupportedError
from loader.testing.call import Call, named_arguments, seen

_RESULT = "out"
"""The argument that an operator which returns nothing writes its result into."""

_CACHE = "cache"
"""The argument that tells a converter from a kernel."""


class Stubs:
    """The stubs of one block: what they were called with, and what their calls do.

    ``fill`` is what results are filled with. Whatever else an operator writes (banks, scratch) is
    zeroed the first time it is seen. Calls may come from any thread.
    """

    def __init__(self, operators: Mapping[str, torch._ops.OpOverload], fill: float = 0.0) -> None:
        self.fill = fill
        self._operators = dict(operators)
        self._calls: list[Call] = []
        self._kept: set[str] = set()
        self._faults: dict[tuple[str, int], BaseException] = {}
        self._counts = dict.fromkeys(operators, 0)
        self._zeroed: dict[int, StorageWeakRef] = {}
        self._lock = threading.Lock()

    @property
    def operators(self) -> tuple[str, ...]:
        """Names of the operators that are stubbed."""
        return tuple(self._operators)

    @property
    def calls(self) -> tuple[Call, ...]:
        """Every call so far, in order."""
        with self._lock:
            return tuple(self._calls)

    def of(self, *operators: str) -> tuple[Call, ...]:
        """The calls of some operators, in order. Raises ``UnsupportedError`` for unknown names."""
        for name in operators:
            self._require(name)
        return tuple(call for call in self.calls if call.operator in operators)

    def keep(self, *arguments: str) -> None:
        """From now on copy the tensors of these arguments into ``Seen.value``.

        Raises ``UnsupportedError`` for a name that no stubbed operator has.
        """
        known = {a.name: a for o in self._operators.values() for a in o._schema.arguments}
        for name in arguments:
            if name not in known:
                raise UnsupportedError(
                    "no such argument", expected=" | ".join(sorted(known)), found=name
                )
        self._kept.update(arguments)

    def fail(self, operator: str, error: BaseException, *, at: int = 1) -> None:
        """Raise ``error`` in the ``at``-th call of an operator from now, 1 for the next one.

        The call is recorded and does nothing else; the calls after it run again. Raises
        ``UnsupportedError`` for an unknown operator or a call that is not to come.
        """
        self._require(operator)
        if at < 1:
            raise UnsupportedError("no such call", expected="1 for the next one", found=at)
        with self._lock:
            self._faults[operator, self._counts[operator] + at] = error

    def serve(self, base: native.Implementation) -> native.Implementation:
        """``base`` with its operators stubbed; what it says of itself stays, so plans do, too.

        An operator that ``base`` does not serve stays unserved.
        """
        known = {field.name for field in fields(base)}
        for name in self._operators:
            if name not in known:
                raise UnsupportedError(
                    "an operator that no implementation can serve",
                    expected=f"a field {name!r} of {type(base).__name__}",
                    found=f"qpn::{name}",
                )
        stubs: dict[str, Any] = {
            name: self._stub(name, operator)
            for name, operator in self._operators.items()
            if getattr(base, name) is not None
        }
        return replace(base, name="stub", **stubs)

    def _require(self, operator: str) -> None:
        if operator not in self._operators:
            raise UnsupportedError(
                "not a stubbed operator", expected=" | ".join(self._operators), found=operator
            )

    def _stub(self, name: str, operator: torch._ops.OpOverload) -> Any:
        # Imported for operators that return something, and before the block runs: torch's symbolic
        # shapes take a second and tens of MiB, which nobody should see in the middle of a load.
        if operator._schema.returns:
            from loader.testing.result import zeros
        schema = operator._schema

        def stub(*positional: Any, **by_name: Any) -> Any:
            arguments = named_arguments(name, schema, positional, by_name)
            self._record(name, arguments)
            with torch.no_grad():
                for argument in schema.arguments:
                    if argument.is_write:
                        self._write(argument.name, arguments[argument.name])
            return zeros(operator, positional, by_name) if schema.returns else None

        return stub

    def _record(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Keep the call; raises the fault that is due."""
        told = {key: seen(value, key in self._kept) for key, value in arguments.items()}
        with self._lock:
            self._calls.append(Call(name, told, threading.current_thread().name))
            self._counts[name] += 1
            fault = self._faults.pop((name, self._counts[name]), None)
        if fault is not None:
            raise fault

    def _write(self, name: str, written: torch.Tensor | Iterable[torch.Tensor]) -> None:
        for tensor in [written] if isinstance(written, torch.Tensor) else written:
            if name == _RESULT:
                tensor.fill_(self.fill)
            elif self._first_sight(tensor):
                tensor.zero_()

    def _first_sight(self, tensor: torch.Tensor) -> bool:
        """True once for each storage: banks are written by many calls and zeroed by one."""
        storage = StorageWeakRef(tensor.untyped_storage())
        with self._lock:
            known = self._zeroed.get(storage.cdata)
            self._zeroed[storage.cdata] = storage
        # A weak reference pins the address, so an equal one that lives is the same storage.
        return known is None or known.expired()


@contextmanager
def stub_kernels(fill: float = 0.0) -> Iterator[Stubs]:
    """Inside the block the operators that run experts compute nothing.

    Results are filled with ``fill``; calls are recorded by what is yielded. Every device that is
    served is stubbed, in every thread, and served as before after the block.
    """
    with _serving(False, fill) as stubs:
        yield stubs


@contextmanager
def stub_converters() -> Iterator[Stubs]:
    """Inside the block the operators that convert read and compute nothing.

    They find nothing wrong, and banks hold zeros, whose meaning depends on the format: stub the
    kernels, too, before running them. Otherwise as :func:`stub_kernels`.
    """
    with _serving(True, 0.0) as stubs:
        yield stubs


@contextmanager
def _serving(converters: bool, fill: float) -> Iterator[Stubs]:
    chosen = {
        name: operator
        for name, operator in native.operators().items()
        if any(a.name == _CACHE for a in operator._schema.arguments) == converters
    }
    stubs = Stubs(chosen, fill)
    with ExitStack() as stack:
        for base in native.implementations():
            stack.enter_context(native.serving(stubs.serve(base)))
        yield stubs

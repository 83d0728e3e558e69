"""Rollback: giving everything back after a failure, whole, whatever signals come meanwhile.

A handler of signals may raise between any two lines of Python, as that of Ctrl-C does. The first
one that does so ends a load; what comes while everything is given back waits until that is done.
Python runs handlers in the main thread alone, so in other threads there is nothing to do.
"""

from __future__ import annotations

import functools
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, MethodType, TracebackType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_Handler = Callable[[int, FrameType | None], object]
_PASS, _ONCE, _HOLD, _OVER = range(4)


class _Signals:
    """Stands before every handler of Python's: lets signals pass, one of them, or none.

    A signal that has no such handler (SIGTERM, unless the application gave it one) does what it
    always does. What was held is handled once the handlers are back, each signal once.

    Another signal may strike wherever a function is called, also where handlers are put in place
    or back. Before and afterwards, what stands there nevertheless lets signals pass.
    """

    def __init__(self) -> None:
        self.mode = _PASS
        self._handlers: dict[int, _Handler] = {}
        self._held: list[int] = []

    def take(self, mode: int) -> None:
        """Stand before the handlers; one that raises meanwhile is the caller's."""
        try:
            for number in (signal.SIGINT, *range(1, signal.NSIG)):
                handler = _own(signal.getsignal(number), number)
                if callable(handler) and handler != self._come:
                    self._handlers[number] = handler
                    signal.signal(number, self._come)
        except ValueError:  # the main thread of another interpreter: it has no signals
            self._handlers.clear()
        self.mode = mode

    def _come(self, number: int, frame: FrameType | None) -> None:
        if self.mode == _HOLD:
            # Its frame is not kept: it would hold what is being given back.
            self._held += [] if number in self._held else [number]
        elif self.mode == _ONCE:
            self.mode = _HOLD
            self._handlers[number](number, frame)
            self.mode = _ONCE  # it did not raise
        else:
            self._handlers[number](number, frame)

    def give_back(self) -> None:
        """Put the handlers back, then handle what was held."""
        try:
            self.mode = _HOLD
            self._restore()
        finally:
            self.mode = _OVER  # should one not be back, what it does is what its own does
            self._handle()

    def _restore(self) -> None:
        for number in reversed(self._handlers):
            try:
                if signal.getsignal(number) == self._come:  # else somebody has set another
                    signal.signal(number, self._handlers[number])
            except BaseException:
                self._restore()
                raise

    def _handle(self) -> None:
        if self._held:
            number = self._held.pop(0)
            try:
                self._handlers[number](number, sys._getframe())
            finally:
                self._handle()


def _own(handler: Any, number: int) -> Any:
    """A handler, or where it is one that could not be put back, the one that it stands before."""
    while isinstance(handler, MethodType):
        signals = handler.__self__
        if not isinstance(signals, _Signals) or signals.mode != _OVER:
            break
        handler = signals._handlers[number]
    return handler


class SignalsHeld:
    """A block of few lines that no signal cuts in two: handlers run at its end.

    They may raise out of the end of the block, each error with the one before as context.
    """

    def __enter__(self) -> SignalsHeld:
        self._signals = _Signals()
        if threading.current_thread() is threading.main_thread():
            try:
                self._signals.take(_HOLD)
            except BaseException:  # the last one that came before it was held
                try:  # in line, as below: another may strike as a function begins
                    self._signals.give_back()
                finally:
                    self._signals.mode = _OVER
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._signals.give_back()
        finally:
            self._signals.mode = _OVER


class _Here(threading.local):
    """The call of this thread that signals may end once."""

    signals = _Signals()


_NONE = _Here.signals
_here = _Here()


def ended_once(function: Callable[P, T]) -> Callable[P, T]:
    """Inside calls of ``function``, the first handler that raises is the last one that runs.

    What it ends is undone without another; those that came meanwhile run when the call is over.
    """

    @functools.wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> T:
        main = threading.current_thread() is threading.main_thread()
        if not main or _here.signals is not _NONE:
            return function(*arguments, **named)
        signals = _Signals()
        try:
            signals.take(_ONCE)
            _here.signals = signals
            return function(*arguments, **named)
        finally:
            # No signal is looked at between the call and these two lines.
            signals.mode = _HOLD
            _here.signals = _NONE
            try:
                signals.give_back()
            finally:
                signals.mode = _OVER

    return call


def whole_or_undone(run: Callable[[], T], undo: Callable[[], None]) -> T:
    """What ``run`` returns; where it raises, ``undo`` was done, and its error goes on.

    Inside of :func:`ended_once` no signal comes between, once there is an error.
    """
    try:
        return run()
    except BaseException:
        _here.signals.mode = _HOLD
        undo()
        raise

"""Signals while something is given back: put off, never lost, and nothing is left half undone."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from loader import rollback
from loader.rollback import SignalsHeld, ended_once, whole_or_undone

PID = os.getpid


class Asked(Exception):
    """What a handler raises."""


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """Handlers of three signals: one of Python's own, one that raises, one that only notes."""
    noted: list[int] = []

    def asks(number: int, frame: FrameType | None) -> None:
        assert frame is not None
        noted.append(number)
        raise Asked

    before = [
        (number, signal.signal(number, handler))
        for number, handler in (
            (signal.SIGINT, signal.default_int_handler),
            (signal.SIGTERM, asks),
            (signal.SIGUSR1, lambda number, frame: noted.append(number)),
        )
    ]
    yield noted
    for number, handler in before:
        signal.signal(number, handler)


def kill(*numbers: int) -> None:
    for number in numbers:
        os.kill(PID(), number)


def test_a_signal_waits_for_the_end_of_the_block(handled: list[int]) -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), SignalsHeld():
        kill(signal.SIGINT, signal.SIGINT)
        done.append(1)
    assert done == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_every_signal_that_came_is_handled_once(handled: list[int]) -> None:
    with pytest.raises(Asked) as caught, SignalsHeld():
        kill(signal.SIGINT, signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1)
        assert handled == []
    assert isinstance(caught.value.__context__, KeyboardInterrupt)
    assert sorted(handled) == sorted([signal.SIGUSR1, signal.SIGTERM])


def test_an_error_of_the_block_is_the_context_of_what_came(handled: list[int]) -> None:
    with pytest.raises(KeyboardInterrupt) as caught, SignalsHeld():
        kill(signal.SIGINT)
        raise ValueError("inside")
    assert isinstance(caught.value.__context__, ValueError)


def test_blocks_within_blocks_wait_for_the_outermost(handled: list[int]) -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), SignalsHeld():
        with SignalsHeld():
            kill(signal.SIGINT)
        done.append(1)
    assert done == [1]


def test_without_a_signal_everything_is_as_before(handled: list[int]) -> None:
    numbers = range(1, signal.NSIG)
    before = [signal.getsignal(number) for number in numbers]
    with SignalsHeld():
        pass
    assert [signal.getsignal(number) for number in numbers] == before


def test_signals_that_are_ignored_or_have_no_handler_are_left_alone(handled: list[int]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with SignalsHeld():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        kill(signal.SIGUSR1)
    assert handled == []


def test_other_threads_hold_nothing(handled: list[int]) -> None:
    """Handlers never run there, so that there is nothing to hold."""
    found = []

    def work() -> None:
        with SignalsHeld():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


@pytest.mark.parametrize("seed", range(4))
def test_a_burst_of_signals_loses_no_handler(
    handled: list[int], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signals at every moment, also while handlers are being put in place and back."""
    # One may strike in a callback that cannot raise: pytest's own hook would be struck next.
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    left = [40]

    def strike(number: int, frame: FrameType | None) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise Asked

    before = signal.signal(signal.SIGALRM, strike)
    whole = 0
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-4, 2e-4 + seed * 7e-5)
        while left[0] > 0:
            try:
                with SignalsHeld():
                    for _ in range(50):
                        pass
                    whole += 1
            except Asked:
                continue
    except Asked:
        left[0] = 0  # no signal is looked at before this
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        found = signal.getsignal(signal.SIGALRM)
        signal.signal(signal.SIGALRM, before)
    assert whole > 0, "no block ever ended"
    # Whichever objects stand there: what they do is what the application wanted.
    with pytest.raises(KeyboardInterrupt):
        kill(signal.SIGINT)
    with pytest.raises(Asked):
        left[0] = 2
        assert callable(found)
        found(signal.SIGALRM, None)


class Struck:
    """Signals at chosen moments: where ``loader/rollback.py`` calls anything, and at what it calls.

    Those are the moments at which Python looks. A handler that stands there by then decides.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.at: frozenset[int] = frozenset()
        self.moments = 0
        for name in ("take", "give_back", "_restore", "_handle", "_come"):
            patch.setattr(rollback._Signals, name, self._before(getattr(rollback._Signals, name)))
        calls = {name: self._before(getattr(signal, name)) for name in ("signal", "getsignal")}
        values = {name: getattr(signal, name) for name in ("SIGINT", "NSIG")}
        patch.setattr(rollback, "signal", SimpleNamespace(**calls, **values))

    def _before(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def call(*arguments: Any) -> Any:
            self.moments += 1
            if self.moments in self.at:
                handler = signal.getsignal(signal.SIGUSR2)
                assert callable(handler)
                handler(signal.SIGUSR2, None)
            return inner(*arguments)

        return call


@pytest.mark.parametrize("how", ["held", "ended once"])
def test_no_moment_of_two_signals_leaves_a_handler_behind(
    handled: list[int], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Also where the second strikes while what the first one ended is put back."""

    def raises(number: int, frame: FrameType | None) -> None:
        raise Asked

    @ended_once
    def ended() -> None:
        pass

    def held() -> None:
        with SignalsHeld():
            pass

    block = held if how == "held" else ended
    before = signal.signal(signal.SIGUSR2, raises)
    try:
        with monkeypatch.context() as patch:
            struck = Struck(patch)
            block()
            moments, survived = struck.moments, 0
            for first in range(1, moments + 1):
                for second in range(first, first + 12):
                    struck.moments, struck.at = 0, frozenset((first, second))
                    with suppress(Asked):
                        block()
                    struck.at = frozenset()
                    with pytest.raises(KeyboardInterrupt):
                        kill(signal.SIGINT)
                    survived += 1
            assert survived == 12 * moments > 500
        block()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.getsignal(signal.SIGUSR2) is raises
    finally:
        signal.signal(signal.SIGUSR2, before)


# Whole or undone


def test_what_succeeds_is_not_undone() -> None:
    undone: list[int] = []
    assert whole_or_undone(lambda: 7, lambda: undone.append(1)) == 7
    assert undone == []


def test_an_error_goes_on_once_all_is_undone() -> None:
    undone: list[int] = []

    def fails() -> None:
        raise ValueError("first")

    with pytest.raises(ValueError, match="first") as caught:
        whole_or_undone(fails, lambda: undone.append(1))
    assert undone and caught.value.__context__ is None


def test_a_second_signal_does_not_stop_the_undoing(handled: list[int]) -> None:
    undone: list[int] = []

    def undo() -> None:
        kill(signal.SIGINT)
        undone.append(1)

    @ended_once
    def interrupted() -> None:
        whole_or_undone(lambda: kill(signal.SIGTERM), undo)

    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted()
    assert undone == [1]
    contexts = []
    error: BaseException | None = caught.value
    while error is not None:
        contexts.append(type(error))
        error = error.__context__
    assert Asked in contexts, "the first signal is not forgotten"


# One signal ends a call


def test_signals_that_come_together_undo_once(handled: list[int]) -> None:
    """As from a terminal and a launcher at once: the second one would strike in the first line."""
    undone: list[int] = []

    def undo() -> None:
        for _ in range(100):
            undone.append(1)

    @ended_once
    def call() -> None:
        whole_or_undone(lambda: kill(signal.SIGTERM, signal.SIGINT), undo)

    with pytest.raises((KeyboardInterrupt, Asked)):
        call()
    assert len(undone) == 100
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_does_not_raise_ends_nothing(handled: list[int]) -> None:
    @ended_once
    def call() -> str:
        kill(signal.SIGUSR1)
        kill(signal.SIGUSR1)
        return "done"

    assert call() == "done"
    assert handled == [signal.SIGUSR1, signal.SIGUSR1], "each was handled as it came"


def test_calls_within_calls_are_one(handled: list[int]) -> None:
    steps: list[str] = []

    @ended_once
    def inner() -> None:
        kill(signal.SIGTERM)

    @ended_once
    def outer() -> None:
        try:
            inner()
        finally:
            kill(signal.SIGINT)
            steps.append("undone")

    with pytest.raises(KeyboardInterrupt):
        outer()
    assert steps == ["undone"]


def test_a_handler_that_is_set_meanwhile_stays(handled: list[int]) -> None:
    noted: list[int] = []

    def own(number: int, frame: FrameType | None) -> None:
        noted.append(number)

    @ended_once
    def call() -> None:
        signal.signal(signal.SIGUSR1, own)

    call()
    assert signal.getsignal(signal.SIGUSR1) is own


def test_a_failing_call_of_another_thread_holds_nothing_here(handled: list[int]) -> None:
    """What a thread undoes is its own: the main thread is still interrupted."""
    inside, failed = threading.Event(), threading.Event()

    @ended_once
    def fails() -> None:
        inside.wait(60)
        whole_or_undone(lambda: 1 // 0, lambda: None)

    def work() -> None:
        with pytest.raises(ZeroDivisionError):
            fails()
        failed.set()

    @ended_once
    def call() -> None:
        inside.set()
        failed.wait(60)
        kill(signal.SIGINT)
        raise AssertionError("the interrupt was held")

    thread = threading.Thread(target=work)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        call()
    thread.join()

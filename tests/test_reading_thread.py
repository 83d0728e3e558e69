"""The thread that reads ahead: jobs in order, errors handed over, nothing left behind."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import pytest

from loader import CapacityError
from loader.reading_thread import ReadingThread

PATIENCE = 300


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "qpn-read"]


def test_jobs_run_in_order_beside_the_caller() -> None:
    own = threading.get_ident()
    seen: list[tuple[int, bool]] = []

    def job(number: int) -> Callable[[], float]:
        def run() -> float:
            seen.append((number, threading.get_ident() == own))
            return number / 2

        return run

    thread = ReadingThread()
    assert readers() == [], "it starts with its first job"
    for number in range(5):
        thread.begin(job(number))
    assert [thread.result() for _ in range(5)] == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert seen == [(number, False) for number in range(5)]
    thread.close()
    thread.close()
    assert readers() == []


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), MemoryError()])
def test_what_a_job_raises_is_raised_where_it_is_due(error: BaseException) -> None:
    def fails() -> float:
        raise error

    thread = ReadingThread()
    thread.begin(lambda: 1.0)
    thread.begin(fails)
    thread.begin(lambda: 2.0)
    assert thread.result() == 1.0
    with pytest.raises(type(error)) as caught:
        thread.result()
    assert caught.value is error
    assert thread.result() == 2.0, "the thread goes on"
    thread.close()


def test_close_waits_for_the_job_that_runs() -> None:
    inside, go_on, done = threading.Event(), threading.Event(), []

    def slow() -> float:
        inside.set()
        go_on.wait(PATIENCE)
        done.append(1)
        return 0.0

    thread = ReadingThread()
    thread.begin(slow)
    assert inside.wait(PATIENCE)
    threading.Timer(0.05, go_on.set).start()
    thread.close()
    assert done == [1] and readers() == []


def test_it_ends_once_nobody_refers_to_it() -> None:
    thread = ReadingThread()
    thread.begin(lambda: 1.0)
    assert thread.result() == 1.0
    (running,) = readers()
    del thread
    gc.collect()
    running.join(PATIENCE)
    assert not running.is_alive()


def test_a_finished_job_is_held_by_nobody() -> None:
    class Buffer:
        pass

    def job_of(buffer: Buffer) -> Callable[[], float]:
        return lambda: float(buffer is not None)

    thread = ReadingThread()
    held = Buffer()
    gone = weakref.ref(held)
    thread.begin(job_of(held))
    del held
    assert thread.result() == 1.0
    thread.begin(lambda: 0.0)  # the thread is past the first one now
    thread.result()
    assert gone() is None
    thread.close()


def test_a_thread_that_cannot_start_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    thread = ReadingThread()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(CapacityError, match="a thread could not be started"):
            thread.begin(lambda: 0.0)
    thread.close()

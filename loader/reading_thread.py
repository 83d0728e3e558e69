"""Reading thread: runs one job after the other beside the caller, and hands out what they returned.

Its queues are C's: an interrupt while the caller waits leaves nothing locked, as it may within the
locks of ``concurrent.futures``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

from loader import memory

Job = Callable[[], float]
_Jobs = SimpleQueue[Job | None]
_Results = SimpleQueue[float | BaseException]


def _serve(jobs: _Jobs, results: _Results) -> None:
    while (job := jobs.get()) is not None:
        try:
            results.put(job())
        except BaseException as error:
            results.put(error)
        del job  # a job holds buffers, and may be the last to do so


class ReadingThread:
    """Started by its first job, ended by :meth:`close`, or once nobody refers to it."""

    def __init__(self) -> None:
        self._jobs: _Jobs = SimpleQueue()
        self._results: _Results = SimpleQueue()
        self._thread = threading.Thread(
            target=_serve, args=(self._jobs, self._results), name="qpn-read", daemon=True
        )
        self._last = weakref.finalize(self, self._jobs.put, None)

    def begin(self, job: Job) -> None:
        """Run a job after those begun before. Raises :class:`loader.CapacityError`."""
        if self._thread.ident is None:
            memory.start_thread(self._thread)
        self._jobs.put(job)

    def result(self) -> float:
        """What the next job returned, once it has; raises what it raised."""
        found = self._results.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self) -> None:
        """Wait for the job that runs, and end the thread; may be called again."""
        self._last()
        if self._thread.ident is not None:
            self._thread.join()

"""Open file: one descriptor that a source holds, and who is reading from it.

An interrupt may come between any two lines. So what nobody refers to any more is over by itself:
a use that never came to its end counts no longer, and a descriptor that was lost is closed.
"""

from __future__ import annotations

import errno
import io
import resource
import threading
import weakref

LEAST_DESCRIPTORS = 8
UNLIMITED_DESCRIPTORS = 1024  # used where the process has no limit of its own


def descriptor_bound() -> int:
    """Most files that one source keeps open: a quarter of the process's limit, at least eight."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = UNLIMITED_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft // 4
    return max(LEAST_DESCRIPTORS, limit)


class Use:
    """One use of an open file by one thread, until ``over``, or until it is forgotten."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.thread = threading.get_ident()
        self.over = False


class OpenFile:
    """Owns ``descriptor``. Its methods are called under the lock of its source."""

    def __init__(self, descriptor: int) -> None:
        self._file = io.FileIO(descriptor)
        self._uses: list[weakref.ref[Use]] = []

    def use(self) -> Use:
        """The caller says when it is over."""
        use = Use(self._file.fileno())
        self._uses = [one for one in self._uses if _is_on(one())] + [weakref.ref(use)]
        return use

    def in_use(self, but: int | None = None) -> bool:
        """Whether a thread, ``but`` for one, reads from it."""
        return any(_is_on(one(), but) for one in self._uses)

    def close(self) -> None:
        """Give the descriptor back; may be called again."""
        try:
            self._file.close()
        except OSError as error:
            if error.errno != errno.EBADF:  # someone else has closed it: nothing is left to do
                raise


def _is_on(use: Use | None, but: int | None = None) -> bool:
    return use is not None and not use.over and use.thread != but

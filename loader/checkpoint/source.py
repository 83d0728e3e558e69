"""The one door to the files of a checkpoint: list, size, read at an offset.

Everything that reads goes through a :class:`Source`, so that a recording reader, a faulty one or
HTTP ranges can stand where the local folder stands.
"""

from __future__ import annotations

import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Protocol, runtime_checkable

from loader.checkpoint.disk import hub_blobs, read_at, regular_files, stat_of
from loader.checkpoint.open_file import OpenFile, Use, descriptor_bound
from loader.checkpoint.wording import shown
from loader.errors import CheckpointError, LifecycleError, LoaderError, described
from loader.rollback import SignalsHeld

LIST_DEPTH = 3  # folders below the checkpoint's own; deeper files can be read but are not listed

_LOOK_AGAIN_SECONDS = 0.1  # a use that an interrupt cut short ends without a word
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO must not block


class MissingFileError(CheckpointError):
    """A file that the checkpoint speaks of does not exist."""


@runtime_checkable
class Source(Protocol):
    """A set of files that can be read at an offset. Names are relative and use ``/``.

    Reads may come from several threads at once. ``folder`` is the local folder, if there is one.
    """

    @property
    def name(self) -> str:
        """What errors and reports call it."""

    @property
    def folder(self) -> Path | None:
        """The local folder, None where there is none."""

    def list(self) -> list[str]:
        """Names of the files, sorted."""

    def size(self, file: str) -> int:
        """Bytes of ``file``. Raises MissingFileError, CheckpointError."""

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fills the whole ``buffer`` from ``offset`` on, or raises CheckpointError."""

    @property
    def lends_descriptors(self) -> bool:
        """Whether :meth:`descriptor` can be used: the files are local."""
        ...

    def descriptor(self, file: str) -> AbstractContextManager[int]:
        """A local descriptor for native readers, open inside the block."""

    def close(self) -> None:
        """Gives everything back; may be called again."""

    def __enter__(self) -> Source: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def read_bytes(source: Source, file: str, offset: int, length: int) -> bytes:
    """``length`` bytes of ``file``, which the caller has checked. Raises CheckpointError."""
    buffer = bytearray(length)
    with _owing(file, f"{length} bytes at offset {offset}"):
        source.read_into(file, offset, memoryview(buffer))
    return bytes(buffer)


def file_size(source: Source, file: str) -> int:
    """Bytes of ``file``. Raises CheckpointError."""
    with _owing(file, "its size"):
        return source.size(file)


@contextmanager
def _owing(file: str, expected: str) -> Iterator[None]:
    """A source of someone else's owes us a CheckpointError, whatever it raises."""
    try:
        yield
    except LoaderError:
        raise
    except Exception as error:
        raise CheckpointError(
            "file cannot be read",
            file=shown(file),
            expected=expected,
            found=described(error),
        ) from error


def open_source(source: str | os.PathLike[str] | Source) -> Source:
    """A Source as it is, or the existing local folder of that name. Raises CheckpointError."""
    if not isinstance(source, (str, os.PathLike)):
        if isinstance(source, Source):
            return source
        raise CheckpointError(
            "source is not valid",
            expected="a folder, a Hub repo id or a Source",
            found=repr(source),
        )
    return LocalSource(source)


def check_name(file: str) -> None:
    """Refuses a name that is not the plain relative name of a file below the folder."""
    fault = None
    if not file:
        fault = "the name is empty"
    elif "\0" in file:
        fault = "the name holds a NUL"
    elif file.startswith("/"):
        fault = "the name is absolute"
    elif ".." in file.split("/"):
        fault = "the name leaves the folder"
    elif any(part in ("", ".") for part in file.split("/")):
        fault = "the name is not in its plain form"
    elif not file.isprintable():
        fault = "the name holds a character that cannot be printed"
    if fault is not None:
        raise CheckpointError(
            f"unsafe file name: {fault}",
            file=shown(file) or "''",
            expected="a relative name inside the model folder",
            found=shown(ascii(file)),
        )


class LocalSource:
    """A local folder. Opens read-only and lazily, and keeps few descriptors open.

    At most a quarter of the process's descriptor limit is held (at least eight), and none is
    closed while it is in use; a file is opened again only after it had to make room. What a file
    was at its first open (device, inode, size, time of change) it must still be at every use.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        descriptors: int | None = None,
        name: str | None = None,
    ) -> None:
        """``descriptors`` overrides the bound on open files, ``name`` what reports call the source.

        Raises CheckpointError.
        """
        path = os.fsdecode(folder)
        self.name = path if name is None else name
        # An empty name would be the working directory, which nobody means.
        try:
            root = os.path.realpath(path) if path and "\0" not in path else ""
        except UnicodeEncodeError:  # half of a surrogate pair: no file has such a name
            root = ""
        if not os.path.isdir(root):
            exists = bool(root) and os.path.exists(root)
            raise CheckpointError(
                "source is not a folder" if exists else "no such folder",
                file=shown(self.name) or "''",
                expected="the local folder of a checkpoint",
                found="a file" if exists else "nothing of that name",
            )
        self.folder: Path | None = Path(root)
        self.max_descriptors = descriptor_bound() if descriptors is None else descriptors
        self._root = root
        self._roots = [root, *hub_blobs(Path(root))]
        self._open: OrderedDict[str, OpenFile] = OrderedDict()  # least recently used first
        self._identities: dict[str, tuple[int, int, int, int]] = {}
        self._closed = False
        # Guards the three above. Not the condition's own `with`: an interrupt could come within it.
        self._lock = threading.RLock()
        self._freed = threading.Condition(self._lock)  # a descriptor came free

    def __repr__(self) -> str:
        return f"LocalSource({self.name!r})"

    def __enter__(self) -> LocalSource:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def list(self) -> list[str]:
        """Names of the regular files, sorted, down to ``LIST_DEPTH`` folders below."""
        self._check_open()
        return sorted(regular_files(self._root, "", LIST_DEPTH))

    def size(self, file: str) -> int:
        """Bytes of ``file``. Raises MissingFileError, CheckpointError."""
        with self._using(file):
            return self._identities[file][2]

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fills the whole ``buffer`` from ``offset`` on, or raises CheckpointError."""
        if offset < 0:  # preadv takes -1 for "where the last read ended"
            raise CheckpointError("negative offset", file=shown(file), found=offset)
        with self._using(file) as descriptor, memoryview(buffer).cast("B") as view:
            del buffer  # an error's traceback must not keep the caller's memory alive
            wanted, got = len(view), 0
            while got < wanted:
                # One call may return less than asked for: 2 GiB at most, or a signal's worth.
                with view[got:] as rest:
                    count = read_at(descriptor, rest, offset + got, file)
                if count == 0:
                    self._check_identity(file, descriptor)
                    raise CheckpointError(
                        "file ends before the range that was asked for",
                        file=file,
                        expected=f"{wanted} bytes at offset {offset}",
                        found=f"{got} bytes",
                    )
                got += count
            # Bytes read from a file that was written meanwhile are no one's checkpoint.
            self._check_identity(file, descriptor)

    @property
    def lends_descriptors(self) -> bool:
        """True: the files are local."""
        return True

    @contextmanager
    def descriptor(self, file: str) -> Iterator[int]:
        """A descriptor of ``file`` for native readers, open inside the block.

        Raises CheckpointError at the end where the file was changed meanwhile.
        """
        with self._using(file) as descriptor:
            yield descriptor
            self._check_open()
            self._check_identity(file, descriptor)

    def close(self) -> None:
        """Closes every descriptor, once no other thread reads from it; may be called again."""
        own = threading.get_ident()
        with self._lock:
            self._closed = True
            while any(one.in_use(but=own) for one in self._open.values()):
                self._freed.wait(_LOOK_AGAIN_SECONDS)
            with SignalsHeld():
                while self._open:
                    self._open.popitem()[1].close()
            self._freed.notify_all()  # those who wait for a descriptor must learn of it

    @contextmanager
    def _using(self, file: str) -> Iterator[int]:
        """An open descriptor of ``file`` that is not closed inside the block."""
        check_name(file)
        with self._lock:
            use = self._acquire(file)
        try:
            self._check_identity(file, use.descriptor)
            yield use.descriptor
        finally:
            use.over = True
            with self._lock:
                self._freed.notify_all()

    def _acquire(self, file: str) -> Use:
        while True:
            self._check_open()
            opened = self._open.get(file)
            if opened is not None:
                break
            if len(self._open) < self.max_descriptors or self._close_idle():
                with SignalsHeld():  # a descriptor that is open has an owner
                    opened = OpenFile(_open_regular(self._path_of(file), file))
                    self._open[file] = opened
                break
            self._freed.wait(_LOOK_AGAIN_SECONDS)
        self._open.move_to_end(file)
        return opened.use()

    def _close_idle(self) -> bool:
        for file, opened in self._open.items():
            if not opened.in_use():
                del self._open[file]
                opened.close()
                return True
        return False

    def _check_open(self) -> None:
        if self._closed:
            raise LifecycleError("the source was closed", file=shown(self.name))

    def _path_of(self, file: str) -> str:
        """The real path of ``file``, inside the folder or where the Hub cache keeps its bytes."""
        path = os.path.realpath(os.path.join(self._root, file))
        if not any(path.startswith(root.rstrip("/") + "/") for root in self._roots):
            raise CheckpointError(
                "file lies outside the model folder",
                file=shown(file),
                expected=f"a file below {self._root}",
                found=shown(path),
            )
        return path

    def _check_identity(self, file: str, descriptor: int) -> None:
        now = stat_of(descriptor, file)
        identity = (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns)
        first = self._identities.setdefault(file, identity)
        if identity != first:
            labels = ("device", "inode", "size", "time of change")
            changed = [i for i in range(4) if identity[i] != first[i]]
            raise CheckpointError(
                "file changed while loading",
                file=file,
                expected=", ".join(f"{labels[i]} {first[i]}" for i in changed),
                found=", ".join(f"{labels[i]} {identity[i]}" for i in changed),
            )


def _open_regular(path: str, file: str) -> int:
    try:
        descriptor = os.open(path, _OPEN_FLAGS)
    except (FileNotFoundError, NotADirectoryError):
        raise MissingFileError(
            "file does not exist", file=shown(file), found=f"nothing at {shown(path)}"
        ) from None
    except OSError as error:
        raise CheckpointError(
            "file cannot be opened", file=shown(file), found=error.strerror
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError("not a regular file", file=shown(file), found=shown(path))
    return descriptor

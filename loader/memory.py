"""Memory: where tensors of a load live, and the counters that say what they cost.

Host banks and staging are anonymous mappings of their own: what is freed is back with the
operating system at once, whatever the C allocator does. Pages arrive small, since a huge page is
cleared whole long before its last byte is written; once a layer is complete the kernel may merge
them (:func:`merge_pages`).
"""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType

import psutil
import torch

from loader.core import CORE
from loader.errors import CapacityError, LoaderError, clear_frames
from loader.rollback import SignalsHeld

_MAP_AT = 1 << 20
"""Host tensors from this size on get a mapping of their own."""


_watchers: tuple[weakref.ref[Callable[[torch.Tensor], None]], ...] = ()


def watch(watcher: Callable[[torch.Tensor], None]) -> None:
    """Tell a watcher of every tensor that :func:`fresh` makes, for as long as the watcher lives.

    For tests of what a load leaves behind. It is called in the thread that makes the tensor.
    """
    global _watchers
    _watchers = (*(one for one in _watchers if one() is not None), weakref.ref(watcher))


def fresh(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor whose storage is exactly its bytes."""
    tensor = _uninitialised(shape, dtype, device)
    for one in _watchers:
        watcher = one()
        if watcher is not None:
            watcher(tensor)
    return tensor


def _uninitialised(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    nbytes = prod(shape) * dtype.itemsize
    # What a load makes outlives it: a tensor of inference mode could not be written outside of it.
    with torch.inference_mode(False):
        if device.type != "cpu" or nbytes < _MAP_AT or not hasattr(mmap, "MAP_ANONYMOUS"):
            return torch.empty(shape, dtype=dtype, device=device)
        tensor = mapped(shape, dtype)
        if CORE is not None:
            CORE.populate(tensor)
        return tensor


def mapped(shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """A host tensor in pages of its own, whatever its size; its bytes are 0."""
    nbytes = prod(shape) * dtype.itemsize
    region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        region.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(region, dtype=dtype).view(shape)


def merge_pages(tensors: Iterable[torch.Tensor]) -> None:
    """Let the kernel merge the small pages of host tensors that are written, in its own time.

    Reading a bank takes fewer address translations then. A hint: a kernel may have no huge pages.
    """
    if _LIBC is None or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.nbytes >= _MAP_AT:
            start = tensor.data_ptr()
            if start % mmap.PAGESIZE == 0:
                _LIBC.madvise(
                    ctypes.c_void_p(start), ctypes.c_size_t(tensor.nbytes), mmap.MADV_HUGEPAGE
                )


_OUT_OF_MEMORY = ("out of memory", "not enough memory", "allocate memory")
"""What torch says where it has no class for it: its allocator of the host, and CUDA beside its
allocator of the card."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python, of the system or of torch says that there was no memory."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


@contextmanager
def allocating(
    what: str, nbytes: int, layer: int | None = None, predicted_peak: int | None = None
) -> Iterator[None]:
    """Make a failed allocation inside the block a :class:`CapacityError` that says what for.

    ``predicted_peak`` is what the plan had said of the whole load, in bytes. What the system or
    torch refuses for another reason is a :class:`LoaderError` that quotes it.
    """
    try:
        yield
    except LoaderError:
        raise
    except (MemoryError, OSError, RuntimeError) as error:  # of Python, of mmap, of torch
        if not is_out_of_memory(error):
            quoted = f"{type(error).__name__}: {error}"
            raise LoaderError(f"{what} could not be made", layer=layer, found=quoted) from error
        raise CapacityError(
            f"memory for {what} could not be allocated",
            layer=layer,
            expected=f"{nbytes} bytes"
            + (f" of a predicted peak of {predicted_peak} bytes" if predicted_peak else ""),
            found=f"{type(error).__name__}: {error}",
        ) from error


@contextmanager
def uncollected() -> Iterator[None]:
    """Put off the collector of cycles: a header's worth of small objects makes it walk all others.

    What the block makes is kept as columns, and holds no cycles.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def nothing_kept(on_card: bool = False) -> Iterator[None]:
    """An error that leaves the block keeps no memory: not in its frames, not in the allocator.

    Where memory ran out and nobody has said what for, that becomes a :class:`CapacityError`.
    """
    handled = sys.exc_info()[1]
    try:
        yield
    except BaseException as error:
        clear_frames(error, handled)
        return_to_system()
        if on_card and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        if is_out_of_memory(error):
            raise CapacityError("memory ran out", found=str(error) or None) from error
        raise


def start_thread(thread: threading.Thread) -> None:
    """Start a thread, whole: an interrupt comes before it is there, or when it runs.

    Raises :class:`CapacityError` where that cannot be done.
    """
    try:
        with SignalsHeld():
            thread.start()
    except RuntimeError as error:
        raise CapacityError(
            "a thread could not be started",
            expected="room for one more thread",
            found=f"{type(error).__name__}: {error}",
        ) from error


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind some tensors."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr(), str(tensor.device)] = storage.nbytes()
    return sum(storages.values())


def return_to_system() -> None:
    """Give free pages of the C allocator back to the operating system (glibc only)."""
    if _TRIM is not None:
        _TRIM(0)


def _find_trim(libc: ctypes.CDLL | None) -> ctypes._NamedFuncPointer | None:
    try:
        return None if libc is None else libc.malloc_trim
    except AttributeError:  # no glibc: musl returns pages on its own
        return None


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_TRIM = _find_trim(_LIBC)


@dataclass(frozen=True)
class HostMemory:
    """Resident memory of this process, in bytes: anonymous + shared, and file-backed."""

    anonymous: int
    file: int


def host_memory() -> HostMemory:
    """``RssAnon + RssShmem`` and ``RssFile``; off Linux the resident size counts as anonymous."""
    if sys.platform != "linux":
        return HostMemory(int(psutil.Process().memory_info().rss), 0)
    kib = {"RssAnon:": 0, "RssShmem:": 0, "RssFile:": 0}
    try:
        lines = Path("/proc/self/status").read_bytes().splitlines()
    except OSError as error:  # no descriptor is left, or no /proc is mounted
        raise LoaderError(
            "the memory of the process cannot be counted",
            file="/proc/self/status",
            found=error.strerror,
        ) from error
    for line in lines:
        name = line.split(None, 1)[0].decode()
        if name in kib:
            kib[name] = int(line.split()[1])
    return HostMemory((kib["RssAnon:"] + kib["RssShmem:"]) << 10, kib["RssFile:"] << 10)


def host_baseline() -> HostMemory:
    """:func:`host_memory` before a load, with free pages of the C allocator given back first.

    As part of a baseline they would hide what a load takes, which fills them or gives them back.
    """
    return_to_system()
    return host_memory()


def host_uss() -> int:
    """Unique set size of this process in bytes, as psutil counts it."""
    return int(psutil.Process().memory_full_info().uss)


class HostPeak:
    """Highest host counters between ``__enter__`` and ``__exit__``, sampled by a thread.

    ``sample`` may be called at moments that matter, such as after a chunk was converted.
    """

    def __init__(self, interval_seconds: float = 0.004) -> None:
        self._interval = interval_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="qpn-memory", daemon=True)
        self.anonymous = 0
        self.file = 0

    def sample(self) -> HostMemory:
        """Take one sample now."""
        now = host_memory()
        self.anonymous = max(self.anonymous, now.anonymous)
        self.file = max(self.file, now.file)
        return now

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self.sample()

    def stop(self) -> None:
        """End the sampling thread; may be called again, and before the thread was started."""
        with SignalsHeld():  # an event that is interrupted while it is set stays locked
            self._stop.set()
            if self._thread.is_alive():
                self._thread.join()

    def __enter__(self) -> HostPeak:
        self.sample()
        try:
            start_thread(self._thread)
        except BaseException:  # an interrupt as the thread has started finds it running
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

"""Watch: weak views of memory, that say whether it is still there without keeping it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path

import psutil
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from loader import memory


class Storages:
    """The distinct storages behind some tensors, weakly, each with its bytes.

    Storages, not tensors: a view keeps the memory without keeping the tensor.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: torch.Tensor) -> None:
        """Watch the storage of one more tensor."""
        storage = tensor.untyped_storage()
        weak = StorageWeakRef(storage)
        self._storages[weak.cdata] = (weak, storage.nbytes())

    def alive(self) -> int:
        """Bytes of the storages that somebody still holds."""
        # A copy: a load may add to them from another thread.
        return sum(n for weak, n in list(self._storages.values()) if not weak.expired())


class Allocations:
    """The storages that one thread's loads make between :meth:`start` and :meth:`stop`, weakly."""

    def __init__(self) -> None:
        self.storages = Storages()
        self._thread: int | None = None
        memory.watch(self)

    def start(self) -> None:
        """Forget what was, and watch what this thread makes from now on."""
        self.storages = Storages()
        self._thread = threading.get_ident()

    def stop(self) -> None:
        """Whatever is made now belongs to somebody else."""
        self._thread = None

    def __call__(self, tensor: torch.Tensor) -> None:
        """What ``memory.watch`` calls for every tensor that is made."""
        if threading.get_ident() == self._thread:
            self.storages.add(tensor)


def counters() -> dict[str, int]:
    """Bytes in use by counter: anonymous memory of the host, allocated memory of each card."""
    found = {"host anonymous": memory.host_memory().anonymous}
    if torch.cuda.is_initialized():
        for number in range(torch.cuda.device_count()):
            found[f"cuda:{number} allocated"] = torch.cuda.memory_allocated(number)
    return found


def files_in_use(folder: str | os.PathLike[str]) -> list[str]:
    """Names of safetensors files below a folder that this process has open or mapped."""
    root = Path(folder).resolve()
    process = psutil.Process()
    paths = {Path(one.path) for one in process.open_files()}
    # Only some systems tell what a process maps; there open files are all that can be checked.
    if psutil.LINUX or psutil.WINDOWS:
        paths |= {Path(one.path) for one in process.memory_maps()}
    return sorted(p.name for p in paths if p.suffix == ".safetensors" and root in p.parents)

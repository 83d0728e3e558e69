"""Library: the native host code, found beside the package and opened once.

It is plain C++ behind a C interface: it links no PyTorch and no Python, so that one build serves
every PyTorch, and calls release the GIL. Where it was not built, ``LIBRARY`` is None and the
readers and the reference in Python serve; ``WHY_NO_LIBRARY`` says why, and a load logs it once.
"""

from __future__ import annotations

import ctypes
import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

_LIBRARY = "_core"
_INTERFACE = 3
"""``qpn_interface`` of csrc/host/api.cpp: a library of other sources is not called."""


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _interface_of(library: ctypes.CDLL) -> int:
    try:
        return int(library.qpn_interface())
    except AttributeError:  # from before interfaces had numbers
        return 0


def open_library(path: Path, interface: int = _INTERFACE) -> ctypes.CDLL:
    """The library at ``path``. Raises OSError where it is none, or one of other sources."""
    library = ctypes.CDLL(str(path))
    found = _interface_of(library)
    if found != interface:
        raise OSError(f"it has interface {found}, not {interface}: build the package again")
    return library


def find_library() -> tuple[ctypes.CDLL | None, str]:
    """The library from beside this file; or None, and why Python serves instead."""
    here = Path(__file__).parent
    for suffix in (*EXTENSION_SUFFIXES, ".so"):
        path = here / f"{_LIBRARY}{suffix}"
        if path.exists():
            try:
                return open_library(path), ""
            except OSError as error:
                return None, f"the native core cannot be used: {error}"
    return None, f"the native core was not built: there is no {here / _LIBRARY}*"


LIBRARY, WHY_NO_LIBRARY = find_library()

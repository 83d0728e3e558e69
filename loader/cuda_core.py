"""CUDA core: the native library for cards, found beside the package.

Built like the host core: a C interface through ``ctypes``, no PyTorch and no Python inside, so that
one build serves every PyTorch. Where it was not built, ``CUDA_CORE`` is None and cards are refused;
``WHY_NO_CUDA_CORE`` says why.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

from loader.core import NativeLayer, raise_native
from loader.errors import LoaderError
from loader.library import open_library
from loader.reference.findings import none
from loader.structs import Error

LIBRARY = "_cuda.so"
_INTERFACE = 1
"""``qpn_interface`` of csrc/launch/api.cu: a library of other sources is not called."""
_FAILED_CUDA = 4


class CudaError(LoaderError):
    """A call of CUDA that failed, in CUDA's own words."""


class CudaCore:
    """The loaded library. ``architectures`` has machine code, ``portable`` code to translate."""

    def __init__(self, path: Path) -> None:
        self.library = open_library(path, _INTERFACE)
        self.library.qpn_architectures.restype = ctypes.c_char_p
        self.library.qpn_ring_close.restype = None
        names = self.library.qpn_architectures().decode().split()
        self.architectures = tuple(int(name) for name in names if not name.endswith("+"))
        self.portable = tuple(int(name[:-1]) for name in names if name.endswith("+"))
        version = int(self.library.qpn_cuda_version())
        self.cuda_version = f"{version // 1000}.{version % 1000 // 10}"

    def has_image(self, architecture: int) -> bool:
        """Whether a card of that architecture (90 for SM 9.0) can run this library.

        Machine code runs on cards of its major number from its own minor number on.
        """
        exact = any(
            own // 10 == architecture // 10 and own <= architecture for own in self.architectures
        )
        return exact or any(own <= architecture for own in self.portable)

    def images(self) -> str:
        """The architectures of the build, as they are shown."""
        return ", ".join(
            [f"sm_{own}" for own in self.architectures]
            + [f"compute_{own} and newer" for own in self.portable]
        )

    def check(self, code: int, error: Error) -> None:
        """Raise what a call refused, failed to read, or what CUDA said; nothing for success."""
        if code == _FAILED_CUDA:
            raise CudaError(error.what.decode(), found=f"CUDA error {error.error}")
        raise_native(code, error)

    def write(
        self,
        chunk: torch.Tensor,
        descriptors: torch.Tensor,
        banks: Sequence[torch.Tensor],
        state: torch.Tensor,
        spec: list[int],
    ) -> torch.Tensor:
        """``qpn::write`` of a chunk (uint8, on the card), enqueued on the current stream.

        ``descriptors`` int64 (pieces, 12) on the host; ``state`` is the layer's conversion cache,
        in which findings wait: what is returned is always empty.
        """
        table = descriptors.contiguous()
        error = Error()
        code = self.library.qpn_card_write(
            *_place(chunk.device),
            ctypes.c_void_p(chunk.data_ptr()),
            ctypes.c_int64(chunk.nbytes),
            ctypes.c_void_p(table.data_ptr()),
            ctypes.c_int64(table.shape[0]),
            *NativeLayer(spec, banks).arguments(),
            ctypes.c_void_p(state.data_ptr()),
            ctypes.c_int64(state.nbytes),
            ctypes.byref(error),
        )
        self.check(code, error)
        return none()

    def finish(
        self, banks: Sequence[torch.Tensor], state: torch.Tensor, spec: list[int]
    ) -> torch.Tensor:
        """``qpn::finish``, the closing pass of one layer; as :meth:`write`."""
        error = Error()
        code = self.library.qpn_card_finish(
            *_place(state.device),
            *NativeLayer(spec, banks).arguments(),
            ctypes.c_void_p(state.data_ptr()),
            ctypes.c_int64(state.nbytes),
            ctypes.byref(error),
        )
        self.check(code, error)
        return none()

    def pin(self, memory: torch.Tensor, device: torch.device) -> None:
        """Pin host memory in place. Raises :class:`CudaError` where that is refused."""
        error = Error()
        code = self.library.qpn_pin(
            ctypes.c_int(index_of(device)),
            ctypes.c_void_p(memory.data_ptr()),
            ctypes.c_int64(memory.nbytes),
            ctypes.byref(error),
        )
        self.check(code, error)

    def unpin(self, memory: torch.Tensor) -> None:
        """Undo :meth:`pin`; nothing may be copying from the memory any more."""
        error = Error()
        self.check(
            self.library.qpn_unpin(ctypes.c_void_p(memory.data_ptr()), ctypes.byref(error)), error
        )


def index_of(device: torch.device) -> int:
    """Number of a card; the current one where the device names none."""
    return torch.cuda.current_device() if device.index is None else int(device.index)


def stream_of(device: torch.device) -> ctypes.c_void_p:
    """The current stream of a card, as native calls take it."""
    return ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)


def _place(device: torch.device) -> tuple[ctypes.c_int, ctypes.c_void_p]:
    return ctypes.c_int(index_of(device)), stream_of(device)


def find_cuda_core() -> tuple[CudaCore | None, str]:
    """The library from beside this file; or None, and why there is none."""
    path = Path(__file__).parent / LIBRARY
    if not path.exists():
        return None, (
            "native code for cards was not built: building the package needs nvcc and a PyTorch "
            "with CUDA"
        )
    try:
        return CudaCore(path), ""
    except OSError as error:
        return None, f"native code for cards cannot be used: {error}"


CUDA_CORE, WHY_NO_CUDA_CORE = find_cuda_core()

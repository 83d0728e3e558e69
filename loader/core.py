"""Core: the native host library behind the operators; ``CORE`` is None where it was not built."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence

import torch

from loader.errors import CapacityError, CheckpointError
from loader.library import LIBRARY, usable_cores
from loader.reference.findings import FIELDS
from loader.structs import FLOATS, Error, Linear, Moe

_LAYER_NUMBERS = 21
_FINDINGS_EACH = 3
"""Most kinds of finding that one piece, or one expert of one bank, can have."""


class DescriptorError(ValueError):
    """A descriptor that does not fit its buffers; ``subject`` is its index."""

    def __init__(self, subject: int, what: str) -> None:
        super().__init__(f"descriptor {subject}: {what}")
        self.subject = subject


class ReadError(CheckpointError):
    """A read that failed or came up short, inside a native call."""


class NativeLayer:
    """A layer as calls take it: its numbers, and its tensors as addresses and byte counts."""

    def __init__(self, spec: list[int], tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if not tensor.is_contiguous():
                raise ValueError("native code takes contiguous tensors")
        count = len(tensors)
        self._count = count
        self._numbers = (ctypes.c_int64 * _LAYER_NUMBERS)(*spec)
        self._addresses = (ctypes.c_void_p * count)(*(t.data_ptr() for t in tensors))
        self._sizes = (ctypes.c_int64 * count)(*(t.nbytes for t in tensors))

    def arguments(self) -> tuple[object, ...]:
        """The four arguments of every call, in their order."""
        return (self._numbers, self._addresses, self._sizes, ctypes.c_int64(self._count))


class Core:
    """The loaded library. ``threads`` is how many cores a call may use; ``isa`` which code."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._library.qpn_moe_scratch.restype = ctypes.c_int64
        self._library.qpn_linear_scratch.restype = ctypes.c_int64
        self._library.qpn_isa_name.restype = ctypes.c_char_p
        self.best_isa = int(self._library.qpn_isa())
        self.isa = self.best_isa
        self.threads = usable_cores()
        # Read buffer of each thread: small enough to stay in its cache until it is converted.
        self.buffer_bytes = 1 << 20

    def isa_name(self) -> str:
        """The instruction set in use, as it is shown."""
        return str(self._library.qpn_isa_name(self.isa).decode())

    def populate(self, memory: torch.Tensor) -> None:
        """Make the pages of a fresh, page-aligned mapping present; a hint, nothing can fail."""
        self._library.qpn_populate(
            ctypes.c_void_p(memory.data_ptr()),
            ctypes.c_int64(memory.nbytes),
            ctypes.c_int(self.threads),
        )

    def write(
        self,
        chunk: torch.Tensor,
        descriptors: torch.Tensor,
        banks: Sequence[torch.Tensor],
        cache: torch.Tensor,
        spec: list[int],
    ) -> torch.Tensor:
        """``qpn::write`` from memory; see ``loader/reference/convert.py`` for the contract."""
        source = (ctypes.c_void_p(chunk.data_ptr()), -1, chunk.nbytes)
        return self._write(source, descriptors, banks, cache, None, spec)

    def read(
        self,
        file: int,
        file_bytes: int,
        descriptors: torch.Tensor,
        banks: Sequence[torch.Tensor],
        cache: torch.Tensor,
        buffers: torch.Tensor,
        spec: list[int],
    ) -> torch.Tensor:
        """``qpn::read``: as ``write``, from a descriptor; ``offset`` counts from the file's start.

        ``buffers`` uint8 (threads, bytes): a read buffer for each. Raises :class:`ReadError`.
        """
        return self._write((None, file, file_bytes), descriptors, banks, cache, buffers, spec)

    def _write(
        self,
        source: tuple[ctypes.c_void_p | None, int, int],
        descriptors: torch.Tensor,
        banks: Sequence[torch.Tensor],
        cache: torch.Tensor,
        buffers: torch.Tensor | None,
        spec: list[int],
    ) -> torch.Tensor:
        memory, file, nbytes = source
        table = descriptors.contiguous()
        threads = self.threads if buffers is None else min(self.threads, buffers.shape[0])
        each = 0 if buffers is None else buffers.shape[1]
        layer = NativeLayer(spec, banks)

        def call(findings: torch.Tensor, found: ctypes.c_int64, error: Error) -> int:
            return int(
                self._library.qpn_write(
                    memory,
                    ctypes.c_int(file),
                    ctypes.c_int64(nbytes),
                    ctypes.c_void_p(table.data_ptr()),
                    ctypes.c_int64(table.shape[0]),
                    *layer.arguments(),
                    ctypes.c_void_p(cache.data_ptr()),
                    ctypes.c_int64(cache.nbytes),
                    ctypes.c_int(self.isa),
                    ctypes.c_int(threads),
                    ctypes.c_void_p(0 if buffers is None else buffers.data_ptr()),
                    ctypes.c_int64(each),
                    ctypes.c_void_p(findings.data_ptr()),
                    ctypes.c_int64(findings.shape[0]),
                    ctypes.byref(found),
                    ctypes.byref(error),
                )
            )

        return _checked(call, _FINDINGS_EACH * table.shape[0])

    def finish(
        self, banks: Sequence[torch.Tensor], cache: torch.Tensor, spec: list[int]
    ) -> torch.Tensor:
        """``qpn::finish``; see ``loader/reference/convert.py`` for the contract."""
        layer = NativeLayer(spec, banks)

        def call(findings: torch.Tensor, found: ctypes.c_int64, error: Error) -> int:
            return int(
                self._library.qpn_finish(
                    *layer.arguments(),
                    ctypes.c_void_p(cache.data_ptr()),
                    ctypes.c_int64(cache.nbytes),
                    ctypes.c_int(self.threads),
                    ctypes.c_void_p(findings.data_ptr()),
                    ctypes.c_int64(findings.shape[0]),
                    ctypes.byref(found),
                    ctypes.byref(error),
                )
            )

        return _checked(call, _FINDINGS_EACH * 2 * banks[0].shape[0])

    def moe(
        self,
        out: torch.Tensor,
        scratch: torch.Tensor,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        expert_map: torch.Tensor,
        banks: Sequence[torch.Tensor],
        spec: list[int],
    ) -> None:
        """One step of the fast routes; see ``loader/reference/routes.py`` for the contract.

        ``x``, ``out``, ``topk_ids`` and ``topk_weights`` are contiguous. Raises ``ValueError``
        where ``scratch`` is smaller than :meth:`moe_scratch_bytes`.
        """
        step = Moe(
            x.shape[0],
            topk_ids.shape[1],
            expert_map.numel(),
            FLOATS[x.dtype],
            FLOATS[topk_weights.dtype],
            int(topk_ids.dtype == torch.int64),
            scratch.nbytes,
            x.data_ptr(),
            topk_ids.data_ptr(),
            topk_weights.data_ptr(),
            expert_map.data_ptr(),
            out.data_ptr(),
            scratch.data_ptr(),
        )
        self._run(self._library.qpn_moe, (ctypes.byref(step),), banks, spec)

    def _run(
        self,
        function: Callable[..., int],
        arguments: tuple[object, ...],
        banks: Sequence[torch.Tensor],
        spec: list[int],
    ) -> None:
        """A call that reads banks; what it refuses is a ``ValueError``."""
        layer, error = NativeLayer(spec, banks), Error()
        code = function(
            *arguments,
            *layer.arguments(),
            ctypes.c_int(self.isa),
            ctypes.c_int(self.threads),
            ctypes.byref(error),
        )
        _require_done(code, error)

    def moe_scratch_bytes(self, spec: list[int], tokens: int, top_k: int) -> int:
        """Scratch that :meth:`moe` needs for so many tokens."""
        numbers = (ctypes.c_int64 * _LAYER_NUMBERS)(*spec)
        return int(
            self._library.qpn_moe_scratch(numbers, ctypes.c_int64(tokens), ctypes.c_int64(top_k))
        )

    def linear(
        self,
        out: torch.Tensor,
        scratch: torch.Tensor,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        banks: Sequence[torch.Tensor],
        spec: list[int],
    ) -> None:
        """One linear straight from its bank; see ``loader/reference/linear.py`` for the contract.

        ``x``, ``out`` and ``bias`` are contiguous. Raises ``ValueError`` where ``scratch`` is
        smaller than :meth:`linear_scratch_bytes`.
        """
        step = Linear(
            x.shape[0],
            FLOATS[x.dtype],
            0 if bias is None else FLOATS[bias.dtype],
            scratch.nbytes,
            x.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            scratch.data_ptr(),
        )
        self._run(self._library.qpn_linear, (ctypes.byref(step),), banks, spec)

    def linear_scratch_bytes(self, spec: list[int], tokens: int) -> int:
        """Scratch that :meth:`linear` needs for so many tokens."""
        numbers = (ctypes.c_int64 * _LAYER_NUMBERS)(*spec)
        return int(self._library.qpn_linear_scratch(numbers, ctypes.c_int64(tokens)))

    def dequantize(
        self,
        out: torch.Tensor,
        bank: int,
        slot: int,
        tiles: tuple[int, int],
        banks: Sequence[torch.Tensor],
        spec: list[int],
    ) -> None:
        """Weights of tiles [first, last) of one expert into ``out`` fp32 (columns, K)."""
        where = (
            ctypes.c_int(bank),
            ctypes.c_int64(slot),
            ctypes.c_int64(tiles[0]),
            ctypes.c_int64(tiles[1]),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_int64(out.numel()),
        )
        self._run(self._library.qpn_dequantize, where, banks, spec)


_Call = Callable[[torch.Tensor, ctypes.c_int64, Error], int]
_REFUSED, _FAILED_READ, _NO_MEMORY = 1, 2, 3


def raise_native(code: int, error: Error) -> None:
    """Raise what a native call refused or failed to read; nothing for a call that went well."""
    what = error.what.decode()
    if code == _FAILED_READ:
        reason = f": {os.strerror(error.error)}" if error.error else ""
        raise ReadError(
            f"{what}{reason}",
            expected=f"{error.wanted} bytes at offset {error.offset}",
            found=f"{error.got} bytes",
        )
    if code == _REFUSED and error.subject >= 0:
        raise DescriptorError(int(error.subject), what)
    _require_done(code, error)


def _checked(call: _Call, room: int) -> torch.Tensor:
    """Run a native call; its findings, or the error it names."""
    findings = torch.empty((room, len(FIELDS)), dtype=torch.int64, device="cpu")
    found, error = ctypes.c_int64(0), Error()
    raise_native(call(findings, found, error), error)
    return findings[: found.value].clone()


def _require_done(code: int, error: Error) -> None:
    """Raise what a call returned: CapacityError where memory ran out, else ValueError."""
    if code == _NO_MEMORY:
        raise CapacityError(error.what.decode())
    if code:
        raise ValueError(error.what.decode())


CORE = None if LIBRARY is None else Core(LIBRARY)

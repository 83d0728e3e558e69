"""Converter: one layer's banks and conversion cache, and the calls that fill them.

``write(chunk, descriptors)`` and ``finish()`` are the whole interface: arrays of descriptors,
never one call per expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from loader import memory, native
from loader.bank import LayerSpec, initialise, named
from loader.card import CardPool
from loader.errors import CapacityError, ConversionError, LoaderError
from loader.spots import spots_bytes

CACHE_GLOBALS = 3
"""fp32 numbers that each expert keeps in the conversion cache: globals of gate, up, down."""


def cache_bytes(spec: LayerSpec) -> int:
    """Bytes of the conversion cache of one layer: globals wait only for NVFP4 ``wide``."""
    waits = spec.w2.kind == "e2m1" and spec.w2.layout == "wide"
    return spec.w2.experts * CACHE_GLOBALS * 4 if waits else 0


def card_cache_bytes(spec: LayerSpec) -> int:
    """The same on a card, where the table of what was found wrong lies before the globals."""
    return -(-(spots_bytes(spec.w2.experts) + cache_bytes(spec)) // 8) * 8


@dataclass(eq=False)
class LayerBanks:
    """The tensors of W13 then W2, in the order of ``BankSpec.tensors``."""

    spec: LayerSpec
    tensors: list[torch.Tensor]

    @classmethod
    def allocate(cls, spec: LayerSpec, device: torch.device, zero_point: int | None) -> LayerBanks:
        """Uninitialised banks with pads (and absent zero points) already set."""
        tensors = [memory.fresh(t.shape, t.dtype, device) for b in spec.banks for t in b.tensors()]
        banks = cls(spec, tensors)
        for bank, part in zip(spec.banks, banks.split(), strict=True):
            initialise(bank, named(bank, part), zero_point)
        return banks

    def split(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Tensors of W13, tensors of W2."""
        count = len(self.spec.w13.tensors())
        return self.tensors[:count], self.tensors[count:]


class ConversionCache:
    """Every temporary tensor that converting one layer needs; released exactly once.

    ``released`` is how often :meth:`release` ran; a second call is an error, a discarded cache was
    dropped by a failure. On a card it lies in a memory pool of its own.
    """

    def __init__(self, spec: LayerSpec, device: torch.device) -> None:
        self._pool: CardPool | None = None
        self._state: torch.Tensor | None = None
        if device.type == "cpu":
            count = cache_bytes(spec) // 4
            shape = (count // CACHE_GLOBALS, CACHE_GLOBALS)
            self._state = memory.fresh(shape, torch.float32, device)
        else:
            self._pool = CardPool(device)
            with self._pool.allocating():
                self._state = memory.fresh((card_cache_bytes(spec),), torch.uint8, device).zero_()
        self._spots_bytes = spots_bytes(spec.w2.experts)
        self.nbytes = self._state.nbytes
        self.released = 0

    @property
    def globals(self) -> torch.Tensor:
        """fp32 (experts, 3), or (0, 3) where nothing waits; on a card uint8, spots before them."""
        assert self._state is not None, "the conversion cache was released"
        return self._state

    def spots(self) -> torch.Tensor | None:
        """The table of ``loader/spots.py`` on the host; None where it is empty, or on the host.

        Waits for the card: whatever was enqueued for the layer is done afterwards.
        """
        if self._pool is None:
            return None
        table = self.globals[: self._spots_bytes]
        return table.cpu() if int(table[:8].view(torch.int64)) else None

    def release(self) -> int:
        """Drop the cache and give its memory back to the system; returns its bytes."""
        assert self._state is not None, "the conversion cache was released twice"
        self._drop()
        self.released += 1
        if self._pool is None:
            memory.return_to_system()
        return self.nbytes

    def discard(self) -> None:
        """Drop the cache after a failure; this is not a release."""
        self._drop()

    def _drop(self) -> None:
        self._state = None
        if self._pool is not None:
            self._pool.close()


@dataclass(eq=False)
class LayerConverter:
    """Fills the banks of one layer; what ``findings`` holds is for the caller to judge."""

    banks: LayerBanks
    cache: ConversionCache
    _spec: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._spec = self.banks.spec.to_ints()

    def reshape(self, spec: LayerSpec) -> None:
        """Go on with banks of another spec, whose tensors the caller has already put in place."""
        self.banks.spec = spec
        self._spec = spec.to_ints()

    def write(self, chunk: torch.Tensor, descriptors: torch.Tensor) -> torch.Tensor:
        """Convert the pieces of one chunk (uint8); returns findings int64 (n, 6).

        On a card this returns when the work is enqueued, and what is found waits for :meth:`spots`.
        """
        findings: torch.Tensor = native.write(
            chunk, descriptors, self.banks.tensors, self.cache.globals, self._spec
        )
        return findings

    def read(
        self, file: int, file_bytes: int, descriptors: torch.Tensor, buffers: torch.Tensor
    ) -> torch.Tensor:
        """Convert pieces of a local file; ``offset`` counts from its start. As :meth:`write`."""
        findings: torch.Tensor = native.read(
            file,
            file_bytes,
            descriptors,
            self.banks.tensors,
            self.cache.globals,
            buffers,
            self._spec,
        )
        return findings

    def finish(self) -> torch.Tensor:
        """Complete metadata that needed more than one tensor; returns findings int64 (n, 6)."""
        findings: torch.Tensor = native.finish(self.banks.tensors, self.cache.globals, self._spec)
        return findings

    def spots(self) -> torch.Tensor | None:
        """What a card counted as wrong in the layer, None for nothing; see the cache."""
        return self.cache.spots()


_Result = TypeVar("_Result")


def guarded(layer: int | None, call: Callable[[], _Result]) -> _Result:
    """Run a converter call; what is no error of this library becomes one, with its cause."""
    try:
        return call()
    except LoaderError as error:
        raise error.at(layer=layer) from error
    except Exception as error:
        if memory.is_out_of_memory(error):
            what, found = "memory ran out while converting", str(error) or None
            raise CapacityError(what, layer=layer, found=found) from error
        raise ConversionError(
            f"the converter failed: {type(error).__name__}: {error}", layer=layer
        ) from error

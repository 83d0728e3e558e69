"""Arguments: what a call on a card was given, held against what it needs, before any launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from loader.bank import TensorSpec
from loader.errors import LoaderError

BOUNDARY = 16
"""Bytes: kernels read and write rows of activations in vectors of that size."""


@dataclass(frozen=True)
class Arguments:
    """The checks of one call; ``of`` is what the arguments belong to, ``device`` where all lie."""

    of: str
    device: torch.device

    def require(
        self,
        name: str,
        tensor: torch.Tensor,
        shape: tuple[int, ...],
        dtypes: Sequence[torch.dtype],
        boundary: int = 1,
    ) -> None:
        """Raise :class:`LoaderError` for a tensor of another shape, dtype, place or order."""
        if tuple(tensor.shape) != shape:
            self.refuse(f"the shape of {name}", shape, tuple(tensor.shape))
        if tensor.dtype not in dtypes:
            self.refuse(f"the dtype of {name}", " or ".join(map(str, dtypes)), tensor.dtype)
        if tensor.device != self.device or tensor.device.type != "cuda":
            self.refuse(f"the device of {name}", "one card for all", tensor.device)
        if not tensor.is_contiguous():
            self.refuse(f"the strides of {name}", "contiguous", tensor.stride())
        if tensor.data_ptr() % boundary:
            self.refuse(f"the address of {name}", f"a multiple of {boundary}", tensor.data_ptr())

    def require_banks(self, specs: Sequence[TensorSpec], banks: Sequence[torch.Tensor]) -> None:
        """Raise :class:`LoaderError` for banks that are not those of the spec, or lie elsewhere."""
        wanted = [(spec.shape, spec.dtype) for spec in specs]
        found = [(tuple(bank.shape), bank.dtype) for bank in banks]
        if wanted != found:
            self.refuse("the banks", wanted, found)
        for bank in banks:
            if bank.device != self.device or not bank.is_contiguous():
                expected = f"contiguous on {self.device}"
                self.refuse("a bank", expected, f"{bank.stride()} on {bank.device}")

    def require_apart(self, out: torch.Tensor, others: Mapping[str, torch.Tensor]) -> None:
        """Raise :class:`LoaderError` where ``out`` shares memory with another tensor."""
        first, last = out.data_ptr(), out.data_ptr() + out.nbytes
        for name, tensor in others.items():
            if tensor.data_ptr() < last and first < tensor.data_ptr() + tensor.nbytes:
                self.refuse("out", f"memory apart from {name}", "an overlap")

    def refuse(self, what: str, expected: object, found: object) -> NoReturn:
        """Raise the error of one argument."""
        raise LoaderError(f"{what} does not match the {self.of}", expected=expected, found=found)

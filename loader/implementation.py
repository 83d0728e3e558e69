"""Implementation: the code that serves the operators on one kind of device, as a value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from loader.bank import LayerSpec
from loader.cuda_core import CudaCore

Write = Callable[
    [torch.Tensor, torch.Tensor, Sequence[torch.Tensor], torch.Tensor, list[int]], torch.Tensor
]
Finish = Callable[[Sequence[torch.Tensor], torch.Tensor, list[int]], torch.Tensor]


@dataclass(frozen=True)
class Implementation:
    """Code that serves the operators on one kind of device.

    ``dtypes`` are activation dtypes; ``routes`` what it can run; ``kinds`` and ``layouts`` the
    banks that its fast routes read; ``temporary_bytes`` bounds what converting takes beside the
    staging ring and the conversion cache; ``reads_files`` says that it serves ``read``, with
    ``threads`` buffers of ``buffer_bytes`` each. ``fp32_scales`` says that it converts int4 scales
    of 32 bits, and finds which 16-bit format holds them. ``scratch_bytes(layers, tokens, top_k)``
    is the scratch that steps of up to so many tokens need, ``most_tokens(layer, top_k)`` how many
    one step of the fast routes takes (None: any). ``linear`` and ``linear_scratch_bytes(spec,
    tokens)`` serve linears from banks, ``dequantize(out, bank, slot, tiles, banks, spec)`` gives
    weights fp32; None where the code has none. ``card`` is the core of a card, which reads files
    through a ring of its own, ``architecture`` the card's (90 is SM 9.0; 0 on the host).
    ``row_multiple`` divides H and I of what the fast routes take.
    """

    name: str
    device_type: str
    dtypes: tuple[torch.dtype, ...]
    routes: tuple[str, ...]
    kinds: tuple[str, ...]
    layouts: tuple[str, ...]
    group_multiple: int
    temporary_bytes: int
    write: Write
    finish: Finish
    moe: Callable[..., None]
    scratch_bytes: Callable[[Sequence[LayerSpec], int, int], int]
    linear: Callable[..., None] | None = None
    linear_scratch_bytes: Callable[[list[int], int], int] | None = None
    dequantize: Callable[..., None] | None = None
    most_tokens: Callable[[LayerSpec, int], int] | None = None
    read: Callable[..., torch.Tensor] | None = None
    threads: int = 1
    buffer_bytes: int = 0
    fp32_scales: bool = False
    card: CudaCore | None = None
    architecture: int = 0
    row_multiple: int = 1

    @property
    def reads_files(self) -> bool:
        """True where native code takes bytes from a local file itself."""
        return self.read is not None or self.card is not None

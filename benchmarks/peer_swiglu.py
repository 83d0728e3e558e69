"""SwiGLU for peers: their own lies in a library that is not loaded. One Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _swiglu(inner, both, width, block: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton types it
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    there = columns < width
    gate = tl.load(both + row * 2 * width + columns, there).to(tl.float32)
    up = tl.load(both + row * 2 * width + width + columns, there).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(inner + row * width + columns, y.to(inner.dtype.element_ty), there)


def silu_and_mul(inner: torch.Tensor, both: torch.Tensor) -> None:
    """``inner`` (rows, I) = silu(``both`` (rows, 2 I), first half) * second half."""
    rows, width = inner.shape
    _swiglu[(rows, triton.cdiv(width, _BLOCK))](inner, both, width, _BLOCK)

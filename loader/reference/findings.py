"""Finding: a value in the payload that the converter cannot pass on in silence.

The converter reports rows of six int64 instead of raising, so that one pass serves both
``nonfinite="error"`` and ``"warn"``, and so that device code can report too.
"""

from __future__ import annotations

from enum import IntEnum

import torch

FIELDS = ("subject", "kind", "count", "row", "column", "bits")
"""``subject``: descriptor index in ``write``; bank * experts + slot in ``finish``. ``count`` values
are wrong; the first of them stands at (``row``, ``column``) with the raw ``bits``: the group and
the column of its projection on this card (in ``finish`` of its bank), for checks the index."""


class Kind(IntEnum):
    """What is wrong with a value."""

    NONFINITE = 0  #: NaN or Inf scale, NaN e4m3 byte
    GLOBAL = 1  #: global scale not positive and finite, or a divisor without a finite reciprocal
    ZERO_POINT = 2  #: zero point other than 8 where the config says symmetric
    SHAPE = 3  #: weight_shape disagrees with the packed tensor
    GROUPS = 4  #: g_idx is neither i // group nor all -1
    NOT_HELD = 5  #: fp16 cannot hold the value that the layout stores
    NOT_FP16 = 6  #: a scale of 32 bits that fp16 does not hold exactly; no fault by itself
    NOT_BF16 = 7  #: the same of bf16


def none() -> torch.Tensor:
    """No findings: ``(0, 6) int64``."""
    return torch.empty((0, len(FIELDS)), dtype=torch.int64, device="cpu")


def first_bad(
    subject: int,
    kind: Kind,
    bad: torch.Tensor,
    bits: torch.Tensor,
    row: int = 0,
    column: int = 0,
) -> list[list[int]]:
    """One finding for a mask ``(rows, columns) bool``, or none; ``bits`` are the raw values."""
    count = int(bad.sum())
    if not count:
        return []
    at = int(bad.flatten().to(torch.uint8).argmax())
    width = bad.shape[-1]
    value = int(bits.flatten()[at])
    return [[subject, int(kind), count, row + at // width, column + at % width, value]]


def table(rows: list[list[int]]) -> torch.Tensor:
    """Findings as a tensor ``(findings, 6) int64``."""
    return torch.tensor(rows, dtype=torch.int64, device="cpu") if rows else none()

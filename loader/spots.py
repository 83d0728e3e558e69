"""Spots: the table in which a card counts what is wrong in one layer, fetched once at its end.

One spot for each kind, projection and expert of the pieces, one for each bank and expert of the
closing pass, and a first one that counts all, so that a sound layer costs one small copy.
"""

from __future__ import annotations

import numpy as np
import torch

from loader.checkpoint.catalog import Ints
from loader.checkpoint.scheme import Role
from loader.pieces import Pieces
from loader.reference.findings import FIELDS, Kind

SPOT = np.dtype(
    [
        ("count", np.uint64),
        ("rank", np.uint64),  # ~(row << 32 | column) of the first in row-major order
        ("bits", np.int64),
        ("lock", np.int32),
        ("reserved", np.int32),
    ]
)
"""``Spot`` of ``csrc/device/spots.cuh``."""

_PROJECTIONS = 3
_OF_PIECES = len(Kind) * _PROJECTIONS
_WIDE = (Role.SCALES_GN32, Role.SCALES_NG32)

_ROLES = {
    Kind.NONFINITE: (Role.SCALES_GN, Role.SCALES_NG, Role.SCALES_NG8, *_WIDE),
    Kind.GLOBAL: (Role.GLOBAL_F32, Role.GLOBAL_BF16),
    Kind.ZERO_POINT: (Role.ZEROS_GN, Role.ZEROS_NG),
    Kind.SHAPE: (Role.CHECK_SHAPE,),
    Kind.GROUPS: (Role.CHECK_GROUPS,),
    Kind.NOT_HELD: (Role.SCALES_GN, Role.SCALES_NG, *_WIDE),
    Kind.NOT_FP16: _WIDE,
    Kind.NOT_BF16: _WIDE,
}
"""Which pieces can have a finding of a kind."""


def spots_bytes(experts: int) -> int:
    """Bytes of the table of one layer."""
    return (1 + (_OF_PIECES + 2) * experts) * SPOT.itemsize


def counts_of(table: torch.Tensor, kind: Kind, bank: int, experts: int) -> torch.Tensor:
    """How many values of a kind each expert of a bank has in the table: a view to read and clear.

    int64, (projections of the bank, experts).
    """
    counts = table.view(torch.int64)[SPOT.itemsize // 8 :: SPOT.itemsize // 8]
    of_kind = counts[kind * _PROJECTIONS * experts :][: _PROJECTIONS * experts].view(-1, experts)
    return of_kind[2:] if bank else of_kind[:2]


def findings_of_spots(
    table: torch.Tensor, pieces: Pieces, experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Findings int64 (n, 6) of all pieces of a layer, and of its closing pass, from the table.

    ``table`` uint8 (``spots_bytes``,) on the host. Subjects are indices of ``pieces``, for the
    closing pass bank * experts + slot; a tensor that was read in several pieces has one finding.
    """
    spots = table.numpy().view(SPOT)[1:]
    rows = np.flatnonzero(spots["count"]).astype(np.int64)
    first = ~spots["rank"][rows]
    found = np.empty((len(rows), len(FIELDS)), np.int64)
    found[:, 1] = np.where(rows < _OF_PIECES * experts, rows // experts // _PROJECTIONS, 0)
    found[:, 2] = spots["count"][rows]
    found[:, 3] = first >> np.uint64(32)
    found[:, 4] = first & np.uint64(0xFFFFFFFF)
    found[:, 5] = spots["bits"][rows]
    closing = rows >= _OF_PIECES * experts
    found[closing, 0] = rows[closing] - _OF_PIECES * experts
    found[closing, 1] = Kind.NOT_HELD
    for index in np.flatnonzero(~closing):
        projection, slot = divmod(int(rows[index]) % (_PROJECTIONS * experts), experts)
        found[index, 0] = _subject(pieces, Kind(found[index, 1]), projection, slot)
    of_pieces = found[~closing]
    order = np.lexsort((of_pieces[:, 1], of_pieces[:, 0]))
    return torch.from_numpy(of_pieces[order].copy()), torch.from_numpy(found[closing].copy())


def _subject(pieces: Pieces, kind: Kind, projection: int, slot: int) -> int:
    """The first piece, in the order they were read, that a spot can stand for."""
    own: Ints = (
        np.isin(pieces["role"], _ROLES[kind])
        & (pieces["projection"] == projection)
        & (pieces["slot"] == slot)
    )
    return int(own.argmax())

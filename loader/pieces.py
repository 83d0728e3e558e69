"""Piece: the bytes of one source tensor that one card needs, and where their numbers go.

Pieces are rows of one structured array, never objects: a layer of 512 experts has thousands. A
piece is a run of whole source rows; columns to skip are read along and not used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from loader.bank import LayerSpec
from loader.checkpoint.catalog import Ints
from loader.checkpoint.family import DOWN, GATE, GATE_UP, UP
from loader.checkpoint.scheme import Role
from loader.checkpoint.tables import LayerSource, Table
from loader.errors import CapacityError

DESCRIPTOR_FIELDS = (
    "role",  # Role
    "bank",  # 0 = W13, 1 = W2
    "projection",  # 0 = gate, 1 = up, 2 = down
    "slot",  # local expert
    "offset",  # byte offset of the first row in the chunk
    "rows",  # source rows
    "row_bytes",  # bytes from one source row to the next
    "skip",  # bytes from the start of a row to the first column that is used
    "cols",  # columns used: features, groups or plain numbers
    "dest_row",  # where the first row lands: feature or group index in the bank
    "expect_a",  # CHECK_SHAPE: N; CHECK_GROUPS: group; ZEROS: 8 where they must be 8, else -1
    "expect_b",  # CHECK_SHAPE: K
)
"""Columns of a descriptor, all int64; ``csrc/`` mirrors their order."""

BUFFER_QUANTUM = 64
"""Read buffers are multiples of so many bytes, so that each one begins aligned."""

PIECE = np.dtype(
    [
        *((name, np.int64) for name in DESCRIPTOR_FIELDS),
        ("file", np.int64),  # index into the catalog's files
        ("begin", np.int64),  # absolute file offset of the first row
        ("tensor", np.int64),  # catalog row, for error messages
        ("row_features", np.int64),  # features of axis 0 in one row
        ("row_quantum", np.int64),  # rows that must stay together
    ]
)
Pieces = npt.NDArray[np.void]


@dataclass(frozen=True)
class Slice:
    """This card's part of a layer: global ids by slot, and the run of the intermediate size.

    ``outs`` is the run of W2's output features (first, count); None means all, as experts have it.
    """

    expert_ids: tuple[int, ...]
    offset: int
    count: int
    outs: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False)
class Cut:
    """What the pieces of layers that are alike have in common, in the order of their tables.

    ``tensor`` counts the rows of the tables, one table behind the other, ``begin`` the bytes of a
    tensor; ``file`` is 0.
    """

    pieces: Pieces

    def at(self, source: LayerSource, places: Places) -> Pieces:
        """The pieces of one layer, in file order."""
        rows = np.concatenate([table.rows for table in source.tables])[self.pieces["tensor"]]
        file, begin = places.file[rows], places.begin[rows] + self.pieces["begin"]
        order = np.argsort(_position(file, begin), kind="stable")
        pieces: Pieces = self.pieces[order]
        pieces["tensor"], pieces["file"], pieces["begin"] = rows[order], file[order], begin[order]
        return pieces

    @property
    def nbytes(self) -> int:
        """Of the table of pieces of one layer."""
        return self.pieces.nbytes

    @cached_property
    def source_bytes(self) -> int:
        """Bytes of whole rows that the pieces take, those that several of them take once."""
        pieces = self.pieces
        # Pieces of fused experts can share rows (gate and up columns).
        places = np.stack((pieces["tensor"], pieces["begin"]))
        rows = np.unique(places, axis=1, return_index=True)[1]
        return int((pieces["rows"][rows] * pieces["row_bytes"][rows]).sum())

    @cached_property
    def smallest_bytes(self) -> int:
        """Of the largest run of rows that must stay together."""
        return _smallest_bytes(self.pieces)


@dataclass(frozen=True, eq=False)
class Places:
    """Where each source tensor lies, by the rows that tables name: file index and first byte."""

    file: Ints
    begin: Ints
    _cuts: dict[object, Cut] = field(default_factory=dict, repr=False)

    def cut(self, source: LayerSource, part: Slice, spec: LayerSpec) -> Cut:
        """How a layer is cut for one card; made once for all layers that are alike."""
        tables = tuple(
            (t.projection, t.role, t.arrangement, t.element_bytes, t.shape, len(t.rows))
            for t in source.tables
        )
        sizes = (source.hidden, source.intermediate, source.group13, source.group2)
        key = (tables, sizes, source.fused, source.zeros_must_be_eight, part, spec)
        known = self._cuts.get(key)
        if known is None:
            known = self._cuts[key] = _cut(source, part, spec)
        return known


def build_pieces(source: LayerSource, places: Places, part: Slice, spec: LayerSpec) -> Pieces:
    """Pieces of one layer for one card, in file order, not yet split to a chunk's size."""
    return places.cut(source, part, spec).at(source, places)


def _cut(source: LayerSource, part: Slice, spec: LayerSpec) -> Cut:
    firsts = np.cumsum([0, *(len(table.rows) for table in source.tables)]).tolist()
    return Cut(
        np.concatenate(
            [
                _pieces_of(table, first, projection, source, part, spec)
                for table, first in zip(source.tables, firsts[:-1], strict=True)
                for projection in _projections(table)
            ]
        )
    )


def split_pieces(pieces: Pieces, limit: int) -> Pieces:
    """Cut pieces larger than ``limit`` bytes into runs of rows.

    Raises :class:`CapacityError` where even the smallest run of rows is larger.
    """
    sizes = pieces["rows"] * pieces["row_bytes"]
    if not (sizes > limit).any():
        return pieces
    if _smallest_bytes(pieces) > limit:
        raise CapacityError(
            "staging_bytes is too small for the largest rows of this checkpoint",
            expected=f"at least {minimum_staging(pieces)} bytes",
            found=f"{limit} bytes for one read buffer",
        )
    quantum = pieces["row_quantum"]
    rows_each = np.maximum(limit // pieces["row_bytes"] // quantum, 1) * quantum
    rows_each = np.where(sizes > limit, rows_each, pieces["rows"])
    counts = -(-pieces["rows"] // rows_each)
    parent = np.repeat(np.arange(len(pieces)), counts)
    cut = np.arange(len(parent)) - np.repeat(np.cumsum(counts) - counts, counts)
    result = pieces[parent]
    first = cut * rows_each[parent]
    result["rows"] = np.minimum(rows_each[parent], pieces["rows"][parent] - first)
    result["begin"] += first * result["row_bytes"]
    result["dest_row"] += first * result["row_features"]
    order = np.argsort(_position(result["file"], result["begin"]), kind="stable")
    return result[order]


def minimum_staging(pieces: Pieces | Cut, buffers: int = 2) -> int:
    """Smallest staging budget, in bytes, that can hold every smallest run of rows."""
    smallest = pieces.smallest_bytes if isinstance(pieces, Cut) else _smallest_bytes(pieces)
    return -(-smallest // BUFFER_QUANTUM) * BUFFER_QUANTUM * buffers


def _smallest_bytes(pieces: Pieces) -> int:
    rows = np.minimum(pieces["row_quantum"], pieces["rows"])
    return int((rows * pieces["row_bytes"]).max())


def _position(file: Ints, begin: Ints) -> Ints:
    """One sortable number for file and offset; files are far below 2**44 bytes."""
    position: Ints = (file << 44) + begin
    return position


def _projections(table: Table) -> tuple[int, ...]:
    if table.projection != GATE_UP:
        return (table.projection,)
    one_is_enough = table.role in (Role.CHECK_SHAPE, Role.CHECK_GROUPS)
    return (GATE,) if one_is_enough else (GATE, UP)


def _pieces_of(
    table: Table,
    first: int,
    projection: int,
    source: LayerSource,
    part: Slice,
    spec: LayerSpec,
) -> Pieces:
    ids = np.asarray(part.expert_ids, np.int64)
    pieces = np.zeros(len(ids), PIECE)
    one_expert = int(np.prod(table.shape, dtype=np.int64)) * table.element_bytes
    pieces["tensor"] = first + (0 if source.fused else ids)
    pieces["begin"] = ids * one_expert if source.fused else 0
    pieces["role"] = table.role
    pieces["bank"] = int(projection == DOWN)
    pieces["projection"] = projection
    pieces["slot"] = np.arange(len(ids))
    pieces["row_features"] = pieces["row_quantum"] = 1
    pieces["expect_a"] = pieces["expect_b"] = -1
    if table.role in (Role.GLOBAL_F32, Role.GLOBAL_BF16):
        _global(pieces, table, projection)
    elif table.role in (Role.CHECK_SHAPE, Role.CHECK_GROUPS):
        _check(pieces, table, source)
    else:
        _matrix(pieces, table, projection, source, part, spec)
    return pieces


def _global(pieces: Pieces, table: Table, projection: int) -> None:
    both = table.projection == GATE_UP and table.shape == (2,)
    pieces["begin"] += table.element_bytes * (both and projection == UP)
    pieces["rows"] = pieces["cols"] = 1
    pieces["row_bytes"] = table.element_bytes


def _check(pieces: Pieces, table: Table, source: LayerSource) -> None:
    down = table.projection == DOWN
    width = 2 * source.intermediate if table.projection == GATE_UP else source.intermediate
    pieces["rows"] = 1
    pieces["cols"] = table.shape[0]
    pieces["row_bytes"] = table.shape[0] * table.element_bytes
    if table.role == Role.CHECK_GROUPS:
        pieces["expect_a"] = source.group2 if down else source.group13
    else:
        pieces["expect_a"] = source.hidden if down else width
        pieces["expect_b"] = source.intermediate if down else source.hidden


def _matrix(
    pieces: Pieces,
    table: Table,
    projection: int,
    source: LayerSource,
    part: Slice,
    spec: LayerSpec,
) -> None:
    arrangement = table.arrangement
    assert arrangement is not None
    if projection == DOWN:
        first_group = part.offset // source.group2
        runs = {
            "n": part.outs or (0, source.hidden),
            "k": (part.offset, part.count),
            "g": (first_group, spec.w2.groups),
        }
    else:
        up_rows = source.intermediate * (table.projection == GATE_UP and projection == UP)
        runs = {
            "n": (up_rows + part.offset, part.count),
            "k": (0, source.hidden),
            "g": (0, spec.w13.groups),
        }
    (row_axis, col_axis), (row_per, col_per) = arrangement.axes, arrangement.per
    first_row, rows = runs[row_axis]
    first_col, cols = runs[col_axis]
    row_bytes = table.shape[1] * table.element_bytes
    pieces["begin"] += first_row // row_per * row_bytes
    pieces["rows"] = -(-rows // row_per)
    pieces["row_bytes"] = row_bytes
    pieces["skip"] = first_col // col_per * table.element_bytes
    pieces["cols"] = cols
    pieces["row_features"] = row_per
    pieces["row_quantum"] = arrangement.row_quantum
    if table.role in (Role.ZEROS_GN, Role.ZEROS_NG) and source.zeros_must_be_eight:
        pieces["expect_a"] = 8


def descriptors_of(pieces: Pieces) -> Ints:
    """The pieces as ``(pieces, 12) int64``, columns ``DESCRIPTOR_FIELDS``."""
    table = np.empty((len(pieces), len(DESCRIPTOR_FIELDS)), np.int64)
    for column, name in enumerate(DESCRIPTOR_FIELDS):
        table[:, column] = pieces[name]
    return table

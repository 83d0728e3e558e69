"""Chunk: what one read buffer holds at one time, and the reads that fill it.

A layer's pieces are walked in file order. Neighbours are read together, gaps under 4 KiB
included; runs that lie apart share a buffer, so that a layer of scattered small tensors still
takes few calls.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loader.checkpoint.catalog import Ints
from loader.pieces import Pieces, descriptors_of

GAP_BYTES = 4096
"""Largest gap between two pieces that is read along instead of starting another read."""

ALIGNMENT = 64
"""A read keeps its file offset modulo this in the buffer: what is aligned in the file stays so."""


@dataclass(frozen=True)
class Read:
    """One contiguous read: file index, file offset, length, and where it lands in the buffer."""

    file: int
    offset: int
    length: int
    at: int


@dataclass(frozen=True, eq=False)
class Chunk:
    """The reads of one buffer, and the pieces they hold with ``offset`` set."""

    reads: tuple[Read, ...]
    pieces: Pieces

    @property
    def bytes_read(self) -> int:
        """Bytes taken from files, gaps included."""
        return sum(read.length for read in self.reads)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffer up to the end of the last read."""
        return max(read.at + read.length for read in self.reads)

    def descriptors(self) -> Ints:
        """The pieces as the table that ``write`` takes."""
        return descriptors_of(self.pieces)


def build_chunks(pieces: Pieces, limit: int) -> list[Chunk]:
    """Walk pieces (sorted, each at most ``limit`` bytes) into chunks of at most ``limit`` bytes."""
    begins = pieces["begin"]
    ends, run_ends = _runs(pieces)
    chunks: list[Chunk] = []
    reads: list[Read] = []
    start = at = used = 0
    while at < len(pieces):
        begin = int(begins[at])
        place = -(-used // ALIGNMENT) * ALIGNMENT + begin % ALIGNMENT
        run_end = int(run_ends[at])
        stop = at + int(np.searchsorted(ends[at:run_end], begin + limit - place, side="right"))
        lone = stop == at
        if lone:
            # A lone piece of nearly the whole buffer may not afford its alignment.
            if reads:
                chunks.append(_close(pieces, start, at, reads))
                reads, start, used = [], at, 0
                continue
            place, stop = 0, at + 1
        length = int(ends[stop - 1]) - begin
        reads.append(Read(int(pieces["file"][at]), begin, length, place))
        pieces["offset"][at:stop] = place + begins[at:stop] - begin
        at, used = stop, place + length
        if lone or at < run_end:
            chunks.append(_close(pieces, start, at, reads))
            reads, start, used = [], at, 0
    if reads:
        chunks.append(_close(pieces, start, at, reads))
    return chunks


def _runs(pieces: Pieces) -> tuple[Ints, Ints]:
    """For each piece: the furthest end so far in its run of neighbours, and where the run stops."""
    begins = pieces["begin"]
    position = pieces["file"] << 44
    furthest = np.maximum.accumulate(position + begins + pieces["rows"] * pieces["row_bytes"])
    apart = (position + begins)[1:] - furthest[:-1] > GAP_BYTES
    breaks = np.flatnonzero(apart | (np.diff(pieces["file"]) != 0)) + 1
    edges = np.concatenate((breaks, [len(pieces)]))
    run_ends = edges[np.searchsorted(breaks, np.arange(len(pieces)), side="right")]
    return furthest - position, run_ends


def _close(pieces: Pieces, start: int, stop: int, reads: list[Read]) -> Chunk:
    return Chunk(tuple(reads), pieces[start:stop])

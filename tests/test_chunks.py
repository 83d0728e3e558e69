"""Chunks: every byte that a piece needs is in its buffer, at its offset, and little else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loader.chunks import ALIGNMENT, GAP_BYTES, Chunk, build_chunks
from loader.pieces import DESCRIPTOR_FIELDS, PIECE, Pieces

FIELDS = list(DESCRIPTOR_FIELDS)


def content(file: int, begin: int, length: int) -> np.ndarray:
    """Bytes of a made-up file: each depends on its file and its place."""
    at = np.arange(begin, begin + length, dtype=np.uint64)
    return ((at * np.uint64(2654435761) + np.uint64(file * 97)) >> np.uint64(7)).astype(np.uint8)


def filled(chunk: Chunk) -> np.ndarray:
    buffer = np.zeros(chunk.buffer_bytes, np.uint8)
    for read in chunk.reads:
        assert read.length > 0
        place = buffer[read.at : read.at + read.length]
        assert not place.any(), "two reads of one chunk overlap in the buffer"
        place[:] = content(read.file, read.offset, read.length) | 1
    return buffer


def pieces_of(spans: list[tuple[int, int, int]]) -> Pieces:
    """Pieces from (file, begin, bytes), sorted as ``build_pieces`` sorts; rows of up to 16 bytes"""
    pieces = np.zeros(len(spans), PIECE)
    for number, (file, begin, size) in enumerate(sorted(spans)):
        row = 16 if size % 16 == 0 else 1
        pieces[number]["file"], pieces[number]["begin"] = file, begin
        pieces[number]["rows"], pieces[number]["row_bytes"] = size // row, row
        pieces[number]["tensor"] = number
    return pieces


@st.composite
def layouts(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Tensors one after another with small gaps, large gaps or none, in up to three files."""
    spans = []
    for file in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, 5000))
        for _ in range(draw(st.integers(1, 12))):
            at += draw(st.sampled_from([0, 0, 0, 1, 63, GAP_BYTES, GAP_BYTES + 1, 100_000]))
            size = draw(st.integers(1, 3000))
            spans.append((file, at, size))
            if draw(st.integers(0, 7)) == 0:  # gate and up columns of one fused tensor: same rows
                spans.append((file, at, size))
            at += size
    return spans


@given(layouts(), st.integers(0, 9000))
@settings(max_examples=300, deadline=None)
def test_every_piece_is_where_its_descriptor_says(
    spans: list[tuple[int, int, int]], more: int
) -> None:
    pieces = pieces_of(spans)
    limit = int((pieces["rows"] * pieces["row_bytes"]).max()) + more
    chunks = build_chunks(pieces, limit)
    seen = np.concatenate([chunk.pieces["tensor"] for chunk in chunks])
    assert seen.tolist() == list(range(len(pieces))), "each piece once, in file order"
    for chunk in chunks:
        buffer = filled(chunk)
        assert len(buffer) <= limit
        assert chunk.bytes_read == sum(read.length for read in chunk.reads)
        for piece in chunk.pieces:
            size = int(piece["rows"] * piece["row_bytes"])
            at = int(piece["offset"])
            wanted = content(int(piece["file"]), int(piece["begin"]), size) | 1
            assert np.array_equal(buffer[at : at + size], wanted)


@given(layouts(), st.integers(0, 9000))
@example([(0, 8, 58), (0, 8, 58), (1, 0, 1), (1, 0, 1), (2, 0, 1), (2, 0, 1)], 7)
@settings(max_examples=200, deadline=None)
def test_reads_hold_small_gaps_only_and_keep_alignment(
    spans: list[tuple[int, int, int]], more: int
) -> None:
    pieces = pieces_of(spans)
    limit = int((pieces["rows"] * pieces["row_bytes"]).max()) + more
    for chunk in build_chunks(pieces, limit):
        for read in chunk.reads:
            lone = len(chunk.reads) == 1 and len(chunk.pieces) <= 1 and read.at == 0
            assert lone or read.at % ALIGNMENT == read.offset % ALIGNMENT
            used = np.zeros(read.length, bool)
            for piece in chunk.pieces[chunk.pieces["file"] == read.file]:
                first = int(piece["begin"]) - read.offset
                if 0 <= first < read.length:
                    used[first : first + int(piece["rows"] * piece["row_bytes"])] = True
            assert used[0] and used[-1], "a read begins and ends with a piece"
            gaps = "".join("x" if byte else " " for byte in used).split("x")
            assert max(map(len, gaps)) <= GAP_BYTES


def test_neighbours_are_one_read() -> None:
    spans = [(0, 640 + 100 * number, 100) for number in range(50)]
    (chunk,) = build_chunks(pieces_of(spans), 1 << 20)
    assert [(r.file, r.offset, r.length) for r in chunk.reads] == [(0, 640, 5000)]


@pytest.mark.parametrize("gap, reads", [(GAP_BYTES, 1), (GAP_BYTES + 1, 2)])
def test_the_gap_that_is_read_along(gap: int, reads: int) -> None:
    (chunk,) = build_chunks(pieces_of([(0, 0, 64), (0, 64 + gap, 64)]), 1 << 20)
    assert len(chunk.reads) == reads
    assert chunk.bytes_read == (128 + gap if reads == 1 else 128)


def test_scattered_tensors_share_a_buffer() -> None:
    spans = [(file, 100_000 * number, 64) for file in range(3) for number in range(40)]
    (chunk,) = build_chunks(pieces_of(spans), 1 << 20)
    assert len(chunk.reads) == 120 and chunk.bytes_read == 120 * 64
    assert len({read.at for read in chunk.reads}) == 120


def test_a_piece_of_the_whole_buffer() -> None:
    """The limit is the size of the piece: its alignment cannot be afforded, and it still fits."""
    chunks = build_chunks(pieces_of([(0, 7, 1000), (0, 1007, 1000), (1, 63, 1000)]), 1000)
    assert [chunk.buffer_bytes for chunk in chunks] == [1000, 1000, 1000]
    assert [read.at for chunk in chunks for read in chunk.reads] == [0, 0, 0]


def test_descriptors_are_the_columns_that_write_takes() -> None:
    pieces = pieces_of([(0, 96, 32)])
    for number, name in enumerate(FIELDS):
        pieces[name] = pieces[name] if name in ("rows", "row_bytes") else 100 + number
    (chunk,) = build_chunks(pieces, 1 << 20)
    (row,) = chunk.descriptors().tolist()
    assert chunk.descriptors().dtype == np.int64
    wanted = {name: 100 + number for number, name in enumerate(FIELDS)}
    wanted |= {"rows": 2, "row_bytes": 16, "offset": 96 % ALIGNMENT}
    assert dict(zip(FIELDS, row, strict=True)) == wanted

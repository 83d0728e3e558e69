"""Pieces: which bytes of which tensors a card needs, and how they may be cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bank_oracle import INT4, least_staging, small
from hypothesis import given, settings
from hypothesis import strategies as st

import loader
from loader.checkpoint.family import DOWN, GATE, UP
from loader.checkpoint.scheme import Role
from loader.errors import CapacityError
from loader.pieces import (
    PIECE,
    Pieces,
    Places,
    build_pieces,
    descriptors_of,
    minimum_staging,
    split_pieces,
)
from loader.testing.checkpoint import TinyCheckpoint
from loader.testing.container import model_files, read_header
from loader.testing.dialect import DIALECTS

PROJECTIONS = {GATE: "gate", UP: "up", DOWN: "down"}


def plan_of(checkpoint: TinyCheckpoint, **shard: Any) -> loader.Plan:
    return loader.plan(checkpoint.folder, shard=loader.Shard(**shard))


def extents(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Tensor name to (index of its file by name, first byte, end) by the generator's reader."""
    found = {}
    for number, path in enumerate(model_files(folder)):
        header, base = read_header(path)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            found[name] = (number, base + begin, base + end)
    return found


def span(pieces: Pieces) -> np.ndarray:
    return np.stack(
        (pieces["file"], pieces["begin"], pieces["begin"] + pieces["rows"] * pieces["row_bytes"])
    ).T


@pytest.mark.parametrize("fused", [False, True], ids=["single", "fused"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_one_card_needs_every_byte_of_every_expert_tensor(
    dialect: str, fused: bool, tmp_path: Path
) -> None:
    checkpoint = small(tmp_path, dialect=dialect, fused=fused, shards=2, shared_expert="bf16")
    plan = plan_of(checkpoint)
    files = plan.checkpoint.catalog.files
    assert list(files) == [path.name for path in model_files(checkpoint.folder)]
    unused = checkpoint.writer.input_
    names = [n for n in checkpoint.tensor_names() if ".experts." in n]
    wanted = {n: e for n, e in extents(tmp_path).items() if n in names}
    wanted = {n: e for n, e in wanted.items() if not unused or not n.endswith("." + unused)}
    pieces = plan.layers[0].pieces()
    position = list(zip(pieces["file"].tolist(), pieces["begin"].tolist(), strict=True))
    assert position == sorted(position), "pieces are in file order"
    covered: dict[str, set[int]] = {name: set() for name in wanted}
    for piece, (file, begin, end) in zip(pieces, span(pieces).tolist(), strict=True):
        name = plan.checkpoint.catalog.names[piece["tensor"]]
        where = wanted[name]
        assert file == where[0] and where[1] <= begin and end <= where[2], name
        covered[name].update(range(begin - where[1], end - where[1]))
    for name, (_, begin, end) in wanted.items():
        assert covered[name] == set(range(end - begin)), name


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_piece_names_its_tensor_projection_and_slot(dialect: str, tmp_path: Path) -> None:
    checkpoint = small(tmp_path, dialect=dialect, family="mixtral")
    plan = plan_of(checkpoint, expert_ids=(3, 1))
    pieces = plan.layers[0].pieces()
    assert set(pieces["slot"].tolist()) == {0, 1}
    for piece in pieces:
        name = plan.checkpoint.catalog.names[piece["tensor"]]
        projection = PROJECTIONS[int(piece["projection"])]
        module = checkpoint.name(0, (3, 1)[piece["slot"]], projection, "")
        assert name.startswith(module)
        assert piece["bank"] == (projection == "down")


@pytest.mark.parametrize("fused", [False, True], ids=["single", "fused"])
@pytest.mark.parametrize("dialect", ["ct-int4-asym", "modelopt-nvfp4", "awq-gemm"])
def test_expert_parallel_ranks_share_the_bytes(dialect: str, fused: bool, tmp_path: Path) -> None:
    """Each byte of one card's experts belongs to exactly one rank."""
    checkpoint = small(tmp_path, dialect=dialect, fused=fused, experts=5)
    whole = {tuple(row) for row in span(plan_of(checkpoint).layers[0].pieces()).tolist()}
    ranks = [
        {tuple(r) for r in span(plan_of(checkpoint, ep_rank=k, ep_size=3).layers[0].pieces())}
        for k in range(3)
    ]
    assert set.union(*ranks) == whole
    assert sum(map(len, ranks)) == len(whole)


@pytest.mark.parametrize("dialect", ["ct-int4-asym", "modelopt-nvfp4"])
def test_a_slice_reads_its_own_rows_only(dialect: str, tmp_path: Path) -> None:
    """Gate and up are sliced by rows (N first on disk); of down, whole rows are read along."""
    checkpoint = small(tmp_path, dialect=dialect, intermediate=256, hidden=64)
    whole, rank = (plan_of(checkpoint, tp_rank=t - 1, tp_size=t) for t in (1, 4))
    for projection in (GATE, UP, DOWN):
        full, cut = (p.layers[0].pieces() for p in (whole, rank))
        for role in set(full["role"].tolist()) - {Role.CHECK_SHAPE, Role.GLOBAL_F32}:
            sizes = [
                int((one["rows"] * one["row_bytes"]).sum())
                for pieces in (full, cut)
                if len(
                    one := pieces[(pieces["role"] == role) & (pieces["projection"] == projection)]
                )
            ]
            assert sizes[0] == sizes[1] * (1 if projection == DOWN else 4), Role(role)


def test_awq_down_is_sliced_by_rows(tmp_path: Path) -> None:
    """K first on disk: the slice of rank 1 is its rows of the codes, and every group it touches."""
    checkpoint = small(tmp_path, intermediate=384, group=128)
    plan = plan_of(checkpoint, tp_rank=1, tp_size=4)  # rows 96 to 191: groups 0 and 1, phase 96
    pieces = plan.layers[0].pieces()
    down = pieces[(pieces["projection"] == DOWN) & (pieces["slot"] == 2)]
    where = extents(tmp_path)
    by_role = {int(piece["role"]): piece for piece in down}
    codes = by_role[Role.CODES_KN]
    assert codes["begin"] - where[checkpoint.name(0, 2, "down", "qweight")][1] == 96 * 16 * 4
    assert (codes["rows"], codes["row_bytes"], codes["skip"], codes["cols"]) == (96, 64, 0, 128)
    for role, part in ((Role.SCALES_GN, "scales"), (Role.ZEROS_GN, "qzeros")):
        piece = by_role[role]
        assert piece["begin"] == where[checkpoint.name(0, 2, "down", part)][1]
        assert piece["rows"] == 2
    assert plan.layers[0].spec.w2.phase == 96


# Cutting.


@st.composite
def uncut(draw: st.DrawFn) -> Pieces:
    pieces = np.zeros(draw(st.integers(1, 8)), PIECE)
    begin = 0
    for number in range(len(pieces)):
        piece = pieces[number]
        piece["file"] = number // 3
        begin = begin * (number % 3 > 0) + draw(st.integers(0, 50))
        piece["row_quantum"] = draw(st.sampled_from([1, 4, 8, 32]))
        piece["row_features"] = draw(st.sampled_from([1, 8]))
        piece["rows"], piece["row_bytes"] = draw(st.integers(1, 200)), draw(st.integers(1, 64))
        piece["begin"], piece["tensor"], piece["cols"] = begin, number, 7 + number
        piece["skip"] = number
        begin += int(piece["rows"] * piece["row_bytes"])
    return pieces


@given(uncut(), st.integers(0, 3000))
@settings(max_examples=200, deadline=None)
def test_cut_pieces_are_the_same_bytes_in_whole_runs(pieces: Pieces, more: int) -> None:
    least = int((np.minimum(pieces["row_quantum"], pieces["rows"]) * pieces["row_bytes"]).max())
    limit = least + more
    cut = split_pieces(pieces, limit)
    assert (cut["rows"] * cut["row_bytes"] <= limit).all()
    order = list(zip(cut["file"].tolist(), cut["begin"].tolist(), strict=True))
    assert order == sorted(order)
    for whole in pieces:
        parts = cut[cut["tensor"] == whole["tensor"]]
        at = 0
        for part in parts:
            assert part["begin"] == whole["begin"] + at * whole["row_bytes"]
            assert part["dest_row"] == at * whole["row_features"]
            assert at % whole["row_quantum"] == 0
            at += int(part["rows"])
            same = set(DESCRIPTOR_KEPT)
            assert all(part[name] == whole[name] for name in same)
        assert at == whole["rows"]


DESCRIPTOR_KEPT = ("row_bytes", "skip", "cols", "file", "row_features", "row_quantum", "role")


@given(uncut(), st.integers(1, 3000))
@settings(max_examples=100, deadline=None)
def test_a_buffer_below_the_smallest_run_is_refused(pieces: Pieces, less: int) -> None:
    least = int((np.minimum(pieces["row_quantum"], pieces["rows"]) * pieces["row_bytes"]).max())
    if not least - less > 0:
        less = least
    with pytest.raises(CapacityError) as caught:
        split_pieces(pieces, least - less)
    assert str(caught.value) == (
        "staging_bytes is too small for the largest rows of this checkpoint; expected at least "
        f"{minimum_staging(pieces)} bytes, found {least - less} bytes for one read buffer"
    )
    split_pieces(pieces, minimum_staging(pieces) // 2)


@pytest.mark.parametrize("dialect", INT4)
def test_the_budget_that_the_error_names_works(dialect: str, tmp_path: Path) -> None:
    checkpoint = small(tmp_path, dialect=dialect, hidden=256)
    least = least_staging(checkpoint)
    assert loader.plan(checkpoint.folder, staging_bytes=least).staging_bytes <= least
    with pytest.raises(CapacityError):
        loader.plan(checkpoint.folder, staging_bytes=least - 1)


@pytest.mark.parametrize("fused", [False, True], ids=["single", "fused"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_layers_that_are_alike_are_cut_once(dialect: str, fused: bool, tmp_path: Path) -> None:
    """The pieces are those of each layer cut by itself; layers of other kinds share no cut."""
    checkpoint = small(tmp_path, dialect=dialect, fused=fused, layers=4, excluded=(2,), shards=3)
    plan = plan_of(checkpoint, tp_size=2, tp_rank=1)
    catalog = plan.checkpoint.catalog
    cuts = [layer.cut for layer in plan.layers]
    assert [cut is cuts[0] for cut in cuts] == [True, True, False, True]
    for layer in plan.layers:
        own = Places(catalog.file, catalog.begin)
        pieces = layer.pieces()
        assert np.array_equal(pieces, build_pieces(layer.source, own, layer.part, layer.spec))
        assert layer.cut.nbytes == pieces.nbytes
        assert minimum_staging(layer.cut, 3) == minimum_staging(pieces, 3)
        rows = {(p["file"], p["begin"]): p["rows"] * p["row_bytes"] for p in pieces}
        assert layer.source_bytes == sum(map(int, rows.values()))


def test_a_cut_is_shared_by_layers_that_are_alike_alone(tmp_path: Path) -> None:
    plan = plan_of(small(tmp_path, dialect="awq-gemm"))
    layer, catalog = plan.layers[0], plan.checkpoint.catalog
    source, spec = layer.source, layer.spec
    others = [
        (source, layer.part, replace(spec, awq_rounding="fused_bias")),
        (replace(source, tables=source.tables[1:]), layer.part, spec),
        (replace(source, zeros_must_be_eight=not source.zeros_must_be_eight), layer.part, spec),
        (source, replace(layer.part, expert_ids=layer.part.expert_ids[1:]), spec),
    ]
    for other in others:
        both = Places(catalog.file, catalog.begin)
        build_pieces(source, both, layer.part, spec)
        own, part, banks = other
        found = build_pieces(own, both, part, banks)
        alone = build_pieces(own, Places(catalog.file, catalog.begin), part, banks)
        assert np.array_equal(found, alone)


def test_descriptors_have_their_documented_columns(tmp_path: Path) -> None:
    pieces = plan_of(small(tmp_path)).layers[0].pieces()
    documented = (
        "role bank projection slot offset rows row_bytes skip cols dest_row expect_a expect_b"
    )
    table = descriptors_of(pieces)
    assert table.shape == (len(pieces), 12)
    for column, name in enumerate(documented.split()):
        assert np.array_equal(table[:, column], pieces[name]), name

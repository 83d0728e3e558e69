"""The reference converter, piece by piece: any order, any place in a chunk, and what it finds."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bank_oracle import assert_same, expected, layouts, poisoned, small
from hypothesis import given, settings
from hypothesis import strategies as st

import loader
from loader.bank import BankSpec, LayerSpec
from loader.checkpoint.scheme import Role
from loader.converter import ConversionCache, LayerBanks
from loader.pieces import descriptors_of, split_pieces
from loader.reference import convert
from loader.reference.findings import FIELDS, Kind
from loader.testing.container import model_files

CPU = torch.device("cpu")
NONE = -1


def int4(layout: str, experts: int = 2, k: int = 48, n: int = 48, **more: Any) -> LayerSpec:
    dtype = more.pop("dtype", torch.float16)
    w13 = BankSpec("int4", layout, experts, k, n, 16, 0, 2, dtype)
    return LayerSpec(w13, BankSpec("int4", layout, experts, n // 2, k, 16, 0, 1, dtype), **more)


def e2m1(layout: str, sense: str = "multiplier") -> LayerSpec:
    w13 = BankSpec("e2m1", layout, 2, 48, 64, 16, 0, 2, torch.uint8, sense)
    return LayerSpec(w13, BankSpec("e2m1", layout, 2, 32, 48, 16, 0, 1, torch.uint8, sense))


class Layer:
    """Fresh banks of a spec, and calls that take numpy."""

    def __init__(self, spec: LayerSpec) -> None:
        self.spec = spec
        self.banks = LayerBanks.allocate(spec, CPU, None)
        self.cache = ConversionCache(spec, CPU)

    def write(self, chunk: np.ndarray[Any, Any], *rows: list[int]) -> list[dict[str, int]]:
        data = torch.from_numpy(np.ascontiguousarray(chunk).view(np.uint8).reshape(-1).copy())
        table = torch.tensor(rows, dtype=torch.int64)
        ints = self.spec.to_ints()
        return self._found(convert.write(data, table, self.banks.tensors, self.cache.globals, ints))

    def finish(self) -> list[dict[str, int]]:
        ints = self.spec.to_ints()
        return self._found(convert.finish(self.banks.tensors, self.cache.globals, ints))

    @staticmethod
    def _found(findings: torch.Tensor) -> list[dict[str, int]]:
        assert findings.dtype == torch.int64 and findings.shape[1:] == (6,)
        return [dict(zip(FIELDS, row, strict=True)) for row in findings.tolist()]


def row(role: Role, rows: int, row_bytes: int, cols: int, **more: int) -> list[int]:
    """A descriptor of expert 1, gate, unless told otherwise."""
    fields = {
        "role": role,
        "bank": 0,
        "projection": 0,
        "slot": 1,
        "offset": 0,
        "rows": rows,
        "row_bytes": row_bytes,
        "skip": 0,
        "cols": cols,
        "dest_row": 0,
        "expect_a": NONE,
        "expect_b": NONE,
    }
    assert more.keys() <= fields.keys()
    return list({**fields, **more}.values())


# Order and place.

SETTINGS = [
    {"dialect": "awq-gemm", "fused": True, "group": 16},
    {"dialect": "awq-gemm", "group": 32},
    {"dialect": "ct-int4-asym", "group": 16},
    {"dialect": "ct-nvfp4"},
    {"dialect": "modelopt-nvfp4", "fused": True, "fused_globals": "E2"},
]


@given(st.sampled_from(SETTINGS), st.integers(0, 1 << 30), st.sampled_from([0, 1]))
@settings(max_examples=40, deadline=None)
def test_any_order_any_cut_any_alignment(setting: dict[str, Any], seed: int, tp: int) -> None:
    """Every piece in a chunk of its own, at an odd address, in random order."""
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        poisoned(patch)
        checkpoint = small(folder, **setting, hidden=80, intermediate=160, experts=2)
        layout = str(rng.choice(layouts(setting["dialect"])))
        part = loader.Shard(tp_rank=tp, tp_size=2)
        plan = loader.plan(folder, shard=part, policy=loader.Policy(layout=layout)).layers[0]
        files = [np.fromfile(path, np.uint8) for path in model_files(Path(folder))]
        pieces = plan.pieces()
        quantum = np.minimum(pieces["row_quantum"], pieces["rows"])
        least = int((quantum * pieces["row_bytes"]).max())
        pieces = split_pieces(pieces, least + int(rng.integers(0, 4000)))
        layer = Layer(plan.spec)
        for number in rng.permutation(len(pieces)):
            piece = pieces[[number]].copy()
            begin, shift = int(piece["begin"][0]), int(rng.integers(0, 9))
            length = int(piece["rows"][0] * piece["row_bytes"][0])
            piece["offset"] = shift
            chunk = np.full(shift + length + 3, 0xAA, np.uint8)
            chunk[shift : shift + length] = files[int(piece["file"][0])][begin : begin + length]
            assert layer.write(chunk, descriptors_of(piece)[0].tolist()) == []
        assert layer.finish() == []
        wanted = expected(checkpoint, 0, layout, 80 * tp, 80)
        names = [f"w13_{t.name}" for t in plan.spec.w13.tensors()]
        names += [f"w2_{t.name}" for t in plan.spec.w2.tensors()]
        for name, tensor in zip(names, layer.banks.tensors, strict=True):
            assert_same(tensor, wanted[name], f"{layout} {name}")


@pytest.mark.parametrize("offset, rows", [(-1, 1), (1, 3), (100, 1), (0, 4), (1 << 40, 1)])
def test_a_descriptor_outside_the_chunk_is_refused(offset: int, rows: int) -> None:
    layer = Layer(int4("compact"))
    good = row(Role.SCALES_GN, 1, 48, 24)
    with pytest.raises(ValueError, match="descriptor 1 reaches outside the chunk"):
        layer.write(np.zeros(144, np.uint8), good, row(Role.SCALES_GN, rows, 48, 24, offset=offset))


def test_nothing_to_write_finds_nothing() -> None:
    layer = Layer(int4("compact"))
    table = torch.empty((0, 12), dtype=torch.int64)
    ints = layer.spec.to_ints()
    found = convert.write(
        torch.empty(0, dtype=torch.uint8), table, layer.banks.tensors, layer.cache.globals, ints
    )
    assert found.shape == (0, 6) and found.dtype == torch.int64


def test_a_piece_touches_its_own_slot_and_columns_only(monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned(monkeypatch)
    for layout in ("compact", "record", "wide"):
        layer = Layer(int4(layout))
        before = [t.clone() for t in layer.banks.tensors]
        layer.write(np.zeros((3, 24), np.float16), row(Role.SCALES_GN, 3, 48, 24, projection=1))
        for old, new in zip(before, layer.banks.tensors, strict=True):
            changed = old.view(torch.uint8).view(*old.shape, -1) != new.view(torch.uint8).view(
                *new.shape, -1
            )
            where = changed.flatten(3).any(-1) if changed.dim() > 3 else changed
            at = where.nonzero()
            if len(at):
                assert new is layer.banks.tensors[1]
                assert set(at[:, 0].tolist()) == {1}, "slot"
                assert set(at[:, 2].tolist()) == set(range(1, 48, 2)), "up columns"


# Findings. Each names its descriptor, its first place in the projection, and the raw bits.


def test_scales_that_are_not_finite() -> None:
    for dtype, bad in ((torch.float16, 0xFC01), (torch.bfloat16, 0x7F80)):
        scales = np.full((3, 24), 0x3C00, np.uint16)
        scales[1, 5] = scales[2, 7] = bad
        signed = bad - 0x10000 if bad & 0x8000 else bad
        layer = Layer(int4("compact", dtype=dtype))
        good = row(Role.SCALES_GN, 1, 48, 24)
        wanted = {"kind": Kind.NONFINITE, "count": 2, "row": 1, "column": 5, "bits": signed}
        assert layer.write(scales, good, row(Role.SCALES_GN, 3, 48, 24)) == [
            {"subject": 1, **wanted}
        ]
        # The same numbers, one column a row; and as a later part of the tensor.
        turned = np.ascontiguousarray(scales.T)
        assert layer.write(turned, row(Role.SCALES_NG, 24, 6, 3)) == [{"subject": 0, **wanted}]
        (late,) = layer.write(scales[1:], row(Role.SCALES_GN, 2, 48, 24, dest_row=1))
        assert late == {"subject": 0, **wanted}
        assert int(layer.banks.tensors[1].view(torch.int16)[1, 1, 10]) == signed, "kept as it is"


@pytest.mark.parametrize(
    "bits, held", [(0x03FF, False), (0x0400, True), (0, True), (0x83FF, False)]
)
@pytest.mark.parametrize("layout, rounding", [("wide", "exact"), ("compact", "fused_bias")])
def test_scales_below_the_smallest_normal(
    layout: str, rounding: str, bits: int, held: bool
) -> None:
    scales = np.full((3, 24), 0x3C00, np.uint16)
    scales[2, 23] = bits
    signed = bits - 0x10000 if bits & 0x8000 else bits
    found = Layer(int4(layout, awq_rounding=rounding)).write(scales, row(Role.SCALES_GN, 3, 48, 24))
    wanted = {"kind": Kind.NOT_HELD, "count": 1, "row": 2, "column": 23, "bits": signed}
    assert found == ([] if held else [{"subject": 0, **wanted}])


def test_bf16_scales_must_be_exact_in_fp16() -> None:
    for bits, held in ((0x3881, True), (0x477F, True), (0x4780, False), (0x387F, False)):
        scales = np.full((3, 24), 0x3F80, np.uint16)
        scales[0, 3] = bits
        found = Layer(int4("record", dtype=torch.bfloat16)).write(
            scales, row(Role.SCALES_GN, 3, 48, 24)
        )
        assert [f["kind"] for f in found] == ([] if held else [Kind.NOT_HELD]), hex(bits)


@pytest.mark.parametrize("layout", ["wide", "record"])
def test_a_bias_that_overflows_is_found_by_finish(layout: str) -> None:
    layer = Layer(int4(layout))
    scales = np.full((3, 24), 0x3C00, np.uint16)
    scales[2, 11] = 0x7BFF  # 65504
    twos = np.full((3, 3), 0x22222222, np.uint32)
    for projection in (0, 1):
        for slot in (0, 1):
            one = {"projection": projection, "slot": slot}
            bad = scales if projection and slot else np.full_like(scales, 0x3C00)
            assert layer.write(bad, row(Role.SCALES_GN, 3, 48, 24, **one)) == []
            assert layer.write(twos, row(Role.ZEROS_GN, 3, 12, 24, **one)) == []
    for slot in (0, 1):
        layer.write(np.ones((2, 48), np.float16), row(Role.SCALES_GN, 2, 96, 48, bank=1, slot=slot))
        zeros = np.zeros((2, 6), np.uint32)
        layer.write(zeros, row(Role.ZEROS_GN, 2, 24, 48, bank=1, slot=slot, projection=2))
    (found,) = layer.finish()
    # Interleaved: up 11 is column 23 of W13. Subject: bank * experts + slot.
    wanted = {"subject": 1, "kind": Kind.NOT_HELD, "count": 1, "row": 2, "column": 23}
    assert found == {**wanted, "bits": 0x7BFF}


def test_block_scales_that_are_nan() -> None:
    scales = np.full((32, 3), 0x38, np.uint8)
    scales[9, 2] = 0xFF
    for layout in ("compact", "wide"):
        (found,) = Layer(e2m1(layout)).write(scales, row(Role.SCALES_NG8, 32, 3, 3))
        assert found["kind"] == Kind.NONFINITE and found["bits"] == 0xFF
        assert (found["row"], found["column"], found["count"]) == (2, 9, 1)


@pytest.mark.parametrize("sense", ["multiplier", "divisor"])
@pytest.mark.parametrize("role", [Role.GLOBAL_F32, Role.GLOBAL_BF16])
def test_globals(role: Role, sense: str) -> None:
    for value, good in ((0.5, True), (0.0, False), (-1.0, False), (np.nan, False), (np.inf, False)):
        bits = np.array([value], np.float32).view(np.uint32)
        raw = bits if role == Role.GLOBAL_F32 else (bits >> 16).astype(np.uint16)
        layer = Layer(e2m1("compact", sense))
        found = layer.write(raw, row(role, 1, raw.itemsize, 1, projection=1))
        assert [f["kind"] for f in found] == ([] if good else [Kind.GLOBAL]), value
        if good:
            assert layer.banks.tensors[2][1, 1].item() == value
        else:
            assert found[0]["bits"] & 0xFFFFFFFF == int(bits[0])
    tiny = np.array([1e-45], np.float32)
    found = Layer(e2m1("compact", sense)).write(tiny, row(Role.GLOBAL_F32, 1, 4, 1))
    assert [f["kind"] for f in found] == ([Kind.GLOBAL] if sense == "divisor" else [])


@pytest.mark.parametrize("layout", ["compact", "record", "wide"])
def test_zero_points_that_must_be_eight(layout: str) -> None:
    zeros = np.full((3, 3), 0x88888888, np.uint32)
    good = row(Role.ZEROS_GN, 3, 12, 24, expect_a=8)
    assert Layer(int4(layout)).write(zeros, good) == []
    zeros[1, 2] ^= np.uint32(0x5 << 4 * 5)  # nibble 5 of word 2 is column 16 + 3
    (found,) = Layer(int4(layout)).write(zeros, good)
    wanted = {"kind": Kind.ZERO_POINT, "count": 1, "row": 1, "column": 19, "bits": 8 ^ 5}
    assert found == {"subject": 0, **wanted}
    along_n = np.full((3, 3), 0x88888888, np.uint32)
    along_n[2, 1] ^= np.uint32(0x5 << 4 * 3)  # low nibble first along N: column 16 + 3
    assert Layer(int4(layout)).write(along_n, row(Role.ZEROS_NG, 3, 12, 3, expect_a=8)) == [found]
    assert Layer(int4(layout)).write(along_n, row(Role.ZEROS_NG, 3, 12, 3)) == []


def test_weight_shape() -> None:
    check = row(Role.CHECK_SHAPE, 1, 16, 2, expect_a=24, expect_b=48)
    layer = Layer(int4("compact"))
    assert layer.write(np.array([24, 48]), check) == []
    (found,) = layer.write(np.array([24, 1 << 40]), check)
    assert (found["kind"], found["column"], found["bits"]) == (Kind.SHAPE, 1, 1 << 40)


def test_group_index() -> None:
    check = row(Role.CHECK_GROUPS, 1, 192, 48, expect_a=16)
    layer = Layer(int4("compact"))
    ordered = np.arange(48, dtype=np.int32) // 16
    assert layer.write(ordered, check) == []
    assert layer.write(np.full(48, -1, np.int32), check) == []
    some = ordered.copy()
    some[[17, 40]] = [-1, 0]
    (found,) = layer.write(some, check)
    wanted = {"kind": Kind.GROUPS, "count": 2, "row": 0, "column": 17, "bits": -1}
    assert found == {"subject": 0, **wanted}


@pytest.mark.parametrize("sense", ["multiplier", "divisor"])
def test_a_product_that_wide_does_not_hold_is_found_by_finish(sense: str) -> None:
    for value, held in ((1.0, True), (2.0**-14, True), (2.0**-15, False), (2.0**16, False)):
        layer = Layer(e2m1("wide", sense))
        for slot in (0, 1):
            for projection, rows, groups in ((0, 32, 3), (1, 32, 3), (2, 48, 2)):
                one = {"bank": int(projection == 2), "projection": projection, "slot": slot}
                blocks = np.full((rows, groups), 0x38, np.uint8)  # 1.0
                blocks[0, 0] = 0  # a zero block is held whatever the global
                layer.write(blocks, row(Role.SCALES_NG8, rows, groups, groups, **one))
                whole = value if (slot, projection) == (1, 1) else 1.0
                whole = np.array([1 / whole if sense == "divisor" else whole], np.float32)
                layer.write(whole, row(Role.GLOBAL_F32, 1, 4, 1, **one))
        found = layer.finish()
        if held:
            assert found == []
            assert layer.banks.tensors[1][1, 1, 1].item() == value
            continue
        (one,) = found
        assert (one["subject"], one["kind"], one["count"]) == (1, Kind.NOT_HELD, 32 * 3 - 1)
        assert (one["row"], one["column"]) == (0, 3), "up 0 of group 0 is zero, so up 1: column 3"

"""The bank: bit positions, the way back, sizes, and what pads hold."""

from __future__ import annotations

import bank_oracle
import numpy as np
import pytest
import torch
from bank_oracle import assert_same, poisoned, up32
from hypothesis import given, settings
from hypothesis import strategies as st

from loader import memory
from loader.bank import (
    BankSpec,
    LayerSpec,
    check_group,
    group_of_rows,
    initialise,
    layer_spec_from_ints,
    named,
    pack_codes,
    pack_rows,
    pack_zeros,
    unpack_codes,
    unpack_zeros,
)
from loader.converter import LayerBanks
from loader.errors import UnsupportedError

CPU = torch.device("cpu")
SIZES = st.integers(1, 75)


def codes_of(k: int, n: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 16, (k, n), generator=generator, dtype=torch.uint8)


def bit_loop(codes: np.ndarray) -> np.ndarray:
    """Words by one loop over the bits of every code, as docs/bank.md says it."""
    k, n = codes.shape
    words = np.zeros((up32(n) // 32, up32(k) // 8, 32), np.uint32)
    for row in range(k):
        position = [0, 4, 1, 5, 2, 6, 3, 7][row % 8]
        for column in range(n):
            for bit in range(4):
                if int(codes[row, column]) >> bit & 1:
                    at = (column // 32, row // 8, column % 32)
                    words[at] |= np.uint32(1 << (4 * position + bit))
    return words


@given(SIZES, SIZES, st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_words_have_the_bits_of_the_design(k: int, n: int, seed: int) -> None:
    codes = codes_of(k, n, seed)
    wanted = bit_loop(codes.numpy())
    assert_same(pack_codes(codes), wanted, "pack_codes")
    assert_same(torch.from_numpy(bank_oracle.words(codes.numpy())), wanted, "the tests' own words")


def test_the_picture_of_a_word() -> None:
    """The drawing at the head of ``bank.py``; the top bit is the sign of an int32."""
    for row, low_bit in enumerate((0, 16, 4, 20, 8, 24, 12, 28)):
        codes = torch.zeros((8, 1), dtype=torch.uint8)
        codes[row] = 15
        word = int(pack_codes(codes)[0, 0, 0]) & 0xFFFFFFFF
        assert word == 15 << low_bit, row


@given(SIZES, SIZES, st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_unpack_is_the_way_back(k: int, n: int, seed: int) -> None:
    codes = codes_of(k, n, seed)
    words = pack_codes(codes)
    assert torch.equal(unpack_codes(words, k, n), codes)
    whole = unpack_codes(words, up32(k), up32(n))
    assert not whole[k:].any() and not whole[:, n:].any()


@given(SIZES, SIZES, st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_rows_are_the_words_before_tiling(k: int, n: int, seed: int) -> None:
    codes = codes_of(k, n, seed)
    rows = pack_rows(codes)
    assert rows.shape == (-(-k // 8), n) and rows.dtype == torch.int32
    tiled = pack_codes(codes).transpose(0, 1).reshape(up32(k) // 8, up32(n))
    assert torch.equal(tiled[: rows.shape[0], :n], rows)


@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_zero_points_two_a_byte_even_column_low(groups: int, pairs: int, seed: int) -> None:
    zeros = codes_of(groups, 2 * pairs, seed)
    packed = pack_zeros(zeros)
    wanted = [[int(row[2 * i]) + 16 * int(row[2 * i + 1]) for i in range(pairs)] for row in zeros]
    assert packed.tolist() == wanted
    assert torch.equal(unpack_zeros(packed), zeros)


# Specs.


@st.composite
def banks(draw: st.DrawFn) -> BankSpec:
    kind, layout, dtype, sense = draw(
        st.sampled_from(
            [
                ("int4", "compact", torch.float16, "none"),
                ("int4", "compact", torch.bfloat16, "none"),
                ("int4", "record", torch.bfloat16, "none"),
                ("int4", "wide", torch.float16, "none"),
                ("e2m1", "compact", torch.uint8, "divisor"),
                ("e2m1", "wide", torch.uint8, "multiplier"),
                ("plain", "plain", torch.bfloat16, "none"),
            ]
        )
    )
    projections = draw(st.sampled_from([1, 2]))
    group = 16 * draw(st.integers(1, 16))
    return BankSpec(
        kind=kind,
        layout=layout,
        experts=draw(st.integers(1, 3)),
        k=16 * draw(st.integers(1, 12)),
        n=8 * projections * draw(st.integers(1, 12)),
        group=group,
        phase=16 * draw(st.integers(0, group // 16 - 1)),
        projections=projections,
        scale_dtype=dtype,
        global_sense=sense,
    )


@given(banks(), banks(), st.sampled_from(["exact", "fused_bias"]))
@settings(max_examples=60, deadline=None)
def test_a_spec_survives_as_integers(w13: BankSpec, w2: BankSpec, rounding: str) -> None:
    spec = LayerSpec(w13, w2, rounding)
    assert layer_spec_from_ints(spec.to_ints()) == spec


@given(banks())
@settings(max_examples=60, deadline=None)
def test_every_row_has_the_group_of_its_place_in_the_checkpoint(bank: BankSpec) -> None:
    wanted = [(bank.phase + row) // bank.group for row in range(bank.k)]
    assert group_of_rows(bank, torch.device("cpu")).tolist() == wanted
    assert bank.groups == max(wanted) + 1


@given(banks())
@settings(max_examples=60, deadline=None)
def test_shapes_are_those_of_the_design(bank: BankSpec) -> None:
    e, kp, np_ = bank.experts, up32(bank.k), up32(bank.n)
    groups = -(-(bank.phase + bank.k) // bank.group)
    weight = ((e, np_ // 32, kp // 8, 32), torch.int32, "weight")
    wanted = {
        ("int4", "wide"): [weight, ((e, groups, np_), torch.int32, "metadata")],
        ("int4", "record"): [weight, ((e, groups, np_, 3), torch.uint8, "metadata")],
        ("int4", "compact"): [
            weight,
            ((e, groups, np_), bank.scale_dtype, "metadata"),
            ((e, groups, np_ // 2), torch.uint8, "metadata"),
        ],
        ("e2m1", "wide"): [weight, ((e, groups, np_), torch.float16, "metadata")],
        ("e2m1", "compact"): [
            weight,
            ((e, groups, np_), torch.uint8, "metadata"),
            ((e, bank.projections), torch.float32, "globals"),
        ],
        ("plain", "plain"): [((e, bank.n, bank.k), bank.scale_dtype, "unquantized")],
    }[bank.kind, bank.layout]
    found = bank.tensors()
    assert [(t.shape, t.dtype, t.category) for t in found] == wanted
    made = [torch.empty(t.shape, dtype=t.dtype) for t in found]
    assert [t.nbytes for t in found] == [tensor.nbytes for tensor in made]
    assert bank.nbytes() == sum(tensor.nbytes for tensor in made)


def reference_layer(kind: str, layout: str) -> LayerSpec:
    """One layer of the reference geometry, TP=4, as rank 0 holds it."""
    int4 = kind == "int4"
    dtype, sense = (torch.float16, "none") if int4 else (torch.uint8, "multiplier")
    group = 32 if int4 else 16
    w13 = BankSpec(kind, layout, 512, 2560, 320, group, 0, 2, dtype, sense)
    return LayerSpec(w13, BankSpec(kind, layout, 512, 160, 2560, group, 0, 1, dtype, sense))


@pytest.mark.parametrize(
    "kind, layout, saved",
    [
        ("int4", "record", 943_718_400),
        ("int4", "compact", 1_415_577_600),
        ("e2m1", "compact", 1_887_436_800 - 294_912),
    ],
)
def test_the_reference_geometry_saves_these_bytes(kind: str, layout: str, saved: int) -> None:
    one, wide = reference_layer(kind, layout), reference_layer(kind, "wide")
    kept = wide.nbytes("metadata") - one.nbytes("metadata") - one.nbytes("globals")
    assert 48 * kept == saved
    assert wide.nbytes("globals") == 0


@pytest.mark.parametrize("group", [0, 8, 24, -16, 40, 1])
def test_a_group_that_no_phase_fits_is_refused(group: int) -> None:
    with pytest.raises(UnsupportedError) as caught:
        check_group(group, layer=3)
    assert str(caught.value) == (
        "group size is not supported; layer 3; expected a multiple of 16 (32, 64 and 128 are "
        f"usual), or -1 for a whole row, found {group}"
    )
    for good in (16, 32, 48, 64, 128, 704):
        check_group(good)


# Pads.


def is_logical(bank: BankSpec, name: str) -> torch.Tensor:
    """For every byte of a tensor: whether it belongs to a column and row of the checkpoint."""
    tensor = next(t for t in bank.tensors() if t.name == name)
    mask = torch.zeros(tensor.shape, dtype=torch.bool)
    if name == "weight":
        column = torch.arange(up32(bank.n)).view(-1, 1, 32) < bank.n
        row = torch.arange(up32(bank.k) // 8).view(1, -1, 1) * 8 < bank.k
        mask[:] = column & row
    elif name == "zeros":
        mask[:, :, : bank.n // 2] = True
    else:
        mask[:, :, : bank.n] = True
    return mask


@given(banks().filter(lambda bank: bank.kind != "plain"))
@settings(max_examples=80, deadline=None)
def test_pads_are_zero_in_memory_full_of_nan(bank: BankSpec) -> None:
    with pytest.MonkeyPatch.context() as patch:
        poisoned(patch)
        tensors = [memory.fresh(t.shape, t.dtype, CPU) for t in bank.tensors()]
        initialise(bank, named(bank, tensors), None)
    for spec, tensor in zip(bank.tensors(), tensors, strict=True):
        if spec.category == "globals":
            continue
        logical = is_logical(bank, spec.name)
        raw = tensor.view(torch.uint8).view(*spec.shape, -1)
        assert not raw[~logical].any(), spec.name
        assert (raw[logical] == 0xFF).all(), f"{spec.name}: what sources write was touched"


@pytest.mark.parametrize("layout", ["compact", "record", "wide"])
def test_absent_zero_points_are_the_symmetric_one(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned(monkeypatch)
    bank = BankSpec("int4", layout, 2, 48, 24, 16, 0, 1, torch.float16)
    spec = LayerSpec(BankSpec("int4", layout, 2, 48, 40, 16, 0, 2, torch.float16), bank)
    tensors = LayerBanks.allocate(spec, CPU, 8).split()[1]
    plane = tensors[-1]
    if layout == "compact":
        assert (plane[:, :, :12] == 0x88).all() and not plane[:, :, 12:].any()
    elif layout == "record":
        assert (plane[:, :, :24, 2] == 8).all() and not plane[:, :, 24:].any()
    else:
        assert (plane[:, :, :24] >> 16 == 8).all() and not plane[:, :, 24:].any()

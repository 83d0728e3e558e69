"""The header reader against safetensors itself, on valid files with faults put in."""

from __future__ import annotations

import struct

import pytest
import safetensors
from fuzz_choices import DrawnChoices, SeededChoices
from fuzz_files import make_file
from fuzz_oracle import AFTER_JSON, check_against_safetensors, our_view, safetensors_view
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loader.checkpoint.header import DTYPE_BITS, DTYPES


def with_prefix(text: bytes | str) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def entry(dtype: str, shape: str, begin: int, end: int) -> str:
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}'


@st.composite
def files(draw: st.DrawFn) -> bytes:
    return make_file(DrawnChoices(draw))


@settings(max_examples=1500, deadline=None)
@given(files())
def test_accepts_what_safetensors_accepts(data: bytes) -> None:
    check_against_safetensors(data)


def test_the_generator_reaches_every_stage() -> None:
    """What the recorded run must hold, on its first inputs."""
    found = [check_against_safetensors(make_file(SeededChoices(seed))) for seed in range(2000)]
    stages = [stage for _, stage in found]
    assert set(stages) >= {"accepted", "length", "JSON", *AFTER_JSON}
    assert sum(theirs for theirs, _ in found) >= len(found) / 5
    assert sum(stage in AFTER_JSON for stage in stages) >= len(found) / 3


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64))
@example(b"\x02" + bytes(7) + b"{}")
@example(b"\x00" * 8)
def test_random_bytes_are_judged_as_safetensors_does(raw: bytes) -> None:
    check_against_safetensors(raw)
    check_against_safetensors(with_prefix(raw))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_each_dtype(dtype: str) -> None:
    nbytes = DTYPE_BITS[dtype]  # eight elements
    data = with_prefix(f'{{"a":{entry(dtype, "[8]", 0, nbytes)}}}') + bytes(nbytes)
    assert safetensors_view(data) is not None
    assert our_view(data) == safetensors_view(data)


def test_dtypes_are_all_that_safetensors_names() -> None:
    bad = with_prefix(f'{{"a":{entry("X", "[1]", 0, 1)}}}') + b"0"
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.deserialize(bad)
    named = str(caught.value).split("expected one of ")[1].split(" at line")[0]
    assert tuple(named.replace("`", "").split(", ")) == DTYPES


@pytest.mark.parametrize(
    "shape",
    [
        "[9223372036854775808,4,0]",  # overflows on the way to nothing
        "[0,9223372036854775808,4]",
        "[18446744073709551615,0]",
        "[18446744073709551616,0]",
        "[0,18446744073709551616]",
        "[2305843009213693952,8,0]",
        "[2305843009213693951,0]",
    ],
)
@pytest.mark.parametrize("dtype", ["F4", "U8", "I64"])
def test_overflow_is_judged_step_by_step(shape: str, dtype: str) -> None:
    check_against_safetensors(with_prefix(f'{{"a":{entry(dtype, shape, 0, 0)}}}'))

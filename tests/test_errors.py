"""Errors: their sentence, the facts they carry, and what they let go of."""

from __future__ import annotations

import weakref

import pytest

import loader
from loader.errors import (
    CapacityError,
    CheckpointError,
    ConversionError,
    LifecycleError,
    LoaderError,
    PolicyError,
    ShardError,
    UnsupportedError,
    clear_frames,
    described,
)

SUBCLASSES = (
    CapacityError,
    CheckpointError,
    ConversionError,
    LifecycleError,
    PolicyError,
    ShardError,
    UnsupportedError,
)
FACTS = ("file", "layer", "experts", "tensor", "expected", "found")


def test_the_sentence_holds_every_fact_in_a_fixed_order() -> None:
    error = LoaderError(
        "it broke", found=3, expected=[1, 2], tensor="t", experts="0, 1", layer=0, file="f"
    )
    assert (
        str(error) == "it broke; file f, layer 0, experts 0, 1, tensor t; expected [1, 2], found 3"
    )


def test_unknown_facts_leave_no_trace_but_zero_and_empty_are_facts() -> None:
    assert str(LoaderError("it broke")) == "it broke"
    assert str(LoaderError("it broke", layer=0, found=0)) == "it broke; layer 0; found 0"
    assert str(LoaderError("it broke", expected="")) == "it broke; expected "


@pytest.mark.parametrize("kind", SUBCLASSES)
def test_every_error_is_public_and_derives_from_the_base(kind: type[LoaderError]) -> None:
    assert issubclass(kind, LoaderError)
    assert getattr(loader, kind.__name__) is kind
    error = kind("w", file="f", layer=1, experts="2", tensor="t", expected="e", found="g")
    assert [getattr(error, fact) for fact in FACTS] == ["f", 1, "2", "t", "e", "g"]
    assert error.what == "w"


def test_at_fills_what_is_unknown_and_changes_nothing_else() -> None:
    first = ShardError("w", layer=0, found="here")
    more = first.at(layer=5, file="f", found="there", tensor="t")
    assert type(more) is ShardError and more is not first
    assert [getattr(more, fact) for fact in FACTS] == ["f", 0, None, "t", None, "here"]
    assert str(more) == "w; file f, layer 0, tensor t; found here"
    assert str(first) == "w; layer 0; found here"


class _Big:
    """Something that a frame holds."""


def _hold(seen: list[weakref.ref[_Big]]) -> None:
    big = _Big()
    seen.append(weakref.ref(big))
    raise ValueError("inner")


def test_cleared_frames_hold_nothing_of_the_error_or_what_led_to_it() -> None:
    seen: list[weakref.ref[_Big]] = []

    def outer() -> None:
        big = _Big()
        seen.append(weakref.ref(big))
        try:
            _hold(seen)
        except ValueError:
            try:
                _hold(seen)
            except ValueError as cause:
                raise LoaderError("outer") from cause

    try:
        outer()
    except LoaderError as error:
        kept: BaseException = error
    assert [one() is None for one in seen] == [False, False, False]
    clear_frames(kept)
    assert [one() is None for one in seen] == [True, True, True]


def test_an_error_handled_before_is_left_alone() -> None:
    seen: list[weakref.ref[_Big]] = []
    try:
        _hold(seen)
    except ValueError as error:
        before = error
        try:
            raise LoaderError("later")
        except LoaderError as later:
            clear_frames(later, before)
    assert seen[0]() is not None


def test_a_circle_of_causes_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    clear_frames(first)


def test_an_error_is_described_also_where_it_cannot_be_shown() -> None:
    class Unsayable(Exception):
        def __str__(self) -> str:
            raise RecursionError

    assert described(KeyError("x")) == "KeyError: 'x'"
    assert described(Unsayable()) == "Unsayable, whose message is a RecursionError itself"

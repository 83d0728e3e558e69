"""The table of a failed assertion: what does not hold, expected beside found, and nothing else."""

from __future__ import annotations

import pytest

from loader.testing.difference import Fact, at_most, require


def test_what_holds_is_not_told() -> None:
    require("nothing is wrong", [Fact(0, "releases", 1, 1), at_most("all", "bytes", 5, 5)])
    require("nothing is wrong", [])


def test_the_table() -> None:
    facts = [
        Fact(0, "releases", 1, 1),
        Fact(11, "releases", 1, 2),
        at_most("all", "bytes", 5, 6),
        at_most("all", "bytes", 5, -6),
    ]
    with pytest.raises(AssertionError) as caught:
        require("a layer was not released once", iter(facts))
    assert str(caught.value) == (
        "a layer was not released once: 2 of 4 checks\n"
        "\n"
        "layer  what       expected  found\n"
        "─────────────────────────────────\n"
        "   11  releases          1      2\n"
        "  all  bytes     at most 5      6"
    )

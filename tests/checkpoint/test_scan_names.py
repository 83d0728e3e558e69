"""Names split and matched by native code against Python: the same, or nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.checkpoint.family import split_kinds
from loader.checkpoint.scan import IndexColumns, scan_kinds, scan_owned
from loader.library import LIBRARY

pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the native core was not built")

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_WORD = st.sampled_from(
    ["layers", "0", "3", "experts", "12", "007", "1234567890", "up", "weight", ""]
)
_NAME = _TEXT | st.lists(_WORD, max_size=9).map(".".join)


@settings(max_examples=500, deadline=None)
@given(st.lists(_NAME, max_size=30))
def test_kinds(names: list[str]) -> None:
    found, wanted = scan_kinds(names), split_kinds(names)
    if any("\n" in name for name in names):
        assert found is None
        return
    assert found is not None
    assert found[0].tolist() == wanted[0].tolist()
    assert found[1].tolist() == wanted[1].tolist()
    assert found[2] == wanted[2]


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(_NAME, st.integers(0, 3), max_size=20),
    st.lists(st.tuples(_NAME, st.integers(-1, 3)), max_size=20),
)
def test_owned(index: dict[str, int], asked: list[tuple[str, int]]) -> None:
    columns = IndexColumns(
        list(index), [f"f{n}" for n in range(4)], np.array([*index.values()], np.int32)
    )
    asked += [(name, (n + i) % 4) for i, (name, n) in enumerate(index.items())]
    names, files = [name for name, _ in asked], np.array([n for _, n in asked], np.int32)
    owned = scan_owned(columns, names, files)
    if any("\n" in name for name in (*names, *index)):
        assert owned is None
        return
    assert owned is not None
    assert owned.tolist() == [index.get(name) == n for name, n in asked]


def test_texts_that_hold_another_number_of_names() -> None:
    assert scan_kinds(["a\nb"]) is None and scan_kinds([]) is not None
    one = IndexColumns(["a"], ["f"], np.zeros(1, np.int32))
    assert scan_owned(one, ["a\n", "b"], np.zeros(2, np.int32)) is None

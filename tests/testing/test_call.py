"""A call by the names of a schema: every argument once, defaults filled in, or an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loader.testing.call import Call, Seen, named_arguments, seen

SCHEMA = torch._C.parse_schema("qpn::one(Tensor x, int n, bool loud=False, *, int level=3) -> ()")
GIVEN: dict[str, Any] = {"x": "a tensor", "n": 2, "loud": True, "level": 5}


@given(st.integers(1, 3), st.sets(st.sampled_from(("loud", "level"))))
def test_however_arguments_are_passed_the_names_are_the_same(places: int, rest: set[str]) -> None:
    names = list(GIVEN)
    positional = [GIVEN[name] for name in names[:places]]
    by_name = {name: GIVEN[name] for name in {"n", *rest} - set(names[:places])}
    found = named_arguments("one", SCHEMA, positional, by_name)
    wanted = dict(GIVEN)
    for name, default in (("loud", False), ("level", 3)):
        if name not in by_name and name not in names[:places]:
            wanted[name] = default
    assert found == wanted and list(found) == names


@pytest.mark.parametrize(
    ("positional", "by_name", "message"),
    [
        ((1,), {}, "without its argument 'n'"),
        ((1, 2, True, 4), {}, r"no such arguments: \[<class 'int'>\]"),
        ((1, 2), {"lout": True}, r"no such arguments: \['lout'\]"),
    ],
)
def test_a_call_that_the_schema_does_not_allow(
    positional: tuple[Any, ...], by_name: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        named_arguments("one", SCHEMA, positional, by_name)


def test_tensors_are_described_at_every_depth_and_copied_where_asked() -> None:
    x = torch.arange(6, dtype=torch.int16).reshape(2, 3)
    told = seen([x, (x, 4)], copy=False)
    assert told[1][1] == 4 and told[0].value is None
    assert (told[0].shape, told[0].dtype, told[0].device) == ((2, 3), torch.int16, x.device)
    (kept,) = seen([x], copy=True)
    x.zero_()
    assert kept.value.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_call_reads_well() -> None:
    x = Seen((2, 3), torch.bfloat16, torch.device("cpu"))
    call = Call("moe", {"x": x, "banks": (x,), "routes": (1, 8)}, "MainThread")
    assert str(call) == "moe(x=bfloat16[2, 3], banks=(bfloat16[2, 3],), routes=(1, 8))"
    assert call["routes"] == (1, 8)
    with pytest.raises(KeyError):
        call["rootes"]

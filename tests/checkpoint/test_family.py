"""Families: names are parsed in full, and a family is data that can be turned round."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loader.checkpoint import scan
from loader.checkpoint.family import (
    DRAFT_PREFIXES,
    FAMILIES,
    PROJECTIONS,
    Family,
    NameParser,
    layer_of,
    looks_like_expert,
)
from loader.errors import LoaderError

WORDS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
SPELLED = [
    ("model.layers.0.mlp.experts.0.gate_proj.qweight", 0, 0, "gate", "qweight"),
    ("model.layers.61.mlp.experts.255.up_proj.weight_scale_2", 61, 255, "up", "weight_scale_2"),
    ("layers.3.mlp.experts.7.down_proj.weight", 3, 7, "down", "weight"),
    ("model.layers.1.block_sparse_moe.experts.2.w1.qweight", 1, 2, "gate", "qweight"),
    ("model.layers.1.block_sparse_moe.experts.2.w2.scales", 1, 2, "down", "scales"),
    ("model.layers.1.block_sparse_moe.experts.2.w3.qzeros", 1, 2, "up", "qzeros"),
    ("model.layers.1.block_sparse_moe.experts.2.up_proj.weight", 1, 2, "up", "weight"),
    ("model.layers.4.mlp.experts.gate_up_proj.weight_packed", 4, -1, "gate_up", "weight_packed"),
    ("model.layers.4.mlp.experts.down_proj", 4, -1, "down", ""),
    ("a.b.layers.2.block_sparse_moe.experts.gate_up_proj", 2, -1, "gate_up", ""),
    ("model.layers.9.layers.2.mlp.experts.1.up_proj.weight", 2, 1, "up", "weight"),
]


@pytest.mark.parametrize("name, layer, expert, projection, part", SPELLED)
def test_known_spellings(name: str, layer: int, expert: int, projection: str, part: str) -> None:
    found = NameParser().parse(name)
    assert found is not None
    assert (found.layer, found.expert, PROJECTIONS[found.projection], found.part) == (
        layer,
        expert,
        projection,
        part,
    )
    assert name.startswith(found.prefix) and name[len(found.prefix) :].startswith("layers.")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.shared_expert.gate_proj.weight",
        "model.layers.0.mlp.shared_experts.0.gate_proj.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.experts.0.gate_proj.lora.weight",
        "model.layers.0.mlp.experts.00.gate_proj.weight",
        "model.layers.01.mlp.experts.0.gate_proj.weight",
        "model.layers.0.mlp.experts.-1.gate_proj.weight",
        "model.layers.0.mlp.experts.0.gate_proj_2.weight",
        "model.layers.0.mlp.experts.0.w1.weight",
        "model.layers.0.block_sparse_moe.experts.0.w4.weight",
        "model.layers.0.mlp.experts.0.gate_up_proj.weight",
        "model.layers.0.mlp.experts.gate_proj.weight",
        "model.layers.0.mlpXexperts.0.gate_proj.weight",
        "modellayers.0.mlp.experts.0.gate_proj.weight",
        "model.layers.0.mlp.experts.1234567890.gate_proj.weight",
        "experts",
        "",
    ],
)
def test_what_is_no_expert(name: str) -> None:
    assert NameParser().parse(name) is None


@settings(max_examples=200, deadline=None)
@given(
    family=st.integers(0, len(FAMILIES) - 1),
    layer=st.integers(0, 999_999_999),
    expert=st.integers(0, 999_999_999),
    prefix=st.lists(st.from_regex(r"[^.\n]{1,8}", fullmatch=True), max_size=3),
    part=st.from_regex(r"[^.]{0,12}", fullmatch=True),
    data=st.data(),
)
def test_a_module_name_parses_back(
    family: int, layer: int, expert: int, prefix: list[str], part: str, data: st.DataObject
) -> None:
    one = FAMILIES[family]
    projection = data.draw(st.sampled_from(sorted(one.projections)))
    start = "".join(f"{word}." for word in prefix)
    name = start + one.module(layer, expert, projection) + (f".{part}" if part else "")
    found = NameParser().parse(name)
    assert found is not None
    fused = "{expert}" not in one.pattern
    assert found == (
        start,
        family,
        layer,
        -1 if fused else expert,
        PROJECTIONS.index(projection),
        part,
    )


def test_the_first_family_that_matches_wins() -> None:
    """A pattern of the user's own stands before the known ones."""
    swapped = {"gate": "up_proj", "up": "gate_proj", "down": "down_proj"}
    own = Family("mine", "layers.{layer}.mlp.experts.{expert}.{projection}", swapped)
    found = NameParser((own, *FAMILIES)).parse("model.layers.0.mlp.experts.1.up_proj.weight")
    assert found is not None and found.family == 0 and PROJECTIONS[found.projection] == "gate"


def test_a_pattern_is_text_and_no_expression() -> None:
    own = Family("odd", "blocks.{layer}.m+e.(bank).{expert}.{projection}", WORDS)
    parser = NameParser([own])
    assert parser.keyword == ""
    found = parser.parse("x.blocks.7.m+e.(bank).3.up_proj.weight")
    assert found is not None and (found.layer, found.expert) == (7, 3)
    assert parser.parse("x.blocks.7.mme.bank.3.up_proj.weight") is None
    assert re.compile(own.regex()).groups == 3


@pytest.mark.parametrize(
    "pattern, projections",
    [
        ("layers.{layer}.experts.{expert}.{projection}", {"gate": "a", "up": "b"}),
        ("layers.{layer}.experts.{expert}.{projection}", {"gate": "a", "up": "a", "down": "b"}),
        ("layers.{layer}.experts.{projection}", WORDS),
        ("layers.{layer}.experts.{expert}.{projection}", {"gate_up": "a", "down": "b"}),
        ("layers.0.experts.{expert}.{projection}", WORDS),
        ("layers.{layer}.{layer}.experts.{expert}.{projection}", WORDS),
        ("layers.{layer}.experts.{expert}", WORDS),
        ("layers.{layer}.{expert}.experts.{expert}.{projection}", WORDS),
    ],
)
def test_a_family_that_cannot_be_is_refused(pattern: str, projections: dict[str, str]) -> None:
    with pytest.raises(LoaderError) as caught:
        Family("mine", pattern, projections)
    assert "mine" in str(caught.value) and caught.value.expected and caught.value.found


def test_gate_and_up_of_the_known_families() -> None:
    """Spelled here again: w1 is gate and w3 is up, and gate_proj is gate."""
    for family in FAMILIES:
        words = dict(family.projections)
        if "gate_up" in words:
            assert words == {"gate_up": "gate_up_proj", "down": "down_proj"}
        else:
            assert words in (WORDS, {"gate": "w1", "up": "w3", "down": "w2"})


@pytest.mark.parametrize(
    "name, layer",
    [
        ("model.layers.12.mlp.gate.weight", 12),
        ("layers.0.x", 0),
        ("model.embed_tokens.weight", None),
        ("model.sublayers.3.x", None),
        ("model.layers.x.y", None),
        ("model.layers." + "9" * 5000 + ".x", None),
    ],
)
def test_the_layer_of_any_name(name: str, layer: int | None) -> None:
    assert layer_of(name) == layer


def test_what_looks_like_an_expert() -> None:
    assert looks_like_expert("model.layers.0.ffn.experts.0.weird.weight")
    assert looks_like_expert("experts.0") and looks_like_expert("a.experts")
    assert not looks_like_expert("model.layers.0.mlp.shared_experts.up_proj.weight")
    assert not looks_like_expert("model.experts_norm.weight")


def test_draft_prefixes_end_where_layers_begin() -> None:
    assert all(prefix.endswith(".") for prefix in DRAFT_PREFIXES)


_COMPONENT = st.sampled_from(
    ["model", "layers", "mlp", "experts", "block_sparse_moe", "0", "1", "7", "07", "12", "x",
     "gate_proj", "up_proj", "down_proj", "w1", "gate_up_proj", "qweight", "scales", ""]
)  # fmt: skip
_EXPERT_NAME = st.builds(
    "{}layers.{}.mlp.experts.{}.{}.{}".format,
    st.sampled_from(["", "layers.3.mlp.experts.1."]),
    st.sampled_from(["0", "01"]),
    st.sampled_from(["0", "1", "00", "1234567890"]),
    st.sampled_from(["gate_proj", "other"]),
    st.sampled_from(["qweight", "experts.2"]),
)


#: Patterns in which a number behind ``.experts.`` is not the expert's alone.
_ODD = (
    Family("seven", "layers.{layer}.mlp.experts.7.{projection}", {"gate_up": "w1", "down": "1"}),
    Family("digits", "layers.{layer}.mlp.experts.{projection}", {"gate_up": "7", "down": "1"}),
    Family("bank", "layers.{layer}.mlp.{expert}.experts.0.{projection}", WORDS),
)


@settings(max_examples=400)
@example(
    [
        "layers.3.mlp.experts.1.layers.0.mlp.experts.0.gate_proj.qweight",
        "layers.0.mlp.experts.0.gate_proj.qweight",
        "layers.0.mlp.experts.1.gate_proj.qweight",
    ],
    (),
    True,
)
@example(["layers.0.mlp.experts.7.w1.qweight", "layers.0.mlp.experts.8.w1.qweight"], _ODD[:1], True)
@example(["layers.0.mlp.experts.1", "layers.0.mlp.experts.7.qweight"], _ODD[1:2], True)
@given(
    st.lists(_EXPERT_NAME | st.lists(_COMPONENT, max_size=9).map(".".join), max_size=40),
    st.lists(st.sampled_from(_ODD), max_size=2).map(tuple),
    st.booleans(),
)
def test_names_parsed_together_are_names_parsed_one_by_one(
    names: list[str], own: tuple[Family, ...], native: bool
) -> None:
    parser = NameParser((*own, *FAMILIES))
    with pytest.MonkeyPatch.context() as patch:
        if not native:
            patch.setattr(scan, "LIBRARY", None)
        kinds, ids, experts = parser.parse_all(names)
    together = [
        None if kind < 0 else kinds[kind]._replace(expert=expert)
        for kind, expert in zip(ids, experts, strict=True)
    ]
    assert together == [parser.parse(name) for name in names]


@pytest.mark.parametrize(
    ("pattern", "projections"),
    [
        (5, WORDS),
        (None, WORDS),
        ("layers.{layer}.{expert}.{projection}", None),
        ("layers.{layer}.{expert}.{projection}", ["gate_proj", "up_proj", "down_proj"]),
        ("layers.{layer}.{expert}.{projection}", {**WORDS, "up": 5}),
    ],
)
def test_what_is_no_family_is_refused(pattern: object, projections: object) -> None:
    with pytest.raises(LoaderError, match="family mine is not valid; expected a pattern"):
        Family("mine", pattern, projections)  # type: ignore[arg-type]  # wrong on purpose

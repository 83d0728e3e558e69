"""Wildcard: what is said to take all experts alike must, whatever the entries."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loader.checkpoint.awq import read_awq
from loader.checkpoint.compressed import read_compressed
from loader.checkpoint.modelopt import read_modelopt
from loader.checkpoint.scheme import Dialect
from loader.checkpoint.wildcard import Numbered, loosen, loosen_expression
from loader.errors import LoaderError

EXPERTS = (0, 1, 5, 10, 11, 15, 51, 100, 115, 511)
STEM = "model.layers.{layer}.mlp.experts.{expert}.{projection}"


def module(layer: int = 3, expert: int = 5, projection: str = "up_proj") -> str:
    return STEM.format(layer=layer, expert=expert, projection=projection)


def awq(entries: list[str]) -> Dialect:
    return read_awq({"bits": 4, "group_size": 32, "modules_to_not_convert": entries})


def modelopt(entries: list[str]) -> Dialect:
    return read_modelopt({"quant_algo": "NVFP4", "ignore": entries}, None)


def group(targets: list[str], **weights: Any) -> dict[str, Any]:
    return {"targets": targets, "weights": {"num_bits": 4, "group_size": 32, **weights}}


def compressed(entries: list[str]) -> Dialect:
    groups = {"a": group(["Linear"])}
    return read_compressed({"format": "pack-quantized", "config_groups": groups, "ignore": entries})


def targets(entries: list[str]) -> Dialect:
    groups = {"a": group(entries, group_size=64), "b": group(["Linear"])}
    return read_compressed({"format": "pack-quantized", "config_groups": groups})


DIALECTS = (awq, modelopt, compressed, targets)


def assert_honest(dialect: Dialect, layer: int, projection: str) -> bool:
    """Nothing that was said to be alike differs; whether it was said."""
    modules = [module(layer, expert, projection) for expert in EXPERTS]
    said = {dialect.tells_apart(name) for name in modules}
    if said != {False}:
        return False
    assert len({dialect.excluded(name) for name in modules}) == 1
    assert len({dialect.scheme(name) for name in modules}) == 1
    return True


_FRAGMENT = st.sampled_from(
    ["model", ".", "layers", "3", "1", "5", "11", "mlp", "experts", ".experts.", "experts.5",
     "up_proj", "p", "*", "?", "[0-9]", "[!1]", "[", ".*", "\\.", "$", "^", "re:", "|", "(?:", ")",
     "+", "\\d", "model.layers.3", "model.layers.3.mlp.experts.5.up_proj"]
)  # fmt: skip
_ENTRY = st.lists(_FRAGMENT, min_size=1, max_size=7).map("".join)


@settings(max_examples=1500, deadline=None)
@given(
    st.sampled_from(DIALECTS),
    st.lists(_ENTRY, max_size=4),
    st.sampled_from([1, 3, 11]),
    st.sampled_from(["up_proj", "down_proj"]),
)
@example(awq, ["experts.1"], 3, "up_proj")
@example(awq, [".5."], 3, "up_proj")
@example(awq, ["5.up"], 3, "up_proj")
@example(modelopt, ["model.layers.3.mlp.experts.1*"], 3, "up_proj")
@example(modelopt, ["*.1?.up_proj"], 3, "up_proj")
@example(modelopt, ["model.layers.3.mlp.experts.5"], 3, "up_proj")
@example(modelopt, ["*[5]*"], 3, "up_proj")
@example(compressed, ["re:.*experts..\\.up"], 3, "up_proj")
@example(compressed, ["re:.*experts\\.1.*"], 3, "up_proj")
@example(compressed, ["re:(?:.*1\\.up_proj)"], 3, "up_proj")
@example(targets, ["model.layers.3.mlp.experts.5.up_proj"], 3, "up_proj")
def test_experts_that_are_not_told_apart_are_alike(
    make: Any, entries: list[str], layer: int, projection: str
) -> None:
    try:
        dialect = make(entries)
    except LoaderError:
        return  # an expression that is none
    assert_honest(dialect, layer, projection)


@pytest.mark.parametrize(
    ("make", "entries", "layer", "alike"),
    [
        (awq, [], 3, True),
        (awq, ["lm_head", "mlp.gate", "shared_expert", "model.layers.3.mlp.gate"], 3, True),
        (awq, ["model.layers.61."], 3, True),
        (awq, ["mlp.experts"], 3, True),
        (awq, ["experts.5"], 3, False),
        (awq, ["layers.4.mlp.experts.5."], 3, True),
        (awq, ["layers.3.mlp.experts.5."], 3, False),
        (modelopt, ["lm_head", "*.mlp.gate", "model.layers.3.self_attn*", "*mtp*"], 3, True),
        (modelopt, ["model.layers.61*"], 3, True),
        (modelopt, ["model.layers.61*"], 61, False),
        (modelopt, ["model.layers.3.mlp.experts*"], 4, True),
        (compressed, ["lm_head", "re:.*mlp.gate$", "re:.*self_attn.*"], 3, True),
        (compressed, [f"model.layers.{n}.mlp.gate" for n in range(48)], 3, True),
        (compressed, ["re:model\\.layers\\.61\\..*"], 3, True),
        (compressed, ["re:(?:.*lm_head)"], 3, False),
    ],
)
def test_what_configs_hold(make: Any, entries: list[str], layer: int, alike: bool) -> None:
    """Lists as tools write them leave one module to speak for all; others are read in full."""
    assert assert_honest(make(entries), layer, "up_proj") == alike


def test_a_module_above_is_selected_too() -> None:
    dialect = modelopt(["model.layers.3.mlp.experts.5.block"])
    names = [f"model.layers.{layer}.mlp.experts.7.block.up" for layer in (3, 4)]
    assert [dialect.tells_apart(name) for name in names] == [True, False]


def test_algorithms_by_module_are_looked_up_for_each() -> None:
    settings = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {module(): {}}}
    assert read_modelopt(settings, None).tells_apart(module())


@settings(max_examples=500, deadline=None)
@given(st.text("ab1*?[]!-", max_size=8), st.text("ab12", max_size=8))
def test_a_loose_glob_takes_what_the_glob_takes(glob: str, name: str) -> None:
    if fnmatchcase(name, glob):
        assert loosen(glob).takes(name) and loosen(glob).takes(re.sub("[0-9]+", "0", name))
    if glob in name:
        assert loosen(glob, whole=False).takes(re.sub("[0-9]+", "0", name))


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "b", "1", ".", ".*", "\\.", "^", "$", "|"]), max_size=6),
    st.text("ab12.", max_size=8),
)
def test_a_loose_expression_takes_what_the_expression_takes(parts: list[str], name: str) -> None:
    if re.match("".join(parts), name):
        assert loosen_expression("".join(parts)).takes(re.sub("[0-9]+", "0", name))


def test_texts_do_not_share_letters() -> None:
    assert not loosen("ab*ba").takes("aba") and loosen("ab*ba").takes("abba")
    assert not loosen("a*b*b").takes("ab") and loosen("a*b*b").takes("abb")


def test_a_newline_is_looked_at_in_full() -> None:
    assert Numbered.of([loosen("x1")]).tell_apart("a\n")
    assert not Numbered.of([loosen("x")]).tell_apart("a\n")

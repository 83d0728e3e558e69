"""compressed-tensors: groups, targets and ignore lists as the tool matches them."""

from __future__ import annotations

from typing import Any

import pytest

from loader.checkpoint.compressed import CompressedDialect, read_compressed
from loader.checkpoint.scheme import Role, Scheme, Unhandled
from loader.errors import CheckpointError, LoaderError, UnsupportedError

MODULE = "model.layers.3.mlp.experts.11.gate_proj"
INT4: dict[str, Any] = {
    "num_bits": 4,
    "type": "int",
    "strategy": "group",
    "group_size": 128,
    "symmetric": True,
    "actorder": None,
}
FP4: dict[str, Any] = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "symmetric": True,
}


def config(
    weights: dict[str, Any] | None, written: str | None = "pack-quantized", **keys: Any
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "format": None, **keys}
    return {"config_groups": {"group_0": group}, "format": written, "ignore": ["lm_head"]}


def scheme_of(quantization: dict[str, Any], module: str = MODULE) -> Scheme | Unhandled:
    return read_compressed(quantization).scheme(module)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_packed_integers(symmetric: bool, group: int) -> None:
    scheme = scheme_of(config({**INT4, "symmetric": symmetric, "group_size": group}))
    assert isinstance(scheme, Scheme)
    assert (scheme.format, scheme.kind, scheme.group) == ("pack-quantized", "int4", group)
    assert scheme.zero_points == ("eight" if symmetric else "stored")
    assert scheme.parts["weight_zero_point"].required is not symmetric
    assert scheme.parts["weight_packed"].role is Role.CODES_NK


@pytest.mark.parametrize("symmetric", [0, 1, "false", "true", [], {}, 1.5])
def test_symmetric_is_true_or_false(symmetric: Any) -> None:
    """Anything else was read as symmetric, and an asymmetric layer as one with zero point 8."""
    with pytest.raises(CheckpointError, match="symmetric is not true or false"):
        scheme_of(config({**INT4, "symmetric": symmetric}))
    assert scheme_of(config({**INT4, "symmetric": None})) == scheme_of(config(INT4))


def transform(location: str, targets: Any, **more: Any) -> dict[str, Any]:
    apply = [{"location": location, "targets": targets, **more}]
    return {"config_groups": {"u": {"type": "hadamard", "apply": apply}}}


@pytest.mark.parametrize("location", ["input", "output"])
@pytest.mark.parametrize("targets", [["Linear"], [MODULE], ["lm_head", "re:.*experts.*"]])
@pytest.mark.parametrize("weights", [INT4, FP4])
def test_activations_that_are_transformed_at_run_time_are_refused(
    location: str, targets: list[str], weights: dict[str, Any]
) -> None:
    written = "pack-quantized" if weights is INT4 else "nvfp4-pack-quantized"
    given = config(weights, written) | {"transform_config": transform(location, targets)}
    found = scheme_of(given)
    assert isinstance(found, Unhandled) and "transform_config" in found.format
    for ignore in (["re:.*experts.*"], "re:.*experts.*"):
        given["transform_config"] = transform(location, targets, ignore=ignore)
        assert isinstance(scheme_of(given), Scheme)


@pytest.mark.parametrize(
    "written",
    [
        None,
        {},
        {"config_groups": {}},
        transform("weight_input", ["Linear"]),
        transform("k_cache", ["Linear"]),
        transform("input", ["re:.*self_attn.*"]),
        transform("input", []),
    ],
)
def test_transforms_that_do_not_touch_the_experts(written: Any) -> None:
    assert scheme_of(config(INT4) | {"transform_config": written}) == scheme_of(config(INT4))


@pytest.mark.parametrize(
    "written",
    [
        5,
        "hadamard",
        [1],
        {"config_groups": 5},
        {"config_groups": {"u": 5}},
        {"config_groups": {"u": {"apply": 5}}},
        {"config_groups": {"u": {"apply": [5]}}},
        {"config_groups": {"u": {}}},
    ],
)
def test_a_transform_config_that_is_none(written: Any) -> None:
    with pytest.raises(CheckpointError, match="transform_config of quantization_config is not"):
        scheme_of(config(INT4) | {"transform_config": written})


def test_transforms_that_name_single_experts_tell_them_apart() -> None:
    given = config(INT4) | {"transform_config": transform("input", [MODULE])}
    assert read_compressed(given).tells_apart("model.layers.3.mlp.experts.0.gate_proj")
    assert not read_compressed(config(INT4)).tells_apart("model.layers.3.mlp.experts.0.gate_proj")


def test_one_scale_for_a_whole_row() -> None:
    scheme = scheme_of(config({**INT4, "strategy": "channel", "group_size": None}))
    assert isinstance(scheme, Scheme) and scheme.group == -1


def test_nvfp4_divides_by_its_global_scale() -> None:
    scheme = scheme_of(config(FP4, "nvfp4-pack-quantized"))
    assert isinstance(scheme, Scheme)
    assert (scheme.kind, scheme.group, scheme.global_sense) == ("e2m1", 16, "divisor")
    assert scheme.parts["input_global_scale"].role is Role.UNUSED


def test_the_format_of_a_group_comes_before_that_of_the_model() -> None:
    scheme = scheme_of(config(FP4, "mixed-precision", format="nvfp4-pack-quantized"))
    assert isinstance(scheme, Scheme) and scheme.kind == "e2m1"


@pytest.mark.parametrize(
    "weights, written, said",
    [
        ({**INT4, "num_bits": 8}, "pack-quantized", "pack-quantized with 8 bits of type int"),
        ({**INT4, "type": "float"}, "pack-quantized", "pack-quantized with 4 bits of type float"),
        ({**INT4, "num_bits": "4"}, "pack-quantized", "pack-quantized with 4 bits of type int"),
        (INT4, "int-quantized", "int-quantized with 4 bits of type int"),
        (INT4, None, "None with 4 bits of type int"),
        ({**FP4, "num_bits": 8}, "float-quantized", "float-quantized with 8 bits of type float"),
        ({**FP4, "group_size": 32}, "nvfp4-pack-quantized", "nvfp4-pack-quantized with group 32"),
        (FP4, "mxfp4-pack-quantized", "mxfp4-pack-quantized with 4 bits of type float"),
        (None, "pack-quantized", "weights not quantized by this group"),
    ],
)
def test_formats_that_are_named_and_not_loaded(
    weights: dict[str, Any] | None, written: str | None, said: str
) -> None:
    scheme = scheme_of(config(weights, written))
    assert isinstance(scheme, Unhandled) and scheme.format == said


@pytest.mark.parametrize(
    "value, good",
    [
        (None, True),
        (False, True),
        ("weight", True),
        ("static", True),
        ("group", False),
        (True, False),
        ("dynamic", False),
    ],
)
def test_activation_order(value: Any, good: bool) -> None:
    quantization = config({**INT4, "actorder": value})
    if good:
        assert isinstance(scheme_of(quantization), Scheme)
    else:
        with pytest.raises(UnsupportedError, match="actorder"):
            read_compressed(quantization)


def groups(*pairs: tuple[list[str], dict[str, Any]]) -> dict[str, Any]:
    listed = {
        f"group_{n}": {"targets": targets, "weights": weights}
        for n, (targets, weights) in enumerate(pairs)
    }
    return {"config_groups": listed, "format": "pack-quantized"}


@pytest.mark.parametrize(
    "first, second, group",
    [
        (["Linear"], [MODULE], 64),  # a name comes before a class, whatever the order
        (["Linear"], ["re:.*gate_proj"], 64),
        (["re:.*experts.*"], ["re:.*gate_proj"], 128),  # of two names the first group
        (["Linear"], ["re:gate_proj"], 128),  # re.match begins at the start
        (["Linear"], ["gate_proj"], 128),  # no substring
        ([MODULE], ["Linear"], 128),
    ],
)
def test_the_group_of_a_module(first: list[str], second: list[str], group: int) -> None:
    quantization = groups((first, INT4), (second, {**INT4, "group_size": 64}))
    scheme = scheme_of(quantization)
    assert isinstance(scheme, Scheme) and scheme.group == group


def test_a_module_that_no_group_targets() -> None:
    scheme = scheme_of(groups((["re:.*self_attn.*"], INT4)))
    assert isinstance(scheme, Unhandled) and "no config group" in scheme.format


def ignoring(*entries: str) -> CompressedDialect:
    return read_compressed({**config(INT4), "ignore": list(entries)})


@pytest.mark.parametrize(
    "entries, excluded",
    [
        ((), False),
        ((MODULE,), True),
        (("model.layers.3",), False),
        (("gate_proj",), False),
        (("re:.*experts.*",), True),
        (("re:experts",), False),
        ((r"re:model\.layers\.3\.",), True),
        (("re:model.layers.3",), True),
        ((MODULE.upper(), "re:(?i)MODEL.*GATE_proj"), True),
        (("re:nothing", "re:(?i)MODEL.*GATE_proj"), True),
        # Groups are numbered within their own pattern, in whatever company.
        ((r"re:(x)y\1", r"re:.*\.(experts)\..*"), True),
        ((r"re:(q)z\1", r"re:(mod)el.*(11).*", "re:zzz"), True),
        (("re:(?P<n>a)b", "re:(?P<n>model).*"), True),
        (("re:a|model", "re:zzz"), True),
    ],
)
def test_ignore_lists_match_as_the_tool_matches(entries: tuple[str, ...], excluded: bool) -> None:
    assert ignoring(*entries).excluded(MODULE) == frozenset({excluded})


@pytest.mark.parametrize("pattern", ["re:(", "re:[a", "re:*", "re:(?P<n>a)(?P<n>b)"])
def test_a_pattern_that_is_no_expression(pattern: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        ignoring("lm_head", pattern)
    assert caught.value.file == "config.json" and repr(pattern) in str(caught.value.found)


@pytest.mark.parametrize("value", ["lm_head", "re:.*", 1, True, {"a": 1}])
@pytest.mark.parametrize("key", ["ignore", "targets"])
def test_lists_that_are_none(key: str, value: Any) -> None:
    quantization = config(INT4)
    if key == "ignore":
        quantization["ignore"] = value
    else:
        quantization["config_groups"]["group_0"]["targets"] = value
    with pytest.raises(CheckpointError) as caught:
        read_compressed(quantization)
    assert key in str(caught.value) and caught.value.found == repr(value)


@pytest.mark.parametrize("value", [None, {}, [], "group_0", {"group_0": None}, {"group_0": []}])
def test_no_groups(value: Any) -> None:
    with pytest.raises(LoaderError) as caught:
        read_compressed({"config_groups": value})
    assert caught.value.file == "config.json" and caught.value.found is not None


@pytest.mark.parametrize("group", [None, 0, "128", True])
def test_a_group_that_is_no_number(group: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_compressed(config({**INT4, "group_size": group}))
    assert caught.value.found == repr(group)

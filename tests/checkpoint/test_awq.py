"""AWQ gemm: what its config says, and what it says that is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from loader.checkpoint.awq import read_awq
from loader.checkpoint.scheme import Role, Scheme
from loader.errors import CheckpointError, LoaderError, UnsupportedError

AUTOAWQ: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": None,
}
GPTQMODEL: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 64,
    "zero_point": False,
    "format": "gemm",
    "checkpoint_format": "gemm",
    "method": "awq",
    "desc_act": False,
    "meta": {"quantizer": ["gptqmodel:7.7.0"]},
}
MODULE = "model.layers.3.mlp.experts.11.gate_proj"


def scheme_of(config: dict[str, Any]) -> Scheme:
    scheme = read_awq(config).scheme(MODULE)
    assert isinstance(scheme, Scheme)
    return scheme


@pytest.mark.parametrize(
    "config, group, zeros", [(AUTOAWQ, 128, "stored"), (GPTQMODEL, 64, "eight")]
)
def test_what_the_tools_write(config: dict[str, Any], group: int, zeros: str) -> None:
    scheme = scheme_of(config)
    assert (scheme.format, scheme.kind, scheme.group) == ("awq-gemm", "int4", group)
    assert scheme.zero_points == zeros and scheme.global_sense == "none"
    roles = {name: part.role for name, part in scheme.parts.items()}
    assert roles == {
        "qweight": Role.CODES_KN,
        "qzeros": Role.ZEROS_GN,
        "scales": Role.SCALES_GN,
        "g_idx": Role.CHECK_GROUPS,
    }
    required = {name for name, part in scheme.parts.items() if part.required}
    assert required == {"qweight", "scales"} | ({"qzeros"} if zeros == "stored" else set())


@pytest.mark.parametrize(
    "keys",
    [{"w_bit": 4, "q_group_size": 32, "bits": None, "group_size": None}, {"version": "GEMM"}],
)
def test_other_spellings(keys: dict[str, Any]) -> None:
    config = {**AUTOAWQ, **keys}
    config = {key: value for key, value in config.items() if value is not None}
    assert scheme_of(config).group == (32 if "w_bit" in keys else 128)


@pytest.mark.parametrize("key", ["version", "format", "checkpoint_format"])
@pytest.mark.parametrize("value", ["gemv", "gemv_fast", "marlin", "exllama", None, 4])
def test_other_packings_are_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(UnsupportedError) as caught:
        read_awq({**AUTOAWQ, key: value})
    assert caught.value.file == "config.json"
    assert (caught.value.expected, caught.value.found) == (f"{key} gemm", str(value).lower())


@pytest.mark.parametrize("bits", [2, 3, 8, "4", None, True, 4.0001, [4]])
def test_other_bits(bits: Any) -> None:
    with pytest.raises(UnsupportedError) as caught:
        read_awq({**AUTOAWQ, "bits": bits})
    assert caught.value.found == f"{bits} bits of type int"


@pytest.mark.parametrize("group", [0, None, "128", 1.5, True])
def test_a_group_that_is_no_number(group: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_awq({**AUTOAWQ, "group_size": group})
    assert caught.value.found == repr(group)


def test_activation_order() -> None:
    with pytest.raises(UnsupportedError, match="desc_act"):
        read_awq({**GPTQMODEL, "desc_act": True})


@pytest.mark.parametrize(
    "keys",
    [
        {"zero_point": "true"},
        {"zero_point": None},
        {"modules_to_not_convert": "mlp.gate"},
        {"modules_to_not_convert": {"a": 1}},
    ],
)
def test_values_of_the_wrong_type(keys: dict[str, Any]) -> None:
    with pytest.raises(LoaderError) as caught:
        read_awq({**AUTOAWQ, **keys})
    assert caught.value.file == "config.json" and caught.value.expected


BOTH, NEITHER, EITHER = frozenset({True}), frozenset({False}), frozenset({True, False})


@pytest.mark.parametrize(
    "entries, readings",
    [
        (None, NEITHER),
        ([], NEITHER),
        ([""], NEITHER),
        (["model.layers.3."], BOTH),
        (["model.layers.3"], BOTH),
        (["mlp.experts"], BOTH),
        (["mlp.gate"], NEITHER),
        (["gate"], EITHER),  # a substring of gate_proj, and no component
        (["layers.3.mlp.experts.1"], EITHER),  # the beginning of expert 11
        (["lm_head", "layers.3.mlp.experts.11.gate_proj"], BOTH),
        (["model.layers.33"], NEITHER),
    ],
)
def test_two_readings_of_an_ignore_list(entries: Any, readings: frozenset[bool]) -> None:
    dialect = read_awq({**AUTOAWQ, "modules_to_not_convert": entries})
    assert dialect.excluded(MODULE) == readings

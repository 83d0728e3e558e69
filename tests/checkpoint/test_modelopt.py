"""ModelOpt: settings in one file or two that must agree, per model or per module."""

from __future__ import annotations

from typing import Any

import pytest

from loader.checkpoint.modelopt import ModelOptDialect, read_modelopt
from loader.checkpoint.scheme import Role, Scheme, Unhandled
from loader.errors import CheckpointError, LoaderError, UnsupportedError

MODULE = "model.layers.3.mlp.experts.11.gate_proj"
EXPERTS = "model.layers.3.mlp.experts"
CONFIG: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []}


def hf(algorithm: Any = "NVFP4", **keys: Any) -> dict[str, Any]:
    return {"quantization": {"quant_algo": algorithm, "group_size": 16, **keys}}


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8"])
@pytest.mark.parametrize("where", ["config", "hf", "both", "method left out"])
def test_nvfp4_multiplies_by_its_global_scale(algorithm: str, where: str) -> None:
    config: dict[str, Any] | None = {**CONFIG, "quant_algo": algorithm}
    quant_file: dict[str, Any] | None = hf(algorithm)
    if where == "config":
        quant_file = None
    elif where == "hf":
        config = {}
    elif where == "method left out":
        config, quant_file = {"quant_algo": algorithm}, None
    scheme = read_modelopt(config, quant_file).scheme(MODULE)
    assert isinstance(scheme, Scheme)
    assert (scheme.kind, scheme.group, scheme.global_sense) == ("e2m1", 16, "multiplier")
    assert scheme.parts["input_scale"].role is Role.UNUSED


def test_a_file_that_names_no_algorithm_leaves_it_to_the_other() -> None:
    dialect = read_modelopt({"quant_method": "modelopt"}, hf("NVFP4"))
    assert isinstance(dialect.scheme(MODULE), Scheme)


@pytest.mark.parametrize(
    "algorithm, keys, said",
    [
        ("FP8", {}, "quant_algo FP8"),
        (None, {}, "quant_algo None"),
        ("MXFP4", {}, "quant_algo MXFP4"),
        ("NVFP4", {"group_size": 32}, "NVFP4 with group 32"),
        ("NVFP4", {"group_size": None}, "NVFP4 with group None"),
        (["NVFP4"], {}, "quant_algo ['NVFP4']"),
    ],
)
def test_algorithms_that_are_named_and_not_loaded(
    algorithm: Any, keys: dict[str, Any], said: str
) -> None:
    scheme = read_modelopt({}, hf(algorithm, **keys)).scheme(MODULE)
    assert isinstance(scheme, Unhandled) and scheme.format == said


@pytest.mark.parametrize("algorithm", ["W4A16_AWQ", "W4A8_AWQ", "NVFP4_AWQ"])
@pytest.mark.parametrize("where", ["config", "hf"])
def test_scaled_activations_are_refused_by_name(algorithm: str, where: str) -> None:
    config = {**CONFIG, "quant_algo": algorithm} if where == "config" else {}
    quant_file = hf(algorithm) if where == "hf" else None
    with pytest.raises(UnsupportedError) as caught:
        read_modelopt(config, quant_file)
    assert "pre_quant_scale" in caught.value.what and algorithm in caught.value.what
    assert caught.value.file == ("config.json" if where == "config" else "hf_quant_config.json")


def test_two_files_that_disagree_on_the_algorithm() -> None:
    with pytest.raises(CheckpointError) as caught:
        read_modelopt(CONFIG, hf("FP8"))
    assert caught.value.file == "hf_quant_config.json and config.json"
    assert "FP8" in str(caught.value.found) and "NVFP4" in str(caught.value.found)


@pytest.mark.parametrize("content", [{}, {"quantization": None}, {"quantization": []}])
def test_a_file_without_its_section(content: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_modelopt({}, content)
    assert caught.value.file == "hf_quant_config.json"


BOTH, NEITHER, EITHER = frozenset({True}), frozenset({False}), frozenset({True, False})


@pytest.mark.parametrize(
    "entries, readings",
    [
        ([], NEITHER),
        (None, NEITHER),
        ([MODULE], BOTH),
        ([MODULE + "."], BOTH),
        (["model.layers.3*"], BOTH),
        (["*experts*"], BOTH),
        (["*.gate_proj"], BOTH),
        (["model.layers.?.mlp.*"], BOTH),
        (["model.layers.[0-3].mlp.experts.*"], BOTH),
        ([EXPERTS], EITHER),  # a module above: meant by some writers
        (["model.layers.3"], EITHER),
        (["model.layers.3.mlp.gate*"], NEITHER),
        (["model.layers.33*"], NEITHER),
        (["gate_proj"], NEITHER),
        (["lm_head", "*router*", f"{EXPERTS}.1*"], BOTH),
    ],
)
@pytest.mark.parametrize("where", ["config", "hf"])
def test_readings_of_an_exclude_list(entries: Any, readings: frozenset[bool], where: str) -> None:
    if where == "config":
        dialect = read_modelopt({**CONFIG, "ignore": entries}, None)
    else:
        dialect = read_modelopt({}, hf(exclude_modules=entries))
    assert dialect.excluded(MODULE) == readings


def both(config: list[str], quant_file: list[str]) -> ModelOptDialect:
    return read_modelopt({**CONFIG, "ignore": config}, hf(exclude_modules=quant_file))


@pytest.mark.parametrize(
    "config, quant_file, readings",
    [
        ([MODULE], ["*experts*"], BOTH),
        ([EXPERTS], ["*experts*"], BOTH),
        ([EXPERTS], [], NEITHER),  # only as an exact name do the two agree
        ([EXPERTS], [EXPERTS], EITHER),
        ([], ["lm_head"], NEITHER),
    ],
)
def test_two_lists_agree_where_one_reading_is_shared(
    config: list[str], quant_file: list[str], readings: frozenset[bool]
) -> None:
    assert both(config, quant_file).excluded(MODULE) == readings


@pytest.mark.parametrize("config, quant_file", [([MODULE], []), ([], ["*experts*"])])
def test_two_lists_that_select_differently(config: list[str], quant_file: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        both(config, quant_file).excluded(MODULE)
    error = caught.value
    assert error.tensor == MODULE and error.file == "hf_quant_config.json and config.json"
    assert str(config) in str(error.found) and str(quant_file) in str(error.found)


def test_a_list_in_one_file_only_is_the_list() -> None:
    config = {key: value for key, value in CONFIG.items() if key != "ignore"}
    assert read_modelopt(config, hf(exclude_modules=[MODULE])).excluded(MODULE) == BOTH


@pytest.mark.parametrize("value", ["lm_head", 3, True, {"a": 1}])
def test_lists_that_are_none(value: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_modelopt({**CONFIG, "ignore": value}, None)
    assert (caught.value.file, caught.value.found) == ("config.json", repr(value))
    with pytest.raises(CheckpointError) as caught:
        read_modelopt({}, hf(exclude_modules=value))
    assert caught.value.file == "hf_quant_config.json"


def mixed(layers: Any, **keys: Any) -> ModelOptDialect:
    return read_modelopt({}, hf("MIXED_PRECISION", quantized_layers=layers, **keys))


def test_mixed_precision_by_module_or_the_nearest_one_above() -> None:
    dialect = mixed(
        {
            MODULE: {"quant_algo": "NVFP4", "group_size": 16},
            "model.layers.3.mlp.experts.12": {"quant_algo": "FP8"},
            EXPERTS: {"quant_algo": "NVFP4", "group_size": 16},
            "model.layers.4": "odd",
        }
    )
    assert isinstance(dialect.scheme(MODULE), Scheme)
    assert isinstance(dialect.scheme(f"{EXPERTS}.13.up_proj"), Scheme)
    for module, said in (
        (f"{EXPERTS}.12.up_proj", "quant_algo FP8"),
        ("model.layers.4.mlp.experts.0.up_proj", "'odd'"),
        ("model.layers.33.mlp.experts.0.up_proj", "not listed in quantized_layers"),
    ):
        scheme = dialect.scheme(module)
        assert isinstance(scheme, Unhandled) and scheme.format == said


def test_what_mixed_precision_does_not_list_may_be_plain() -> None:
    dialect = mixed({EXPERTS: {"quant_algo": "NVFP4"}})
    assert dialect.excluded(MODULE) == NEITHER
    assert True in dialect.excluded("model.layers.5.mlp.experts.0.up_proj")


@pytest.mark.parametrize("layers", [None, [], "x"])
def test_mixed_precision_without_its_map(layers: Any) -> None:
    with pytest.raises(LoaderError) as caught:
        mixed(layers)
    assert caught.value.file == "hf_quant_config.json"


def test_two_maps_that_disagree() -> None:
    layers = {MODULE: {"quant_algo": "NVFP4"}}
    config = {**CONFIG, "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    same = hf("MIXED_PRECISION", quantized_layers=dict(layers))
    assert isinstance(read_modelopt(config, same).scheme(MODULE), Scheme)
    other = hf("MIXED_PRECISION", quantized_layers={MODULE: {"quant_algo": "FP8"}})
    with pytest.raises(CheckpointError) as caught:
        read_modelopt(config, other)
    assert caught.value.tensor == MODULE
    assert "FP8" in str(caught.value.found) and "NVFP4" in str(caught.value.found)

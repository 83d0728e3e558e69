"""Model: the facts of config.json, wherever the writer put them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.checkpoint.model import Model, read_model
from loader.errors import CheckpointError, LoaderError, UnsupportedError

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "hidden_size": 256,
    "moe_intermediate_size": 512,
    "num_experts": 8,
    "num_hidden_layers": 2,
    "num_experts_per_tok": 2,
    "quantization_config": {"quant_method": "awq"},
}
WANTED = Model("qwen3_moe", 256, 512, 8, 2, 2, {"quant_method": "awq"})


def test_a_flat_config() -> None:
    assert read_model(CONFIG) == WANTED


@pytest.mark.parametrize("outside", ["quantization_config", "num_experts", "hidden_size", ""])
def test_a_nested_config(outside: str) -> None:
    """``text_config`` comes first; what it does not say may stand outside."""
    inner = {key: value for key, value in CONFIG.items() if key != outside}
    outer = {"model_type": "qwen3_5", "hidden_size": 9, "text_config": inner}
    if outside:
        outer[outside] = CONFIG[outside]
    assert read_model(outer) == WANTED


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_every_name_of_the_expert_count(key: str) -> None:
    config = {k: v for k, v in CONFIG.items() if k != "num_experts"} | {key: 61}
    assert read_model(config).experts == 61


@pytest.mark.parametrize(
    "key", ["num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k"]
)
@pytest.mark.parametrize("value, wanted", [(3, 3), (99, 8)])
def test_every_name_of_top_k(key: str, value: int, wanted: int) -> None:
    config = {k: v for k, v in CONFIG.items() if k != "num_experts_per_tok"} | {key: value}
    assert read_model(config).top_k == wanted


@pytest.mark.parametrize("key", ["hidden_size", "moe_intermediate_size", "num_hidden_layers"])
@pytest.mark.parametrize("value", [None, "left out"])
def test_facts_that_may_be_left_out(key: str, value: Any) -> None:
    config = {**CONFIG, key: value}
    if value is not None:
        del config[key]
    model = read_model(config)
    field = "layers" if key == "num_hidden_layers" else key
    assert getattr(model, field) is None


@pytest.mark.parametrize("key", [k for k in CONFIG if k.startswith(("num_", "hidden_s", "moe_i"))])
@pytest.mark.parametrize("value", [-1, 1.5, "8", True, [8], {"a": 8}])
def test_facts_of_the_wrong_type(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_model({**CONFIG, key: value})
    assert key in caught.value.what and caught.value.file == "config.json"
    assert caught.value.found == repr(value)


@pytest.mark.parametrize("experts", [0, None])
def test_a_model_without_experts(experts: Any) -> None:
    with pytest.raises(UnsupportedError) as caught:
        read_model({**CONFIG, "num_experts": experts})
    assert "num_experts" in str(caught.value.expected) and "qwen3_moe" in str(caught.value.found)


@pytest.mark.parametrize("activation", ["gelu", "relu", "SiLU", "", None, 1, ["silu"]])
@pytest.mark.parametrize("nested", [False, True])
def test_an_activation_other_than_silu(activation: Any, nested: bool) -> None:
    config = {**CONFIG, "hidden_act": activation}
    config = {"text_config": config, "hidden_act": "silu"} if nested else config
    with pytest.raises(UnsupportedError) as caught:
        read_model(config)
    assert caught.value.found == repr(activation)


@pytest.mark.parametrize("key", ["hidden_activation", "mlp_hidden_act", "moe_hidden_act"])
@pytest.mark.parametrize("nested", [False, True])
def test_every_name_of_the_activation(key: str, nested: bool) -> None:
    def read(**changes: Any) -> Model:
        config = {k: v for k, v in CONFIG.items() if k != "hidden_act"} | changes
        return read_model({"text_config": config} if nested else config)

    assert read(**{key: "silu"}) == read(**{key: None}) == read() == WANTED
    for changes in ({key: "gelu_pytorch_tanh"}, {key: "relu2", "hidden_act": "silu"}, {key: 5}):
        with pytest.raises(UnsupportedError, match=f"expected {key} 'silu'"):
            read(**changes)


@pytest.mark.parametrize("limit", [7.0, 10, [None, 7.0], "7"])
def test_a_limit_on_gate_and_up_is_refused(limit: Any) -> None:
    for name in ("swiglu_limit", "swiglu_limits"):
        assert read_model({**CONFIG, name: None}) == read_model({**CONFIG, name: [None]}) == WANTED
        for config in ({**CONFIG, name: limit}, {"text_config": {**CONFIG, name: limit}}):
            with pytest.raises(UnsupportedError, match="a limit on gate and up") as caught:
                read_model(config)
            assert caught.value.found == repr(limit)


@pytest.mark.parametrize("key", ["hidden_size", "moe_intermediate_size"])
def test_a_size_of_nothing_is_refused(key: str) -> None:
    with pytest.raises(CheckpointError, match=f"config key {key} is not valid.* of 1 or more"):
        read_model({**CONFIG, key: 0})


def test_silu_is_what_a_config_means_that_names_none() -> None:
    config = {key: value for key, value in CONFIG.items() if key != "hidden_act"}
    assert read_model(config) == read_model(CONFIG)


@pytest.mark.parametrize("value", [[], "awq", 4, True])
def test_a_quantization_config_that_is_no_object(value: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_model({**CONFIG, "quantization_config": value})
    assert caught.value.found == type(value).__name__


def test_no_quantization() -> None:
    assert read_model({**CONFIG, "quantization_config": None}).quantization is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(changes=st.dictionaries(st.sampled_from([*CONFIG, "text_config"]), JSON, max_size=4))
def test_any_json_is_read_or_refused(changes: dict[str, Any]) -> None:
    try:
        model = read_model({**CONFIG, **changes})
    except LoaderError as error:
        assert error.file == "config.json"
    else:
        assert model.experts > 0 and 0 < model.top_k <= model.experts

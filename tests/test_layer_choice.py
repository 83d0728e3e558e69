"""Layer choice: which layers a plan takes, and what it leaves alone and why."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from plan_fakes import small

import loader
from loader.errors import CheckpointError, LoaderError, UnsupportedError
from loader.testing.checkpoint import TinyCheckpoint, tiny_checkpoint
from loader.testing.container import INDEX, rewrite


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """Layer 0 dense, 1 to 3 MoE, 4 a draft layer past the model's own."""
    folder = tmp_path_factory.mktemp("layered")
    sizes: dict[str, Any] = {"hidden": 64, "intermediate": 64, "experts": 3, "group": 32}
    return tiny_checkpoint(
        folder, family="deepseek-v3", layers=4, dense=(0,), extra_layers=1, shards=2, **sizes
    )


def test_all_moe_layers_of_the_model_are_planned_and_the_others_say_why_not(
    layered: TinyCheckpoint,
) -> None:
    plan = loader.plan(layered.folder)
    assert [layer.layer for layer in plan.layers] == [1, 2, 3]
    assert plan.to_dict()["skipped"] == [
        {"layer": 0, "reason": "dense layer"},
        {"layer": 4, "reason": "beyond num_hidden_layers=4"},
    ]


def test_layers_are_chosen_outright(layered: TinyCheckpoint) -> None:
    plan = loader.plan(layered.folder, layers=(n for n in (3, 1, 3)))
    assert [layer.layer for layer in plan.layers] == [1, 3]
    assert [(s.layer, s.reason) for s in plan.skipped] == [
        (0, "dense layer"),
        (2, "not asked for"),
        (4, "beyond num_hidden_layers=4"),
    ]
    draft = loader.plan(layered.folder, layers=[4])
    assert [layer.layer for layer in draft.layers] == [4]
    assert [skip.layer for skip in draft.skipped] == [0, 1, 2, 3]


@pytest.mark.parametrize(("layers", "missing"), [([0], 0), ([1, 9], 9), ([-1], -1)])
def test_a_layer_without_experts_cannot_be_asked_for(
    layered: TinyCheckpoint, layers: list[int], missing: int
) -> None:
    for call in (loader.plan, loader.load):
        with pytest.raises(LoaderError, match=r"holds no experts") as caught:
            call(layered.folder, layers=layers)
        assert caught.value.layer == missing
        assert caught.value.expected == "one of [1, 2, 3, 4]"


def test_no_layer_at_all_cannot_be_asked_for(layered: TinyCheckpoint) -> None:
    for call in (loader.plan, loader.load):
        with pytest.raises(LoaderError, match="no layer was asked for"):
            call(layered.folder, layers=[])


def test_a_model_whose_layers_hold_no_experts_is_refused(tmp_path: Path) -> None:
    small(tmp_path, dialect="awq-gemm", config_overrides={"num_hidden_layers": 0})
    with pytest.raises(CheckpointError, match="no layer of the model holds experts"):
        loader.plan(tmp_path)


def test_a_layer_in_a_format_that_is_not_loaded_is_refused_by_name_and_the_others_load(
    tmp_path: Path,
) -> None:
    targets = {"targets": ["re:.*layers.1.*"], "weights": {"num_bits": 8, "type": "float"}}
    groups = {"config_groups": {"group_1": {**targets, "format": "float-quantized"}}}
    overrides = {"quantization_config": groups}
    small(tmp_path, dialect="ct-int4", config_overrides=overrides)
    with pytest.raises(UnsupportedError, match="float-quantized with 8 bits") as caught:
        loader.plan(tmp_path)
    assert caught.value.layer == 1
    assert [layer.layer for layer in loader.plan(tmp_path, layers=[0]).layers] == [0]


ACCOUNTED: list[dict[str, Any]] = [
    {"dialect": "awq-gemm"},
    {"dialect": "modelopt-nvfp4"},
    {"dialect": "ct-nvfp4", "input_scale": True, "excluded": (1,)},
    {"dialect": "ct-int4", "family": "qwen3.5", "shared_expert": "quantized"},
    {"dialect": "modelopt-nvfp4", "fused": True},
    {
        "dialect": "awq-gptqmodel",
        "family": "glm4-moe",
        "layers": 4,
        "dense": (0,),
        "extra_layers": 1,
        "shards": 3,
    },
]


@pytest.mark.parametrize("more", ACCOUNTED)
@pytest.mark.parametrize("layers", (None, [1]))
def test_every_tensor_is_loaded_or_left_alone_exactly_once(
    more: dict[str, Any], layers: list[int] | None, tmp_path: Path
) -> None:
    checkpoint = small(tmp_path, **more)
    plan = loader.plan(tmp_path, layers=layers)
    names = plan.checkpoint.catalog.names
    loaded = [
        names[row]
        for layer in plan.layers
        for table in layer.source.tables
        for row in table.rows.tolist()
    ]
    left = [name for found in plan.left_alone().values() for name in found]
    assert Counter(loaded + left) == Counter(checkpoint.tensor_names())
    assert all(".experts." in name for name in loaded)
    assert all(found for found in plan.left_alone().values())
    described = plan.to_dict()["left_alone"]
    assert {why: entry["tensors"] for why, entry in described.items()} == {
        why: len(found) for why, found in plan.left_alone().items()
    }


def test_what_is_left_alone_says_why(layered: TinyCheckpoint) -> None:
    left = loader.plan(layered.folder, layers=[1, 2]).left_alone()
    assert set(left) == {
        "not an expert",
        "shared expert",
        "dense layer",
        "not asked for",
        "beyond num_hidden_layers=4",
    }
    assert all(".layers.0.mlp." in name for name in left["dense layer"])
    assert all(".shared_experts." in name for name in left["shared expert"])
    assert all(".layers.3.mlp.experts." in name for name in left["not asked for"])
    assert all(".layers.4." in name for name in left["beyond num_hidden_layers=4"])
    assert "model.norm.weight" in left["not an expert"]


def test_parts_that_a_format_does_not_use_are_left_alone_too(tmp_path: Path) -> None:
    small(tmp_path, dialect="modelopt-nvfp4", layers=1, experts=2)
    left = loader.plan(tmp_path).left_alone()["part of an expert that the format does not use"]
    assert len(left) == 2 * 3 and all(name.endswith(".input_scale") for name in left)


def test_tensors_that_the_index_does_not_name_are_left_alone_as_such(tmp_path: Path) -> None:
    checkpoint = small(tmp_path, dialect="awq-gemm", shards=2)
    index = json.loads((tmp_path / INDEX).read_text())
    spare = "model.layers.1.mlp.shared_expert.gate_proj.weight"
    index["weight_map"] = {
        name: file for name, file in index["weight_map"].items() if name != "model.norm.weight"
    }

    def add(tensors: dict[str, Any]) -> None:
        tensors[spare] = tensors["model.norm.weight"]

    rewrite(tmp_path, add)
    (tmp_path / INDEX).write_text(json.dumps(index))
    left = loader.plan(tmp_path).left_alone()
    assert left["not named by the index"] == [
        name for name in checkpoint.tensor_names() if name in (spare, "model.norm.weight")
    ]
    assert "shared expert" not in left

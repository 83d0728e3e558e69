"""Inspect: what is in a checkpoint, layers that cannot be loaded included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from load_fakes import RecordingSource

from loader import Family
from loader.errors import CheckpointError
from loader.inspect import inspect, inspect_text
from loader.testing.checkpoint import tiny_checkpoint
from loader.testing.container import read_header, rewrite

FIXTURES = Path(__file__).parents[1] / "fixtures" / "checkpoints"
SMALL: dict[str, Any] = {"hidden": 64, "intermediate": 64, "experts": 4, "group": 32}


def test_the_facts_are_those_of_the_files(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(
        tmp_path, family="glm4-moe", layers=4, dense=(0,), excluded=(2,), shards=2, **SMALL
    )
    with RecordingSource(tmp_path) as source:
        facts = inspect(source)
        assert source.log == []
        assert source.list()  # the caller's own source stays open
    assert json.loads(json.dumps(facts)) == facts
    assert facts["source"] == str(tmp_path)
    assert (facts["model_type"], facts["quantization"], facts["prefix"]) == (
        "glm4_moe",
        "awq",
        "model.",
    )
    assert (facts["experts"], facts["top_k"], facts["num_hidden_layers"]) == (4, 2, 4)
    assert facts["files"] == [
        {"file": p.name, "tensors": len(read_header(p)[0]), "bytes": p.stat().st_size}
        for p in checkpoint.files()
    ]
    entries = [entry for path in checkpoint.files() for entry in read_header(path)[0].items()]
    for found in facts["dtypes"]:
        sizes = [
            e["data_offsets"][1] - e["data_offsets"][0]
            for _, e in entries
            if e["dtype"] == found["dtype"]
        ]
        assert (found["tensors"], found["bytes"]) == (len(sizes), sum(sizes))
    assert sum(found["tensors"] for found in facts["dtypes"]) == len(entries)
    assert [layer["layer"] for layer in facts["layers"]] == [1, 2, 3]
    assert [layer["format"] for layer in facts["layers"]] == [
        "awq-gemm",
        "not quantized",
        "awq-gemm",
    ]
    assert [layer["tensors"] for layer in facts["layers"]] == [36, 12, 36]
    assert facts["layers"][0]["geometry"] == "E=4 H=64 I=64, group 32"
    assert facts["layers"][1]["geometry"] == "E=4 H=64 I=64"
    assert facts["layers"][1]["why"] == "excluded by config"
    assert facts["other_layers"] == [0]
    experts = sum(layer["tensors"] for layer in facts["layers"])
    assert sum(facts["not_experts"].values()) == len(entries) - experts


@pytest.mark.parametrize("width", (80, 120))
@pytest.mark.parametrize(
    "folder", sorted(path.parent for path in FIXTURES.glob("*/config.json")), ids=lambda p: p.name
)
def test_every_shipped_checkpoint_is_shown_within_the_width(folder: Path, width: int) -> None:
    if folder.name == "qwen3moe-modelopt-int4-awq":
        return  # refused as a whole, see the loader's own tests
    text = inspect_text(inspect(folder), width)
    assert max(map(len, text.replace(str(folder), "").splitlines())) <= width
    assert str(folder) in text and "Expert layers" in text


def test_a_layer_that_cannot_be_loaded_is_listed_with_its_error(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path, layers=3, **SMALL)

    def drop(tensors: dict[str, Any]) -> None:
        del tensors[checkpoint.name(1, 2, "up", "scales")]

    rewrite(tmp_path, drop)
    facts = inspect(tmp_path)
    assert [layer["format"] for layer in facts["layers"]] == [
        "awq-gemm",
        "cannot be loaded",
        "awq-gemm",
    ]
    assert checkpoint.name(1, 2, "up", "scales") in facts["layers"][1]["why"]
    text = inspect_text(facts)
    assert f"Layers 1: {facts['layers'][1]['why']}." in " ".join(text.split())
    assert "Layers 0, 2: awq: awq-gemm." in text


def test_a_checkpoint_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        inspect(tmp_path / "nothing")


def test_a_family_of_ones_own_is_named(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, layers=1, **SMALL)

    def rename(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[name.replace(".mlp.experts.", ".moe.experts.")] = tensors.pop(name)

    rewrite(tmp_path, rename)
    names = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    family = Family("mine", "layers.{layer}.moe.experts.{expert}.{projection}", names)
    assert inspect(tmp_path, family)["layers"][0]["family"] == "mine"

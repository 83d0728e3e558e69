"""Layer plan: the bytes of one layer on one card, which are those of its loaded buffers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from plan_fakes import ranks, small

import loader
from loader import Policy, Shard
from loader.memory import storage_bytes
from loader.plan import plan_cards
from loader.testing.checkpoint import tiny_checkpoint
from loader.testing.container import read_header

CATEGORIES = ("weight", "metadata", "globals", "unquantized")

CASES: list[tuple[str, str, dict[str, Any], Shard]] = [
    ("awq-gemm", "compact", {}, Shard()),
    ("awq-gemm", "record", {}, Shard(1, 2)),
    ("awq-gemm", "wide", {}, Shard(ep_rank=1, ep_size=3)),
    ("awq-gptqmodel", "compact", {}, Shard(expert_ids=(3, 0))),
    ("ct-int4", "compact", {"excluded": (1,)}, Shard(1, 4)),
    ("ct-int4-asym", "record", {"group": -1}, Shard(1, 2)),
    ("ct-nvfp4", "compact", {"excluded": (0,)}, Shard(1, 4, 1, 2)),
    ("modelopt-nvfp4", "wide", {}, Shard(0, 2)),
    ("modelopt-nvfp4", "compact", {"fused": True, "fused_globals": "E2"}, Shard(1, 2)),
]


@pytest.mark.parametrize(("dialect", "layout", "more", "shard"), CASES)
def test_bytes_by_category_are_those_of_the_loaded_buffers(
    dialect: str, layout: str, more: dict[str, Any], shard: Shard, tmp_path: Path
) -> None:
    small(tmp_path, dialect=dialect, **more)
    policy = Policy(layout=layout)
    plan = loader.plan(tmp_path, shard, policy)
    experts = loader.load(tmp_path, shard=shard, policy=policy)
    wide = loader.load(tmp_path, shard=shard, policy=Policy(layout="wide"))
    resident = 0
    for layer in plan.layers:
        sizes = layer.bytes_by_category()
        assert {name: sizes[name] for name in CATEGORIES} == _held(experts[layer.layer])
        assert sizes["metadata_wide"] == _held(wide[layer.layer])["metadata"]
        assert sizes["saved"] == sizes["metadata_wide"] - sizes["metadata"] - sizes["globals"]
        resident += sum(_held(experts[layer.layer]).values())
    workspace = next(iter(experts.values())).workspace
    assert plan.workspace_bytes == storage_bytes(workspace.tensors())
    assert plan.resident_bytes == resident + plan.workspace_bytes
    assert plan.resident_bytes == experts.report.memory.resident


def _held(layer: Any) -> Counter[str]:
    held = Counter(dict.fromkeys(CATEGORIES, 0))
    plain = layer.metadata_layout == "plain"
    for name, tensor in layer.named_buffers():
        part = name.split("_", 1)[1]
        if part == "weight":
            held["unquantized" if plain else "weight"] += tensor.numel() * tensor.itemsize
        else:
            held["globals" if part == "globals" else "metadata"] += tensor.numel() * tensor.itemsize
    return held


@pytest.mark.parametrize("more", [{}, {"fused": True}, {"excluded": (0,)}])
@pytest.mark.parametrize("dialect", ["awq-gemm", "modelopt-nvfp4", "ct-int4"])
def test_source_bytes_of_a_whole_layer_are_its_tensors_on_disk(
    dialect: str, more: dict[str, Any], tmp_path: Path
) -> None:
    small(tmp_path, dialect=dialect, **more)
    header, _ = read_header(tmp_path / "model.safetensors")
    for layer in loader.plan(tmp_path).layers:
        wanted = sum(
            entry["data_offsets"][1] - entry["data_offsets"][0]
            for name, entry in header.items()
            if f"layers.{layer.layer}.mlp.experts." in name and not name.endswith("input_scale")
        )
        assert layer.source_bytes == wanted


def test_the_slices_of_all_ranks_add_up(tmp_path: Path) -> None:
    small(tmp_path, dialect="awq-gemm")
    whole = loader.plan(tmp_path).layers[0].bytes_by_category()
    cards = plan_cards(tmp_path, [Shard(rank, 2) for rank in range(2)])
    for name in ("weight", "metadata"):
        assert sum(card.layers[0].bytes_by_category()[name] for card in cards) == whole[name]
    cards = plan_cards(tmp_path, [Shard(ep_rank=rank, ep_size=3) for rank in range(3)])
    for name in ("source", "weight", "metadata"):
        assert sum(card.layers[0].bytes_by_category()[name] for card in cards) == whole[name]


def test_several_cards_are_planned_as_each_alone(tmp_path: Path) -> None:
    small(tmp_path, dialect="awq-gemm")
    shards = [Shard(rank, 2, ep, 2) for ep in range(2) for rank in range(2)]
    together = plan_cards(tmp_path, shards, layers=iter([1]), card_memory=1 << 30)
    alone = [loader.plan(tmp_path, shard, layers=[1], card_memory=1 << 30) for shard in shards]
    assert [plan.to_dict() for plan in together] == [plan.to_dict() for plan in alone]
    free = plan_cards(tmp_path, shards)
    assert len({plan.card_bytes for plan in free}) == 1


def test_a_phase_inside_a_group_is_planned(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, intermediate=192, group=128, layers=1, payload="sparse")
    phases = [p.layers[0].geometry()["phase"] for p in plan_cards(tmp_path, ranks(4))]
    assert phases == [0, 48, 96, 16]
    groups = [p.layers[0].spec.w2.groups for p in plan_cards(tmp_path, ranks(4))]
    assert groups == [1, 1, 2, 1]

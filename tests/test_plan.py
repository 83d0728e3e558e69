"""Plan: from headers alone, as the contract says; names of one's own; the form of its report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from load_fakes import Allocations
from plan_fakes import ranks, small

import loader
from loader import Family, Policy, Shard
from loader.checkpoint.source import LocalSource
from loader.errors import LoaderError, UnsupportedError
from loader.plan import Plan, plan_cards
from loader.testing.checkpoint import PRESETS, TinyCheckpoint, tiny_checkpoint
from loader.testing.container import read_header, rewrite

REFERENCE_LAYERS = 48
#: Saved bytes of each card of TP=4 over all 48 layers.
SAVED = {
    ("awq-gemm", "record"): 943_718_400,
    ("awq-gemm", "compact"): 1_415_577_600,
    ("modelopt-nvfp4", "compact"): 1_887_436_800 - 294_912,
}


def saved(plan: Plan) -> int:
    return sum(layer["bytes"]["saved"] for layer in plan.to_dict()["layers"])


@pytest.mark.parametrize(("dialect", "layout"), SAVED)
def test_the_reference_geometry_saves_exactly_the_bytes_of_the_contract_on_every_card(
    dialect: str, layout: str, tmp_path: Path
) -> None:
    """Two of the 48 layers: all are alike, and the saving is a sum over layers."""
    layers = 2
    size = {**PRESETS["reference-geometry"], "layers": layers, "shards": 1, "attention": False}
    group = 32 if dialect == "awq-gemm" else None
    tiny_checkpoint(tmp_path, **{**size, "dialect": dialect, "group": group})
    shards = [Shard(rank, 4) for rank in range(4)]
    plans = plan_cards(tmp_path, shards, Policy(layout=layout))
    assert [saved(plan) * REFERENCE_LAYERS for plan in plans] == [
        SAVED[dialect, layout] * layers
    ] * 4
    for plan in plans:
        for layer in plan.layers:
            sizes = layer.bytes_by_category()
            assert sizes["saved"] == sizes["metadata_wide"] - sizes["metadata"] - sizes["globals"]
    if dialect == "modelopt-nvfp4":
        assert sizes["globals"] * REFERENCE_LAYERS == 294_912


def test_the_full_reference_checkpoint_plans_to_the_contract(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, **PRESETS["reference-geometry"])
    plan = loader.plan(tmp_path, Shard(3, 4))
    assert len(plan.layers) == REFERENCE_LAYERS
    tensors = sum(len(t.rows) for layer in plan.layers for t in layer.source.tables)
    assert tensors == 221_184
    assert saved(plan) == SAVED["awq-gemm", "compact"]


class _HeadersOnly(LocalSource):
    """Refuses every read that reaches past the header of a shard."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.ends = {path.name: read_header(path)[1] for path in folder.glob("*.safetensors")}
        self.shards_read: set[str] = set()

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        if file in self.ends:
            assert offset + len(buffer) <= self.ends[file], f"payload of {file} was read"
            self.shards_read.add(file)
        super().read_into(file, offset, buffer)


def test_headers_are_all_that_is_read_and_nothing_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_checkpoint(tmp_path, family="deepseek-v3", layers=3, dense=(0,), shards=3)
    allocations = Allocations(monkeypatch)
    with _HeadersOnly(tmp_path) as source:
        plan = loader.plan(source)
        str(plan)
        json.dumps(plan.to_dict())
        assert source.shards_read == set(source.ends)
        assert source.list()  # a source of the caller's own stays open
    assert allocations.storages == []


# --- a family of one's own ---------------------------------------------------------------------

OWN = {"gate": "g", "up": "u", "down": "d"}


def _renamed(folder: Path) -> TinyCheckpoint:
    checkpoint = small(folder, dialect="awq-gemm", layers=1)

    def rename(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            new = name.replace(".mlp.experts.", ".moe.expert_")
            for ours, theirs in (("gate", "g"), ("up", "u"), ("down", "d")):
                new = new.replace(f".{ours}_proj.", f".{theirs}.") if "expert_" in new else new
            tensors[new] = tensors.pop(name)

    rewrite(folder, rename)
    return checkpoint


def test_a_family_of_ones_own_loads_what_no_known_family_names(tmp_path: Path) -> None:
    checkpoint = _renamed(tmp_path)
    with pytest.raises(UnsupportedError, match=r"pass family=\.\.\."):
        loader.plan(tmp_path)
    family = Family("mine", "layers.{layer}.moe.expert_{expert}.{projection}", OWN)
    plan = loader.plan(tmp_path, family=family)
    assert [layer.layer for layer in plan.layers] == [0]
    experts = loader.load(tmp_path, family=family)
    for expert in range(checkpoint.experts):
        weights = experts[0].dequantize(expert)
        for projection, weight in weights.items():
            wanted = torch.from_numpy(checkpoint.weight_f32(0, expert, projection))
            assert torch.equal(weight, wanted)


@pytest.mark.parametrize(
    ("pattern", "projections"),
    [
        ("layers.{layer}.{expert}.{projection}", {"gate": "g", "up": "u"}),
        ("layers.{layer}.{expert}.{projection}", {"gate": "g", "up": "g", "down": "d"}),
        ("layers.{layer}.{expert}.{projection}", {"gate_up": "g", "down": "d"}),
        ("layers.{layer}.experts.{projection}", OWN),
        ("layers.{layer}.{expert}", OWN),
        ("layers.0.{expert}.{projection}", OWN),
        ("layers.{layer}.{layer}.{expert}.{projection}", OWN),
        ("layers.{layer}.{expert}.{expert}.{projection}", OWN),
    ],
)
def test_a_family_that_cannot_be_is_refused(pattern: str, projections: dict[str, str]) -> None:
    with pytest.raises(LoaderError, match="family mine"):
        Family("mine", pattern, projections)


# --- the form of the report --------------------------------------------------------------------

PLAN_KEYS = {
    "schema",
    "source",
    "device",
    "shard",
    "policy",
    "top_k",
    "layers",
    "skipped",
    "left_alone",
    "memory",
}
LAYER_KEYS = {
    "layer",
    "format",
    "format_reason",
    "geometry",
    "metadata_layout",
    "metadata_layout_reason",
    "scale_dtypes",
    "bytes",
    "routes",
}
BYTES_KEYS = {
    "source",
    "weight",
    "metadata",
    "globals",
    "unquantized",
    "metadata_wide",
    "saved",
}
MEMORY_KEYS = {
    "predicted_resident",
    "predicted_peak",
    "workspace",
    "staging",
    "conversion",
    "card",
    "fits",
}


@pytest.mark.parametrize("dialect", ["awq-gemm", "ct-nvfp4"])
def test_the_keys_of_a_plan(dialect: str, tmp_path: Path) -> None:
    small(tmp_path, dialect=dialect, excluded=(1,))
    described = loader.plan(tmp_path, Shard(1, 2)).to_dict()
    assert json.loads(json.dumps(described)) == described
    assert set(described) == PLAN_KEYS
    assert set(described["memory"]) == MEMORY_KEYS
    assert described["schema"] == 1
    assert described["source"] == str(tmp_path) and described["device"] == "cpu"
    for layer in described["layers"]:
        assert set(layer) == LAYER_KEYS
        assert set(layer["bytes"]) == BYTES_KEYS
        for route in layer["routes"]:
            assert set(route) == {"tokens", "route", "implementation", "reason"}
    geometry = described["layers"][0]["geometry"]
    assert geometry == {
        "hidden": 72 if dialect == "awq-gemm" else 80,
        "intermediate": 64,
        "intermediate_local": 32,
        "experts": 5,
        "experts_local": 5,
        "group_w13": 32 if dialect == "awq-gemm" else 16,
        "group_w2": 32 if dialect == "awq-gemm" else 16,
        "phase": 0,
    }


def test_ranks_agree_on_the_fingerprint_and_other_policies_do_not(tmp_path: Path) -> None:
    small(tmp_path, dialect="awq-gemm")
    first, second = (p.fingerprint() for p in plan_cards(tmp_path, ranks(2)))
    assert first == second
    assert json.loads(json.dumps(first)) == first
    for policy in (Policy(layout="wide"), Policy(qpn_m1="off"), Policy(grouped_max_tokens=3)):
        assert loader.plan(tmp_path, policy=policy).fingerprint() != first
    assert loader.plan(tmp_path, layers=[0]).fingerprint() != first


def test_a_plan_is_a_value_that_prints(tmp_path: Path) -> None:
    small(tmp_path, dialect="awq-gemm")
    plan = loader.plan(tmp_path)
    assert str(tmp_path) in str(plan) and "qpn_grouped" in str(plan)
    assert len(repr(plan)) < 20_000
    with pytest.raises(AttributeError):
        plan.device = "cpu"  # type: ignore[misc, assignment]  # wrong on purpose

"""Plan: from headers alone, to the byte, for every card; what it refuses; what it leaves alone."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from load_fakes import Allocations, RecordingSource, banks_of, same_bits

import loader
from loader import Family, Policy, Shard, room
from loader.checkpoint.source import LocalSource
from loader.errors import CapacityError, CheckpointError, LoaderError, UnsupportedError
from loader.memory import storage_bytes
from loader.plan import Plan, plan_cards
from loader.room import Room
from loader.testing.checkpoint import PRESETS, TinyCheckpoint, tiny_checkpoint
from loader.testing.container import INDEX, read_header, rewrite

REFERENCE_LAYERS = 48
#: DESIGN section 4: saved bytes of each card of TP=4 over all 48 layers.
SAVED = {
    ("awq-gemm", "record"): 943_718_400,
    ("awq-gemm", "compact"): 1_415_577_600,
    ("modelopt-nvfp4", "compact"): 1_887_436_800 - 294_912,
}
CATEGORIES = ("weight", "metadata", "globals", "unquantized")


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


# --- bytes -------------------------------------------------------------------------------------

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


def _small(folder: Path, **more: Any) -> TinyCheckpoint:
    sizes: dict[str, Any] = {"hidden": 72, "intermediate": 64, "experts": 5, "layers": 2}
    sizes["attention"] = "plain"
    if "nvfp4" not in more.get("dialect", ""):
        sizes["group"] = 32
    else:
        sizes["hidden"] = 80
    if more.get("group") == -1:
        sizes["hidden"] = 80
    return tiny_checkpoint(folder, **{**sizes, **more})


@pytest.mark.parametrize(("dialect", "layout", "more", "shard"), CASES)
def test_bytes_by_category_are_those_of_the_loaded_buffers(
    dialect: str, layout: str, more: dict[str, Any], shard: Shard, tmp_path: Path
) -> None:
    _small(tmp_path, dialect=dialect, **more)
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
    _small(tmp_path, dialect=dialect, **more)
    header, _ = read_header(tmp_path / "model.safetensors")
    for layer in loader.plan(tmp_path).layers:
        wanted = sum(
            entry["data_offsets"][1] - entry["data_offsets"][0]
            for name, entry in header.items()
            if f"layers.{layer.layer}.mlp.experts." in name and not name.endswith("input_scale")
        )
        assert layer.source_bytes == wanted


def test_the_slices_of_all_ranks_add_up(tmp_path: Path) -> None:
    _small(tmp_path, dialect="awq-gemm")
    whole = loader.plan(tmp_path).layers[0].bytes_by_category()
    cards = plan_cards(tmp_path, [Shard(rank, 2) for rank in range(2)])
    for name in ("weight", "metadata"):
        assert sum(card.layers[0].bytes_by_category()[name] for card in cards) == whole[name]
    cards = plan_cards(tmp_path, [Shard(ep_rank=rank, ep_size=3) for rank in range(3)])
    for name in ("source", "weight", "metadata"):
        assert sum(card.layers[0].bytes_by_category()[name] for card in cards) == whole[name]


def test_several_cards_are_planned_as_each_alone(tmp_path: Path) -> None:
    _small(tmp_path, dialect="awq-gemm")
    shards = [Shard(rank, 2, ep, 2) for ep in range(2) for rank in range(2)]
    together = plan_cards(tmp_path, shards, layers=iter([1]), card_memory=1 << 30)
    alone = [loader.plan(tmp_path, shard, layers=[1], card_memory=1 << 30) for shard in shards]
    assert [plan.to_dict() for plan in together] == [plan.to_dict() for plan in alone]
    free = plan_cards(tmp_path, shards)
    assert len({plan.card_bytes for plan in free}) == 1


# --- staging and memory ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """A plain layer with larger rows than the quantized one before it."""
    return _small(tmp_path_factory.mktemp("mixed"), dialect="awq-gemm", excluded=(1,))


def _least(folder: Path) -> int:
    with pytest.raises(CapacityError) as caught:
        loader.plan(folder, staging_bytes=2)
    assert "staging_bytes is too small" in caught.value.what
    assert caught.value.found == "2 bytes"
    words = str(caught.value.expected).split()
    assert words[:2] == ["at", "least"] and words[3] == "bytes"
    return int(words[2])


def test_the_least_staging_that_the_error_names_works_and_nothing_less(
    mixed: TinyCheckpoint,
) -> None:
    least = _least(mixed.folder)
    assert least == 2 * 32 * 72 * 2  # two buffers of 32 bf16 or fp16 rows of H
    wanted = banks_of(loader.load(mixed.folder))
    assert same_bits(banks_of(loader.load(mixed.folder, staging_bytes=least)), wanted)
    for call in (loader.plan, loader.load):
        with pytest.raises(CapacityError, match=f"at least {least} bytes, found {least - 1} bytes"):
            call(mixed.folder, staging_bytes=least - 1)  # type: ignore[operator]


@settings(deadline=None, max_examples=60)
@given(staging=st.integers(0, 40_000) | st.integers(0, 1 << 20))
def test_every_staging_budget_is_refused_or_kept(mixed: TinyCheckpoint, staging: int) -> None:
    least = 2 * 32 * 72 * 2
    if staging < least:
        with pytest.raises(CapacityError, match=f"at least {least} bytes"):
            loader.plan(mixed.folder, staging_bytes=staging)
        return
    plan = loader.plan(mixed.folder, staging_bytes=staging)
    assert plan.buffer_bytes > 0
    assert plan.staging_bytes == plan.buffers * plan.buffer_bytes <= staging
    assert 2 * plan.chunk_limit <= staging
    for layer in plan.layers:
        chunks = layer.chunks(plan.chunk_limit)
        assert max(chunk.buffer_bytes for chunk in chunks) <= plan.chunk_limit
        assert sum(chunk.bytes_read for chunk in chunks) == plan.read_bytes(layer.layer)


def test_a_card_that_is_too_small_is_refused_by_load_before_anything_is_read_or_allocated(
    mixed: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocations = Allocations(monkeypatch)
    with RecordingSource(mixed.folder) as source:
        plan = loader.plan(source, card_memory=1 << 40)
        assert plan.fits is True
        plan.require_fit()
        peak = plan.predicted_peak
        assert peak == plan.resident_bytes + plan.staging_bytes + plan.conversion_bytes
        assert loader.plan(source, card_memory=peak).fits is True
        short = loader.plan(source, card_memory=peak - 1000)
        assert short.fits is False and short.to_dict()["memory"]["fits"] is False
        with pytest.raises(CapacityError, match="1000 bytes too many") as caught:
            loader.load(source, card_memory=peak - 1000)
        assert source.log == []
    assert allocations.storages == []
    assert f"within {peak - 1000} bytes" in str(caught.value) and f"found {peak}" in str(
        caught.value
    )
    with RecordingSource(mixed.folder) as source:
        loader.load(source, card_memory=peak)


def test_without_a_budget_the_free_memory_counts(
    mixed: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "room_of", lambda device: Room(12345, "limit of the test"))
    plan = loader.plan(mixed.folder)
    assert (plan.card_bytes, plan.fits) == (12345, False)
    with pytest.raises(CapacityError, match="limit of the test") as caught:
        loader.load(mixed.folder)
    assert f"{plan.predicted_peak - 12345} bytes too many" in str(caught.value)


# --- layers ------------------------------------------------------------------------------------


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
            call(layered.folder, layers=layers)  # type: ignore[operator]
        assert caught.value.layer == missing
        assert caught.value.expected == "one of [1, 2, 3, 4]"


def test_no_layer_at_all_cannot_be_asked_for(layered: TinyCheckpoint) -> None:
    for call in (loader.plan, loader.load):
        with pytest.raises(LoaderError, match="no layer was asked for"):
            call(layered.folder, layers=[])  # type: ignore[operator]


def test_a_model_whose_layers_hold_no_experts_is_refused(tmp_path: Path) -> None:
    _small(tmp_path, dialect="awq-gemm", config_overrides={"num_hidden_layers": 0})
    with pytest.raises(CheckpointError, match="no layer of the model holds experts"):
        loader.plan(tmp_path)


def test_a_layer_in_a_format_that_is_not_loaded_is_refused_by_name_and_the_others_load(
    tmp_path: Path,
) -> None:
    targets = {"targets": ["re:.*layers.1.*"], "weights": {"num_bits": 8, "type": "float"}}
    groups = {"config_groups": {"group_1": {**targets, "format": "float-quantized"}}}
    overrides = {"quantization_config": groups}
    _small(tmp_path, dialect="ct-int4", config_overrides=overrides)
    with pytest.raises(UnsupportedError, match="float-quantized with 8 bits") as caught:
        loader.plan(tmp_path)
    assert caught.value.layer == 1
    assert [layer.layer for layer in loader.plan(tmp_path, layers=[0]).layers] == [0]


# --- every tensor once -------------------------------------------------------------------------

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
    checkpoint = _small(tmp_path, **more)
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
    _small(tmp_path, dialect="modelopt-nvfp4", layers=1, experts=2)
    left = loader.plan(tmp_path).left_alone()["part of an expert that the format does not use"]
    assert len(left) == 2 * 3 and all(name.endswith(".input_scale") for name in left)


def test_tensors_that_the_index_does_not_name_are_left_alone_as_such(tmp_path: Path) -> None:
    checkpoint = _small(tmp_path, dialect="awq-gemm", shards=2)
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


# --- a family of one's own ---------------------------------------------------------------------

OWN = {"gate": "g", "up": "u", "down": "d"}


def _renamed(folder: Path) -> TinyCheckpoint:
    checkpoint = _small(folder, dialect="awq-gemm", layers=1)

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
    _small(tmp_path, dialect=dialect, excluded=(1,))
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


def test_a_phase_inside_a_group_is_planned(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, intermediate=192, group=128, layers=1, payload="sparse")
    phases = [p.layers[0].geometry()["phase"] for p in plan_cards(tmp_path, _ranks(4))]
    assert phases == [0, 48, 96, 16]
    groups = [p.layers[0].spec.w2.groups for p in plan_cards(tmp_path, _ranks(4))]
    assert groups == [1, 1, 2, 1]


def _ranks(size: int) -> list[Shard]:
    return [Shard(rank, size) for rank in range(size)]


def test_ranks_agree_on_the_fingerprint_and_other_policies_do_not(tmp_path: Path) -> None:
    _small(tmp_path, dialect="awq-gemm")
    first, second = (p.fingerprint() for p in plan_cards(tmp_path, _ranks(2)))
    assert first == second
    assert json.loads(json.dumps(first)) == first
    for policy in (Policy(layout="wide"), Policy(qpn_m1="off"), Policy(grouped_max_tokens=3)):
        assert loader.plan(tmp_path, policy=policy).fingerprint() != first
    assert loader.plan(tmp_path, layers=[0]).fingerprint() != first


def test_a_plan_is_a_value_that_prints(tmp_path: Path) -> None:
    _small(tmp_path, dialect="awq-gemm")
    plan = loader.plan(tmp_path)
    assert str(tmp_path) in str(plan) and "qpn_grouped" in str(plan)
    assert len(repr(plan)) < 20_000
    with pytest.raises(AttributeError):
        plan.device = "cpu"  # type: ignore[misc, assignment]

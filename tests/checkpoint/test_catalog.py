"""Catalog: columns over all tensors, and who is an expert, who is not, and why."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from loader.checkpoint.catalog import REASONS, Catalog, build_catalog
from loader.checkpoint.family import FAMILIES, PROJECTIONS, Family
from loader.checkpoint.header import DTYPES, Header
from loader.checkpoint.index import Index
from loader.checkpoint.weight_map import WeightMap
from loader.errors import CheckpointError


def header(file: str, names: Sequence[str]) -> Header:
    """A header of U8 and F16 tensors of growing size, one after the other."""
    sizes = [2 * (n + 1) for n in range(len(names))]
    ends = 100 + np.cumsum(sizes, dtype=np.int64)
    shapes = [(size,) if n % 2 else (size // 2,) for n, size in enumerate(sizes)]
    return Header(
        file=file,
        names=list(names),
        dtypes=np.array(
            [DTYPES.index("U8" if n % 2 else "F16") for n in range(len(names))], np.uint8
        ),
        shape_ids=np.arange(len(names), dtype=np.int32),
        shapes=shapes,
        begins=ends - np.array(sizes, np.int64),
        ends=ends,
    )


def expert(
    layer: int, number: int, projection: str = "up_proj", part: str = "weight", prefix: str = "m."
) -> str:
    return f"{prefix}layers.{layer}.mlp.experts.{number}.{projection}.{part}"


def catalog_of(*files: Sequence[str], index: dict[str, str] | None = None) -> Catalog:
    headers = [header(f"f{n}", names) for n, names in enumerate(files)]
    weight_map = None if index is None else WeightMap.of(index)
    return build_catalog(headers, Index(tuple(h.file for h in headers), weight_map))


def test_columns_stand_for_the_headers() -> None:
    first = [expert(0, 3), "m.norm.weight", expert(0, 1, "gate_proj", "qweight")]
    second = [expert(2, 0, "down_proj", "scales"), "lm_head.weight"]
    catalog = catalog_of(first, second)
    assert catalog.names == [*first, *second] and catalog.files == ("f0", "f1")
    assert catalog.file.tolist() == [0, 0, 0, 1, 1]
    assert catalog.layer.tolist() == [0, -1, 0, 2, -1]
    assert catalog.expert.tolist() == [3, -1, 1, 0, -1]
    names = ["up", None, "gate", "down", None]
    assert [PROJECTIONS[p] if p >= 0 else None for p in catalog.projection] == names
    parts = ["weight", None, "qweight", "scales", None]
    assert [catalog.parts[p] if p >= 0 else None for p in catalog.part] == parts
    assert catalog.begin.tolist() == [100, 102, 106, 100, 102]
    assert catalog.end.tolist() == [102, 106, 112, 102, 106]
    assert catalog.describe(1) == ("m.norm.weight", "U8", (4,))
    assert catalog.describe(4) == ("lm_head.weight", "U8", (4,))
    assert catalog.prefix == "m."
    assert catalog.module(2) == "m.layers.0.mlp.experts.1.gate_proj"
    assert catalog.expert_layers() == [0, 2]
    assert catalog.header_bytes == 200


def test_a_fused_module_without_a_part() -> None:
    catalog = catalog_of(["m.layers.0.mlp.experts.gate_up_proj"])
    assert catalog.expert.tolist() == [-1] and catalog.layer.tolist() == [0]
    assert catalog.module(0) == "m.layers.0.mlp.experts.gate_up_proj"


def test_reasons() -> None:
    stale, draft = expert(0, 0), expert(0, 0, prefix="mtp.")
    first = [expert(0, 1), "m.layers.0.mlp.gate.weight", stale]
    second = [stale, draft]
    owner = {name: "f0" for name in first[:2]} | {stale: "f1", draft: "f1"}
    catalog = catalog_of(first, second, index=owner)
    reasons = [REASONS[code] for code in catalog.reason]
    assert reasons == ["", "not an expert", "not named by the index", "", "draft model"]
    for column in (catalog.layer, catalog.expert, catalog.projection, catalog.part, catalog.family):
        assert [value >= 0 for value in column.tolist()] == [True, False, False, True, False]


@pytest.mark.parametrize("prefixes", [("a.", "b."), ("", "model."), ("model.", "x.mtp.")])
def test_experts_under_two_prefixes_are_undecidable(prefixes: tuple[str, str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        catalog_of([expert(0, 0, prefix=prefix) for prefix in prefixes])
    assert all(repr(prefix) in str(caught.value.found) for prefix in prefixes)


def test_a_stale_prefix_that_the_index_does_not_name_is_no_second_one() -> None:
    own, stale = expert(0, 0), expert(0, 0, prefix="old.")
    catalog = catalog_of([own, stale], index={own: "f0"})
    assert catalog.prefix == "m."


@pytest.mark.parametrize("draft", ["mtp.", "model.mtp.", "draft.", "eagle."])
def test_a_draft_model_beside_the_model(draft: str) -> None:
    catalog = catalog_of([expert(0, 0), expert(0, 0, prefix=draft)])
    assert catalog.prefix == "m." and catalog.expert_layers() == [0]
    assert REASONS[catalog.reason[1]] == "draft model" and not catalog.unknown_experts()


def test_layers_without_experts() -> None:
    names = [
        expert(1, 0),
        "m.layers.0.mlp.up_proj.weight",
        "m.layers.1.input_layernorm.weight",
        "m.layers.12.self_attn.q_proj.weight",
        "visual.layers.7.mlp.up_proj.weight",
        "m.sublayers.8.x",
        "m.layers." + "9" * 5000 + ".x",
    ]
    assert catalog_of(names).other_layers() == [0, 12]


def test_layers_of_a_family_that_calls_them_otherwise() -> None:
    words = {"gate": "g", "up": "u", "down": "d"}
    family = Family("mine", "blocks.{layer}.bank.{expert}.{projection}", words)
    names = ["m.blocks.1.bank.0.g.weight", "m.blocks.0.mlp.weight", "m.layers.4.x"]
    catalog = build_catalog([header("f", names)], Index(("f",), None), (family, *FAMILIES))
    assert catalog.expert_layers() == [1] and catalog.other_layers() == [0]


def test_routers_of_layers_without_experts() -> None:
    names = [
        expert(1, 0),
        "m.layers.1.mlp.gate.weight",
        "m.layers.2.mlp.gate.weight",
        "m.layers.3.block_sparse_moe.gate.qweight",
        "m.layers.4.mlp.router.weight",
        "m.layers.5.mlp.gate_proj.weight",
        "m.layers.6.mlp.shared_expert_gate.weight",
        "other.layers.7.mlp.gate.weight",
    ]
    assert catalog_of(names).routers() == {2: names[2], 3: names[3], 4: names[4]}


def test_names_that_look_like_experts() -> None:
    odd = "m.layers.0.ffn.experts.0.matrix.weight"
    catalog = catalog_of([expert(0, 0), odd, "m.layers.0.mlp.shared_experts.up_proj.weight"])
    assert catalog.unknown_experts() == [odd]


def test_no_tensors_at_all() -> None:
    catalog = catalog_of([])
    assert catalog.expert_layers() == [] and catalog.other_layers() == []
    assert catalog.header_bytes == 8

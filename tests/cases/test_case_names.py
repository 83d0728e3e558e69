"""Cases, section 2: every expert tensor is accounted for, under whatever name the family gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from case_checks import PRESENT, Recorder, case, ok, refuse, small
from case_names import NAMES, drop, rename

import loader
from loader.testing.checkpoint import TinyCheckpoint
from loader.testing.container import read_header, rewrite

# 2.1 Scales missing for some experts


@pytest.mark.parametrize("dialect, layer, experts", [("M", 1, "35"), ("M", 0, "0"), ("N", 1, "7")])
def test_activation_scales_are_not_needed(
    tmp_path: Path, dialect: str, layer: int, experts: str
) -> None:
    checkpoint = case(tmp_path, dialect, input_scale=True)
    drop(tmp_path, rf".*layers\.{layer}\.mlp\.experts\.[{experts}]\..*\.input(_global)?_scale")
    ok(checkpoint, truth=checkpoint.codes, dtypes=())


PARTS = {
    "A": ("qweight", "qzeros", "scales"),
    "P": ("weight_packed", "weight_scale"),
    "ct-int4-asym": ("weight_packed", "weight_scale", "weight_zero_point"),
    "N": ("weight_packed", "weight_scale", "weight_global_scale"),
    "M": ("weight", "weight_scale", "weight_scale_2"),
}
MISSING = [(dialect, part) for dialect, listed in PARTS.items() for part in listed]


@pytest.mark.parametrize("dialect, part", MISSING)
def test_a_missing_part_is_named_with_its_experts(tmp_path: Path, dialect: str, part: str) -> None:
    checkpoint = small(tmp_path, dialect)
    layer, projection, experts = (1, "up", "13") if part.startswith("weight") else (0, "down", "02")
    drop(tmp_path, rf".*layers\.{layer}\..*\.[{experts}]\.{projection}_proj\.{part}")
    error = refuse(
        tmp_path,
        file=PRESENT,
        layer=layer,
        experts=", ".join(experts),
        tensor=checkpoint.name(layer, int(experts[0]), projection, part),
        expected="4 experts",
        found=f"{projection}.{part}",
    )
    assert "(2)" in str(error)


def test_all_that_is_missing_in_a_layer_is_one_message(tmp_path: Path) -> None:
    small(tmp_path, "M")
    gone = drop(tmp_path, r".*layers\.1\..*experts\.(1\.up|3\.down)_proj\.weight(_scale)?")
    assert len(gone) == 4
    error = refuse(tmp_path, layer=1, experts="1, 3", found="no up.weight of experts 1")
    assert "no down.weight_scale of experts 3" in str(error.found)


@pytest.mark.parametrize("projection", NAMES)
def test_a_projection_that_is_missing_altogether(tmp_path: Path, projection: str) -> None:
    checkpoint = small(tmp_path, "A")
    drop(tmp_path, rf".*layers\.0\..*\.{projection}_proj\..*")
    name = checkpoint.name(0, 0, projection, "qweight")
    refuse(tmp_path, layer=0, experts="0, 1, 2, 3", tensor=name, found=projection)


def test_an_expert_that_is_missing_altogether(tmp_path: Path) -> None:
    small(tmp_path, "P")
    drop(tmp_path, r".*layers\.1\..*experts\.3\..*")
    refuse(tmp_path, layer=1, experts="3", tensor="experts.3.gate_proj.weight_packed")


@pytest.mark.parametrize("experts", [3, 5])
def test_the_config_declares_another_number_of_experts(tmp_path: Path, experts: int) -> None:
    small(tmp_path, "N", config={"num_experts": experts})
    refuse(tmp_path, layer=0, experts="3" if experts == 3 else "4", expected=f"{experts} experts")


@pytest.mark.parametrize("dialect", ["N", "M"])
def test_global_scales_over_three_decades(tmp_path: Path, dialect: str) -> None:
    checkpoint = case(tmp_path, dialect)
    drawn = [
        float(checkpoint.codes(layer, expert, name).global_scale or 0)
        for layer in (0, 1)
        for expert in range(8)
        for name in NAMES
    ]
    assert max(drawn) / min(drawn) > 300 and len(set(drawn)) == len(drawn)
    ok(checkpoint)


# 2.2 Unknown or prefixed names


@pytest.mark.parametrize("dialect", ["N", "A"])
@pytest.mark.parametrize(
    "prefix", ["model.", "model.language_model.", "language_model.model.", "", "a.b.c."]
)
def test_the_prefix_is_found(tmp_path: Path, prefix: str, dialect: str) -> None:
    ok(small(tmp_path, dialect, prefix=prefix), dtypes=())


@pytest.mark.parametrize("dialect", ["N", "A"])
@pytest.mark.parametrize(
    "family",
    ["qwen3-next", "qwen3.5", "mixtral", "mixtral-hf5", "minimax", "deepseek-v3", "glm4-moe"],
)
def test_every_known_spelling(tmp_path: Path, family: str, dialect: str) -> None:
    ok(small(tmp_path, dialect, family=family), dtypes=())


@pytest.mark.parametrize("dialect", ["N", "A"])
@pytest.mark.parametrize(
    "pattern, replacement",
    [
        (r"\.mlp\.experts\.(\d+)\.", r".mlp.specialists.\1."),
        (r"\.mlp\.experts\.(\d+)\.", r".ffn.experts.\1."),
        (r"\.(gate|up|down)_proj\.", r".\1_matrix."),
        (r"\.mlp\.experts\.(\d+)\.", r".mlp.experts.e\1."),
    ],
)
def test_unknown_names_are_refused(
    tmp_path: Path, dialect: str, pattern: str, replacement: str
) -> None:
    small(tmp_path, dialect)
    rename(tmp_path, pattern, replacement)
    error = refuse(
        tmp_path,
        loader.UnsupportedError,
        file=PRESENT,
        expected="4 experts",
        found="0 known",
    )
    assert "model.layers." in str(error.found)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(
    "replacement", [r".mlp.specialists.\1.", r".mlp.expert_\1.", r".mlp.routed.\1."]
)
def test_one_layer_under_unknown_names_is_no_dense_layer(
    tmp_path: Path, layer: int, replacement: str
) -> None:
    small(tmp_path, "M")
    rename(tmp_path, rf"(?<=layers\.{layer})\.mlp\.experts\.(\d+)\.", replacement)
    refuse(tmp_path, layer=layer, expected="experts", found=PRESENT)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_without_any_tensor_is_refused(tmp_path: Path, layer: int) -> None:
    small(tmp_path, "M")
    drop(tmp_path, rf"model\.layers\.{layer}\..*")
    refuse(tmp_path, layer=layer, found="no tensor")


def test_the_other_layer_can_still_be_asked_for(tmp_path: Path) -> None:
    checkpoint = small(tmp_path, "M")
    drop(tmp_path, r"model\.layers\.0\..*")
    ok(checkpoint, layers=[1], dtypes=())


@pytest.mark.parametrize(
    "extra",
    [
        "model.layers.0.mlp.experts.0.gate_proj.lora.weight",
        "model.layers.0.mlp.experts.1.gate_proj_extra.weight",
        "model.layers.0.mlp.experts.01.gate_proj.qweight",
        "model.layers.1.mlp.experts.router_bias",
    ],
)
def test_a_name_that_only_begins_like_an_expert_is_none(tmp_path: Path, extra: str) -> None:
    small(tmp_path, "A", shards=1)
    rewrite(tmp_path, lambda tensors: tensors.update({extra: np.zeros(8, np.float32)}))
    refuse(tmp_path, loader.UnsupportedError, found=extra)


@pytest.mark.parametrize("part", ["bias", "pre_quant_scale", "qweight_2"])
def test_a_part_that_no_format_has_is_refused(tmp_path: Path, part: str) -> None:
    checkpoint = small(tmp_path, "A", shards=1)
    name = checkpoint.name(1, 2, "up", part)
    rewrite(tmp_path, lambda tensors: tensors.update({name: np.zeros(96, np.float32)}))
    known = part != "qweight_2"
    error = refuse(
        tmp_path,
        loader.UnsupportedError if known else loader.CheckpointError,
        file=PRESENT,
        layer=1,
        experts="2",
        tensor=name,
        found=part,
    )
    assert part != "pre_quant_scale" or "pre_quant_scale" in error.what


def test_a_family_of_the_user(tmp_path: Path) -> None:
    checkpoint = small(tmp_path, "N")
    rename(tmp_path, r"\.mlp\.experts\.(\d+)\.(\w+)_proj\.", r".ffn.bank.\1.\2_matrix.")
    words = {"gate": "gate_matrix", "up": "up_matrix", "down": "down_matrix"}
    family = loader.Family("mine", "layers.{layer}.ffn.bank.{expert}.{projection}", words)
    ok(checkpoint, truth=checkpoint.codes, family=family, dtypes=())


# 2.4 Shared expert in another precision


@pytest.mark.parametrize("shared", ["bf16", "quantized"])
@pytest.mark.parametrize(
    "dialect, family", [("P", "qwen3-next"), ("P", "glm4-moe"), ("A", "qwen3.5")]
)
def test_shared_experts_are_left_to_the_host(
    tmp_path: Path, dialect: str, family: str, shared: str
) -> None:
    checkpoint = small(tmp_path, dialect, family=family, shared_expert=shared)
    names = [name for name in checkpoint.tensor_names() if ".shared_expert" in name]
    assert len(names) >= 6
    cards = ok(checkpoint, dtypes=())
    assert all(
        module.expert_ids == (0, 1, 2, 3) for modules in cards.values() for module in modules
    )
    planned = loader.plan(tmp_path)
    assert planned.left_alone()["shared expert"] == sorted(names, key=names_order(checkpoint))
    assert not read_of(checkpoint, names)


def names_order(checkpoint: TinyCheckpoint) -> Any:
    """Sorts names as they lie in the files."""
    return checkpoint.tensor_names().index


def read_of(checkpoint: TinyCheckpoint, names: list[str]) -> list[str]:
    """Which of some tensors had a byte read beyond the gaps that are read along."""
    source = Recorder(checkpoint.folder)
    loader.load(source)
    source.close()
    touched = []
    for name in names:
        path = checkpoint.file_of(name)
        header, begin = read_header(path)
        first, last = (begin + offset for offset in header[name]["data_offsets"])
        for file, offset, length in source.payload_reads():
            overlap = min(last, offset + length) - max(first, offset)
            if file == path.name and overlap > 0 and last - first > 4096:
                touched.append(name)
    return touched

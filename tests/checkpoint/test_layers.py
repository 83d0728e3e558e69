"""Layers: how a layer is written is decided from the config and held against the file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loader.checkpoint.folder import open_checkpoint
from loader.checkpoint.layers import LayerResolver
from loader.checkpoint.modelopt import ModelOptDialect
from loader.checkpoint.scheme import PLAIN, Role
from loader.checkpoint.source import LocalSource
from loader.checkpoint.tables import LayerSource
from loader.errors import CheckpointError, LoaderError, UnsupportedError
from loader.testing.checkpoint import tiny_checkpoint
from loader.testing.container import RawTensor, edit_json, rewrite

FIXTURES = Path(__file__).parents[2] / "fixtures" / "checkpoints"
TINY: dict[str, Any] = {
    "hidden": 64,
    "intermediate": 96,
    "experts": 3,
    "payload": "sparse",
    "attention": False,
}
INT4 = ("awq-gemm", "awq-gptqmodel", "ct-int4", "ct-int4-asym")
FLOATS = ("ct-nvfp4", "modelopt-nvfp4")


def tiny(folder: Path, dialect: str, **settings: Any) -> Any:
    group = {"group": 32} if dialect in INT4 else {}
    return tiny_checkpoint(folder, dialect=dialect, **{**TINY, **group, **settings})


def resolver_of(folder: Path) -> LayerResolver:
    with LocalSource(folder) as source:
        return open_checkpoint(source).resolver


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dialect", [*INT4, *FLOATS])
def test_a_layer_as_it_was_written(tmp_path: Path, dialect: str, fused: bool) -> None:
    tiny(tmp_path, dialect, fused=fused)
    source = resolver_of(tmp_path).resolve(1)
    assert (source.layer, source.experts, source.fused) == (1, 3, fused)
    assert (source.hidden, source.intermediate) == (64, 96)
    group = 32 if dialect in INT4 else 16
    assert (source.group13, source.group2) == (group, group)
    assert source.scheme.kind == ("int4" if dialect in INT4 else "e2m1")
    assert source.zeros_stored is (dialect in ("awq-gemm", "awq-gptqmodel", "ct-int4-asym"))
    sense = {"ct-nvfp4": "divisor", "modelopt-nvfp4": "multiplier"}.get(dialect, "none")
    assert source.scheme.global_sense == sense
    assert source.reason.endswith(source.scheme.format)
    assert Role.UNUSED not in {table.role for table in source.tables}
    for table in source.tables:
        assert len(table.rows) == (1 if fused else 3)


@pytest.mark.parametrize("dialect", [*INT4, *FLOATS])
def test_plain_layers_and_why(tmp_path: Path, dialect: str) -> None:
    tiny(tmp_path, dialect, excluded=(0,), extra_layers=1)
    resolver = resolver_of(tmp_path)
    reasons = {layer: resolver.resolve(layer) for layer in (0, 1, 2)}
    assert [reasons[layer].scheme is PLAIN for layer in (0, 1, 2)] == [True, False, True]
    assert reasons[0].reason == "excluded by config"
    assert reasons[2].reason == "beyond num_hidden_layers=2, not quantized in the file"
    assert {table.role for table in reasons[0].tables} == {Role.PLAIN_NK}


def test_a_checkpoint_that_is_not_quantized(tmp_path: Path) -> None:
    tiny(tmp_path, "ct-int4", excluded=(0, 1))
    edit_json(tmp_path, "config.json", lambda content: content.pop("quantization_config") and None)
    source = resolver_of(tmp_path).resolve(1)
    assert source.scheme is PLAIN and source.reason == "the checkpoint is not quantized"
    assert source.scale_dtypes == ("BF16", "BF16")


@pytest.mark.parametrize(
    "folder", sorted(path for path in FIXTURES.iterdir() if path.is_dir()), ids=lambda p: p.name
)
def test_what_real_tools_wrote(folder: Path) -> None:
    with LocalSource(folder) as source:
        if "int4-awq" in folder.name:
            with pytest.raises(UnsupportedError, match="pre_quant_scale"):
                open_checkpoint(source)
            return
        checkpoint = open_checkpoint(source)
    layers = checkpoint.catalog.expert_layers()
    assert len(layers) == (4 if "qwen3next" in folder.name else 2)
    for layer in layers:
        found = checkpoint.resolver.resolve(layer)
        assert found.scheme.kind == ("e2m1" if "nvfp4" in folder.name else "int4")
        assert found.zeros_must_be_eight is (
            "sym-g64" in folder.name or "w4a16-g128" in folder.name
        )
        assert len(found.tables[0].rows) == found.experts


def refused(folder: Path, layer: int, kind: type[LoaderError] = CheckpointError) -> LoaderError:
    with pytest.raises(LoaderError) as caught:
        resolver_of(folder).resolve(layer)
    error = caught.value
    assert type(error) is kind and error.layer == layer
    assert error.file and error.tensor and error.expected and error.found, str(error)
    return error


def test_an_expert_beyond_the_config(tmp_path: Path) -> None:
    checkpoint = tiny(tmp_path, "awq-gemm", payload="random", layers=1)

    def edit(tensors: dict[str, Any]) -> None:
        for name in [n for n in tensors if ".experts.2." in n]:
            tensors[name.replace(".experts.2.", ".experts.7.")] = tensors.pop(name)

    rewrite(checkpoint.folder, edit)
    error = refused(tmp_path, 0)
    assert error.experts == "7" and "3 experts" in str(error.expected)


@pytest.mark.parametrize("dialect", ["awq-gemm", "modelopt-nvfp4"])
def test_one_expert_that_is_plain(tmp_path: Path, dialect: str) -> None:
    checkpoint = tiny(tmp_path, dialect, payload="random", layers=1)
    module = checkpoint.name(0, 1, "up", "")

    def edit(tensors: dict[str, Any]) -> None:
        for name in [n for n in tensors if n.startswith(module)]:
            del tensors[name]
        tensors[f"{module}weight"] = RawTensor("F16", (96, 64), bytes(96 * 64 * 2))

    rewrite(tmp_path, edit)
    error = refused(tmp_path, 0)
    assert (error.experts, error.tensor, error.found) == ("1", f"{module}weight", "F16")


def test_a_part_under_two_spellings(tmp_path: Path) -> None:
    """A fused tensor may have no part in its name: that means ``weight``, which must not be too."""
    checkpoint = tiny(tmp_path, "ct-int4", payload="random", layers=1, fused=True, excluded=(0,))
    name = checkpoint.name(0, 0, "down", "weight")
    rewrite(tmp_path, lambda t: t.update({name.removesuffix(".weight"): t[name]}))
    assert "twice" in refused(tmp_path, 0).what


@pytest.mark.parametrize(
    "part, kind",
    [("bias", UnsupportedError), ("pre_quant_scale", UnsupportedError), ("x", CheckpointError)],
)
def test_a_part_that_the_format_does_not_have(
    tmp_path: Path, part: str, kind: type[LoaderError]
) -> None:
    checkpoint = tiny(tmp_path, "modelopt-nvfp4", payload="random", layers=1)
    name = checkpoint.name(0, 2, "gate", part)
    rewrite(tmp_path, lambda tensors: tensors.update({name: RawTensor("BF16", (96,), bytes(192))}))
    error = refused(tmp_path, 0, kind)
    assert (error.tensor, error.experts) == (name, "2")
    assert "weight_scale_2" in str(error.expected)


def test_the_other_layers_still_resolve(tmp_path: Path) -> None:
    checkpoint = tiny(tmp_path, "awq-gemm", payload="random")
    rewrite(tmp_path, lambda t: t.pop(checkpoint.name(1, 0, "up", "scales")) and None)
    refused(tmp_path, 1)
    assert resolver_of(tmp_path).resolve(0).layer == 0


# Layers that are alike are resolved once


def facts_of(source: LayerSource) -> tuple[Any, ...]:
    tables = [
        (t.projection, t.role, t.arrangement, t.element_bytes, t.shape, t.rows.tolist())
        for t in source.tables
    ]
    return tuple({**vars(source), "tables": tables}.values())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dialect", [*INT4, *FLOATS])
def test_a_layer_like_another_is_resolved_as_by_itself(
    tmp_path: Path, dialect: str, fused: bool
) -> None:
    tiny(tmp_path, dialect, fused=fused, layers=4, shards=3, excluded=(2,))
    resolver = resolver_of(tmp_path)
    for layer in range(4):
        assert facts_of(resolver.resolve(layer)) == facts_of(resolver_of(tmp_path).resolve(layer))


def test_a_layer_of_another_dtype_is_not_like_the_others(tmp_path: Path) -> None:
    checkpoint = tiny(tmp_path, "awq-gemm", payload="random", layers=3)
    name = "model.layers.1.mlp.experts.2.up_proj.scales"

    def narrower(tensors: dict[str, RawTensor]) -> None:
        tensors[name] = replace(tensors[name], dtype="BF16")

    rewrite(checkpoint.folder, narrower)
    resolver = resolver_of(tmp_path)
    resolver.resolve(0)
    with pytest.raises(CheckpointError, match="scales has the wrong dtype") as caught:
        resolver.resolve(1)
    assert (caught.value.layer, caught.value.tensor) == (1, name)
    assert resolver.resolve(2).layer == 2


def test_a_layer_of_another_scheme_is_not_like_the_others(tmp_path: Path) -> None:
    """Tensors alike, but the second layer's group promises zero points that are not there."""
    tiny(tmp_path, "ct-int4")

    def divide(content: dict[str, Any]) -> None:
        groups = content["quantization_config"]["config_groups"]
        (own,) = groups.values()
        other = {**own, "weights": {**own["weights"], "symmetric": False}}
        groups["second"] = {**other, "targets": ["re:.*layers\\.1\\..*"]}

    edit_json(tmp_path, "config.json", divide)
    resolver = resolver_of(tmp_path)
    assert resolver.resolve(0).zeros_must_be_eight
    with pytest.raises(CheckpointError, match="expert tensors are missing"):
        resolver.resolve(1)


def test_an_expert_that_the_config_excludes_alone(tmp_path: Path) -> None:
    """An entry with an expert's number is held against every expert, in the layer that it names."""
    checkpoint = tiny(tmp_path, "awq-gemm", layers=3)
    entry = "model.layers.1.mlp.experts.2.up_proj"
    edit_json(
        checkpoint.folder,
        "config.json",
        lambda content: content["quantization_config"].update(modules_to_not_convert=[entry]),
    )
    resolver = resolver_of(tmp_path)
    resolver.resolve(0)
    with pytest.raises(CheckpointError, match="disagree on whether the experts") as caught:
        resolver.resolve(1)
    assert (caught.value.layer, caught.value.tensor) == (1, entry)
    assert str(caught.value.found).endswith("1 such modules of 9")
    assert resolver.resolve(2).layer == 2


def test_one_module_speaks_for_all_where_nothing_tells_them_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny(tmp_path, "modelopt-nvfp4", layers=3)
    asked: list[str] = []
    excluded = ModelOptDialect.excluded

    def noted(self: ModelOptDialect, module: str) -> frozenset[bool]:
        asked.append(module)
        return excluded(self, module)

    monkeypatch.setattr(ModelOptDialect, "excluded", noted)
    resolver = resolver_of(tmp_path)
    for layer in range(3):
        resolver.resolve(layer)
    assert len(set(asked)) == 3 * 3

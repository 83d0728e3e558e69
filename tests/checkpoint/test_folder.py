"""Checkpoint: configs, index and headers together; what configs refuse needs no shard."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import loader
from loader.checkpoint.family import Family
from loader.checkpoint.folder import DIALECTS, Checkpoint, open_checkpoint, read_dialect
from loader.checkpoint.source import LocalSource
from loader.errors import CheckpointError, LoaderError, UnsupportedError
from loader.testing.checkpoint import tiny_checkpoint
from loader.testing.container import edit_json, rewrite

TINY: dict[str, Any] = {
    "hidden": 64,
    "intermediate": 96,
    "experts": 3,
    "attention": False,
    "payload": "sparse",
}
HF = "hf_quant_config.json"


def tiny(folder: Path, dialect: str = "modelopt-nvfp4", **settings_: Any) -> Any:
    group = {} if "nvfp4" in dialect else {"group": 32}
    return tiny_checkpoint(folder, dialect=dialect, **{**TINY, **group, **settings_})


def opened(folder: Path, *families: Family) -> Checkpoint:
    with LocalSource(folder) as source:
        return open_checkpoint(source, families) if families else open_checkpoint(source)


@pytest.mark.parametrize(
    "dialect, name",
    [
        ("awq-gemm", "awq"),
        ("awq-gptqmodel", "awq"),
        ("ct-int4", "compressed-tensors"),
        ("ct-nvfp4", "compressed-tensors"),
        ("modelopt-nvfp4", "modelopt"),
    ],
)
def test_the_dialect_is_recognised(tmp_path: Path, dialect: str, name: str) -> None:
    tiny(tmp_path, dialect)
    checkpoint = opened(tmp_path)
    assert checkpoint.dialect is not None and checkpoint.dialect.name == name
    assert checkpoint.model.experts == 3
    assert checkpoint.catalog.expert_layers() == [0, 1]


def test_modelopt_by_either_file(tmp_path: Path) -> None:
    tiny(tmp_path)
    (tmp_path / HF).rename(tmp_path / "aside")
    assert opened(tmp_path).dialect is not None
    (tmp_path / "aside").rename(tmp_path / HF)
    edit_json(tmp_path, "config.json", lambda content: content.pop("quantization_config") and None)
    dialect = opened(tmp_path).dialect
    assert dialect is not None and dialect.name == "modelopt"


def test_no_quantization_at_all() -> None:
    assert read_dialect(None, None) is None


@pytest.mark.parametrize("method", [None, "gptq", "fp8", "AWQ", ["awq"], 4])
def test_an_unknown_method(method: Any) -> None:
    with pytest.raises(UnsupportedError) as caught:
        read_dialect({"quant_method": method}, None)
    assert caught.value.found == repr(method)
    assert all(name in str(caught.value.expected) for name in DIALECTS)


@pytest.mark.parametrize("method", ["awq", "compressed-tensors"])
def test_two_configs_of_different_tools(method: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_dialect({"quant_method": method}, {"quantization": {"quant_algo": "NVFP4"}})
    assert HF in str(caught.value.file) and caught.value.found == repr(method)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "gelu"},
        {"num_experts": 0},
        {"num_experts": "3"},
        {"quantization_config": {"quant_method": "gptq"}},
        {"quantization_config": []},
    ],
)
def test_configs_are_refused_before_any_shard_is_opened(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    checkpoint = tiny(tmp_path, shards=2)
    for path in checkpoint.files():
        path.unlink()  # whatever looked at a shard would say that it is not there
    edit_json(tmp_path, "config.json", lambda content: content.update(change))
    with pytest.raises(LoaderError) as caught:
        opened(tmp_path)
    assert caught.value.file == "config.json"


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    tiny(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path)
    assert caught.value.file == f"{tmp_path}/config.json" and "model.safetensors" in str(
        caught.value.found
    )


@pytest.mark.parametrize("file", ["config.json", HF])
@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1, "a": 2}', "\xff", "null"])
def test_a_config_that_is_no_json_object(tmp_path: Path, file: str, text: str) -> None:
    tiny(tmp_path)
    (tmp_path / file).write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path)
    assert caught.value.file == file


def test_a_number_that_no_float_holds_may_stand_in_a_config(tmp_path: Path) -> None:
    """Python writes Infinity into config files."""
    tiny(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("{", '{"rope": Infinity, "other": NaN,', 1))
    assert opened(tmp_path).model.experts == 3


def test_a_family_of_the_user(tmp_path: Path) -> None:
    tiny(tmp_path, payload="random")

    def edit(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[name.replace(".mlp.experts.", ".ffn.bank.")] = tensors.pop(name)

    rewrite(tmp_path, edit)
    with pytest.raises(UnsupportedError) as caught:
        opened(tmp_path)
    assert "family=" in str(caught.value.expected) and ".ffn.bank." in str(caught.value.found)
    words = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    family = Family("mine", "layers.{layer}.ffn.bank.{expert}.{projection}", words)
    assert opened(tmp_path, family).catalog.expert_layers() == [0, 1]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("experts", [10**6, 10**12, 10**30])
def test_a_count_of_experts_that_no_file_bears_out(
    tmp_path: Path, experts: int, fused: bool
) -> None:
    tiny(tmp_path, fused=fused)
    edit_json(tmp_path, "config.json", lambda content: content.update(num_experts=experts))
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path)
    assert caught.value.found == f"{experts} experts" and caught.value.file == "config.json"


@pytest.mark.parametrize("layers", [3, 10**12, 10**30])
def test_more_layers_than_the_files_hold(tmp_path: Path, layers: int) -> None:
    tiny(tmp_path)
    edit_json(tmp_path, "config.json", lambda content: content.update(num_hidden_layers=layers))
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path).require_all_layers()
    assert caught.value.layer == 2 and "no tensor of this layer" in str(caught.value.found)


def test_all_layers_are_there(tmp_path: Path) -> None:
    tiny(tmp_path, family="deepseek-v3", layers=4, dense=(0, 1), extra_layers=1)
    opened(tmp_path).require_all_layers()


# Any JSON in a config is read or refused, and never anything else

ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 4, 16, 10**12, 10**30, 1.5, float("inf")),
    *("", "x", "gemm", "9" * 5000, "model.layers.0"),
    *([], [1], ["re:(?i)x", "re:y(z)\\1"], ["model.layers.0.mlp.experts*"], [None]),
    *({}, {"a": 1}, {"quant_algo": "NVFP4"}, {"group_0": {}}),
)
EXTRA = ("bits", "desc_act", "format", "version", "ignore", "exclude_modules", "quant_algo")


def paths(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key of a JSON object, as the way to it."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield (*path, key)
        yield from paths(inner, (*path, key))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """One folder for each dialect, and the JSON of its configs as written."""
    found = {}
    for dialect in ("awq-gemm", "ct-int4-asym", "ct-nvfp4", "modelopt-nvfp4"):
        folder = tmp_path_factory.mktemp(dialect)
        tiny(folder, dialect, family="qwen3.5" if dialect == "ct-nvfp4" else "qwen3-moe")
        files = [name for name in ("config.json", HF) if (folder / name).exists()]
        found[dialect] = (folder, {name: json.loads((folder / name).read_text()) for name in files})
    return found


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_value_in_a_config_is_read_or_refused(
    written: dict[str, tuple[Path, dict[str, Any]]], data: st.DataObject
) -> None:
    folder, configs = written[data.draw(st.sampled_from(sorted(written)))]
    file = data.draw(st.sampled_from(sorted(configs)))
    content = json.loads(json.dumps(configs[file]))
    extra = [("quantization_config", key) for key in EXTRA] if file == "config.json" else []
    for _ in range(data.draw(st.integers(1, 2))):
        way = data.draw(st.sampled_from([*paths(configs[file]), *extra]))
        place = content
        for key in way[:-1]:
            place = place.get(key, {}) if isinstance(place, dict) else {}
        if isinstance(place, dict):
            place[way[-1]] = deepcopy(data.draw(st.sampled_from(ODD)))
    (folder / file).write_text(json.dumps(content))
    try:
        str(loader.plan(folder))
    except LoaderError as error:
        assert "\n" not in str(error)
    finally:
        (folder / file).write_text(json.dumps(configs[file]))

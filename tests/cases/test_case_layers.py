"""Cases, section 3: the format is decided layer by layer and checked against the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from case_checks import PRESENT, Recorder, case, ok, refuse, small

import loader
from loader.testing.checkpoint import TinyCheckpoint
from loader.testing.container import RawTensor, edit_json, read_header, rewrite

HF = "hf_quant_config.json"


def modules_of(checkpoint: TinyCheckpoint, layer: int) -> list[str]:
    """Exact names of the expert modules of a layer."""
    names = ("gate", "up", "down")
    every = [checkpoint.name(layer, e, p, "") for e in range(checkpoint.experts) for p in names]
    return sorted({name.rstrip(".") for name in every})


def excluded_as(
    folder: Path, config: list[str] | None, hf: list[str] | None, key: str = "ignore"
) -> None:
    """Sets the exclude lists of both files; None takes the list away."""

    def in_config(content: dict[str, Any]) -> None:
        section = content["quantization_config"]
        section.pop("ignore", None)
        if config is not None:
            section[key] = config

    def in_hf(content: dict[str, Any]) -> None:
        content["quantization"].pop("exclude_modules", None)
        if hf is not None:
            content["quantization"]["exclude_modules"] = hf

    edit_json(folder, "config.json", in_config)
    if (folder / HF).exists():
        edit_json(folder, HF, in_hf)


def served(checkpoint: TinyCheckpoint, plain: int, reason: str = "excluded by config") -> None:
    """Layer ``plain`` is loaded as it is and served by ``legacy``, the other from banks."""
    experts = loader.load(checkpoint.folder)
    for layer, module in experts.items():
        routes = [(r.route, r.reason) for r in module.routes]
        if layer == plain:
            assert module.metadata_layout == "plain"
            assert {route for route, _ in routes} == {"legacy"} and routes[-1][1] == reason
        else:
            assert [route for route, _ in routes] == ["qpn_m1", "qpn_grouped", "legacy"]
    for entry in experts.report.to_dict()["layers"]:
        sizes = entry["bytes"]
        numbers = 3 * checkpoint.experts * checkpoint.hidden * checkpoint.intermediate
        if entry["layer"] == plain:
            assert sizes["unquantized"] == 2 * numbers and sizes["source"] == 2 * numbers
            assert sizes["weight"] == sizes["metadata"] == sizes["globals"] == 0
            assert entry["format"] == "not quantized"
        else:
            assert sizes["unquantized"] == 0 < sizes["weight"]


# 3.1 Excluded MoE layer


@pytest.mark.parametrize("plain_dtype", ["BF16", "F16"])
@pytest.mark.parametrize("dialect, layer", [("A", 0), ("A", 1), ("P", 1), ("N", 0), ("M", 1)])
def test_an_excluded_layer_is_loaded_as_it_is(
    tmp_path: Path, dialect: str, layer: int, plain_dtype: str
) -> None:
    checkpoint = small(tmp_path, dialect, excluded=(layer,), plain_dtype=plain_dtype)
    ok(checkpoint)
    served(checkpoint, layer)


@pytest.mark.parametrize("dialect", ["A", "M"])
def test_the_base_input_with_an_excluded_layer(tmp_path: Path, dialect: str) -> None:
    ok(case(tmp_path, dialect, excluded=(0,)), dtypes=(torch.float32,))


@pytest.mark.parametrize(
    "entries",
    [
        ["model.layers.0."],
        ["model.layers.0"],
        ["layers.0.mlp"],
        ["mlp.gate", "model.layers.0.mlp.experts"],
    ],
)
def test_awq_entries_as_substring_or_dotted_components(tmp_path: Path, entries: list[str]) -> None:
    checkpoint = small(tmp_path, "A", excluded=(0,))
    excluded_as(tmp_path, entries, None, "modules_to_not_convert")
    served(checkpoint, 0)


@pytest.mark.parametrize("entry", ["gate", "mlp.gate", "lm_head", "layers.01"])
def test_entries_that_do_not_mean_the_experts(tmp_path: Path, entry: str) -> None:
    checkpoint = small(tmp_path, "A")
    excluded_as(tmp_path, [entry], None, "modules_to_not_convert")
    ok(checkpoint, dtypes=())


def test_compressed_entries_match_exactly_or_by_regular_expression(tmp_path: Path) -> None:
    checkpoint = small(tmp_path, "P", excluded=(1,))
    excluded_as(tmp_path, modules_of(checkpoint, 1), None)
    served(checkpoint, 1)
    excluded_as(tmp_path, [r"re:.*layers\.1\.mlp\.experts.*", "lm_head"], None)
    served(checkpoint, 1)
    # re.match begins at the start, and an exact name is no prefix.
    for entries in ([r"re:layers\.1\..*"], ["model.layers.1.mlp.experts"], ["model.layers.1"]):
        excluded_as(tmp_path, entries, None)
        refuse(tmp_path, file="config.json", layer=1, tensor="model.layers.1.", found="unquantized")


GLOB, DOTTED = ["model.layers.0.mlp.experts*"], ["model.layers.0.mlp.experts"]
SPELLINGS: dict[str, Callable[[TinyCheckpoint], tuple[list[str] | None, list[str] | None]]] = {
    "config alone, exact": lambda c: (modules_of(c, 0), None),
    "config alone, glob": lambda c: (GLOB, None),
    "hf alone, glob": lambda c: (None, GLOB),
    "hf alone, exact": lambda c: (None, modules_of(c, 0)),
    "both, exact and glob": lambda c: (modules_of(c, 0), GLOB),
    "both, glob and module": lambda c: (GLOB, DOTTED),
    "both, layer and exact": lambda c: (["model.layers.0*", "lm_head"], modules_of(c, 0)),
    "both, another order": lambda c: (modules_of(c, 0)[::-1], modules_of(c, 0)),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_modelopt_lists_in_either_file_and_any_spelling(tmp_path: Path, spelling: str) -> None:
    checkpoint = small(tmp_path, "M", excluded=(0,))
    excluded_as(tmp_path, *SPELLINGS[spelling](checkpoint))
    served(checkpoint, 0)


@pytest.mark.parametrize(
    "config, hf",
    [
        (["model.layers.0*"], ["model.layers.1*"]),
        (["model.layers.0*"], []),
        ([], ["model.layers.0*"]),
        (["model.layers.0.mlp.experts.2*"], ["model.layers.0.mlp.experts*"]),
    ],
)
def test_modelopt_lists_that_select_different_modules(
    tmp_path: Path, config: list[str], hf: list[str]
) -> None:
    small(tmp_path, "M", excluded=(0,))
    excluded_as(tmp_path, config, hf)
    error = refuse(
        tmp_path, file="config.json", layer=0, tensor="experts.0.", found=str([*config, *hf][0])
    )
    assert HF in str(error.file) and str(config) in str(error) and str(hf) in str(error)


@pytest.mark.parametrize("dialect", ["A", "P", "N", "M"])
def test_plain_experts_that_no_list_names_are_refused(tmp_path: Path, dialect: str) -> None:
    small(tmp_path, dialect, excluded=(0,))
    key = "modules_to_not_convert" if dialect == "A" else "ignore"
    excluded_as(tmp_path, [], [], key)
    refuse(
        tmp_path,
        file="config.json",
        layer=0,
        tensor="model.layers.0.mlp.experts.0.gate_proj",
        expected="quantized",
        found="unquantized weights in the file, 12 such modules of 12",
    )


@pytest.mark.parametrize("dialect", ["A", "P", "N", "M"])
def test_quantized_experts_that_a_list_names_are_refused(tmp_path: Path, dialect: str) -> None:
    checkpoint = small(tmp_path, dialect)
    key = "modules_to_not_convert" if dialect == "A" else "ignore"
    entries = modules_of(checkpoint, 1)
    excluded_as(tmp_path, entries, entries, key)
    tensor = "model.layers.1.mlp.experts.0."
    refuse(tmp_path, file="config.json", layer=1, tensor=tensor, found="quantized weights")
    ok(checkpoint, layers=[0], dtypes=())


@pytest.mark.parametrize("dialect", ["A", "P", "N", "M"])
@pytest.mark.parametrize("projection", ["gate", "down"])
def test_experts_of_one_layer_in_two_precisions(
    tmp_path: Path, dialect: str, projection: str
) -> None:
    checkpoint = small(tmp_path, dialect)
    module = checkpoint.name(1, 2, projection, "")
    out, columns = checkpoint.size(projection)
    plain = RawTensor("BF16", (out, columns), bytes(2 * out * columns))

    def edit(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith(module)]:
            del tensors[name]
        tensors[f"{module}weight"] = plain

    rewrite(tmp_path, edit)
    key = "modules_to_not_convert" if dialect == "A" else "ignore"
    for entries in ([], [module.rstrip(".")]):
        excluded_as(tmp_path, entries, entries, key)
        refuse(tmp_path, file=PRESENT, layer=1, experts="2", tensor=f"{module}weight", found="BF16")


# 3.2 Dense first layer, draft layer at the end


def draft_model(folder: Path, dialect: str) -> TinyCheckpoint:
    """Layer 0 dense and 4-bit, 1 and 2 MoE, layer 3 a draft with BF16 experts, named nowhere."""
    return small(folder, dialect, family="deepseek-v3", layers=3, dense=(0,), extra_layers=1)


@pytest.mark.parametrize("dialect", ["A", "P", "N", "M"])
def test_dense_and_draft_layers_are_listed_and_unread(tmp_path: Path, dialect: str) -> None:
    checkpoint = draft_model(tmp_path, dialect)
    assert sorted(ok(checkpoint, dtypes=())) == [1, 2]
    planned = loader.plan(tmp_path)
    skipped = {one.layer: one.reason for one in planned.skipped}
    assert skipped == {0: "dense layer", 3: "beyond num_hidden_layers=3"}
    left = planned.left_alone()
    names = checkpoint.tensor_names()
    dense = [name for name in names if ".layers.0.mlp." in name]
    assert dense and set(dense) <= set(left["dense layer"])
    draft = [name for name in names if ".layers.3.mlp.experts." in name]
    assert draft and set(draft) <= set(left["beyond num_hidden_layers=3"])
    source = Recorder(tmp_path)
    loader.load(source)
    source.close()
    for path in checkpoint.files():
        header, begin = read_header(path)
        for name in (n for n in dense + draft if n in header):
            first, last = (begin + offset for offset in header[name]["data_offsets"])
            for file, offset, length in source.payload_reads():
                # A gap of less than 4 KiB between two experts may be read along.
                inside = min(last, offset + length) - max(first, offset)
                assert file != path.name or inside < min(last - first, 4096)


@pytest.mark.parametrize("dialect", ["A", "P", "N", "M"])
def test_the_draft_layer_asked_for(tmp_path: Path, dialect: str) -> None:
    checkpoint = draft_model(tmp_path, dialect)
    cards = ok(checkpoint, layers=[3])
    (module,) = cards[3]
    assert module.metadata_layout == "plain"
    assert {route.route for route in module.routes} == {"legacy"}
    assert "beyond num_hidden_layers=3" in module.routes[-1].reason


@pytest.mark.parametrize("layer", [0, 4, 17, -1])
def test_a_layer_without_experts_asked_for(tmp_path: Path, layer: int) -> None:
    draft_model(tmp_path, "A")
    cli = None if layer < 0 else ("--layers", str(layer))
    refuse(
        tmp_path,
        loader.LoaderError,
        settings={"layers": [layer]},
        cli=cli,
        layer=layer,
        expected="[1, 2, 3]",
    )


def test_a_draft_model_under_a_prefix_of_its_own(tmp_path: Path) -> None:
    checkpoint = small(tmp_path, "M", shards=1)
    extra = "mtp.layers.0.mlp.experts.0.gate_proj.weight"
    tensor = RawTensor("BF16", (8, 8), bytes(128))
    rewrite(tmp_path, lambda tensors: tensors.update({extra: tensor}))
    assert loader.plan(tmp_path).left_alone()["draft model"] == [extra]
    ok(checkpoint, dtypes=())


# Mixed formats


def test_modelopt_mixed_precision_is_resolved_by_module(tmp_path: Path) -> None:
    checkpoint = small(tmp_path, "M")
    listed = {m: {"quant_algo": "NVFP4", "group_size": 16} for m in modules_of(checkpoint, 0)}
    listed |= {module: {"quant_algo": "FP8"} for module in modules_of(checkpoint, 1)}
    for file, key in (("config.json", "quantization_config"), (HF, "quantization")):

        def edit(content: dict[str, Any], key: str = key) -> None:
            content[key].update(quant_algo="MIXED_PRECISION", quantized_layers=listed)

        edit_json(tmp_path, file, edit)
    refuse(
        tmp_path,
        loader.UnsupportedError,
        file=PRESENT,
        layer=1,
        tensor="layers.1.mlp.experts.0.",
        found="FP8",
    )
    ok(checkpoint, layers=[0], dtypes=())


def test_compressed_groups_are_resolved_by_module(tmp_path: Path) -> None:
    checkpoint = small(tmp_path, "P")

    def edit(content: dict[str, Any]) -> None:
        groups = content["quantization_config"]["config_groups"]
        other = {**groups["group_0"], "targets": [r"re:.*layers\.1\.mlp\.experts.*"]}
        other["weights"] = {**other["weights"], "num_bits": 8}
        groups["group_1"] = other

    edit_json(tmp_path, "config.json", edit)
    refuse(tmp_path, loader.UnsupportedError, file=PRESENT, layer=1, found="8 bits of type int")
    ok(checkpoint, layers=[0], dtypes=())


def test_gate_and_up_in_different_formats(tmp_path: Path) -> None:
    small(tmp_path, "P")

    def edit(content: dict[str, Any]) -> None:
        groups = content["quantization_config"]["config_groups"]
        other = {**groups["group_0"], "targets": [r"re:.*layers\.0\..*up_proj"]}
        other["weights"] = {**other["weights"], "group_size": 64}
        groups["group_1"] = other

    edit_json(tmp_path, "config.json", edit)
    refuse(tmp_path, loader.UnsupportedError, file=PRESENT, layer=0, expected="one format")


@pytest.mark.parametrize("dtype", ["F32", "F8_E4M3", "I32"])
def test_plain_experts_of_a_dtype_that_is_not_loaded(tmp_path: Path, dtype: str) -> None:
    checkpoint = small(tmp_path, "N", excluded=(1,))

    def edit(tensors: dict[str, Any]) -> None:
        for name, tensor in list(tensors.items()):
            if ".layers.1.mlp.experts." in name:
                size = {"F32": 4, "F8_E4M3": 1, "I32": 4}[dtype]
                count = len(tensor.data) // 2 * size
                tensors[name] = RawTensor(dtype, tensor.shape, bytes(count), tensor.file)

    rewrite(tmp_path, edit)
    refuse(tmp_path, file=PRESENT, layer=1, tensor=PRESENT, found=PRESENT, expected=PRESENT)
    ok(checkpoint, layers=[0], dtypes=())


def test_no_quantization_config_over_quantized_experts(tmp_path: Path) -> None:
    checkpoint = small(tmp_path, "A")
    edit_json(tmp_path, "config.json", lambda content: content.pop("quantization_config") and None)
    name = checkpoint.name(0, 0, "gate", "qweight")
    refuse(tmp_path, file="config.json", layer=0, tensor=name, found="I32")

"""What the Transformers door refuses: one sentence each, and nothing stays."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from load_fakes import Allocations, descriptors
from verify_fakes import copied, edit

from loader.errors import CapacityError, CheckpointError, ConversionError, UnsupportedError
from loader.integrations.transformers import from_pretrained
from loader.testing.container import edit_json

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")

QWEN = "qwen3moe-awq-gemm-g128"
FP4 = "qwen3moe-modelopt-nvfp4"
Tensors = dict[str, torch.Tensor]


def edited(name: str, folder: Path, change: Callable[[Tensors], None], **config: Any) -> Path:
    target = copied(name, folder)

    def changed(tensors: Tensors) -> Tensors:
        change(tensors)
        return tensors

    edit(target, changed)
    if config:
        edit_json(target, "config.json", lambda values: values.update(config))
    return target


def one_sentence(error: BaseException) -> str:
    text = str(error)
    assert "\n" not in text and "Traceback" not in text
    return text


@pytest.mark.parametrize(
    ("found", "words"), [("4.57.1", "not supported"), ("6.0.0", "not supported")]
)
def test_another_major_version_is_named(
    found: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = "loader.integrations.transformers.version.version"
    monkeypatch.setattr(module, lambda package: found)
    with pytest.raises(UnsupportedError) as caught:
        from_pretrained(tmp_path)
    text = one_sentence(caught.value)
    assert words in text and found in text and "pip install 'transformers>=5,<6'" in text


def test_a_missing_framework_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def absent(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr("loader.integrations.transformers.version.version", absent)
    with pytest.raises(UnsupportedError, match=r"not installed.*pip install"):
        from_pretrained(tmp_path)


def test_a_model_without_experts_is_sent_to_the_framework(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UnsupportedError, match="no experts.*framework alone loads it"):
        from_pretrained(tmp_path)


def test_a_model_type_that_transformers_does_not_know_is_named(tmp_path: Path) -> None:
    folder = edited(QWEN, tmp_path, lambda t: None, model_type="qwen9_moe")
    with pytest.raises(UnsupportedError, match="does not know this model.*'qwen9_moe'"):
        from_pretrained(folder)


def test_an_unknown_architecture_falls_back_to_the_causal_model(tmp_path: Path) -> None:
    folder = edited(QWEN, tmp_path, lambda t: None, architectures=["NoSuchModel"])
    assert type(from_pretrained(folder)).__name__ == "Qwen3MoeForCausalLM"


def test_a_family_that_nobody_taught_it_is_named(tmp_path: Path) -> None:
    def rename(tensors: Tensors) -> None:
        for name in [n for n in tensors if ".mlp.experts." in n]:
            tensors[name.replace(".mlp.experts.", ".ffn.experts.")] = tensors.pop(name)

    with pytest.raises(UnsupportedError, match="no known family.*family="):
        from_pretrained(edited(QWEN, tmp_path, rename))


def test_experts_that_compute_something_else_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts

    def clamped(self: Any, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate.clamp(max=7.0)) * up

    monkeypatch.setattr(experts, "_apply_gate", clamped)
    with pytest.raises(UnsupportedError) as caught:
        from_pretrained(Path("fixtures/checkpoints") / QWEN)
    text = one_sentence(caught.value)
    assert "Qwen3MoeExperts" in text and "another way than silu(gate) * up" in text


def test_a_model_whose_experts_keep_no_contract_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experts = transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts
    monkeypatch.setattr(experts, "forward", lambda self, hidden_states: hidden_states)
    with pytest.raises(UnsupportedError, match="no module.*router.*top_k_index.*loader.load"):
        from_pretrained(Path("fixtures/checkpoints") / QWEN)


def test_layers_that_differ_are_named(tmp_path: Path) -> None:
    folder = edited(QWEN, tmp_path, lambda t: None, mlp_only_layers=[1])
    with pytest.raises(CheckpointError, match="same layers.*layer 1"):
        from_pretrained(folder)


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    folder = edited(QWEN, tmp_path, lambda t: t.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"lacks weights.*model\.norm\.weight"):
        from_pretrained(folder)


def test_a_weight_of_another_shape_is_refused(tmp_path: Path) -> None:
    def cut(tensors: Tensors) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:100].clone()

    with pytest.raises(CheckpointError) as caught:
        from_pretrained(edited(QWEN, tmp_path, cut))
    assert "could not load the model" in one_sentence(caught.value)


def test_a_linear_of_another_shape_is_refused(tmp_path: Path) -> None:
    def cut(tensors: Tensors) -> None:
        base = "model.layers.0.self_attn.k_proj"
        for part in ("qweight", "qzeros", "scales"):
            name = f"{base}.{part}"
            tensors[name] = tensors[name][:, : tensors[name].shape[1] // 2].clone()

    with pytest.raises(CheckpointError, match="another shape in the model.*k_proj"):
        from_pretrained(edited(QWEN, tmp_path, cut))


def test_a_bad_scale_of_a_linear_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.o_proj.scales"

    def spoil(tensors: Tensors) -> None:
        tensors[name][1, 5] = float("nan")

    with pytest.raises(ConversionError) as caught:
        from_pretrained(edited(QWEN, tmp_path, spoil))
    text = one_sentence(caught.value)
    assert name in text and "nan" in text and "[1, 5]" in text and "experts" not in text


def test_a_bad_scale_of_a_dequantized_linear_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.gate.scales"

    def spoil(tensors: Tensors) -> None:
        tensors[name][0, 3] = float("inf")

    with pytest.raises(ConversionError, match=re.escape(name)):
        from_pretrained(edited("qwen3moe-awq-gemm-g64-router", tmp_path, spoil))


def test_a_plain_tensor_that_is_no_number_is_refused(tmp_path: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        norm = tensors["model.norm.weight"]
        tensors["model.norm.weight"] = norm.to(torch.float8_e4m3fn)

    with pytest.raises(UnsupportedError, match="not loaded.*model.norm.weight"):
        from_pretrained(edited(QWEN, tmp_path, spoil))


def test_a_linear_in_another_format_is_refused(tmp_path: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        base = "model.layers.0.self_attn.q_proj"
        tensors.pop(f"{base}.weight_scale_2")
        tensors[f"{base}.weight"] = torch.zeros(256, 256).to(torch.float8_e4m3fn)

    with pytest.raises(UnsupportedError, match="linear outside the experts.*q_proj"):
        from_pretrained(edited(FP4, tmp_path, spoil))


def test_a_card_that_is_too_small_is_told_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="does not fit.*bytes too many"):
        from_pretrained(Path("fixtures/checkpoints") / QWEN, card_memory=12 << 20)


def test_a_dtype_that_activations_cannot_have_is_refused() -> None:
    for dtype in ("int8", "float8", torch.float64):
        with pytest.raises(UnsupportedError, match="dtype"):
            from_pretrained(Path("fixtures/checkpoints") / QWEN, dtype=dtype)


NAN_PLACES = {
    "the last expert": "model.layers.1.mlp.experts.7.down_proj.scales",
    "a linear": "model.layers.1.self_attn.o_proj.scales",
}


@pytest.mark.parametrize("place", NAN_PLACES)
def test_a_failure_keeps_nothing(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors[NAN_PLACES[place]][0, 0] = float("nan")

    folder = edited(QWEN, tmp_path, spoil)
    made = Allocations(monkeypatch)
    before = descriptors()
    with pytest.raises(ConversionError) as caught:
        from_pretrained(folder, dtype="float32")
    assert "layer 1" in one_sentence(caught.value)
    gc.collect()
    assert len(made.storages) > 30 and made.alive() == 0
    assert descriptors() == before


def test_a_draft_layer_is_listed_and_left(tmp_path: Path) -> None:
    added: list[str] = []

    def add(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith("model.layers.1.")]:
            copy = name.replace("layers.1.", "layers.2.")
            tensors[copy] = tensors[name].clone()
            added.append(copy)

    folder = edited(QWEN, tmp_path, add)
    model, report = from_pretrained(folder, output_loading_info=True)
    assert set(report.unused) == set(added) and len(added) > 80
    assert len(model.model.layers) == 2


def test_one_file_of_experts_in_other_sizes_than_the_config(tmp_path: Path) -> None:
    folder = copied(QWEN, tmp_path)
    edit_json(folder, "config.json", lambda values: values.update(moe_intermediate_size=64))
    with pytest.raises(CheckpointError, match="wrong shape"):
        from_pretrained(folder)

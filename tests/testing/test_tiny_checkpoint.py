"""The synthetic checkpoints: shapes as documented, and numbers that are what they say.

The formulas in ``formulas.py`` decode them once more; ``test_real_checkpoints.py`` proves those.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from formulas import FLOATS, assert_same_bits, decode, load, of_module, small

from loader.errors import CheckpointError, UnsupportedError
from loader.testing.checkpoint import TinyCheckpoint, tiny_checkpoint
from loader.testing.dialect import DIALECTS
from loader.testing.family import FAMILIES

FIXTURES = Path(__file__).parents[2] / "fixtures"


# The generator against the same formulas.


def module_name(checkpoint: TinyCheckpoint, layer: int, expert: int, projection: str) -> str:
    """Spelled here again, so that a wrong table shows."""
    block = "mlp"
    spelled = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    if checkpoint.family in ("mixtral", "minimax", "mixtral-hf5"):
        block = "block_sparse_moe"
    if checkpoint.family in ("mixtral", "minimax"):
        spelled = {"gate": "w1", "up": "w3", "down": "w2"}
    prefix = "model.language_model." if checkpoint.family == "qwen3.5" else "model."
    if checkpoint.fused:
        fused = "down_proj" if projection == "down" else "gate_up_proj"
        return f"{prefix}layers.{layer}.{block}.experts.{fused}"
    return f"{prefix}layers.{layer}.{block}.experts.{expert}.{spelled[projection]}"


def documented(checkpoint: TinyCheckpoint, out: int, columns: int) -> dict[str, Any]:
    """Part to (dtype, shape) of one projection, as the documentation of the formats has it."""
    groups = -(-columns // checkpoint.group)
    half = {"F16": torch.float16, "BF16": torch.bfloat16}.get(checkpoint.scale_dtype)
    if checkpoint.dialect.startswith("awq"):
        return {
            "qweight": (torch.int32, (columns, out // 8)),
            "qzeros": (torch.int32, (groups, out // 8)),
            "scales": (half, (groups, out)),
        }
    if checkpoint.dialect.startswith("ct-int4"):
        wanted = {
            "weight_packed": (torch.int32, (out, columns // 8)),
            "weight_scale": (half, (out, groups)),
            "weight_shape": (torch.int64, (2,)),
        }
        if checkpoint.dialect == "ct-int4-asym":
            wanted["weight_zero_point"] = (torch.int32, (out // 8, groups))
        return wanted
    scale = (torch.float8_e4m3fn, (out, columns // 16))
    codes = (torch.uint8, (out, columns // 2))
    if checkpoint.dialect == "ct-nvfp4":
        globals_ = (torch.float32, (1,))
        return {"weight_packed": codes, "weight_scale": scale, "weight_global_scale": globals_}
    multiplier = (torch.float32, ())
    return {
        "weight": codes,
        "weight_scale": scale,
        "weight_scale_2": multiplier,
        "input_scale": multiplier,
    }


@pytest.mark.parametrize("fused", [False, True], ids=["single", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_stored_numbers_are_the_ones_it_tells(
    tmp_path: Path, dialect: str, family: str, fused: bool
) -> None:
    checkpoint = small(tmp_path, dialect, family=family, fused=fused, seed=3)
    tensors = load(tmp_path)
    for layer, expert, projection in ((0, 0, "gate"), (0, 2, "up"), (1, 1, "up"), (1, 2, "down")):
        parts = of_module(tensors, module_name(checkpoint, layer, expert, projection))
        out, columns = (64, 96) if projection == "down" else (96, 64)
        gated = fused and projection != "down"
        wanted = documented(checkpoint, 2 * out if gated else out, columns)
        assert parts.keys() == wanted.keys()
        for name, (dtype, shape) in wanted.items():
            if fused:
                scalar = name in ("weight_global_scale", "weight_scale_2", "input_scale")
                shape = (3,) if scalar else (3, *shape)
            assert (parts[name].dtype, tuple(parts[name].shape)) == (dtype, shape), name
        one = {name: tensor[expert] if fused else tensor for name, tensor in parts.items()}
        half = projection if gated else ""
        single = decode(one, checkpoint.group, np.float32, half)
        assert_same_bits(single, checkpoint.weight_f32(layer, expert, projection))
        double = decode(one, checkpoint.group, np.float64, half)
        assert_same_bits(double, checkpoint.weight(layer, expert, projection))


@pytest.mark.parametrize("payload", ["random", "fast"])
@pytest.mark.parametrize("fused", [False, True], ids=["single", "fused"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_own_reader_reads_what_was_written(
    tmp_path: Path, dialect: str, fused: bool, payload: str
) -> None:
    checkpoint = small(
        tmp_path, dialect, fused=fused, payload=payload, excluded=(0,), fused_globals="E2", shards=2
    )
    tensors = load(tmp_path)
    for expert, projection in ((0, "gate"), (1, "up"), (2, "down")):
        kept = checkpoint.codes(1, expert, projection)
        for told, read in zip(kept, checkpoint.stored_codes(1, expert, projection), strict=True):
            assert (told is None) == (read is None)
            if told is not None:
                assert_same_bits(np.asarray(told), np.asarray(read))
        plain = tensors[module_name(checkpoint, 0, expert, projection) + ".weight"]
        plain = plain[expert] if fused else plain
        if fused and projection != "down":
            plain = plain.chunk(2)[projection == "up"]
        assert_same_bits(plain.double().numpy(), checkpoint.weight(0, expert, projection))


@pytest.mark.parametrize(
    "dialect, settings",
    [
        ("awq-gemm", {"intermediate": 88, "group": 32}),
        ("awq-gemm", {"group": -1}),
        ("awq-gemm", {"symmetric": True}),
        ("awq-gemm", {"scale_dtype": "F32"}),
        ("awq-gemm", {"scale_dtype": "BF16"}),
        ("ct-int4", {"intermediate": 88}),
        ("ct-int4-asym", {"group": -1}),
        ("ct-int4-asym", {"scale_dtype": "F16", "group": 64}),
        ("ct-int4", {"scale_dtype": "F32"}),
    ],
)
def test_odd_groups_and_scale_dtypes(
    tmp_path: Path, dialect: str, settings: dict[str, Any]
) -> None:
    checkpoint = small(tmp_path, dialect, **settings)
    tensors = load(tmp_path)
    for projection in ("gate", "up", "down"):
        parts = of_module(tensors, module_name(checkpoint, 1, 2, projection))
        assert ("qzeros" in parts) == (dialect == "awq-gemm" and not checkpoint.symmetric)
        found = decode(parts, checkpoint.group, np.float64)
        assert_same_bits(found, checkpoint.weight(1, 2, projection))


def test_fused_globals_have_the_asked_shape(tmp_path: Path) -> None:
    for kind, gated, down in (("E", (3,), (3,)), ("E1", (3, 1), (3, 1)), ("E2", (3, 2), (3,))):
        made = small(tmp_path / kind, "modelopt-nvfp4", fused=True, fused_globals=kind)
        assert made.tensor(made.name(0, 0, "up", "weight_scale_2")).shape == gated
        assert made.tensor(made.name(0, 0, "down", "weight_scale_2")).shape == down
        same = made.codes(1, 1, "gate").global_scale == made.codes(1, 1, "up").global_scale
        assert same == (kind != "E2")


# Values: a swap shows, and nothing leaves the range of fp16.


@pytest.mark.parametrize("dialect", DIALECTS)
def test_values_are_distinct(tmp_path: Path, dialect: str) -> None:
    checkpoint = tiny_checkpoint(tmp_path, dialect=dialect, experts=4)
    columns: set[bytes] = set()
    planes: set[bytes] = set()
    globals_ = []
    for layer in range(2):
        for expert in range(4):
            for projection in ("gate", "up", "down"):
                q, z, scale, global_ = checkpoint.codes(layer, expert, projection)
                columns |= {row.tobytes() for row in q}
                planes.add(scale.tobytes())
                globals_.append(global_)
                assert (scale[:16] != np.roll(scale[:16], 1, axis=0)).all()
                assert (scale[:, 1:] != scale[:, :-1]).mean() > 0.95
                if z is not None and not checkpoint.symmetric:
                    assert len(np.unique(z)) == 16
    assert len(columns) == 2 * 4 * (512 + 512 + 256)
    assert len(planes) == 24
    if dialect in FLOATS:
        assert len(set(globals_)) == 24
        assert max(globals_) / min(globals_) > 100


@pytest.mark.parametrize("payload", ["random", "fast"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_magnitudes_stay_within_fp16(tmp_path: Path, dialect: str, payload: str) -> None:
    checkpoint = tiny_checkpoint(tmp_path, dialect=dialect, experts=2, payload=payload)
    x = np.random.default_rng(0).standard_normal((8, 256))
    for expert in range(2):
        gate, up, down = (checkpoint.weight(1, expert, p) for p in ("gate", "up", "down"))
        g, u = x @ gate.T, x @ up.T
        y = g / (1 + np.exp(-g)) * u
        for values in (g, u, y, y @ down.T):
            assert 2.0**-6 < np.sqrt((values**2).mean()) < 100 and np.abs(values).max() < 6e4
        scale = checkpoint.tensor(checkpoint.name(1, expert, "up", checkpoint.writer.scale))
        if checkpoint.dialect not in FLOATS:
            kind = torch.float16 if scale.dtype == "F16" else torch.bfloat16
            held = torch.frombuffer(bytearray(scale.data), dtype=kind).float()
            assert (held >= 2.0**-14).all() and torch.equal(held, held.half().float())


def test_seed_decides_everything(tmp_path: Path) -> None:
    first, again, other = (
        small(tmp_path / str(i), "awq-gemm", seed=seed, shards=2)
        for i, seed in enumerate((1, 1, 2))
    )
    contents = [[path.read_bytes() for path in made.files()] for made in (first, again, other)]
    assert contents[0] == contents[1] != contents[2]
    assert (first.codes(0, 0, "up").q != other.codes(0, 0, "up").q).any()


# Config and what stands beside the experts.


@pytest.mark.parametrize("family", FAMILIES)
def test_config_tells_the_geometry(tmp_path: Path, family: str) -> None:
    small(tmp_path, "awq-gemm", family=family, extra_layers=1)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "awq"
    text = config.get("text_config", config)
    assert ("text_config" in config) == (family == "qwen3.5")
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    assert [text[key] for key in keys if key in text] == [3]
    assert text.get("moe_intermediate_size", text["intermediate_size"]) == 96
    assert (text["hidden_size"], text["num_hidden_layers"], text["hidden_act"]) == (64, 2, "silu")
    assert text["num_nextn_predict_layers"] == 1


@pytest.mark.parametrize("fused", [False, True], ids=["single", "fused"])
@pytest.mark.parametrize("dialect", ["awq-gemm", "ct-int4", "modelopt-nvfp4"])
def test_excluded_dense_and_draft_layers(tmp_path: Path, dialect: str, fused: bool) -> None:
    made = small(
        tmp_path,
        dialect,
        family="glm4-moe",
        layers=4,
        dense=(0,),
        excluded=(2,),
        extra_layers=1,
        fused=fused,
    )
    tensors = load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["first_k_dense_replace"] == 1 and config["num_hidden_layers"] == 4
    experts = {n for n in tensors if ".experts." in n}
    assert {int(n.split(".")[2]) for n in experts} == {1, 2, 3, 4}
    plain = {int(n.split(".")[2]) for n in experts if tensors[n].dtype.itemsize == 2}
    plain -= {1, 3}  # there, scales have two bytes
    assert plain == {2, 4}
    assert any(n.startswith("model.layers.0.mlp.gate_proj.") for n in tensors)
    assert "model.layers.1.mlp.shared_experts.up_proj.weight" in tensors
    written = json.dumps(config["quantization_config"])
    assert "model.layers.2." in written and "model.layers.4." not in written
    assert (made.moe_layers, made.quantized_layers) == ((1, 2, 3), (1, 3))
    assert (tmp_path / "hf_quant_config.json").exists() == (dialect == "modelopt-nvfp4")
    with pytest.raises(CheckpointError):
        made.weight(0, 0, "up")


def test_shared_expert_and_attention_choices(tmp_path: Path) -> None:
    names = set(load(small(tmp_path / "a", "ct-int4", family="qwen3-next").folder))
    assert "model.layers.0.mlp.shared_expert_gate.weight" in names
    assert "model.layers.0.mlp.shared_expert.up_proj.weight" in names
    assert "model.layers.0.self_attn.q_proj.weight_packed" in names
    made = small(tmp_path / "b", "ct-int4", shared_expert="quantized", attention=False)
    names = set(load(made.folder))
    assert "model.layers.0.mlp.shared_expert.up_proj.weight_packed" in names
    assert not any("self_attn" in name for name in names)


def test_config_overrides_merge(tmp_path: Path) -> None:
    small(tmp_path, "awq-gemm", config_overrides={"quantization_config": {"bits": 8}})
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"]["bits"] == 8
    assert config["quantization_config"]["group_size"] == 32


@pytest.mark.parametrize(
    "settings",
    [
        {"dialect": "awq-marlin"},
        {"family": "unknown"},
        {"dialect": "ct-nvfp4", "group": 32},
        {"hidden": 100},
        {"payload": "slow"},
        {"colour": "red"},
        {"dense": (0,), "excluded": (0,)},
        {"dense": (1,), "family": "deepseek-v3"},
    ],
)
def test_settings_that_cannot_be_written(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError):
        tiny_checkpoint(tmp_path / "model", **settings)
    assert not (tmp_path / "model").exists()


def test_a_folder_with_a_model_is_left_alone(tmp_path: Path) -> None:
    small(tmp_path, "awq-gemm")
    with pytest.raises(CheckpointError):
        small(tmp_path, "awq-gemm")


def test_command_line(tmp_path: Path) -> None:
    command = [sys.executable, str(FIXTURES / "make.py"), str(tmp_path / "model")]
    options = "--dialect ct-nvfp4 --hidden 64 --intermediate 96 --experts 3 --gigabytes 0.001"
    done = subprocess.run([*command, *options.split()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 0.8e6 < sum(p.stat().st_size for p in tmp_path.glob("model/*.safetensors")) < 1.2e6
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 1 and "already holds a model" in again.stderr

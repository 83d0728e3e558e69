"""The independent check: its own decoding against the tools' references, and what it must catch.

The fake layers hold weights taken from ``reference.safetensors``, which the writing tools made,
so nothing here is compared with itself.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from verify_fakes import (
    AWQ,
    DIVISOR,
    FIXTURES,
    INT4,
    LOADABLE,
    MULTIPLIER,
    FakeLayer,
    FakeShard,
    Weights,
    fakes,
    reference,
    swap_gate_and_up,
)

from loader.verify import ForwardCase, verify
from loader.verify.layer import PROJECTIONS
from loader.verify.raw import RawCheckpoint
from loader.verify.sample import draw
from loader.verify.slice import Checkpoint


def decode(checkpoint: Checkpoint, layer: int, fake: FakeLayer, expert: int) -> Weights:
    found = checkpoint.expert(layer, fake, expert)
    return {
        projection: torch.from_numpy(
            np.concatenate([found.weights(projection, at) for at in found.blocks(projection, 1000)])
        ).float()
        for projection in PROJECTIONS
    }


def assert_same(found: Weights, expected: Weights) -> None:
    for projection in PROJECTIONS:
        bits = [side[projection].add(0.0).view(torch.int32) for side in (found, expected)]
        assert torch.equal(*bits), f"{projection} differs"


@pytest.mark.parametrize("name", LOADABLE)
def test_decoding_equals_the_tools_own_bit_for_bit(name: str) -> None:
    with RawCheckpoint(FIXTURES / name) as raw:
        checkpoint = Checkpoint(raw, None)
        for layer, fake in fakes(name).items():
            for expert, expected in fake.weights.items():
                assert_same(decode(checkpoint, layer, fake, expert), expected)


@pytest.mark.parametrize("name", LOADABLE)
def test_good_layers_pass(name: str) -> None:
    report = verify(fakes(name), FIXTURES / name)
    assert report.ok, str(report)
    assert report.columns == 1152 and report.forward_count >= 2 * 3 * 2
    assert {case.dtype for case in report.forward_worst} >= {"float32", "bfloat16"}
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["ok"] is True
    assert all(word in str(report) for word in ("1,152 columns", "mismatches", "float32"))


@pytest.mark.parametrize("name", [AWQ, INT4, DIVISOR, MULTIPLIER])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_tensor_parallel_slice_is_compared_with_its_own_columns(name: str, rank: int) -> None:
    layers = {}
    for layer, held in reference(name).items():
        half = next(iter(held.values()))["down"].shape[1] // 2
        own = slice(rank * half, (rank + 1) * half)
        cut = {
            expert: {"gate": w["gate"][own], "up": w["up"][own], "down": w["down"][:, own]}
            for expert, w in held.items()
        }
        layers[layer] = FakeLayer(cut, FakeShard(rank, 2))
    assert verify(layers, FIXTURES / name).ok
    for fake in layers.values():
        fake.shard = FakeShard(1 - rank, 2)
    assert not verify(layers, FIXTURES / name).ok


# Faults: (fixture, what is wrong with the banks).


def one_code(layers: dict[int, FakeLayer]) -> None:
    matrix = layers[min(layers)].weights[min(layers[0].weights)]["down"]
    matrix[-1, -1] += matrix[matrix != 0].abs().min()


def divisor_as_multiplier(layers: dict[int, FakeLayer], name: str = DIVISOR) -> None:
    tensors = load_file(FIXTURES / name / "model.safetensors")
    for layer, fake in layers.items():
        for expert, held in fake.weights.items():
            for projection, part in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
                base = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}"
                held[projection] *= tensors[f"{base}.weight_global_scale"] ** 2


def one_global_ignored(layers: dict[int, FakeLayer]) -> None:
    tensors = load_file(FIXTURES / MULTIPLIER / "model.safetensors")
    expert = max(layers[1].weights)
    scale = tensors[f"model.layers.1.mlp.experts.{expert}.up_proj.weight_scale_2"]
    layers[1].weights[expert]["up"] /= scale


def one_nan(layers: dict[int, FakeLayer]) -> None:
    layers[1].weights[min(layers[1].weights)]["gate"][3, 5] = float("nan")


def reversed_columns(layers: dict[int, FakeLayer]) -> None:
    held = layers[0].weights[min(layers[0].weights)]
    held["gate"] = held["gate"].flip(0)


class TransposedDown(FakeLayer):
    def dequantize(self, expert_id: int, /) -> Weights:
        held = super().dequantize(expert_id)
        return {**held, "down": held["down"].T}


def transposed(layers: dict[int, FakeLayer]) -> None:
    layers[0] = TransposedDown(layers[0].weights)


FAULTS: Iterable[tuple[str, Callable[[dict[int, FakeLayer]], None]]] = [
    *((name, swap_gate_and_up) for name in (AWQ, INT4, DIVISOR, MULTIPLIER)),
    *((name, one_code) for name in (AWQ, INT4, DIVISOR, MULTIPLIER)),
    *((name, one_nan) for name in (AWQ, INT4, DIVISOR, MULTIPLIER)),
    *((name, reversed_columns) for name in (AWQ, INT4)),
    (DIVISOR, divisor_as_multiplier),
    (MULTIPLIER, one_global_ignored),
    (AWQ, transposed),
]


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_a_fault_in_the_banks_is_found(
    name: str, fault: Callable[[dict[int, FakeLayer]], None]
) -> None:
    layers = fakes(name)
    fault(layers)
    report = verify(layers, FIXTURES / name, samples=100_000)  # more than there are: all
    assert not report.ok
    assert report.mismatch_count + report.problem_count >= 1
    assert len(report.mismatches) == min(report.mismatch_count, 20)
    json.dumps(report.to_dict(), allow_nan=False)
    assert "FAILED" in str(report)


def test_one_wrong_value_is_named_exactly() -> None:
    layers = fakes(AWQ)
    held = layers[1].weights[3]["down"]
    held[7, 200] += 1.0
    report = verify(layers, FIXTURES / AWQ, samples=100_000)
    assert report.mismatch_count == 1
    (found,) = report.mismatches
    assert (found.layer, found.expert, found.projection) == (1, 3, "down")
    assert (found.column, found.k) == (7, 200)
    assert found.found == pytest.approx(found.expected + 1.0)


@pytest.mark.parametrize("scale", [1.01, float("nan"), -1.0])
def test_a_fault_in_forward_alone_is_found(scale: float) -> None:
    report = verify(fakes(AWQ, twist=lambda y: y * scale), FIXTURES / AWQ)
    assert report.mismatch_count == 0
    assert not report.ok
    assert report.forward_failures == report.forward_count
    assert "beyond" in str(report)


@pytest.mark.parametrize("seed", range(6))
def test_the_contracts_own_roundings_pass_in_a_narrow_slice(seed: int) -> None:
    layers = {}
    for layer, held in reference("qwen3next-ct-nvfp4a16").items():
        cut = {
            expert: {"gate": w["gate"][48:], "up": w["up"][48:], "down": w["down"][:, 48:]}
            for expert, w in held.items()
        }
        layers[layer] = FakeLayer(cut, FakeShard(3, 4))
    report = verify(layers, FIXTURES / "qwen3next-ct-nvfp4a16", samples=6, seed=seed)
    assert report.ok, str(report)


def test_a_token_without_held_experts_must_give_exact_zeros() -> None:
    report = verify(fakes(AWQ, twist=lambda y: y + 1e-30), FIXTURES / AWQ)
    assert {case.tokens for case in report.forward_worst} >= {9}
    assert not report.ok


def test_nan_never_passes() -> None:
    assert not ForwardCase(0, 1, "float32", None, float("nan"), 1.0).ok


def test_nothing_compared_is_not_ok() -> None:
    assert not verify({}, FIXTURES / AWQ).ok


def test_fused_bias_and_wide_have_weights_of_their_own() -> None:
    def each(name: str, change: Callable[[int, int, str, torch.Tensor], torch.Tensor]) -> Any:
        layers = fakes(name)
        for layer, fake in layers.items():
            for expert, held in fake.weights.items():
                for projection in PROJECTIONS:
                    held[projection] = change(layer, expert, projection, held[projection])
        return layers

    awq = load_file(FIXTURES / AWQ / "model.safetensors")
    parts = {"gate": "w1", "up": "w3", "down": "w2"}

    def biased(layer: int, expert: int, projection: str, w: torch.Tensor) -> torch.Tensor:
        base = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{parts[projection]}"
        s = awq[f"{base}.scales"].numpy().astype(np.float64).repeat(32, axis=0).T
        words = awq[f"{base}.qzeros"].numpy().view(np.uint32)
        shifts = 4 * np.array([0, 4, 1, 5, 2, 6, 3, 7], dtype=np.uint32)
        nibbles = ((words[..., None] >> shifts) & 15).reshape(len(words), -1)
        z = nibbles.astype(np.float64).repeat(32, axis=0).T
        q = np.rint(w.numpy() / s) + z
        b = (-z * s).astype(np.float16).astype(np.float64)
        return torch.from_numpy((q * s + b).astype(np.float16)).float()

    layers = each(AWQ, biased)
    assert not verify(layers, FIXTURES / AWQ).ok
    for fake in layers.values():
        fake.awq_rounding = "fused_bias"
    assert verify(layers, FIXTURES / AWQ).ok

    modelopt = load_file(FIXTURES / MULTIPLIER / "model.safetensors")

    def wide(layer: int, expert: int, projection: str, w: torch.Tensor) -> torch.Tensor:
        base = f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj"
        scale = modelopt[f"{base}.weight_scale"].float() * modelopt[f"{base}.weight_scale_2"]
        scale = scale.repeat_interleave(16, dim=1)
        return torch.where(scale == 0, 0.0, (w / scale * 2).round() / 2) * scale.half().float()

    layers = each(MULTIPLIER, wide)
    assert not verify(layers, FIXTURES / MULTIPLIER).ok
    for fake in layers.values():
        fake.metadata_layout = "wide"
    assert verify(layers, FIXTURES / MULTIPLIER).ok


def test_draws_are_seeded_distinct_and_cover_every_layer_and_projection() -> None:
    layers = fakes(AWQ)
    first, again = (draw(layers, 60, np.random.default_rng(3)) for _ in range(2))
    flat = [
        (layer, expert, projection, int(column))
        for layer, experts in first.items()
        for expert, drawn in experts.items()
        for projection, columns in drawn.items()
        for column in columns
    ]
    assert len(flat) == len(set(flat)) == 60
    assert {(layer, projection) for layer, _, projection, _ in flat} == {
        (layer, projection) for layer in layers for projection in PROJECTIONS
    }
    assert str(first) == str(again) != str(draw(layers, 60, np.random.default_rng(4)))


def test_the_check_takes_nothing_but_errors_from_what_it_checks() -> None:
    for path in Path(inspect.getfile(verify)).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert not name.startswith("loader") or name.startswith(
                    ("loader.errors", "loader.verify.")
                ), f"{path.name} imports {name}"

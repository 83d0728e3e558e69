"""Weights from banks: equal bit for bit to the checkpoint's own, under every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bank_oracle import (
    E2M1,
    FLOATS,
    INT4,
    fp16_bias,
    fused_bias_weight,
    interleave,
    layouts,
    metadata,
    small,
    words,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import loader
from loader.bank import BankSpec
from loader.reference.weights import Columns, dequantize, scale_and_zero, scaled_codes
from loader.testing.checkpoint import TinyCheckpoint

FIXTURES = Path(__file__).parents[2] / "fixtures" / "checkpoints"


def assert_same_bits(found: torch.Tensor, wanted: np.ndarray[Any, Any], what: str = "") -> None:
    """Equal fp32 bits; -0 counts as 0, which docs/routes.md does not tell apart in exact."""
    have = np.ascontiguousarray((found + 0.0).numpy()).view(np.uint32)
    want = np.ascontiguousarray(wanted.astype(np.float32) + np.float32(0)).view(np.uint32)
    assert have.shape == want.shape, what
    at = np.argwhere(have != want)
    assert not len(at), f"{what}: {len(at)} differ, first {tuple(at[0])}"


def load(checkpoint: TinyCheckpoint, **policy: Any) -> Any:
    return loader.load(checkpoint.folder, policy=loader.Policy(**policy))[0]


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
@pytest.mark.parametrize("dialect", INT4)
def test_exact_int4_is_the_checkpoint_under_every_layout(
    dialect: str, dtype: str, tmp_path: Path
) -> None:
    checkpoint = small(tmp_path, dialect=dialect, scale_dtype=dtype, hidden=88, intermediate=200)
    modules = {layout: load(checkpoint, layout=layout) for layout in layouts(dialect)}
    for expert in range(checkpoint.experts):
        found = {layout: module.dequantize(expert) for layout, module in modules.items()}
        for name in ("gate", "up", "down"):
            first = found["compact"][name]
            assert first.dtype == torch.float32 and first.is_contiguous()
            assert_same_bits(first, checkpoint.weight_f32(0, expert, name), name)
            for layout in found:
                other = found[layout][name]
                assert torch.equal(other.view(torch.int32), first.view(torch.int32)), layout


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
@pytest.mark.parametrize("dialect", INT4)
def test_fused_bias_is_the_same_under_every_layout(
    dialect: str, dtype: str, tmp_path: Path
) -> None:
    checkpoint = small(tmp_path, dialect=dialect, scale_dtype=dtype, hidden=88, intermediate=200)
    differs = 0
    for layout in layouts(dialect):
        module = load(checkpoint, layout=layout, awq_rounding="fused_bias")
        for expert in range(checkpoint.experts):
            for name, weight in module.dequantize(expert).items():
                wanted = fused_bias_weight(checkpoint, 0, expert, name)
                have = weight.numpy().view(np.uint32)
                assert np.array_equal(have, np.ascontiguousarray(wanted).view(np.uint32)), layout
                differs += int((weight.numpy() != checkpoint.weight_f32(0, expert, name)).sum())
    assert differs or dtype == "BF16" or dialect in ("ct-int4", "awq-gptqmodel")


@pytest.mark.parametrize("dialect", FLOATS)
def test_nvfp4_in_the_order_of_the_design(dialect: str, tmp_path: Path) -> None:
    """fp32(e2m1 * fp32(e4m3 o global)), signs of zero included; `wide` rounds the product."""
    checkpoint = small(tmp_path, dialect=dialect, hidden=80, intermediate=112)
    compact, wide = (load(checkpoint, layout=layout) for layout in ("compact", "wide"))
    for expert in range(checkpoint.experts):
        exact, rounded = compact.dequantize(expert), wide.dequantize(expert)
        for name in ("gate", "up", "down"):
            wanted = checkpoint.weight_f32(0, expert, name)
            assert np.array_equal(exact[name].numpy().view(np.uint32), wanted.view(np.uint32))
            codes = checkpoint.codes(0, expert, name)
            block = torch.from_numpy(codes.scale).view(torch.float8_e4m3fn).float().numpy()
            whole = codes.global_scale
            product = block / whole if dialect == "ct-nvfp4" else block * whole
            half = product.astype(np.float16).astype(np.float32)
            assert np.array_equal(rounded[name].numpy(), E2M1[codes.q] * np.repeat(half, 16, 1))
            assert not np.array_equal(rounded[name].numpy(), wanted)


# Single banks.

FP16 = st.one_of(
    st.sampled_from([0x0000, 0x8000, 0x0400, 0x8400, 0x3C00, 0xBC00, 0x6C43]),
    st.integers(0x0400, 0x6C43),  # 2^-14 to 4364, whose bias is finite for z = 15
    st.integers(0x8400, 0xEC43),  # negative scales are numbers too
)


@st.composite
def int4_banks(draw: st.DrawFn) -> tuple[BankSpec, dict[str, dict[str, torch.Tensor]], Any]:
    """One expert under all three layouts, and its q, z, s."""
    k, n, group = 16 * draw(st.integers(1, 4)), 8 * draw(st.integers(1, 6)), 32
    phase = draw(st.sampled_from([0, 16]))
    spec = BankSpec("int4", "compact", 1, k, n, group, phase, 1, torch.float16)
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    pool = np.array(draw(st.lists(FP16, min_size=4, max_size=12)), np.uint16)
    scale = rng.choice(pool, (spec.groups, n))
    q = rng.integers(0, 16, (k, n), np.uint8)
    z = rng.integers(0, 16, (spec.groups, n), np.uint8)
    tensors = {}
    for layout in ("compact", "record", "wide"):
        made = {"weight": words(q)} | metadata(layout, "F16", scale, z)
        tensors[layout] = {
            t.name: torch.from_numpy(made[t.name].view(np.uint8)).view(t.dtype).view(t.shape)
            for t in spec.with_layout(layout).tensors()
        }
    return spec, tensors, (q, z, scale.view(np.float16))


@given(int4_banks())
@settings(max_examples=120, deadline=None)
def test_any_scale_that_fp16_holds(
    drawn: tuple[BankSpec, dict[str, dict[str, torch.Tensor]], Any],
) -> None:
    """Both zeros, both signs, the smallest normal: the layouts agree bit for bit, both roundings"""
    spec, tensors, (q, z, scale) = drawn
    whole = Columns(0, 0, spec.n)
    group = (spec.phase + np.arange(spec.k)) // spec.group
    factor = q.astype(np.float32) - z[group]
    exact = factor * scale.astype(np.float32)[group]
    bias = fp16_bias(scale.astype(np.float32), z)[group].astype(np.float64)
    fused = (q.astype(np.float64) * scale.astype(np.float64)[group] + bias).astype(np.float16)
    for rounding, wanted in (("exact", exact), ("fused_bias", fused.astype(np.float32))):
        found = {
            layout: dequantize(spec.with_layout(layout), rounding, tensors[layout], whole)
            for layout in tensors
        }
        for layout, weight in found.items():
            same = torch.equal(
                weight.contiguous().view(torch.int32),
                found["compact"].contiguous().view(torch.int32),
            )
            assert same, (rounding, layout)
            assert_same_bits(weight, wanted.T, f"{rounding} {layout}")


@given(int4_banks())
@settings(max_examples=60, deadline=None)
def test_zero_points_come_back_from_the_bias(
    drawn: tuple[BankSpec, dict[str, dict[str, torch.Tensor]], Any],
) -> None:
    spec, tensors, (_, z, scale) = drawn
    for layout in tensors:
        found, zero = scale_and_zero(
            spec.with_layout(layout), tensors[layout], Columns(0, 0, spec.n)
        )
        assert np.array_equal(found.contiguous().view(torch.int16).numpy(), scale.view(np.int16))
        known = scale != 0
        assert np.array_equal(zero.numpy()[known], z[known].astype(np.float32))


@given(int4_banks(), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_runs_of_columns_are_the_whole(
    drawn: tuple[BankSpec, dict[str, dict[str, torch.Tensor]], Any], tiles: int
) -> None:
    spec, tensors, _ = drawn
    for layout in tensors:
        bank = spec.with_layout(layout)
        whole = dequantize(bank, "exact", tensors[layout], Columns(0, 0, spec.n))
        runs = [
            dequantize(bank, "exact", tensors[layout], Columns(0, at, min(at + 32 * tiles, spec.n)))
            for at in range(0, spec.n, 32 * tiles)
        ]
        assert torch.equal(torch.cat(runs), whole)
        parts = scaled_codes(bank, tensors[layout], Columns(0, 0, spec.n))
        group = (spec.phase + torch.arange(spec.k)) // spec.group
        assert torch.equal((parts.codes * parts.scale[group]).t(), whole)


def test_gate_and_up_have_their_own_global() -> None:
    """Also in a run of columns that does not begin at column 0."""
    n, k = 80, 16
    for sense in ("multiplier", "divisor"):
        spec = BankSpec("e2m1", "compact", 1, k, n, 16, 0, 2, torch.uint8, sense)
        q = np.arange(k * n, dtype=np.uint8).reshape(k, n) % 16
        block = interleave(*(np.full((1, n // 2), b, np.uint8) for b in (0x38, 0x3C)))
        padded = np.pad(block, ((0, 0), (0, 16)))
        tensors = {
            "weight": torch.from_numpy(words(q))[None],
            "scales": torch.from_numpy(padded)[None],
            "globals": torch.tensor([[3.0, 0.7]]),
        }
        column = np.where(np.arange(n) % 2, np.float32(0.7), np.float32(3.0))
        e4m3 = np.where(np.arange(n) % 2, np.float32(1.5), np.float32(1.0))
        scale = e4m3 / column if sense == "divisor" else e4m3 * column
        wanted = E2M1[q] * scale
        for first, last in ((0, n), (32, 64), (64, n), (32, n)):
            found = dequantize(spec, "exact", tensors, Columns(0, first, last))
            assert_same_bits(found, wanted.T[first:last], f"{sense} {first}")


@pytest.mark.parametrize("name", ["mixtral-ct08-nvfp4", "qwen3moe-ct-w4a16asym-g32"])
def test_a_bank_of_a_real_tool_is_that_tools_reference(name: str) -> None:
    experts = loader.load(FIXTURES / name)
    with safe_open(FIXTURES / name / "reference.safetensors", "pt") as reference:
        for key in reference.keys():  # noqa: SIM118 - a handle is no mapping
            _, layer, _, expert, projection, *_ = key.split(".")
            name_ = projection.removesuffix("_proj")
            found = experts[int(layer)].dequantize(int(expert))[name_]
            assert_same_bits(found, reference.get_tensor(key).numpy(), key)

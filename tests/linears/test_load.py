"""Linears are loaded bit for bit, whole and in slices, by every way of reading."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_oracle import decode, quantization, tensors_of
from load_fakes import Allocations, RecordingSource
from verify_fakes import copied, edit

from loader import Policy, memory, native
from loader.checkpoint.folder import Checkpoint, open_checkpoint
from loader.checkpoint.linears import find_linears
from loader.checkpoint.source import LocalSource
from loader.errors import CapacityError, CheckpointError, ConversionError
from loader.linears import LinearLoader, LinearPlan, LinearSlice, plan_linear
from loader.pieces import Places

FIXTURES = Path(__file__).parents[2] / "fixtures" / "checkpoints"
NOT_LOADED = {"qwen3moe-modelopt-int4-awq"}
CHECKPOINTS = sorted(p.name for p in FIXTURES.iterdir() if p.is_dir() and p.name not in NOT_LOADED)
CPU = torch.device("cpu")
OUT = "model.layers.1.self_attn.o_proj"
SLICED = (
    "qwen3moe-awq-gemm-g64-router",
    "qwen3moe-ct-w4a16asym-g32",
    "mixtral-ct08-nvfp4",
    "mixtral-gptqmodel-awq-sym-g64",
)


@cache
def weight_of(name: str, module: str) -> torch.Tensor:
    return decode(tensors_of(FIXTURES / name), module, quantization(FIXTURES / name))


def plans_of(
    checkpoint: Checkpoint, policy: Policy | None, part: LinearSlice | None, only: str | None
) -> dict[str, LinearPlan]:
    places = Places(checkpoint.catalog.file, checkpoint.catalog.begin)
    code = native.implementation_for(CPU)
    assert code is not None
    resolved = (policy or Policy()).resolve()
    slices = LinearSlice() if part is None else part
    return {
        name: plan_linear(source, resolved, code, places, torch.float32, slices)
        for name, source in find_linears(checkpoint).items()
        if only in (None, name)
    }


@contextmanager
def opened(
    folder: Path,
    way: str = "direct",
    policy: Policy | None = None,
    part: LinearSlice | None = None,
    only: str | None = None,
    staging: int = 64 << 10,
) -> Iterator[tuple[LinearLoader, dict[str, LinearPlan]]]:
    with LocalSource(folder) if way == "direct" else RecordingSource(folder) as source:
        checkpoint = open_checkpoint(source)
        plans = plans_of(checkpoint, policy, part, only)
        code = native.implementation_for(CPU)
        assert code is not None
        resolved = (policy or Policy()).resolve()
        with LinearLoader(checkpoint, plans.values(), CPU, code, resolved, staging) as loader:
            yield loader, plans


def test_the_documented_example_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of docs/integration.md, in a folder where its checkpoint is."""
    page = (FIXTURES.parents[1] / "docs" / "integration.md").read_text()
    (example,) = (
        block for block in re.findall("```python\n(.*?)```", page, re.S) if "find_linears" in block
    )
    monkeypatch.chdir(FIXTURES)
    found: dict[str, torch.Tensor] = {}
    exec(example.replace("path/to/checkpoint", "qwen3moe-awq-gemm-g128"), found)
    expected = weight_of("qwen3moe-awq-gemm-g128", "model.layers.0.self_attn.q_proj")[:64]
    assert torch.equal(found["weight"], expected.bfloat16())


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_linear_is_the_weight_that_the_file_means(name: str, way: str) -> None:
    with opened(FIXTURES / name, way) as (loader, plans):
        for module, plan in plans.items():
            expected = weight_of(name, module)
            assert torch.equal(loader.dequantize(plan, torch.float32), expected), module
            rounded = loader.dequantize(plan, torch.bfloat16)
            assert torch.equal(rounded, expected.bfloat16()), module
            y = loader.bank(plan)(torch.eye(plan.k))
            assert torch.allclose(y.t(), expected, rtol=1e-6, atol=0), module


@pytest.mark.parametrize("layout", ["record", "wide"])
def test_other_layouts_hold_the_same_numbers(layout: str, way: str) -> None:
    name = "qwen3moe-awq-gemm-g128"
    with opened(FIXTURES / name, way, Policy(layout=layout)) as (loader, plans):
        for module, plan in plans.items():
            assert torch.equal(loader.dequantize(plan, torch.float32), weight_of(name, module))


def test_the_one_layout_that_rounds_is_within_a_half_of_fp16(way: str) -> None:
    name = "mixtral-ct08-nvfp4"
    with opened(FIXTURES / name, way, Policy(layout="wide")) as (loader, plans):
        for module, plan in plans.items():
            found, expected = loader.dequantize(plan, torch.float32), weight_of(name, module)
            assert torch.allclose(found, expected, rtol=2**-10, atol=0)
            assert not torch.equal(found, expected)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), name=st.sampled_from(SLICED), small=st.booleans())
def test_any_slice_is_that_part_of_the_weight(data: st.DataObject, name: str, small: bool) -> None:
    expected = weight_of(name, OUT)
    n, k = expected.shape

    def run(size: int, step: int) -> tuple[int, int]:
        first = data.draw(st.integers(0, size // step - 1)) * step
        return first, data.draw(st.integers(1, (size - first) // step)) * step

    outs, ins = run(n, 8), run(k, 16)
    part = LinearSlice(outs=outs, ins=ins)
    staging = 16 << 10 if small else 64 << 10
    with opened(FIXTURES / name, part=part, only=OUT, staging=staging) as (loader, plans):
        wanted = expected[outs[0] : sum(outs), ins[0] : sum(ins)]
        assert torch.equal(loader.dequantize(plans[OUT], torch.float32), wanted)
        x = torch.randn(3, ins[1], generator=torch.Generator().manual_seed(1))
        exact = x.double() @ wanted.double().t()
        error = (loader.bank(plans[OUT])(x) - exact).norm()
        assert error <= 1e-5 * exact.norm()


@pytest.mark.parametrize("name", ["qwen3moe-awq-gemm-g128", "mixtral-ct08-nvfp4"])
def test_runs_of_a_large_weight_join_without_a_seam(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loader.linears.plan.RUN_BYTES", 4096)
    monkeypatch.setattr("loader.linears.load.RUN_BYTES", 32 * 128 * 4)
    with opened(FIXTURES / name, only=OUT) as (loader, plans):
        whole = torch.full((300, 256), 7.0)
        n, k = weight_of(name, OUT).shape
        loader.dequantize(plans[OUT], torch.float32, out=whole[20 : 20 + n, :k])
    assert torch.equal(whole[20 : 20 + n, :k], weight_of(name, OUT))
    assert bool((whole[:20] == 7).all()) and bool((whole[20 + n :] == 7).all())


def test_a_bias_joins_the_product_and_its_slice_is_cut(tmp_path: Path) -> None:
    folder = copied("qwen3moe-awq-gemm-g128", tmp_path)
    bias = torch.randn(256, generator=torch.Generator().manual_seed(2)).bfloat16()
    edit(folder, lambda tensors: {**tensors, f"{OUT}.bias": bias})
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(3))
    for part in (LinearSlice(), LinearSlice(outs=(64, 32))):
        with opened(folder, part=part, only=OUT) as (loader, plans):
            with_bias = loader.bank(plans[OUT])(x)
            without = loader.bank(plans[OUT], with_bias=False)(x)
        first, count = part.outs or (0, 256)
        added = bias[first : first + count].float().expand(2, -1)
        assert torch.allclose(with_bias - without, added, atol=1e-6)


def test_an_odd_number_of_outputs_is_dequantized_whole(tmp_path: Path) -> None:
    folder = copied("glm4moe-ct-w4a16-g128", tmp_path)
    name = "model.layers.1.self_attn.k_proj"

    def odd(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for part in ("weight_packed", "weight_scale"):
            tensors[f"{name}.{part}"] = tensors[f"{name}.{part}"][:33].clone()
        tensors[f"{name}.weight_shape"] = torch.tensor([33, 128])
        return tensors

    edit(folder, odd)
    expected = decode(tensors_of(folder), name, quantization(folder))
    assert expected.shape == (33, 128)
    for layout in ("compact", "record", "wide"):
        with opened(folder, policy=Policy(layout=layout), only=name) as (loader, plans):
            assert plans[name].served == "dequantized"
            found = loader.dequantize(plans[name], torch.float32)
        assert torch.equal(found, expected), layout


def test_a_shape_that_contradicts_the_words_is_named(tmp_path: Path) -> None:
    folder = copied("qwen3moe-ct-w4a16asym-g32", tmp_path)
    edit(folder, lambda t: {**t, f"{OUT}.weight_shape": torch.tensor([256, 128])})
    with (
        opened(folder, only=OUT) as (loader, plans),
        pytest.raises(CheckpointError, match=rf"{OUT}.weight_shape.*\[256, 256\]"),
    ):
        loader.bank(plans[OUT])


def test_a_weight_that_float16_cannot_hold_is_refused(tmp_path: Path) -> None:
    folder = copied("mixtral-ct08-nvfp4", tmp_path)
    edit(folder, lambda t: {**t, f"{OUT}.weight_global_scale": torch.tensor([1e-3])})
    with opened(folder, only=OUT) as (loader, plans):
        assert loader.dequantize(plans[OUT], torch.bfloat16).isfinite().all()
        with pytest.raises(ConversionError, match=f"float16 cannot hold.*{OUT}"):
            loader.dequantize(plans[OUT], torch.float16)


def test_values_that_are_no_numbers_are_kept_on_request(tmp_path: Path) -> None:
    folder = copied("qwen3moe-awq-gemm-g128", tmp_path)

    def spoil(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors[f"{OUT}.scales"][0, 9] = float("inf")
        return tensors

    edit(folder, spoil)
    with opened(folder, policy=Policy(nonfinite="warn"), only=OUT) as (loader, plans):
        loader.bank(plans[OUT])
        assert len(loader.nonfinite) == 1 and f"{OUT}.scales" in loader.nonfinite[0]
    with opened(folder, only=OUT) as (loader, plans), pytest.raises(ConversionError, match="inf"):
        loader.bank(plans[OUT])


def test_only_what_was_made_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Allocations(monkeypatch)
    with opened(FIXTURES / "qwen3moe-ct-nvfp4a16") as (loader, plans):
        modules = [loader.bank(plan) for plan in plans.values()]
        kept = {t.untyped_storage().data_ptr() for m in modules for t in m.banks()}
        resident = memory.storage_bytes(t for m in modules for t in m.banks())
        scratch, staging = loader.scratch_bytes, loader.staging_bytes
        assert loader.scratch.nbytes == scratch and staging <= 64 << 10
    assert resident == sum(plan.bank.nbytes() for plan in plans.values())
    # Beside the banks: the scratch that they share, and the loader that the block still names.
    assert made.alive() == len(kept) + 1


@pytest.mark.parametrize("error", [MemoryError("a"), torch.OutOfMemoryError("b")])
def test_memory_that_runs_out_says_where_what_was_asked_and_what_was_predicted(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Allocations(monkeypatch)
    with opened(FIXTURES / "qwen3moe-ct-nvfp4a16", only=OUT) as (loader, plans):
        made.error, made.fail_at = error, len(made.storages)
        plan = plans[OUT]
        own = plan.bank.nbytes() + loader.scratch_bytes
        own += loader.staging_bytes + loader.conversion_bytes
        for predicted in (own, 123_456):
            for call, what, nbytes in (
                (loader.bank, "the bank", plan.bank.nbytes()),
                (
                    partial(loader.dequantize, dtype=torch.float16),
                    "the weight",
                    2 * plan.n * plan.k,
                ),
            ):
                with pytest.raises(CapacityError, match=f"{what} of {OUT}") as caught:
                    call(plan)
                asked = f"{nbytes} bytes of a predicted peak of {predicted} bytes"
                assert (caught.value.layer, caught.value.expected) == (1, asked)
            loader.predicted_peak = 123_456  # as a caller says who loads more

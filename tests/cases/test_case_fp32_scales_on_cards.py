"""Cases, section 4.2, on a card: which 16-bit format holds scales of 32 is found where they are.

The device code runs on the host here (``host_card.py``); ``test_cuda_stream.py`` loads to a card.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from case_checks import small
from case_values import NAMES
from host_card import COMPILER, build, host_as_card
from load_fakes import SMALL, banks_of, module_of, quantization_of, same_bits
from test_case_fp32_scales import fp32_scales

import loader
from loader.checkpoint.scheme import Role
from loader.cuda_core import CudaCore
from loader.errors import ConversionError
from loader.reference.findings import Kind
from loader.spots import counts_of, spots_bytes
from loader.testing.checkpoint import tiny_checkpoint
from loader.testing.container import edit_tensor

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no g++ to compile it with")

LITTLE = 128 << 10


@pytest.fixture(scope="session")
def core(tmp_path_factory: pytest.TempPathFactory) -> CudaCore:
    return build(tmp_path_factory.mktemp("card"))


def on_card(core: CudaCore, folder: Path, **settings: Any) -> loader.LoadedExperts:
    with pytest.MonkeyPatch.context() as patch, host_as_card(core, patch):
        return loader.load(folder, **settings)


def assert_same(mine: loader.LoadedExperts, wanted: loader.LoadedExperts) -> None:
    for layer, module in wanted.items():
        assert mine[layer].spec == module.spec
        for a, b in zip(mine[layer].banks(), module.banks(), strict=True):
            assert a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("staging", (LITTLE, 64 << 20))
@pytest.mark.parametrize("only", ("fp16", "bf16", "both"))
@pytest.mark.parametrize("dialect", ("A", "P", "ct-int4-asym"))
def test_the_banks_are_those_of_the_host(
    tmp_path: Path, core: CudaCore, dialect: str, only: str, staging: int
) -> None:
    checkpoint = small(tmp_path, dialect, scale_dtype="F32")
    fp32_scales(tmp_path, checkpoint, only, ("up",))
    mine = on_card(core, tmp_path, staging_bytes=staging)
    assert_same(mine, loader.load(tmp_path))
    shown = "bfloat16" if only == "bf16" else "float16"
    report = mine.report.to_dict()
    assert [layer["scale_dtypes"] for layer in report["layers"]] == [[shown, "float16"]] * 2
    assert report["memory"]["resident"] == report["memory"]["predicted_resident"]


@pytest.mark.parametrize("layout", ("compact", "record", "wide"))
@pytest.mark.parametrize("rounding", ("exact", "fused_bias"))
def test_every_layout_and_rounding(
    tmp_path: Path, core: CudaCore, layout: str, rounding: str
) -> None:
    checkpoint = small(tmp_path, "A", scale_dtype="F32")
    fp32_scales(tmp_path, checkpoint, "both")
    policy = loader.Policy(layout=layout, awq_rounding=rounding)
    assert_same(on_card(core, tmp_path, policy=policy), loader.load(tmp_path, policy=policy))


@pytest.mark.parametrize("header", range(60_000, 60_004))
def test_tensors_at_any_byte(tmp_path: Path, core: CudaCore, header: int) -> None:
    made = tiny_checkpoint(
        tmp_path, dialect="ct-int4-asym", experts=2, header_lengths=[header], attention=False,
        scale_dtype="F32", hidden=88, intermediate=56, group=16,
    )  # fmt: skip
    fp32_scales(tmp_path, made, "bf16")
    assert_same(on_card(core, tmp_path), loader.load(tmp_path))


def messages(core: CudaCore, folder: Path) -> tuple[ConversionError, ConversionError]:
    with pytest.raises(ConversionError) as mine:
        on_card(core, folder, staging_bytes=LITTLE)
    with pytest.raises(ConversionError) as wanted:
        loader.load(folder)
    return mine.value, wanted.value


@pytest.mark.parametrize("first", ("fp16", "bf16"))
def test_what_no_one_format_holds_is_refused(tmp_path: Path, core: CudaCore, first: str) -> None:
    checkpoint = small(tmp_path, "A", scale_dtype="F32")
    fp32_scales(tmp_path, checkpoint, first, ("gate",))
    name = checkpoint.name(1, 0, "up", "scales")

    def edit(array: np.ndarray) -> None:
        array.reshape(-1)[3] = 7e4 if first == "fp16" else 1 + 2**-10
        if first == "fp16":
            array.view(np.uint32).reshape(-1)[3] &= 0xFFFF0000

    edit_tensor(tmp_path, name, edit)
    on_card(core, tmp_path, layers=[0])
    mine, _ = messages(core, tmp_path)
    assert "neither 16-bit format" in str(mine)
    assert mine.layer == 1 and mine.tensor is not None


@pytest.mark.parametrize("dialect", ("A", "P"))
def test_one_scale_beyond_both_formats_is_named_as_on_the_host(
    tmp_path: Path, core: CudaCore, dialect: str
) -> None:
    checkpoint = small(tmp_path, dialect, scale_dtype="F32")
    fp32_scales(tmp_path, checkpoint, "both")
    part = "scales" if dialect == "A" else "weight_scale"

    def edit(array: np.ndarray) -> None:
        array[2, 1] = np.float32(1 + 2**-20)

    edit_tensor(tmp_path, checkpoint.name(0, 3, "down", part), edit)
    mine, wanted = messages(core, tmp_path)
    assert str(mine) == str(wanted)


@pytest.mark.parametrize("dialect", ("awq-gemm", "ct-int4-asym"))
def test_tensors_that_are_read_in_parts(tmp_path: Path, core: CudaCore, dialect: str) -> None:
    made = tiny_checkpoint(
        tmp_path, dialect=dialect, scale_dtype="F32", hidden=1024, intermediate=512, group=16,
        experts=2, layers=1, attention=False,
    )  # fmt: skip
    fp32_scales(tmp_path, made, "bf16")
    plan = loader.plan(tmp_path, staging_bytes=LITTLE)
    wide = [Role.SCALES_GN32, Role.SCALES_NG32]
    parts = [
        piece
        for chunk in plan.chunks(plan.layers[0])
        for piece in chunk.pieces[np.isin(chunk.pieces["role"], wide)]
    ]
    assert any(piece["dest_row"] for piece in parts)
    assert_same(on_card(core, tmp_path, staging_bytes=LITTLE), loader.load(tmp_path))

    def edit(array: np.ndarray) -> None:
        array[-3, -5] = np.float32(1 + 2**-20)

    edit_tensor(tmp_path, made.name(0, 1, "gate", made.writer.scale), edit)
    mine, _ = messages(core, tmp_path)
    group, column = (61, 507) if dialect == "awq-gemm" else (59, 509)
    assert f"found 1 at [{group}, {column}] (group, column), 1 such values" in str(mine)


def test_nonfinite_scales(tmp_path: Path, core: CudaCore) -> None:
    checkpoint = small(tmp_path, "P", scale_dtype="F32")
    fp32_scales(tmp_path, checkpoint, "bf16")

    def edit(array: np.ndarray) -> None:
        array[5, 1] = np.nan

    edit_tensor(tmp_path, checkpoint.name(0, 1, "gate", "weight_scale"), edit)
    mine, wanted = messages(core, tmp_path)
    assert str(mine) == str(wanted)
    policy = loader.Policy(nonfinite="warn")
    kept = on_card(core, tmp_path, policy=policy)
    assert kept.report.nonfinite == loader.load(tmp_path, policy=policy).report.nonfinite
    assert kept[0].spec.w13.scale_dtype == torch.bfloat16


@pytest.mark.parametrize("only", ("fp16", "bf16", "both"))
def test_parameters_of_a_module(tmp_path: Path, core: CudaCore, only: str) -> None:
    made = tiny_checkpoint(
        tmp_path, dialect="awq-gemm", scale_dtype="F32", attention=False, **SMALL
    )
    fp32_scales(tmp_path, made, only, ("gate",))
    wanted = loader.load(tmp_path, layers=[0])[0]
    with pytest.MonkeyPatch.context() as patch, host_as_card(core, patch):
        mine = loader.prepare_module(module_of(made), quantization=quantization_of(made))
    assert mine.spec == wanted.spec
    assert same_bits(banks_of(mine), banks_of(wanted))


def test_counts_are_of_one_kind_and_one_bank() -> None:
    experts = 3
    table = torch.zeros(spots_bytes(experts), dtype=torch.uint8)
    seen = []
    for kind in Kind:
        for bank, projections in ((0, 2), (1, 1)):
            counts = counts_of(table, kind, bank, experts)
            assert counts.shape == (projections, experts) and not counts.any()
            counts += 1
            seen.append(counts.sum())
    assert sum(seen) == len(Kind) * len(NAMES) * experts

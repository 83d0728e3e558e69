"""Cases, section 4.2: scales of 32 bits, kept in 16 where one format holds all of a bank."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from case_checks import Recorder, refuse, small
from case_values import NAMES
from load_fakes import SMALL, banks_of, module_of, quantization_of, same_bits

import loader
from loader import native
from loader.testing.checkpoint import TinyCheckpoint, tiny_checkpoint
from loader.testing.container import edit_tensor


def fp32_scales(
    folder: Path, checkpoint: TinyCheckpoint, only: str, projections: tuple[str, ...] = NAMES
) -> None:
    """Scales of 32 bits: of 8 significant bits, a few of which only one 16-bit format holds."""
    part = "scales" if "awq" in checkpoint.dialect else "weight_scale"
    # From the last expert backwards: the first chunks show nothing of it.
    extremes = {"fp16": (1 + 2**-10, 2.0**-24), "bf16": (1e-6, 7e4), "both": (0.5, 0.0)}[only]

    def edit(array: np.ndarray) -> None:
        bits = array.view(np.uint32)
        bits &= 0xFFFF0000
        flat = array.reshape(-1)
        flat[7], flat[18] = (np.float32(value) for value in extremes)
        if only == "bf16":
            bits &= 0xFFFF0000

    def even(array: np.ndarray) -> None:
        array.view(np.uint32)[...] &= 0xFFFF0000

    for layer in range(checkpoint.layers):
        for expert in range(checkpoint.experts):
            for projection in NAMES:
                name = checkpoint.name(layer, expert, projection, part)
                last = expert == checkpoint.experts - 1 and projection in projections
                edit_tensor(folder, name, edit if last else even)


@pytest.mark.parametrize("only", ["fp16", "bf16", "both"])
@pytest.mark.parametrize("dialect", ["A", "P", "ct-int4-asym"])
def test_scales_of_32_bits_are_kept_where_16_hold_them(
    tmp_path: Path, way: str, dialect: str, only: str
) -> None:
    """Each bank in the format that holds it: fp16 wherever it can, at no more than 16 bits."""
    checkpoint = small(tmp_path, dialect, scale_dtype="F32")
    fp32_scales(tmp_path, checkpoint, only, ("up",))
    with Recorder(tmp_path) if way == "ahead" else nullcontext(tmp_path) as source:
        experts = loader.load(source, staging_bytes=32 << 10)
    for layer, module in experts.items():
        wanted = torch.bfloat16 if only == "bf16" else torch.float16
        assert module.get_buffer("w13_scales").dtype == wanted
        assert module.get_buffer("w2_scales").dtype == torch.float16
        for expert in range(checkpoint.experts):
            weights = module.dequantize(expert)
            for projection in NAMES:
                codes = checkpoint.stored_codes(layer, expert, projection)
                scale = codes.scale.view(np.float32).astype(np.float64)
                columns = 2 if projection != "down" else 1
                plane = module.get_buffer("w2_scales" if columns == 1 else "w13_scales")[expert]
                own = plane[:, (projection == "up") : columns * scale.shape[0] : columns]
                assert np.array_equal(own.double().numpy().T, scale)
                assert weights[projection].isfinite().all()
    report = experts.report.to_dict()
    shown = "bfloat16" if only == "bf16" else "float16"
    assert [layer["scale_dtypes"] for layer in report["layers"]] == [[shown, "float16"]] * 2
    assert report["memory"]["resident"] == report["memory"]["predicted_resident"]
    assert loader.verify(experts, tmp_path, samples=64).ok


def test_scales_of_32_bits_in_one_call_and_in_every_layout(tmp_path: Path) -> None:
    checkpoint = small(tmp_path, "A", scale_dtype="F32")
    fp32_scales(tmp_path, checkpoint, "both")
    layouts = ("compact", "record", "wide")
    loads = [loader.load(tmp_path, policy=loader.Policy(layout=layout)) for layout in layouts]
    for projection in NAMES:
        first, *others = (experts[1].dequantize(2)[projection] for experts in loads)
        assert all(torch.equal(first, other) for other in others)
    with native.serving(native.REFERENCE):
        by_reference = loader.load(tmp_path)
    for one, other in zip(loads[0].values(), by_reference.values(), strict=True):
        assert all(map(torch.equal, one.banks(), other.banks()))


@pytest.mark.parametrize("dialect", ["A", "P"])
@pytest.mark.parametrize("first", ["fp16", "bf16"])
def test_scales_of_32_bits_that_neither_format_holds(
    tmp_path: Path, way: str, dialect: str, first: str
) -> None:
    """Not one scale alone has to be beyond both formats: what no one plane holds is refused."""
    checkpoint = small(tmp_path, dialect, scale_dtype="F32")
    fp32_scales(tmp_path, checkpoint, first, ("gate",))
    part = "scales" if dialect == "A" else "weight_scale"
    name = checkpoint.name(1, 0, "up", part)
    other = 7e4 if first == "fp16" else 1 + 2**-10

    def edit(array: np.ndarray) -> None:
        array.reshape(-1)[3] = other
        if other > 2:
            array.view(np.uint32).reshape(-1)[3] &= 0xFFFF0000

    edit_tensor(tmp_path, name, edit)
    loader.load(tmp_path, layers=[0])
    with pytest.raises(loader.ConversionError, match="neither 16-bit format") as caught:
        loader.load(tmp_path, staging_bytes=32 << 10)
    assert caught.value.layer == 1 and caught.value.tensor is not None
    assert "exact in fp16" in str(caught.value)


def test_one_scale_of_32_bits_beyond_both_formats(tmp_path: Path) -> None:
    checkpoint = small(tmp_path, "A", scale_dtype="F32")
    fp32_scales(tmp_path, checkpoint, "both")
    name = checkpoint.name(0, 3, "down", "scales")

    def edit(array: np.ndarray) -> None:
        array[2, 40] = np.float32(1 + 2**-20)

    edit_tensor(tmp_path, name, edit)
    refuse(
        tmp_path,
        loader.ConversionError,
        plan=False,
        tensor=name,
        layer=0,
        experts="3",
        expected="every one exact in bf16",
        found="1 at [2, 40]",
    )


def test_scales_of_32_bits_on_an_implementation_without_them(tmp_path: Path) -> None:
    small(tmp_path, "A", scale_dtype="F32")
    with native.serving(replace(native.REFERENCE, fp32_scales=False)):
        refuse(
            tmp_path,
            loader.UnsupportedError,
            layer=0,
            expected="F16 or BF16",
            found="implementation reference",
        )


def test_nonfinite_scales_of_32_bits(tmp_path: Path, way: str) -> None:
    checkpoint = small(tmp_path, "P", scale_dtype="F32")
    fp32_scales(tmp_path, checkpoint, "both")
    name = checkpoint.name(0, 1, "gate", "weight_scale")

    def edit(array: np.ndarray) -> None:
        array[5, 1] = np.nan

    edit_tensor(tmp_path, name, edit)
    refuse(tmp_path, loader.ConversionError, plan=False, tensor=name, found="nan at [1, 5]")
    kept = loader.load(tmp_path, policy=loader.Policy(nonfinite="warn"))
    assert len(kept.report.nonfinite) == 1


@pytest.mark.parametrize("only", ["fp16", "bf16"])
def test_scales_of_32_bits_as_in_a_checkpoint(tmp_path: Path, only: str) -> None:
    """The same banks as from the files, in the same format."""
    made = tiny_checkpoint(
        tmp_path, dialect="awq-gemm", scale_dtype="F32", attention=False, **SMALL
    )
    for projection in ("gate", "up", "down"):
        for expert in range(made.experts):

            def edit(array: np.ndarray, last: bool = expert == made.experts - 1) -> None:
                array.view(np.uint32)[...] &= 0xFFFF0000
                if last:
                    array[0, 3] = 7e4 if only == "bf16" else 1 + 2**-10
                if only == "bf16":
                    array.view(np.uint32)[...] &= 0xFFFF0000

            edit_tensor(tmp_path, made.name(0, expert, projection, "scales"), edit)
    wanted = loader.load(tmp_path, layers=[0])[0]
    found = loader.prepare_module(module_of(made), quantization=quantization_of(made))
    assert found.get_buffer("w13_scales").dtype == wanted.get_buffer("w13_scales").dtype
    assert found.get_buffer("w13_scales").dtype == getattr(
        torch, "bfloat16" if only == "bf16" else "float16"
    )
    assert same_bits(banks_of(found), banks_of(wanted))

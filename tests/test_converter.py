"""Conversion from files to banks, bit for bit, whatever wrote the files and however they are read.

All loads run in memory full of NaN, so that a byte nobody wrote shows.
"""

from __future__ import annotations

import gc
import tempfile
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bank_oracle import (
    FLOATS,
    INT4,
    assert_banks,
    expected,
    layouts,
    least_staging,
    load,
    poisoned,
    reads_by,
    small,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import loader
from loader import memory
from loader.bank import BankSpec, LayerSpec
from loader.converter import ConversionCache, LayerBanks, LayerConverter, cache_bytes, guarded
from loader.errors import CheckpointError, ConversionError, LoaderError
from loader.testing.checkpoint import TinyCheckpoint
from loader.testing.container import (
    RawTensor,
    edit_tensor,
    model_files,
    raw,
    read_header,
    rewrite,
)
from loader.testing.dialect import DIALECTS
from loader.testing.encode import from_bits, to_bits
from loader.testing.family import FAMILIES

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _every_way_in_memory_full_of_nan(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads_by(way, monkeypatch)
    poisoned(monkeypatch)


def assert_loaded(checkpoint: TinyCheckpoint, layout: str, **settings: Any) -> None:
    experts = load(checkpoint, layout, **settings)
    assert list(experts) == list(checkpoint.quantized_layers)
    for layer, module in experts.items():
        assert module.metadata_layout == layout
        assert_banks(module, expected(checkpoint, layer, layout))


# Every way of writing.


@pytest.mark.parametrize("way", ["ahead"], indirect=True)  # names alone differ: one way is enough
@pytest.mark.parametrize("fused", [False, True], ids=["single", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_and_family(dialect: str, family: str, fused: bool, tmp_path: Path) -> None:
    checkpoint = small(
        tmp_path, dialect=dialect, family=family, fused=fused, layers=2, shards=2, intermediate=160
    )
    assert_loaded(checkpoint, "compact")


@pytest.mark.parametrize("symmetric", [False, True], ids=["asym", "sym"])
@pytest.mark.parametrize("dtype", ["F16", "BF16"])
@pytest.mark.parametrize("fused", [False, True], ids=["single", "fused"])
@pytest.mark.parametrize("dialect", INT4)
def test_int4_in_every_layout(
    dialect: str, fused: bool, dtype: str, symmetric: bool, tmp_path: Path
) -> None:
    """Odd sizes too: neither K nor N of either bank is a multiple of 32."""
    checkpoint = small(
        tmp_path,
        dialect=dialect,
        fused=fused,
        scale_dtype=dtype,
        symmetric=symmetric,
        hidden=88,
        intermediate=56,
        group=16,
    )
    for layout in layouts(dialect):
        assert_loaded(checkpoint, layout)


@pytest.mark.parametrize("globals_", ["E", "E1", "E2"])
@pytest.mark.parametrize("fused", [False, True], ids=["single", "fused"])
@pytest.mark.parametrize("dialect", FLOATS)
def test_nvfp4_in_every_layout(dialect: str, fused: bool, globals_: str, tmp_path: Path) -> None:
    checkpoint = small(
        tmp_path,
        dialect=dialect,
        fused=fused,
        fused_globals=globals_,
        hidden=80,
        intermediate=112,
    )
    for layout in layouts(dialect):
        assert_loaded(checkpoint, layout)


@pytest.mark.parametrize("group", [16, 32, 64, 128, 256, -1])
@pytest.mark.parametrize("dialect", ["awq-gemm", "ct-int4-asym"])
def test_every_group(dialect: str, group: int, tmp_path: Path) -> None:
    """H = 192 and I = 352 leave the last group cut wherever the group is larger than 32."""
    checkpoint = small(tmp_path, dialect=dialect, group=group, hidden=192, intermediate=352)
    for layout in layouts(dialect):
        assert_loaded(checkpoint, layout)


@pytest.mark.parametrize("fused", [False, True], ids=["single", "fused"])
@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_plain_experts_are_kept_as_they_are(dtype: str, fused: bool, tmp_path: Path) -> None:
    checkpoint = small(tmp_path, layers=2, excluded=(0,), plain_dtype=dtype, fused=fused)
    module = load(checkpoint)[0]
    for expert in range(checkpoint.experts):
        for name, weight in module.dequantize(expert).items():
            assert np.array_equal(weight.numpy(), checkpoint.weight_f32(0, expert, name))
    assert str(module.w13_weight.dtype) == (
        "torch.bfloat16" if dtype == "BF16" else "torch.float16"
    )


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("dialect", FLOATS)
def test_globals_of_every_shape_and_dtype(
    dialect: str, dtype: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    checkpoint = small(tmp_path, dialect=dialect)
    part = checkpoint.writer.global_

    def edit(tensors: dict[str, RawTensor]) -> None:
        for name, tensor in tensors.items():
            if ".experts." in name and name.endswith("." + part):
                value = to_bits(tensor.array(), dtype).reshape(shape)
                tensors[name] = raw(value, dtype, tensor.file)

    rewrite(checkpoint.folder, edit)
    module = load(checkpoint)[0]
    for expert in range(checkpoint.experts):
        for name, found in (
            ("gate", module.w13_globals[expert, 0]),
            ("up", module.w13_globals[expert, 1]),
            ("down", module.w2_globals[expert, 0]),
        ):
            bits = to_bits(np.array([checkpoint.codes(0, expert, name).global_scale]), dtype)
            assert found.item() == from_bits(bits, dtype)[0]


def test_every_e4m3_byte_in_wide(tmp_path: Path) -> None:
    """All finite bytes, subnormals and both zeros, under globals that keep them in range."""
    checkpoint = small(tmp_path, dialect="modelopt-nvfp4", hidden=1024, intermediate=128)
    finite = np.array([b for b in range(256) if b & 0x7F != 0x7F], np.uint8)
    for projection in ("gate", "up", "down"):
        name = checkpoint.name(0, 2, projection, "weight_scale")
        edit_tensor(checkpoint.folder, name, lambda a: np.resize(finite, a.shape))
        scale = checkpoint.name(0, 2, projection, "weight_scale_2")
        edit_tensor(checkpoint.folder, scale, lambda a: np.full_like(a, 0.1237))
    module = load(checkpoint, "wide")[0]
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    for bank, names in (("w13", ("gate", "up")), ("w2", ("down",))):
        for number, name in enumerate(names):
            stored = checkpoint.stored_codes(0, 2, name).scale
            assert set(stored.flatten().tolist()) == set(finite.tolist())
            wanted = (table[torch.from_numpy(stored.astype(np.int64))] * np.float32(0.1237)).half()
            found = module.get_buffer(f"{bank}_metadata")[2, :, number :: len(names)]
            assert torch.equal(
                found[:, : wanted.shape[0]].t().view(torch.int16), wanted.view(torch.int16)
            )


# Every way of reading.

READ = [
    {"dialect": "awq-gemm", "fused": False},
    {"dialect": "awq-gemm", "fused": True},
    {"dialect": "ct-int4-asym", "fused": False},
    {"dialect": "ct-int4-asym", "fused": True},
    {"dialect": "ct-nvfp4", "fused": False},
    {"dialect": "modelopt-nvfp4", "fused": True, "fused_globals": "E2"},
]


@pytest.mark.parametrize("setting", READ, ids=lambda s: f"{s['dialect']}-{s['fused']}")
def test_any_staging_budget_gives_the_same_bits(setting: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = small(tmp_path, **setting, hidden=256, intermediate=224, experts=2, shards=2)
    least = least_staging(checkpoint)
    chunks = set()
    for staging in (least, least + 130, 2 * least + 6, 64 << 20):
        plan = loader.plan(checkpoint.folder, staging_bytes=staging)
        assert plan.staging_bytes <= staging
        chunks.add(len(plan.layers[0].chunks(staging // 2)))
        for layout in layouts(checkpoint.dialect):
            assert_loaded(checkpoint, layout, staging_bytes=staging)
    assert len(chunks) > 2, "the budgets were meant to cut in different places"


@given(
    st.sampled_from(READ),
    st.integers(0, 40_000),
    st.integers(0, 70),
    st.sampled_from(["name", "dtype", "random"]),
    st.integers(1, 3),
)
@settings(max_examples=25, deadline=None)
def test_chunks_may_end_anywhere(
    setting: dict[str, Any], more: int, header: int, order: str, shards: int
) -> None:
    """The header's length moves every tensor, so that none is aligned."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = small(
            folder,
            **setting,
            hidden=144,
            intermediate=96,
            experts=3,
            order=order,
            shards=shards,
            header_lengths=[60_000 + header + 3 * shard for shard in range(shards)],
        )
        staging = least_staging(checkpoint) + more
        assert_loaded(checkpoint, layouts(checkpoint.dialect)[header % 2], staging_bytes=staging)


@pytest.mark.parametrize("setting", READ, ids=lambda s: f"{s['dialect']}-{s['fused']}")
def test_misaligned_tensors(setting: dict[str, Any], tmp_path: Path) -> None:
    for length in range(50_000, 50_008):
        checkpoint = small(
            tmp_path / str(length), **setting, experts=2, header_lengths=[length], hidden=64
        )
        assert read_header(model_files(checkpoint.folder)[0])[1] == length + 8
        assert_loaded(checkpoint, "compact")
        assert_loaded(checkpoint, "wide", staging_bytes=least_staging(checkpoint))


def test_a_tensor_of_several_blocks(tmp_path: Path) -> None:
    """The reference takes 1 MiB of source at a time: here one expert's codes are 4.5 MiB."""
    for number, dialect in enumerate(("awq-gemm", "ct-int4-asym")):
        checkpoint = small(
            tmp_path / str(number), dialect=dialect, hidden=1536, intermediate=6144, experts=1
        )
        assert_loaded(checkpoint, "record")


# The cache and the converter as objects.


def spec_of(kind: str, layout: str) -> LayerSpec:
    dtype, sense = (torch.uint8, "divisor") if kind == "e2m1" else (torch.float16, "none")
    w13 = BankSpec(kind, layout, 5, 32, 64, 16, 0, 2, dtype, sense)
    return LayerSpec(w13, BankSpec(kind, layout, 5, 32, 32, 16, 0, 1, dtype, sense))


@pytest.mark.parametrize(
    "kind, layout, nbytes",
    [("int4", "wide", 0), ("int4", "compact", 0), ("e2m1", "compact", 0), ("e2m1", "wide", 60)],
)
def test_the_cache_is_what_the_plan_says_and_goes_once(kind: str, layout: str, nbytes: int) -> None:
    spec = spec_of(kind, layout)
    assert cache_bytes(spec) == nbytes
    cache = ConversionCache(spec, CPU)
    assert cache.globals.nbytes == nbytes and cache.released == 0
    held = weakref.ref(cache.globals)
    assert cache.release() == nbytes and cache.released == 1
    gc.collect()
    assert held() is None
    with pytest.raises(AssertionError):
        cache.release()
    assert cache.released == 1


def test_a_discarded_cache_was_not_released() -> None:
    cache = ConversionCache(spec_of("e2m1", "wide"), CPU)
    cache.discard()
    assert cache.released == 0
    with pytest.raises(AssertionError):
        cache.release()


def test_banks_are_storages_of_exactly_their_bytes() -> None:
    spec = spec_of("int4", "record")
    banks = LayerBanks.allocate(spec, CPU, None)
    assert memory.storage_bytes(banks.tensors) == spec.nbytes()
    w13, w2 = banks.split()
    assert [t.shape for t in w13] == [t.shape for t in spec.w13.tensors()]
    assert [t.shape for t in w2] == [t.shape for t in spec.w2.tensors()]


def test_a_descriptor_outside_its_chunk_is_a_conversion_error() -> None:
    spec = spec_of("int4", "compact")
    converter = LayerConverter(LayerBanks.allocate(spec, CPU, None), ConversionCache(spec, CPU))
    row = torch.tensor([[2, 0, 0, 0, 60, 2, 64, 0, 32, 0, -1, -1]])
    chunk = torch.zeros(128, dtype=torch.uint8)
    with pytest.raises(ConversionError) as caught:
        guarded(7, lambda: converter.write(chunk, row))
    assert caught.value.layer == 7
    assert "descriptor 0" in str(caught.value) and "outside the chunk" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


def test_guarded_adds_the_layer_and_keeps_the_class() -> None:
    def fail() -> torch.Tensor:
        raise CheckpointError("it is so", tensor="t")

    with pytest.raises(CheckpointError) as caught:
        guarded(4, fail)
    assert str(caught.value) == "it is so; layer 4, tensor t"
    assert isinstance(caught.value, LoaderError)

"""Slices: what TP and EP ranks hold is the whole layer, cut and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bank_oracle import FLOATS, assert_banks, expected, layouts, poisoned, reads_by, small

import loader
from loader.experts import PreparedExperts
from loader.testing.checkpoint import TinyCheckpoint

pytestmark = pytest.mark.parametrize("way", ["direct", "reference"], indirect=True)


@pytest.fixture(autouse=True)
def _every_way_in_memory_full_of_nan(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads_by(way, monkeypatch)
    poisoned(monkeypatch)


def load(checkpoint: TinyCheckpoint, layout: str = "compact", **shard: Any) -> PreparedExperts:
    policy = loader.Policy(layout=layout)
    return loader.load(checkpoint.folder, policy=policy, shard=loader.Shard(**shard))[0]


def join(parts: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Weights of one expert from those of all TP ranks."""
    return {
        name: torch.cat([part[name] for part in parts], dim=1 if name == "down" else 0)
        for name in ("gate", "up", "down")
    }


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


CUTS = [
    # group, I, TP: I_local and phases
    (128, 384, 2, (0, 64)),
    (128, 384, 4, (0, 96, 64, 32)),
    (128, 640, 4, (0, 32, 64, 96)),
    (128, 320, 2, (0, 32)),
    (32, 416, 2, (0, 16)),
    (64, 352, 2, (0, 48)),
    (16, 160, 2, (0, 0)),
    (-1, 384, 2, (0, 192)),
    (-1, 640, 4, (0, 160, 320, 480)),
]


@pytest.mark.parametrize("group, intermediate, tp, phases", CUTS)
@pytest.mark.parametrize("fused", [False, True], ids=["single", "fused"])
@pytest.mark.parametrize("dialect", ["awq-gemm", "ct-int4-asym"])
def test_int4_slices_join_to_the_whole(
    dialect: str,
    fused: bool,
    group: int,
    intermediate: int,
    tp: int,
    phases: tuple[int, ...],
    tmp_path: Path,
) -> None:
    checkpoint = small(
        tmp_path, dialect=dialect, fused=fused, intermediate=intermediate, group=group, experts=2
    )
    local = intermediate // tp
    for layout in layouts(dialect):
        whole = load(checkpoint, layout)
        ranks = [load(checkpoint, layout, tp_rank=rank, tp_size=tp) for rank in range(tp)]
        assert tuple(rank.spec.w2.phase for rank in ranks) == phases
        assert [rank.spec.w13.phase for rank in ranks] == [0] * tp
        for number, rank in enumerate(ranks):
            assert_banks(rank, expected(checkpoint, 0, layout, number * local, local))
        for expert in range(2):
            joined = join([rank.dequantize(expert) for rank in ranks])
            for name, weight in whole.dequantize(expert).items():
                assert same_bits(joined[name], weight), name
                stored = torch.from_numpy(checkpoint.weight_f32(0, expert, name)) + 0.0
                assert torch.equal(weight, stored)


@pytest.mark.parametrize("intermediate, tp", [(352, 2), (704, 4), (640, 8), (320, 4)])
@pytest.mark.parametrize("fused", [False, True], ids=["single", "fused"])
@pytest.mark.parametrize("dialect", FLOATS)
def test_nvfp4_slices_join_to_the_whole(
    dialect: str, fused: bool, intermediate: int, tp: int, tmp_path: Path
) -> None:
    checkpoint = small(
        tmp_path,
        dialect=dialect,
        fused=fused,
        fused_globals="E2",
        intermediate=intermediate,
        hidden=112,
        experts=2,
    )
    local = intermediate // tp
    for layout in layouts(dialect):
        whole = load(checkpoint, layout)
        ranks = [load(checkpoint, layout, tp_rank=rank, tp_size=tp) for rank in range(tp)]
        for number, rank in enumerate(ranks):
            assert rank.spec.w2.phase == 0
            assert_banks(rank, expected(checkpoint, 0, layout, number * local, local))
        for expert in range(2):
            joined = join([rank.dequantize(expert) for rank in ranks])
            for name, weight in whole.dequantize(expert).items():
                assert same_bits(joined[name], weight), name


def test_fused_bias_slices_join_to_the_whole(tmp_path: Path) -> None:
    checkpoint = small(tmp_path, intermediate=640, group=128, experts=2)
    for layout in layouts("awq-gemm"):
        policy = loader.Policy(layout=layout, awq_rounding="fused_bias")
        whole, *ranks = (
            loader.load(checkpoint.folder, policy=policy, shard=loader.Shard(rank, size))[0]
            for rank, size in ((0, 1), (0, 4), (1, 4), (2, 4), (3, 4))
        )
        for expert in range(2):
            joined = join([rank.dequantize(expert) for rank in ranks])
            for name, weight in whole.dequantize(expert).items():
                assert same_bits(joined[name], weight), name


@pytest.mark.parametrize("fused", [False, True], ids=["single", "fused"])
@pytest.mark.parametrize("dialect", ["awq-gemm", "ct-int4-asym", "ct-nvfp4", "modelopt-nvfp4"])
def test_expert_ranks_are_the_whole(dialect: str, fused: bool, tmp_path: Path) -> None:
    """Seven experts over three ranks: three, two, two."""
    checkpoint = small(
        tmp_path, dialect=dialect, fused=fused, experts=7, hidden=64, intermediate=64
    )
    for layout in layouts(dialect):
        whole = load(checkpoint, layout)
        ranks = [load(checkpoint, layout, ep_rank=rank, ep_size=3) for rank in range(3)]
        assert [rank.expert_ids for rank in ranks] == [(0, 1, 2), (3, 4), (5, 6)]
        for name, buffer in whole.named_buffers():
            parts = [rank.get_buffer(name) for rank in ranks]
            joined = torch.cat([part.view(torch.uint8).flatten() for part in parts])
            assert torch.equal(joined, buffer.view(torch.uint8).flatten()), name


@pytest.mark.parametrize("fused", [False, True], ids=["single", "fused"])
@pytest.mark.parametrize("dialect", ["awq-gemm", "ct-nvfp4"])
def test_experts_by_name_lie_in_the_order_given(dialect: str, fused: bool, tmp_path: Path) -> None:
    checkpoint = small(tmp_path, dialect=dialect, fused=fused, experts=6)
    ids = (5, 0, 3)
    for layout in layouts(dialect):
        module = load(checkpoint, layout, expert_ids=ids)
        assert module.expert_ids == ids
        assert_banks(module, expected(checkpoint, 0, layout, expert_ids=ids))
        for expert in ids:
            whole = load(checkpoint, layout).dequantize(expert)
            assert all(same_bits(w, whole[n]) for n, w in module.dequantize(expert).items())


@pytest.mark.parametrize("dialect", ["awq-gemm", "ct-int4-asym", "modelopt-nvfp4"])
def test_tensor_and_expert_parallel_together(dialect: str, tmp_path: Path) -> None:
    checkpoint = small(tmp_path, dialect=dialect, experts=5, intermediate=320, group=None)
    for tp_rank in range(2):
        for ep_rank, ids in ((0, (0, 1, 2)), (1, (3, 4))):
            module = load(checkpoint, tp_rank=tp_rank, tp_size=2, ep_rank=ep_rank, ep_size=2)
            assert_banks(module, expected(checkpoint, 0, "compact", 160 * tp_rank, 160, ids))


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
@pytest.mark.parametrize("fused", [False, True], ids=["single", "fused"])
def test_plain_slices_join_to_the_whole(dtype: str, fused: bool, tmp_path: Path) -> None:
    checkpoint = small(
        tmp_path, layers=2, excluded=(0,), plain_dtype=dtype, fused=fused, intermediate=320
    )
    ranks = [load(checkpoint, tp_rank=rank, tp_size=4) for rank in range(4)]
    for expert in range(checkpoint.experts):
        joined = join([rank.dequantize(expert) for rank in ranks])
        for name, weight in joined.items():
            assert np.array_equal(weight.numpy(), checkpoint.weight_f32(0, expert, name))

"""Cases, section 6: the ranks' outputs add up to the single card's, or the setting is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from case_checks import PRESENT, case, command, nan_memory, ok, refuse, small

import loader

FP32 = (torch.float32,)
HALF = (torch.float32, torch.float16)


# 6.1 Groups that do not divide


@pytest.mark.parametrize("dialect", ["A", "P", "ct-int4-asym"])
@pytest.mark.parametrize(
    "intermediate, group, ranks, phases",
    [
        (384, 128, 2, [0, 64]),
        (384, 128, 4, [0, 96, 64, 32]),
        (416, 32, 2, [0, 16]),
        (640, 128, 4, [0, 32, 64, 96]),
        (320, 64, 4, [0, 16, 32, 48]),
        (384, -1, 4, [0, 96, 192, 288]),
        (704, 128, 2, [0, 96]),
    ],
)
def test_cuts_inside_groups(
    tmp_path: Path, dialect: str, intermediate: int, group: int, ranks: int, phases: list[int]
) -> None:
    checkpoint = case(
        tmp_path, dialect, intermediate=intermediate, group=group, experts=2, layers=1, hidden=128
    )
    cards = ok(checkpoint, ranks=ranks, dtypes=HALF if dialect == "A" else ())
    assert [module.spec.w2.phase for module in cards[0]] == phases
    # Groups stay where the file has them: each rank holds those that it touches, and no others.
    size = intermediate if group == -1 else group
    count = intermediate // ranks
    touched = [-(-(r + 1) * count // size) - r * count // size for r in range(ranks)]
    assert [module.spec.w2.groups for module in cards[0]] == touched


@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("dialect", ["A", "P"])
def test_a_cut_that_is_no_multiple_of_sixteen(tmp_path: Path, dialect: str, rank: int) -> None:
    case(tmp_path, dialect, intermediate=416, group=32, experts=2, layers=1, hidden=128)
    error = refuse(
        tmp_path,
        loader.ShardError,
        settings={"shard": loader.Shard(rank, 4)},
        cli=("--tp", "4", "--rank", str(rank)),
        layer=0,
        expected="tp sizes that work: 1, 2, 13, 26",
        found="104 features (phase 8",
        says=("416", "group 32", "tp_size=4"),
    )
    assert "multiples of 16" in str(error.expected)


@pytest.mark.parametrize("ranks", [3, 5, 7, 64])
@pytest.mark.parametrize("dialect", ["A", "N"])
def test_a_size_that_the_ranks_do_not_divide(tmp_path: Path, dialect: str, ranks: int) -> None:
    small(tmp_path, dialect, intermediate=512)
    refuse(
        tmp_path,
        loader.ShardError,
        settings={"shard": loader.Shard(0, ranks)},
        cli=("--tp", str(ranks), "--rank", "0"),
        layer=0,
        expected="tp sizes that work: 1, 2, 4, 8, 16, 32",
        found=PRESENT,
        says=("512", f"tp_size={ranks}"),
    )


# 6.2 Width needs padding


@pytest.mark.parametrize("dialect", ["M", "N"])
@pytest.mark.parametrize(
    "intermediate, ranks", [(704, 2), (704, 4), (640, 4), (640, 8), (96, 2), (48, 1)]
)
def test_slices_that_need_padding(
    tmp_path: Path, dialect: str, intermediate: int, ranks: int
) -> None:
    checkpoint = case(tmp_path, dialect, intermediate=intermediate, experts=2, layers=1, hidden=128)
    cards = ok(checkpoint, ranks=ranks, dtypes=HALF if dialect == "M" else ())
    assert [module.intermediate_size for module in cards[0]] == [intermediate // ranks] * ranks


@pytest.mark.parametrize("dialect", ["M", "A"])
def test_a_wide_hidden_size_that_needs_padding(tmp_path: Path, dialect: str) -> None:
    checkpoint = case(
        tmp_path, dialect, hidden=2688, intermediate=96, experts=2, layers=1, vocabulary=8
    )
    ok(checkpoint, ranks=2, dtypes=FP32)


@pytest.mark.parametrize("dialect", ["P", "N", "A", "M", "ct-int4-asym"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_fused_experts_in_slices(tmp_path: Path, dialect: str, ranks: int) -> None:
    ok(small(tmp_path, dialect, fused=True), ranks=ranks, dtypes=FP32 if dialect == "P" else ())


@pytest.mark.parametrize("dialect", ["A", "M"])
def test_plain_experts_in_slices(tmp_path: Path, dialect: str) -> None:
    ok(small(tmp_path, dialect, excluded=(0,)), ranks=3, dtypes=HALF)


# 6.3 Wrong rank


@pytest.mark.parametrize("rank", [2, -1, 17])
@pytest.mark.parametrize("kind", ["ep", "tp"])
def test_a_rank_outside_its_size(tmp_path: Path, kind: str, rank: int) -> None:
    small(tmp_path, "P")
    with pytest.raises(loader.ShardError) as caught:
        loader.Shard(**{f"{kind}_rank": rank, f"{kind}_size": 2})
    assert (caught.value.expected, caught.value.found) == ("0 to 1", rank)
    option = "--ep-rank" if kind == "ep" else "--rank"
    for name in ("plan", "load"):
        code, out, err = command(name, str(tmp_path), f"--{kind}", "2", f"{option}={rank}")
        assert code in (1, 2) and not out
        assert err.endswith(f": {caught.value}\n") and "Traceback" not in err


@pytest.mark.parametrize("ids", [[], [3, 3]])
def test_an_empty_or_repeated_choice_of_experts(ids: list[int]) -> None:
    with pytest.raises(loader.ShardError, match="expert_ids"):
        loader.Shard(expert_ids=ids)


@pytest.mark.parametrize("ids", [[8], [0, 1, 2, 99], [-1], list(range(4, 12))])
def test_experts_beyond_the_model(tmp_path: Path, ids: list[int]) -> None:
    small(tmp_path, "P", experts=8)
    refuse(
        tmp_path,
        loader.ShardError,
        settings={"shard": loader.Shard(expert_ids=ids)},
        cli=None,
        expected="0 to 7",
        found=str([expert for expert in ids if not 0 <= expert < 8]),
    )


@pytest.mark.parametrize("size", [9, 64])
def test_more_ranks_than_experts(tmp_path: Path, size: int) -> None:
    small(tmp_path, "P", experts=8)
    refuse(
        tmp_path,
        loader.ShardError,
        settings={"shard": loader.Shard(ep_rank=3, ep_size=size)},
        cli=("--ep", str(size), "--ep-rank", "3"),
        expected="at most 8",
        found=f"ep_size={size}",
    )


@pytest.mark.parametrize("dialect", ["P", "M"])
def test_two_ranks_own_each_expert_once(tmp_path: Path, dialect: str) -> None:
    cards = ok(small(tmp_path, dialect, experts=8), ep_ranks=2, dtypes=HALF)
    for modules in cards.values():
        assert [module.expert_ids for module in modules] == [(0, 1, 2, 3), (4, 5, 6, 7)]


@pytest.mark.parametrize("size, counts", [(3, [3, 3, 2]), (5, [2, 2, 2, 1, 1]), (8, [1] * 8)])
def test_blocks_of_uneven_size(tmp_path: Path, size: int, counts: list[int]) -> None:
    cards = ok(small(tmp_path, "A", experts=8), ep_ranks=size, dtypes=())
    assert [len(module.expert_ids) for module in cards[0]] == counts


@pytest.mark.parametrize("dialect", ["A", "N"])
def test_tensor_and_expert_parallel_together(tmp_path: Path, dialect: str) -> None:
    ok(small(tmp_path, dialect), ranks=2, ep_ranks=2, dtypes=FP32)


@pytest.mark.parametrize("ids", [(5, 0, 3), (7,), (7, 6, 5, 4, 3, 2, 1, 0)])
def test_experts_by_name_in_the_order_of_their_slots(tmp_path: Path, ids: tuple[int, ...]) -> None:
    checkpoint = small(tmp_path, "M", experts=8)
    with nan_memory():
        experts = loader.load(tmp_path, shard=loader.Shard(expert_ids=ids))
    assert experts[1].expert_ids == ids
    whole = loader.load(tmp_path)
    for expert in ids:
        one, other = experts[1].dequantize(expert), whole[1].dequantize(expert)
        assert all(torch.equal(one[name], other[name]) for name in ("gate", "up", "down"))
    absent = next((e for e in range(8) if e not in ids), 8)
    with pytest.raises(loader.LoaderError) as caught:
        experts[1].dequantize(absent)
    assert str(absent) in str(caught.value) and caught.value.layer == 1
    assert checkpoint.experts == 8

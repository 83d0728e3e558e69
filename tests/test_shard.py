"""Shard: which experts and which slice a card holds, and every refusal with what would work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import loader
from loader.errors import ShardError
from loader.shard import Shard, tensor_parallel_sizes
from loader.testing.checkpoint import tiny_checkpoint


@pytest.mark.parametrize("sizes", [{"tp_size": 0}, {"ep_size": 0}, {"tp_size": -2}])
def test_sizes_below_one_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ShardError, match="at least 1") as caught:
        Shard(**sizes)  # type: ignore[arg-type]  # keywords made here fit no one type
    assert next(iter(sizes)) in str(caught.value)


@pytest.mark.parametrize("kind", ("tp", "ep"))
@pytest.mark.parametrize(("rank", "size"), [(1, 1), (-1, 1), (4, 4), (7, 4), (-1, 4)])
def test_ranks_outside_their_size_are_refused(kind: str, rank: int, size: int) -> None:
    with pytest.raises(ShardError) as caught:
        Shard(**{f"{kind}_rank": rank, f"{kind}_size": size})  # type: ignore[arg-type]  # keywords made here fit no one type
    assert caught.value.what == f"{kind}_rank is outside {kind}_size"
    assert (caught.value.expected, caught.value.found) == (f"0 to {size - 1}", rank)


@pytest.mark.parametrize("value", (1.0, 0.5, "1", None, [1], torch.tensor(0.5)))
@pytest.mark.parametrize("name", ("tp_rank", "tp_size", "ep_rank", "ep_size"))
def test_what_is_no_whole_number_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ShardError, match="a whole number") as caught:
        Shard(**{name: value})
    assert name in str(caught.value)


def test_expert_ids_are_never_cut_to_whole_numbers() -> None:
    with pytest.raises(ShardError, match=r"expert_ids.*found 1\.5"):
        Shard(expert_ids=[0, 1.5])  # type: ignore[list-item]  # wrong on purpose
    with pytest.raises(ShardError, match="a whole number"):
        Shard(expert_ids="12")  # type: ignore[arg-type]  # wrong on purpose


def test_numbers_of_other_libraries_become_plain_ones() -> None:
    shard = Shard(
        tp_rank=np.int64(1),  # type: ignore[arg-type]  # numpy's and torch's numbers are taken, too
        tp_size=torch.tensor(2),  # type: ignore[arg-type]  # numpy's and torch's numbers are taken, too
        expert_ids=np.asarray([3, 1]),  # type: ignore[arg-type]  # numpy's and torch's numbers are taken, too
    )
    assert shard == Shard(1, 2, expert_ids=(3, 1))
    numbers = [shard.tp_rank, shard.tp_size, *(shard.expert_ids or ())]
    assert all(type(number) is int for number in numbers)


@pytest.mark.parametrize("ids", ([], [1, 1], [0, 3, 0]))
def test_expert_ids_must_be_a_choice(ids: list[int]) -> None:
    with pytest.raises(ShardError, match="one or more distinct ids") as caught:
        Shard(expert_ids=ids)
    assert caught.value.found == ids


def test_expert_ids_and_ep_exclude_each_other() -> None:
    with pytest.raises(ShardError, match="ep_size=2"):
        Shard(ep_size=2, expert_ids=[0])


def test_expert_ids_keep_their_order_and_must_exist() -> None:
    assert Shard(expert_ids=[5, 0, 3]).experts_of(6) == (5, 0, 3)
    for bad in ([6], [0, 6, 7], [-1]):
        with pytest.raises(ShardError) as caught:
            Shard(expert_ids=bad).experts_of(6)
        assert caught.value.expected == "0 to 5"
        assert caught.value.found == [number for number in bad if not 0 <= number < 6]


@settings(deadline=None, max_examples=200)
@given(experts=st.integers(1, 600), ep_size=st.integers(1, 70))
def test_expert_parallel_blocks_are_contiguous_and_the_first_hold_one_more(
    experts: int, ep_size: int
) -> None:
    if ep_size > experts:
        for rank in (0, ep_size - 1):
            with pytest.raises(ShardError, match=f"ep_size of at most {experts},"):
                Shard(ep_rank=rank, ep_size=ep_size).experts_of(experts)
        return
    blocks = [Shard(ep_rank=rank, ep_size=ep_size).experts_of(experts) for rank in range(ep_size)]
    assert [expert for block in blocks for expert in block] == list(range(experts))
    more = experts % ep_size
    wanted = [experts // ep_size + 1] * more + [experts // ep_size] * (ep_size - more)
    assert [len(block) for block in blocks] == wanted


def test_the_blocks_of_ten_experts_on_four_ranks() -> None:
    blocks = [Shard(ep_rank=rank, ep_size=4).experts_of(10) for rank in range(4)]
    assert blocks == [(0, 1, 2), (3, 4, 5), (6, 7), (8, 9)]


@settings(deadline=None, max_examples=300)
@given(
    intermediate=st.integers(1, 256).map(lambda n: 8 * n),
    tp_size=st.integers(1, 64),
    group=st.sampled_from((16, 32, 64, 128)),
)
def test_slices_cut_the_whole_at_multiples_of_16_or_every_rank_is_refused_alike(
    intermediate: int, tp_size: int, group: int
) -> None:
    local, rest = divmod(intermediate, tp_size)
    works = tp_size == 1 or (rest == 0 and local % 16 == 0)
    sizes = tensor_parallel_sizes(intermediate)
    assert (tp_size in sizes) == works
    if works:
        slices = [Shard(r, tp_size).slice_of(intermediate, group) for r in range(tp_size)]
        assert slices == [(rank * local, local) for rank in range(tp_size)]
        assert all(offset % group % 16 == 0 for offset, _ in slices)
        return
    messages = set()
    for rank in {0, tp_size // 2, tp_size - 1}:
        with pytest.raises(ShardError) as caught:
            Shard(rank, tp_size).slice_of(intermediate, group, layer=3)
        messages.add(str(caught.value))
        assert caught.value.layer == 3
    (message,) = messages
    assert f"tp sizes that work: {', '.join(map(str, sizes))}" in message
    assert f"tp_size={tp_size}" in message and f"intermediate size {intermediate}" in message
    for size in sizes:
        Shard(size - 1, size).slice_of(intermediate, group)


def test_the_refusals_say_what_the_cut_would_be() -> None:
    with pytest.raises(ShardError, match=r"cuts every 21\.3333 features"):
        Shard(0, 3).slice_of(64, 32)
    with pytest.raises(ShardError, match=r"cuts every 8 features \(phase 8 in the first cut group"):
        Shard(0, 8).slice_of(64, 32)
    with pytest.raises(ShardError, match=r"cuts every 40 features \(phase 8 in the first cut"):
        Shard(0, 4).slice_of(160, 32)


def test_a_plan_refuses_a_slice_on_every_rank_and_names_the_layer(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, intermediate=96, group=32, layers=1, payload="sparse")
    for rank in range(4):
        with pytest.raises(ShardError) as caught:
            loader.plan(tmp_path, Shard(rank, 4))
        assert caught.value.layer == 0
        assert "tp sizes that work: 1, 2, 3, 6" in str(caught.value)
    assert [loader.plan(tmp_path, Shard(r, 3)).layers[0].spec.w2.phase for r in range(3)] == [0] * 3
    assert [loader.plan(tmp_path, Shard(r, 6)).layers[0].spec.w2.phase for r in range(6)] == [
        0,
        16,
        0,
        16,
        0,
        16,
    ]


def test_a_shard_as_it_is_reported() -> None:
    assert Shard(1, 2, 3, 4).to_dict() == {
        "tp_rank": 1,
        "tp_size": 2,
        "ep_rank": 3,
        "ep_size": 4,
        "expert_ids": None,
    }
    assert Shard(expert_ids=(2, 0)).to_dict()["expert_ids"] == [2, 0]


@pytest.mark.parametrize("ids", [5, None.__class__, 1.5])
def test_what_is_no_choice_of_experts_is_refused(ids: Any) -> None:
    with pytest.raises(ShardError, match="expert_ids is not valid; expected ids"):
        Shard(expert_ids=ids)


@pytest.mark.parametrize("size", (1, 2, 3, 7))
def test_the_count_is_that_of_the_ids(size: int) -> None:
    for experts in (7, 8, 21):
        for rank in range(size):
            shard = Shard(ep_rank=rank, ep_size=size)
            assert shard.count_of(experts) == len(shard.experts_of(experts))
    assert Shard(expert_ids=[3, 1]).count_of(1 << 70) == 2

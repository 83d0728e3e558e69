"""What a meeting of ranks refuses before it begins."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from loader.meeting import Meeting, RankError


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_without_a_process_group_there_is_no_meeting() -> None:
    with pytest.raises(RankError, match="no process group"):
        Meeting()


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan")])
def test_a_timeout_must_leave_time(alone: None, timeout: float) -> None:
    with pytest.raises(RankError, match="timeout is not valid"):
        Meeting(timeout=timeout)


def test_a_rank_outside_the_group_does_not_take_part(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = dist.group.WORLD
    ranks = {id(group): -1, id(None): 0}
    monkeypatch.setattr(dist, "get_rank", lambda group=None: ranks[id(group)])
    with pytest.raises(RankError, match="not in the group"):
        Meeting(group)


def test_one_rank_meets_itself(alone: None) -> None:
    meeting = Meeting()
    assert (meeting.rank, meeting.size) == (0, 1)
    meeting.leave()


def test_a_load_that_another_rank_gave_up_does_not_count(alone: None) -> None:
    """This rank had finished: the first decision that was written stands for all."""
    meeting = Meeting()
    meeting._decide({"rank": 3, "error": "a read came up short"})
    with pytest.raises(RankError, match="^rank 3 failed: a read came up short$"):
        meeting.commit()
    Meeting().commit()  # the next load has a decision of its own

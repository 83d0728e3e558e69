"""Several ranks, as real processes: agreement, failures that reach all, and no hang."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ranks_fakes import SHORT, make, world
from worlds import DEADLINE, HERE, finish, start

from loader.testing.checkpoint import TinyCheckpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def checkpoints(folder: Path) -> dict[str, TinyCheckpoint]:
    return make(folder)


@pytest.fixture(scope="module")
def agreed(folder: Path, checkpoints: dict[str, TinyCheckpoint]) -> list[dict[str, Any]]:
    return world("agreements", folder)


DIFFER = {
    "environment": (
        "policy.qpn_m1",
        "on (environment QPN_M1=1) on ranks 0, 2-3; off (environment QPN_M1=0) on rank 1",
    ),
    "environment again": ("policy.qpn_m1", "off (environment QPN_M1=0) on rank 1"),
    "flag": ("policy.awq_rounding", "exact on ranks 0-2; fused_bias on rank 3"),
    "sizes": ("tp_size (and on ep_size)", "2 on rank 0; 4 on ranks 1-3"),
    "layers": ("layers", "None on ranks 0-1, 3; [0] on rank 2"),
    "checkpoint": ("the checkpoint (headers, by digest)", "on ranks 0-2; "),
}


@pytest.mark.parametrize("name", DIFFER)
def test_ranks_that_disagree_all_refuse_and_name_what_differs(
    name: str, agreed: list[dict[str, Any]]
) -> None:
    what, found = DIFFER[name]
    for result in agreed:
        assert result[name]["error"] == "DisagreementError"
        assert f"the ranks do not agree on {what}" in result[name]["text"]
        assert found in result[name]["text"]
    assert len({result[name]["text"] for result in agreed}) == 1


FAIL = {
    "bad variable": (2, "PolicyError", "environment variable QPN_M1 is not valid"),
    "short file": (1, "CheckpointError", "file is cut short"),
    "mid-load": (2, "LifecycleError", "ValueError: burst pipe"),
}


@pytest.mark.parametrize("name", FAIL)
def test_a_rank_that_fails_takes_all_down_with_its_error(
    name: str, agreed: list[dict[str, Any]]
) -> None:
    culprit, error, text = FAIL[name]
    own = agreed[culprit][name]
    assert own["error"] == error and text in own["text"]
    for rank, result in enumerate(agreed):
        if rank != culprit:
            assert result[name]["error"] == "RankError"
            assert result[name]["text"] == f"rank {culprit} failed: {own['text']}"


def test_a_load_that_fails_on_another_rank_leaves_nothing(agreed: list[dict[str, Any]]) -> None:
    assert all(result["kept"] < 4 << 20 for result in agreed)


def test_the_others_stop_where_they_are(agreed: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(agreed):
        assert result["states"].count("ready") < 2, rank
        assert (result["states"][-1:] == ["failed"]) is (rank != 2)


def test_sizes_that_make_another_number_of_ranks_are_refused(agreed: list[dict[str, Any]]) -> None:
    for result in agreed:
        assert "expected 4 ranks, found 2 x 1" in result["wrong sizes"]["text"]
    errors = sorted(result["wrong sizes"]["error"] for result in agreed)
    assert errors == ["RankError"] * 3 + ["ShardError"]


def test_shards_that_do_not_make_a_model_are_refused(agreed: list[dict[str, Any]]) -> None:
    for result in agreed:
        assert result["same shard"]["error"] == "CoverError"
        assert (
            "slice 1 of expert 0 on 0 ranks, slice 0 of expert 0 on 4"
            in (result["same shard"]["text"])
        )


def test_a_rank_with_nothing_to_load_is_waited_for_by_none(agreed: list[dict[str, Any]]) -> None:
    assert [result["idle"]["layers"] for result in agreed] == [[0, 1], [], [0, 1], [0, 1]]
    cards = agreed[3]["idle"]["cards"]
    assert [card["memory"]["resident"] > 0 for card in cards] == [True, False, True, True]


def test_all_ranks_get_the_reports_of_all(agreed: list[dict[str, Any]]) -> None:
    for result in agreed:
        cards = result["good"]["cards"]
        assert [card["shard"]["tp_rank"] for card in cards] == [0, 1, 2, 3]
        for card in cards:
            m = card["memory"]
            assert m["resident"] == m["predicted_resident"] > 0
            assert m["peak"] - m["baseline"] <= m["predicted_peak"]
            assert m["host_uss_peak"] > 1 << 20
        assert cards == agreed[0]["good"]["cards"]
    text = agreed[0]["good"]["text"]
    for word in ("predicted", "measured", "host USS", "tp 0/4", "tp 3/4"):
        assert word in text


def test_a_group_loads_by_itself(agreed: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(agreed):
        shards = [card["shard"] for card in result["group"]["cards"]]
        assert [(shard["tp_rank"], shard["tp_size"]) for shard in shards] == [(0, 2), (1, 2)]
        assert result["group"]["layers"] == [0, 1], rank


@pytest.mark.parametrize(("name", "last"), [("measured", 2), ("measured on 1", 4)])
def test_crossovers_are_those_of_the_first_rank_that_loads(
    name: str, last: int, agreed: list[dict[str, Any]]
) -> None:
    cards = [card for card in agreed[0][name]["cards"] if card["layers"]]
    assert len(cards) == (4 if name == "measured" else 3)
    for card in cards:
        for layer in card["layers"]:
            assert [route["tokens"] for route in layer["routes"]] == [
                [1, 1],
                [2, last],
                [last + 1, None],
            ]


def test_a_rank_that_comes_too_late_is_given_up_by_all(agreed: list[dict[str, Any]]) -> None:
    """And learns of it when it comes."""
    assert {result["late"]["error"] for result in agreed} == {"RankError"}
    assert {result["late"]["text"] for result in agreed} == {
        "rank 3 failed: it did not arrive within 3 s"
    }


def test_a_slow_rank_is_waited_for_as_long_as_it_gets_on(agreed: list[dict[str, Any]]) -> None:
    assert all(result["slow"]["layers"] == [0, 1] for result in agreed)
    assert all(result["slow"]["seconds"] > 1.3 * SHORT for result in agreed)  # its timeout


def test_a_group_that_takes_tensors_of_cards_alone_will_do(
    folder: Path, checkpoints: dict[str, TinyCheckpoint]
) -> None:
    """As with NCCL: the ranks speak through the store of the group, and tensors go nowhere."""
    for rank, found in enumerate(world("cards_only", folder, size=2)):
        assert "device type cpu" in found["refused"]
        for name in ("load", "group"):
            assert found[name]["layers"] == [0, 1], found[name]
            assert [card["shard"]["tp_rank"] for card in found[name]["cards"]] == [0, 1]
        assert found["failed"]["error"] == ("RankError" if rank == 0 else "CheckpointError")


@pytest.mark.parametrize("dies", [1, 0], ids=["another", "the one that keeps the store"])
def test_a_killed_rank_ends_all_within_seconds(
    dies: int, folder: Path, checkpoints: dict[str, TinyCheckpoint], tmp_path: Path
) -> None:
    processes = _dying("killed", folder, tmp_path, dies, 3)
    pid = processes[dies].pid
    ended = finish(processes)
    assert [code for code, _, _ in ended] == [-9 if r == dies else 0 for r in range(3)], ended
    for rank in {0, 1, 2} - {dies}:
        found = json.loads((tmp_path / f"out.{rank}.json").read_text())
        assert found["error"] == "RankError"
        gone = "the process that keeps it has ended"
        said = f"rank {dies} failed: its process {pid} ended without a word"
        assert found["text"] == said if dies else (said in found["text"] or gone in found["text"])
        assert found["seconds"] < 60  # the timeout is 120 s: the end of the process was seen


def test_a_rank_that_is_stuck_ends_the_others_within_the_timeout(
    folder: Path, checkpoints: dict[str, TinyCheckpoint], tmp_path: Path
) -> None:
    processes = _dying("stuck", folder, tmp_path, 1, 2)
    try:
        processes[0].communicate(timeout=DEADLINE)
    finally:
        processes[1].send_signal(signal.SIGKILL)
    finish(processes)
    found = json.loads((tmp_path / "out.0.json").read_text())
    assert found["error"] == "RankError"
    assert found["text"] == "rank 1 failed: it made no progress within 3 s"


def _dying(
    scenario: str, folder: Path, out: Path, dies: int, size: int
) -> list[subprocess.Popen[str]]:
    (out / "dies").write_text(str(dies))
    (out / "awq").symlink_to(folder / "awq")
    return start([[str(HERE / "ranks_worker.py"), scenario, str(out)]] * size)

"""Several ranks, as real processes: sums, agreement, failures that reach all, and no hang."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from load_fakes import SMALL, RecordingSource
from moe_oracle import TOLERANCE, activations, error_of, moe64, routing, weights_of
from worlds import DEADLINE, finish, start

import loader
from loader import ranks
from loader.errors import LoaderError
from loader.testing.checkpoint import TinyCheckpoint, tiny_checkpoint
from loader.testing.container import read_header

HERE = Path(__file__).parent
SHORT = 3.0
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "awq": {"layers": 2},
    "nvfp4": {"layers": 1, "dialect": "ct-nvfp4", "group": 16},
    "plain": {"layers": 2, "excluded": (0,)},
    "longer": {"layers": 3},
    "large": {"layers": 2, "hidden": 512, "intermediate": 512, "experts": 8, "group": 128},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def checkpoints(folder: Path) -> dict[str, TinyCheckpoint]:
    made = {
        name: tiny_checkpoint(folder / name, **{**SMALL, **more})
        for name, more in CHECKPOINTS.items()
    }
    short = folder / "short"
    shutil.copytree(folder / "awq", short)
    file = max(short.glob("*.safetensors"))
    with open(file, "r+b") as opened:
        opened.truncate(file.stat().st_size - 16)
    return made


def world(scenario: str, folder: Path, size: int = 4) -> list[Any]:
    """Run one scenario of ``ranks_worker.py``; what each rank found."""
    worker = [str(HERE / "ranks_worker.py"), scenario, str(folder)]
    ended = finish(start([worker] * size))
    assert [code for code, _, _ in ended] == [0] * size, ended
    return [json.loads((folder / f"out.{rank}.json").read_text()) for rank in range(size)]


# --- sums ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def summed(folder: Path, checkpoints: dict[str, TinyCheckpoint]) -> list[dict[str, Any]]:
    return world("sums", folder)


def test_the_sum_over_ranks_is_the_layer(
    summed: list[dict[str, Any]], checkpoints: dict[str, TinyCheckpoint]
) -> None:
    """DESIGN section 5: the same bound on the fp32 sum, under TP, EP and both."""
    sums = summed[0]["sums"]
    assert all(found["sums"] == sums for found in summed)
    assert len(sums) == 3 * 3 * 3 * 3
    for key, values in sums.items():
        name, _, _, tokens, dtype_name = key.split()
        dtype = getattr(torch, dtype_name)
        weights = {e: weights_of(checkpoints[name], e) for e in range(4)}
        x = activations(int(tokens), 64, dtype)
        wanted = moe64(weights, x.float(), *routing(int(tokens), 4, 2))
        error = error_of(torch.tensor(values), wanted)
        assert error <= TOLERANCE[dtype], f"{key}: {error:.2e}"


# --- agreement and failure ----------------------------------------------------------------------


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


# --- the command line ---------------------------------------------------------------------------


def _torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    return subprocess.run(
        [*run, *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        cwd=HERE.parent,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "120",
            "PYTHONPATH": f"{HERE.parent}:{HERE}",
        },
    )


def test_torchrun_loads_all_ranks_and_rank_0_shows_them(
    folder: Path, checkpoints: dict[str, TinyCheckpoint], tmp_path: Path
) -> None:
    written = tmp_path / "cards.json"
    options = ["load", str(folder / "awq"), "--tp", "2", "--ep", "2", "--backend", "gloo"]
    ran = _torchrun("4", "-m", "loader", *options, "--json", str(written))
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.count("Memory of all cards") == 1
    for card in ("tp 0/2 ep 0/2", "tp 1/2 ep 0/2", "tp 0/2 ep 1/2", "tp 1/2 ep 1/2"):
        assert card in ran.stdout
    cards = json.loads(written.read_text())["cards"]
    assert [card["memory"]["resident"] > 0 for card in cards] == [True] * 4
    assert not torch.distributed.is_initialized()


def test_a_killed_rank_under_torchrun_ends_the_run(
    folder: Path, checkpoints: dict[str, TinyCheckpoint], tmp_path: Path
) -> None:
    (tmp_path / "dies").write_text("1")
    (tmp_path / "awq").symlink_to(folder / "awq")
    ran = _torchrun("2", str(HERE / "ranks_worker.py"), "killed", str(tmp_path))
    assert ran.returncode != 0 and "SIGKILL" in ran.stderr


def test_a_flag_that_differs_is_one_line_on_every_rank(
    folder: Path, checkpoints: dict[str, TinyCheckpoint]
) -> None:
    command = ["-m", "loader", "load", str(folder / "awq"), "--tp", "2", "--backend", "gloo"]
    ended = finish(start([command, [*command, "--layout", "wide"]]))
    for rank, (code, out, err) in enumerate(ended):
        assert (code, out) == (1, "")
        (line,) = err.splitlines()
        assert line == (
            f"qpn: rank {rank}: the ranks do not agree on policy.layout; expected the same on "
            "every rank, found None on rank 0; wide on rank 1"
        )


def test_without_a_launcher_the_error_names_torchrun(folder: Path) -> None:
    with pytest.raises(ranks.RankError, match="there is no process group.*torchrun"):
        ranks.load(folder / "awq")
    (ended,) = finish(
        [
            subprocess.Popen(
                [sys.executable, "-m", "loader", "load", str(folder), "--backend", "gloo"],
                env={**os.environ, "PYTHONPATH": str(HERE.parent)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        ]
    )
    assert ended[0] == 1 and "processes that torchrun starts" in ended[2]


# --- what the ranks of one host read ------------------------------------------------------------


def _read(checkpoint: TinyCheckpoint, shard: loader.Shard) -> dict[str, set[int]]:
    """Offsets of the payload bytes that one rank reads, by file, each of which it reads once."""
    source = RecordingSource(checkpoint.folder)
    loader.load(source, shard=shard)
    found: dict[str, list[int]] = {}
    for _, file, offset, length in source.log:
        found.setdefault(file, []).extend(range(offset, offset + length))
    assert all(len(set(offsets)) == len(offsets) for offsets in found.values())
    return {file: set(offsets) for file, offsets in found.items()}


def _expert_bytes(checkpoint: TinyCheckpoint) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for path in checkpoint.folder.glob("*.safetensors"):
        header, start = read_header(path)
        for name, entry in header.items():
            if ".experts." in name:
                begin, end = entry["data_offsets"]
                found.setdefault(path.name, set()).update(range(start + begin, start + end))
    return found


@pytest.mark.parametrize("name", ["awq", "nvfp4"])
@pytest.mark.parametrize("sizes", [(4, 1), (1, 4), (2, 2)], ids=["tp", "ep", "both"])
def test_the_ranks_together_need_every_byte_and_each_reads_a_byte_once(
    sizes: tuple[int, int], name: str, checkpoints: dict[str, TinyCheckpoint]
) -> None:
    """So the host reads each byte from disk once: what two ranks need lies in the page cache."""
    checkpoint = checkpoints[name]
    each = [_read(checkpoint, ranks.shard_of(rank, 4, *sizes)) for rank in range(4)]
    experts = _expert_bytes(checkpoint)
    for file, wanted in experts.items():
        union = set().union(*(read.get(file, set()) for read in each))
        assert wanted - union <= _unused(checkpoint, file)
        gaps = union - wanted
        assert len(gaps) < 4096 * 8  # small gaps are read along, nothing else
    total = sum(len(offsets) for read in each for offsets in read.values())
    needed = sum(map(len, experts.values()))
    if sizes == (1, 4):  # experts are nobody else's
        assert total <= needed + 4096 * 8
    assert total <= 4 * (needed + 4096 * 8)


@pytest.mark.parametrize("axis", ["tp", "ep"])
def test_the_host_reads_each_byte_from_disk_once(
    axis: str, summed: list[dict[str, Any]], checkpoints: dict[str, TinyCheckpoint]
) -> None:
    """By the kernel's own count, from files that were out of the page cache."""
    size = sum(f.stat().st_size for f in checkpoints["large"].folder.glob("*.safetensors"))
    disk = sum(found["disk"][axis]["disk"] for found in summed)
    asked = sum(found["disk"][axis]["asked"] for found in summed)
    if disk < size // 2:
        pytest.skip(f"the kernel counts {disk} bytes from disk: files in memory, or kept there")
    assert disk <= size + (1 << 20)
    assert asked > 2 * size if axis == "tp" else asked <= size


def _unused(checkpoint: TinyCheckpoint, file: str) -> set[int]:
    """Parts of experts that no format loads (activation scales)."""
    header, start = read_header(checkpoint.folder / file)
    found: set[int] = set()
    for name, entry in header.items():
        if name.endswith(("input_scale", "input_global_scale", "weight_shape")):
            begin, end = entry["data_offsets"]
            found.update(range(start + begin, start + end))
    return found


# --- what the processes do not show -------------------------------------------------------------


def test_the_layout_of_ranks() -> None:
    shards = [ranks.shard_of(rank, 6, 3, 2) for rank in range(6)]
    assert [(s.tp_rank, s.ep_rank) for s in shards] == [
        (0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1),
    ]  # fmt: skip
    with pytest.raises(LoaderError, match="expected 6 ranks, found 4 x 2"):
        ranks.shard_of(0, 6, 4, 2)


def _facts(**more: Any) -> dict[str, Any]:
    return {"experts": 4, "shard": loader.Shard(**more).to_dict()}


@pytest.mark.parametrize(
    "shards",
    [
        [{}],
        [{"tp_rank": r, "tp_size": 2} for r in (0, 1, 0, 1)],
        [{"ep_rank": r, "ep_size": 3} for r in range(3)],
        [{"expert_ids": [3, 0]}, {"expert_ids": [1, 2]}],
    ],
    ids=["one", "replicas", "ep", "named"],
)
def test_shards_that_make_a_model(shards: list[dict[str, Any]]) -> None:
    ranks.check_cover([_facts(**shard) for shard in shards])
    ranks.check_cover([{}, *(_facts(**shard) for shard in shards)])
    assert ranks.check_cover([]) is None


@pytest.mark.parametrize(
    ("shards", "says"),
    [
        ([{"tp_rank": 0, "tp_size": 2}], "slice 1 of expert 0 on 0 ranks"),
        ([{"ep_rank": r, "ep_size": 2} for r in (0, 0)], "expert 2 on 0 ranks"),
        ([{"expert_ids": [0, 1, 2]}, {"expert_ids": [2, 3]}], "expert 2 on 2"),
    ],
    ids=["half", "twice", "overlap"],
)
def test_shards_that_do_not(shards: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(ranks.CoverError, match=says):
        ranks.check_cover([_facts(**shard) for shard in shards])


def test_measured_crossovers_are_no_part_of_the_agreement(
    checkpoints: dict[str, TinyCheckpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = loader.plan(checkpoints["awq"].folder)
    facts = ranks.facts_of(plan)
    assert facts["routes of layer 1"][1] == [2, 8, "qpn_grouped", plan.implementation.name]
    object.__setattr__(plan.policy.policy, "grouped_max_tokens", "measure")
    assert ranks.facts_of(plan)["routes of layer 1"][1] == ["qpn_grouped", plan.implementation.name]


def test_the_digest_knows_every_header(checkpoints: dict[str, TinyCheckpoint]) -> None:
    digests = {ranks.checkpoint_digest(loader.plan(c.folder)) for c in checkpoints.values()}
    assert len(digests) == len(checkpoints)
    again = loader.plan(checkpoints["awq"].folder, loader.Shard(1, 2))
    assert ranks.checkpoint_digest(again) in digests

"""Several ranks, as real processes: their sums, their share of a model and of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from moe_oracle import TOLERANCE, activations, error_of, moe64, routing, weights_of
from ranks_fakes import make, world

import loader
from loader import ranks
from loader.errors import LoaderError
from loader.testing.checkpoint import TinyCheckpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def checkpoints(folder: Path) -> dict[str, TinyCheckpoint]:
    return make(folder)


# --- sums ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def summed(folder: Path, checkpoints: dict[str, TinyCheckpoint]) -> list[dict[str, Any]]:
    return world("sums", folder)


def test_the_sum_over_ranks_is_the_layer(
    summed: list[dict[str, Any]], checkpoints: dict[str, TinyCheckpoint]
) -> None:
    """docs/routes.md: the same bound on the fp32 sum, under TP, EP and both."""
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


# --- what the ranks of one host read ------------------------------------------------------------


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

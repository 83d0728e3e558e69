"""Bench: which calls it times, and what it says of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import loader
from loader import Policy, Shard
from loader.bench import REPEATS, Step, bench_dict, bench_steps, bench_text, route_of
from loader.errors import CapacityError
from loader.testing.checkpoint import TinyCheckpoint, tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    sizes: dict[str, Any] = {"hidden": 64, "intermediate": 64, "experts": 5, "group": 32}
    return tiny_checkpoint(tmp_path_factory.mktemp("bench"), layers=2, **sizes)


class _Watched:
    """A prepared layer that notes what it was called with."""

    def __init__(self, layer: Any) -> None:
        self.layer, self.calls = layer, []  # type: tuple[Any, list[Any]]
        self.expert_ids, self.routes = layer.expert_ids, layer.routes
        self.hidden_size = layer.hidden_size

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        self.calls.append(inputs)
        return self.layer(*inputs)


def test_every_layer_runs_every_round_with_fresh_inputs_of_its_own_experts(
    checkpoint: TinyCheckpoint,
) -> None:
    experts = loader.load(checkpoint.folder, shard=Shard(expert_ids=(4, 1, 3)))
    watched = {number: _Watched(layer) for number, layer in experts.items()}
    steps = bench_steps(watched, [1, 3], 2, torch.bfloat16)  # type: ignore[arg-type]  # watched as a stand-in
    for one in watched.values():
        assert [len(x) for x, _, _ in one.calls] == [1] * (REPEATS + 1) + [3] * (REPEATS + 1)
        for x, ids, weights in one.calls:
            assert x.dtype == torch.bfloat16 and x.shape[1] == 64
            assert ids.shape == weights.shape == (len(x), 2)
            assert set(ids.flatten().tolist()) <= {4, 1, 3}
            assert all(len(set(row)) == 2 for row in ids.tolist())
            assert torch.allclose(weights.sum(1), torch.ones(len(x)))
        first, second = one.calls[0][0], one.calls[1][0]
        assert not torch.equal(first, second)
    assert [(step.tokens, step.route) for step in steps] == [(1, "qpn_m1"), (3, "qpn_grouped")]
    assert all(step.seconds > 0 for step in steps)


def test_a_card_with_fewer_experts_than_top_k_is_still_timed(checkpoint: TinyCheckpoint) -> None:
    experts = loader.load(checkpoint.folder, shard=Shard(expert_ids=(2,)))
    (step,) = bench_steps(experts, [2], 4, torch.float32)
    assert step.tokens == 2


def test_the_route_of_a_token_count(checkpoint: TinyCheckpoint) -> None:
    policy = Policy(grouped_max_tokens=4, qpn_m1="off")
    layer = loader.load(checkpoint.folder, policy=policy)[0]
    found = [route_of(layer, tokens)[0] for tokens in (1, 2, 4, 5, 10_000)]
    assert found == ["legacy", "qpn_grouped", "qpn_grouped", "legacy", "legacy"]
    assert route_of(layer, 1)[1] == layer.routes[0].implementation


def test_steps_as_text_and_as_values() -> None:
    steps = [Step(1, "qpn_m1", "reference", 0.0012345), Step(64, "legacy", "reference", 1.5)]
    assert bench_text(steps).splitlines()[2:] == [
        "tokens  route   code       ms a layer",
        "─────────────────────────────────────",
        "     1  qpn_m1  reference       1.234",
        "    64  legacy  reference    1500.000",
    ]
    assert bench_dict(steps)[0] == {
        "tokens": 1,
        "route": "qpn_m1",
        "implementation": "reference",
        "seconds": 0.0012345,
    }


def test_activations_that_fit_nowhere_are_an_error_of_ours(
    checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = loader.load(checkpoint.folder)

    def full(*_: object, **__: object) -> torch.Tensor:
        raise MemoryError("no more")

    # Not in earnest: after a failed malloc, glibc's heap is another one, and is not trimmed alike.
    monkeypatch.setattr(torch, "randn", full)
    with pytest.raises(CapacityError, match="activations of 2147483647 tokens"):
        bench_steps(experts, [(1 << 31) - 1], 2, torch.float32)

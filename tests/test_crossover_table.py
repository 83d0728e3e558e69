"""The crossover table: which token counts its rows mean, where it is asked, how rows are made."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fake_card import card, plans_for_a_card
from hypothesis import given
from hypothesis import strategies as st

import loader
from loader import crossover_table, native
from loader.crossover_table import KNOWN, KnownCrossover, known_crossover
from loader.testing.checkpoint import tiny_checkpoint

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
ROOM = 1 << 40
ROW = KnownCrossover(90, "int4", 8.0, 128, "a card, on a day")


def test_one_row_for_each_architecture_and_kind() -> None:
    assert len({(row.architecture, row.kind) for row in KNOWN}) == len(KNOWN)
    for row in KNOWN:
        assert known_crossover(row.architecture, row.kind) is row
        assert row.most_tokens >= 2 and row.measured_on
    assert known_crossover(1, "int4") is None


@pytest.mark.parametrize(
    ("experts", "top_k", "tokens"),
    [(128, 8, 128), (512, 10, 128), (64, 8, 64), (8, 2, 32), (1, 1, 8), (60, 4, 120)],
)
def test_rows_of_an_expert_become_tokens(experts: int, top_k: int, tokens: int) -> None:
    assert ROW.tokens(top_k / experts) == tokens


@given(
    st.floats(0, 1e6), st.integers(2, 256), st.integers(1, 512).flatmap(
        lambda experts: st.tuples(st.just(experts), st.integers(1, experts))
    )
)  # fmt: skip
def test_never_past_what_was_measured(rows: float, most: int, sizes: tuple[int, int]) -> None:
    experts, top_k = sizes
    tokens = KnownCrossover(90, "int4", rows, most, "").tokens(top_k / experts)
    assert 2 <= tokens <= most
    assert tokens == 2 or tokens * top_k / experts <= rows * (1 + 1e-9)


def last_of(folder: Path, policy: loader.Policy, architecture: int = 90) -> tuple[int | None, str]:
    with plans_for_a_card(architecture=architecture) as device:
        plan = loader.plan(folder, device=device, policy=policy, card_memory=ROOM)
    m1, grouped, legacy = plan.layers[0].routes
    assert (m1.last, legacy.first, legacy.last) == (1, (grouped.last or 0) + 1, None)
    return grouped.last, grouped.reason


def test_a_plan_for_a_card_asks_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_checkpoint(tmp_path, dialect="awq-gemm", hidden=64, intermediate=64, experts=8, top_k=2)
    monkeypatch.setattr(crossover_table, "KNOWN", (replace(ROW, rows_per_expert=4.0),))
    tokens, reason = last_of(tmp_path, loader.Policy())
    assert tokens == 16 and reason.endswith("crossover as measured on a card, on a day")
    assert last_of(tmp_path, loader.Policy(), 80) == (8, "admitted, qpn_grouped=auto (default)")
    assert last_of(tmp_path, loader.Policy(grouped_max_tokens=5))[0] == 5
    assert last_of(tmp_path, loader.Policy(grouped_max_tokens="measure"))[0] == 256
    monkeypatch.setattr(crossover_table, "KNOWN", (replace(ROW, kind="e2m1"),))
    assert last_of(tmp_path, loader.Policy())[0] == 8
    assert loader.plan(tmp_path).layers[0].routes[1].last == 8


@pytest.mark.parametrize(
    ("limit", "most", "last", "words"),
    [
        (None, 100, 8, "qpn_grouped=auto (default)"),
        (None, 5, 5, "at most 5 tokens in one step"),
        (64, 40, 40, "at most 40 tokens in one step"),
        ("measure", 90, 90, "at most 90 tokens in one step, crossover measured at load"),
    ],
)
def test_routes_stay_below_what_one_step_of_a_card_takes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: int | str | None,
    most: int,
    last: int,
    words: str,
) -> None:
    monkeypatch.setattr(crossover_table, "KNOWN", ())
    tiny_checkpoint(tmp_path, dialect="awq-gemm", hidden=64, intermediate=64, experts=8, top_k=2)
    asked = []

    def most_tokens(layer: object, top_k: int) -> int:
        asked.append(top_k)
        return most

    policy = loader.Policy(grouped_max_tokens=limit)
    with native.serving(replace(card(90), most_tokens=most_tokens)):
        plan = loader.plan(tmp_path, device="cuda:0", policy=policy, card_memory=ROOM)
    m1, grouped, legacy = plan.layers[0].routes
    assert (grouped.first, grouped.last, legacy.first) == (2, last, last + 1)
    assert grouped.reason.endswith(words) and set(asked) == {2}


def test_a_card_that_takes_one_token_at_a_time_has_no_grouped_route(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crossover_table, "KNOWN", ())
    tiny_checkpoint(tmp_path, dialect="awq-gemm", hidden=64, intermediate=64, experts=8, top_k=2)
    with native.serving(replace(card(90), most_tokens=lambda layer, top_k: 1)):
        plan = loader.plan(tmp_path, device="cuda:0", card_memory=ROOM)
    m1, legacy = plan.layers[0].routes
    assert (m1.last, legacy.first, legacy.last, legacy.route) == (1, 2, None, "legacy")
    assert legacy.reason == "at most 1 tokens in one step"


def test_rows_are_made_of_what_held_in_every_geometry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    cuda_crossover = pytest.importorskip("cuda_crossover")

    def pairs(lost_at: float, kind: str = "int4") -> list[object]:
        return [
            cuda_crossover.Pair(name, kind, tokens, rows, 2.0 if rows >= lost_at else 1.0, 1.5, 0.0)
            for name, each in (("a", 1 / 16), ("b", 1 / 51.2))
            for tokens in cuda_crossover.TOKENS
            for rows in [tokens * each]
        ]

    (row,) = cuda_crossover.table_rows(pairs(1e9), 90, "x")
    assert row == KnownCrossover(90, "int4", 32.0, 512, "x")
    (row,) = cuda_crossover.table_rows(pairs(4.0), 90, "x")
    assert row.rows_per_expert == 2.5  # of the other geometry, between 2 and 4
    (row,) = cuda_crossover.table_rows(pairs(0.0), 90, "x")
    assert row.rows_per_expert == 0.0 and row.tokens(1 / 16) == 2
    rows = cuda_crossover.table_rows([*pairs(4.0), *pairs(1e9, "e2m1")], 90, "x")
    assert [row.kind for row in rows] == ["int4", "e2m1"]
    sys.modules.pop("cuda_crossover")

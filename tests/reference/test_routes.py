"""The reference routes: the tolerance of docs/routes.md, every call, and where they round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from bank_oracle import small
from moe_oracle import (
    TOLERANCE,
    Weights,
    activations,
    assert_close,
    error_of,
    moe64,
    routing,
    weights_of,
)

import loader
from loader import native
from loader.experts import PreparedExperts
from loader.reference import routes
from loader.testing.checkpoint import TinyCheckpoint

TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 64, 300)
DTYPES = tuple(TOLERANCE)
EXPERTS, TOP_K = 6, 3


@dataclass(frozen=True)
class Case:
    """One checkpoint under one policy, and the weights that it is measured by."""

    checkpoint: TinyCheckpoint
    module: PreparedExperts
    weights: dict[int, Weights]


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "awq-compact": ({}, {}),
    "awq-record": ({}, {"layout": "record"}),
    "awq-wide": ({}, {"layout": "wide"}),
    "awq-fused-compact": ({}, {"awq_rounding": "fused_bias"}),
    "awq-fused-record": ({}, {"awq_rounding": "fused_bias", "layout": "record"}),
    "awq-fused-wide": ({}, {"awq_rounding": "fused_bias", "layout": "wide"}),
    "awq-bf16-group-128": ({"scale_dtype": "BF16", "group": 128}, {}),
    "awq-channel": ({"group": -1}, {}),
    "int4-symmetric": ({"dialect": "ct-int4"}, {}),
    "int4-asymmetric-fused": ({"dialect": "ct-int4-asym", "fused": True, "group": 64}, {}),
    "nvfp4-divisor": ({"dialect": "ct-nvfp4"}, {}),
    "nvfp4-multiplier": ({"dialect": "modelopt-nvfp4"}, {}),
    "nvfp4-divisor-wide": ({"dialect": "ct-nvfp4"}, {"layout": "wide"}),
    "nvfp4-multiplier-wide": ({"dialect": "modelopt-nvfp4"}, {"layout": "wide"}),
    "plain-bf16": ({"layers": 2, "excluded": (0,), "plain_dtype": "BF16"}, {}),
    "plain-fp16": ({"layers": 2, "excluded": (0,), "plain_dtype": "F16"}, {}),
}


def make(folder: Path, name: str, **shard: Any) -> Case:
    setting, policy = CASES[name]
    checkpoint = small(folder, **{"experts": EXPERTS, **setting})
    module = load(checkpoint, policy, **shard)
    rounding = policy.get("awq_rounding", "exact"), policy.get("layout", "compact")
    weights = {e: weights_of(checkpoint, e, *rounding) for e in range(EXPERTS)}
    return Case(checkpoint, module, weights)


def load(checkpoint: TinyCheckpoint, policy: dict[str, Any], **shard: Any) -> PreparedExperts:
    return loader.load(
        checkpoint.folder, policy=loader.Policy(**policy), shard=loader.Shard(**shard), layers=[0]
    )[0]


@pytest.fixture(scope="module", params=["host", "reference"], autouse=True)
def served(request: pytest.FixtureRequest) -> Iterator[native.Implementation]:
    """Every contract of this file is that of all implementations for the host."""
    implementation = native.HOST if request.param == "host" else native.REFERENCE
    if implementation is None:
        pytest.skip("the native core is not built")
    with native.serving(implementation):
        yield implementation


@pytest.fixture(scope="module", params=CASES)
def case(
    request: pytest.FixtureRequest,
    served: native.Implementation,
    tmp_path_factory: pytest.TempPathFactory,
) -> Case:
    return make(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def awq(served: native.Implementation, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make(tmp_path_factory.mktemp("awq"), "awq-compact")


def test_within_tolerance_at_every_token_count(case: Case) -> None:
    for tokens in TOKENS:
        ids, router = routing(tokens, EXPERTS, TOP_K, seed=tokens)
        for dtype in DTYPES:
            x = activations(tokens, 128, dtype, seed=tokens)
            y = case.module(x, ids, router)
            assert y.dtype == dtype
            assert_close(y, moe64(case.weights, x, ids, router), dtype, f"{tokens} tokens")


def test_a_token_alone_and_among_others(case: Case) -> None:
    """The same row first and last, across both changes of route."""
    ids, router = routing(64, EXPERTS, TOP_K, seed=5)
    for dtype in DTYPES:
        x = activations(64, 128, dtype, seed=5)
        wanted = moe64(case.weights, x[:1], ids[:1], router[:1])
        for tokens in (1, 2, 3, 8, 9, 15, 16, 17, 64):
            rows = [*range(tokens - 1), 0] if tokens > 1 else [0]
            y = case.module(x[rows], ids[rows], router[rows])
            for row in (0, tokens - 1):
                assert_close(y[row : row + 1], wanted, dtype, f"row {row} of {tokens}")


@pytest.mark.parametrize("name", ["awq-compact", "nvfp4-divisor", "plain-bf16", "awq-channel"])
@pytest.mark.parametrize("kind", ["tp", "ep"])
def test_slices_and_expert_ranks_sum_to_the_layer(kind: str, name: str, tmp_path: Path) -> None:
    case = make(tmp_path, name)
    ranks = [
        load(case.checkpoint, CASES[name][1], **{f"{kind}_rank": rank, f"{kind}_size": 4})
        for rank in range(4)
    ]
    for tokens in (1, 5, 20):
        ids, router = routing(tokens, EXPERTS, TOP_K, seed=tokens)
        for dtype in DTYPES:
            x = activations(tokens, 128, dtype, seed=tokens)
            total = torch.stack([rank(x, ids, router).float() for rank in ranks]).sum(0)
            assert_close(total, moe64(case.weights, x, ids, router), dtype, f"{tokens} tokens")


# Slots.


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 20])
def test_slots_that_are_skipped_add_exactly_nothing(
    awq: Case, tokens: int, dtype: torch.dtype
) -> None:
    """Their router weight may be NaN. The other slots give the same bits as without them."""
    ids, router = routing(tokens, EXPERTS, TOP_K, seed=tokens)
    outside = [-1, EXPERTS, 2**31 - 1, -(2**31)]
    if dtype == torch.int64:
        outside += [2**31, 2**32, 2**32 + 1, -(2**63), 2**63 - 1]
    for activation in DTYPES:
        x = activations(tokens, 128, activation, seed=3)
        wanted = awq.module(x, ids.to(dtype), router)
        for bad in outside:
            column = torch.full((tokens, 1), bad, dtype=dtype)
            nan = torch.full((tokens, 1), float("nan"))
            for place in range(TOP_K + 1):
                more = torch.cat((ids[:, :place].to(dtype), column, ids[:, place:].to(dtype)), 1)
                weights = torch.cat((router[:, :place], nan, router[:, place:]), 1)
                assert torch.equal(awq.module(x, more, weights), wanted), (bad, place)


@pytest.mark.parametrize("tokens", [1, 4, 12])
def test_only_skipped_slots_give_exactly_zero(awq: Case, tokens: int) -> None:
    x = activations(tokens, 128, torch.bfloat16)
    ids = torch.tensor([[-1, EXPERTS, 2**31 - 1]] * tokens, dtype=torch.int32)
    y = awq.module(x, ids, torch.full(ids.shape, float("inf")))
    assert torch.equal(y, torch.zeros_like(x))


@pytest.mark.parametrize("tokens", [1, 4, 12])
def test_experts_of_another_card_are_skipped(awq: Case, tokens: int) -> None:
    ids, router = routing(tokens, EXPERTS, TOP_K, seed=9)
    x = activations(tokens, 128, torch.float16)
    part = load(awq.checkpoint, {}, expert_ids=(4, 1))
    nan = torch.where((ids == 4) | (ids == 1), router, float("nan"))
    y = part(x, ids, nan)
    here = {e: awq.weights[e] for e in (1, 4)}
    assert_close(y, moe64(here, x, ids, router), torch.float16)


@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_a_repeated_id_keeps_both_weights(awq: Case, tokens: int) -> None:
    x = activations(tokens, 128, torch.float32)
    ids = torch.tensor([[2, 5, 2]] * tokens)
    router = torch.tensor([[0.3, 0.45, 0.25]] * tokens)
    y = awq.module(x, ids, router)
    assert_close(y, moe64(awq.weights, x, ids, router), torch.float32)


@pytest.mark.parametrize("tokens", [1, 3, 8, 33])
def test_extremes_of_routing(awq: Case, tokens: int) -> None:
    x = activations(tokens, 128, torch.float16)
    for ids in (
        torch.full((tokens, 1), EXPERTS - 1),  # all rows to one expert
        torch.arange(EXPERTS).flip(0).repeat(tokens, 1),  # every expert in every row
        torch.full((tokens, EXPERTS), 1),  # one expert, selected as often as there are experts
    ):
        router = torch.linspace(0.1, 0.7, ids.shape[1]).repeat(tokens, 1)
        assert_close(awq.module(x, ids, router), moe64(awq.weights, x, ids, router), torch.float16)


@pytest.mark.parametrize("top_k", [0, 1, 3])
def test_no_tokens_and_no_slots(awq: Case, top_k: int) -> None:
    for dtype in DTYPES:
        for tokens in (0, 1, 5):
            ids = torch.zeros((tokens, top_k), dtype=torch.int64)
            if tokens and top_k:
                continue
            y = awq.module(torch.ones(tokens, 128, dtype=dtype), ids, torch.zeros(tokens, top_k))
            assert y.shape == (tokens, 128) and y.dtype == dtype and not y.any()
    ids, router = routing(2, EXPERTS, TOP_K)
    x = activations(2, 128, torch.float16)
    assert_close(awq.module(x, ids, router), moe64(awq.weights, x, ids, router), torch.float16)


@pytest.mark.parametrize("tokens", [2, 8, 12])
def test_a_bad_row_does_not_reach_its_neighbours(awq: Case, tokens: int) -> None:
    ids, router = routing(tokens, EXPERTS, TOP_K, seed=4)
    x = activations(tokens, 128, torch.float16)
    clean = awq.module(x, ids, router)
    x[1, 7], router[1, 0] = float("inf"), float("nan")
    y = awq.module(x, ids, router)
    rows = torch.arange(tokens) != 1
    assert torch.equal(y[rows], clean[rows]) and not y[1].isfinite().all()


def test_router_weights_of_every_float_dtype_are_used_as_fp32(awq: Case) -> None:
    for tokens in (1, 4, 12):
        ids, router = routing(tokens, EXPERTS, TOP_K, seed=tokens)
        x = activations(tokens, 128, torch.float16)
        for dtype in (torch.float16, torch.bfloat16, torch.float64):
            weights = router.to(dtype)
            assert torch.equal(awq.module(x, ids, weights), awq.module(x, ids, weights.float())), (
                dtype
            )


def test_inputs_of_any_strides_are_read_and_not_changed(awq: Case) -> None:
    for tokens in (1, 4, 12):
        ids, router = routing(tokens, EXPERTS, TOP_K, seed=tokens)
        for dtype in DTYPES:
            x = activations(tokens, 128, dtype)
            wanted = awq.module(x, ids, router)
            turned = [t.t().contiguous().t() for t in (x, ids, router)]
            spaced = [torch.stack((t, t), -1)[..., 0] for t in (x, ids, router)]
            for inputs in (turned, spaced):
                before = [t.clone() for t in inputs]
                y = awq.module(*inputs)
                assert y.is_contiguous()
                assert error_of(y, wanted.double()) <= TOLERANCE[dtype] / 2
                assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


def test_the_token_count_chooses_the_route(
    awq: Case, served: native.Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    if served is not native.REFERENCE:
        pytest.skip("only the reference can be watched from here")
    used: list[str] = []
    group, legacy = routes.group_product, routes.legacy_product

    def grouped(*args: Any) -> torch.Tensor:
        used.append("group")
        return group(*args)

    def plain(scratch: torch.Tensor) -> Any:
        product = legacy(scratch)
        return lambda *args: used.append("legacy") or product(*args)

    monkeypatch.setattr(routes, "group_product", grouped)
    monkeypatch.setattr(routes, "legacy_product", plain)
    for policy, table in (
        ({}, {1: "group", 2: "group", 8: "group", 9: "legacy", 64: "legacy"}),
        ({"qpn_m1": "off"}, {1: "legacy", 2: "group", 9: "legacy"}),
        ({"qpn_grouped": "off"}, {1: "group", 2: "legacy", 8: "legacy"}),
        ({"grouped_max_tokens": 20}, {1: "group", 20: "group", 21: "legacy"}),
    ):
        module = load(awq.checkpoint, policy)
        for tokens, route in table.items():
            used.clear()
            module(activations(tokens, 128, torch.float32), *routing(tokens, EXPERTS, TOP_K))
            assert set(used) == {route}, (policy, tokens)
            (named,) = [r.route for r in module.routes if r.first <= tokens <= (r.last or tokens)]
            assert (named == "legacy") == (route == "legacy")


def test_legacy_with_the_least_scratch(awq: Case) -> None:
    """One tile at a time is the same layer."""
    ids, router = routing(30, EXPERTS, TOP_K)
    module = awq.module
    x = activations(30, 128, torch.float32)
    out, map_ = torch.empty_like(x), module.workspace.expert_map
    for numbers in (32 * 192, 64 * 192 + 5, 1 << 22):
        scratch = torch.full((numbers,), float("nan"))
        ints = module.spec.to_ints()
        routes.moe(out, scratch, x, ids, router, map_, module.banks(), ints, [0, 0])
        assert_close(out, moe64(awq.weights, x, ids, router), torch.float32)


def test_scratch_holds_a_tile_of_the_widest_k(awq: Case) -> None:
    spec = awq.module.spec
    assert routes.scratch_bytes([spec], 8, TOP_K) >= 32 * 4 * max(spec.w13.k, spec.w2.k)
    assert routes.scratch_bytes([], 8, TOP_K) == 0

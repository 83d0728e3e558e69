"""``legacy`` on a card, as far as Python decides it: groups, places, runs, captures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fake_legacy import FakeCalls
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_oracle import TOLERANCE, error_of, moe64

import loader
from loader import cuda_legacy
from loader.cuda_legacy import FEW_ROWS, Legacy, captured_bounds, groups
from loader.errors import LoaderError
from loader.experts import PreparedExperts
from loader.testing.checkpoint import tiny_checkpoint

EXPERTS, TOP_K, HIDDEN = 6, 3, 64


def layer_of(
    folder: Path, dialect: str = "awq-gemm", shard: loader.Shard | None = None, **policy: str
) -> PreparedExperts:
    if not (folder / "config.json").exists():
        tiny_checkpoint(
            folder, dialect=dialect, hidden=HIDDEN, intermediate=64, experts=EXPERTS, layers=1
        )
    return loader.load(
        folder, "cpu", shard=shard or loader.Shard(), policy=loader.Policy(**policy)
    )[0]


def step(tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Activations, ids (some out of range, some twice) and weights (NaN where skipped)."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn((tokens, HIDDEN), generator=generator).to(dtype)
    ids = torch.randint(-1, EXPERTS + 1, (tokens, TOP_K), generator=generator)
    ids[-1] = ids[-1, :1].clamp(0, EXPERTS - 1)
    weights = torch.rand((tokens, TOP_K), generator=generator)
    return x, ids, torch.where((ids < 0) | (ids >= EXPERTS), float("nan"), weights)


def run(
    layer: PreparedExperts,
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    capturing: bool = False,
    scratch: int | None = None,
) -> tuple[torch.Tensor, list[str]]:
    """The output, from a poisoned one, and the names of the calls that were made."""
    calls = FakeCalls()
    out = torch.full_like(given[0], float("nan"))
    nbytes = scratch or cuda_legacy.scratch_bytes(layer.spec)
    room = torch.full((nbytes // 4,), float("nan"))
    Legacy(calls, lambda: capturing).moe(
        out, room, *given, layer.workspace.expert_map, layer.spec, layer.banks()
    )
    return out, calls.made


def wanted(
    layer: PreparedExperts, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    weights = {
        expert: {name: w.double() for name, w in layer.dequantize(expert).items()}
        for expert in layer.expert_ids
    }
    return moe64(weights, *given)


@pytest.mark.parametrize("capturing", (False, True))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32))
@pytest.mark.parametrize("dialect", ("awq-gemm", "modelopt-nvfp4"))
def test_every_row_is_served_once(
    tmp_path: Path, dialect: str, dtype: torch.dtype, capturing: bool
) -> None:
    layer = layer_of(tmp_path, dialect)
    for tokens in (1, 2, 9, 40):
        given = step(tokens, dtype)
        out, _ = run(layer, given, capturing)
        assert error_of(out, wanted(layer, given)) <= TOLERANCE[dtype], f"T={tokens}"


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_fused_weights_lose_nothing(tmp_path: Path, dtype: torch.dtype) -> None:
    layer = layer_of(tmp_path, awq_rounding="fused_bias")
    given = step(9, dtype)
    out, _ = run(layer, given)
    assert error_of(out, wanted(layer, given)) <= TOLERANCE[dtype]
    assert cuda_legacy.parts_of(layer.spec, dtype) == (2 if dtype == torch.bfloat16 else 1)


def test_experts_elsewhere_are_skipped(tmp_path: Path) -> None:
    layer = layer_of(tmp_path, shard=loader.Shard(ep_rank=1, ep_size=2))
    x, ids, weights = step(9, torch.float16)
    here = torch.isin(ids, torch.tensor(layer.expert_ids))
    given = (x, ids, torch.where(here, weights, float("nan")))
    out, _ = run(layer, given)
    assert error_of(out, wanted(layer, given)) <= TOLERANCE[torch.float16]


@pytest.mark.parametrize("capturing", (False, True))
def test_no_row_on_this_card_gives_zeros(tmp_path: Path, capturing: bool) -> None:
    layer = layer_of(tmp_path)
    x, ids, weights = step(5, torch.bfloat16)
    out, made = run(layer, (x, torch.full_like(ids, -1), weights * float("nan")), capturing)
    assert not out.any()
    assert capturing or made == ["route", "sum"]


@pytest.mark.parametrize("capturing", (False, True))
def test_little_room_goes_by_tiles(tmp_path: Path, capturing: bool) -> None:
    layer = layer_of(tmp_path)
    given = step(9, torch.float16)
    least = max(32 * bank.k * 4 for bank in layer.spec.banks)
    out, made = run(layer, given, capturing, least)
    assert error_of(out, wanted(layer, given)) <= TOLERANCE[torch.float16]
    assert made.count("unpack") > 2 * EXPERTS


def test_rows_go_in_pieces_within_their_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layer_of(tmp_path)
    x, ids, weights = step(40, torch.float16)
    ids[:, 0] = 2  # more rows of one expert than the budget has places
    given = (x, ids, weights.nan_to_num())
    whole, made = run(layer, given)
    monkeypatch.setattr(cuda_legacy, "LEGACY_ROWS_BYTES", 40 * TOP_K * HIDDEN * 2 // 2)
    out, in_pieces = run(layer, given)
    assert error_of(out, whole.double()) <= TOLERANCE[torch.float16]
    assert in_pieces.count("route") == 2 and in_pieces.count("gather") > 2 * made.count("gather")


def test_few_launches_serve_many_experts(tmp_path: Path) -> None:
    layer = layer_of(tmp_path)
    _, made = run(layer, step(40, torch.float16))
    assert made == [
        *("route", "gather", "unpack", "multiply", "inner", "unpack", "multiply", "results"),
        "sum",
    ]


def test_unquantized_weights_keep_their_dtype(tmp_path: Path) -> None:
    tiny_checkpoint(
        tmp_path,
        dialect="awq-gemm",
        hidden=HIDDEN,
        intermediate=64,
        experts=EXPERTS,
        layers=1,
        excluded=(0,),
        plain_dtype="BF16",
    )
    layer = loader.load(tmp_path, "cpu")[0]
    assert cuda_legacy.weights_dtype(layer.spec.w13, torch.bfloat16) == torch.bfloat16
    assert cuda_legacy.weights_dtype(layer.spec.w13, torch.float16) == torch.float32
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        given = step(9, dtype)
        for scratch in (None, 32 * HIDDEN * 4):
            out, _ = run(layer, given, scratch=scratch)
            assert error_of(out, wanted(layer, given)) <= TOLERANCE[dtype]


def test_a_long_step_cannot_be_captured(tmp_path: Path) -> None:
    layer = layer_of(tmp_path)
    with pytest.raises(LoaderError, match="cannot be captured"):
        run(layer, step(cuda_legacy.LEGACY_CAPTURED_TOKENS + 1, torch.float16), True)


# Groups


@settings(deadline=None)
@given(st.lists(st.integers(1, 5000), max_size=60), st.integers(1, 20_000))
def test_groups_cover_every_expert_with_little_padding(counts: list[int], most: int) -> None:
    bounds = sorted(counts, reverse=True)
    found = list(groups(bounds, most))
    covered = [rank for one in found for rank in range(one.first, one.last)]
    assert covered == list(range(len(bounds)))
    for one in found:
        assert one.places == bounds[one.first]
        assert one.last - one.first == 1 or (one.last - one.first) * one.places <= most
        assert all(one.places <= max(2 * own, FEW_ROWS) for own in bounds[one.first : one.last])


@settings(deadline=None)
@given(
    st.integers(1, 40).flatmap(
        lambda slots: st.tuples(
            st.just(slots),
            st.integers(1, min(slots, 8)).flatmap(
                lambda k: st.lists(
                    st.lists(st.integers(0, slots - 1), min_size=k, max_size=k, unique=True),
                    min_size=1,
                    max_size=30,
                )
            ),
        )
    )
)
def test_no_expert_has_more_rows_than_its_rank_allows(drawn: tuple[int, list[list[int]]]) -> None:
    slots, ids = drawn
    counts = torch.bincount(torch.tensor(ids).flatten(), minlength=slots)
    bounds = captured_bounds(len(ids), len(ids[0]), slots)
    ranked = counts.sort(descending=True).values.tolist()
    assert all(own <= bound for own, bound in zip(ranked, bounds, strict=False))
    assert not any(ranked[len(bounds) :])


def test_scratch_holds_a_layer_or_the_budget(tmp_path: Path) -> None:
    spec = layer_of(tmp_path).spec
    whole = EXPERTS * 3 * HIDDEN * 64 * 2
    assert cuda_legacy.scratch_bytes(spec) == whole
    big = spec.w13.__class__(**{**spec.w13.__dict__, "experts": 1 << 20})
    assert cuda_legacy.scratch_bytes(type(spec)(big, spec.w2)) == cuda_legacy.LEGACY_WORKSPACE_BYTES

"""The routes on a card: the bounds for both families, capture, memory."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from card import CARD, needs_card
from cuda_layers import (
    BOUND,
    EXPERTS,
    HIDDEN,
    TOP_K,
    error_of,
    layer_on,
    moe64,
    run,
    step,
    weights_of,
)

import loader
from loader import native
from loader.cuda_legacy import LEGACY_CAPTURED_TOKENS
from loader.cuda_routes import FAMILIES
from loader.errors import LoaderError
from loader.experts import PreparedExperts
from loader.testing.checkpoint import tiny_checkpoint

pytestmark = needs_card()

TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 64)
LAYERS = [
    (dialect, layout, rounding, tp)
    for dialect, layout, rounding, tp in product(
        ("awq-gemm", "ct-int4-asym", "ct-nvfp4", "modelopt-nvfp4"),
        ("compact", "record", "wide"),
        ("exact", "fused_bias"),
        (1, 4),
    )
    if not ("nvfp4" in dialect and (layout == "record" or rounding == "fused_bias"))
]


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> PreparedExperts:
    return layer_on(CARD, tmp_path_factory.mktemp("layer"), "awq-gemm", "compact", "exact", 1)


@pytest.mark.parametrize(("dialect", "layout", "rounding", "tp"), LAYERS)
def test_every_layer_meets_the_bound(
    tmp_path: Path, dialect: str, layout: str, rounding: str, tp: int
) -> None:
    mine = layer_on(CARD, tmp_path, dialect, layout, rounding, tp)
    host = weights_of(layer_on("cpu", tmp_path, dialect, layout, rounding, tp))
    for dtype, family in product(BOUND, (1, 2)):
        if FAMILIES[family] == "quadpair" and dtype == torch.bfloat16:
            continue
        for tokens in TOKENS:
            x, ids, weights = step(tokens, dtype)
            wanted = moe64(host, x, ids, weights)
            for routes in ((1, 64, family), (0, 0)):
                error = error_of(run(mine, x, ids, weights, routes), wanted)
                assert error <= BOUND[dtype], f"T={tokens} {dtype} {routes}: {error:.2e}"


@pytest.mark.parametrize("family", (1, 2))
def test_more_rows_of_one_expert_than_a_pass_takes(layer: PreparedExperts, family: int) -> None:
    x, ids, weights = step(64, torch.float16)
    ids.fill_(2)
    both = [run(layer, x, ids, weights, routes) for routes in ((1, 64, family), (0, 0))]
    assert error_of(both[0], both[1].double().cpu()) <= 2e-3


@pytest.mark.parametrize("wild", (float("nan"), float("inf")))
@pytest.mark.parametrize("dialect", ("awq-gemm", "ct-nvfp4"))
def test_a_wild_activation_spoils_its_own_token_alone(
    tmp_path: Path, dialect: str, wild: float
) -> None:
    mine = layer_on(CARD, tmp_path, dialect, "compact", "exact", 1)
    for dtype, tokens in product(BOUND, (1, 3, 8)):
        x, ids, weights = step(tokens, dtype)
        ids.clamp_(0, EXPERTS - 1)
        good = run(mine, x, ids, weights)
        x[tokens - 1, 77] = wild
        y = run(mine, x, ids, weights)
        assert torch.equal(y[:-1], good[:-1]) and not y[-1].isfinite().any()


def test_as_many_tokens_as_one_step_takes(layer: PreparedExperts) -> None:
    serving = native.implementation_for(CARD)
    assert serving is not None and serving.most_tokens is not None
    most = serving.most_tokens(layer.spec, TOP_K)
    x, ids, weights = step(most + 8, torch.float16)
    routes = (1, most + 8)
    wanted = run(layer, x, ids, weights, (0, 0)).double()
    y = run(layer, x[:most], ids[:most], weights[:most], routes).double()
    assert (y - wanted[:most]).norm() <= 2e-3 * wanted.norm()
    with pytest.raises(ValueError, match="more rows"):
        run(layer, x, ids, weights, routes)


def test_layouts_agree_to_the_bit(tmp_path: Path) -> None:
    layers = [
        layer_on(CARD, tmp_path, "awq-gemm", layout, "exact", 1)
        for layout in ("compact", "record", "wide")
    ]
    for tokens in (1, 5):
        x, ids, weights = step(tokens, torch.bfloat16)
        first, *others = (run(one, x, ids, weights) for one in layers)
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("id_dtype", (torch.int32, torch.int64))
@pytest.mark.parametrize(
    "weight_dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64)
)
def test_dtypes_of_ids_and_weights(
    layer: PreparedExperts, id_dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    for tokens in (1, 4):
        x, ids, weights = step(tokens, torch.float16)
        weights = weights.bfloat16().half().float()
        wanted = run(layer, x, ids, weights)
        assert torch.equal(run(layer, x, ids.to(id_dtype), weights.to(weight_dtype)), wanted)


@pytest.mark.parametrize("family", (1, 2))
def test_experts_elsewhere_are_skipped(tmp_path: Path, family: int) -> None:
    tiny_checkpoint(tmp_path, dialect="awq-gemm", hidden=HIDDEN, experts=EXPERTS, layers=1)
    whole = loader.load(tmp_path, "cpu")[0]
    shard = loader.Shard(ep_rank=1, ep_size=2)
    part = loader.load(tmp_path, CARD, shard=shard)[0]
    for tokens in (1, 7):
        x, ids, weights = step(tokens, torch.float16)
        ids[0, 0] = part.expert_ids[-1]
        here = torch.isin(ids, torch.tensor(part.expert_ids, device=CARD))
        weights[~here] = float("nan")
        wanted = moe64(weights_of(whole), x, torch.where(here, ids, -1), weights.nan_to_num())
        assert error_of(run(part, x, ids, weights, (1, 64, family)), wanted) <= 1e-3


@pytest.mark.parametrize("tokens", (1, 6))
@pytest.mark.parametrize("family", (1, 2))
def test_a_captured_step_replays_with_other_inputs(
    layer: PreparedExperts, tokens: int, family: int
) -> None:
    x, ids, weights = step(tokens, torch.float16)
    out = torch.empty_like(x)
    run(layer, x, ids, weights, (1, 64, family), out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        native.moe(
            out,
            layer.workspace.scratch,
            x,
            ids,
            weights,
            layer.workspace.expert_map,
            layer.banks(),
            layer.spec.to_ints(),
            [1, 64, family],
        )
    for seed in (1, 2):
        for own, new in zip((x, ids, weights), step(tokens, torch.float16, seed), strict=True):
            own.copy_(new)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, run(layer, x, ids, weights, (1, 64, family)))


@pytest.mark.parametrize("dialect", ("awq-gemm", "ct-nvfp4"))
def test_a_captured_step_replays_with_other_weights(tmp_path: Path, dialect: str) -> None:
    """Weights that are changed go where the captured ones were; a refused change leaves those."""
    first, other = (
        loader.load(
            tiny_checkpoint(
                tmp_path / str(seed),
                dialect=dialect,
                hidden=HIDDEN,
                intermediate=704,
                experts=EXPERTS,
                layers=1,
                seed=seed,
            ),
            CARD,
        )[0]
        for seed in (0, 1)
    )
    x, ids, weights = step(6, torch.float16)
    out = torch.empty_like(x)
    used = [*first.banks(), *first.workspace.tensors()]
    addresses = [tensor.data_ptr() for tensor in used]
    old, wanted = (layer(x, ids, weights).clone() for layer in (first, other))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first(x, ids, weights, out=out)
    state = other.state_dict()
    last = [name for name in state if name != "_extra_state"][-1]
    with pytest.raises(RuntimeError, match="prepared experts refuse the state"):
        first.load_state_dict({**state, last: state[last][:1]})
    with pytest.raises(LoaderError, match="policy"):
        first.policy = loader.Policy(qpn_grouped="off")
    graph.replay()
    assert torch.equal(out, old) and not torch.equal(old, wanted)
    first.load_state_dict(state)
    used = [*first.banks(), *first.workspace.tensors()]
    assert [tensor.data_ptr() for tensor in used] == addresses
    graph.replay()
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("tokens", (1, 8))
def test_a_decode_step_allocates_nothing(layer: PreparedExperts, tokens: int) -> None:
    x, ids, weights = step(tokens, torch.bfloat16)
    out = torch.empty_like(x)
    layer(x, ids, weights, out=out)
    before = torch.cuda.memory_stats(CARD)["allocation.all.allocated"]
    for _ in range(100):
        layer(x, ids, weights, out=out)
    assert torch.cuda.memory_stats(CARD)["allocation.all.allocated"] == before


def test_legacy_takes_any_number_of_tokens(layer: PreparedExperts) -> None:
    x, ids, weights = step(300, torch.bfloat16)
    passes = torch.cat(
        [run(layer, x[i : i + 60], ids[i : i + 60], weights[i : i + 60]) for i in range(0, 300, 60)]
    )
    assert error_of(run(layer, x, ids, weights, (0, 0)), passes.double().cpu()) <= 1.2e-2


def test_legacy_can_be_captured_up_to_a_limit(layer: PreparedExperts) -> None:
    def capture(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, ids, weights = step(tokens, torch.bfloat16)
        wanted = run(layer, x, ids, weights, (0, 0))
        graph, out = torch.cuda.CUDAGraph(), torch.full_like(x, float("nan"))
        call = (layer.workspace.expert_map, layer.banks(), layer.spec.to_ints(), [0, 0])
        with torch.cuda.graph(graph):
            native.moe(out, layer.workspace.scratch, x, ids, weights, *call)
        graph.replay()
        return out, wanted

    out, wanted = capture(40)
    assert error_of(out, wanted.double().cpu()) <= 1e-2
    with pytest.raises(LoaderError, match="cannot be captured"):
        capture(LEGACY_CAPTURED_TOKENS + 1)


def test_no_token_and_no_expert(layer: PreparedExperts) -> None:
    x, ids, weights = step(3, torch.float16)
    assert run(layer, x[:0], ids[:0], weights[:0]).shape == (0, HIDDEN)
    none = ids[:, :0].contiguous(), weights[:, :0].contiguous()
    assert not run(layer, x, *none).any()


def test_opcheck_and_compile(layer: PreparedExperts) -> None:
    x, ids, weights = step(4, torch.bfloat16)
    arguments = (
        torch.empty_like(x),
        layer.workspace.scratch,
        x,
        ids,
        weights,
        layer.workspace.expert_map,
        layer.banks(),
        layer.spec.to_ints(),
        [1, 64],
    )
    torch.library.opcheck(torch.ops.qpn.moe.default, arguments)
    compiled = torch.compile(layer, fullgraph=True)
    assert torch.equal(compiled(x, ids, weights), layer(x, ids, weights))

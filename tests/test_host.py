"""The fast routes of the native core: their bounds, equal weights, no allocation."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

import loader
from loader import native
from loader.bank import split_banks
from loader.core import CORE
from loader.experts import PreparedExperts
from loader.reference import routes, weights
from loader.testing.checkpoint import tiny_checkpoint

pytestmark = pytest.mark.skipif(CORE is None, reason="the native core was not built")

BOUND = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
ISA_NAMES = ("portable", "AVX2", "AVX-512")
LAYERS = [
    (dialect, layout, rounding, tp)
    for dialect, layout, rounding, tp in product(
        ("awq-gemm", "awq-gptqmodel", "ct-nvfp4", "modelopt-nvfp4"),
        ("compact", "record", "wide"),
        ("exact", "fused_bias"),
        (1, 4),
    )
    if not ("nvfp4" in dialect and (layout == "record" or rounding == "fused_bias"))
]


@pytest.fixture(params=range(3), ids=ISA_NAMES)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    assert CORE is not None
    if request.param > CORE.best_isa:
        pytest.skip(f"this machine has no {ISA_NAMES[request.param]}")
    monkeypatch.setattr(CORE, "isa", request.param)
    return int(request.param)


def layer_of(
    folder: Path, dialect: str, layout: str, rounding: str = "exact", tp: int = 1
) -> PreparedExperts:
    tiny_checkpoint(
        folder, dialect=dialect, hidden=256, intermediate=704, experts=6, layers=1, seed=3
    )
    policy = loader.Policy(layout=layout, awq_rounding=rounding, grouped_max_tokens=64)
    return loader.load(folder, shard=loader.Shard(tp_rank=tp - 1, tp_size=tp), policy=policy)[0]


def step(tokens: int, hidden: int, dtype: torch.dtype, top_k: int = 3, experts: int = 6):
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn((tokens, hidden), generator=generator).to(dtype)
    ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=generator)
    return x, ids, torch.rand((tokens, top_k), generator=generator)


def in_fp64(layer: PreparedExperts, x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor):
    """The layer from its own dequantized weights, nothing rounded on the way."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    for expert in layer.expert_ids:
        token, position = (ids == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        parts = {name: part.double() for name, part in layer.dequantize(expert).items()}
        rows = x[token].double()
        hidden = torch.nn.functional.silu(rows @ parts["gate"].t()) * (rows @ parts["up"].t())
        y.index_add_(0, token, w[token, position, None].double() * (hidden @ parts["down"].t()))
    return y


@pytest.mark.parametrize(("dialect", "layout", "rounding", "tp"), LAYERS)
def test_fast_routes_hold_the_bound(
    tmp_path: Path, isa: int, dialect: str, layout: str, rounding: str, tp: int
) -> None:
    layer = layer_of(tmp_path, dialect, layout, rounding, tp)
    assert {route.implementation for route in layer.routes} == {"host"}
    for dtype, tokens in product(BOUND, (1, 2, 7, 8, 9, 17)):
        x, ids, w = step(tokens, 256, dtype)
        if tokens == 9:
            ids[:] = 4  # one expert, more rows than one pass takes
        wanted = in_fp64(layer, x, ids, w)
        y = torch.full_like(x, float("nan"))
        layer(x, ids, w, out=y)
        error = (y.double() - wanted).norm() / wanted.norm().clamp_min(1e-30)
        assert error <= BOUND[dtype], (dtype, tokens)


@pytest.mark.parametrize(("dialect", "layout", "rounding", "tp"), LAYERS[::3])
def test_dequantized_tiles_have_the_bits_of_the_reference(
    tmp_path: Path, isa: int, dialect: str, layout: str, rounding: str, tp: int
) -> None:
    assert CORE is not None
    layer = layer_of(tmp_path, dialect, layout, rounding, tp)
    for number, (bank, tensors) in enumerate(
        zip(layer.spec.banks, split_banks(layer.spec, layer.banks()), strict=True)
    ):
        out = torch.full((bank.n, bank.k), float("nan"))
        tiles = (0, bank.n_padded // 32)
        CORE.dequantize(out, number, 2, tiles, layer.banks(), layer.spec.to_ints())
        whole = weights.Columns(2, 0, bank.n)
        wanted = weights.dequantize(bank, rounding, tensors, whole).contiguous()
        assert torch.equal(out.view(torch.int32), wanted.view(torch.int32))


@pytest.mark.parametrize("dialect", ["awq-gemm", "ct-nvfp4"])
@pytest.mark.parametrize("dtype", BOUND)
def test_a_token_has_the_same_bits_alone_and_in_a_batch(
    tmp_path: Path, isa: int, dialect: str, dtype: torch.dtype
) -> None:
    layer = layer_of(tmp_path, dialect, "compact")
    x, ids, w = step(11, 256, dtype)
    together = layer(x, ids, w)
    alone = [layer(x[t : t + 1], ids[t : t + 1], w[t : t + 1]) for t in range(11)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("dtype", BOUND)
def test_values_far_apart_in_one_group_hold_the_bound(
    tmp_path: Path, isa: int, dtype: torch.dtype
) -> None:
    layer = layer_of(tmp_path, "awq-gemm", "compact")
    x, ids, w = step(3, 256, dtype)
    x *= 0.01
    x[:, ::37] *= 500  # activations of real models have such columns
    ids[:] = torch.tensor([1, 4, 5])
    wanted = in_fp64(layer, x, ids, w)
    for row in range(3):
        y = layer(x[row : row + 1], ids[row : row + 1], w[row : row + 1])
        assert (y.double() - wanted[row]).norm() <= BOUND[dtype] * wanted[row].norm(), row


def test_an_activation_that_is_no_number_shows(tmp_path: Path, isa: int) -> None:
    layer = layer_of(tmp_path, "awq-gemm", "compact")
    x, ids, w = step(2, 256, torch.float32)
    ids[:] = torch.tensor([0, 1, 2])
    x[0, 17] = float("nan")
    y = layer(x, ids, w)
    assert y[0].isnan().all() and y[1].isfinite().all()


def test_legacy_equals_the_reference(tmp_path: Path) -> None:
    layer = layer_of(tmp_path, "awq-gemm", "compact")
    x, ids, w = step(100, 256, torch.float32)
    mine = layer(x, ids, w)
    wanted = torch.empty_like(x)
    scratch = torch.empty(1 << 20)
    routes.moe(
        wanted,
        scratch,
        x,
        ids,
        w,
        layer.workspace.expert_map,
        layer.banks(),
        layer.spec.to_ints(),
        [0, 0],
    )
    assert torch.equal(mine, wanted)


def test_a_step_allocates_nothing(tmp_path: Path) -> None:
    layer = layer_of(tmp_path, "awq-gemm", "compact")
    for tokens in (1, 8):
        x, ids, w = step(tokens, 256, torch.bfloat16, top_k=2)
        out = torch.empty_like(x)
        layer(x, ids, w, out=out)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            for _ in range(100):
                layer(x, ids, w, out=out)
        taken = [e.name for e in profile.events() if e.cpu_memory_usage > 0]
        assert not taken


def test_a_wider_top_k_than_planned_still_runs(tmp_path: Path) -> None:
    layer = layer_of(tmp_path, "ct-nvfp4", "compact")
    x, ids, w = step(8, 256, torch.float32, top_k=300)
    wanted = in_fp64(layer, x, ids, w)
    error = (layer(x, ids, w).double() - wanted).norm() / wanted.norm()
    assert error <= BOUND[torch.float32]


def test_scratch_that_is_too_small_is_refused(tmp_path: Path) -> None:
    assert CORE is not None
    layer = layer_of(tmp_path, "awq-gemm", "compact")
    x, ids, w = step(2, 256, torch.float32)
    call = (x, ids, w, layer.workspace.expert_map, layer.banks(), layer.spec.to_ints())
    needed = CORE.moe_scratch_bytes(layer.spec.to_ints(), 2, 3)
    CORE.moe(torch.empty_like(x), torch.empty(needed // 4), *call)
    with pytest.raises(ValueError, match="scratch is smaller"):
        CORE.moe(torch.empty_like(x), torch.empty(needed // 4 - 1), *call)


def test_strided_inputs_and_outputs(tmp_path: Path) -> None:
    layer = layer_of(tmp_path, "awq-gemm", "compact")
    x, ids, w = step(4, 256, torch.float32)
    wanted = layer(x, ids, w)
    wide = torch.zeros((4, 512))
    spread = torch.zeros((4, 512))
    spread[:, ::2] = x
    columns = torch.stack((ids, ids), dim=2)[:, :, 0]
    layer(spread[:, ::2], columns, w.t().contiguous().t(), out=wide[:, ::2])
    assert torch.equal(wide[:, ::2], wanted)
    assert not wide[:, 1::2].any()


def test_the_reference_can_serve_instead(tmp_path: Path) -> None:
    with native.serving(native.REFERENCE):
        layer = layer_of(tmp_path, "awq-gemm", "compact")
        assert {route.implementation for route in layer.routes} == {"reference"}
        x, ids, w = step(2, 256, torch.float32)
        by_reference = layer(x, ids, w)
    assert torch.allclose(layer(x, ids, w), by_reference, rtol=1e-4, atol=1e-5)

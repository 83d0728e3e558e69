"""Linears on a card: loaded bit for bit, products within tolerance, captured, refused in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from card import CARD, needs_card
from cuda_layers import BOUND, error_of, layer_on, moe64, step, weights_of
from cuda_layers import run as run_layer

from loader import Policy, native
from loader.bank import ABSENT, BankSpec, LayerSpec, pack_codes, pack_zeros
from loader.checkpoint.folder import open_checkpoint
from loader.checkpoint.linears import find_linears
from loader.checkpoint.source import LocalSource
from loader.cuda_routes import FAMILIES
from loader.errors import LoaderError, UnsupportedError
from loader.linears import LinearLoader, LinearPlan, PreparedLinear, plan_linear
from loader.linears.plan import BANK
from loader.pieces import Places, Slice
from loader.route import decide
from loader.testing.checkpoint import tiny_checkpoint

pytestmark = needs_card()

DIALECTS = ("awq-gemm", "ct-int4-asym", "ct-nvfp4", "modelopt-nvfp4")
CPU = torch.device("cpu")
TOKENS = (*range(1, 10), 16, 64, 300)


@contextmanager
def opened(
    folder: Path, device: torch.device, policy: Policy, dtype: torch.dtype
) -> Iterator[tuple[LinearLoader, list[LinearPlan]]]:
    code = native.implementation_for(device)
    assert code is not None
    with LocalSource(folder) as source:
        checkpoint = open_checkpoint(source)
        places = Places(checkpoint.catalog.file, checkpoint.catalog.begin)
        plans = [
            plan_linear(one, policy.resolve(), code, places, dtype)
            for one in find_linears(checkpoint).values()
        ]
        with LinearLoader(checkpoint, plans, device, code, policy.resolve(), 4 << 20) as loader:
            yield loader, plans


def run(
    module: PreparedLinear, x: torch.Tensor, routes: tuple[int, ...], bias: Any = None
) -> torch.Tensor:
    """The operator itself, on a poisoned output."""
    out = torch.full((len(x), module.out_features), float("nan"), dtype=x.dtype, device=CARD)
    scratch = module._scratch[0].fill_(float("nan"))
    native.linear(out, scratch, x, bias, module.banks(), module._spec_ints, list(routes))
    return out


@pytest.mark.parametrize("layout", ("compact", "wide", "record"))
@pytest.mark.parametrize("dialect", DIALECTS)
def test_linears_of_every_format_and_layout(tmp_path: Path, dialect: str, layout: str) -> None:
    nvfp4 = "nvfp4" in dialect
    if layout == "record" and nvfp4:
        pytest.skip("NVFP4 has no record layout")
    tiny_checkpoint(
        tmp_path, dialect=dialect, hidden=256, intermediate=128, experts=2, layers=1,
        **({} if nvfp4 else {"group": 64}),
    )  # fmt: skip
    roundings = ("exact",) if nvfp4 else ("exact", "fused_bias")
    for rounding in roundings:
        policy = Policy(layout=layout, awq_rounding=rounding)
        with opened(tmp_path, CPU, policy, torch.float16) as (host, plans):
            banks = [host.bank(plan).banks() for plan in plans]
            weights = [host.dequantize(plan, torch.float32) for plan in plans]
            assert plans
        with opened(tmp_path, CARD, policy, torch.float16) as (card, plans):
            for plan, own, weight in zip(plans, banks, weights, strict=True):
                assert plan.served == "bank" and plan.routes[0].implementation.startswith("cuda")
                module = card.bank(plan)
                for a, b in zip(module.banks(), own, strict=True):
                    assert torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8))
                assert torch.equal(card.dequantize(plan, torch.float32).cpu(), weight)
                products_hold(module, weight.to(CARD).double(), (1, 3, 8, 20))


def products_hold(
    module: PreparedLinear, weight: torch.Tensor, counts: tuple[int, ...], bias: Any = None
) -> None:
    for dtype, tokens in product(BOUND, counts):
        random = torch.Generator(CARD).manual_seed(tokens)
        x = torch.randn(tokens, weight.shape[1], generator=random, device=CARD).to(dtype)
        wanted = x.double() @ weight.t() + (0 if bias is None else bias.double())
        for routes in ((1, 64, 1), (1, 64, 2), (1, 64), (0, 0)):
            if dtype == torch.bfloat16 and FAMILIES[routes[2] if len(routes) > 2 else 0] == (
                "quadpair"
            ):
                continue
            y = run(module, x, routes, bias).double()
            # A fast route rounds before the bias is added, which may cancel what it was.
            size = max(wanted.norm(), (x.double() @ weight.t()).norm())
            error = float((y - wanted).norm() / size)
            assert error <= BOUND[dtype], f"T={tokens} {dtype} {routes}: {error:.2e}"


def linear_of(n: int, k: int, group: int, phase: int) -> tuple[PreparedLinear, torch.Tensor]:
    """A linear of random int4 numbers on the card, and its weight fp64."""
    random = torch.Generator().manual_seed(n)
    bank = BankSpec("int4", "compact", 1, k, n, group, phase, 1, torch.float16)
    codes = torch.randint(0, 16, (k, n), generator=random, dtype=torch.uint8)
    scales = (torch.rand(bank.groups, n, generator=random) / 50 + 0.005).half()
    zeros = torch.randint(0, 16, (bank.groups, n), generator=random, dtype=torch.uint8)
    pad = bank.n_padded - n
    planes = [torch.nn.functional.pad(one, (0, pad)) for one in (scales, zeros)]
    tensors = [pack_codes(codes)[None], planes[0][None], pack_zeros(planes[1])[None]]
    of_row = (torch.arange(k) + phase) // group
    weight = (codes.double() - zeros.double()[of_row]) * scales.double()[of_row]
    code = native.implementation_for(CARD)
    assert code is not None and code.linear_scratch_bytes is not None
    routes = decide(0, LayerSpec(bank, bank), code, Policy(grouped_max_tokens=8).resolve(), "")
    source: Any = SimpleNamespace(
        name="a linear", source=SimpleNamespace(layer=0), scheme=SimpleNamespace(format="int4")
    )
    places: Any = None
    part = Slice((0,), 0, k, (0, n))
    plan = LinearPlan(source, part, bank, BANK, "", routes, "exact", places)
    nbytes = code.linear_scratch_bytes(LayerSpec(ABSENT, bank).to_ints(), 8)
    scratch = torch.empty(nbytes // 4, device=CARD)
    own = [tensor.contiguous().to(CARD) for tensor in tensors]
    return PreparedLinear(plan, own, None, scratch), weight.t().to(CARD)


@pytest.mark.parametrize(
    ("n", "k", "group", "phase"),
    [
        (1000, 4096, 128, 0),
        (4096, 1416, 32, 16),
        (34, 104, 32, 0),
        (2, 16, 16, 0),
        (6144, 64, 64, 0),
        (64, 16384, 128, 0),  # more rows than can be staged
    ],
)
def test_products_at_every_token_count(n: int, k: int, group: int, phase: int) -> None:
    module, weight = linear_of(n, k, group, phase)
    products_hold(module, weight, TOKENS)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        products_hold(module, weight, (1, 5, 70), torch.randn(n, device=CARD).to(dtype))


@pytest.fixture(scope="module")
def module() -> PreparedLinear:
    return linear_of(512, 1024, 64, 0)[0]


def test_no_token(module: PreparedLinear) -> None:
    assert module(torch.empty((0, 1024), dtype=torch.float16, device=CARD)).shape == (0, 512)


@pytest.mark.parametrize(("tokens", "routes"), [(1, (1, 8)), (8, (1, 8)), (12, (1, 8))])
def test_a_captured_linear_replays_with_other_inputs(
    module: PreparedLinear, tokens: int, routes: tuple[int, int]
) -> None:
    x = torch.randn(tokens, 1024, device=CARD).half()
    out, scratch = torch.empty((tokens, 512), dtype=x.dtype, device=CARD), module._scratch[0]
    call = (module.banks(), module._spec_ints, list(routes))
    native.linear(out, scratch, x, None, *call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        native.linear(out, scratch, x, None, *call)
    for _ in range(2):
        x.copy_(torch.randn(tokens, 1024, device=CARD).half())
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, run(module, x, routes))


def test_a_fast_step_allocates_nothing(module: PreparedLinear) -> None:
    x = torch.randn(4, 1024, device=CARD).bfloat16()
    bias = torch.randn(512, device=CARD).half()
    out = torch.empty((4, 512), dtype=x.dtype, device=CARD)
    call = (bias, module.banks(), module._spec_ints, [1, 8])
    native.linear(out, module._scratch[0], x, *call)
    before = torch.cuda.memory_stats(CARD)["allocation.all.allocated"]
    for _ in range(100):
        native.linear(out, module._scratch[0], x, *call)
    assert torch.cuda.memory_stats(CARD)["allocation.all.allocated"] == before


@pytest.mark.parametrize("family", range(1, len(FAMILIES)))
def test_a_small_launch_leaves_a_layer_its_shared_memory(tmp_path: Path, family: int) -> None:
    # Both run the same kernel; what a launch may ask for is set for the kernel, not for the launch.
    layer = layer_on(CARD, tmp_path, "awq-gemm", "compact", "exact", 1)
    weights = weights_of(layer_on("cpu", tmp_path, "awq-gemm", "compact", "exact", 1))
    small, _ = linear_of(256, 256, 64, 0)
    x, ids, router = step(64, torch.float16)
    wanted = moe64(weights, x, ids, router)
    for _ in range(2):
        run(small, torch.randn(1, 256, device=CARD).half(), (1, 8, family))
        assert error_of(run_layer(layer, x, ids, router, (1, 64, family)), wanted) <= 1e-3


def bad_inputs() -> dict[str, dict[str, Callable[[Any], Any]]]:
    return {
        "the shape of x": {"x": lambda x: x[:, :-8].contiguous()},
        "the dtype of x": {"x": lambda x: x.double()},
        "the strides of x": {"x": lambda x: x.t().contiguous().t()},
        "the address of x": {
            "x": lambda x: torch.empty(x.numel() + 1, dtype=x.dtype, device=CARD)[1:].view_as(x)
        },
        "the shape of out": {"out": lambda out: out[:, :-2].contiguous()},
        "the dtype of out": {"out": lambda out: out.bfloat16()},
        "the device of out": {"out": lambda out: out.cpu()},
        "the device of bias": {"bias": lambda bias: bias.cpu()},
        "the shape of bias": {"bias": lambda bias: bias[:-1]},
        "the dtype of bias": {"bias": lambda bias: bias.int()},
        "the dtype of scratch": {"scratch": lambda scratch: scratch.half()},
        "the scratch": {"scratch": lambda scratch: scratch[:16]},
        "the banks": {"banks": lambda banks: banks[:2]},
        "a bank": {"banks": lambda banks: [*banks[:2], banks[2].cpu()]},
    }


@pytest.mark.parametrize("what", bad_inputs())
@pytest.mark.parametrize("routes", ([1, 8], [0, 0]), ids=("fast", "dequantized"))
def test_bad_input_is_refused_before_any_launch(
    module: PreparedLinear, what: str, routes: list[int]
) -> None:
    given: dict[str, Any] = {
        "x": torch.randn(4, 1024, device=CARD).half(),
        "out": torch.full((4, 512), 7.0, dtype=torch.float16, device=CARD),
        "bias": torch.randn(512, device=CARD),
        "scratch": torch.full_like(module._scratch[0], 5.0),
        "banks": module.banks(),
    }
    untouched = given["out"], given["scratch"]
    for name, change in bad_inputs()[what].items():
        given[name] = change(given[name])
    with pytest.raises(LoaderError, match=f"{what} does not match the linear"):
        native.linear(
            given["out"], given["scratch"], given["x"], given["bias"], given["banks"],
            module._spec_ints, routes,
        )  # fmt: skip
    assert (untouched[0] == 7.0).all() and (untouched[1] == 5.0).all()


def test_an_output_over_an_input_is_refused() -> None:
    square, _ = linear_of(256, 256, 64, 0)
    x = torch.randn(4, 256, device=CARD).half()
    call = (square.banks(), square._spec_ints, [1, 8])
    with pytest.raises(LoaderError, match="apart from x"):
        native.linear(x, square._scratch[0], x, None, *call)
    over = square._scratch[0].view(torch.float16)[: 4 * 256].view(4, 256)
    with pytest.raises(LoaderError, match="apart from scratch"):
        native.linear(over, square._scratch[0], x, None, *call)


def test_families_and_dtypes_that_cannot_be(module: PreparedLinear) -> None:
    x = torch.randn(2, 1024, device=CARD)
    with pytest.raises(ValueError, match="fp16"):
        run(module, x.bfloat16(), (1, 8, 1))
    with pytest.raises(UnsupportedError, match="this dtype"):
        run(module, x, (1, 8))
    assert run(module, x, (0, 0)).isfinite().all()


def test_native_code_refuses_what_is_no_linear(module: PreparedLinear) -> None:
    x = torch.randn(2, 1024, device=CARD).half()
    spec = module._spec_ints
    with pytest.raises(LoaderError, match="absent"):
        out = torch.empty((2, 512), dtype=x.dtype, device=CARD)
        numbers = [spec[0], *spec[11:], *spec[11:]]
        native.linear(out, module._scratch[0], x, None, module.banks(), numbers, [1, 8])
    with pytest.raises(ValueError, match="number of tokens"):
        run(module, x.repeat(600, 1), (1, 4096))


def test_opcheck_and_compile(module: PreparedLinear) -> None:
    x = torch.randn(4, 1024, device=CARD).bfloat16()
    out = torch.empty((4, 512), dtype=x.dtype, device=CARD)
    call = (out, module._scratch[0], x, None, module.banks(), module._spec_ints, [1, 8])
    torch.library.opcheck(torch.ops.qpn.linear.default, call)
    compiled = torch.compile(module, fullgraph=True)
    assert torch.equal(compiled(x), module(x))

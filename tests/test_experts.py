"""Prepared experts as a module: frozen, immovable, called and compiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from bank_oracle import small
from moe_oracle import (
    LAYERS,
    activations,
    assert_close,
    call,
    make,
    moe64,
    routing,
    snapshot,
    weights_of,
)

import loader
from loader import native
from loader.errors import LifecycleError, LoaderError
from loader.experts import PreparedExperts
from loader.testing.checkpoint import tiny_checkpoint


@pytest.fixture(params=LAYERS)
def module(request: pytest.FixtureRequest, tmp_path: Path) -> PreparedExperts:
    return make(tmp_path, request.param)


@pytest.fixture
def awq(tmp_path: Path) -> PreparedExperts:
    return make(tmp_path / "awq")


# Casts and moves.

CASTS: list[Callable[[torch.nn.Module], Any]] = [
    lambda m: m.half(),
    lambda m: m.bfloat16(),
    lambda m: m.float(),
    lambda m: m.double(),
    lambda m: m.to(torch.float16),
    lambda m: m.to(dtype=torch.bfloat16),
    lambda m: m.to("cpu", torch.float32),
    lambda m: m.type(torch.float64),
    lambda m: m.to(memory_format=torch.channels_last),
    lambda m: m.cpu(),
    lambda m: m.requires_grad_(False).eval(),
    lambda m: m.to_empty(device="cpu"),
]


@pytest.mark.parametrize("cast", CASTS)
def test_casts_change_no_bank_and_no_output(
    module: PreparedExperts, cast: Callable[[torch.nn.Module], Any]
) -> None:
    before, wanted = snapshot(module), call(module)
    cast(module)
    assert snapshot(module) == before
    assert torch.equal(call(module), wanted)


@pytest.mark.parametrize("cast", CASTS[:4])
def test_casts_of_a_parent_pass_the_banks_by(
    module: PreparedExperts, cast: Callable[[torch.nn.Module], Any]
) -> None:
    parent = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ModuleDict({"moe": module}))
    before = snapshot(module)
    dtype = cast(torch.nn.Linear(2, 2)).weight.dtype
    cast(parent)
    assert snapshot(module) == before
    assert parent[0].weight.dtype == dtype


@pytest.mark.parametrize("parent", [False, True])
def test_a_device_move_raises(module: PreparedExperts, parent: bool) -> None:
    before, wanted = snapshot(module), call(module)
    outer = torch.nn.ModuleList([module]) if parent else module
    with pytest.raises(LifecycleError) as caught:
        outer.to("meta")
    assert str(caught.value) == (
        "prepared experts do not move between devices; layer 0; expected another load with "
        "device='meta', found banks on cpu"
    )
    assert snapshot(module) == before and torch.equal(call(module), wanted)


# Frozen.


def test_what_was_decided_does_not_change(module: PreparedExperts) -> None:
    frozen = {
        "layer": 1,
        "format": "x",
        "spec": None,
        "expert_ids": (1,),
        "shard": loader.Shard(),
        "policy": loader.Policy(),
        "routes": (),
        "hidden_size": 1,
        "intermediate_size": 1,
        "metadata_layout": "wide",
        "awq_rounding": "fused_bias",
        "workspace": None,
    }
    for name, value in frozen.items():
        before = getattr(module, name)
        with pytest.raises(LifecycleError, match=f"{name} was decided when the layer was loaded"):
            setattr(module, name, value)
        assert getattr(module, name) is before or getattr(module, name) == before
    with pytest.raises(AttributeError):
        module.policy.policy.qpn_m1 = "off"  # type: ignore[misc]  # wrong on purpose
    with pytest.raises(AttributeError):
        module.routes[0].route = "legacy"  # type: ignore[misc]  # wrong on purpose


def test_the_environment_counts_at_load_only(
    awq: PreparedExperts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    routes, wanted = awq.routes, call(awq)
    monkeypatch.setenv("QPN_M1", "0")
    monkeypatch.setenv("QPN_GROUPED", "nonsense")
    assert awq.routes == routes and torch.equal(call(awq), wanted)


# Calls.


def test_out_takes_the_result(module: PreparedExperts) -> None:
    for tokens in (1, 3, 12):
        wanted = call(module, tokens)
        out = torch.full_like(wanted, float("nan"))
        assert call(module, tokens, out=out) is out and torch.equal(out, wanted)
        wide = torch.full((tokens, 300), 7.0, dtype=torch.bfloat16)
        part = wide[:, 20 : 20 + module.hidden_size]
        call(module, tokens, out=part)
        assert torch.equal(part, wanted)
        assert (wide[:, :20] == 7).all() and (wide[:, 20 + module.hidden_size :] == 7).all()


def refused(module: PreparedExperts, *inputs: Any, **more: Any) -> str:
    with pytest.raises(LoaderError) as caught:
        module(*inputs, **more)
    assert caught.value.layer == 0
    return f"{caught.value.what}: expected {caught.value.expected}, found {caught.value.found}"


def test_inputs_that_do_not_match_are_refused(awq: PreparedExperts) -> None:
    x, (ids, router) = activations(3, 128, torch.float16), routing(3, 4, 2)
    table = {
        "hidden_states": [(x[0], ids, router), (x[:, :96], ids, router), (x.double(), ids, router)],
        "topk_ids": [(x, ids[:2], router), (x, ids.float(), router), (x, ids[:, 0], router)],
        "topk_weights": [(x, ids, router[:, :1]), (x, ids, ids)],
    }
    table["hidden_states"].append((x.to("meta"), ids, router))
    table["topk_ids"].append((x, ids.to("meta"), router))
    table["topk_weights"].append((x, ids, router.to("meta")))
    for name, calls in table.items():
        for inputs in calls:
            assert refused(awq, *inputs).startswith(f"{name} does not match the layer: expected ")
    assert refused(awq, x[:, :96], ids, router).endswith("expected (T, 128), found (3, 96)")


@pytest.mark.filterwarnings("ignore:.*(prototype|beta|[Ss]parse).*")
def test_inputs_that_are_no_dense_tensors_are_refused(awq: PreparedExperts) -> None:
    x, (ids, router) = activations(3, 128, torch.float32), routing(3, 4, 2)
    inputs = {"hidden_states": x, "topk_ids": ids, "topk_weights": router}
    for name, tensor in inputs.items():
        for other, found in (
            (None, "NoneType"),
            (tensor.tolist(), "list"),
            (tensor.to_sparse(), "torch.sparse_coo"),
            (tensor.to_sparse_csr(), "torch.sparse_csr"),
            (torch.nested.nested_tensor([tensor[0], tensor[1]]), "nested"),
        ):
            message = refused(awq, *{**inputs, name: other}.values())
            assert message.startswith(f"{name} does not match the layer: expected a ")
            assert message.endswith(f"found {found}")
    for other in (x.to_sparse(), "out"):
        assert refused(awq, x, ids, router, out=other).startswith("out does not match the layer")


def test_router_weights_of_every_float_dtype_are_taken(module: PreparedExperts) -> None:
    exact = torch.tensor([[0.5, 2.0]])  # every float format holds them
    for tokens in (1, 3, 12):
        x = activations(tokens, module.hidden_size, torch.bfloat16)
        ids, _ = routing(tokens, 4, 2)
        wanted = module(x, ids, exact.expand(tokens, 2))
        for dtype in [d for d in vars(torch).values() if isinstance(d, torch.dtype)]:
            if dtype.is_floating_point and dtype.itemsize > 1 or "float8" in str(dtype):
                router = exact.to(dtype).expand(tokens, 2)
                assert torch.equal(module(x, ids, router), wanted), dtype
    packed = torch.zeros(1, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert "a floating dtype" in refused(module, x[:1], ids[:1], packed)


def test_out_that_does_not_match_is_refused(awq: PreparedExperts) -> None:
    x, (ids, router) = activations(3, 128, torch.float32), routing(3, 4, 2)
    memory = torch.zeros(4, 128)
    memory[:3] = x
    shared = memory[:3]
    for inputs, out in (
        ((x, ids, router), torch.empty(3, 128, dtype=torch.float16)),
        ((x, ids, router), torch.empty(2, 128)),
        ((x, ids, router), torch.empty(128, 3).flatten()),
        ((x, ids, router), torch.empty(3, 128, device="meta")),
        ((x, ids, router), torch.empty(1, 128).expand(3, 128)),
        ((x, ids, router), x),
        ((shared, ids, router), memory[1:]),
        ((x, ids, memory[0, :6].view(3, 2)), memory[:3]),
    ):
        before = [t.clone() for t in inputs]
        assert refused(awq, *inputs, out=out).startswith("out does not match the layer")
        assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    awq(shared[:1], ids[:1], router[:1], out=memory[3:])  # neighbours do not overlap


@pytest.mark.parametrize("strides", [(0, 1), (1, 1), (2, 1), (127, 1), (1, 0), (1, 2), (64, 2)])
def test_out_whose_elements_share_a_place_is_refused(
    awq: PreparedExperts, strides: tuple[int, int]
) -> None:
    x, (ids, router) = activations(3, 128, torch.float32), routing(3, 4, 2)
    out = torch.zeros(1024).as_strided((3, 128), strides)
    assert "a place for every number" in refused(awq, x, ids, router, out=out)
    wanted = awq(x, ids, router)
    for apart in ((128, 1), (200, 1), (1, 3), (256, 2), (1, 7)):
        out = torch.zeros(1024).as_strided((3, 128), apart)
        assert torch.equal(awq(x, ids, router, out=out), wanted)
    one = torch.zeros(1, 128).as_strided((1, 128), (0, 1))  # a single row: its stride says nothing
    assert torch.equal(awq(x[:1], ids[:1], router[:1], out=one), awq(x[:1], ids[:1], router[:1]))


def test_out_over_banks_or_workspace_is_refused(module: PreparedExperts) -> None:
    wanted, before = call(module), snapshot(module)
    x = activations(1, module.hidden_size, torch.bfloat16)
    ids, router = routing(1, 4, 2)
    tried = 0
    for own in (*module.banks(), *module.workspace.tensors()):
        bytes_of = own.view(torch.uint8).flatten()
        if len(bytes_of) >= 2 * x.numel():
            out = bytes_of[: 2 * x.numel()].view(torch.bfloat16).view(x.shape)
            assert "banks and workspace" in refused(module, x, ids, router, out=out)
            tried += 1
    assert tried >= 3
    assert snapshot(module) == before and torch.equal(call(module), wanted)


def test_dequantize_of_an_absent_expert_names_the_range(tmp_path: Path) -> None:
    checkpoint = small(tmp_path, experts=6)
    for shard, held in (
        (loader.Shard(ep_rank=1, ep_size=2), "3 to 5"),
        (loader.Shard(expert_ids=(5, 0, 2)), "5, 0, 2"),
    ):
        module = loader.load(checkpoint.folder, shard=shard)[0]
        for expert in (1, -1, 6):
            with pytest.raises(LoaderError) as caught:
                module.dequantize(expert)
            assert str(caught.value) == (
                f"expert {expert} is not on this card; layer 0; "
                f"expected one of {held}, found {expert}"
            )
        assert module.dequantize(5)["down"].shape == (128, 192)


def test_it_says_what_it_is(awq: PreparedExperts) -> None:
    assert repr(awq) == (
        "PreparedExperts(layer=0, format=awq-gemm, layout=compact, experts=4, H=128, I=192, "
        "group=32, phase=0)"
    )
    assert (awq.hidden_size, awq.intermediate_size, awq.awq_rounding) == (128, 192, "exact")


# Modes and compilers.


def test_a_load_in_inference_mode_serves_outside_of_it(tmp_path: Path) -> None:
    with torch.inference_mode():
        module = make(tmp_path)
    assert not any(t.is_inference() for t in (*module.banks(), *module.workspace.tensors()))
    wanted = call(module, 12)
    module.load_state_dict(module.state_dict())
    with torch.inference_mode():
        assert torch.equal(call(module, 12), wanted)


@pytest.mark.parametrize("backend, dynamic", [("inductor", None), ("aot_eager", True)])
@pytest.mark.parametrize("name", ["awq-compact", "ct-nvfp4-compact"])
def test_it_compiles_as_one_graph(
    name: str, backend: str, dynamic: bool | None, tmp_path: Path
) -> None:
    module = make(tmp_path, name)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend=backend, dynamic=dynamic)
    for tokens in (1, 2, 5, 9, 20, 300):
        x = activations(tokens, 128, torch.float16)
        ids, router = routing(tokens, 4, 2)
        wanted = module(x, ids, router)
        assert torch.equal(compiled(x, ids, router), wanted), tokens
        out = torch.empty_like(x)
        compiled(x, ids.int(), router, out=out)
        assert torch.equal(out, wanted), tokens


class Block(torch.nn.Module):
    """A layer around the experts, as serving code has it."""

    def __init__(self, experts: PreparedExperts) -> None:
        super().__init__()
        self.experts = experts
        self.gate = torch.nn.Linear(128, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        router, ids = torch.softmax(self.gate(x).float(), -1).topk(2, -1)
        y: torch.Tensor = x + self.experts(x, ids, router / router.sum(-1, keepdim=True))
        return y


def test_a_block_around_it_compiles_with_any_token_count(tmp_path: Path) -> None:
    checkpoint = small(tmp_path)
    block = Block(loader.load(checkpoint.folder)[0])
    weights = {expert: weights_of(checkpoint, expert) for expert in range(4)}
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, backend=counter, dynamic=True)
    with torch.no_grad():
        for tokens in (5, 7, 3, 33):
            x = activations(tokens, 128, torch.float32)
            router, ids = torch.softmax(block.gate(x), -1).topk(2, -1)
            wanted = moe64(weights, x, ids, router / router.sum(-1, keepdim=True))
            assert_close(compiled(x) - x, wanted, torch.float32)
    assert counter.frame_count == 1, "one graph serves every token count"


def test_no_gradient_is_recorded(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, hidden=128, intermediate=128, experts=2, layers=1)
    for implementation in (native.REFERENCE, native.HOST or native.REFERENCE):
        with native.serving(implementation):
            layer = loader.load(tmp_path)[0]
            x = torch.randn(2, 128, requires_grad=True)
            y = layer(x, torch.tensor([[0, 1], [1, 0]]), torch.ones(2, 2))
        assert not y.requires_grad

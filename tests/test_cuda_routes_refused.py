"""What the routes on a card refuse, before any launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from card import CARD, needs_card
from cuda_layers import layer_on, run, step

from loader import native
from loader.errors import LoaderError, UnsupportedError
from loader.experts import PreparedExperts

pytestmark = needs_card()


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> PreparedExperts:
    return layer_on(CARD, tmp_path_factory.mktemp("layer"), "awq-gemm", "compact", "exact", 1)


def off_boundary(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape one element past a boundary of 16 bytes, poisoned."""
    room = torch.full((tensor.numel() + 1,), 7.0, dtype=tensor.dtype, device=CARD)
    return room[1:].view_as(tensor)


def bad_inputs() -> dict[str, dict[str, Callable[[Any], Any]]]:
    return {
        "the shape of x": {"x": lambda x: x[:, :-8].contiguous()},
        "the dtype of x": {"x": lambda x: x.double()},
        "the strides of x": {"x": lambda x: x.t().contiguous().t()},
        "the address of x": {"x": off_boundary},
        "the shape of out": {"out": lambda out: out[:-1]},
        "the dtype of out": {"out": lambda out: out.bfloat16()},
        "the device of out": {"out": lambda out: out.cpu()},
        "the strides of out": {"out": lambda out: out.t().contiguous().t()},
        "the address of out": {"out": off_boundary},
        "the dtype of topk_ids": {"ids": lambda ids: ids.short()},
        "the shape of topk_ids": {
            "ids": lambda ids: ids[:, 0].contiguous(),
            "weights": lambda weights: weights[:, 0].contiguous(),
        },
        "the device of topk_ids": {"ids": lambda ids: ids.cpu()},
        "the strides of topk_ids": {"ids": lambda ids: ids.t().contiguous().t()},
        "the device of topk_weights": {"weights": lambda weights: weights.cpu()},
        "the dtype of topk_weights": {"weights": lambda weights: weights.int()},
        "the shape of topk_weights": {"weights": lambda weights: weights[:, :-1].contiguous()},
        "the dtype of expert_map": {"expert_map": lambda table: table.long()},
        "the shape of expert_map": {"expert_map": lambda table: table[None]},
        "the device of expert_map": {"expert_map": lambda table: table.cpu()},
        "the dtype of scratch": {"scratch": lambda scratch: scratch.half()},
        "the address of scratch": {"scratch": lambda scratch: scratch[1:]},
        "the banks": {"banks": lambda banks: [banks[0][:-1], *banks[1:]]},
        "a bank": {"banks": lambda banks: [*banks[:-1], banks[-1].cpu()]},
    }


def call(layer: PreparedExperts, given: dict[str, Any], routes: list[int]) -> None:
    """The operator, with every argument as it was given."""
    native.moe(
        given["out"], given["scratch"], given["x"], given["ids"], given["weights"],
        given["expert_map"], given["banks"], layer.spec.to_ints(), routes,
    )  # fmt: skip


def good_inputs(layer: PreparedExperts) -> dict[str, Any]:
    x, ids, weights = step(4, torch.float16)
    return {
        "x": x,
        "ids": ids,
        "weights": weights,
        "out": torch.full_like(x, 7.0),
        "scratch": layer.workspace.scratch.fill_(5.0),
        "expert_map": layer.workspace.expert_map,
        "banks": layer.banks(),
    }


@pytest.mark.parametrize("routes", ([1, 64], [0, 0]), ids=("fast", "legacy"))
@pytest.mark.parametrize("what", bad_inputs())
def test_bad_input_is_refused_before_any_launch(
    layer: PreparedExperts, what: str, routes: list[int]
) -> None:
    given = good_inputs(layer)
    untouched = given["out"], given["scratch"]
    for name, change in bad_inputs()[what].items():
        given[name] = change(given[name])
    with pytest.raises(LoaderError, match=f"{what} does not match the layer"):
        call(layer, given, routes)
    assert (untouched[0] == 7.0).all() and (given["out"] == 7.0).all()
    assert (untouched[1] == 5.0).all()


@pytest.mark.parametrize("name", ("x", "topk_ids", "topk_weights", "expert_map", "scratch"))
@pytest.mark.parametrize("routes", ([1, 64], [0, 0]), ids=("fast", "legacy"))
def test_an_output_over_an_input_is_refused(
    layer: PreparedExperts, name: str, routes: list[int]
) -> None:
    given = good_inputs(layer)
    room = torch.zeros(1 << 16, dtype=torch.uint8, device=CARD)
    given["out"] = room[: given["x"].nbytes].view(torch.float16).view_as(given["x"])
    key = {"topk_ids": "ids", "topk_weights": "weights"}.get(name, name)
    nbytes = given[key].nbytes if name != "scratch" else room.numel() - 1024
    over = room[1024 if name != "x" else 0 :][:nbytes].view(given[key].dtype)
    given[key] = over if name == "scratch" else over.view_as(given[key])
    with pytest.raises(LoaderError, match=f"expected memory apart from {name}"):
        call(layer, given, routes)
    assert not room.any()


def test_quadpairs_take_fp16_alone_and_fast_routes_no_fp32(layer: PreparedExperts) -> None:
    x, ids, weights = step(2, torch.bfloat16)
    with pytest.raises(ValueError, match="fp16"):
        run(layer, x, ids, weights, (1, 64, 1))
    with pytest.raises(UnsupportedError):
        run(layer, x.float(), ids, weights, (1, 64))

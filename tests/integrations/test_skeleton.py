"""Models that prepared experts have no seat in, and places that are not filled yet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loader import CheckpointError, LifecycleError, UnsupportedError
from loader.integrations.transformers.skeleton import Awaited, seat_experts

pytest.importorskip("transformers")


class Experts(torch.nn.Module):
    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        return hidden_states


def test_a_place_that_is_not_filled_yet_does_not_run() -> None:
    with pytest.raises(LifecycleError, match="not loaded yet"):
        Awaited()(torch.zeros(1, 4))


@pytest.mark.parametrize("paths", [["experts"], ["layers.0.one", "layers.0.two"]])
def test_experts_that_do_not_belong_to_one_layer_each(paths: list[str]) -> None:
    model = torch.nn.Module()
    for path in paths:
        at = model
        *parents, leaf = path.split(".")
        for name in parents:
            if name not in at._modules:
                at.add_module(name, torch.nn.Module())
            at = at.get_submodule(name)
        at.add_module(leaf, Experts())
    with pytest.raises(UnsupportedError, match="do not belong to one layer each"):
        seat_experts(model, {})


@pytest.mark.parametrize("own", [(4, 8, 5), (3, 9, 5), (3, 8, 6)])
def test_experts_of_another_size_than_those_of_the_checkpoint(own: tuple[int, int, int]) -> None:
    experts = Experts()
    experts.gate_up_proj = torch.nn.Parameter(torch.zeros(3, 10, 8))
    experts.down_proj = torch.nn.Parameter(torch.zeros(3, 8, 5))
    experts.act_fn = torch.nn.SiLU()
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([experts])})
    sizes = dict(zip(("experts", "hidden", "intermediate"), own, strict=True))
    plan: Any = SimpleNamespace(source=SimpleNamespace(**sizes))
    with pytest.raises(CheckpointError, match="experts of model and checkpoint differ") as caught:
        seat_experts(model, {0: plan})
    assert (caught.value.layer, caught.value.tensor) == (0, "layers.0")
    assert caught.value.expected == "3 experts, hidden 8, intermediate 5"
    assert caught.value.found == "{}, {}, {}".format(*own)


def test_a_config_without_a_class() -> None:
    from loader.integrations.transformers import hook

    with pytest.raises(UnsupportedError, match="no class for this model"):
        hook.class_of(SimpleNamespace(architectures=["NobodysModel"]))

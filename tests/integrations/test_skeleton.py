"""Models that prepared experts have no seat in, and places that are not filled yet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loader import LifecycleError, UnsupportedError
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


def test_a_config_without_a_class() -> None:
    from loader.integrations.transformers import hook

    with pytest.raises(UnsupportedError, match="no class for this model"):
        hook.class_of(SimpleNamespace(architectures=["NobodysModel"]))

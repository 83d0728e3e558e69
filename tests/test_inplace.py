"""Banks from parameters that a module already holds: the same numbers, the same module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inplace_fakes import DIALECTS, make, sources
from load_fakes import (
    Allocations,
    banks_of,
    bits,
    module_of,
    parameters_of,
    quantization_of,
    same_bits,
)

import loader
from loader import (
    LifecycleError,
    Policy,
    Shard,
)

# The same numbers as a load


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_banks_are_those_of_a_load(tmp_path: Path, dialect: str, buffers: bool) -> None:
    made = make(tmp_path, dialect)
    quantization = quantization_of(made)
    for layout in ("compact", "wide", *([] if "nvfp4" in dialect else ["record"])):
        policy = Policy(layout=layout)
        loaded = loader.load(tmp_path, policy=policy)
        for layer in loaded:
            module = module_of(made, layer, buffers=buffers)
            prepared = loader.prepare_module(
                module, quantization=quantization, layer=layer, policy=policy
            )
            assert same_bits(banks_of(prepared), banks_of(loaded[layer]))
            assert prepared.get_extra_state() == loaded[layer].get_extra_state()
            assert prepared.format == loaded[layer].format
            assert [r.to_dict() for r in prepared.routes] == [
                r.to_dict() for r in loaded[layer].routes
            ]
            assert module.experts is prepared and prepared.layer == layer
            assert not list(module.named_parameters())
            assert all(name.startswith("experts.") for name, _ in module.named_buffers())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_weights_are_the_checkpoint_s(tmp_path: Path, dialect: str) -> None:
    made = make(tmp_path, dialect, layers=1)
    prepared = loader.prepare_module(module_of(made), quantization=quantization_of(made))
    for expert in range(made.experts):
        for projection, found in prepared.dequantize(expert).items():
            wanted = made.weight_f32(0, expert, projection)
            assert np.array_equal(found.numpy(), wanted), (expert, projection)


SHARDS = (
    Shard(tp_size=2, tp_rank=0),
    Shard(tp_size=2, tp_rank=1),
    Shard(tp_size=4, tp_rank=3),
    Shard(ep_size=2, ep_rank=1),
    Shard(ep_size=3, ep_rank=0),
    Shard(ep_size=2, ep_rank=1, tp_size=2, tp_rank=1),
)


@pytest.mark.parametrize("shard", SHARDS, ids=str)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_shard_in_place_is_that_of_a_load(tmp_path: Path, dialect: str, shard: Shard) -> None:
    """Slices of W2 start in the middle of a group of 128: the phase comes from the shard."""
    more = {} if "nvfp4" in dialect else {"group": 128, "hidden": 128}
    made = make(tmp_path, dialect, layers=1, intermediate=192, experts=5, **more)
    loaded = loader.load(tmp_path, shard=shard)[0]
    prepared = loader.prepare_module(
        module_of(made, 0, shard), quantization=quantization_of(made), shard=shard, num_experts=5
    )
    if "nvfp4" not in dialect and shard.tp_rank == 1:
        assert prepared.spec.w2.phase != 0
    assert same_bits(banks_of(prepared), banks_of(loaded))
    assert prepared.get_extra_state() == loaded.get_extra_state()
    assert prepared.expert_ids == shard.experts_of(5)
    x, ids = torch.randn(4, made.hidden), torch.randint(0, 5, (4, 2))
    assert torch.equal(prepared(x, ids, torch.ones(4, 2)), loaded(x, ids, torch.ones(4, 2)))


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_geometry(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    dialect = data.draw(st.sampled_from(DIALECTS))
    tp = data.draw(st.sampled_from([1, 2, 3]))
    more = {} if "nvfp4" in dialect else {"group": data.draw(st.sampled_from([32, 48, 64]))}
    made = make(
        tmp_path_factory.mktemp("any"),
        dialect,
        hidden=16 * data.draw(st.integers(2, 5)),
        intermediate=16 * tp * data.draw(st.integers(1, 4)),
        experts=data.draw(st.integers(1, 4)),
        layers=1,
        top_k=1,
        **more,
    )
    shard = Shard(tp_size=tp, tp_rank=data.draw(st.integers(0, tp - 1)))
    policy = Policy(layout=data.draw(st.sampled_from(["compact", "wide"])))
    module = module_of(made, 0, shard, tables=data.draw(st.booleans()))
    prepared = loader.prepare_module(
        module, quantization=quantization_of(made), shard=shard, policy=policy
    )
    loaded = loader.load(made.folder, shard=shard, policy=policy)
    assert same_bits(banks_of(prepared), banks_of(loaded))


@pytest.mark.parametrize("dialect", ["ct-nvfp4", "modelopt-nvfp4"])
def test_a_down_global_may_have_a_trailing_axis(tmp_path: Path, dialect: str) -> None:
    made = make(tmp_path, dialect, layers=1)
    values = parameters_of(made, 0, Shard())
    name = "w2_weight_scale_2" if "modelopt" in dialect else "w2_weight_global_scale"
    values[name] = values[name].view(-1, 1)
    module = torch.nn.Module()
    for key, value in values.items():
        module.register_buffer(key, value)
    prepared = loader.prepare_module(module, quantization=quantization_of(made))
    assert same_bits(banks_of(prepared), banks_of(loader.load(tmp_path)))


def test_parameters_of_a_subclass_and_other_attributes(tmp_path: Path) -> None:
    """Frameworks subclass Parameter and keep more on the module; only the experts' own go."""

    class Framework(torch.nn.Parameter):
        pass

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w13_note = "an attribute that is no tensor"
            self.e_score_correction_bias = torch.nn.Parameter(torch.ones(4))
            self.gate = torch.nn.Linear(4, 4)
            self.register_buffer("counts", torch.zeros(3))

    made = make(tmp_path, layers=1)
    module = Layer()
    for name, value in parameters_of(made, 0, Shard()).items():
        module.register_parameter(name, Framework(value, requires_grad=False))
    prepared = loader.prepare_module(module, quantization=quantization_of(made))
    assert same_bits(banks_of(prepared), banks_of(loader.load(tmp_path)))
    assert set(dict(module.named_parameters())) == {
        "e_score_correction_bias",
        "gate.weight",
        "gate.bias",
    }
    assert module.w13_note and module.counts.shape == (3,)


# Afterwards


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("cast", ["half", "bfloat16", "double", "float"])
def test_a_cast_of_the_module_changes_no_bank(tmp_path: Path, dialect: str, cast: str) -> None:
    made = make(tmp_path, dialect, layers=1)
    parent = torch.nn.Sequential(module_of(made))
    prepared = loader.prepare_module(parent[0], quantization=quantization_of(made))
    before = [(t.data_ptr(), t.dtype, bits(t)) for t in banks_of(prepared)]
    getattr(parent, cast)()
    assert [(t.data_ptr(), t.dtype, bits(t)) for t in banks_of(prepared)] == before
    for expert in range(made.experts):
        for projection, found in prepared.dequantize(expert).items():
            assert np.array_equal(found.numpy(), made.weight_f32(0, expert, projection))


def test_a_second_call_is_refused_with_the_banks_intact(tmp_path: Path) -> None:
    made = make(tmp_path, layers=1)
    module = module_of(made)
    prepared = loader.prepare_module(module, quantization=quantization_of(made))
    before = [(t.data_ptr(), bits(t)) for t in banks_of(prepared)]
    with pytest.raises(LifecycleError, match="prepared already"):
        loader.prepare_module(module, quantization=quantization_of(made), layer=3)
    fresh = module_of(made)  # also where a framework has put the parameters back
    for name, tensor in fresh.named_parameters():
        module.register_parameter(name, torch.nn.Parameter(tensor.detach(), False))
    with pytest.raises(LifecycleError, match="prepared already") as caught:
        loader.prepare_module(module, quantization=quantization_of(made), layer=3)
    assert caught.value.layer == 3
    assert module.experts is prepared
    assert [(t.data_ptr(), bits(t)) for t in banks_of(prepared)] == before


@pytest.mark.parametrize("taken", ["attribute", "module", "property"])
def test_a_module_that_uses_the_name_is_refused_with_its_sources_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: str
) -> None:
    class Named(torch.nn.Module):
        if taken == "property":

            @property
            def experts(self) -> int:
                return 4

    made = make(tmp_path, layers=1)
    module: Any = Named()
    for name, value in parameters_of(made, 0, Shard()).items():
        module.register_buffer(name, value)
    if taken == "attribute":
        module.experts = 4
    elif taken == "module":
        module.experts = torch.nn.Linear(2, 2)
    before, allocations = sources(module), Allocations(monkeypatch)
    with pytest.raises(LifecycleError, match="no room"):
        loader.prepare_module(module, quantization=quantization_of(made))
    assert sources(module) == before and not allocations.storages

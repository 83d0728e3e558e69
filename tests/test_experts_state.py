"""Prepared experts saved, restored and copied: whole or not at all, at the same addresses."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_oracle import LAYERS, call, make, snapshot

import loader
from loader.errors import LifecycleError
from loader.experts import PreparedExperts


@pytest.fixture(params=LAYERS)
def module(request: pytest.FixtureRequest, tmp_path: Path) -> PreparedExperts:
    return make(tmp_path, request.param)


@pytest.fixture
def awq(tmp_path: Path) -> PreparedExperts:
    return make(tmp_path / "awq")


def state_of(module: PreparedExperts) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    state: dict[str, Any] = torch.load(buffer, weights_only=True)
    return state


def test_the_state_holds_banks_and_what_they_mean(module: PreparedExperts) -> None:
    state = state_of(module)
    assert state.keys() == {*dict(module.named_buffers()), "_extra_state"}
    extra = state["_extra_state"]
    assert extra["format"] == module.format and extra["spec"] == module.spec.to_ints()
    assert extra["expert_ids"] == [0, 1, 2, 3] and extra["experts"] == 4


@pytest.mark.parametrize("name", LAYERS)
def test_another_checkpoint_of_the_same_shapes_goes_in(name: str, tmp_path: Path) -> None:
    module, other = make(tmp_path / "a", name), make(tmp_path / "b", name, seed=1)
    addresses = [t.data_ptr() for t in (*module.banks(), *module.workspace.tensors())]
    wanted, old = call(other), call(module)
    assert not torch.equal(wanted, old)
    parent = torch.nn.ModuleDict({"moe": module})
    result = parent.load_state_dict({f"moe.{k}": v for k, v in state_of(other).items()})
    assert not result.missing_keys and not result.unexpected_keys
    used = (*module.banks(), *module.workspace.tensors())
    assert [t.data_ptr() for t in used] == addresses
    assert torch.equal(call(module), wanted)


def broken_states(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each with one thing wrong in the last tensor, so that the ones before it are good."""
    name = [key for key in state if key != "_extra_state"][-1]
    extra, tensor = state["_extra_state"], state[name]
    spec = list(extra["spec"])
    changed = {
        number: [*spec[:number], spec[number] + 1, *spec[number + 1 :]] for number in range(21)
    }
    broken = {
        "fewer experts": {name: tensor[:1].contiguous()},
        "more experts": {name: torch.cat((tensor, tensor[:1]))},
        "flattened": {name: tensor.flatten()},
        "dtype": {name: tensor.float() if tensor.dtype != torch.float32 else tensor.double()},
        "no tensor": {name: tensor.tolist()},
        "meta": {name: tensor.to("meta")},
        "format": {"_extra_state": extra | {"format": "other"}},
        "experts": {"_extra_state": extra | {"expert_ids": [0, 1, 3, 2]}},
        "no extra": {"_extra_state": None},
    }
    # Kind, layout, sizes, group, phase, dtype and sense of the global: any number that differs.
    broken |= {
        f"spec {number}": {"_extra_state": extra | {"spec": numbers}}
        for number, numbers in changed.items()
    }
    made = {what: {**state, **change} for what, change in broken.items()}
    for key in (name, "_extra_state"):
        made[f"missing {key}"] = {k: v for k, v in state.items() if k != key}
    return made


@pytest.mark.parametrize("strict", [True, False])
def test_a_state_that_does_not_agree_changes_nothing(module: PreparedExperts, strict: bool) -> None:
    state = state_of(module)
    for tensor in state.values():
        if isinstance(tensor, torch.Tensor):
            tensor.view(torch.uint8).bitwise_xor_(0x11)
    before = snapshot(module)
    for what, broken in broken_states(state).items():
        with pytest.raises(RuntimeError, match="prepared experts refuse the state"):
            module.load_state_dict(broken, strict=strict)
        assert snapshot(module) == before, what


def test_assign_would_move_the_banks(awq: PreparedExperts) -> None:
    before = snapshot(awq)
    with pytest.raises(RuntimeError, match="assign=True would move the banks"):
        awq.load_state_dict(state_of(awq), assign=True)
    assert snapshot(awq) == before


def test_a_bank_that_is_no_tensor_is_named_for_what_it_is(awq: PreparedExperts) -> None:
    state = {**state_of(awq), "w2_weight": [1, 2]}
    with pytest.raises(RuntimeError, match="w2_weight: expected a tensor, found list"):
        awq.load_state_dict(state)


def test_banks_are_neither_assigned_nor_removed(module: PreparedExperts) -> None:
    wanted, before = call(module), snapshot(module)
    for name, bank in list(module.named_buffers()):
        for broken in (
            torch.zeros_like(bank),
            torch.zeros(3),
            None,
            torch.nn.Parameter(bank.float()),
        ):
            with pytest.raises(LifecycleError, match=f"{name} is a bank and stays where it is"):
                setattr(module, name, broken)
        with pytest.raises(LifecycleError, match=f"found a removal of {name}"):
            delattr(module, name)
    assert snapshot(module) == before and torch.equal(call(module), wanted)
    module.note = "other attributes are the owner's"
    del module.note


def test_unknown_keys_are_errors(awq: PreparedExperts) -> None:
    state = {**state_of(awq), "w3_weight": torch.zeros(1)}
    for tensor in state.values():
        if isinstance(tensor, torch.Tensor):
            tensor.zero_()
    before = snapshot(awq)
    with pytest.raises(RuntimeError, match="refuse the state: unknown: w3_weight"):
        awq.load_state_dict(state)
    assert snapshot(awq) == before
    assert awq.load_state_dict(state, strict=False).unexpected_keys == ["w3_weight"]


@pytest.mark.parametrize(
    "ours, theirs",
    [
        ({"name": "awq-wide"}, {"name": "awq-record"}),
        ({"name": "ct-nvfp4-compact"}, {"name": "modelopt-nvfp4-compact"}),  # divisor, multiplier
        ({"group": 64}, {"group": 32}),
        ({"scale_dtype": "F16"}, {"scale_dtype": "BF16"}),
        ({}, {"dialect": "ct-int4-asym", "scale_dtype": "F16"}),
        ({"shard": (1, 2)}, {"shard": (0, 2)}),  # phase 96 of group 128, phase 0: both one group
    ],
)
def test_states_of_other_layers(ours: Any, theirs: Any, tmp_path: Path) -> None:
    made = []
    for number, one in enumerate((ours, theirs)):
        settings = dict(one)
        if "shard" in settings:
            settings |= {"shard": loader.Shard(*settings["shard"]), "group": 256}
        name = settings.pop("name", "awq-compact")
        if "dialect" in settings:
            name = settings.pop("dialect") + "-compact"
        made.append(make(tmp_path / str(number), name, **settings))
    before = snapshot(made[0])
    with pytest.raises(RuntimeError, match="prepared experts refuse the state"):
        made[0].load_state_dict(state_of(made[1]))
    assert snapshot(made[0]) == before


def test_copies_are_whole_and_apart(module: PreparedExperts) -> None:
    wanted, before = call(module), snapshot(module)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    copies.append(torch.load(buffer, weights_only=False))
    for one in copies:
        assert torch.equal(call(one), wanted)
        assert one.spec == module.spec and one.routes == module.routes
        for tensor in (*one.banks(), *one.workspace.tensors()):
            tensor.zero_()
        assert snapshot(module) == before and torch.equal(call(module), wanted)
        with pytest.raises(LifecycleError):
            one.layer = 3

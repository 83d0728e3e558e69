"""The workspace: one for all layers of a load, at one address, counted once, in no state dict."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from load_fakes import SMALL

import loader
from loader import LoaderError, Shard, memory
from loader.reference.routes import least_scratch_bytes
from loader.testing.checkpoint import tiny_checkpoint
from loader.workspace import Workspace

CPU = torch.device("cpu")


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.data())
def test_the_map_gives_the_slot_of_every_expert(experts: int, data: st.DataObject) -> None:
    ids = data.draw(st.permutations(range(experts)))[: data.draw(st.integers(1, experts))]
    space = Workspace(4096, ids, experts, CPU)
    assert space.expert_map.dtype == torch.int32
    wanted = [ids.index(expert) if expert in ids else -1 for expert in range(experts)]
    assert space.expert_map.tolist() == wanted


@pytest.mark.parametrize("nbytes", [4, 4096, 1 << 20, 5 << 20])
def test_its_bytes_are_what_was_asked_for(nbytes: int) -> None:
    space = Workspace(nbytes, range(3), 7, CPU)
    scratch, table = space.tensors()
    assert scratch.dtype == torch.float32 and scratch.nbytes == nbytes
    assert not scratch.any()
    assert memory.storage_bytes(space.tensors()) == nbytes + 4 * 7
    assert table is space.expert_map


def test_all_layers_share_one_at_one_address(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, **SMALL, layers=3, excluded=(1,), attention=False)
    experts = loader.load(tmp_path)
    assert len({id(layer.workspace) for layer in experts.values()}) == 1
    space = experts[0].workspace
    before = [tensor.data_ptr() for tensor in space.tensors()]
    x = torch.randn(9, SMALL["hidden"])
    ids = torch.randint(0, SMALL["experts"], (9, 2))
    for layer in experts.values():
        for tokens in (1, 2, 9):
            layer(x[:tokens], ids[:tokens], torch.ones(tokens, 2))
    assert [tensor.data_ptr() for tensor in space.tensors()] == before


def test_it_is_counted_once_and_in_no_state_dict(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, **SMALL, layers=3, attention=False)
    experts = loader.load(tmp_path)
    numbers = experts.report.to_dict()["memory"]
    space = experts[0].workspace
    banks = sum(t.nbytes for layer in experts.values() for t in layer.banks())
    size = memory.storage_bytes(space.tensors())
    assert numbers["workspace"] == size
    assert numbers["resident"] == banks + size
    addresses = {tensor.data_ptr() for tensor in space.tensors()}
    for layer in experts.values():
        named = [*layer.state_dict().values(), *layer.buffers(), *layer.parameters()]
        assert not [t for t in named if torch.is_tensor(t) and t.data_ptr() in addresses]


def test_it_survives_the_last_layer_of_its_load(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, **SMALL, layers=2, attention=False)
    experts = loader.load(tmp_path)
    first = experts[0]
    x, ids = torch.randn(3, SMALL["hidden"]), torch.tensor([[0, 1]] * 3)
    wanted = first(x, ids, torch.ones(3, 2))
    del experts
    assert torch.equal(first(x, ids, torch.ones(3, 2)), wanted)


@pytest.mark.parametrize("shard", [Shard(ep_size=2, ep_rank=1), Shard(expert_ids=[3, 0])])
def test_the_map_of_a_load_is_the_shard_s(tmp_path: Path, shard: Shard) -> None:
    tiny_checkpoint(tmp_path, **SMALL, layers=1, attention=False)
    experts = loader.load(tmp_path, shard=shard)
    wanted = {expert: slot for slot, expert in enumerate(shard.experts_of(4))}
    found = experts[0].workspace.expert_map.tolist()
    assert found == [wanted.get(expert, -1) for expert in range(4)]


@pytest.mark.parametrize(
    ("ids", "experts", "scratch", "what"),
    [
        ([0, 1, 2], 8, 4096, "other experts"),
        ([1, 0], 8, 4096, "other experts"),
        ([0, 1], 9, 4096, "other experts"),
        ([0, 1], 8, 4100, "too small"),
    ],
)
def test_a_workspace_of_other_experts_or_too_small_is_refused(
    ids: list[int], experts: int, scratch: int, what: str
) -> None:
    space = Workspace(4096, [0, 1], 8, CPU)
    space.require(4096, [0, 1], 8, 0)
    with pytest.raises(LoaderError, match=what) as caught:
        space.require(scratch, ids, experts, 5)
    assert caught.value.layer == 5


def test_the_least_scratch_is_enough_for_every_route(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, **SMALL, layers=1, attention=False)
    layer = loader.load(tmp_path)[0]
    x, ids = torch.randn(9, SMALL["hidden"]), torch.randint(0, 4, (9, 2))
    wanted = layer(x, ids, torch.ones(9, 2))
    space = layer.workspace
    space.scratch = space.scratch[: least_scratch_bytes(layer.spec) // 4]
    torch.testing.assert_close(layer(x, ids, torch.ones(9, 2)), wanted)
    space.scratch = space.scratch[:-1]
    with pytest.raises(RuntimeError):
        layer(x, ids, torch.ones(9, 2))

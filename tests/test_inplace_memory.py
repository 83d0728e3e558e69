"""A conversion in place: memory that others hold, and the workspace that layers share."""

from __future__ import annotations

import copy
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from inplace_fakes import make, sources
from load_fakes import (
    Allocations,
    Raiser,
    banks_of,
    module_of,
    parameters_of,
    quantization_of,
    same_bits,
)

import loader
from loader import (
    CapacityError,
    LoaderError,
    PreparedExperts,
    Shard,
)
from loader.room import Room

# References from outside


@pytest.mark.parametrize("hold", ["parameters", "state dict", "a view", "numpy", "nothing"])
def test_memory_that_something_else_holds_is_spoken_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, hold: str
) -> None:
    made = make(tmp_path, layers=1)
    module = module_of(made)
    sizes = {name: tensor.nbytes for name, tensor in module.named_parameters()}
    kept: Any = None
    if hold == "parameters":
        kept, wanted = dict(module.named_parameters()), sum(sizes.values())
    elif hold == "state dict":
        kept, wanted = module.state_dict(), sum(sizes.values())
    elif hold == "a view":
        kept, wanted = module.w2_scales.detach()[0, 0], sizes["w2_scales"]
    elif hold == "numpy":
        kept, wanted = module.w13_qzeros.detach().numpy(), sizes["w13_qzeros"]
    else:
        wanted = 0
    raiser = Raiser()
    with caplog.at_level(logging.WARNING):
        loader.prepare_module(
            module, quantization=quantization_of(made), layer=7, observers=[raiser]
        )
    lines = [r.getMessage() for r in caplog.records if "held by a reference" in r.getMessage()]
    assert len(lines) == (wanted > 0)
    if wanted:
        assert f"layer 7: {wanted} bytes" in lines[0] and kept is not None
    released = [event.bytes for event in raiser.events if event.state == "released"]
    assert released == [sum(sizes.values()) - wanted]


def test_parameters_that_share_one_storage_are_counted_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = make(tmp_path, layers=1)
    values = parameters_of(made, 0, Shard())
    total = sum(value.nbytes for value in values.values())
    arena, at = torch.empty(total, dtype=torch.uint8), 0
    module = torch.nn.Module()
    for name, value in values.items():
        place = arena[at : at + value.nbytes].view(value.dtype).view(value.shape)
        module.register_buffer(name, place.copy_(value))
        at += value.nbytes
    with caplog.at_level(logging.WARNING):
        prepared = loader.prepare_module(module, quantization=quantization_of(made))
    assert [f"{total} bytes" in r.getMessage() for r in caplog.records].count(True) == 1
    assert arena.numel() == total
    assert same_bits(banks_of(prepared), banks_of(loader.load(tmp_path)))


# Room beside the sources


@pytest.mark.parametrize("dialect", ["awq-gemm", "modelopt-nvfp4"])
@pytest.mark.parametrize("shared", [False, True])
def test_banks_without_room_beside_their_sources_are_refused_before_anything_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dialect: str, shared: bool
) -> None:
    made = make(tmp_path, dialect, layers=1)
    quantization = quantization_of(made)
    workspace = (
        loader.prepare_module(module_of(made), quantization=quantization).workspace
        if shared
        else None
    )
    module = module_of(made)
    before, allocations, raiser = sources(module), Allocations(monkeypatch), Raiser()

    def prepare(card_memory: int) -> PreparedExperts:
        return loader.prepare_module(
            module,
            quantization=quantization,
            layer=3,
            workspace=workspace,
            observers=[raiser],
            card_memory=card_memory,
        )

    with pytest.raises(CapacityError) as caught:
        prepare(1000)
    needed = int(str(caught.value.found).split()[0])
    assert str(caught.value) == (
        f"the banks do not fit beside their sources: {needed - 1000} bytes too many; layer 3; "
        "expected a need within 1000 bytes, the budget that was given, "
        f"found {needed} bytes on cpu"
    )
    with pytest.raises(CapacityError, match=": 1 bytes too many"):
        prepare(needed - 1)
    assert sources(module) == before and not list(module.children())
    assert not allocations.storages and not raiser.events
    prepared = prepare(needed)
    assert needed >= sum(tensor.nbytes for tensor in prepared.banks())
    assert same_bits(banks_of(prepared), banks_of(loader.load(tmp_path)))


def test_without_a_budget_the_room_is_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(tmp_path, layers=1)
    module = module_of(made)
    little = Room(4096, "free memory of a machine")
    monkeypatch.setattr("loader.room.room_of", lambda device: little)
    with pytest.raises(CapacityError, match=re.escape("4096 bytes, the free memory of a mach")):
        loader.prepare_module(module, quantization=quantization_of(made))
    assert sources(module)


# One workspace for all layers


def test_layers_share_a_workspace(tmp_path: Path) -> None:
    made = make(tmp_path, layers=3, excluded=())
    workspace = None
    found: list[PreparedExperts] = []
    for layer in range(3):
        module = module_of(made, layer)
        found.append(
            loader.prepare_module(
                module, quantization=quantization_of(made), layer=layer, workspace=workspace
            )
        )
        workspace = found[0].workspace
    assert all(prepared.workspace is workspace for prepared in found)
    loaded = loader.load(tmp_path)
    x, ids = torch.randn(3, made.hidden), torch.randint(0, 4, (3, 2))
    for layer in range(3):
        ours, theirs = (s[layer](x, ids, torch.ones(3, 2)) for s in (found, loaded))
        assert torch.equal(ours, theirs)


def test_a_workspace_of_other_experts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(tmp_path, layers=1)
    shards = [Shard(ep_size=2, ep_rank=rank) for rank in range(2)]
    quantization = quantization_of(made)
    first = loader.prepare_module(
        module_of(made, 0, shards[0]), quantization=quantization, shard=shards[0]
    )
    module = module_of(made, 0, shards[1])
    before, allocations, raiser = sources(module), Allocations(monkeypatch), Raiser()
    with pytest.raises(LoaderError, match="other experts"):
        loader.prepare_module(
            module,
            quantization=quantization,
            shard=shards[1],
            workspace=first.workspace,
            observers=[raiser],
        )
    assert sources(module) == before and not allocations.storages and not raiser.events


def test_a_workspace_that_is_too_small_is_refused(tmp_path: Path) -> None:
    small = make(tmp_path / "small", layers=1)
    large = make(tmp_path / "large", layers=1, hidden=1024, intermediate=1024, group=128)
    first = loader.prepare_module(module_of(small), quantization=quantization_of(small))
    first.workspace.scratch = first.workspace.scratch[: 32 * 64]
    module = module_of(large)
    with pytest.raises(LoaderError, match="too small"):
        loader.prepare_module(
            module, quantization=quantization_of(large), workspace=first.workspace
        )
    assert sources(module)


def test_the_shard_must_fit_the_module(tmp_path: Path) -> None:
    made = make(tmp_path, layers=1)
    with pytest.raises(LoaderError, match="does not hold the experts") as caught:
        loader.prepare_module(
            module_of(made),
            quantization=quantization_of(made),
            layer=2,
            shard=Shard(ep_size=2),
            num_experts=5,
        )
    assert caught.value.layer == 2 and caught.value.found == 4


def test_a_copy_of_the_module_is_a_module_of_its_own(tmp_path: Path) -> None:
    made = make(tmp_path, layers=1)
    module = module_of(made)
    other = copy.deepcopy(module)
    loader.prepare_module(module, quantization=quantization_of(made))
    assert len(list(other.parameters())) == 6
    prepared = loader.prepare_module(other, quantization=quantization_of(made))
    assert same_bits(banks_of(prepared), banks_of(module.experts))

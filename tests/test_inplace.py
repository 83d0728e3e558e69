"""Banks from parameters that a module already holds: the same numbers, the same lifecycle."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from load_fakes import (
    SMALL,
    Allocations,
    Raiser,
    banks_of,
    bits,
    module_of,
    nothing_left,
    parameters_of,
    quantization_of,
    same_bits,
)

import loader
from loader import (
    CapacityError,
    ConversionError,
    LifecycleError,
    LoaderError,
    Policy,
    PreparedExperts,
    Shard,
    native,
)
from loader.testing.checkpoint import TinyCheckpoint, tiny_checkpoint

DIALECTS = (
    "awq-gemm",
    "awq-gptqmodel",
    "ct-int4",
    "ct-int4-asym",
    "ct-nvfp4",
    "modelopt-nvfp4",
)


def make(folder: Path, dialect: str = "awq-gemm", **more: Any) -> TinyCheckpoint:
    given: dict[str, Any] = dict(SMALL, dialect=dialect, attention=False)
    if "nvfp4" in dialect:
        given["group"] = None
        given["input_scale"] = True
    else:
        given["scale_dtype"] = "F16"
    return tiny_checkpoint(folder, **{**given, **more})


def sources(module: torch.nn.Module) -> dict[str, tuple[int, bytes, bool]]:
    """Everything that ``prepare_module`` must leave alone until it succeeds."""
    named = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return {n: (t.data_ptr(), bits(t), isinstance(t, torch.nn.Parameter)) for n, t in named}


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


# Failures


def assert_untouched(
    module: torch.nn.Module, before: dict[str, Any], allocations: Allocations, made: Any
) -> None:
    assert sources(module) == before
    assert not list(module.children())
    assert allocations.alive() == 0
    allocations.fail_at = None
    prepared = loader.prepare_module(module, quantization=quantization_of(made))
    assert same_bits(banks_of(prepared), banks_of(loader.load(made.folder)))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("call", [("write", 0), ("write", 3), ("write", 5), ("finish", 0)])
@pytest.mark.parametrize("dialect", ["awq-gemm", "ct-int4-asym", "modelopt-nvfp4"])
def test_a_converter_that_raises(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dialect: str,
    call: tuple[str, int],
    error: type[BaseException],
) -> None:
    made = make(tmp_path, dialect, layers=1)
    allocations = Allocations(monkeypatch)
    stage, at = call
    inner, left = getattr(native, stage), iter(range(99))

    def broken(*args: Any) -> Any:
        result = inner(*args)
        if next(left) == at:
            raise error("kernel")
        return result

    module = module_of(made, buffers=bool(at % 2))
    before = sources(module)
    wanted = ConversionError if issubclass(error, Exception) else error
    with monkeypatch.context() as patch, nothing_left(allocations):
        patch.setattr(native, stage, broken)
        with pytest.raises(wanted, match="kernel") as caught:
            loader.prepare_module(module, quantization=quantization_of(made), layer=2)
        assert allocations.alive() == 0
    assert "layer 2" in str(caught.value) or not issubclass(error, Exception)
    assert_untouched(module, before, allocations, made)


def test_every_allocation_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(tmp_path, "modelopt-nvfp4", layers=1)
    allocations = Allocations(monkeypatch)
    policy = Policy(layout="wide")
    loader.prepare_module(module_of(made), quantization=quantization_of(made), policy=policy)
    count = len(allocations.storages)
    assert count == 7, "two of the workspace, four bank tensors, the cache"
    for number in range(count):
        allocations.storages.clear()
        allocations.fail_at = number
        module = module_of(made)
        before = sources(module)
        with nothing_left(allocations), pytest.raises(CapacityError) as caught:
            loader.prepare_module(
                module, quantization=quantization_of(made), layer=4, policy=policy
            )
        assert caught.value.layer == 4 and caught.value.__cause__ is allocations.error
        assert_untouched(module, before, allocations, made)


def test_a_bad_value_names_the_parameter_and_the_global_expert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(tmp_path, layers=1)
    shard = Shard(ep_size=2, ep_rank=1)
    module = module_of(made, 0, shard)
    with torch.no_grad():
        module.w13_scales[1, 0, 3] = float("inf")
    before, allocations = sources(module), Allocations(monkeypatch)
    with pytest.raises(ConversionError, match="not finite") as caught:
        loader.prepare_module(module, quantization=quantization_of(made), layer=6, shard=shard)
    error = caught.value
    assert (error.layer, error.tensor, error.experts) == (6, "w13_scales", "3")
    assert sources(module) == before and allocations.alive() == 0


@pytest.mark.parametrize("at", [0, 1, 5])
def test_an_interrupt_while_the_sources_are_taken_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The module always holds the sources or the result, whatever a signal does between."""
    made = make(tmp_path, layers=1)

    class Interrupted(torch.nn.Module):
        left = at

        def __delattr__(self, name: str) -> None:
            if self.left == 0:
                Interrupted.left = -1
                raise KeyboardInterrupt
            Interrupted.left -= 1
            super().__delattr__(name)

    module: Any = Interrupted()
    for name, value in parameters_of(made, 0, Shard()).items():
        module.register_buffer(name, value)
    with pytest.raises(KeyboardInterrupt):
        loader.prepare_module(module, quantization=quantization_of(made))
    assert same_bits(banks_of(module.experts), banks_of(loader.load(tmp_path)))


@pytest.mark.parametrize("late", [False, True])
def test_a_module_that_takes_no_submodule_keeps_its_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    class Closed(torch.nn.Module):
        def add_module(self, name: str, module: torch.nn.Module | None) -> None:
            if late:
                super().add_module(name, module)
            raise TypeError("closed")

    made = make(tmp_path, layers=1)
    module = Closed()
    for name, value in parameters_of(made, 0, Shard()).items():
        module.register_buffer(name, value)
    before, allocations = sources(module), Allocations(monkeypatch)
    with nothing_left(allocations), pytest.raises(TypeError, match="closed"):
        loader.prepare_module(module, quantization=quantization_of(made))
    assert sources(module) == before and not list(module.children())


def test_events_carry_bytes(tmp_path: Path) -> None:
    made = make(tmp_path, layers=1)
    raiser, module = Raiser(), module_of(made)
    total = sum(tensor.nbytes for tensor in module.parameters())
    prepared = loader.prepare_module(
        module, quantization=quantization_of(made), layer=5, observers=[raiser]
    )
    assert {event.layer for event in raiser.events} == {5}
    states = [event.state for event in raiser.events]
    assert states == ["planned", *["reading"] * 7, "converting", "prepared", "released", "ready"]
    reading = [event.bytes for event in raiser.events if event.state == "reading"]
    assert reading[0] == 0 and reading == sorted(set(reading)) and reading[-1] == total
    by_state = {event.state: event.bytes for event in raiser.events}
    assert by_state["planned"] == by_state["released"] == total
    banks = sum(tensor.nbytes for tensor in prepared.banks())
    assert by_state["prepared"] == by_state["ready"] == banks


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

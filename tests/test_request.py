"""Request: arguments of the public calls, of every wrong kind, before anything is opened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from load_fakes import Allocations, module_of, quantization_of

import loader
from loader import Policy, Shard, request
from loader.checkpoint.source import LocalSource
from loader.errors import LoaderError
from loader.testing.checkpoint import TinyCheckpoint, tiny_checkpoint


@pytest.fixture
def made(tmp_path: Path) -> TinyCheckpoint:
    return tiny_checkpoint(tmp_path, hidden=64, intermediate=32, experts=4, top_k=2, group=32)


BUDGETS = (1.5, "64", b"1", [], float("nan"), float("inf"), -1, 1 << 63, {})
WRONG: dict[str, tuple[Any, ...]] = {
    "source": (None, 5, b"folder", [], {}, object(), True, 1.5),
    "device": (None, 5, [], "nonsense", "", {}),
    "shard": ("x", 5, Shard, {}, (0, 1), Policy()),
    "policy": ("on", 5, Policy, {}, (), Shard(), Policy().resolve()),
    "layers": (0, ["0"], "01", [[0]], [None], [0.0], [1 << 70], range(10**12), object()),
    "staging_bytes": (None, *BUDGETS),
    "card_memory": BUDGETS,
    "observers": (None, 5, print, [5], [print, None], "x"),
    "family": ("mlp", 5, {}, loader.Family, loader.FAMILIES),
    "revision": (5, b"main", []),
}
PLANNED = WRONG.keys() - {"observers"}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_argument_of_a_load_is_refused_by_name(
    name: str, made: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocations = Allocations(monkeypatch)
    calls: list[Callable[..., Any]] = [loader.load] + [loader.plan] * (name in PLANNED)
    for call in calls:
        for value in WRONG[name]:
            given = {"source": made.folder, name: value}
            with pytest.raises(LoaderError) as caught:
                call(**given)
            assert "\n" not in str(caught.value)
            known = name if name in ("source", "shard", "policy", "family") else None
            assert known is None or str(caught.value).startswith(f"{known} is not valid; expected ")
    assert not allocations.storages


def test_whole_numbers_of_any_kind_become_plain_ones(made: TinyCheckpoint, tmp_path: Path) -> None:
    for layers in (np.arange(2), torch.arange(2), [np.int64(0), True], {0: "a", 1: "b"}, range(2)):
        experts = loader.load(
            made.folder,
            layers=layers,
            staging_bytes=np.int64(1 << 20),
            card_memory=np.uint64(1 << 33),
        )
        assert [type(layer) for layer in experts] == [int, int] and list(experts) == [0, 1]
        assert experts[0].layer == 0
        experts.report.to_json(tmp_path / "report.json")  # numpy's numbers are no JSON
    assert len(experts[0].dequantize(np.int64(3))) == len(experts[0].dequantize(torch.tensor(3)))
    for absent in (None, [1], "1", 1.5, -1, 4, 1 << 70):
        with pytest.raises(LoaderError, match=r"is not on this card.* found ") as caught:
            experts[0].dequantize(absent)  # type: ignore[arg-type]
        assert caught.value.found == repr(absent)


def test_sources_of_odd_spellings(made: TinyCheckpoint, tmp_path: Path) -> None:
    class BytesPath:
        def __fspath__(self) -> bytes:
            return bytes(made.folder)

    assert sorted(loader.load(BytesPath())) == [0, 1]  # type: ignore[arg-type]
    with LocalSource(made.folder) as source:
        assert sorted(loader.load(source)) == [0, 1]
    for absent in ("", "\0", "a\ud800b", "x" * 5000, "~"):
        with pytest.raises(loader.CheckpointError, match="no such folder") as caught:
            loader.plan(absent)
        assert caught.value.file


IN_PLACE: dict[str, tuple[Any, ...]] = {
    "module": (None, 5, "x", [], torch.zeros(2), torch.nn.Module),
    "quantization": (5, "awq", [], object()),
    "layer": (None, "0", 1.5, -1, []),
    "shard": ("x", 5, {}),
    "policy": ("on", 5, {}),
    "observers": (None, 5, print, [5]),
    "num_experts": (0, -1, 3, 5, 1.5, "4", 1 << 40, 1 << 70),
    "workspace": (5, "x", {}, torch.zeros(2)),
    "card_memory": (*BUDGETS, 0),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_no_argument_of_prepare_module_is_refused(name: str, made: TinyCheckpoint) -> None:
    module = module_of(made, 0)
    before = dict(module.named_parameters())
    for value in IN_PLACE[name]:
        given = {"module": module, "quantization": quantization_of(made), name: value}
        with pytest.raises(LoaderError) as caught:
            loader.prepare_module(**given)
        assert "\n" not in str(caught.value) and "memory ran out" not in str(caught.value)
    assert dict(module.named_parameters()) == before and not list(module.children())


def test_a_slip_fills_no_memory() -> None:
    with pytest.raises(LoaderError, match="at most 65536 layers"):
        request.asked_layers(range(10**15))
    with pytest.raises(loader.ShardError, match="at most 1048576 ids"):
        Shard(expert_ids=range(10**15))

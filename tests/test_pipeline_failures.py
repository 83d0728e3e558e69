"""A load that fails, wherever it does: one clear error, and nothing left."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from load_fakes import (
    Allocations,
    Raiser,
    RecordingSource,
    banks_of,
    nothing_left,
    recorded,
    same_bits,
)
from pipeline_fakes import make

import loader
from loader import (
    CapacityError,
    CheckpointError,
    ConversionError,
    LifecycleError,
    LoaderError,
    Policy,
    Shard,
    native,
)
from loader.testing.container import edit_tensor, truncate_file

# Failures


def fail_read(kind: str, path: Path) -> Callable[[], None]:
    """What happens to a file, or to the reader, in the middle of a load."""

    def act() -> None:
        if kind == "io":
            raise OSError(5, "Input/output error")
        if kind == "short":
            raise CheckpointError("file ends before the range that was asked for", file=path.name)
        if kind == "truncated":
            os.truncate(path, path.stat().st_size - 64)
        if kind == "rewritten":
            with open(path, "r+b") as file:
                file.write(b"\0")
            os.utime(path, ns=(1, 1))
        if kind == "replaced":  # in place: the same name, other bytes
            path.write_bytes(bytes(path.stat().st_size))
            os.utime(path, ns=(1, 1))
        if kind == "interrupt":
            raise KeyboardInterrupt

    return act


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("kind", ["io", "short", "truncated", "rewritten", "replaced"])
def test_a_read_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, kind: str, layer: int
) -> None:
    if way == "direct" and kind in ("io", "short"):
        pytest.skip("native code makes these errors itself: see the tests of the core")
    made = make(tmp_path / "bad", layers=3)
    make(tmp_path / "good", layers=3, seed=1)
    act = fail_read(kind, made.files()[0])
    raiser = Raiser()
    allocations = Allocations(monkeypatch)

    def before(number: int) -> None:
        if number == layer:
            act()

    with nothing_left(allocations):
        with (
            recorded(made.folder, way, monkeypatch, before=before) as source,
            pytest.raises(CheckpointError) as caught,
        ):
            loader.load(source, observers=[raiser])
        assert allocations.alive() == 0
    assert caught.value.layer == layer
    assert caught.value.file == "model.safetensors"
    assert [raiser.states(number)[-1] for number in range(3)] == ["failed"] * 3
    assert "ready" not in raiser.states(layer)
    assert len(loader.load(tmp_path / "good")) == 3


def test_a_file_that_changes_between_two_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Asking for the next chunk is only a hint: the error comes with the layer that is due."""
    made = make(tmp_path, layers=3)
    allocations = Allocations(monkeypatch)

    def change(event: Any) -> None:
        if (event.layer, event.state) == (0, "ready"):
            os.utime(made.files()[0], ns=(1, 1))

    with (
        nothing_left(allocations),
        recorded(tmp_path, way, monkeypatch) as source,
        pytest.raises(CheckpointError, match="changed while loading") as caught,
    ):
        loader.load(source, observers=[change])
    # What had been read ahead of the change by then is still what it was.
    assert caught.value.layer in ((1,) if way == "direct" else (1, 2))


def test_a_file_that_is_replaced_by_another_is_not_read(tmp_path: Path) -> None:
    """Renamed over: the open file is still the old one, and so is everything that is loaded."""
    made = make(tmp_path / "old", layers=2)
    other = make(tmp_path / "new", layers=2, seed=9)
    wanted = banks_of(loader.load(made.folder))

    def before(number: int) -> None:
        if number == 1:
            os.replace(other.files()[0], made.files()[0])

    with RecordingSource(made.folder, before=before) as source:
        assert same_bits(banks_of(loader.load(source)), wanted)


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("stage", ["write", "finish"])
@pytest.mark.parametrize("error", [RuntimeError("kernel"), KeyboardInterrupt(), SystemExit(1)])
def test_a_converter_that_raises(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    stage: str,
    layer: int,
    error: BaseException,
) -> None:
    make(tmp_path, layers=3)
    allocations = Allocations(monkeypatch)
    if stage == "write" and way == "direct":
        stage = "read"
    inner, calls = getattr(native, stage), iter(range(99))

    def broken(*args: Any) -> Any:
        result = inner(*args)
        if next(calls) == layer:
            raise error
        return result

    monkeypatch.setattr(native, stage, broken)
    wanted = ConversionError if isinstance(error, Exception) else type(error)
    with (
        nothing_left(allocations),
        recorded(tmp_path, way, monkeypatch) as source,
        pytest.raises(wanted) as caught,
    ):
        loader.load(source)
    if isinstance(error, Exception):
        assert caught.value.layer == layer and caught.value.__cause__ is error
    monkeypatch.setattr(native, stage, inner)
    assert len(loader.load(tmp_path)) == 3


def test_every_allocation_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "modelopt-nvfp4", layers=2)
    allocations = Allocations(monkeypatch)
    policy = Policy(layout="wide")
    experts = loader.load(tmp_path, policy=policy)
    banks = {number: layer.spec.nbytes() for number, layer in experts.items()}
    peak = experts.report.to_dict()["memory"]["predicted_peak"]
    del experts
    count = len(allocations.storages)
    assert count == 1 + 2 + 2 * 5, "workspace, staging, and of each layer four tensors and a cache"
    errors = (MemoryError("a"), OSError(12, "b"), torch.OutOfMemoryError("c"), KeyboardInterrupt())
    for number in range(count):
        allocations.storages.clear()
        allocations.fail_at, error = number, errors[number % 4]
        allocations.error = error
        wanted = CapacityError if isinstance(error, Exception) else KeyboardInterrupt
        with nothing_left(allocations), pytest.raises(wanted) as caught:
            loader.load(tmp_path, policy=policy)
        assert allocations.alive() == 0
        if isinstance(error, Exception):
            assert caught.value.__cause__ is error
            layer = None if number < 3 else (number - 3) // 5
            assert caught.value.layer == layer
            if layer is not None and (number - 3) % 5 < 4:
                asked = f"{banks[layer]} bytes of a predicted peak of {peak} bytes"
                assert "memory for the banks" in caught.value.what
                assert caught.value.expected == asked
    allocations.fail_at = None
    assert len(loader.load(tmp_path, policy=policy)) == 2


@pytest.mark.parametrize("state", ["planned", "reading", "prepared", "ready"])
def test_an_interrupt_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    make(tmp_path, layers=2)
    allocations = Allocations(monkeypatch)
    witness = Raiser()
    with nothing_left(allocations), pytest.raises(KeyboardInterrupt):
        loader.load(tmp_path, observers=[Raiser(state, 1, error=KeyboardInterrupt()), witness])
    assert [witness.states(layer)[-1] for layer in range(2)] == ["failed", "failed"]


def test_a_bad_value_in_the_last_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(tmp_path, layers=3)
    name = made.name(2, 1, "up", "scales")

    def poison(scales: Any) -> None:
        scales[0, 5] = np.nan

    edit_tensor(made.folder, name, poison)
    allocations = Allocations(monkeypatch)
    with nothing_left(allocations), pytest.raises(ConversionError) as caught:
        loader.load(tmp_path)
    assert (caught.value.layer, caught.value.tensor) == (2, name)
    experts = loader.load(tmp_path, policy=Policy(nonfinite="warn"))
    assert len(experts.report.nonfinite) == 1 and name in experts.report.nonfinite[0]


def test_a_short_file_is_refused_before_anything_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(tmp_path)
    truncate_file(made.files()[0], drop=64)
    allocations = Allocations(monkeypatch)
    with nothing_left(allocations), pytest.raises(CheckpointError):
        loader.load(tmp_path)
    assert not allocations.storages


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"card_memory": 1000}, CapacityError),
        ({"staging_bytes": 64}, CapacityError),
        ({"layers": [7]}, LoaderError),
        ({"shard": Shard(tp_size=3)}, LoaderError),
        ({"policy": Policy(layout="record")}, LoaderError),
        ({"device": "meta"}, LoaderError),
    ],
)
def test_a_refusal_comes_before_any_allocation_event_or_payload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Any, error: type[LoaderError]
) -> None:
    make(tmp_path, "modelopt-nvfp4")
    allocations, raiser = Allocations(monkeypatch), Raiser()
    with nothing_left(allocations), RecordingSource(tmp_path) as source, pytest.raises(error):
        loader.load(source, observers=[raiser], **settings)
    assert not raiser.events and not source.log and not allocations.storages


def test_a_load_that_fails_while_another_error_is_handled_leaves_that_one_alone(
    tmp_path: Path,
) -> None:
    make(tmp_path)

    def mine() -> None:
        precious = [1, 2, 3]
        raise ValueError(len(precious))

    try:
        mine()
    except ValueError as outer:
        with pytest.raises(LifecycleError):
            loader.load(tmp_path, observers=[Raiser("ready")])
        assert outer.__traceback__ is not None and outer.__traceback__.tb_next is not None
        assert outer.__traceback__.tb_next.tb_frame.f_locals["precious"] == [1, 2, 3]

"""One break at a time, and the check that finds it: what is here keeps the checks honest.

Every mutation is shown to pass unbroken first; a check that always fails would find anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from load_fakes import SMALL, module_of, quantization_of

import loader
from loader import FAMILIES, LayerEvent, Shard, bank, layer_plan, native, pieces
from loader.bank import LayerSpec
from loader.converter import ConversionCache
from loader.reference import convert
from loader.testing.checkpoint import TinyCheckpoint, tiny_checkpoint

Patch = pytest.MonkeyPatch
EVERYTHING = 1 << 30
"""More samples than there are columns: the check is exhaustive."""


def make(folder: Path, dialect: str = "awq-gemm", **more: Any) -> TinyCheckpoint:
    given: dict[str, Any] = dict(SMALL, dialect=dialect, attention=False, hidden=96)
    if "nvfp4" in dialect:
        given["group"] = None
    return tiny_checkpoint(folder, **{**given, **more})


def verified(folder: Path, shard: Shard | None = None) -> loader.VerifyReport:
    return loader.verify(loader.load(folder, shard=shard), folder, samples=EVERYTHING)


def assert_found(before: loader.VerifyReport, after: loader.VerifyReport) -> None:
    assert before.ok and not before.mismatch_count and not before.forward_failures
    assert not after.ok
    assert after.mismatch_count > 0, "the banks are compared, not only the results of a call"


# Names


@pytest.mark.parametrize(
    ("family", "number"), [("qwen3-moe", 0), ("mixtral", 1), ("mixtral-hf5", 2)]
)
def test_gate_and_up_swapped_in_the_family_table(
    tmp_path: Path, monkeypatch: Patch, family: str, number: int
) -> None:
    make(tmp_path, family=family)
    before = verified(tmp_path)
    names = FAMILIES[number].projections
    gate, up = names["gate"], names["up"]
    monkeypatch.setitem(names, "gate", up)
    monkeypatch.setitem(names, "up", gate)
    after = verified(tmp_path)
    assert_found(before, after)
    assert {item.projection for item in after.mismatches} <= {"gate", "up"}
    assert after.forward_failures == after.forward_count


@pytest.mark.parametrize("dialect", ["awq-gemm", "ct-int4", "modelopt-nvfp4"])
def test_up_before_gate_in_fused_experts(tmp_path: Path, monkeypatch: Patch, dialect: str) -> None:
    make(tmp_path, dialect, fused=True)
    before = verified(tmp_path)
    monkeypatch.setattr(pieces, "GATE", pieces.UP)
    monkeypatch.setattr(pieces, "UP", pieces.GATE)
    assert_found(before, verified(tmp_path))


@pytest.mark.parametrize("dialect", ["awq-gemm", "ct-int4", "ct-nvfp4", "modelopt-nvfp4"])
def test_experts_shifted_by_one(tmp_path: Path, monkeypatch: Patch, dialect: str) -> None:
    make(tmp_path, dialect)
    before = verified(tmp_path)
    build = layer_plan.build_pieces

    def shifted(source: Any, places: Any, part: Any, spec: Any) -> Any:
        built = build(source, places, part, spec)
        built["slot"] = (built["slot"] + 1) % len(part.expert_ids)
        return built

    monkeypatch.setattr(layer_plan, "build_pieces", shifted)
    assert_found(before, verified(tmp_path))


# Meaning


def mutate_spec(monkeypatch: Patch, change: Callable[[LayerSpec], LayerSpec]) -> None:
    original = layer_plan.layer_spec

    def mutated(*args: Any, **more: Any) -> tuple[LayerSpec, str]:
        spec, reason = original(*args, **more)
        return change(spec), reason

    monkeypatch.setattr(layer_plan, "layer_spec", mutated)


@pytest.mark.parametrize("dialect", ["awq-gemm", "ct-int4-asym"])
def test_the_phase_dropped(tmp_path: Path, monkeypatch: Patch, dialect: str) -> None:
    """A TP slice of W2 starts in the middle of a group: its first group is a short one."""
    make(tmp_path, dialect, group=128, intermediate=192, hidden=128)
    shards = [Shard(tp_size=2, tp_rank=rank) for rank in range(2)]
    before = [verified(tmp_path, shard) for shard in shards]
    mutate_spec(
        monkeypatch,
        lambda spec: dataclasses.replace(spec, w2=dataclasses.replace(spec.w2, phase=0)),
    )
    after = [verified(tmp_path, shard) for shard in shards]
    assert after[0].ok, "rank 0 has no phase to drop"
    assert_found(before[1], after[1])
    assert {item.projection for item in after[1].mismatches} == {"down"}


@pytest.mark.parametrize(
    ("dialect", "taken_for"), [("ct-nvfp4", "multiplier"), ("modelopt-nvfp4", "divisor")]
)
def test_the_divisor_used_as_a_multiplier(
    tmp_path: Path, monkeypatch: Patch, dialect: str, taken_for: str
) -> None:
    make(tmp_path, dialect)
    before = verified(tmp_path)

    def sense(spec: LayerSpec) -> LayerSpec:
        assert spec.w13.global_sense != taken_for
        banks = (dataclasses.replace(one, global_sense=taken_for) for one in spec.banks)
        return LayerSpec(*banks, spec.awq_rounding)

    mutate_spec(monkeypatch, sense)
    after = verified(tmp_path)
    assert_found(before, after)
    assert after.mismatch_count > 0.9 * after.values * 14 / 16, "all but the zeros are wrong"


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (bank, "NIBBLE_OF_ROW", (0, 1, 2, 3, 4, 5, 6, 7)),
        (convert, "_AWQ_NIBBLE", (0, 2, 4, 6, 1, 3, 5, 7)),
        (convert, "_AWQ_NIBBLE", (0, 1, 2, 3, 4, 5, 6, 7)),
    ],
)
def test_a_nibble_order_that_is_wrong(
    tmp_path: Path, monkeypatch: Patch, owner: Any, name: str, value: tuple[int, ...]
) -> None:
    """The writing side alone: what reads the bank keeps its order."""
    make(tmp_path)
    before, original = verified(tmp_path), getattr(owner, name)
    with monkeypatch.context() as patch, native.serving(native.REFERENCE):
        patch.setattr(owner, name, value)
        experts = loader.load(tmp_path)
        assert getattr(owner, name) != original
    assert_found(before, loader.verify(experts, tmp_path, samples=EVERYTHING))


def test_zero_points_of_gate_and_up_left_side_by_side(tmp_path: Path, monkeypatch: Patch) -> None:
    make(tmp_path)
    before = verified(tmp_path)
    monkeypatch.setattr(native, "finish", lambda *args: torch.empty((0, 6), dtype=torch.int64))
    assert_found(before, verified(tmp_path))


# Lifecycle


def assert_lifecycle(run: Callable[[list[Any]], dict[int, int]]) -> None:
    """Per layer: prepared, one release of the cache, released, ready."""
    log: list[Any] = []
    releases = run(log)
    for layer, count in releases.items():
        assert count == 1, f"layer {layer} released its cache {count} times"
    states = [entry.state if isinstance(entry, LayerEvent) else entry for entry in log]
    kept = [state for state in states if state not in ("planned", "reading", "converting")]
    assert kept == ["prepared", "release", "released", "ready"] * len(releases)


def loading(folder: Path, monkeypatch: Patch) -> Callable[[list[Any]], dict[int, int]]:
    def run(log: list[Any]) -> dict[int, int]:
        with monkeypatch.context() as patch:
            watch(patch, log)
            report = loader.load(folder, observers=[log.append]).report
        return {number: layer.releases for number, layer in report.layers.items()}

    return run


def converting(made: TinyCheckpoint, monkeypatch: Patch) -> Callable[[list[Any]], dict[int, int]]:
    def run(log: list[Any]) -> dict[int, int]:
        with monkeypatch.context() as patch:
            watch(patch, log)
            loader.prepare_module(
                module_of(made), quantization=quantization_of(made), observers=[log.append]
            )
        return {0: log.count("release")}

    return run


def watch(patch: Patch, log: list[Any]) -> None:
    """Log what really drops the cache, whatever ``release`` has become."""
    gone = torch.Tensor

    class Watched(ConversionCache):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "_state" and value is None and isinstance(vars(self).get(name), gone):
                log.append("release")
            super().__setattr__(name, value)

    for module in (loader.pipeline, loader.inplace):
        patch.setattr(module, "ConversionCache", Watched)


def skipped(cache: ConversionCache) -> int:
    return cache.nbytes


def counted_only(cache: ConversionCache) -> int:
    cache.released += 1
    return cache.nbytes


def twice(cache: ConversionCache) -> int:
    ConversionCache.discard(cache)
    cache._state = torch.empty((0, 3))
    ConversionCache.discard(cache)
    cache.released += 1
    return cache.nbytes


@pytest.mark.parametrize("mutation", [skipped, counted_only, twice])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_release_skipped_or_doubled(
    tmp_path: Path, monkeypatch: Patch, mutation: Callable[..., int], in_place: bool
) -> None:
    made = make(tmp_path, "modelopt-nvfp4")
    run = converting(made, monkeypatch) if in_place else loading(tmp_path, monkeypatch)
    assert_lifecycle(run)
    monkeypatch.setattr(ConversionCache, "release", mutation)
    with pytest.raises(AssertionError):
        assert_lifecycle(run)

"""A plan's memory: staging that is kept or refused, and a card that is too small."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from load_fakes import Allocations, RecordingSource, banks_of, same_bits
from plan_fakes import small

import loader
from loader import room
from loader.errors import CapacityError
from loader.room import Room
from loader.testing.checkpoint import TinyCheckpoint


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """A plain layer with larger rows than the quantized one before it."""
    return small(tmp_path_factory.mktemp("mixed"), dialect="awq-gemm", excluded=(1,))


def _least(folder: Path) -> int:
    with pytest.raises(CapacityError) as caught:
        loader.plan(folder, staging_bytes=2)
    assert "staging_bytes is too small" in caught.value.what
    assert caught.value.found == "2 bytes"
    words = str(caught.value.expected).split()
    assert words[:2] == ["at", "least"] and words[3] == "bytes"
    return int(words[2])


def test_the_least_staging_that_the_error_names_works_and_nothing_less(
    mixed: TinyCheckpoint,
) -> None:
    least = _least(mixed.folder)
    assert least == 2 * 32 * 72 * 2  # two buffers of 32 bf16 or fp16 rows of H
    wanted = banks_of(loader.load(mixed.folder))
    assert same_bits(banks_of(loader.load(mixed.folder, staging_bytes=least)), wanted)
    for call in (loader.plan, loader.load):
        with pytest.raises(CapacityError, match=f"at least {least} bytes, found {least - 1} bytes"):
            call(mixed.folder, staging_bytes=least - 1)


@settings(deadline=None, max_examples=60)
@given(staging=st.integers(0, 40_000) | st.integers(0, 1 << 20))
def test_every_staging_budget_is_refused_or_kept(mixed: TinyCheckpoint, staging: int) -> None:
    least = 2 * 32 * 72 * 2
    if staging < least:
        with pytest.raises(CapacityError, match=f"at least {least} bytes"):
            loader.plan(mixed.folder, staging_bytes=staging)
        return
    plan = loader.plan(mixed.folder, staging_bytes=staging)
    assert plan.buffer_bytes > 0
    assert plan.staging_bytes == plan.buffers * plan.buffer_bytes <= staging
    assert 2 * plan.chunk_limit <= staging
    for layer in plan.layers:
        chunks = layer.chunks(plan.chunk_limit)
        assert max(chunk.buffer_bytes for chunk in chunks) <= plan.chunk_limit
        assert sum(chunk.bytes_read for chunk in chunks) == plan.read_bytes(layer.layer)


def test_a_card_that_is_too_small_is_refused_by_load_before_anything_is_read_or_allocated(
    mixed: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocations = Allocations(monkeypatch)
    with RecordingSource(mixed.folder) as source:
        plan = loader.plan(source, card_memory=1 << 40)
        assert plan.fits is True
        plan.require_fit()
        peak = plan.predicted_peak
        assert peak == plan.resident_bytes + plan.staging_bytes + plan.conversion_bytes
        assert loader.plan(source, card_memory=peak).fits is True
        short = loader.plan(source, card_memory=peak - 1000)
        assert short.fits is False and short.to_dict()["memory"]["fits"] is False
        with pytest.raises(CapacityError, match="1000 bytes too many") as caught:
            loader.load(source, card_memory=peak - 1000)
        assert source.log == []
    assert allocations.storages == []
    assert f"within {peak - 1000} bytes" in str(caught.value) and f"found {peak}" in str(
        caught.value
    )
    with RecordingSource(mixed.folder) as source:
        loader.load(source, card_memory=peak)


def test_without_a_budget_the_free_memory_counts(
    mixed: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "room_of", lambda device: Room(12345, "limit of the test"))
    plan = loader.plan(mixed.folder)
    assert (plan.card_bytes, plan.fits) == (12345, False)
    with pytest.raises(CapacityError, match="limit of the test") as caught:
        loader.load(mixed.folder)
    assert f"{plan.predicted_peak - 12345} bytes too many" in str(caught.value)

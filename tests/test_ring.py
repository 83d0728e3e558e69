"""Sizes of the staging ring: within the budget, whatever it is; and what a plan makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fake_card import plans_for_a_card
from hypothesis import given
from hypothesis import strategies as st

import loader
from loader import memory
from loader.errors import CapacityError
from loader.plan import DEFAULT_STAGING_BYTES
from loader.ring import CHUNKS, MOST_THREADS, PARTS, RingShape, ring_shape
from loader.stream import open_staging
from loader.testing.checkpoint import tiny_checkpoint

budgets = st.integers(PARTS * 4096, 1 << 32)


@given(budgets, st.integers(1, 256), st.booleans(), st.data())
def test_a_ring_stays_within_its_budget(
    budget: int, cores: int, direct: bool, data: st.DataObject
) -> None:
    most = budget // PARTS // 64 * 64
    chunk = data.draw(st.integers(1, most))
    shape = ring_shape(budget, chunk, cores, direct)
    assert shape.nbytes == shape.host_bytes + shape.card_bytes <= budget
    assert shape.chunk_bytes >= chunk and shape.chunk_bytes % 64 == 0
    assert shape.host_bytes > 0
    if direct:
        assert 1 <= shape.threads <= min(MOST_THREADS, cores)
        assert shape.chunks == CHUNKS and shape.slots >= shape.threads
    else:
        assert shape.threads == 0 and shape.slot_bytes >= chunk and shape.slots == 2


def test_the_usual_ring() -> None:
    shape = ring_shape(DEFAULT_STAGING_BYTES, 16 << 20, 16, True)
    assert shape == RingShape(16 << 20, 3, 838_848, 20, 10)
    assert shape.nbytes <= DEFAULT_STAGING_BYTES < 1.01 * shape.nbytes


@pytest.mark.parametrize("dialect", ("awq-gemm", "modelopt-nvfp4"))
def test_a_plan_for_a_card_counts_what_lies_on_the_card(tmp_path: Path, dialect: str) -> None:
    made = tiny_checkpoint(tmp_path, dialect=dialect, hidden=512, intermediate=256, experts=4)
    with plans_for_a_card() as device:
        plan = loader.plan(made.folder, device=device, card_memory=1 << 30)
    host = loader.plan(made.folder)
    assert plan.ring is not None and host.ring is None
    assert plan.staging_bytes == plan.ring.nbytes <= DEFAULT_STAGING_BYTES
    banks = sum(layer.spec.nbytes() for layer in plan.layers)
    assert plan.resident_bytes == banks + plan.workspace_bytes
    assert plan.predicted_peak == plan.resident_bytes + plan.ring.card_bytes + plan.conversion_bytes
    assert plan.conversion_bytes < 1 << 20
    assert [layer.spec for layer in plan.layers] == [layer.spec for layer in host.layers]
    assert plan.to_dict()["device"] == "cuda:0"


def test_chunks_of_a_plan_fit_the_ring(tmp_path: Path) -> None:
    made = tiny_checkpoint(tmp_path, hidden=512, intermediate=256, experts=8, layers=2)
    for staging in (256 << 10, 1 << 20, DEFAULT_STAGING_BYTES):
        with plans_for_a_card() as device:
            plan = loader.plan(
                made.folder, device=device, card_memory=1 << 30, staging_bytes=staging
            )
        assert plan.ring is not None
        for layer in plan.layers:
            kept, again = plan.chunks(layer), plan.chunks(layer)
            assert kept is not again
            assert [chunk.reads for chunk in kept] == [chunk.reads for chunk in again]
            assert max(chunk.buffer_bytes for chunk in kept) <= plan.ring.chunk_bytes


def test_a_budget_below_the_smallest_piece_is_refused_with_one_that_works(tmp_path: Path) -> None:
    made = tiny_checkpoint(tmp_path, hidden=512, intermediate=256, experts=4)
    with plans_for_a_card() as device:
        with pytest.raises(CapacityError) as caught:
            loader.plan(made.folder, device=device, card_memory=1 << 30, staging_bytes=4096)
        least = int(str(caught.value.expected).split()[2])
        plan = loader.plan(made.folder, device=device, card_memory=1 << 30, staging_bytes=least)
        assert plan.staging_bytes <= least


def test_a_plan_that_does_not_fit_the_card_says_by_how_much(tmp_path: Path) -> None:
    made = tiny_checkpoint(tmp_path, hidden=512, intermediate=256, experts=4)
    with plans_for_a_card() as device:
        plan = loader.plan(made.folder, device=device, card_memory=1000)
        with pytest.raises(CapacityError, match=f"{plan.predicted_peak - 1000} bytes too many"):
            plan.require_fit()


def test_memory_for_pinning_has_pages_of_its_own() -> None:
    for nbytes in (1, 4096, 70_000):
        tensor = memory.mapped((nbytes,))
        assert tensor.data_ptr() % 4096 == 0 and tensor.nbytes == nbytes
        assert not tensor.any()


def test_what_an_allocation_was_for_and_what_was_predicted() -> None:
    with (
        pytest.raises(CapacityError) as caught,
        memory.allocating("the banks", 100, layer=3, predicted_peak=5000),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert caught.value.layer == 3
    assert caught.value.expected == "100 bytes of a predicted peak of 5000 bytes"
    assert "OutOfMemoryError" in str(caught.value)


def test_the_host_is_staged_as_before(tmp_path: Path) -> None:
    made = tiny_checkpoint(tmp_path, hidden=128, intermediate=96, experts=2, group=32)
    plan = loader.plan(made.folder)
    staging = open_staging(plan)
    assert staging.nbytes == plan.staging_bytes
    buffer = staging.buffer(0, 16)
    assert staging.arrived(buffer) is buffer
    staging.close()

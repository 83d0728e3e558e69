"""Loads to a card: the same bits as on the host, whatever the source; memory that comes back."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from bank_oracle import small
from card import CARD, needs_card
from load_fakes import SMALL, RecordingSource, module_of, quantization_of

import loader
from loader import native
from loader.card import card_memory
from loader.cuda_core import CudaCore, CudaError
from loader.errors import CapacityError, CheckpointError, ConversionError, LoaderError
from loader.plan import DEFAULT_STAGING_BYTES
from loader.testing.checkpoint import tiny_checkpoint
from loader.testing.container import edit_tensor

pytestmark = needs_card()

DIALECTS = ("awq-gemm", "awq-gptqmodel", "ct-int4", "ct-int4-asym", "ct-nvfp4", "modelopt-nvfp4")
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _nothing_stays_on_the_card() -> Iterator[None]:
    """Whatever a test does, once its objects are gone the card holds what it held before."""
    torch.empty(1, device=CARD)
    gc.collect()
    torch.cuda.empty_cache()
    before = card_memory(CARD)
    yield
    gc.collect()
    torch.cuda.empty_cache()
    after = card_memory(CARD)
    assert after.requested == before.requested
    assert after.reserved == before.reserved


def assert_same_as_on_the_host(folder: Path | RecordingSource, **settings: Any) -> None:
    source = folder.name if isinstance(folder, RecordingSource) else folder
    mine = loader.load(folder, CARD, **settings)
    wanted = loader.load(source, "cpu", **settings)
    assert list(mine) == list(wanted)
    for layer in wanted:
        for number, (a, b) in enumerate(
            zip(mine[layer].banks(), wanted[layer].banks(), strict=True)
        ):
            assert a.device == CARD
            differ = (a.cpu().view(torch.uint8) != b.view(torch.uint8)).flatten().nonzero()
            assert not len(differ), f"layer {layer}, tensor {number}, byte {int(differ[0])}"
    m = mine.report.memory
    predicted = mine.report.planned["memory"]
    assert m.resident == predicted["predicted_resident"]
    assert 0 <= predicted["predicted_peak"] - (m.peak - m.baseline) <= 32 * MIB


@pytest.mark.parametrize("fused", (False, True), ids=("separate", "fused"))
@pytest.mark.parametrize("dialect", DIALECTS)
def test_same_bits_as_on_the_host(tmp_path: Path, dialect: str, fused: bool) -> None:
    nvfp4 = "nvfp4" in dialect
    tiny_checkpoint(
        tmp_path, dialect=dialect, fused=fused, hidden=224, intermediate=352, experts=5, layers=3,
        shards=2, **({} if nvfp4 else {"group": 64}),
    )  # fmt: skip
    layouts = ("compact", "wide") if nvfp4 else ("compact", "wide", "record")
    shards = (
        loader.Shard(),
        loader.Shard(tp_rank=1, tp_size=2),
        loader.Shard(ep_rank=1, ep_size=2),
    )
    for layout, shard, rounding in product(layouts, shards, ("exact", "fused_bias")):
        policy = loader.Policy(layout=layout, awq_rounding=rounding)
        assert_same_as_on_the_host(tmp_path, shard=shard, policy=policy)


@pytest.mark.parametrize("staging", (256 << 10, 1 * MIB, DEFAULT_STAGING_BYTES))
@pytest.mark.parametrize("dialect", ("awq-gemm", "ct-int4-asym", "modelopt-nvfp4"))
def test_any_staging_budget(tmp_path: Path, dialect: str, staging: int) -> None:
    tiny_checkpoint(
        tmp_path, dialect=dialect, hidden=512, intermediate=448, experts=8, layers=2, shards=3,
        order="random", header_lengths=[70_001, 70_002, 70_007],
    )  # fmt: skip
    plan = loader.plan(tmp_path, device=CARD, staging_bytes=staging)
    assert plan.staging_bytes <= staging
    assert_same_as_on_the_host(tmp_path, staging_bytes=staging)


def test_odd_sizes_and_excluded_layers(tmp_path: Path) -> None:
    made = small(tmp_path, layers=3, excluded=(1,), hidden=88, intermediate=56, group=16)
    assert_same_as_on_the_host(made.folder)


@pytest.mark.parametrize("only", ("fp16", "bf16", "neither"))
@pytest.mark.parametrize("dialect", ("awq-gemm", "ct-int4-asym"))
def test_scales_of_32_bits(tmp_path: Path, dialect: str, only: str) -> None:
    made = tiny_checkpoint(
        tmp_path, dialect=dialect, scale_dtype="F32", hidden=1024, intermediate=512, group=16,
        experts=6, layers=2, attention=False,
    )  # fmt: skip

    def edit(scales: Any) -> None:
        scales.view("uint32")[...] &= 0xFFFF0000
        if only != "bf16":
            scales[1, 2] = 1 + 2**-10
        if only != "fp16":
            scales[-1, -1] = 2.0**17

    for layer in range(made.layers):
        for expert in range(made.experts):
            for projection in ("gate", "up", "down"):
                edit_tensor(tmp_path, made.name(layer, expert, projection, made.writer.scale), edit)
    if only == "neither":
        for device in ("cpu", CARD):
            with pytest.raises(ConversionError, match="neither 16-bit format"):
                loader.load(tmp_path, device)
        return
    for staging in (1 * MIB, DEFAULT_STAGING_BYTES):
        assert_same_as_on_the_host(tmp_path, staging_bytes=staging)
    wanted = torch.bfloat16 if only == "bf16" else torch.float16
    assert loader.load(tmp_path, CARD)[1].spec.w2.scale_dtype == wanted


@pytest.mark.parametrize("dialect", ("awq-gemm", "ct-nvfp4"))
def test_a_source_that_lends_no_descriptor(tmp_path: Path, dialect: str) -> None:
    made = tiny_checkpoint(tmp_path, dialect=dialect, hidden=256, intermediate=192, experts=4)
    assert_same_as_on_the_host(RecordingSource(made.folder), staging_bytes=1 * MIB)


def test_pageable_memory_serves_where_pinning_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = tiny_checkpoint(tmp_path, hidden=256, intermediate=192, experts=4)

    def refused(self: CudaCore, memory: torch.Tensor, device: torch.device) -> None:
        raise CudaError("host memory could not be pinned", found="CUDA error 2")

    pinned = loader.load(made.folder, CARD).report.memory
    assert 0 < pinned.host_pinned <= 1.1 * DEFAULT_STAGING_BYTES
    assert pinned.counters is not None and not pinned.counters.why_pageable
    monkeypatch.setattr(CudaCore, "pin", refused)
    for source in (made.folder, RecordingSource(made.folder)):
        report = loader.load(source, CARD).report
        assert report.memory.host_pinned == 0
        assert "could not be pinned" in str(report)
        assert "could not be pinned" in report.to_dict()["memory"]["counters"]["why_pageable"]
    assert "pageable" in caplog.text
    assert_same_as_on_the_host(made.folder)


def test_the_counters_of_the_card(tmp_path: Path) -> None:
    made = tiny_checkpoint(
        tmp_path, hidden=1024, intermediate=768, experts=16, layers=4, payload="fast"
    )
    experts = loader.load(made.folder, CARD)
    report = experts.report.to_dict()
    memory, counters = report["memory"], report["memory"]["counters"]
    assert memory["allocated"] == torch.cuda.memory_allocated(CARD)
    assert memory["reserved"] == torch.cuda.memory_reserved(CARD)
    assert memory["reserved"] - memory["allocated"] <= 64 * MIB
    assert memory["overhead"] <= DEFAULT_STAGING_BYTES + 64 * MIB
    before = counters["baseline"]
    assert memory["allocated"] - before["allocated"] == memory["resident"] + counters["rounding"]
    parts = memory["allocated"] + counters["unused"] + counters["foreign"]
    assert memory["device_used"] == parts
    assert counters["foreign"] > 0
    assert "used, as the driver says" in str(experts.report)


@pytest.mark.parametrize("layout", ("compact", "record", "wide"))
def test_what_is_wrong_in_the_payload_is_said_as_on_the_host(tmp_path: Path, layout: str) -> None:
    made = tiny_checkpoint(tmp_path, hidden=128, intermediate=96, experts=3, group=32, layers=2)

    def spoil(scales: Any) -> Any:
        scales = scales.copy()
        scales.reshape(-1).view("uint16")[77] = 0x7E00
        return scales

    edit_tensor(made.folder, made.name(1, 2, "up", made.writer.scale), spoil)
    said = []
    for device in ("cpu", CARD):
        with pytest.raises(ConversionError) as caught:
            loader.load(made.folder, device, policy=loader.Policy(layout=layout))
        said.append(str(caught.value))
    assert said[0] == said[1]
    policy = loader.Policy(layout=layout, nonfinite="warn")
    kept = [loader.load(made.folder, d, policy=policy).report.nonfinite for d in ("cpu", CARD)]
    assert kept[0] == kept[1] and kept[0]


def test_a_file_cut_short_while_it_is_loaded(tmp_path: Path) -> None:
    made = tiny_checkpoint(tmp_path, hidden=512, intermediate=512, experts=8, layers=3)
    file = made.files()[0]

    def cut(event: loader.LayerEvent) -> None:
        if event.layer == 1 and event.state == "reading":
            with file.open("r+b") as open_file:
                open_file.truncate(100_000)

    with pytest.raises(CheckpointError) as caught:
        loader.load(made.folder, CARD, observers=[cut], staging_bytes=256 << 10)
    assert caught.value.layer in (1, 2) and caught.value.file == file.name


def test_out_of_memory_in_the_middle_frees_everything_and_says_what_was_asked(
    tmp_path: Path,
) -> None:
    large = tiny_checkpoint(
        tmp_path / "large", hidden=2048, intermediate=1024, experts=32, layers=4, payload="fast"
    )
    little = tiny_checkpoint(tmp_path / "little", hidden=128, intermediate=96, experts=2, group=32)
    plan = loader.plan(large.folder, device=CARD)
    own = card_memory(CARD).reserved
    _, total = torch.cuda.mem_get_info(CARD)
    room = own + plan.resident_bytes // 2 + plan.ring.nbytes  # type: ignore[union-attr]  # there is one on a card
    torch.cuda.set_per_process_memory_fraction(room / total, CARD)
    try:
        with pytest.raises(CapacityError) as caught:
            loader.load(large.folder, CARD)
        assert caught.value.layer is not None and caught.value.layer > 0
        nbytes = plan.layers[0].spec.nbytes()
        assert str(nbytes) in caught.value.expected
        assert str(plan.predicted_peak) in caught.value.expected
        assert card_memory(CARD).reserved == own
        assert list(loader.load(little.folder, CARD)) == list(range(little.layers))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, CARD)


def test_a_plan_that_does_not_fit_allocates_nothing(tmp_path: Path) -> None:
    made = tiny_checkpoint(tmp_path, hidden=128, intermediate=96, experts=2, group=32)
    before = card_memory(CARD)
    with pytest.raises(CapacityError, match="does not fit"):
        loader.load(made.folder, CARD, card_memory=1000)
    assert card_memory(CARD) == before


def test_a_card_that_is_not_there_is_refused(tmp_path: Path) -> None:
    made = tiny_checkpoint(tmp_path, hidden=128, intermediate=96, experts=2, group=32)
    for call in (loader.plan, loader.load):
        with pytest.raises(loader.UnsupportedError, match="no such device"):
            call(made.folder, device="cuda:99")


def test_an_observer_that_raises_leaves_nothing(tmp_path: Path) -> None:
    made = tiny_checkpoint(tmp_path, hidden=512, intermediate=512, experts=8, layers=3)
    for state in ("reading", "converting", "prepared", "released", "ready"):

        def fails(event: loader.LayerEvent, state: str = state) -> None:
            if event.layer == 1 and event.state == state:
                raise RuntimeError(state)

        with pytest.raises(LoaderError, match=state):
            loader.load(made.folder, CARD, observers=[fails], staging_bytes=256 << 10)


def test_parameters_that_lie_on_the_card_are_converted_there(tmp_path: Path) -> None:
    made = tiny_checkpoint(tmp_path, **SMALL, attention=False, scale_dtype="F16")
    module = module_of(made, 0).to(CARD)
    prepared = loader.prepare_module(module, quantization=quantization_of(made))
    wanted = loader.load(made.folder)[0]
    for a, b in zip(prepared.banks(), wanted.banks(), strict=True):
        assert torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8))


def test_native_code_serves_the_card() -> None:
    implementation = native.implementation_for(CARD)
    assert implementation is not None and implementation.name.startswith("cuda sm_")

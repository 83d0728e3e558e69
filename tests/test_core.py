"""The native core against the reference: equal bits on every instruction set, sound bounds."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import loader
from loader.bank import BankSpec, LayerSpec
from loader.checkpoint.scheme import Role
from loader.converter import ConversionCache, LayerBanks
from loader.core import CORE, Core, DescriptorError, ReadError
from loader.layer_plan import LayerPlan
from loader.pieces import DESCRIPTOR_FIELDS, descriptors_of
from loader.reference import convert
from loader.testing.checkpoint import tiny_checkpoint

pytestmark = pytest.mark.skipif(CORE is None, reason="the native core was not built")

HOST = torch.device("cpu")
DIALECTS = ("awq-gemm", "awq-gptqmodel", "ct-int4", "ct-int4-asym", "ct-nvfp4", "modelopt-nvfp4")
ISA_NAMES = ("portable", "AVX2", "AVX-512")


def core() -> Core:
    assert CORE is not None
    return CORE


@pytest.fixture(params=range(3), ids=ISA_NAMES)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Each instruction set in turn; those that this machine lacks are skipped."""
    if request.param > core().best_isa:
        pytest.skip(f"this machine has no {ISA_NAMES[request.param]}")
    monkeypatch.setattr(core(), "isa", request.param)
    return int(request.param)


def chunks_of(folder: Path, layer: LayerPlan, files: tuple[str, ...], limit: int):
    """Chunks with their bytes in memory."""
    for chunk in layer.chunks(limit):
        data = torch.zeros(chunk.buffer_bytes, dtype=torch.uint8)
        for read in chunk.reads:
            with open(folder / files[read.file], "rb") as file:
                file.seek(read.offset)
                raw = bytearray(file.read(read.length))
            data[read.at : read.at + read.length] = torch.frombuffer(raw, dtype=torch.uint8)
        yield chunk, data


def run(implementation, spec: LayerSpec, start: list[torch.Tensor], chunks):
    """Bank tensors and findings after one implementation converted all chunks."""
    tensors = [tensor.clone() for tensor in start]
    cache = ConversionCache(spec, HOST)
    numbers = spec.to_ints()
    found = [
        implementation.write(
            data, torch.from_numpy(chunk.descriptors()), tensors, cache.globals, numbers
        )
        for chunk, data in chunks
    ]
    found.append(implementation.finish(tensors, cache.globals, numbers))
    return tensors, found


def assert_equal_bits(mine: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for number, (a, b) in enumerate(zip(mine, wanted, strict=True)):
        differ = (a.view(torch.uint8) != b.view(torch.uint8)).flatten().nonzero()
        assert not len(differ), f"tensor {number} differs first at byte {int(differ[0])}"


@pytest.mark.parametrize("fused", (False, True), ids=("separate", "fused"))
@pytest.mark.parametrize("dialect", DIALECTS)
def test_same_bits_as_the_reference(tmp_path: Path, isa: int, dialect: str, fused: bool) -> None:
    group = {} if "nvfp4" in dialect else {"group": 64}
    tiny_checkpoint(
        tmp_path, dialect=dialect, fused=fused, hidden=224, intermediate=352, experts=3, **group
    )
    layouts = ("compact", "wide") if "nvfp4" in dialect else ("compact", "wide", "record")
    for layout, (rank, size), rounding, limit in product(
        layouts, ((0, 1), (1, 2)), ("exact", "fused_bias"), (1 << 24, 30_000)
    ):
        plan = loader.plan(
            tmp_path,
            loader.Shard(tp_rank=rank, tp_size=size),
            loader.Policy(layout=layout, awq_rounding=rounding),
            [1],
        )
        layer = plan.layers[0]
        files = plan.checkpoint.catalog.files
        chunks = list(chunks_of(tmp_path, layer, files, limit))
        start = LayerBanks.allocate(layer.spec, HOST, layer.zero_point).tensors
        wanted, found = run(convert, layer.spec, start, chunks)
        mine, native = run(core(), layer.spec, start, chunks)
        assert_equal_bits(mine, wanted)
        assert all(torch.equal(a, b) for a, b in zip(native, found, strict=True))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_reading_from_a_file_equals_memory(tmp_path: Path, isa: int, dialect: str) -> None:
    tiny_checkpoint(tmp_path, dialect=dialect, hidden=256, intermediate=192, experts=4)
    plan = loader.plan(tmp_path)
    layer = plan.layers[0]
    start = LayerBanks.allocate(layer.spec, HOST, layer.zero_point).tensors
    files = plan.checkpoint.catalog.files
    wanted, _ = run(convert, layer.spec, start, list(chunks_of(tmp_path, layer, files, 1 << 24)))
    for buffer_bytes, threads in ((1 << 20, 2), (36_864, 1), (36_864, 3)):
        mine = [tensor.clone() for tensor in start]
        cache = ConversionCache(layer.spec, HOST)
        buffers = torch.empty((threads, buffer_bytes), dtype=torch.uint8)
        for chunk in layer.chunks(1 << 24):
            chunk.pieces["offset"] = chunk.pieces["begin"]
            with open(tmp_path / files[0], "rb") as file:
                core().read(
                    file.fileno(),
                    os.fstat(file.fileno()).st_size,
                    torch.from_numpy(descriptors_of(chunk.pieces)),
                    mine,
                    cache.globals,
                    buffers,
                    layer.spec.to_ints(),
                )
        core().finish(mine, cache.globals, layer.spec.to_ints())
        assert_equal_bits(mine, wanted)


def test_plain_weights(tmp_path: Path, isa: int) -> None:
    tiny_checkpoint(tmp_path, excluded=(0,), hidden=128, intermediate=96, experts=2, group=32)
    layer = loader.plan(tmp_path).layers[0]
    files = loader.plan(tmp_path).checkpoint.catalog.files
    chunks = list(chunks_of(tmp_path, layer, files, 1 << 24))
    start = LayerBanks.allocate(layer.spec, HOST, None).tensors
    assert_equal_bits(
        run(core(), layer.spec, start, chunks)[0], run(convert, layer.spec, start, chunks)[0]
    )


def small_layer() -> LayerSpec:
    def bank(k: int, n: int, projections: int) -> BankSpec:
        return BankSpec("int4", "compact", 2, k, n, 32, 0, projections, torch.float16)

    return LayerSpec(bank(64, 64, 2), bank(32, 64, 1))


SANE = {
    "role": int(Role.CODES_KN),
    "bank": 0,
    "projection": 0,
    "slot": 0,
    "offset": 0,
    "rows": 64,
    "row_bytes": 16,
    "skip": 0,
    "cols": 32,
    "dest_row": 0,
    "expect_a": -1,
    "expect_b": -1,
}


def descriptor(**changes: int) -> torch.Tensor:
    return torch.tensor([[{**SANE, **changes}[name] for name in DESCRIPTOR_FIELDS]])


def test_the_sane_descriptor_is_accepted() -> None:
    spec = small_layer()
    banks = LayerBanks.allocate(spec, HOST, None)
    chunk = torch.zeros(1024, dtype=torch.uint8)
    found = core().write(chunk, descriptor(), banks.tensors, torch.empty((0, 3)), spec.to_ints())
    assert not len(found)


@pytest.mark.parametrize(
    "changes",
    [
        {"role": 12},
        {"role": -1},
        {"role": int(Role.SCALES_NG8)},
        {"bank": 2},
        {"bank": 1},
        {"projection": 2},
        {"projection": -1},
        {"slot": 2},
        {"slot": -1},
        {"offset": -1},
        {"offset": 1},
        {"offset": 1 << 62},
        {"rows": 0},
        {"rows": 72},
        {"rows": 1 << 62},
        {"row_bytes": 0},
        {"row_bytes": 17},
        {"row_bytes": 1 << 62},
        {"skip": 1},
        {"skip": -8},
        {"cols": 40},
        {"cols": 31},
        {"cols": 0},
        {"dest_row": 8},
        {"dest_row": 4},
        {"dest_row": -8},
        {"dest_row": (1 << 63) - 1},
    ],
    ids=str,
)
def test_a_descriptor_that_does_not_fit_is_refused_before_any_write(changes) -> None:
    spec = small_layer()
    banks = LayerBanks.allocate(spec, HOST, None)
    before = [tensor.clone() for tensor in banks.tensors]
    chunk = torch.full((1024,), 255, dtype=torch.uint8)
    both = torch.cat((descriptor(), descriptor(**changes)))
    with pytest.raises(DescriptorError, match="descriptor 1: ") as caught:
        core().write(chunk, both, banks.tensors, torch.empty((0, 3)), spec.to_ints())
    assert caught.value.subject == 1
    assert_equal_bits(banks.tensors, before)


numbers = st.integers(-(1 << 63), (1 << 63) - 1)
near = st.integers(-2, 130)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.lists(near | numbers, min_size=12, max_size=12), min_size=1, max_size=4))
def test_no_descriptor_reaches_out_of_bounds(rows: list[list[int]]) -> None:
    """Hostile numbers are refused or harmless; the sanitizer build would stop at a bad access."""
    spec = small_layer()
    banks = LayerBanks.allocate(spec, HOST, None)
    chunk = torch.zeros(1024, dtype=torch.uint8)
    try:
        core().write(chunk, torch.tensor(rows), banks.tensors, torch.empty((0, 3)), spec.to_ints())
    except DescriptorError as error:
        assert 0 <= error.subject < len(rows)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-1, 300) | numbers, min_size=21, max_size=21))
def test_no_layer_numbers_reach_out_of_bounds(layer_numbers: list[int]) -> None:
    spec = small_layer()
    banks = LayerBanks.allocate(spec, HOST, None)
    if layer_numbers == spec.to_ints():
        return
    with pytest.raises(ValueError):
        core().finish(banks.tensors, torch.empty((0, 3)), layer_numbers)


def test_a_short_read_names_offset_and_bytes(tmp_path: Path) -> None:
    spec = small_layer()
    banks = LayerBanks.allocate(spec, HOST, None)
    path = tmp_path / "short"
    path.write_bytes(bytes(1000))
    buffers = torch.empty((1, 4096), dtype=torch.uint8)
    with path.open("rb") as file, pytest.raises(ReadError) as caught:
        core().read(
            file.fileno(),
            1024,
            descriptor(),
            banks.tensors,
            torch.empty((0, 3)),
            buffers,
            spec.to_ints(),
        )
    assert caught.value.expected == "1024 bytes at offset 0"
    assert caught.value.found == "1000 bytes"


def test_a_failed_read_says_why(tmp_path: Path) -> None:
    spec = small_layer()
    banks = LayerBanks.allocate(spec, HOST, None)
    path = tmp_path / "write-only"
    path.touch()
    buffers = torch.empty((1, 4096), dtype=torch.uint8)
    with path.open("wb") as file, pytest.raises(ReadError, match="Bad file descriptor"):
        core().read(
            file.fileno(),
            1024,
            descriptor(),
            banks.tensors,
            torch.empty((0, 3)),
            buffers,
            spec.to_ints(),
        )


def test_findings_of_many_pieces_all_come_back() -> None:
    spec = small_layer()
    banks = LayerBanks.allocate(spec, HOST, None)
    row = {"role": int(Role.SCALES_GN), "rows": 1, "row_bytes": 64, "cols": 32, "offset": 0}
    pieces = torch.cat([descriptor(**row, dest_row=n % 2, slot=n // 2 % 2) for n in range(300)])
    chunk = torch.full((1024,), 0xFF, dtype=torch.uint8)
    found = core().write(chunk, pieces, banks.tensors, torch.empty((0, 3)), spec.to_ints())
    assert found[:, 0].tolist() == list(range(300))
    assert found[:, 2].tolist() == [32] * 300
    wanted = convert.write(chunk, pieces, banks.tensors, torch.empty((0, 3)), spec.to_ints())
    assert torch.equal(found, wanted)


def test_a_child_process_makes_its_own_threads() -> None:
    """A pool does not survive a fork; a child that converts must not wait for dead threads."""
    spec = small_layer()
    banks = LayerBanks.allocate(spec, HOST, None)
    chunk = torch.zeros(1024, dtype=torch.uint8)
    call = (chunk, descriptor(), banks.tensors, torch.empty((0, 3)), spec.to_ints())
    core().write(*call)
    child = os.fork()
    if child == 0:
        core().finish(banks.tensors, torch.empty((0, 3)), spec.to_ints())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_words_off_their_boundary_are_refused() -> None:
    spec = small_layer()
    banks = LayerBanks.allocate(spec, HOST, None)
    weight = banks.tensors[0]
    shifted = torch.empty(weight.nbytes // 4 + 1, dtype=torch.int32)[1:].view(weight.shape)
    if shifted.data_ptr() % 32 == 0:
        shifted = torch.empty(weight.nbytes // 4 + 2, dtype=torch.int32)[2:].view(weight.shape)
    chunk = torch.zeros(1024, dtype=torch.uint8)
    tensors = [shifted, *banks.tensors[1:]]
    with pytest.raises(ValueError, match="32-byte boundary"):
        core().write(chunk, descriptor(), tensors, torch.empty((0, 3)), spec.to_ints())

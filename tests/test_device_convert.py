"""The device converter, compiled by g++, against the reference: equal bits, equal findings.

``csrc/device/convert.cuh`` and what it includes is index maths: what holds here holds on a card but
for races, and units of work run here in a shuffled order.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_core import DIALECTS, HOST, SANE, chunks_of, descriptor, small_layer

import loader
from loader.bank import LayerSpec
from loader.checkpoint.scheme import Role
from loader.converter import ConversionCache, LayerBanks, cache_bytes
from loader.core import DescriptorError, raise_native
from loader.reference import convert
from loader.spots import findings_of_spots, spots_bytes
from loader.structs import Error
from loader.testing.checkpoint import tiny_checkpoint
from loader.testing.container import edit_tensor

REPOSITORY = Path(__file__).parents[1]
COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no g++ to compile it with")


class Device:
    """The device converter as a card's library offers it, on the host."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))

    def state(self, spec: LayerSpec) -> torch.Tensor:
        nbytes = spots_bytes(spec.w13.experts) + cache_bytes(spec)
        return torch.zeros(-(-nbytes // 8), dtype=torch.int64).view(torch.uint8)

    def _layer(self, tensors: list[torch.Tensor], state: torch.Tensor, spec: list[int]) -> Any:
        count = len(tensors)
        return (
            (ctypes.c_int64 * 21)(*spec),
            (ctypes.c_void_p * count)(*(t.data_ptr() for t in tensors)),
            (ctypes.c_int64 * count)(*(t.nbytes for t in tensors)),
            ctypes.c_int64(count),
            ctypes.c_void_p(state.data_ptr()),
            ctypes.c_int64(state.nbytes),
        )

    def write(
        self,
        chunk: torch.Tensor,
        descriptors: torch.Tensor,
        tensors: list[torch.Tensor],
        state: torch.Tensor,
        spec: list[int],
        nbytes: int | None = None,
    ) -> None:
        """``nbytes`` is what the call is told of the chunk's size, if not the truth."""
        error = Error()
        table = descriptors.contiguous()
        code = self.library.qpn_test_write(
            ctypes.c_void_p(chunk.data_ptr()),
            ctypes.c_int64(chunk.nbytes if nbytes is None else nbytes),
            ctypes.c_void_p(table.data_ptr()),
            ctypes.c_int64(len(table)),
            *self._layer(tensors, state, spec),
            ctypes.byref(error),
        )
        raise_native(code, error)

    def finish(self, tensors: list[torch.Tensor], state: torch.Tensor, spec: list[int]) -> None:
        error = Error()
        code = self.library.qpn_test_finish(*self._layer(tensors, state, spec), ctypes.byref(error))
        raise_native(code, error)


@pytest.fixture(scope="session")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    path = tmp_path_factory.mktemp("device") / "convert.so"
    sources = ("tests/native/convert_host.cpp", "csrc/host/check.cpp")
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-fPIC"]
    command = [str(COMPILER), *flags, "-shared", "-o", str(path), *sources]
    subprocess.run(command, check=True, cwd=REPOSITORY)
    yield Device(path)


def assert_same(device: Device, folder: Path, layer: Any, files: Any, limit: int) -> int:
    """Banks and findings of one layer, of both; returns how many findings there were."""
    chunks = list(chunks_of(folder, layer, files, limit))
    start = LayerBanks.allocate(layer.spec, HOST, layer.zero_point).tensors
    spec = layer.spec.to_ints()
    wanted, mine = [t.clone() for t in start], [t.clone() for t in start]
    cache, state = ConversionCache(layer.spec, HOST), device.state(layer.spec)
    found = []
    for chunk, data in chunks:
        rows = torch.from_numpy(chunk.descriptors())
        for row in convert.write(data, rows, wanted, cache.globals, spec).tolist():
            found.append((int(chunk.pieces[row[0]]["tensor"]), *row[1:]))
        device.write(data, rows, mine, state, spec)
    closing = convert.finish(wanted, cache.globals, spec)
    device.finish(mine, state, spec)
    for number, (a, b) in enumerate(zip(mine, wanted, strict=True)):
        differ = (a.view(torch.uint8) != b.view(torch.uint8)).flatten().nonzero()
        assert not len(differ), f"tensor {number} differs first at byte {int(differ[0])}"
    pieces = layer.pieces()
    experts = layer.spec.w13.experts
    table = state[: spots_bytes(experts)]
    own, own_closing = findings_of_spots(table, pieces, experts)
    assert torch.equal(own_closing, closing)
    named = [(int(pieces[row[0]]["tensor"]), *row[1:]) for row in own.tolist()]
    assert merged(named) == merged(found)
    total = int(table[:8].view(torch.int64))
    assert total == sum(row[2] for row in named) + int(closing[:, 2].sum())
    return len(named) + len(closing)


def merged(found: list[tuple[int, ...]]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Findings by tensor, kind and half: a tensor that was read in pieces counts once."""
    result: dict[tuple[int, ...], tuple[int, ...]] = {}
    for tensor, kind, count, *first in found:
        key = (tensor, kind)
        before = result.get(key)
        if before is None:
            result[key] = (count, *first)
        else:
            result[key] = (before[0] + count, *min(before[1:], tuple(first)))
    return result


@pytest.mark.parametrize("fused", (False, True), ids=("separate", "fused"))
@pytest.mark.parametrize("dialect", DIALECTS)
def test_same_bits_as_the_reference(
    tmp_path: Path, device: Device, dialect: str, fused: bool
) -> None:
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
        files = plan.checkpoint.catalog.files
        assert_same(device, tmp_path, plan.layers[0], files, limit)


@pytest.mark.parametrize("header", range(60_000, 60_008))
@pytest.mark.parametrize("dialect", ("awq-gemm", "ct-int4-asym", "modelopt-nvfp4"))
def test_tensors_at_any_byte(tmp_path: Path, device: Device, dialect: str, header: int) -> None:
    tiny_checkpoint(
        tmp_path, dialect=dialect, experts=2, header_lengths=[header], attention=False,
        **({"hidden": 80, "intermediate": 112} if "nvfp4" in dialect
           else {"hidden": 88, "intermediate": 56, "group": 16}),
    )  # fmt: skip
    plan = loader.plan(tmp_path)
    files = plan.checkpoint.catalog.files
    assert_same(device, tmp_path, plan.layers[0], files, 1 << 24)


def test_experts_of_a_shard_and_plain_weights(tmp_path: Path, device: Device) -> None:
    tiny_checkpoint(tmp_path, excluded=(0,), hidden=128, intermediate=96, experts=5, group=32)
    for shard in (loader.Shard(ep_rank=1, ep_size=2), loader.Shard(expert_ids=(4, 0))):
        plan = loader.plan(tmp_path, shard)
        for layer in plan.layers:
            assert_same(device, tmp_path, layer, plan.checkpoint.catalog.files, 20_000)


def test_findings_are_those_of_the_reference(tmp_path: Path, device: Device) -> None:
    for number, (dialect, layout) in enumerate(
        (
            ("awq-gemm", "record"),
            ("ct-int4-asym", "wide"),
            ("modelopt-nvfp4", "compact"),
            ("ct-nvfp4", "wide"),
        )
    ):
        folder = tmp_path / str(number)
        made = tiny_checkpoint(folder, dialect=dialect, hidden=128, intermediate=96, experts=3,
                               **({} if "nvfp4" in dialect else {"group": 32}))  # fmt: skip
        part = made.writer.scale

        def spoil(scales: np.ndarray, compact: bool = layout == "compact") -> np.ndarray:
            flat = scales.copy().reshape(-1)
            if flat.dtype == np.uint8:
                # What a NaN becomes in `wide` is left to the machine: only its finding is not.
                flat[5::7] = 0x7F if compact else 0x01
            elif flat.dtype.itemsize == 2:
                bits = flat.view(np.uint16)
                bits[3::11], bits[10::13] = 0x7E00, 0x0001
            return flat.reshape(scales.shape)

        for projection in ("gate", "down"):
            edit_tensor(folder, made.name(0, 1, projection, part), spoil)
        plan = loader.plan(folder, policy=loader.Policy(layout=layout))
        files = plan.checkpoint.catalog.files
        for limit in (1 << 24, 9_000):
            assert assert_same(device, folder, plan.layers[0], files, limit) >= 1


@pytest.mark.parametrize(
    "changes",
    [{"role": 12}, {"bank": 2}, {"slot": 2}, {"offset": 1}, {"rows": 72}, {"cols": 40},
     {"dest_row": 8}, {"skip": 1}, {"row_bytes": 1 << 62}, {"expect_a": 1 << 40}],
    ids=str,
)  # fmt: skip
def test_a_descriptor_that_does_not_fit_is_refused(device: Device, changes: dict[str, int]) -> None:
    spec = small_layer()
    banks = LayerBanks.allocate(spec, HOST, None)
    chunk = torch.full((1024,), 255, dtype=torch.uint8)
    state = device.state(spec)
    device.write(chunk, descriptor(), banks.tensors, state, spec.to_ints())
    with pytest.raises(DescriptorError) as caught:
        both = torch.cat((descriptor(), descriptor(**changes)))
        device.write(chunk, both, banks.tensors, state, spec.to_ints())
    assert caught.value.subject == 1
    assert SANE["role"] == int(Role.CODES_KN)


numbers = st.integers(-(1 << 63), (1 << 63) - 1)


@settings(max_examples=300, deadline=None)
@given(rows=st.lists(st.lists(st.integers(-2, 130) | numbers, min_size=12, max_size=12),
                     min_size=1, max_size=4))  # fmt: skip
def test_no_descriptor_reaches_out_of_bounds(device: Device, rows: list[list[int]]) -> None:
    spec = small_layer()
    banks = LayerBanks.allocate(spec, HOST, None)
    chunk = torch.zeros(1024, dtype=torch.uint8)
    try:
        device.write(chunk, torch.tensor(rows), banks.tensors, device.state(spec), spec.to_ints())
    except DescriptorError as error:
        assert 0 <= error.subject < len(rows)


def test_a_cache_or_tensors_of_another_size_are_refused(device: Device) -> None:
    spec = small_layer()
    banks = LayerBanks.allocate(spec, HOST, None)
    chunk = torch.zeros(1024, dtype=torch.uint8)
    short = device.state(spec)[:-8]
    with pytest.raises(ValueError, match="conversion cache"):
        device.write(chunk, descriptor(), banks.tensors, short, spec.to_ints())
    with pytest.raises(ValueError, match="tensors are not those"):
        device.write(chunk, descriptor(), banks.tensors[:-1], device.state(spec), spec.to_ints())


# What a card refuses, message by message


def _numbers(index: int, value: int) -> list[int]:
    numbers = small_layer().to_ints()
    numbers[index] = value
    return numbers


W13 = 1
LAYERS_REFUSED = {
    "the layer's numbers are not those of a layer": _numbers(W13 + 2, 0),
    "the tensors are not those of the layer": _numbers(W13 + 1, 2),
    "packed zero points need an even number of columns": _numbers(W13 + 10 + 4, 63),
}


@pytest.mark.parametrize("message", LAYERS_REFUSED)
def test_a_layer_that_is_none_is_refused(device: Device, message: str) -> None:
    spec = small_layer()
    tensors = LayerBanks.allocate(spec, HOST, None).tensors
    chunk = torch.zeros(1024, dtype=torch.uint8)
    with pytest.raises(ValueError, match=message):
        device.write(chunk, descriptor(), tensors, device.state(spec), LAYERS_REFUSED[message])


@pytest.mark.parametrize(
    ("tensor", "shift", "message"),
    [(0, 16, "32-byte boundary"), (1, 4, "8-byte boundary")],
)
def test_a_tensor_off_its_boundary_is_refused(
    device: Device, tensor: int, shift: int, message: str
) -> None:
    spec = small_layer()
    tensors = LayerBanks.allocate(spec, HOST, None).tensors
    room = torch.zeros(tensors[tensor].nbytes + 128, dtype=torch.uint8)
    start = -room.data_ptr() % 64 + shift
    tensors[tensor] = room[start : start + tensors[tensor].nbytes]
    chunk = torch.zeros(1024, dtype=torch.uint8)
    with pytest.raises(ValueError, match=message):
        device.write(chunk, descriptor(), tensors, device.state(spec), spec.to_ints())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dest_row": 4, "rows": 8}, "destination does not start where words do"),
        ({"expect_a": -2}, "an expected number is no size"),
    ],
)
def test_a_piece_that_a_card_does_not_take_is_refused(
    device: Device, changes: dict[str, int], message: str
) -> None:
    spec = small_layer()
    tensors = LayerBanks.allocate(spec, HOST, None).tensors
    chunk = torch.zeros(1024, dtype=torch.uint8)
    with pytest.raises(DescriptorError, match=message):
        device.write(chunk, descriptor(**changes), tensors, device.state(spec), spec.to_ints())


def test_a_piece_of_more_columns_than_a_card_counts_is_refused(device: Device) -> None:
    """Its chunk would have 8 GiB: said to be there, and never touched."""
    spec = small_layer()
    tensors = LayerBanks.allocate(spec, HOST, None).tensors
    columns = 1 << 31
    rows = descriptor(
        role=int(Role.CHECK_GROUPS), rows=1, cols=columns, row_bytes=4 * columns, expect_a=32
    )
    with pytest.raises(DescriptorError, match="a piece is too large"):
        device.write(
            torch.zeros(1024, dtype=torch.uint8), rows, tensors, device.state(spec),
            spec.to_ints(), 4 * columns,
        )  # fmt: skip


def test_an_absent_bank_is_not_written(device: Device) -> None:
    spec = small_layer()
    tensors = LayerBanks.allocate(spec, HOST, None).tensors[3:]
    chunk = torch.zeros(1024, dtype=torch.uint8)
    with pytest.raises(DescriptorError, match="the bank is absent"):
        device.write(chunk, descriptor(), tensors, device.state(spec), _numbers(W13, 3))

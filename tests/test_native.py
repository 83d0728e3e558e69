"""The three operators: one schema each, a fake that agrees, and who serves which device."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from bank_oracle import FLOATS, small
from moe_oracle import activations, routing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import loader
from loader import native
from loader.checkpoint.source import open_source
from loader.converter import ConversionCache, LayerBanks
from loader.pieces import descriptors_of
from loader.reference import TEMPORARY_BYTES
from loader.reference import convert as reference_convert
from loader.reference import routes as reference_routes
from loader.reference.findings import FIELDS

CPU = torch.device("cpu")
LAYERS = [
    ("awq-gemm", "compact"),
    ("awq-gemm", "wide"),
    ("ct-nvfp4", "compact"),
    ("ct-nvfp4", "wide"),
]
OPERATORS = ("write", "finish", "moe")


def prepared(tmp_path: Path, dialect: str, layout: str) -> loader.PreparedExperts:
    checkpoint = small(tmp_path, dialect=dialect)
    return loader.load(checkpoint.folder, policy=loader.Policy(layout=layout))[0]


def conversion(tmp_path: Path, dialect: str, layout: str) -> tuple[Any, ...]:
    """Arguments of ``write`` for the first chunk of a layer, and of ``finish``."""
    checkpoint = small(tmp_path, dialect=dialect, experts=2)
    plan = loader.plan(checkpoint.folder, policy=loader.Policy(layout=layout))
    layer = plan.layers[0]
    (chunk,) = layer.chunks(1 << 24)
    data = torch.zeros(chunk.buffer_bytes, dtype=torch.uint8)
    for read in chunk.reads:
        place = memoryview(data.numpy())[read.at : read.at + read.length]
        source = open_source(checkpoint.folder)
        source.read_into(plan.checkpoint.catalog.files[read.file], read.offset, place)
        source.close()
    banks = LayerBanks.allocate(layer.spec, CPU, layer.zero_point)
    cache = ConversionCache(layer.spec, CPU)
    descriptors = torch.from_numpy(descriptors_of(chunk.pieces))
    return data, descriptors, banks.tensors, cache.globals, layer.spec.to_ints()


def moe_arguments(module: loader.PreparedExperts, tokens: int, dtype: torch.dtype) -> list[Any]:
    x = activations(tokens, module.hidden_size, dtype)
    ids, router = routing(tokens, len(module.expert_ids), 2)
    return [
        torch.empty_like(x),
        module.workspace.scratch,
        x,
        ids.to(torch.int32 if tokens % 2 else torch.int64),
        router,
        module.workspace.expert_map,
        module.banks(),
        module.spec.to_ints(),
        [1, 8],
    ]


@pytest.mark.parametrize("dialect, layout", LAYERS)
def test_write_and_finish_pass_every_check_of_torch(
    dialect: str, layout: str, tmp_path: Path
) -> None:
    data, descriptors, banks, cache, spec = conversion(tmp_path, dialect, layout)
    write = (data, descriptors, banks, cache, spec)
    assert set(torch.library.opcheck(native.write.default, write).values()) == {"SUCCESS"}
    native.write(*write)
    finish = (banks, cache, spec)
    assert set(torch.library.opcheck(native.finish.default, finish).values()) == {"SUCCESS"}


@pytest.mark.parametrize("tokens", [1, 3, 12])
@pytest.mark.parametrize("dialect, layout", LAYERS)
def test_moe_passes_every_check_of_torch(
    dialect: str, layout: str, tokens: int, tmp_path: Path
) -> None:
    module = prepared(tmp_path, dialect, layout)
    for dtype in native.REFERENCE.dtypes:
        arguments = tuple(moe_arguments(module, tokens, dtype))
        assert set(torch.library.opcheck(native.moe.default, arguments).values()) == {"SUCCESS"}


def test_the_reference_serves_where_it_is_asked_to_and_stays_callable(tmp_path: Path) -> None:
    with native.serving(native.REFERENCE):
        assert_operators_are_the_reference(tmp_path)


def assert_operators_are_the_reference(tmp_path: Path) -> None:
    module = prepared(tmp_path / "a", "awq-gemm", "compact")
    for tokens in (1, 4, 12):
        arguments = moe_arguments(module, tokens, torch.float16)
        native.moe(*arguments)
        by_operator = arguments[0].clone()
        arguments[0].fill_(float("nan"))
        reference_routes.moe(*arguments)
        assert torch.equal(arguments[0], by_operator)
    one, two = (conversion(tmp_path / name, "ct-nvfp4", "wide") for name in "bc")
    native.write(*one), native.finish(*one[2:])
    reference_convert.write(*two), reference_convert.finish(*two[2:])
    assert all(torch.equal(a, b) for a, b in zip(one[2], two[2], strict=True))


def test_schemas_say_what_is_written() -> None:
    """An argument that is not marked as written may be reordered or shared by the compiler."""
    written = {
        name: {a.name for a in getattr(native, name).default._schema.arguments if a.is_write}
        for name in OPERATORS
    }
    assert written == {
        "write": {"banks", "cache"},
        "finish": {"banks", "cache"},
        "moe": {"out", "scratch"},
    }
    assert not native.moe.default._schema.returns
    assert [len(getattr(native, name).default._schema.returns) for name in OPERATORS[:2]] == [1, 1]


@pytest.mark.parametrize("dialect", ["awq-gemm", *FLOATS])
def test_fakes_know_what_comes_back(dialect: str, tmp_path: Path) -> None:
    write = conversion(tmp_path, dialect, "compact")
    real = native.write(*write)
    assert real.shape == (0, len(FIELDS)) and real.dtype == torch.int64
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        data, descriptors, banks, cache, spec = write
        fakes = [mode.from_tensor(t) for t in banks]
        moved = mode.from_tensor(data), mode.from_tensor(descriptors), fakes
        for found in (
            native.write(*moved, mode.from_tensor(cache), spec),
            native.finish(fakes, mode.from_tensor(cache), spec),
        ):
            assert found.dim() == 2 and found.shape[1] == len(FIELDS)
            assert found.dtype == torch.int64 and found.device == CPU


def test_the_host_is_served_by_native_code_or_the_reference_and_nothing_else_is() -> None:
    host = torch.device("cpu")
    assert native.implementation_for(host) is (native.HOST or native.REFERENCE)
    with native.serving(native.REFERENCE):
        assert native.implementation_for(host) is native.REFERENCE
    assert native.implementation_for(host) is (native.HOST or native.REFERENCE)
    with pytest.raises(KeyError), native.serving(native.REFERENCE):
        raise KeyError
    assert native.implementation_for(host) is (native.HOST or native.REFERENCE)
    assert native.REFERENCE.name == "reference" and not native.REFERENCE.reads_files
    assert native.REFERENCE.temporary_bytes == TEMPORARY_BYTES
    assert native.REFERENCE.routes == ("qpn_m1", "qpn_grouped", "legacy")
    assert set(native.REFERENCE.dtypes) == {torch.float16, torch.bfloat16, torch.float32}
    for device in ("meta", "xpu"):
        assert native.implementation_for(torch.device(device)) is None


def test_a_device_without_an_implementation_is_refused(tmp_path: Path) -> None:
    checkpoint = small(tmp_path)
    for call in (loader.plan, loader.load):
        with pytest.raises(loader.UnsupportedError) as caught:
            call(checkpoint.folder, device="meta")
        assert str(caught.value) == (
            "this build has no native code for the device, and the reference never stands in on a "
            "card; expected an implementation for the device, or device='cpu', found device meta"
        )


def test_an_operator_on_a_card_that_nothing_serves_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Banks can be moved there by hand; no plan has looked at that card then."""
    nothing = None, "native code was built for sm_80, and A is sm_70"
    monkeypatch.setattr(native.card_serving, "of_card", lambda index: nothing)
    monkeypatch.setattr(native.card_serving, "of_device", lambda device: nothing)
    with pytest.raises(loader.UnsupportedError) as caught:
        native._serving(torch.device("cuda", 0))
    assert str(caught.value) == (
        "this build has no native code for the device; expected an implementation for the device, "
        f"found device cuda:0: {nothing[1]}"
    )


def test_every_operator_is_known_with_its_schema_and_has_a_place_in_an_implementation() -> None:
    found = native.operators()
    assert set(found) >= {*OPERATORS, "read"}
    assert all(found[name] is getattr(native, name).default for name in OPERATORS)
    assert set(found) <= {field.name for field in fields(native.Implementation)}
    with torch.library._scoped_library("qpn", "FRAGMENT") as library:
        library.define("one(Tensor x) -> ()")
        library.define("one.other(Tensor x, int n) -> ()")
        assert set(native.operators()) == {*found, "one", "one.other"}
        assert len(native.operators()["one.other"]._schema.arguments) == 2
    assert native.operators() == found
    assert native.implementations() == (native.HOST or native.REFERENCE,)

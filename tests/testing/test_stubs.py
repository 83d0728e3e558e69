"""Stubs: made from the operators' schemas, recorded by name, shaped right, restored at the end."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from formulas import small
from load_fakes import RecordingSource, nothing_left

import loader
from loader import native
from loader.errors import ConversionError, UnsupportedError
from loader.testing import Seen, Stubs, stub_converters, stub_kernels
from loader.testing.container import edit_tensor

CPU = torch.device("cpu")
T, H, K = 3, 64, 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return small(tmp_path / "checkpoint", "awq-gemm", hidden=H, intermediate=64, experts=4).folder


def step(module: loader.PreparedExperts, tokens: int = T) -> torch.Tensor:
    ids = torch.arange(tokens * K).reshape(tokens, K) % 4
    return module(torch.ones(tokens, H), ids, torch.ones(tokens, K))


# --- what is stubbed ----------------------------------------------------------------------------


def test_every_operator_is_a_kernel_or_a_converter() -> None:
    with stub_kernels() as kernels, stub_converters() as converters:
        assert not set(kernels.operators) & set(converters.operators)
        assert {*kernels.operators, *converters.operators} == set(native.operators())
        assert set(converters.operators) >= {"write", "read", "finish"}
        assert "moe" in kernels.operators


def test_plans_stay_but_for_the_name_of_the_implementation(folder: Path) -> None:
    def without_name(plan: loader.Plan) -> str:
        code = native.implementation_for(CPU)
        assert code is not None
        return str(plan.to_dict()).replace(repr(code.name), "'served'")

    before = without_name(loader.plan(folder, card_memory=1 << 40))
    with stub_kernels(), stub_converters():
        assert without_name(loader.plan(folder, card_memory=1 << 40)) == before
        (first, *_) = loader.plan(folder).layers[0].routes
        assert first.implementation == "stub"


# --- loading and running without conversion or kernels ------------------------------------------


@pytest.mark.parametrize("dialect", ["awq-gemm", "ct-nvfp4", "modelopt-nvfp4"])
def test_a_checkpoint_without_numbers_is_loaded_and_run(dialect: str, tmp_path: Path) -> None:
    checkpoint = small(tmp_path, dialect, hidden=H, experts=4, payload="sparse")
    real = loader.plan(checkpoint)
    with stub_converters() as converters, stub_kernels(fill=0.5) as kernels:
        experts = loader.load(checkpoint)
        y = step(experts[1])
    assert torch.equal(y, torch.full((T, H), 0.5))
    assert experts.report.memory.resident == real.resident_bytes
    assert all(not tensor.any() for layer in experts.values() for tensor in layer.banks())
    assert [call.operator for call in converters.of("finish")] == ["finish"] * 2
    (call,) = kernels.calls
    names = [argument.name for argument in native.operators()["moe"]._schema.arguments]
    assert call.operator == "moe" and list(call.arguments) == names
    assert call["x"].shape == (T, H) and call["topk_ids"].dtype == torch.int64
    assert call["spec"] == tuple(experts[1].spec.to_ints())
    assert [bank.shape for bank in call["banks"]] == [tuple(b.shape) for b in experts[1].banks()]


def test_converters_find_nothing_wrong(folder: Path) -> None:
    name = "model.layers.0.mlp.experts.0.gate_proj.scales"
    edit_tensor(folder, name, lambda scales: np.full_like(scales, np.nan))
    with pytest.raises(ConversionError):
        loader.load(folder)
    with stub_converters():
        assert loader.load(folder).report.nonfinite == ()


def test_chunks_that_are_read_ahead_are_recorded_as_writes(folder: Path) -> None:
    source = RecordingSource(folder)
    with stub_converters() as stubs:
        loader.load(source)
    assert {call.operator for call in stubs.calls} == {"write", "finish"}
    names = [argument.name for argument in native.operators()["write"]._schema.arguments]
    assert all(list(call.arguments) == names for call in stubs.of("write"))
    assert source.log  # the bytes were read, and nothing was made of them


def test_only_what_was_asked_for_is_copied(folder: Path) -> None:
    module = loader.load(folder)[0]
    with stub_kernels() as stubs:
        step(module)
        stubs.keep("topk_ids", "banks")
        step(module)
    before, after = stubs.calls
    assert before["topk_ids"].value is None and after["x"].value is None
    assert after["topk_ids"].value.tolist() == [[0, 1], [2, 3], [0, 1]]
    copies = [bank.value for bank in after["banks"]]
    assert all(map(torch.equal, copies, module.banks()))
    assert copies[0].data_ptr() != module.banks()[0].data_ptr()
    assert isinstance(after["out"], Seen) and str(after["out"]) == f"float32[{T}, {H}]"
    assert str(before).startswith(f"moe(out=float32[{T}, {H}], scratch=float32[")


def test_recording_keeps_no_tensor(folder: Path) -> None:
    with stub_kernels() as stubs, nothing_left():
        out = step(loader.load(folder)[0])
        storage = torch.multiprocessing.reductions.StorageWeakRef(out.untyped_storage())
        del out
        assert storage.expired() and len(stubs.calls) == 1


def test_a_compiled_module_runs_the_stub(folder: Path) -> None:
    module = loader.load(folder)[0]
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    with stub_kernels(2.0) as stubs:
        ids, weights = torch.zeros(T, K, dtype=torch.int64), torch.ones(T, K)
        assert compiled(torch.ones(T, H), ids, weights).eq(2.0).all()
    assert len(stubs.calls) == 1


def test_threads_may_call_at_once(folder: Path) -> None:
    module = loader.load(folder)[0]
    error = KeyError("once")
    raised: list[BaseException] = []

    def serve() -> None:
        for _ in range(50):
            try:
                step(module)
            except KeyError as one:
                raised.append(one)

    with stub_kernels() as stubs:
        stubs.fail("moe", error, at=100)
        threads = [threading.Thread(target=serve, name=f"server-{n}") for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(stubs.calls) == 200 and raised == [error]
    assert {call.thread for call in stubs.calls} == {f"server-{n}" for n in range(4)}


# --- faults -------------------------------------------------------------------------------------


def test_the_call_that_is_to_fail_fails_and_no_other(folder: Path) -> None:
    module = loader.load(folder)[0]
    error = RuntimeError("the card fell off")
    with stub_kernels() as stubs:
        step(module)
        stubs.fail("moe", error, at=2)
        step(module)
        with pytest.raises(RuntimeError) as caught:
            step(module)
        step(module)
    assert caught.value is error and len(stubs.calls) == 4


def test_a_converter_that_fails_fails_the_load_and_leaves_nothing(folder: Path) -> None:
    with stub_converters() as stubs, nothing_left():
        stubs.fail("finish", OSError("no"), at=2)
        with pytest.raises(ConversionError, match="the converter failed: OSError: no") as caught:
            loader.load(folder)
        assert caught.value.layer == 1
        assert len(stubs.of("finish")) == 2
    with stub_converters():
        assert len(loader.load(folder)) == 2


def test_wrong_names_are_told_with_the_right_ones() -> None:
    with stub_kernels() as stubs:
        with pytest.raises(UnsupportedError, match=r"expected linear \| moe, found mow"):
            stubs.fail("mow", ValueError())
        with pytest.raises(UnsupportedError, match=r"expected linear \| moe, found write"):
            stubs.of("write")
        with pytest.raises(UnsupportedError, match="topk_ids .* found topk"):
            stubs.keep("topk")
        with pytest.raises(UnsupportedError, match="expected 1 for the next one, found 0"):
            stubs.fail("moe", ValueError(), at=0)


# --- restored -----------------------------------------------------------------------------------


def test_every_device_is_served_as_before(folder: Path) -> None:
    before = native.implementations()
    with pytest.raises(KeyError), stub_kernels():
        with stub_converters():
            assert native.implementations() != before
        raise KeyError
    assert native.implementations() == before
    experts = loader.load(folder)
    assert loader.verify(experts, folder, samples=8).ok
    assert step(experts[0]).any()


# --- not stale ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Larger(native.Implementation):
    """As an implementation is when somebody has added an operator."""

    probe: Callable[..., Any] | None = None


@contextmanager
def added(schema: str, fake: Callable[..., Any]) -> Iterator[None]:
    """Add an operator ``probe`` to the library, as ``native.py`` adds its own."""

    def kernel(*arguments: Any, **by_name: Any) -> Any:
        code = native.implementation_for(CPU)
        assert isinstance(code, Larger) and code.probe is not None
        return code.probe(*arguments, **by_name)

    with torch.library._scoped_library("qpn", "FRAGMENT") as library:
        library.define(schema)
        library.impl("probe", kernel, "CPU")
        torch.library.register_fake("qpn::probe", fake, lib=library)
        code = native.implementation_for(CPU)
        assert code is not None
        known = {field.name: getattr(code, field.name) for field in fields(code)}
        with native.serving(Larger(**known, probe=lambda *_, **__: None)):
            yield


def probe(stubs: Stubs, *arguments: Any, **by_name: Any) -> tuple[Any, dict[str, Any]]:
    result = native.operators()["probe"](*arguments, **by_name)
    return result, dict(stubs.of("probe")[-1].arguments)


def test_an_operator_that_is_added_has_a_stub_and_so_has_its_next_argument() -> None:
    x = torch.ones(2, 3)
    with added("probe(Tensor x) -> Tensor", lambda x: x.new_empty((x.shape[0], 7))):
        with stub_kernels() as stubs:
            result, arguments = probe(stubs, x)
        assert result.shape == (2, 7) and not result.any()
        assert list(arguments) == ["x"] and arguments["x"].shape == (2, 3)
    with (
        added(
            "probe(Tensor x, bool loud=False, *, int level=3) -> (Tensor, int)",
            lambda x, loud=False, level=3: (x.new_empty((level,), dtype=torch.int32), level),
        ),
        stub_kernels() as stubs,
    ):
        result, arguments = probe(stubs, x)
        assert arguments.pop("x").shape == (2, 3) and arguments == {"loud": False, "level": 3}
        (tensor, number), arguments = probe(stubs, x, True, level=5)
        assert arguments["loud"] is True and arguments["level"] == 5
        assert tensor.shape == (5,) and tensor.dtype == torch.int32 and number == 5
    assert "probe" not in native.operators()


def test_an_operator_that_is_added_with_a_cache_is_a_converter() -> None:
    schema = "probe(Tensor(a!)[] banks, Tensor(b!) cache) -> Tensor"

    def fake(banks: Any, cache: torch.Tensor) -> torch.Tensor:
        return cache.new_empty((torch.library.get_ctx().new_dynamic_size(), 6), dtype=torch.int64)

    with added(schema, fake), stub_kernels() as kernels, stub_converters() as stubs:
        assert "probe" in stubs.operators and "probe" not in kernels.operators
        banks, cache = [torch.ones(2), torch.ones(3)], torch.ones(4)
        result, _ = probe(stubs, banks, cache)
        assert result.shape == (0, 6) and result.dtype == torch.int64
        assert not banks[0].any() and not banks[1].any() and not cache.any()
        banks[0].fill_(1)
        probe(stubs, banks, cache)
        assert banks[0].all()  # a bank is zeroed once, not by every chunk


def test_an_operator_that_nothing_can_serve_is_told() -> None:
    with torch.library._scoped_library("qpn", "FRAGMENT") as library:
        library.define("probe(Tensor x) -> ()")
        with (
            pytest.raises(UnsupportedError, match="a field 'probe' of Implementation"),
            stub_kernels(),
        ):
            pass


def test_a_flag_that_is_added_to_an_operator_is_recorded() -> None:
    """``moe`` itself, defined with one more argument before the package is imported."""
    script = """
import torch
define = torch.library.Library.define
def wider(self, schema, *rest, **more):
    schema = schema.replace("int[] routes)", "int[] routes, bool flag=True)")
    return define(self, schema, *rest, **more)
torch.library.Library.define = wider
from loader import native
from loader.testing import stub_kernels
with stub_kernels(1.0) as stubs:
    out, one = torch.zeros(1, 4), torch.zeros(1, 1)
    native.operators()["moe"](out, one, out.clone(), one.int(), one, one.int(), [], [], [])
print(list(stubs.calls[0].arguments)[-2:], stubs.calls[0]["flag"], out.sum().item())
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ran.stdout, ran.returncode) == ("['routes', 'flag'] True 4.0\n", 0), ran.stderr

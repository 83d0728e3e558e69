"""The library for cards: which card it has code for, and what it refuses before any launch."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from card import CARD, needs_card
from fake_card import FakeCore, card, plans_for_a_card
from host_card import COMPILER
from hypothesis import given, settings
from hypothesis import strategies as st
from test_core import descriptor, small_layer

import loader
from loader import card_serving, cuda_core, native
from loader.bank import BankSpec, LayerSpec
from loader.card import CardFacts
from loader.converter import ConversionCache, LayerBanks
from loader.core import DescriptorError
from loader.cuda_core import CUDA_CORE, CudaCore, CudaError
from loader.cuda_routes import CudaRoutes
from loader.structs import Error
from loader.testing.checkpoint import tiny_checkpoint

needs_the_library = pytest.mark.skipif(
    CUDA_CORE is None, reason=cuda_core.WHY_NO_CUDA_CORE or "native code for cards was not built"
)


def on_card(test: Callable[..., None]) -> Callable[..., None]:
    for mark in needs_card():
        test = mark(test)
    return test


# Images


@pytest.mark.parametrize(
    ("targets", "runs", "runs_not"),
    [
        (("90",), (90,), (75, 80, 100, 120)),
        (("80",), (80, 86, 89), (70, 75, 90)),
        (("86",), (86, 89), (80, 90)),
        (("70", "75"), (70, 72, 75), (80,)),
        (("80+",), (80, 86, 90, 120), (70, 75)),
        (("75", "90", "90+"), (75, 90, 100, 120), (70, 80, 86)),
        ((), (), (75, 90)),
    ],
)
def test_which_cards_a_build_runs_on(
    targets: tuple[str, ...], runs: tuple[int, ...], runs_not: tuple[int, ...]
) -> None:
    core = FakeCore(*targets)
    assert all(core.has_image(architecture) for architecture in runs)
    assert not any(core.has_image(architecture) for architecture in runs_not)


@settings(deadline=None)
@given(st.lists(st.sampled_from(("70", "75", "80", "86", "90", "100")), min_size=1))
def test_code_to_translate_runs_on_every_newer_card(targets: list[str]) -> None:
    least = min(int(target) for target in targets)
    core = FakeCore(*(f"{target}+" for target in targets))
    assert all(core.has_image(a) == (a >= least) for a in range(50, 130))


# Admission by facts


@pytest.mark.parametrize("architecture", (70, 75, 80, 86, 90, 100, 120))
def test_bf16_is_for_cards_that_have_it(architecture: int) -> None:
    dtypes = card(architecture).dtypes
    assert torch.float16 in dtypes and torch.float32 not in dtypes
    assert (torch.bfloat16 in dtypes) == (architecture >= 80)


def test_code_without_an_image_for_the_card_counts_as_absent() -> None:
    facts = CardFacts("Old Card", 70)
    made, why = card_serving.card_implementation(facts, FakeCore("80", "90+"))
    assert made is None
    assert why == ("native code was built for sm_80, compute_90 and newer, and Old Card is sm_70")


def test_a_build_without_code_for_cards_says_why() -> None:
    made, why = card_serving.card_implementation(CardFacts("A", 90), None, "it was not built")
    assert made is None and why == "it was not built"


@pytest.mark.parametrize("switch", ("qpn_m1", "qpn_grouped"))
def test_a_route_that_is_on_and_cannot_run_is_refused_with_the_layer(
    tmp_path: Path, switch: str
) -> None:
    made = tiny_checkpoint(
        tmp_path, excluded=(1,), hidden=128, intermediate=96, experts=2, group=32
    )
    with plans_for_a_card() as device:
        plan = loader.plan(made.folder, device=device, card_memory=1 << 40)
        assert {route.route for route in plan.layers[1].routes} == {"legacy"}
        with pytest.raises(loader.PolicyError) as caught:
            policy = loader.Policy(**{switch: "on"})
            loader.plan(made.folder, device=device, policy=policy, card_memory=1 << 40)
    assert caught.value.layer == 1
    for words in (f"{switch}=on", "quantized experts", "int4 or e2m1 codes", "not quantized"):
        assert words in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_machine_without_a_card_refuses_before_anything_is_read(tmp_path: Path) -> None:
    made = tiny_checkpoint(tmp_path, hidden=128, intermediate=96, experts=2, group=32)
    for call in (loader.plan, loader.load):
        with pytest.raises(loader.UnsupportedError) as caught:
            call(made.folder, device="cuda")
        assert "the reference never stands in on a card" in str(caught.value)
        assert "PyTorch finds no card" in str(caught.value)


@pytest.mark.parametrize("name", ("cuda:-1", "cuda:x", "gpu", "", "cuda:0:1"))
def test_what_is_no_device_is_refused(tmp_path: Path, name: str) -> None:
    made = tiny_checkpoint(tmp_path, hidden=128, intermediate=96, experts=2, group=32)
    with pytest.raises(loader.UnsupportedError, match="no such device"):
        loader.load(made.folder, device=name)


# The library itself


def test_a_library_of_another_version_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / cuda_core.LIBRARY).write_bytes(b"no library at all")
    monkeypatch.setattr(cuda_core, "__file__", str(tmp_path / "cuda_core.py"))
    core, why = cuda_core.find_cuda_core()
    assert core is None and why.startswith("native code for cards cannot be used: ")
    (tmp_path / cuda_core.LIBRARY).unlink()
    core, why = cuda_core.find_cuda_core()
    assert core is None and "needs nvcc" in why


@pytest.mark.parametrize("number", (None, 0, 99))
def test_a_library_with_another_interface_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int | None
) -> None:
    if COMPILER is None:
        pytest.skip("there is no g++ to compile a library with")
    source = tmp_path / "other.c"
    source.write_text("" if number is None else f"int qpn_interface(void) {{ return {number}; }}")
    command = [COMPILER, "-x", "c", "-shared", "-o", str(tmp_path / cuda_core.LIBRARY), str(source)]
    subprocess.run(command, check=True)
    monkeypatch.setattr(cuda_core, "__file__", str(tmp_path / "cuda_core.py"))
    core, why = cuda_core.find_cuda_core()
    assert core is None
    assert why == (
        f"native code for cards cannot be used: it has interface {number or 0}, not "
        f"{cuda_core._INTERFACE}: build the package again"
    )


@needs_the_library
def test_the_library_says_what_it_was_built_for() -> None:
    assert isinstance(CUDA_CORE, CudaCore)
    assert CUDA_CORE.architectures or CUDA_CORE.portable
    assert CUDA_CORE.images() and CUDA_CORE.cuda_version[0].isdigit()


@needs_the_library
def test_how_many_tokens_a_step_takes_is_a_matter_of_shared_memory() -> None:
    assert isinstance(CUDA_CORE, CudaCore)

    def layer(experts: int) -> LayerSpec:
        def bank(k: int, n: int, projections: int) -> BankSpec:
            return BankSpec("int4", "compact", experts, k, n, 32, 0, projections, torch.float16)

        return LayerSpec(bank(2560, 320, 2), bank(160, 2560, 1))

    most = {
        architecture: CudaRoutes(CUDA_CORE, CardFacts("card", architecture)).most_tokens(
            layer(512), 10
        )
        for architecture in (75, 80, 86, 90)
    }
    assert 64 <= most[86] < most[75] < most[80] < most[90] < 1 << 16
    routes = CudaRoutes(CUDA_CORE, CardFacts("card", 90))
    assert routes.most_tokens(layer(128), 10) > most[90] > routes.most_tokens(layer(512), 20)
    assert routes.most_tokens(layer(60_000), 10) == 0


def test_what_a_call_says_becomes_an_error_of_the_library() -> None:
    core = FakeCore("90")
    core.check(0, Error())
    with pytest.raises(CudaError, match="out of memory; found CUDA error 2"):
        core.check(4, Error(error=2, what=b"a stream could not be made: out of memory"))
    with pytest.raises(DescriptorError) as caught:
        core.check(1, Error(subject=7, what=b"slot is outside the bank"))
    assert caught.value.subject == 7


# On a card


@on_card
@pytest.mark.parametrize(
    "changes",
    [{"role": 12}, {"slot": 2}, {"offset": 1}, {"rows": 72}, {"cols": 40}, {"row_bytes": 1 << 62}],
    ids=str,
)
def test_a_descriptor_that_does_not_fit_writes_nothing(changes: dict[str, int]) -> None:
    spec = small_layer()
    banks = LayerBanks.allocate(spec, CARD, None)
    for tensor in banks.tensors:
        tensor.zero_()
    cache = ConversionCache(spec, CARD)
    chunk = torch.full((1024,), 255, dtype=torch.uint8, device=CARD)
    both = torch.cat((descriptor(), descriptor(**changes)))
    with pytest.raises(DescriptorError) as caught:
        native.write(chunk, both, banks.tensors, cache.globals, spec.to_ints())
    assert caught.value.subject == 1
    torch.cuda.synchronize()
    assert not any(int(tensor.view(torch.uint8).sum()) for tensor in banks.tensors)
    cache.release()


@on_card
def test_tensors_of_another_layer_are_refused() -> None:
    spec = small_layer()
    banks = LayerBanks.allocate(spec, CARD, None)
    cache = ConversionCache(spec, CARD)
    chunk = torch.zeros(1024, dtype=torch.uint8, device=CARD)
    for tensors, state in (
        (banks.tensors[:-1], cache.globals),
        ([*banks.tensors[:-1], banks.tensors[-1][:1]], cache.globals),
        (banks.tensors, cache.globals[:-8]),
    ):
        with pytest.raises(ValueError, match="layer|layout"):
            native.write(chunk, descriptor(), tensors, state, spec.to_ints())
    cache.release()

"""Linears are loaded to a card as on the host: through a ring, converted where the banks are.

The device code of the conversion runs on the host here (``host_card.py``), products by the
reference; ``test_cuda_linears.py`` runs on a card.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from host_card import COMPILER, build, host_as_card
from load_fakes import RecordingSource

from loader import Policy, native
from loader.bank import TILE
from loader.checkpoint.folder import open_checkpoint
from loader.checkpoint.linears import find_linears
from loader.checkpoint.source import LocalSource
from loader.cuda_core import CudaCore
from loader.linears import LinearLoader, LinearPlan, plan_linear
from loader.pieces import Places

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no g++ to compile it with")

FIXTURES = Path(__file__).parents[2] / "fixtures" / "checkpoints"
NAMES = (
    "qwen3moe-awq-gemm-g64-router",
    "qwen3moe-ct-w4a16asym-g32",
    "mixtral-ct08-nvfp4",
    "mixtral-gptqmodel-awq-sym-g64",
)
CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def core(tmp_path_factory: pytest.TempPathFactory) -> CudaCore:
    return build(tmp_path_factory.mktemp("card"))


@contextmanager
def opened(
    folder: Path, policy: Policy, lends: bool = True, staging: int = 1 << 20
) -> Iterator[tuple[LinearLoader, list[LinearPlan]]]:
    """A loader of every linear, by whatever serves the host now."""
    code = native.implementation_for(CPU)
    assert code is not None
    with LocalSource(folder) if lends else RecordingSource(folder) as source:
        checkpoint = open_checkpoint(source)
        places = Places(checkpoint.catalog.file, checkpoint.catalog.begin)
        plans = [
            plan_linear(one, policy.resolve(), code, places, torch.float32)
            for one in find_linears(checkpoint).values()
        ]
        with LinearLoader(checkpoint, plans, CPU, code, policy.resolve(), staging) as loader:
            yield loader, plans


@pytest.mark.parametrize("lends", (True, False), ids=("ring", "ahead"))
@pytest.mark.parametrize("layout", ("compact", "wide"))
@pytest.mark.parametrize("name", NAMES)
def test_the_banks_and_weights_are_those_of_the_host(
    core: CudaCore, name: str, layout: str, lends: bool
) -> None:
    policy = Policy(layout=layout)
    with opened(FIXTURES / name, policy) as (host, plans):
        wanted = [host.bank(plan).banks() for plan in plans]
        weights = [host.dequantize(plan, torch.float32) for plan in plans]
    with (
        pytest.MonkeyPatch.context() as patch,
        host_as_card(core, patch),
        opened(FIXTURES / name, policy, lends) as (card, plans),
    ):
        assert card.staging_bytes <= 1 << 20
        for plan, banks, weight in zip(plans, wanted, weights, strict=True):
            assert plan.served == "bank" and plan.routes[0].implementation == "cuda sm_90"
            mine = card.bank(plan).banks()
            for a, b in zip(mine, banks, strict=True):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            assert torch.equal(card.dequantize(plan, torch.float32), weight)


def test_a_card_plans_a_workspace_for_the_largest_linear() -> None:
    from fake_card import card

    code = card(90)
    assert code.linear is not None and code.linear_scratch_bytes is not None
    for name in NAMES[:3]:
        with LocalSource(FIXTURES / name) as source:
            checkpoint = open_checkpoint(source)
            places = Places(checkpoint.catalog.file, checkpoint.catalog.begin)
            for one in find_linears(checkpoint).values():
                plan = plan_linear(one, Policy().resolve(), code, places, torch.float16)
                assert plan.served == "bank"
                columns = max(plan.bank.n_padded, 2 * TILE)  # a tile in 32 bits at least
                assert plan.scratch_bytes(code) == columns * plan.k * 2
                plain = plan_linear(one, Policy().resolve(), code, places, torch.float32)
                assert plain.served == "dequantized" and "float32" in plain.reason

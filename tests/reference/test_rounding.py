"""Where a layer rounds (docs/routes.md), shown by layers whose fp32 sums are exact."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from bank_oracle import interleave, metadata, words
from moe_oracle import activations

from loader.bank import BankSpec, LayerSpec
from loader.reference import routes


def powers(rng: np.random.Generator, k: int, n: int, used: int) -> np.ndarray:
    """Integers ``(K, N)`` of which ``used`` in a column are not zero: fp32 sums stay exact."""
    weights = np.zeros((k, n))
    for column in range(n):
        rows = rng.choice(k, used, replace=False)
        weights[rows, column] = rng.integers(1, 8, used)
    return weights


@dataclass(frozen=True)
class Exact:
    """A layer whose fp32 sums are exact in any order: what is left is the rounding of section 5."""

    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray

    def run(self, x: torch.Tensor, steps: tuple[bool, bool, bool]) -> torch.Tensor:
        """One expert in fp64, rounded to the dtype of x after the steps that are asked for."""

        def rounded(value: torch.Tensor, step: int) -> torch.Tensor:
            return value.to(x.dtype).double() if steps[step] else value

        w = [torch.from_numpy(a) for a in (self.gate, self.up, self.down)]
        gate, up = rounded(x.double() @ w[0], 0), rounded(x.double() @ w[1], 0)
        assert gate.min() >= 128, "silu is the identity there, in fp32"
        return rounded(rounded(gate * up, 1) @ w[2], 2)


def exact_layer(layout: str) -> tuple[list[Exact], list[torch.Tensor], LayerSpec]:
    """Three experts with scale 1 and zero point 8, as banks of one layout."""
    rng = np.random.default_rng(7)
    experts = [
        Exact(powers(rng, 128, 64, 40), powers(rng, 128, 64, 4), powers(rng, 64, 128, 3))
        for _ in range(3)
    ]
    spec = LayerSpec(
        BankSpec("int4", layout, 3, 128, 128, 32, 0, 2, torch.float16),
        BankSpec("int4", layout, 3, 64, 128, 32, 0, 1, torch.float16),
    )
    tensors = []
    for bank, matrices in (
        (spec.w13, [interleave(e.gate, e.up) for e in experts]),
        (spec.w2, [e.down for e in experts]),
    ):
        ones = np.full((bank.groups, bank.n), 0x3C00, np.uint16)
        eights = np.full((bank.groups, bank.n), 8, np.uint8)
        planes = metadata(layout, "F16", ones, eights)
        made = {"weight": np.stack([words(m.astype(np.uint8) + 8) for m in matrices])}
        made |= {name: np.stack([plane] * 3) for name, plane in planes.items()}
        for tensor in bank.tensors():
            raw = torch.from_numpy(np.ascontiguousarray(made[tensor.name]).view(np.uint8))
            tensors.append(raw.view(tensor.dtype).view(tensor.shape))
    return experts, tensors, spec


@pytest.mark.parametrize("limits", [[1, 8], [0, 0]], ids=["fast", "legacy"])
@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize("layout", ["compact", "record", "wide"])
def test_it_rounds_where_the_design_says(layout: str, tokens: int, limits: list[int]) -> None:
    """W13, SwiGLU and W2 once each to the dtype of x; the sum in fp32, in router order, once."""
    experts, banks, spec = exact_layer(layout)
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randint(5, 32, (tokens, 128), generator=generator).to(torch.bfloat16)
    ids = torch.tensor([[2, 0, 1, 2]] * tokens)
    router = torch.tensor([[0.3, 0.10001, 0.45, -0.3]] * tokens)
    out = torch.empty_like(x)
    call = partial(routes.moe, out, torch.empty(32 * 128), x, ids, router)
    call(torch.arange(3, dtype=torch.int32), banks, spec.to_ints(), limits)

    def total(steps: tuple[bool, bool, bool], order: list[int]) -> torch.Tensor:
        y = torch.zeros(x.shape, dtype=torch.float32)
        for position in order:
            one = experts[int(ids[0, position])].run(x, steps)
            y += router[:, position, None] * one.float()
        return y.to(x.dtype)

    in_order = [0, 1, 2, 3]
    assert torch.equal(out, total((True, True, True), in_order))
    for step in range(3):
        missing = tuple(number != step for number in range(3))
        assert not torch.equal(out, total(missing, in_order)), f"rounding {step} does not show"


@pytest.mark.parametrize("limits", [[1, 8], [0, 0]], ids=["fast", "legacy"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_the_sum_is_taken_in_router_order(tokens: int, limits: list[int]) -> None:
    _, banks, spec = exact_layer("compact")
    x = activations(tokens, 128, torch.float32)

    def run(ids: list[int], router: list[float]) -> torch.Tensor:
        out = torch.empty_like(x)
        rows = torch.tensor([ids] * tokens), torch.tensor([router] * tokens)
        scratch, slots = torch.empty(32 * 128), torch.arange(3, dtype=torch.int32)
        routes.moe(out, scratch, x, *rows, slots, banks, spec.to_ints(), limits)
        return out

    alone = [run([expert], [1.0]) for expert in range(3)]
    router = {0: 0.3, 1: 0.10001, 2: 0.45}
    seen = []
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        wanted = torch.zeros_like(x)
        for expert in order:
            wanted += np.float32(router[expert]) * alone[expert]
        seen.append(wanted)
        assert torch.equal(run(order, [router[e] for e in order]), wanted)
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[2])

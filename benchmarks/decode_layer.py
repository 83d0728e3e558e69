"""Decode layers: MoE layers of random codes on a card, their numbers, and the same in fp64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from loader.bank import BankSpec, LayerSpec, split_banks, unpack_codes, unpack_zeros

CARD = torch.device("cuda", 0)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Geometry:
    """Sizes of a layer, and how many calls one graph holds."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    group: int
    calls: int


@dataclass(frozen=True)
class Numbers:
    """One projection of one expert: ``codes`` (K, N) uint8, ``scales`` and ``zeros`` (G, N)."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor


class Layer:
    """Banks of random codes with sane scales on the card."""

    def __init__(self, geometry: Geometry, kind: str, layout: str, scales: torch.dtype) -> None:
        group = 16 if kind == "e2m1" else geometry.group
        sense = "multiplier" if kind == "e2m1" else "none"

        def bank(k: int, n: int, projections: int) -> BankSpec:
            return BankSpec(
                kind, layout, geometry.experts, k, n, group, 0, projections, scales, sense
            )

        self.geometry = geometry
        self.spec = LayerSpec(
            bank(geometry.hidden, 2 * geometry.intermediate, 2),
            bank(geometry.intermediate, geometry.hidden, 1),
        )
        self.tensors = [tensor for one in self.spec.banks for tensor in _random(one)]
        self.map = torch.arange(geometry.experts, dtype=torch.int32, device=CARD)
        self.bytes_each = sum(t.nbytes for t in self.tensors) / geometry.experts

    def weights(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """W13 (H, 2I) and W2 (I, H) of one expert, fp64."""
        w13, w2 = (
            _weights64(bank, tensors, expert)
            for bank, tensors in zip(
                self.spec.banks, split_banks(self.spec, self.tensors), strict=True
            )
        )
        return w13, w2

    def numbers(self, expert: int) -> tuple[Numbers, Numbers]:
        """W13, all gate columns first, and W2 of one expert of an int4 ``compact`` layer."""
        found = []
        for bank, tensors in zip(
            self.spec.banks, split_banks(self.spec, self.tensors), strict=True
        ):
            parts = (
                _codes(bank, tensors, expert),
                tensors["scales"][expert, :, : bank.n],
                unpack_zeros(tensors["zeros"][expert])[:, : bank.n],
            )
            if bank.projections == 2:
                parts = tuple(torch.cat((part[:, 0::2], part[:, 1::2]), 1) for part in parts)  # type: ignore[assignment]  # as many
            found.append(Numbers(*parts))
        return found[0], found[1]


def _random(bank: BankSpec) -> list[torch.Tensor]:
    tensors = []
    for spec in bank.tensors():
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device=CARD)
        typical = 1.0 / (4.6 * math.sqrt(bank.k))
        if spec.name == "weight":
            tensor.random_(-(2**31), 2**31)
        elif spec.name == "scales" and bank.kind == "int4":
            tensor.copy_((torch.rand(spec.shape, device=CARD) + 0.5) * typical)
        elif spec.name == "scales":
            tensor.random_(0x20, 0x50)
        elif spec.name == "globals":
            tensor.fill_(typical * 1.4)
        elif spec.name == "zeros":
            tensor.random_(0, 256)
        else:
            scale = ((torch.rand(spec.shape, device=CARD) + 0.5) * typical).half()
            zero = torch.randint(0, 16, spec.shape, device=CARD)
            halves = torch.stack((scale, (-zero * scale.float()).half()), dim=-1)
            tensor.copy_(halves.view(torch.int32).squeeze(-1))
        tensors.append(tensor)
    return tensors


def _codes(bank: BankSpec, tensors: dict[str, torch.Tensor], expert: int) -> torch.Tensor:
    return unpack_codes(tensors["weight"][expert], bank.k, bank.n)


def _weights64(bank: BankSpec, tensors: dict[str, torch.Tensor], expert: int) -> torch.Tensor:
    codes = _codes(bank, tensors, expert)
    group = torch.arange(bank.k, device=CARD) // bank.group
    if bank.kind == "e2m1":
        table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=CARD).double()
        scale = tensors["scales"][expert].view(torch.float8_e4m3fn).double()
        whole = tensors["globals"][expert].double().repeat(bank.columns)
        return table[codes.long()] * scale[group][:, : bank.n] * whole
    if bank.layout == "compact":
        scale = tensors["scales"][expert].double()
        zero = unpack_zeros(tensors["zeros"][expert]).double()
    else:
        halves = tensors["metadata"][expert].view(torch.float16)
        halves = halves.view(*tensors["metadata"][expert].shape, 2).double()
        scale, zero = halves[..., 0], torch.round(-halves[..., 1] / halves[..., 0])
    return (codes - zero[group][:, : bank.n]) * scale[group][:, : bank.n]


def moe64(layer: Layer, x: torch.Tensor, ids: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    """The layer in fp64, expert by expert."""
    y = torch.zeros(x.shape, dtype=torch.float64, device=CARD)
    for expert in ids.unique().tolist():
        rows, places = (ids == expert).nonzero(as_tuple=True)
        w13, w2 = layer.weights(expert)
        both = x[rows].double() @ w13
        hidden = torch.nn.functional.silu(both[:, 0::2]) * both[:, 1::2]
        y.index_add_(0, rows, router[rows, places].double()[:, None] * (hidden @ w2))
    return y

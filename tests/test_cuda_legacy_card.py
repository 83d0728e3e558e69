"""``legacy`` on a card: the bounds of docs/routes.md in every layout, scales, captures, memory."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from card import CARD, needs_card
from moe_oracle import TOLERANCE, error_of, moe64

import loader
from loader import cuda_legacy, native
from loader.bank import BankSpec, LayerSpec, Tensors, split_banks
from loader.experts import PreparedExperts
from loader.reference.weights import Columns, dequantize
from loader.testing.checkpoint import tiny_checkpoint

pytestmark = needs_card()

EXPERTS, TOP_K, HIDDEN = 6, 3, 256
TOKENS = (1, 2, 9, 16, 64, 300)
LAYERS = [
    (dialect, layout, rounding, tp)
    for dialect, layout, rounding, tp in product(
        ("awq-gemm", "ct-nvfp4", "modelopt-nvfp4"),
        ("compact", "record", "wide"),
        ("exact", "fused_bias"),
        (1, 4),
    )
    if not ("nvfp4" in dialect and (layout == "record" or rounding == "fused_bias"))
]

Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def step(tokens: int, dtype: torch.dtype, seed: int = 0, experts: int = EXPERTS) -> Given:
    """Activations, ids (some out of range, some twice) and weights (NaN where skipped)."""
    generator = torch.Generator().manual_seed(100 * seed + tokens)
    x = torch.randn((tokens, HIDDEN), generator=generator).to(dtype)
    ids = torch.randint(-1, experts + 1, (tokens, TOP_K), generator=generator)
    ids[-1] = ids[-1, :1].clamp(0, experts - 1)
    weights = torch.rand((tokens, TOP_K), generator=generator)
    weights[(ids < 0) | (ids >= experts)] = float("nan")
    return x.to(CARD), ids.to(CARD), weights.to(CARD)


class Bare:
    """Banks on the card without a checkpoint, with weights for the oracle."""

    def __init__(self, spec: LayerSpec, banks: list[torch.Tensor]) -> None:
        self.spec, self.tensors = spec, banks
        self.map = torch.arange(spec.w13.experts, dtype=torch.int32)
        self.on_card = [bank.to(CARD) for bank in banks]
        self.map_on_card = self.map.to(CARD)
        self.scratch_bytes = cuda_legacy.scratch_bytes(spec)

    @staticmethod
    def of(layer: PreparedExperts) -> Bare:
        bare = Bare(layer.spec, [bank.cpu() for bank in layer.banks()])
        bare.map = layer.workspace.expert_map.cpu()
        bare.map_on_card = bare.map.to(CARD)
        return bare

    def weights(self) -> dict[int, dict[str, torch.Tensor]]:
        found = {}
        for expert, slot in enumerate(self.map.tolist()):
            if slot < 0:
                continue
            w13, w2 = (
                self._whole(bank, tensors, slot)
                for bank, tensors in zip(
                    self.spec.banks, split_banks(self.spec, self.tensors), strict=True
                )
            )
            found[expert] = {"gate": w13[0::2], "up": w13[1::2], "down": w2}
        return found

    def _whole(self, bank: BankSpec, tensors: Tensors, slot: int) -> torch.Tensor:
        return dequantize(bank, self.spec.awq_rounding, tensors, Columns(slot, 0, bank.n)).double()

    def run(self, given: Given, out: torch.Tensor | None = None) -> torch.Tensor:
        """The operator itself, from a poisoned output and workspace."""
        out = torch.full_like(given[0], float("nan")) if out is None else out
        scratch = torch.full((self.scratch_bytes // 4,), float("nan"), device=CARD)
        native.moe(
            out,
            scratch,
            *given,
            self.map_on_card,
            self.on_card,
            self.spec.to_ints(),
            [0, 0],
        )
        return out

    def error(self, given: Given) -> float:
        x, ids, router = (tensor.cpu() for tensor in given)
        return error_of(self.run(given).cpu(), moe64(self.weights(), x, ids, router))


@pytest.mark.parametrize(("dialect", "layout", "rounding", "tp"), LAYERS)
def test_every_layer_meets_the_bound(
    tmp_path: Path, dialect: str, layout: str, rounding: str, tp: int
) -> None:
    tiny_checkpoint(
        tmp_path, dialect=dialect, hidden=HIDDEN, intermediate=704, experts=EXPERTS, layers=1
    )
    policy = loader.Policy(layout=layout, awq_rounding=rounding)
    shard = loader.Shard(tp_rank=tp - 1, tp_size=tp)
    layer = Bare.of(loader.load(tmp_path, "cpu", shard=shard, policy=policy)[0])
    for dtype, tokens in product((torch.float16, torch.bfloat16), TOKENS):
        error = layer.error(step(tokens, dtype))
        assert error <= TOLERANCE[dtype], f"T={tokens} {dtype}: {error:.2e}"


def bank_of(
    k: int, n: int, projections: int, group: int, phase: int, scale_dtype: torch.dtype
) -> BankSpec:
    return BankSpec(
        "int4", "compact", EXPERTS, k, n, group, phase, projections, scale_dtype, "none"
    )


def layer_of(group: int, phase: int, scale_dtype: torch.dtype, spread: float) -> Bare:
    """A layer whose scales are spread over so many powers of ten, about a usual size."""
    generator = torch.Generator().manual_seed(group + phase)
    spec = LayerSpec(
        bank_of(HIDDEN, 2 * 176, 2, group, 0, scale_dtype),
        bank_of(176, HIDDEN, 1, group, phase, scale_dtype),
    )
    banks = []
    for bank in spec.banks:
        for tensor in bank.tensors():
            if tensor.name == "scales":
                power = (torch.rand(tensor.shape, generator=generator) - 0.5) * spread
                typical = 1.0 / (4.6 * bank.k**0.5)
                banks.append((typical * 10**power).to(tensor.dtype))
            else:
                raw = torch.randint(0, 256, tensor.shape, generator=generator, dtype=torch.uint8)
                if tensor.dtype == torch.int32:
                    shape = (*tensor.shape[:-1], tensor.shape[-1] * 4)
                    raw = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
                banks.append(raw.view(tensor.dtype))
    return Bare(spec, banks)


@pytest.mark.parametrize(("group", "phase"), [(16, 0), (32, 16), (64, 48), (128, 16), (256, 0)])
@pytest.mark.parametrize("scale_dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32))
def test_groups_and_phases(
    group: int, phase: int, scale_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    layer = layer_of(group, phase, scale_dtype, 0.6)
    assert layer.error(step(9, dtype)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_weights_beyond_the_range_of_fp16(dtype: torch.dtype) -> None:
    layer = layer_of(32, 0, torch.bfloat16, 0.6)
    layer.tensors[1] *= 2.0**18  # W13: up to 1e5
    layer.tensors[4] *= 2.0**-10  # W2: down to 1e-5
    layer.on_card = [bank.to(CARD) for bank in layer.tensors]
    x, ids, router = step(16, dtype)
    assert layer.error((x * 2.0**-14, ids, router)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("layout", ("compact", "wide"))
def test_a_slice_of_the_experts(tmp_path: Path, layout: str) -> None:
    tiny_checkpoint(tmp_path, dialect="awq-gemm", hidden=HIDDEN, experts=EXPERTS, layers=1)
    shard = loader.Shard(ep_rank=1, ep_size=2)
    layer = Bare.of(
        loader.load(tmp_path, "cpu", shard=shard, policy=loader.Policy(layout=layout))[0]
    )
    x, ids, router = step(30, torch.float16)
    here = torch.isin(ids, (layer.map_on_card >= 0).nonzero().flatten())
    router[~here] = float("nan")
    assert layer.error((x, ids, router)) <= TOLERANCE[torch.float16]


@pytest.mark.parametrize("plain_dtype", ("BF16", "F16"))
def test_unquantized_experts(tmp_path: Path, plain_dtype: str) -> None:
    tiny_checkpoint(
        tmp_path,
        dialect="awq-gemm",
        hidden=HIDDEN,
        experts=EXPERTS,
        layers=1,
        excluded=(0,),
        plain_dtype=plain_dtype,
    )
    layer = Bare.of(loader.load(tmp_path, "cpu")[0])
    for dtype, tokens in product((torch.float16, torch.bfloat16), (1, 9, 300)):
        assert layer.error(step(tokens, dtype)) <= TOLERANCE[dtype]


@pytest.mark.parametrize(("hidden", "width"), [(HIDDEN, 18), (HIDDEN, 5)])
def test_unquantized_experts_of_odd_sizes(hidden: int, width: int) -> None:
    generator = torch.Generator().manual_seed(width)

    def plain(k: int, n: int, projections: int) -> tuple[BankSpec, torch.Tensor]:
        spec = BankSpec("plain", "plain", EXPERTS, k, n, 1, 0, projections, torch.bfloat16)
        weight = torch.randn((EXPERTS, n, k), generator=generator) / k**0.5
        return spec, weight.bfloat16()

    (w13, first), (w2, second) = plain(hidden, 2 * width, 2), plain(width, hidden, 1)
    layer = Bare(LayerSpec(w13, w2), [first, second])
    for dtype in (torch.float16, torch.bfloat16):
        assert layer.error(step(9, dtype)) <= TOLERANCE[dtype]


def test_weights_of_experts_that_are_not_asked_for_may_be_nan() -> None:
    layer = layer_of(32, 0, torch.float16, 0.6)
    x, ids, router = step(30, torch.bfloat16)
    for tensor in (layer.tensors[1], layer.tensors[4]):
        tensor[2] = float("nan")
    layer.on_card = [bank.to(CARD) for bank in layer.tensors]
    ids[ids == 2] = 3
    assert layer.error((x, ids, router)) <= TOLERANCE[torch.bfloat16]
    captured = replayed(layer, (x, ids, router), [(x, ids, router)])[0]
    assert torch.equal(captured, layer.run((x, ids, router)))


def replayed(layer: Bare, given: Given, others: list[Given]) -> list[torch.Tensor]:
    """A graph captured with some inputs, replayed with others."""
    given = tuple(tensor.clone() for tensor in given)  # type: ignore[assignment]  # as many as before
    out = torch.empty_like(given[0])
    scratch = torch.full((layer.scratch_bytes // 4,), float("nan"), device=CARD)
    call = (layer.map_on_card, layer.on_card, layer.spec.to_ints(), [0, 0])
    layer.run(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        native.moe(out, scratch, *given, *call)
    found = []
    for other in others:
        for own, new in zip(given, other, strict=True):
            own.copy_(new)
        out.fill_(float("nan"))
        graph.replay()
        found.append(out.clone())
    return found


@pytest.mark.parametrize("tokens", (1, 7, 64, cuda_legacy.LEGACY_CAPTURED_TOKENS))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_a_captured_step_replays_with_other_inputs(tokens: int, dtype: torch.dtype) -> None:
    layer = layer_of(64, 0, torch.float16, 0.6)
    one_expert = step(tokens, dtype, 3)
    one_expert[1].fill_(4)  # all rows at one expert
    one_expert[2].nan_to_num_()
    others = [step(tokens, dtype, 1), step(tokens, dtype, 2), one_expert]
    for other, found in zip(others, replayed(layer, step(tokens, dtype), others), strict=True):
        assert error_of(found.cpu(), layer.run(other).double().cpu()) <= TOLERANCE[dtype]
    assert layer.error(others[0]) <= TOLERANCE[dtype]


@pytest.mark.parametrize("rounding", ("exact", "fused_bias"))
def test_little_room_gives_the_same_result(rounding: str) -> None:
    layer = layer_of(32, 0, torch.float16, 0.6)
    layer.spec = LayerSpec(*layer.spec.banks, rounding)
    for dtype in (torch.float16, torch.bfloat16):
        given = step(64, dtype)
        layer.scratch_bytes = cuda_legacy.scratch_bytes(layer.spec)
        whole = layer.run(given)
        layer.scratch_bytes = 32 * HIDDEN * 4
        assert error_of(layer.run(given).cpu(), whole.double().cpu()) <= TOLERANCE[dtype]


def test_rows_beside_the_workspace_are_within_their_budget() -> None:
    layer = layer_of(32, 0, torch.float16, 0.6)
    tokens = 40_000
    given = step(tokens, torch.bfloat16)
    layer.run(given)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    layer.run(given)
    used = torch.cuda.max_memory_allocated() - before - given[0].nbytes - layer.scratch_bytes
    rows = tokens * TOP_K
    assert used <= 2 * cuda_legacy.LEGACY_ROWS_BYTES + 40 * rows

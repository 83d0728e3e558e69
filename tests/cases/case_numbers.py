"""The numbers of a case: what the files mean, in numpy and fp64, and what banks and routes hold.

What is expected is read from the files by the generator's own reader; banks are unpacked here as
docs/bank.md draws them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import loader
from loader import native
from loader.testing.checkpoint import TinyCheckpoint
from loader.testing.values import Codes

TOKENS = (1, 2, 8, 9, 17, 64)
TOLERANCES = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-5}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
NIBBLE_OF_ROW = (0, 4, 1, 5, 2, 6, 3, 7)

Truth = Callable[[int, int, str], Codes]


# What is expected, in numpy


def scale_values(bits: np.ndarray) -> dict[str, np.ndarray]:
    """Raw scale bits as float64 under each dtype of their width."""
    if bits.dtype == np.uint8:
        e4m3 = torch.from_numpy(bits.copy()).view(torch.float8_e4m3fn)
        return {"F8_E4M3": e4m3.double().numpy()}
    wide = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return {"F16": bits.view(np.float16).astype(np.float64), "BF16": wide}


def weight64(checkpoint: TinyCheckpoint, codes: Codes) -> np.ndarray:
    """(out, in) float64: what the stored numbers mean (docs/formats.md)."""
    columns = codes.q.shape[1]
    group = columns if checkpoint.group == -1 else checkpoint.group
    at = np.arange(columns) // group
    scale = scale_values(codes.scale)[checkpoint.scale_dtype][:, at]
    if codes.global_scale is None:
        assert codes.z is not None
        return np.asarray((codes.q.astype(np.float64) - codes.z[:, at]) * scale)
    whole = np.float64(codes.global_scale)
    values = E2M1[codes.q] * scale
    return np.asarray(values / whole if checkpoint.dialect == "ct-nvfp4" else values * whole)


def layer_weights(
    checkpoint: TinyCheckpoint, layer: int, truth: Truth
) -> list[dict[str, np.ndarray]]:
    """The float64 weights of every expert of a layer, quantized or not."""
    names = ("gate", "up", "down")
    if checkpoint.plain(layer):
        return [
            {name: checkpoint.weight(layer, expert, name) for name in names}
            for expert in range(checkpoint.experts)
        ]
    return [
        {name: weight64(checkpoint, truth(layer, expert, name)) for name in names}
        for expert in range(checkpoint.experts)
    ]


def moe64(
    weights: list[dict[str, np.ndarray]], x: torch.Tensor, ids: torch.Tensor, router: torch.Tensor
) -> np.ndarray:
    """(T, H) float64 of one layer; a slot that names no expert adds nothing."""
    rows = x.double().numpy()
    total = np.zeros_like(rows)
    for expert, weight in enumerate(weights):
        token, position = np.nonzero(ids.numpy() == expert)
        if len(token):
            gate, up = rows[token] @ weight["gate"].T, rows[token] @ weight["up"].T
            hidden = gate / (1 + np.exp(-gate)) * up
            factor = router.double().numpy()[token, position]
            np.add.at(total, token, factor[:, None] * (hidden @ weight["down"].T))
    return total


# What is there, unpacked as docs/bank.md draws it


def bank_codes(words: torch.Tensor, k: int, n: int) -> np.ndarray:
    """(N, K) uint8 from the words ``(tiles, Kp / 8, 32) int32`` of one expert."""
    array = words.numpy().view(np.uint32)
    tiles, k8, columns = array.shape
    codes = np.empty((tiles, columns, k8, 8), np.uint8)
    for row, nibble in enumerate(NIBBLE_OF_ROW):
        codes[..., row] = ((array >> np.uint32(4 * nibble)) & 15).transpose(0, 2, 1)
    flat = codes.reshape(tiles * columns, k8 * 8)
    assert not flat[n:].any() and not flat[:, k:].any(), "pad codes are not 0"
    return flat[:n, :k]


def bank_plane(module: loader.PreparedExperts, name: str, slot: int, n: int) -> np.ndarray:
    """(N, G) raw bits of one metadata plane of one expert; pads are checked to be 0."""
    tensor = module.get_buffer(name)[slot]
    bits = tensor.view(torch.uint8 if tensor.dtype.itemsize == 1 else torch.int16).numpy()
    bits = bits.view(f"u{bits.itemsize}")
    if name.endswith("zeros"):
        bits = np.stack((bits & 15, bits >> 4), axis=-1).reshape(len(bits), -1)
    assert not bits[:, n:].any(), f"{name}: pad columns are not 0"
    return np.asarray(bits[:, :n].T)


def assert_same(found: np.ndarray, wanted: np.ndarray, what: str) -> None:
    """Equal to the bit, or the first difference."""
    assert found.shape == wanted.shape, f"{what}: {found.shape} instead of {wanted.shape}"
    wrong = np.argwhere(found != wanted)
    if len(wrong):
        at = tuple(wrong[0])
        pytest.fail(f"{what}: {len(wrong)} differ, first {at}: {found[at]} not {wanted[at]}")


def same_banks(module: loader.PreparedExperts, checkpoint: TinyCheckpoint, truth: Truth) -> None:
    """Codes, scales, zero points and globals of the ``compact`` banks are the file's own."""
    layer, shard = module.layer, module.shard
    count = checkpoint.intermediate // shard.tp_size
    run = slice(shard.tp_rank * count, (shard.tp_rank + 1) * count)
    group = checkpoint.intermediate if checkpoint.group == -1 else checkpoint.group
    groups = slice(run.start // group, -(-run.stop // group))
    for slot, expert in enumerate(module.expert_ids):
        if checkpoint.plain(layer):
            same_plain(module, checkpoint, slot, expert, run)
            continue
        both = bank_codes(module.get_buffer("w13_weight")[slot], checkpoint.hidden, 2 * count)
        down = bank_codes(module.get_buffer("w2_weight")[slot], count, checkpoint.hidden)
        for place, name in enumerate(("gate", "up", "down")):
            codes, what = truth(layer, expert, name), f"layer {layer} expert {expert} {name}"
            bank = "w2" if name == "down" else "w13"
            rows = slice(None) if name == "down" else run
            columns = run if name == "down" else slice(None)
            runs = groups if name == "down" else slice(None)
            n = checkpoint.hidden if name == "down" else 2 * count
            one = slice(None) if name == "down" else slice(place, None, 2)
            assert_same(
                down if name == "down" else both[one], codes.q[rows, columns], f"{what} codes"
            )
            scales = bank_plane(module, f"{bank}_scales", slot, n)[one]
            assert_same(scales, codes.scale[rows, runs], f"{what} scales")
            if codes.global_scale is None:
                assert codes.z is not None
                zeros = bank_plane(module, f"{bank}_zeros", slot, n)[one]
                assert_same(zeros, codes.z[rows, runs], f"{what} zero points")
            else:
                found = module.get_buffer(f"{bank}_globals")[slot, place % 2]
                assert found.numpy().tobytes() == codes.global_scale.tobytes(), f"{what} global"


def same_plain(
    module: loader.PreparedExperts,
    checkpoint: TinyCheckpoint,
    slot: int,
    expert: int,
    run: slice,
) -> None:
    """Experts that are not quantized hold the file's own numbers."""
    found = module.dequantize(expert)
    assert module.metadata_layout == "plain"
    assert module.get_buffer("w2_weight").dtype in (torch.bfloat16, torch.float16)
    for name in ("gate", "up", "down"):
        weight = checkpoint.weight(module.layer, expert, name)
        wanted = weight[:, run] if name == "down" else weight[run]
        assert_same(found[name].double().numpy(), wanted, f"expert {expert} {name}")


def inputs(
    checkpoint: TinyCheckpoint, tokens: int, seed: int = 0, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Activations of rms ``scale``, distinct experts for each token, and router weights.

    The activations are exact in every dtype, so that one reference serves all.
    """
    generator = torch.Generator().manual_seed(1000 * seed + tokens)
    x = torch.randn(tokens, checkpoint.hidden, generator=generator).bfloat16().float() * scale
    x[x.half().float() != x] = 0
    top_k = min(checkpoint.top_k, checkpoint.experts)
    order = torch.rand(tokens, checkpoint.experts, generator=generator).argsort(1)
    router = torch.rand(tokens, top_k, generator=generator).softmax(1)
    return x, order[:, :top_k].contiguous(), router


def relative_error(found: np.ndarray, wanted: np.ndarray) -> float:
    """NaN where anything is NaN, so that it never passes a comparison."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def run_route(
    module: loader.PreparedExperts,
    limits: list[int],
    x: torch.Tensor,
    ids: torch.Tensor,
    router: torch.Tensor,
) -> torch.Tensor:
    """One layer under route limits of the caller's choice: [0, 0] is ``legacy`` throughout."""
    out = torch.full_like(x, float("nan"))
    code = native.implementation_for(x.device)
    assert code is not None
    scratch = torch.empty(code.scratch_bytes([module.spec], max(len(x), 1), ids.shape[1]) // 4 + 1)
    table = module.workspace.expert_map
    banks, spec = module.banks(), module.spec.to_ints()
    native.moe(out, scratch, x, ids, router, table, banks, spec, limits)
    return out


def right_routes(
    cards: list[loader.PreparedExperts],
    weights: list[dict[str, np.ndarray]],
    checkpoint: TinyCheckpoint,
    dtypes: tuple[torch.dtype, ...],
    scale: float = 1.0,
) -> None:
    """The sum over the cards is within the tolerance for every token count and route."""
    for tokens in TOKENS:
        exact, ids, router = inputs(checkpoint, tokens, scale=scale)
        wanted = moe64(weights, exact, ids, router)
        for dtype in dtypes:
            x = exact.to(dtype)
            routed = {"as decided": sum(card(x, ids, router).double() for card in cards)}
            if dtype == torch.float32:
                for name, limits in (("legacy", [0, 0]), ("qpn_grouped", [0, 64])):
                    if name == "legacy" or cards[0].metadata_layout != "plain":
                        routed[name] = sum(
                            run_route(card, limits, x, ids, router).double() for card in cards
                        )
            for name, found in routed.items():
                error = relative_error(found.numpy(), wanted)
                assert error <= TOLERANCES[dtype], f"{name}, {tokens} tokens, {dtype}: {error}"

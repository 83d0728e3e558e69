"""Running layers on random activations against fp64 computed from the checkpoint's numbers.

One set of activations serves every dtype: small multiples of 1/32 times a power of two, which
fp16, bf16 and fp32 all hold exactly, so that fp64 is computed once a layer.

The roundings that the contract prescribes can by themselves exceed the 16-bit bounds on a row
where few values dominate, as happens in narrow slices. So more rows are drawn than run, and those
are run on which exact arithmetic with these roundings comes closest: what fails is the layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from loader.verify.decode import Float64, Index
from loader.verify.layer import LayerView, Projection
from loader.verify.report import ForwardCase
from loader.verify.slice import Checkpoint, ExpertSlice, size_problem

TOKENS = (1, 2, 9)
BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
LAYERS, EXPERTS, FALLBACK_TOP_K = 4, 4, 4
ROWS_DRAWN, ROWS_PROBED = 3 * sum(TOKENS), 4
# docs/routes.md promises the tolerance for intermediates of this size; the peak keeps fp16 finite.
RMS_LOW, RMS_HIGH, PEAK = 2.0**-6, 4e3, 3e4
_SCALES: Float64 = 2.0 ** np.arange(-12, 14, 2, dtype=np.float64)

RouteOf = Callable[[int, int], str]


@dataclass(frozen=True)
class _Routing:
    """Expert ids (tokens, k) int64 and router weights (tokens, k) float32 of one call."""

    ids: Index
    weights: Float64


@dataclass(frozen=True)
class _Reference:
    """fp64 results per pool expert, (rows, hidden) each, for activations ``x`` (rows, hidden)."""

    x: Float64
    outputs: Mapping[int, Float64]
    in_range: bool

    def expected(self, rows: slice, routing: _Routing) -> Float64:
        """The weighted sum over the slots whose expert is held; other slots add nothing."""
        total = np.zeros_like(self.x[rows])
        for slot in range(routing.ids.shape[1]):
            for token, expert in enumerate(routing.ids[:, slot]):
                output = self.outputs.get(int(expert))
                if output is not None:
                    total[token] += routing.weights[token, slot] * output[rows][token]
        return total


def choose_layers(layers: Mapping[int, LayerView], rng: np.random.Generator) -> list[int]:
    """Up to four layers at random, one of every metadata layout first."""
    shuffled = [int(layer) for layer in rng.permutation(sorted(layers))]
    firsts = {layers[layer].metadata_layout: layer for layer in reversed(shuffled)}
    order = [*firsts.values(), *(x for x in shuffled if x not in firsts.values())]
    return sorted(order[:LAYERS])


def run_layer(
    layer_id: int,
    layer: LayerView,
    checkpoint: Checkpoint,
    rng: np.random.Generator,
    route_of: RouteOf | None,
) -> tuple[list[ForwardCase], str | None]:
    """The calls of one layer, and why fp16 was left out if no activations keep it in range.

    Returns no case where the layer's sizes contradict the checkpoint: the comparison says so.
    """
    held = layer.expert_ids
    pool = [int(i) for i in rng.choice(held, min(EXPERTS, len(held)), replace=False)]
    reference = _reference(layer_id, layer, checkpoint, pool, rng)
    if reference is None:
        return [], None
    absent = _absent(layer, checkpoint)
    top_k = checkpoint.config.top_k or min(FALLBACK_TOP_K, len(held))
    device = _device(layer)
    cases: list[ForwardCase] = []
    first = 0
    for tokens in TOKENS:
        rows = slice(first, first + tokens)
        first += tokens
        routing = _routing(tokens, top_k, pool, absent, rng)
        expected = reference.expected(rows, routing)
        for dtype in _dtypes(device):
            if dtype is torch.float16 and not reference.in_range:
                continue
            found = _call(layer, reference.x[rows], routing, dtype, device)
            route = route_of(layer_id, tokens) if route_of is not None else None
            name = str(dtype).removeprefix("torch.")
            error = relative_error(found, expected)
            cases.append(ForwardCase(layer_id, tokens, name, route, error, BOUNDS[dtype]))
    reason = f"layer {layer_id}: no activations keep the intermediates in the range of fp16"
    return cases, None if reference.in_range else reason


def relative_error(found: Float64 | None, expected: Float64) -> float:
    """Norm of the difference over the norm; infinite for a wrong shape or dtype (None).

    A row that must be zero, since none of its slots is held, must be exactly zero.
    """
    if found is None or found.shape != expected.shape:
        return math.inf
    empty = ~expected.any(axis=1)
    if not (found[empty] == 0).all():
        return math.inf
    norm = float(np.linalg.norm(expected))
    return float(np.linalg.norm(found - expected)) / norm if norm else 0.0


def _call(
    layer: LayerView, x: Float64, routing: _Routing, dtype: torch.dtype, device: torch.device
) -> Float64 | None:
    hidden = torch.from_numpy(x).to(device=device, dtype=dtype)
    ids = torch.from_numpy(routing.ids).to(device)
    weights = torch.from_numpy(routing.weights).to(device=device, dtype=torch.float32)
    with torch.no_grad():
        y = layer(hidden, ids, weights)
    if y.dtype != dtype:
        return None
    array: Float64 = y.detach().cpu().double().numpy()
    return array


def _routing(
    tokens: int, top_k: int, pool: list[int], absent: int, rng: np.random.Generator
) -> _Routing:
    """Random experts of the pool, with repeated ids and ids that are not on this card.

    A pool smaller than ``top_k`` repeats by itself; in any case the first token of a call repeats
    its first id, the second one and the last slot hold a foreign id, and the last of nine tokens
    has no other.
    """
    ids = np.empty((tokens, top_k), dtype=np.int64)
    for token in range(tokens):
        order = rng.permutation(pool)
        ids[token] = np.resize(order, top_k)
        if top_k >= 2 and token % 3 == 0:
            ids[token, 1] = ids[token, 0]
        if top_k >= 3 or (top_k == 2 and token % 3 == 1):
            ids[token, -1] = absent
    if tokens > 2:
        ids[-1] = absent
    raw = rng.uniform(0.1, 1.0, ids.shape)
    weights = (raw / raw.sum(axis=1, keepdims=True)).astype(np.float32).astype(np.float64)
    return _Routing(ids, weights)


def _absent(layer: LayerView, checkpoint: Checkpoint) -> int:
    """An expert of the model that other cards hold; -1, an empty slot, where this one holds all."""
    others = set(range(checkpoint.config.expert_count or 0)) - set(layer.expert_ids)
    return min(others, default=-1)


def _reference(
    layer_id: int,
    layer: LayerView,
    checkpoint: Checkpoint,
    pool: list[int],
    rng: np.random.Generator,
) -> _Reference | None:
    """Activations and fp64 results of the pool's experts; None where the sizes contradict.

    Two passes over the experts, one expert at a time: the first finds the scale of the
    activations, the second computes the results at that scale and chooses the rows.
    """
    normal = rng.standard_normal((ROWS_DRAWN, layer.hidden_size))
    base = np.clip(np.round(normal * 32), -127, 127) / 32
    moments = _Moments(len(_SCALES))
    linear: dict[int, tuple[Float64, Float64]] = {}
    for expert_id in pool:
        expert = checkpoint.expert(layer_id, layer, expert_id)
        if size_problem(layer_id, layer, expert) is not None:
            return None
        linear[expert_id] = _product(expert, "gate", base), _product(expert, "up", base)
        _probe(expert, *linear[expert_id], moments)
    chosen, in_range = moments.choose()
    scale = _SCALES[chosen]
    outputs: dict[int, Float64] = {}
    worst = np.zeros(ROWS_DRAWN)
    for expert_id, (gate, up) in linear.items():
        expert = checkpoint.expert(layer_id, layer, expert_id)
        outputs[expert_id], errors = _outputs(expert, gate * scale, up * scale)
        worst = np.maximum(worst, np.nan_to_num(errors, nan=np.inf))
    rows = np.sort(np.argsort(worst, kind="stable")[: sum(TOKENS)])
    return _Reference(base[rows] * scale, {i: out[rows] for i, out in outputs.items()}, in_range)


def _swiglu(gate: Float64, up: Float64) -> Float64:
    with np.errstate(all="ignore"):
        inner: Float64 = gate / (1 + np.exp(-gate)) * up
    return inner


def _rounded(values: Float64, dtype: torch.dtype) -> Float64:
    rounded: Float64 = torch.from_numpy(values).to(dtype).double().numpy()
    return rounded


def _probe(expert: ExpertSlice, gate: Float64, up: Float64, moments: _Moments) -> None:
    """Adds the size of every intermediate of a few rows, at every scale, to ``moments``."""
    gates = gate[None, :ROWS_PROBED] * _SCALES[:, None, None]
    ups = up[None, :ROWS_PROBED] * _SCALES[:, None, None]
    inner = _swiglu(gates, ups)
    out = _product(expert, "down", inner.reshape(-1, inner.shape[-1]))
    for position, values in enumerate((gates, ups, inner, out.reshape(*inner.shape[:2], -1))):
        moments.add(position, values)


def _outputs(expert: ExpertSlice, gate: Float64, up: Float64) -> tuple[Float64, Float64]:
    """(rows, hidden) in fp64, and per row the error of the contract's roundings in bounds."""
    halves = (torch.float16, torch.bfloat16)
    inner = [_swiglu(gate, up)]
    inner += [_rounded(_swiglu(_rounded(gate, d), _rounded(up, d)), d) for d in halves]
    exact, *rough = np.split(_product(expert, "down", np.concatenate(inner)), 1 + len(halves))
    errors = np.zeros(len(exact))
    with np.errstate(all="ignore"):
        for dtype, out in zip(halves, rough, strict=True):
            distance = np.linalg.norm(_rounded(out, dtype) - exact, axis=1)
            errors = np.maximum(errors, distance / np.linalg.norm(exact, axis=1) / BOUNDS[dtype])
    return exact, errors


def _product(expert: ExpertSlice, projection: Projection, x: Float64) -> Float64:
    blocks = [x @ expert.weights(projection, at, fp64=True).T for at in expert.blocks(projection)]
    return np.concatenate(blocks, axis=1)


class _Moments:
    """Mean square and peak of gate, up, SwiGLU and down outputs at every scale, over the pool."""

    def __init__(self, scales: int) -> None:
        self._square = np.zeros((4, scales))
        self._count = np.zeros(4)
        self._peak = np.zeros(scales)

    def add(self, position: int, values: Float64) -> None:
        self._square[position] += np.square(values).sum(axis=(1, 2))
        self._count[position] += values[0].size
        self._peak = np.maximum(self._peak, np.abs(values).max(axis=(1, 2)))

    def choose(self) -> tuple[int, bool]:
        """The scale whose rms values lie nearest to 1, and whether all are in the range."""
        with np.errstate(all="ignore"):
            rms = np.sqrt(self._square / self._count[:, None])
            fits = ((rms >= RMS_LOW) & (rms <= RMS_HIGH)).all(axis=0) & (self._peak <= PEAK)
            far = np.square(np.log2(rms)).sum(axis=0)
        far = np.where(np.isfinite(far), far, np.inf)
        chosen = int(np.argmin(np.where(fits, far, np.inf) if fits.any() else far))
        return chosen, bool(fits.any())


def _device(layer: LayerView) -> torch.device:
    if isinstance(layer, torch.nn.Module):
        for tensor in (*layer.buffers(), *layer.parameters()):
            return tensor.device
    return torch.device("cpu")


def _dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """The activation dtypes to run: fp32 is the host's, and older cards have no bf16."""
    if device.type == "cpu":
        return torch.float32, torch.float16, torch.bfloat16
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return (torch.float16,)
    return torch.float16, torch.bfloat16

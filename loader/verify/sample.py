"""Drawing output columns at random and comparing them, one expert in memory at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from loader.verify.decode import Float64, Index
from loader.verify.layer import PROJECTIONS, LayerView, Projection, column_count
from loader.verify.report import LISTED, Mismatch
from loader.verify.slice import Checkpoint, ExpertSlice, size_problem

# layer -> expert -> projection -> columns, in order
Draws = dict[int, dict[int, dict[Projection, Index]]]


def draw(layers: Mapping[int, LayerView], samples: int, rng: np.random.Generator) -> Draws:
    """``samples`` distinct columns, spread evenly over every layer and projection.

    Experts and columns are random within each. Where the card holds no more columns than
    ``samples``, all are drawn: the check is then exhaustive.
    """
    strata = [(layer, projection) for layer in sorted(layers) for projection in PROJECTIONS]
    sizes = [column_count(layers[layer], projection) for layer, projection in strata]
    held = [len(layers[layer].expert_ids) for layer, _ in strata]
    quotas = _quotas(np.multiply(sizes, held, dtype=np.int64), samples, rng)
    draws: Draws = {}
    for (layer, projection), size, experts, quota in zip(strata, sizes, held, quotas, strict=True):
        picks = np.sort(rng.choice(size * experts, int(quota), replace=False))
        for place in np.unique(picks // size) if size else ():
            columns = picks[picks // size == place] % size
            expert = layers[layer].expert_ids[int(place)]
            draws.setdefault(layer, {}).setdefault(expert, {})[projection] = columns
    return {layer: dict(sorted(draws[layer].items())) for layer in sorted(draws)}


def _quotas(populations: Index, samples: int, rng: np.random.Generator) -> Index:
    quotas = np.zeros_like(populations)
    left = min(samples, int(populations.sum()))
    while left:
        open_strata = np.flatnonzero(quotas < populations)
        share = left // len(open_strata)
        if share == 0:
            quotas[rng.choice(open_strata, left, replace=False)] += 1
            break
        room = (populations - quotas)[open_strata]
        quotas[open_strata] += np.minimum(share, room)
        left -= int(np.minimum(share, room).sum())
    return quotas


@dataclass
class Comparison:
    """Running totals of the comparison; lists are bounded, counts are not."""

    layers: set[int] = field(default_factory=set)
    experts: int = 0
    columns: int = 0
    values: int = 0
    columns_by_format: dict[str, int] = field(default_factory=dict)
    mismatch_count: int = 0
    mismatches: list[Mismatch] = field(default_factory=list)
    problem_count: int = 0
    problems: list[str] = field(default_factory=list)

    def add_problem(self, sentence: str) -> None:
        """Count one problem, and keep its sentence while there is room."""
        self.problem_count += 1
        if len(self.problems) < LISTED:
            self.problems.append(sentence)

    def add_columns(
        self, where: tuple[int, int, Projection], columns: Index, expected: Float64, found: Float64
    ) -> None:
        """Compares (columns, k) values; equality makes +0 and -0 alike, and NaN equals nothing."""
        layer, expert, projection = where
        self.columns += len(columns)
        self.values += expected.size
        wrong = np.argwhere(~(expected == found))
        self.mismatch_count += len(wrong)
        for at, k in wrong[: LISTED - len(self.mismatches)]:
            self.mismatches.append(
                Mismatch(
                    layer,
                    expert,
                    projection,
                    int(columns[at]),
                    int(k),
                    float(expected[at, k]),
                    float(found[at, k]),
                )
            )


def compare(
    layers: Mapping[int, LayerView], checkpoint: Checkpoint, draws: Draws, result: Comparison
) -> None:
    """Compares every drawn column with ``dequantize``; one expert is held at a time."""
    for layer_id, experts in draws.items():
        layer = layers[layer_id]
        for expert_id, drawn in experts.items():
            expert = checkpoint.expert(layer_id, layer, expert_id)
            problem = size_problem(layer_id, layer, expert)
            if problem is not None:
                result.add_problem(problem)
                break
            result.layers.add(layer_id)
            result.experts += 1
            _compare_expert(layer_id, layer, expert_id, expert, drawn, result)


def _compare_expert(
    layer_id: int,
    layer: LayerView,
    expert_id: int,
    expert: ExpertSlice,
    drawn: Mapping[Projection, Index],
    result: Comparison,
) -> None:
    held = layer.dequantize(expert_id)
    for projection, columns in drawn.items():
        count = column_count(layer, projection)
        k = layer.intermediate_size if projection == "down" else layer.hidden_size
        matrix = held[projection]
        if matrix.shape != (count, k) or matrix.dtype != torch.float32:
            result.add_problem(
                f"layer {layer_id}, expert {expert_id}: dequantize gives {projection} as "
                f"{matrix.dtype} {list(matrix.shape)}, expected torch.float32 {[count, k]}"
            )
            continue
        chosen = matrix[torch.from_numpy(columns).to(matrix.device)]
        expected = expert.weights(projection, columns)
        with np.errstate(over="ignore"):  # what fp32 cannot hold is infinite in the bank as well
            rounded = expected.astype(np.float32).astype(np.float64)
        found: Float64 = chosen.detach().cpu().double().numpy()
        result.add_columns((layer_id, expert_id, projection), columns, rounded, found)
        dialect = expert.decoders[projection].format
        tally = result.columns_by_format
        tally[dialect] = tally.get(dialect, 0) + len(columns)

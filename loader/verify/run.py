"""``verify``: the check of a finished load, from the checkpoint's raw tensors."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from operator import index
from typing import Any

import numpy as np

from loader.errors import LoaderError, PolicyError
from loader.verify.forward import RouteOf, choose_layers, run_layer
from loader.verify.layer import LayerView
from loader.verify.naming import Names
from loader.verify.raw import RawCheckpoint
from loader.verify.report import LISTED, ForwardCase, VerifyReport
from loader.verify.sample import Comparison, compare, draw
from loader.verify.slice import Checkpoint


def verify(
    experts: Mapping[int, LayerView],
    source: str | os.PathLike[str],
    samples: int = 1152,
    seed: int = 0,
    *,
    names: Names | None = None,
    route_of: RouteOf | None = None,
    revision: str | None = None,
) -> VerifyReport:
    """Checks the loaded ``experts`` against the local checkpoint folder ``source``.

    ``source`` may be a Hub repo whose files are in the Hub's cache, as a load leaves them, at
    ``revision``.

    ``samples`` output columns, spread over all layers and projections, are recomputed in fp64 and
    must equal ``dequantize``; up to four layers then run on random activations, against fp64.
    ``names(layer, expert, projection)`` gives module names for a family unknown here (the same
    name for gate and up means fused experts); ``route_of(layer, tokens)`` labels the calls.

    Holds one expert at a time. Findings are in the report; :class:`CheckpointError` is raised
    when the source is not a local folder or its tensors are missing or broken, and
    :class:`PolicyError` for a count that is not positive, or a seed that is negative.
    """
    samples, seed = _whole("samples", samples, 1), _whole("seed", seed, 0)
    _check_layers(experts)
    start = time.perf_counter()
    rng = np.random.default_rng(seed)
    layers = {layer: experts[layer] for layer in experts if experts[layer].expert_ids}
    result = Comparison()
    cases: list[ForwardCase] = []
    skipped: list[str] = []
    with RawCheckpoint(source, revision) as raw:
        if layers:
            checkpoint = Checkpoint(raw, names)
            compare(layers, checkpoint, draw(layers, samples, rng), result)
            for layer in choose_layers(layers, rng):
                found, reason = run_layer(layer, layers[layer], checkpoint, rng, route_of)
                cases += found
                skipped += [reason] if reason is not None else []
    failures = [case for case in cases if not case.ok]
    return VerifyReport(
        source=str(source),
        seed=seed,
        samples=samples,
        layers=tuple(sorted(result.layers)),
        experts=result.experts,
        columns=result.columns,
        values=result.values,
        columns_by_format=tuple(sorted(result.columns_by_format.items())),
        mismatch_count=result.mismatch_count,
        mismatches=tuple(result.mismatches),
        problem_count=result.problem_count,
        problems=tuple(result.problems),
        forward_count=len(cases),
        forward_failures=len(failures),
        forward_worst=tuple((failures or _worst_by_dtype(cases))[:LISTED]),
        forward_skipped=tuple(skipped),
        seconds=time.perf_counter() - start,
    )


def _whole(name: str, value: Any, least: int) -> int:
    try:
        number = index(value)
    except TypeError:
        number = least - 1
    if number < least:
        expected = f"a whole number of {least} or more"
        raise PolicyError(f"{name} is not valid", expected=expected, found=repr(value))
    return number


def _check_layers(experts: object) -> None:
    if not isinstance(experts, Mapping):
        raise LoaderError(
            "experts is not valid", expected="a mapping of layers", found=type(experts).__name__
        )
    for layer, one in experts.items():
        if not isinstance(one, LayerView):
            raise LoaderError(
                f"layer {layer} is not valid",
                expected="prepared experts",
                found=type(one).__name__,
            )


def _worst_by_dtype(cases: list[ForwardCase]) -> list[ForwardCase]:
    worst: dict[str, ForwardCase] = {}
    for case in sorted(cases, key=lambda case: case.severity):
        worst[case.dtype] = case
    return list(worst.values())

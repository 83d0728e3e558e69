"""The two verdicts of the cases: a checkpoint is loaded and right everywhere, or refused.

Fresh memory is filled with NaN bytes, and each storage is watched until it is freed.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from case_files import Fresh, Recorder, case, nan_memory, small
from case_numbers import (
    TOLERANCES,
    Truth,
    assert_same,
    inputs,
    layer_weights,
    moe64,
    relative_error,
    right_routes,
    run_route,
    same_banks,
    scale_values,
)

import loader
from loader.command import main
from loader.testing.checkpoint import TinyCheckpoint
from loader.testing.container import read_header

__all__ = [
    "PRESENT",
    "TOLERANCES",
    "Recorder",
    "assert_same",
    "case",
    "command",
    "header_end",
    "inputs",
    "layer_weights",
    "moe64",
    "nan_memory",
    "ok",
    "refuse",
    "relative_error",
    "right_routes",
    "routes_of",
    "run_route",
    "scale_values",
    "small",
]

PRESENT = object()
"""Stands for a fact that an error must have, whatever it says."""


def ok(
    checkpoint: TinyCheckpoint,
    *,
    truth: Truth | None = None,
    ranks: int = 1,
    ep_ranks: int = 1,
    dtypes: tuple[torch.dtype, ...] = tuple(TOLERANCES),
    **settings: Any,
) -> dict[int, list[loader.PreparedExperts]]:
    """The checkpoint loads and is right: banks to the bit, every route within the tolerance.

    ``truth`` gives the numbers where the files no longer have the generator's names. ``ranks`` and
    ``ep_ranks`` load every card of a TP and EP setting. Returns the cards' modules by layer.
    """
    truth = truth or checkpoint.stored_codes
    cards: dict[int, list[loader.PreparedExperts]] = {}
    owners: dict[tuple[int, int], int] = {}
    source = settings.pop("source", checkpoint.folder)
    for ep_rank in range(ep_ranks):
        for rank in range(ranks):
            shard = loader.Shard(rank, ranks, ep_rank, ep_ranks)
            with nan_memory():
                planned = loader.plan(source, shard=shard, **settings)
                experts = loader.load(source, shard=shard, **settings)
            assert planned.resident_bytes == experts.report.memory.resident
            for layer, module in experts.items():
                cards.setdefault(layer, []).append(module)
                for expert in module.expert_ids:
                    owners[layer, expert] = owners.get((layer, expert), 0) + 1
    wanted = range(checkpoint.experts)
    assert owners == {(layer, expert): ranks for layer in cards for expert in wanted}
    for layer, modules in cards.items():
        for module in modules:
            same_banks(module, checkpoint, truth)
        if dtypes:
            right_routes(modules, layer_weights(checkpoint, layer, truth), checkpoint, dtypes)
    return cards


def routes_of(folder: Path, **policy: Any) -> dict[int, list[tuple[str, str]]]:
    """Route and reason of each layer as loaded, which the plan says beforehand."""
    asked = loader.Policy(**policy)
    planned = loader.plan(folder, policy=asked)
    experts = loader.load(folder, policy=asked)
    for layer in planned.layers:
        assert experts[layer.layer].routes == layer.routes
    for entry in experts.report.to_dict()["layers"]:
        told = [(r["route"], r["reason"]) for r in entry["routes"]]
        assert told == [(r.route, r.reason) for r in experts[entry["layer"]].routes]
    return {n: [(r.route, r.reason) for r in m.routes] for n, m in experts.items()}


# Refusals


def open_descriptors() -> set[str]:
    """The descriptors of this process, without the one that lists them."""
    folder = "/proc/self/fd"
    return {name for name in os.listdir(folder) if os.path.lexists(f"{folder}/{name}")}


def command(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command line."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(list(arguments))
        except SystemExit as stop:  # argparse's way of leaving
            code = int(stop.code or 0)
    return code, out.getvalue(), err.getvalue()


def refused(call: Callable[[], object], before: Fresh) -> loader.LoaderError:
    """The error of a call that must leave nothing behind, which is still held here."""
    descriptors, threads = open_descriptors(), threading.active_count()
    with pytest.raises(loader.LoaderError) as caught:
        call()
    assert before.alive == 0, "memory is held after the refusal"
    assert open_descriptors() == descriptors, "files are open after the refusal"
    assert threading.active_count() == threads, "threads run after the refusal"
    return caught.value


def refuse(
    folder: Path,
    error: type[loader.LoaderError] = loader.CheckpointError,
    *,
    says: tuple[str, ...] = (),
    plan: bool = True,
    cli: tuple[str, ...] | None = (),
    settings: dict[str, Any] | None = None,
    **facts: Any,
) -> loader.LoaderError:
    """The checkpoint is refused, with facts, and nothing is left behind.

    ``facts``: ``file``, ``tensor``, ``layer``, ``experts``, ``expected``, ``found`` as the error
    must hold them: an equal value for ``layer``, a part of the text for the others, or PRESENT.
    ``plan``: headers are enough, so that ``plan`` refuses in the same words and ``load`` has then
    read and allocated nothing. ``cli``: further arguments of the command line; None: not run.
    """
    settings = settings or {}
    with nan_memory() as fresh:
        source = Recorder(folder)

        def load() -> None:
            with source:
                loader.load(source, **settings)

        found = refused(load, fresh)
        if plan:
            assert not fresh.calls, "memory was taken before the refusal"
            assert not source.payload_reads(), "payload was read before the refusal"
            planned = refused(lambda: loader.plan(str(folder), **settings), fresh)
            assert (type(planned), planned.what) == (type(found), found.what)
        again = refused(lambda: loader.load(str(folder), **settings), fresh)
        if plan:
            assert str(again) == str(planned), "another run gives another message"
    check_facts(again, error, says, facts)
    if cli is not None:
        for name in ("plan", "load") if plan else ("load",):
            code, out, err = command(name, str(folder), *cli)
            assert (code, out) == (1, ""), (code, out, err)
            assert err == f"qpn: {again}\n", err
    return again


def check_facts(
    error: loader.LoaderError,
    kind: type[loader.LoaderError],
    says: tuple[str, ...],
    facts: dict[str, Any],
) -> None:
    """The error is of one kind and one line, and says what it must."""
    message = str(error)
    assert type(error) is kind, f"{type(error).__name__}: {message}"
    assert "\n" not in message and len(message) < 2000, message
    for text in says:
        assert text in message, f"{text!r} is not in: {message}"
    for name, wanted in facts.items():
        value = getattr(error, name)
        assert value is not None, f"no {name} in: {message}"
        if name == "layer" and wanted is not PRESENT:
            assert value == wanted, message
        elif wanted is not PRESENT:
            assert str(wanted) in str(value), f"{name} {wanted!r} is not in: {message}"
        if value is not None:
            assert str(value) in message


def header_end(path: Path) -> int:
    """Where the payload of a file begins."""
    return read_header(path)[1]

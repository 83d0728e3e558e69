"""Faults while modules are prepared in place, one layer after the other as a framework does it."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import torch
from fault_cells import Outcome, Witness, make_checkpoint, right_banks, serving
from fault_kinds import KINDS, LAYER, Bench, Kind
from load_fakes import banks_of, module_of, quantization_of, same_bits

import loader
from loader.testing.checkpoint import TinyCheckpoint

LAYERS = 3
INPLACE_KINDS = tuple(kind for kind in KINDS if not kind.name.startswith(("reads", "file")))
"""There are no files; every other kind of fault is there."""

Modules = list[torch.nn.Module]

KEPT = 6
"""Tensors that stay of one prepared layer: two of each bank, two of its workspace."""


class InPlace:
    """The modules of all layers, as a framework holds them, and what they are to become."""

    def __init__(self, folder: Path) -> None:
        self.made: TinyCheckpoint = make_checkpoint(folder)
        self.modules = [module_of(self.made, layer) for layer in range(LAYERS)]
        self.quantization = quantization_of(self.made)
        wanted = right_banks(folder)
        each = len(wanted) // LAYERS
        self.wanted = [wanted[layer * each : (layer + 1) * each] for layer in range(LAYERS)]

    def prepare(self, modules: Modules, layer: int, **more: Any) -> None:
        loader.prepare_module(
            modules[layer],
            quantization=self.quantization,
            layer=layer,
            policy=loader.Policy(layout="wide"),
            **more,
        )

    def fault(self, modules: Modules, layer: int) -> str | None:
        """What is wrong with a module: it has its sources whole, or the result; never a mixture."""
        found = {name: tensor.detach() for name, tensor in modules[layer].named_parameters()}
        given = {name: t.detach() for name, t in self.modules[layer].named_parameters()}
        prepared = modules[layer]._modules.get("experts")
        if prepared is None:
            whole = list(found) == list(given) and same_bits([*found.values()], [*given.values()])
            return None if whole else f"layer {layer} lost its sources"
        right = same_bits(banks_of(prepared), self.wanted[layer])
        return None if right and not found else f"layer {layer} is neither this nor that"


def run_inplace_cell(bed: InPlace, kind: Kind, state: str, way: str) -> Outcome:
    """Prepare three modules with one fault; then those that are left, without one."""
    bench = Bench(bed.made.folder, state, "ahead")
    modules = [copy.deepcopy(module) for module in bed.modules]
    witness, wrong = Witness(), []
    error: BaseException | None = None
    at = 0
    with serving(way):
        gc.collect()
        before = witness.left()
        gc.disable()
        try:
            with witness.watching(), kind.setup(bench):
                try:
                    for at in range(LAYERS):
                        bed.prepare(modules, at, observers=[bench.observe])
                except BaseException as caught:
                    error = caught
            faults = [bed.fault(modules, layer) for layer in range(LAYERS)]
            wrong += [fault for fault in faults if fault is not None]
            # What came before the fault stays; of the layer that failed, nothing but its sources.
            done = [layer for layer in range(LAYERS) if "experts" in modules[layer]._modules]
            # Once the sources are gone there is no way back: the module stays prepared.
            late = bench.armed and at == LAYER and state in ("released", "ready")
            wrong += [] if done == list(range(at + late)) else [f"prepared are {done}"]
            # Also while the error is held; what a caller's own frames hold is the caller's.
            more = witness.left().storages - before.storages - KEPT * len(done)
            wrong += [f"{more} tensors of the failed layer"] if more else []
            wrong += _judge(kind, bench, error, at)
            ended, error = "prepared" if error is None else type(error).__name__, None
            for layer in range(LAYERS):
                if layer not in done:
                    bed.prepare(modules, layer)
            wrong += [f for layer in range(LAYERS) if (f := bed.fault(modules, layer)) is not None]
            del modules
            wrong += witness.left().beyond(before)
        finally:
            gc.enable()
    return Outcome(f"in place: {kind.name}", state, way, ended, wrong)


def _judge(kind: Kind, bench: Bench, error: BaseException | None, at: int) -> list[str]:
    wrong = [] if bench.struck else ["the fault never struck"]
    assert kind.ends is not None
    if error is None:
        return [*wrong, "it went on"]
    name, words = kind.ends
    if name not in {one.__name__ for one in type(error).__mro__} or words not in str(error):
        wrong.append(f"another error: {error!r}")
    if getattr(error, "layer", at) not in (at, None):
        wrong.append(f"layer {getattr(error, 'layer', None)} is blamed, not {at}")
    last = {event.layer: event.state for event in bench.events}
    wanted = {**dict.fromkeys(range(at), "ready"), at: "failed"}
    # A fault before the first event tells nobody.
    if {key: value for key, value in wanted.items() if key in last} != last:
        wrong.append(f"layers ended as {last}")
    return wrong

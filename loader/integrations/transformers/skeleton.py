"""Skeleton: a model on meta, and which of its modules give way to prepared ones.

Nothing is allocated here: what a model cannot take is refused before a weight is read.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from loader.checkpoint.family import layer_of
from loader.checkpoint.linears import LinearSource
from loader.errors import CheckpointError, LifecycleError, UnsupportedError
from loader.integrations.transformers.contract import (
    ROUTER_CONTRACT,
    fault_of,
    sizes_of,
    takes_router_output,
)
from loader.layer_plan import LayerPlan

NameOf = Callable[[str], tuple[str | None, bool]]
"""A checkpoint name -> the model's name of it, and whether it is stored there as it is."""

_WEIGHT = ".weight"


class Awaited(torch.nn.Module):
    """The place of a module whose prepared form is still to be loaded; it has no state."""

    def __init__(self) -> None:
        super().__init__()
        # Some models initialise the weights of their experts from the outside: nothing to do here.
        self.gate_up_proj = torch.empty(0, device="cpu")
        self.down_proj = torch.empty(0, device="cpu")

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """There is nothing to run yet."""
        raise LifecycleError(
            "a module of the model is not loaded yet", expected="a finished load", found="a forward"
        )


@dataclass(frozen=True)
class Seat:
    """Where a quantized linear goes: its module in the model, and why it must be plain, if so.

    ``path`` is None where the model has no such weight.
    """

    source: LinearSource
    path: str | None
    plain_because: str | None


def seat_experts(model: torch.nn.Module, layers: Mapping[int, LayerPlan]) -> dict[int, str]:
    """Module path of the routed experts of every layer.

    Raises :class:`UnsupportedError` for a model without experts of the router's contract or with
    experts that compute something else, :class:`CheckpointError` where the layers of model and
    checkpoint differ.
    """
    found: dict[int | None, list[str]] = {}
    for path, module in model.named_modules():
        if takes_router_output(module):
            found.setdefault(layer_of(path + "."), []).append(path)
    if not found:
        raise UnsupportedError(
            "no module of the model takes what a router gives to routed experts",
            expected=f"a forward of {', '.join(ROUTER_CONTRACT)}; loader.load gives the experts "
            "alone, to be put into a model by hand",
            found=type(model).__name__,
        )
    seats: dict[int, str] = {}
    for layer, paths in found.items():
        if layer is None or len(paths) > 1:
            raise UnsupportedError(
                "the experts of the model do not belong to one layer each",
                layer=layer,
                expected="one experts module in each MoE layer",
                found=", ".join(paths[:4]),
            )
        seats[layer] = paths[0]
    _same_layers(seats, layers)
    for layer, path in seats.items():
        _check(layer, path, model.get_submodule(path), layers[layer])
    return dict(sorted(seats.items()))


def _same_layers(seats: Mapping[int, str], layers: Mapping[int, LayerPlan]) -> None:
    if seats.keys() == layers.keys():
        return
    layer = min(seats.keys() ^ layers.keys())
    raise CheckpointError(
        "model and checkpoint do not have routed experts in the same layers",
        layer=layer,
        expected=f"routed experts in layers {sorted(seats)} of the model",
        found=f"layers {sorted(layers)} of the checkpoint",
    )


def _check(layer: int, path: str, module: torch.nn.Module, plan: LayerPlan) -> None:
    fault = fault_of(module)
    if fault is not None:
        raise UnsupportedError(
            "prepared experts cannot stand in for the model's own",
            layer=layer,
            tensor=path,
            expected="experts that compute down(silu(gate(x)) * up(x))",
            found=f"{type(module).__name__}: {fault}",
        )
    wanted = sizes_of(module)
    own = (plan.source.experts, plan.source.hidden, plan.source.intermediate)
    if wanted != own:
        raise CheckpointError(
            "the experts of model and checkpoint differ in size",
            layer=layer,
            tensor=path,
            expected="{} experts, hidden {}, intermediate {}".format(*wanted),
            found="{}, {}, {}".format(*own),
        )


def seat_linears(
    model: torch.nn.Module,
    linears: Mapping[str, LinearSource],
    name_of: NameOf,
    tied: frozenset[str],
) -> list[Seat]:
    """The place of every quantized linear; ``tied`` are names of weights that share memory.

    Raises :class:`CheckpointError` where a weight has another shape in the model.
    """
    return [_seat(model, source, name_of, tied) for source in linears.values()]


def _seat(
    model: torch.nn.Module, source: LinearSource, name_of: NameOf, tied: frozenset[str]
) -> Seat:
    name, as_it_is = name_of(source.name + _WEIGHT)
    if name is None:
        return Seat(source, None, None)
    path = name.removesuffix(_WEIGHT)
    if not as_it_is:
        return Seat(source, path, "Transformers stores something computed from this weight")
    module = model.get_submodule(path)
    weight = module.get_parameter("weight")
    if tuple(weight.shape) != (source.n, source.k):
        raise CheckpointError(
            "a linear has another shape in the model",
            layer=source.source.layer,
            tensor=source.name,
            expected=tuple(weight.shape),
            found=(source.n, source.k),
        )
    if type(module) is not torch.nn.Linear:
        return Seat(source, path, f"the model has a {type(module).__name__} there, not a Linear")
    if name in tied:
        return Seat(source, path, "the model ties this weight to another")
    if _is_read_directly(model, path):
        return Seat(source, path, "the model's code reads this weight outside of the product")
    return Seat(source, path, None)


def _is_read_directly(model: torch.nn.Module, path: str) -> bool:
    """Whether the code of the module above mentions the weight itself."""
    parent, _, leaf = path.rpartition(".")
    code = inspect.getsource(sys.modules[type(model.get_submodule(parent)).__module__])
    return re.search(rf"\.{re.escape(leaf)}\.weight\b", code) is not None


def await_modules(model: torch.nn.Module, paths: list[str]) -> None:
    """Replace modules on meta by places without state, so that nothing is allocated for them."""
    for path in paths:
        model.set_submodule(path, Awaited())


def stored_bytes(model: torch.nn.Module, tied: frozenset[str], kept_fp32: list[str]) -> int:
    """Bytes of what stays of the model itself: its parameters and buffers, tied ones once.

    ``kept_fp32``: parts of names whose tensors are fp32 whatever dtype was asked for.
    """
    total = 0
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name not in tied:
            is_kept = tensor.dtype.is_floating_point and any(part in name for part in kept_fp32)
            total += tensor.numel() * (4 if is_kept else tensor.itemsize)
    return total

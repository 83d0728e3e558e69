"""Weights: what vLLM's own loading gets to read: no experts, no banks, some linears dequantized."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from loader.checkpoint.catalog import NOT_INDEXED
from loader.checkpoint.folder import Checkpoint
from loader.errors import CheckpointError
from loader.integrations.vllm.linears import PLAIN_METHODS, OwnLinears
from loader.linears import LinearLoader
from loader.plain import read_tensor

Weights = Iterator[tuple[str, torch.Tensor]]


def weights(checkpoint: Checkpoint, own: OwnLinears, linears: LinearLoader) -> Weights:
    """Name and tensor of all that vLLM loads, in file order; the experts are never read.

    A linear that is ``plain`` comes as its dequantized ``weight``, in place of its parts.
    """
    catalog = checkpoint.catalog
    linear_of = own.rows()
    given: set[str] = set()
    wanted = (catalog.layer < 0) & (catalog.reason != NOT_INDEXED)
    for row in np.flatnonzero(wanted).tolist():
        name = linear_of.get(row)
        if name is None:
            yield catalog.names[row], read_tensor(checkpoint.source, catalog, row)
        elif name in own.plain and name not in given:
            given.add(name)
            one = own.plain[name]
            yield f"{name}.weight", linears.dequantize(one.plan, one.dtype)


def require_complete(model: torch.nn.Module, loaded: set[str] | None) -> None:
    """Refuse a model with a parameter that nothing was loaded into.

    Parameters of quantized modules are vLLM's own affair: it makes some that no file holds. None
    for ``loaded`` means that the model does not say. Raises :class:`CheckpointError`.
    """
    if loaded is None:
        return
    own: set[str] = set()
    for name, module in model.named_modules():
        method = vars(module).get("quant_method")
        if isinstance(method, QuantizeMethodBase) and not isinstance(method, PLAIN_METHODS):
            own |= {f"{name}.{inner}".lstrip(".") for inner, _ in module.named_parameters()}
    missing = sorted({name for name, _ in model.named_parameters()} - loaded - own)
    if missing:
        raise CheckpointError(
            "the checkpoint has no weights for a part of vLLM's model",
            tensor=missing[0],
            expected="a tensor for each of its parameters",
            found=f"none for {len(missing)}: {', '.join(missing[:5])}",
        )

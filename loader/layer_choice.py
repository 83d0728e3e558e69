"""Layer choice: which layers of a checkpoint are loaded, and why each other one is not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loader.checkpoint.folder import Checkpoint
from loader.errors import CheckpointError, LoaderError

DENSE = "dense layer"
"""Reason of a layer without experts."""


@dataclass(frozen=True)
class SkippedLayer:
    """A layer that is left alone, with the reason."""

    layer: int
    reason: str


def choose_layers(
    checkpoint: Checkpoint, layers: Iterable[int] | None
) -> tuple[Sequence[int], tuple[SkippedLayer, ...]]:
    """The layers to load, ascending, and the others; ``layers`` None means all of the model.

    Raises :class:`LoaderError` for a layer without experts, and where nothing is left to load.
    """
    present = checkpoint.catalog.expert_layers()
    count = checkpoint.model.layers
    beyond = {layer for layer in present if count is not None and layer >= count}
    if layers is None:
        chosen = [layer for layer in present if layer not in beyond]
        if not chosen:
            raise CheckpointError(
                "no layer of the model holds experts",
                expected=f"experts in layers below {count}",
                found=f"experts in layers {present}",
            )
        checkpoint.require_all_layers()
    else:
        chosen = sorted(set(layers))
        if not chosen:
            raise LoaderError("no layer was asked for", expected=f"some of {present}", found="none")
        missing = [layer for layer in chosen if layer not in present]
        if missing:
            raise LoaderError(
                "a layer that was asked for holds no experts",
                layer=missing[0],
                expected=f"one of {present}",
                found=missing,
            )
    reasons = dict.fromkeys(present, "not asked for")
    reasons.update(dict.fromkeys(checkpoint.catalog.other_layers(), DENSE))
    if count is not None:
        reasons.update({n: f"beyond num_hidden_layers={count}" for n in reasons if n >= count})
    skipped = [SkippedLayer(layer, reasons[layer]) for layer in sorted(reasons)]
    return chosen, tuple(skip for skip in skipped if skip.layer not in chosen)

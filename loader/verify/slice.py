"""The checkpoint's side of one card: the decoders of an expert, and the part the card holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from loader.verify.config import RawConfig, read_config
from loader.verify.decode import Decoder, Float64, Index, Rounding, decoder
from loader.verify.layer import PROJECTIONS, LayerView, Projection
from loader.verify.naming import Names, Resolver
from loader.verify.raw import RawCheckpoint


@dataclass(frozen=True)
class ExpertSlice:
    """One expert as the checkpoint has it, cut to a card: column and row numbers are the card's."""

    decoders: Mapping[Projection, Decoder]
    first: int
    width: int
    rounding: Rounding

    def weights(self, projection: Projection, columns: Index, *, fp64: bool = False) -> Float64:
        """Float64 (columns, k) of this card, as the bank means them; ``fp64``: never rounded."""
        rounding = Rounding(self.rounding.fused_bias, self.rounding.wide, fp64)
        source = self.decoders[projection]
        if projection == "down":
            rows = slice(self.first, self.first + self.width)
            return source.weights(columns, rows, rounding)
        return source.weights(columns + self.first, slice(0, source.shape[1]), rounding)

    def blocks(self, projection: Projection, values: int = 1 << 22) -> list[Index]:
        """All columns of this card, in blocks of at most ``values`` weights."""
        count, k = self.decoders[projection].shape
        if projection == "down":
            k = self.width
        else:
            count = self.width
        step = max(1, values // max(k, 1))
        return [np.arange(at, min(at + step, count)) for at in range(0, count, step)]


class Checkpoint:
    """Finds and decodes experts; knows nothing of the layer but the protocol ``LayerView``."""

    def __init__(self, raw: RawCheckpoint, names: Names | None) -> None:
        self._raw = raw
        self.config: RawConfig = read_config(raw)
        self._resolver = Resolver(raw.modules, names)

    def expert(self, layer_id: int, layer: LayerView, expert: int) -> ExpertSlice:
        """Expert ``expert`` cut to ``layer``'s card; its raw parts are read here.

        Raises :class:`CheckpointError` if parts are missing or do not fit their format.
        """
        width = layer.intermediate_size
        return ExpertSlice(
            decoders={
                projection: decoder(
                    self._raw, self.config, self._resolver.resolve(layer_id, expert, projection)
                )
                for projection in PROJECTIONS
            },
            first=layer.shard.tp_rank * width,
            width=width,
            rounding=Rounding(
                fused_bias=layer.awq_rounding == "fused_bias",
                wide=layer.metadata_layout == "wide",
            ),
        )


def size_problem(layer_id: int, layer: LayerView, expert: ExpertSlice) -> str | None:
    """Why the layer's sizes cannot be a slice of what the checkpoint holds, if they cannot."""
    full = layer.intermediate_size * layer.shard.tp_size
    hidden = layer.hidden_size
    wanted: dict[Projection, tuple[int, int]] = {
        "gate": (full, hidden),
        "up": (full, hidden),
        "down": (hidden, full),
    }
    for projection, shape in wanted.items():
        found = expert.decoders[projection].shape
        if found != shape:
            return (
                f"layer {layer_id}: the card's sizes times tp_size {layer.shard.tp_size} make "
                f"{projection} {list(shape)}, the checkpoint has {list(found)}"
            )
    return None

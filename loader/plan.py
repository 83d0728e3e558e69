"""Plan: what each card will hold, decided from headers alone.

A plan is a value: it can be printed, compared and written as JSON, and ``load`` does what it says.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from loader import memory
from loader.bank import BankSpec, LayerSpec, check_group
from loader.checkpoint.catalog import REASONS
from loader.checkpoint.family import FAMILIES, Family, layer_of
from loader.checkpoint.folder import Checkpoint, open_checkpoint
from loader.checkpoint.source import Source, open_source
from loader.checkpoint.tables import LayerSource
from loader.chunks import Chunk, build_chunks
from loader.converter import cache_bytes
from loader.errors import CapacityError, CheckpointError, LoaderError
from loader.native import Implementation, implementation_for
from loader.pieces import Pieces, Places, Slice, build_pieces, split_pieces
from loader.policy import Policy, ResolvedPolicy
from loader.reference.routes import scratch_bytes
from loader.render import plan_text
from loader.route import RouteRange, decide, require_implementation
from loader.shard import Shard

DEFAULT_STAGING_BYTES = 64 << 20
BUFFERS = 2
"""Read buffers of the staging ring: one is read into while the other is converted."""

_SCALE_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.uint8}


@dataclass(frozen=True)
class SkippedLayer:
    """A layer that is left alone, with the reason."""

    layer: int
    reason: str


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """One MoE layer on one card."""

    layer: int
    source: LayerSource
    part: Slice
    spec: LayerSpec
    layout_reason: str
    routes: tuple[RouteRange, ...]
    places: Places = field(repr=False)

    @property
    def zero_point(self) -> int | None:
        """8 where the checkpoint stores no zero points, None where there is nothing to fill."""
        return 8 if self.spec.w13.kind == "int4" and not self.source.zeros_stored else None

    def pieces(self) -> Pieces:
        """Source pieces of this card, in file order, before they are cut to a buffer's size."""
        return build_pieces(self.source, self.places, self.part, self.spec)

    def chunks(self, buffer_bytes: int) -> list[Chunk]:
        """The reads of this layer, for buffers of so many bytes."""
        return build_chunks(split_pieces(self.pieces(), buffer_bytes), buffer_bytes)

    @cached_property
    def source_bytes(self) -> int:
        """Bytes of source tensors that this card needs (whole rows), gaps not counted."""
        pieces = self.pieces()
        # Pieces of fused experts can share rows (gate and up columns): bytes count once.
        rows = np.unique(np.stack((pieces["file"], pieces["begin"])), axis=1, return_index=True)[1]
        return int((pieces["rows"][rows] * pieces["row_bytes"][rows]).sum())

    @cached_property
    def wide_metadata_bytes(self) -> int:
        """What the ``wide`` layout would have taken for this layer's metadata."""
        if self.spec.w13.kind == "plain":
            return 0
        return sum(bank.with_layout("wide").nbytes("metadata") for bank in self.spec.banks)

    def bytes_by_category(self) -> dict[str, int]:
        """The ``bytes`` object of the report."""
        spec = self.spec
        metadata, extra = spec.nbytes("metadata"), spec.nbytes("globals")
        return {
            "source": self.source_bytes,
            "weight": spec.nbytes("weight"),
            "metadata": metadata,
            "globals": extra,
            "unquantized": spec.nbytes("unquantized"),
            "metadata_wide": self.wide_metadata_bytes,
            "saved": self.wide_metadata_bytes - metadata - extra,
        }

    def geometry(self) -> dict[str, int]:
        """The ``geometry`` object of the report."""
        w13, w2 = self.spec.banks
        return {
            "hidden": self.source.hidden,
            "intermediate": self.source.intermediate,
            "intermediate_local": w13.columns,
            "experts": self.source.experts,
            "experts_local": w13.experts,
            "group_w13": w13.group,
            "group_w2": w2.group,
            "phase": w2.phase,
        }

    def to_dict(self) -> dict[str, Any]:
        """One entry of ``layers`` in the report, without measured keys."""
        return {
            "layer": self.layer,
            "format": self.source.scheme.format,
            "format_reason": self.source.reason,
            "geometry": self.geometry(),
            "metadata_layout": self.spec.w13.layout,
            "metadata_layout_reason": self.layout_reason,
            "scale_dtypes": [
                "e4m3" if bank.kind == "e2m1" else str(bank.scale_dtype).removeprefix("torch.")
                for bank in self.spec.banks
            ],
            "bytes": self.bytes_by_category(),
            "routes": [route.to_dict() for route in self.routes],
        }


@dataclass(frozen=True, eq=False)
class Plan:
    """What one card will hold. Sizes are bytes; ``predicted_peak`` counts from the baseline."""

    checkpoint: Checkpoint = field(repr=False)
    device: torch.device
    shard: Shard
    policy: ResolvedPolicy
    implementation: Implementation
    layers: tuple[LayerPlan, ...]
    skipped: tuple[SkippedLayer, ...]
    staging_limit: int
    card_bytes: int | None

    @property
    def top_k(self) -> int:
        """Experts that the router selects for each token."""
        return self.checkpoint.model.top_k

    @cached_property
    def scratch_bytes(self) -> int:
        """Scratch of the workspace, shared by all layers of the card."""
        return scratch_bytes([layer.spec for layer in self.layers]) if self.layers else 0

    @cached_property
    def workspace_bytes(self) -> int:
        """Scratch and the expert map (int32 for each expert)."""
        return self.scratch_bytes + 4 * self.checkpoint.model.experts * bool(self.layers)

    @cached_property
    def resident_bytes(self) -> int:
        """What stays: all banks and the workspace."""
        return sum(layer.spec.nbytes() for layer in self.layers) + self.workspace_bytes

    @cached_property
    def _reads(self) -> dict[int, tuple[int, int]]:
        """For each layer: bytes of its largest chunk, bytes read in all."""
        limit = self.staging_limit // BUFFERS
        return {
            layer.layer: (
                max(chunk.buffer_bytes for chunk in chunks),
                sum(chunk.bytes_read for chunk in chunks),
            )
            for layer in self.layers
            if (chunks := layer.chunks(limit))
        }

    @property
    def buffer_bytes(self) -> int:
        """Size of one read buffer: the largest chunk, within the staging budget."""
        return max((largest for largest, _ in self._reads.values()), default=0)

    def read_bytes(self, layer: int) -> int:
        """Bytes that loading one layer takes from files, small gaps included."""
        return self._reads[layer][1]

    @property
    def staging_bytes(self) -> int:
        """The staging ring as it will be allocated."""
        return BUFFERS * self.buffer_bytes

    @cached_property
    def conversion_bytes(self) -> int:
        """Most that converting one layer takes: its cache, its tables, the temporaries."""
        return max(
            (
                cache_bytes(layer.spec)
                + 3 * layer.pieces().nbytes
                + self.implementation.temporary_bytes
                for layer in self.layers
            ),
            default=0,
        )

    @property
    def predicted_peak(self) -> int:
        """Most that the load will hold above what the process held before it."""
        return self.resident_bytes + self.staging_bytes + self.conversion_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits into the card's memory; None where that is not known."""
        return None if self.card_bytes is None else self.predicted_peak <= self.card_bytes

    def require_fit(self) -> None:
        """Raise :class:`CapacityError`, saying by how much, where the plan does not fit."""
        if self.fits is False:
            assert self.card_bytes is not None
            raise CapacityError(
                f"the plan does not fit: {self.predicted_peak - self.card_bytes} bytes too many",
                expected=f"a predicted peak within {self.card_bytes} bytes of free memory",
                found=f"{self.predicted_peak} bytes on {self.device}",
            )

    def left_alone(self) -> dict[str, list[str]]:
        """Names of the tensors that are not loaded, by reason; their bytes are never read."""
        catalog = self.checkpoint.catalog
        found: dict[str, list[str]] = {}
        for row in np.flatnonzero(catalog.reason > 0).tolist():
            found.setdefault(self._why(row), []).append(catalog.names[row])
        reasons = {skipped.layer: skipped.reason for skipped in self.skipped}
        experts = np.flatnonzero(np.isin(catalog.layer, list(reasons)))
        for row in experts.tolist():
            found.setdefault(reasons[int(catalog.layer[row])], []).append(catalog.names[row])
        return found

    def _why(self, row: int) -> str:
        name = self.checkpoint.catalog.names[row]
        if ".shared_expert" in name:
            return "shared expert"
        dense = {s.layer for s in self.skipped if s.reason == _DENSE}
        if ".mlp." in name and layer_of(name) in dense:
            return _DENSE
        return REASONS[self.checkpoint.catalog.reason[row]]

    def fingerprint(self) -> dict[str, Any]:
        """What all ranks of one model must agree on, whatever slice each of them holds."""
        return {
            "policy": self.policy.to_dict(),
            "layers": [
                [layer.layer, layer.source.scheme.format, layer.spec.w13.layout]
                + [[r.first, r.last, r.route, r.implementation] for r in layer.routes]
                for layer in self.layers
            ],
        }

    def to_dict(self) -> dict[str, Any]:
        """The JSON report without its measured keys (DESIGN section 9)."""
        return {
            "schema": 1,
            "source": self.checkpoint.source.name,
            "device": str(self.device),
            "shard": self.shard.to_dict(),
            "policy": self.policy.to_dict(),
            "top_k": self.top_k,
            "layers": [layer.to_dict() for layer in self.layers],
            "skipped": [{"layer": s.layer, "reason": s.reason} for s in self.skipped],
            "left_alone": {
                reason: {"tensors": len(names), "names": names[:8]}
                for reason, names in self.left_alone().items()
            },
            "memory": {
                "predicted_resident": self.resident_bytes,
                "predicted_peak": self.predicted_peak,
                "workspace": self.workspace_bytes,
                "staging": self.staging_bytes,
                "conversion": self.conversion_bytes,
                "card": self.card_bytes,
                "fits": self.fits,
            },
        }

    def __str__(self) -> str:
        return plan_text([self.to_dict()])


_DENSE = "dense layer"


def plan(
    source: str | os.PathLike[str] | Source,
    shard: Shard | None = None,
    policy: Policy | None = None,
    layers: Iterable[int] | None = None,
    *,
    device: str | torch.device = "cpu",
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    card_memory: int | None = None,
    family: Family | None = None,
) -> Plan:
    """Plan a load from headers alone; no payload is read and nothing is allocated.

    ``layers`` names layer indices outright (None: all MoE layers of the model). ``card_memory`` is
    the card's budget in bytes (None: what is free now). ``family`` is a naming pattern of your own.

    Raises a :class:`loader.LoaderError` for everything that headers and configs are enough to know.
    """
    resolved = (policy or Policy()).resolve()
    opened = open_source(source)
    families = FAMILIES if family is None else (family, *FAMILIES)
    try:
        checkpoint = open_checkpoint(opened, families)
        return plan_checkpoint(
            checkpoint,
            shard or Shard(),
            resolved,
            layers,
            torch.device(device),
            staging_bytes,
            card_memory,
        )
    finally:
        if opened is not source:
            opened.close()


def plan_checkpoint(
    checkpoint: Checkpoint,
    shard: Shard,
    policy: ResolvedPolicy,
    layers: Iterable[int] | None,
    device: torch.device,
    staging_bytes: int,
    card_memory: int | None,
) -> Plan:
    """Plan an opened checkpoint; see :func:`plan`."""
    implementation = require_implementation(device, implementation_for(device))
    chosen, skipped = _choose_layers(checkpoint, layers)
    expert_ids = shard.experts_of(checkpoint.model.experts)
    places = Places(checkpoint.catalog.file, checkpoint.catalog.begin)
    planned = tuple(
        _plan_layer(checkpoint, layer, expert_ids, shard, policy, implementation, places)
        for layer in chosen
    )
    card = memory.free_bytes(device) if card_memory is None else card_memory
    result = Plan(
        checkpoint, device, shard, policy, implementation, planned, skipped, staging_bytes, card
    )
    _ = result.buffer_bytes  # a staging budget that is too small is refused here
    return result


def _choose_layers(
    checkpoint: Checkpoint, layers: Iterable[int] | None
) -> tuple[Sequence[int], tuple[SkippedLayer, ...]]:
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
    else:
        chosen = sorted(set(layers))
        missing = [layer for layer in chosen if layer not in present]
        if missing:
            raise LoaderError(
                "a layer that was asked for holds no experts",
                layer=missing[0],
                expected=f"one of {present}",
                found=missing,
            )
    reasons = {layer: f"beyond num_hidden_layers={count}" for layer in beyond}
    reasons.update({layer: _DENSE for layer in checkpoint.catalog.other_layers()})
    reasons.update({layer: "not asked for" for layer in present if layer not in beyond})
    skipped = [SkippedLayer(layer, reasons[layer]) for layer in sorted(reasons)]
    return chosen, tuple(skip for skip in skipped if skip.layer not in chosen)


def _plan_layer(
    checkpoint: Checkpoint,
    layer: int,
    expert_ids: tuple[int, ...],
    shard: Shard,
    policy: ResolvedPolicy,
    implementation: Implementation,
    places: Places,
) -> LayerPlan:
    source = checkpoint.resolver.resolve(layer)
    offset, count = shard.slice_of(source.intermediate, source.group2, layer)
    part = Slice(expert_ids, offset, count)
    spec, reason = layer_spec(source, part, policy)
    routes = decide(layer, spec, implementation, policy, source.reason)
    return LayerPlan(layer, source, part, spec, reason, routes, places)


def layer_spec(
    source: LayerSource, part: Slice, policy: ResolvedPolicy, phase: int | None = None
) -> tuple[LayerSpec, str]:
    """Banks of one layer, and why they have their metadata layout."""
    scheme = source.scheme
    try:
        layout, reason = policy.layout_for(scheme.kind)
    except LoaderError as error:
        raise error.at(layer=source.layer) from None
    if scheme.kind != "plain":
        check_group(source.group13, source.layer)
        check_group(source.group2, source.layer)

    def bank(k: int, n: int, group: int, at: int, projections: int, dtype: str) -> BankSpec:
        return BankSpec(
            kind=scheme.kind,
            layout=layout,
            experts=len(part.expert_ids),
            k=k,
            n=n,
            group=group,
            phase=at,
            projections=projections,
            scale_dtype=_SCALE_DTYPES[dtype],
            global_sense=scheme.global_sense,
        )

    cut = part.offset % source.group2 if phase is None else phase
    w13 = bank(source.hidden, 2 * part.count, source.group13, 0, 2, source.scale_dtypes[0])
    w2 = bank(part.count, source.hidden, source.group2, cut, 1, source.scale_dtypes[1])
    return LayerSpec(w13, w2, policy.policy.awq_rounding), reason

"""Layer plan: one MoE layer on one card: its slice, its banks, their layout, its routes."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from loader.bank import BankSpec, LayerSpec, check_group
from loader.checkpoint.tables import LayerSource
from loader.chunks import Chunk, build_chunks
from loader.errors import LoaderError, UnsupportedError
from loader.native import Implementation
from loader.pieces import Cut, Pieces, Places, Slice, build_pieces, split_pieces
from loader.policy import ResolvedPolicy
from loader.route import Router, RouteRange, decide, fast_tokens
from loader.shard import Shard

SCALE_DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float16,  # until a value is found that only bf16 holds: see scale_planes.py
    "F8_E4M3": torch.uint8,
}
"""Dtype of the scales on disk -> dtype of the plane that keeps them."""


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

    @property
    def fast_tokens(self) -> int:
        """Last token count that a fast route serves, 0 where none does."""
        return fast_tokens(self.routes)

    def pieces(self) -> Pieces:
        """Source pieces of this card, in file order, before they are cut to a buffer's size."""
        return build_pieces(self.source, self.places, self.part, self.spec)

    def chunks(self, buffer_bytes: int) -> list[Chunk]:
        """The reads of this layer, for buffers of so many bytes."""
        return build_chunks(split_pieces(self.pieces(), buffer_bytes), buffer_bytes)

    @cached_property
    def cut(self) -> Cut:
        """What the pieces of this layer have in common with those of layers that are alike."""
        return self.places.cut(self.source, self.part, self.spec)

    @property
    def source_bytes(self) -> int:
        """Bytes of source tensors that this card needs (whole rows), gaps not counted."""
        return self.cut.source_bytes

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
                "float16 or bfloat16" if on_disk == "F32" else shown
                for on_disk, shown in zip(
                    self.source.scale_dtypes, scale_dtypes(self.spec), strict=True
                )
            ],
            "bytes": self.bytes_by_category(),
            "routes": [route.to_dict() for route in self.routes],
        }


def plan_layer(
    source: LayerSource,
    expert_ids: tuple[int, ...],
    shard: Shard,
    policy: ResolvedPolicy,
    implementation: Implementation,
    places: Places,
) -> LayerPlan:
    """Plan one layer for one card.

    Raises :class:`loader.LoaderError` for a slice, layout or route that cannot be.
    """
    assert source.layer is not None, "routed experts belong to a layer"
    offset, count = shard.slice_of(source.intermediate, source.group2, source.layer)
    require_scales(source, implementation)
    part = Slice(expert_ids, offset, count)
    spec, reason = layer_spec(source, part, policy)
    router = Router(source.top_k, source.experts)
    routes = decide(source.layer, spec, implementation, policy, source.reason, router)
    return LayerPlan(source.layer, source, part, spec, reason, routes, places)


def require_scales(source: LayerSource, implementation: Implementation) -> None:
    """Raise :class:`UnsupportedError` for scales that an implementation does not convert."""
    if "F32" in source.scale_dtypes and not implementation.fp32_scales:
        raise UnsupportedError(
            "scales of 32 bits are not loaded on this device",
            layer=source.layer,
            expected="F16 or BF16",
            found=f"F32, and the implementation {implementation.name}",
        )


def scale_dtypes(spec: LayerSpec) -> list[str]:
    """Dtypes of the scales of W13 and W2 as the report shows them."""
    return [
        "e4m3" if bank.kind == "e2m1" else str(bank.scale_dtype).removeprefix("torch.")
        for bank in spec.banks
    ]


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
            scale_dtype=SCALE_DTYPES[dtype],
            global_sense=scheme.global_sense,
        )

    cut = part.offset % source.group2 if phase is None else phase
    w13 = bank(source.hidden, 2 * part.count, source.group13, 0, 2, source.scale_dtypes[0])
    w2 = bank(part.count, source.hidden, source.group2, cut, 1, source.scale_dtypes[1])
    return LayerSpec(w13, w2, policy.policy.awq_rounding), reason

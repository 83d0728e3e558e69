"""Plan of one linear: a bank that stays at 4 bits where that can be served, else a plain weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from loader.bank import ABSENT, BankSpec, LayerSpec, check_group
from loader.checkpoint.linears import LinearSource
from loader.checkpoint.scheme import Role
from loader.errors import LoaderError, ShardError, UnsupportedError
from loader.layer_plan import SCALE_DTYPES
from loader.native import Implementation
from loader.pieces import Pieces, Places, Slice, build_pieces
from loader.policy import ResolvedPolicy
from loader.route import NEEDS, RouteRange, decide, fast_tokens
from loader.shard import PHASE_MULTIPLE

BANK, DEQUANTIZED = "bank", "dequantized"
WORD_FEATURES = 8
"""Output features of one packed word: a slice of them begins and ends with a word."""

RUN_QUANTUM = 32
RUN_BYTES = 4 << 20
"""Bytes of codes that dequantizing holds at a time."""


@dataclass(frozen=True)
class LinearSlice:
    """One rank's part of a linear: runs (first, count) of output and of input features.

    None means all. ``outs`` is the slice of a column-parallel linear, multiples of 8; ``ins`` that
    of a row-parallel one, multiples of 16.
    """

    outs: tuple[int, int] | None = None
    ins: tuple[int, int] | None = None


WHOLE = LinearSlice()


@dataclass(frozen=True, eq=False)
class LinearPlan:
    """How one linear is served on one card. ``served`` is ``bank`` or ``dequantized``."""

    source: LinearSource
    part: Slice
    bank: BankSpec
    served: str
    reason: str
    routes: tuple[RouteRange, ...]
    rounding: str
    places: Places = field(repr=False)

    @property
    def name(self) -> str:
        """Module name in the checkpoint."""
        return self.source.name

    @property
    def n(self) -> int:
        """Output features on this card."""
        return (self.part.outs or (0, self.source.n))[1]

    @property
    def k(self) -> int:
        """Input features on this card."""
        return self.part.count

    @property
    def spec(self) -> LayerSpec:
        """The bank as operators take it: W2 of a layer whose W13 is absent."""
        return LayerSpec(ABSENT, self.bank, self.rounding)

    @property
    def zero_point(self) -> int | None:
        """8 where the checkpoint stores no zero points, None where there is nothing to fill."""
        return 8 if self.bank.kind == "int4" and not self.source.source.zeros_stored else None

    @property
    def fast_tokens(self) -> int:
        """Last token count that a fast route serves from the bank, 0 where none does."""
        return fast_tokens(self.routes) if self.served == BANK else 0

    def pieces(self) -> Pieces:
        """Source pieces in file order, before they are cut to a buffer's size."""
        return build_pieces(self.source.source, self.places, self.part, self.spec)

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of the weight as it is served; ``dtype`` is what it is dequantized into."""
        if self.served == BANK:
            return self.bank.nbytes()
        return self.n * self.k * dtype.itemsize

    def scratch_bytes(self, implementation: Implementation) -> int:
        """fp32 scratch that serving the bank needs; 0 where the weight is dequantized."""
        if self.served != BANK or implementation.linear_scratch_bytes is None:
            return 0
        return implementation.linear_scratch_bytes(self.spec.to_ints(), self.fast_tokens)

    def runs(self) -> Iterator[LinearPlan]:
        """The same linear in runs of source rows, each a bank small enough to be a temporary."""
        along_k = any(t.role is Role.CODES_KN for t in self.source.source.tables)
        outs = self.part.outs or (0, self.source.n)
        first, count = (self.part.offset, self.k) if along_k else outs
        row_bytes = (self.n if along_k else self.k) // 2
        each = max(RUN_BYTES // max(row_bytes, 1) // RUN_QUANTUM, 1) * RUN_QUANTUM
        for start in range(first, first + count, each):
            some = min(each, first + count - start)
            if along_k:
                part = replace(self.part, offset=start, count=some, outs=outs)
            else:
                part = replace(self.part, outs=(start, some))
            yield replace(self, part=part, bank=_bank_of(self.source, part, self.bank))

    def to_dict(self) -> dict[str, Any]:
        """The entry of a report."""
        return {
            "name": self.name,
            "format": self.source.scheme.format,
            "n": self.n,
            "k": self.k,
            "group": self.bank.group,
            "served": self.served,
            "reason": self.reason,
            "metadata_layout": self.bank.layout if self.served == BANK else None,
            "routes": [route.to_dict() for route in self.routes] if self.served == BANK else [],
        }


def plan_linear(
    source: LinearSource,
    policy: ResolvedPolicy,
    implementation: Implementation,
    places: Places,
    dtype: torch.dtype,
    part: LinearSlice = WHOLE,
    plain_because: str | None = None,
) -> LinearPlan:
    """Plan one linear for activations of ``dtype``.

    ``plain_because`` says why the caller needs a plain weight, None where a bank will do. Raises a
    :class:`loader.LoaderError` for a slice, group, layout or route that cannot be.
    """
    scheme, layer = source.scheme, source.source.layer
    check_group(source.source.group2, layer)
    if "F32" in source.source.scale_dtypes:
        raise UnsupportedError(
            "scales of 32 bits are loaded for routed experts only",
            layer=layer,
            tensor=source.name,
            expected="F16 or BF16",
            found="F32",
        )
    own = _slice_of(source, part)
    try:
        layout, layout_reason = policy.layout_for(scheme.kind)
    except LoaderError as error:
        raise error.at(layer=layer, tensor=source.name) from None
    like = BankSpec(
        kind=scheme.kind,
        layout=layout,
        experts=1,
        k=0,
        n=0,
        group=source.source.group2,
        phase=0,
        projections=1,
        scale_dtype=SCALE_DTYPES[source.source.scale_dtypes[1]],
        global_sense=scheme.global_sense,
    )
    bank = _bank_of(source, own, like)
    lacking = plain_because or _lacking(source, own, bank, implementation, dtype)
    rounding = policy.policy.awq_rounding
    if lacking is not None:
        return LinearPlan(source, own, bank, DEQUANTIZED, lacking, (), rounding, places)
    reason = f"{scheme.format} fits a bank, {layout}: {layout_reason}"
    routes = decide(layer, LayerSpec(bank, bank, rounding), implementation, policy, reason)
    return LinearPlan(source, own, bank, BANK, reason, routes, rounding, places)


def _bank_of(source: LinearSource, part: Slice, like: BankSpec) -> BankSpec:
    """The bank of one part; an odd number of columns gets a pad, since zero points pack in twos."""
    n = (part.outs or (0, source.n))[1]
    return replace(like, k=part.count, n=n + n % 2, phase=part.offset % source.source.group2)


def _lacking(
    source: LinearSource,
    part: Slice,
    bank: BankSpec,
    implementation: Implementation,
    dtype: torch.dtype,
) -> str | None:
    """Why the linear cannot be served from a bank; None where it can."""
    if implementation.linear is None:
        return f"the {implementation.name} implementation serves no linear from a bank"
    if dtype not in implementation.dtypes:
        return f"the {implementation.name} implementation does not take {dtype} activations"
    if bank.n != (part.outs or (0, source.n))[1]:
        return f"{source.n} output features: a bank's columns come in pairs"
    for need in NEEDS:
        spec = LayerSpec(bank, bank)
        if not need.holds(spec, implementation):
            needs, found = need.needs(implementation), need.found(spec)
            return f"a bank needs {need.capability}: {needs}; found {found}"
    return None


def _slice_of(source: LinearSource, part: LinearSlice) -> Slice:
    for axis, run, size, multiple in (
        ("output", part.outs, source.n, WORD_FEATURES),
        ("input", part.ins, source.k, PHASE_MULTIPLE),
    ):
        if run is None or run == (0, size):
            continue
        first, count = run
        if first < 0 or count < 1 or first + count > size or first % multiple or count % multiple:
            raise ShardError(
                f"a linear cannot be cut so along its {axis} features",
                layer=source.source.layer,
                tensor=source.name,
                expected=f"a run of multiples of {multiple} within {size}",
                found=f"{count} from {first} on",
            )
    first, count = part.ins or (0, source.k)
    return Slice((0,), first, count, part.outs)

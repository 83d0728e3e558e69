"""Experts: one prepared MoE layer as a module, its decisions frozen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import index
from typing import Any

import torch

from loader import native
from loader.bank import LayerSpec, split_banks
from loader.banked import BankedModule
from loader.errors import LoaderError
from loader.policy import ResolvedPolicy
from loader.reference.weights import Columns, dequantize
from loader.report import LoadReport
from loader.route import RouteRange, limits
from loader.shard import Shard
from loader.structs import FLOATS
from loader.workspace import Workspace

_FLOAT8 = (
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
"""Router weights of these are widened before a kernel sees them."""


@dataclass(frozen=True)
class LayerFacts:
    """What was decided for one layer at load: nothing here changes afterwards."""

    layer: int
    format: str
    spec: LayerSpec
    expert_ids: tuple[int, ...]
    experts: int
    shard: Shard
    policy: ResolvedPolicy
    routes: tuple[RouteRange, ...]


class PreparedExperts(BankedModule):
    """The routed experts of one MoE layer on one card, ready to run from their banks.

    Buffers ``w13_*`` and ``w2_*`` are the tensors of the two banks (``loader/bank.py``). Format,
    layout, phase and sizes travel in the extra state.
    """

    what = "prepared experts"

    def __init__(
        self, facts: LayerFacts, tensors: list[torch.Tensor], workspace: Workspace
    ) -> None:
        names = [
            f"{bank}_{tensor.name}"
            for bank, spec in zip(("w13", "w2"), facts.spec.banks, strict=True)
            for tensor in spec.tensors()
        ]
        super().__init__(names, tensors)
        self._facts = facts
        self._workspace = workspace
        self._spec_ints = facts.spec.to_ints()
        self._route_limits = limits(facts.routes)
        self._slots = {expert: slot for slot, expert in enumerate(facts.expert_ids)}

    @property
    def layer(self) -> int:
        """Layer index in the model."""
        return self._facts.layer

    @property
    def format(self) -> str:
        """Format on disk, such as ``awq-gemm``."""
        return self._facts.format

    @property
    def spec(self) -> LayerSpec:
        """Layout, sizes, group, phase and meaning of both banks."""
        return self._facts.spec

    @property
    def expert_ids(self) -> tuple[int, ...]:
        """Global ids of the experts on this card, by slot."""
        return self._facts.expert_ids

    @property
    def shard(self) -> Shard:
        """The shard that was loaded."""
        return self._facts.shard

    @property
    def policy(self) -> ResolvedPolicy:
        """The policy in force, with the environment filled in."""
        return self._facts.policy

    @property
    def routes(self) -> tuple[RouteRange, ...]:
        """Routes by token count, each with its reason."""
        return self._facts.routes

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.spec.w13.k

    @property
    def intermediate_size(self) -> int:
        """I of this card's slice."""
        return self.spec.w2.k

    @property
    def metadata_layout(self) -> str:
        """``compact``, ``record``, ``wide``, or ``plain`` for experts that are not quantized."""
        return self.spec.w13.layout

    @property
    def awq_rounding(self) -> str:
        """``exact`` or ``fused_bias``."""
        return self.spec.awq_rounding

    @property
    def workspace(self) -> Workspace:
        """The workspace shared by the layers of one load."""
        return self._workspace

    def forward(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the layer: ``(T, H)``, ``(T, k)`` int32 or int64, ``(T, k)`` float -> ``(T, H)``.

        For inference: no gradient flows. Ids are global; a slot whose id is negative, out of range
        or not on this card adds exactly 0. ``out`` takes the result where it is given. Raises
        :class:`LoaderError` for a dtype, shape or device that does not match, before anything runs.
        """
        self._check(hidden_states, topk_ids, topk_weights)
        if topk_weights.dtype not in FLOATS:
            topk_weights = topk_weights.float()
        if out is None:
            out = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
        else:
            self._check_out(out, hidden_states, topk_ids, topk_weights)
        native.moe(
            out,
            self._workspace.scratch,
            hidden_states,
            topk_ids,
            topk_weights,
            self._workspace.expert_map,
            self.banks(),
            self._spec_ints,
            self._route_limits,
        )
        return out

    def _check(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        device = self._workspace.scratch.device
        for name, tensor in (("hidden_states", x), ("topk_ids", ids), ("topk_weights", weights)):
            self.require_dense(name, tensor)
        if x.dim() != 2 or x.shape[1] != self.hidden_size:
            self.refuse("hidden_states", f"(T, {self.hidden_size})", tuple(x.shape))
        if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            self.refuse("hidden_states", "float16, bfloat16 or float32", x.dtype)
        if ids.dim() != 2 or ids.shape[0] != x.shape[0]:
            self.refuse("topk_ids", f"({x.shape[0]}, k)", tuple(ids.shape))
        if ids.dtype not in (torch.int32, torch.int64):
            self.refuse("topk_ids", "int32 or int64", ids.dtype)
        if weights.shape != ids.shape:
            self.refuse("topk_weights", tuple(ids.shape), tuple(weights.shape))
        if weights.dtype not in (*FLOATS, *_FLOAT8):
            self.refuse("topk_weights", "a floating dtype", weights.dtype)
        for name, tensor in (("hidden_states", x), ("topk_ids", ids), ("topk_weights", weights)):
            if tensor.device != device:
                self.refuse(name, f"device {device}", tensor.device)

    def _check_out(self, out: torch.Tensor, *inputs: torch.Tensor) -> None:
        x = inputs[0]
        self.require_dense("out", out)
        if out.shape != x.shape or out.dtype != x.dtype or out.device != x.device:
            self.refuse(
                "out",
                f"{tuple(x.shape)} {x.dtype} on {x.device}",
                f"{tuple(out.shape)} {out.dtype} on {out.device}",
            )
        if not _is_one_to_one(out):
            self.refuse("out", "a place for every number", f"strides {out.stride()}")
        if torch.compiler.is_compiling():
            return
        if _overlaps(out, inputs):
            self.refuse("out", "memory apart from the inputs", "an overlap")
        # A result written over a bank would be wrong numbers from the next call on.
        if _overlaps(out, (*self.banks(), *self._workspace.tensors())):
            self.refuse("out", "memory apart from banks and workspace", "an overlap")

    def refuse(self, name: str, expected: object, found: object) -> None:
        """Raise the error that says what does not match the layer."""
        raise LoaderError(
            f"{name} does not match the layer", layer=self.layer, expected=expected, found=found
        )

    def dequantize(self, expert_id: int) -> dict[str, torch.Tensor]:
        """Weights fp32 of one expert: ``gate``, ``up`` (I, H), ``down`` (H, I), this card's slice.

        Raises :class:`LoaderError` for an expert that this card does not hold.
        """
        try:
            slot = self._slots.get(index(expert_id))
        except TypeError:
            slot = None  # no whole number, so no expert's id
        if slot is None:
            raise LoaderError(
                f"expert {expert_id} is not on this card",
                layer=self.layer,
                expected=f"one of {_range_text(self.expert_ids)}",
                found=repr(expert_id),
            )
        w13, w2 = split_banks(self.spec, self.banks())
        both = dequantize(self.spec.w13, self.awq_rounding, w13, Columns(slot, 0, self.spec.w13.n))
        down = dequantize(self.spec.w2, self.awq_rounding, w2, Columns(slot, 0, self.spec.w2.n))
        return {
            "gate": both[0::2].contiguous(),
            "up": both[1::2].contiguous(),
            "down": down.contiguous(),
        }

    def extra_repr(self) -> str:
        g = self.spec
        return (
            f"layer={self.layer}, format={self.format}, layout={self.metadata_layout}, "
            f"experts={len(self.expert_ids)}, H={self.hidden_size}, I={self.intermediate_size}, "
            f"group={g.w13.group}, phase={g.w2.phase}"
        )

    def get_extra_state(self) -> dict[str, Any]:
        """Everything that gives the bytes of the banks their meaning."""
        return {
            "schema": 1,
            "format": self.format,
            "spec": list(self._spec_ints),
            "expert_ids": list(self.expert_ids),
            "experts": self._facts.experts,
        }


def _is_one_to_one(t: torch.Tensor) -> bool:
    """Whether every element of a matrix has its own place: one axis steps over the other's span."""
    (rows, columns), (down, across) = t.shape, t.stride()
    if rows < 2:
        return columns < 2 or across > 0
    if columns < 2:
        return down > 0
    apart = down > (columns - 1) * across or across > (rows - 1) * down
    return down > 0 and across > 0 and apart


def _overlaps(t: torch.Tensor, others: Iterable[torch.Tensor]) -> bool:
    """True where ``t`` may share bytes with one of ``others`` on its device; part of every step."""
    first, end = _span(t)
    if first == end:
        return False
    return any(one < end and first < last and one < last for one, last in map(_span, others))


def _span(t: torch.Tensor) -> tuple[int, int]:
    """First address and the one after the last, by the strides; both alike where it is empty."""
    first = t.data_ptr()
    if t.is_contiguous():
        return first, first + t.nbytes
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return first, first + (last + 1) * t.itemsize


def _range_text(ids: tuple[int, ...]) -> str:
    if ids == tuple(range(ids[0], ids[0] + len(ids))):
        return f"{ids[0]} to {ids[-1]}"
    return ", ".join(map(str, ids))


class LoadedExperts(Mapping[int, PreparedExperts]):
    """Layer index -> prepared experts, with the report of the load."""

    def __init__(self, modules: Mapping[int, PreparedExperts], report: LoadReport) -> None:
        self._modules = dict(modules)
        self.report = report

    def __getitem__(self, layer: int) -> PreparedExperts:
        return self._modules[layer]

    def __iter__(self) -> Iterator[int]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

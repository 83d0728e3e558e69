"""Linears: the quantized linears of a checkpoint that vLLM does not load itself, and their plans.

Those that vLLM cannot run on this platform are served as in the Transformers door: from banks of
one expert, cut as vLLM cuts the linear over its ranks, or dequantized where no bank fits. One that
vLLM's model keeps plain (a router) is dequantized.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.models.interfaces import SupportsQuant

from loader.checkpoint.folder import Checkpoint
from loader.checkpoint.linears import LinearSource, find_linears
from loader.errors import CheckpointError, ShardError
from loader.integrations.vllm.linear_method import Cut, OwnLinearMethod
from loader.linears import LinearLoader, LinearPlan, LinearSlice, plan_linear
from loader.linears.plan import BANK
from loader.native import Implementation
from loader.pieces import Places
from loader.policy import ResolvedPolicy

PLAIN_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
BY_THE_MODEL = "vLLM's model keeps it plain"
_PARTS = {"q": 0, "k": 1, "v": 2}


@dataclass(frozen=True)
class Place:
    """Where a module of the checkpoint stands in vLLM's model; ``part`` of a fused module."""

    name: str
    module: torch.nn.Module
    part: int

    @property
    def method(self) -> object:
        """The module's quantization method, None where it has none."""
        return vars(self.module).get("quant_method")


class Names:
    """Where the modules of a checkpoint stand in vLLM's model: renamed, and some fused."""

    def __init__(self, model: torch.nn.Module, config: QuantizationConfig) -> None:
        self._modules = dict(model.named_modules())
        self._mapper = model.hf_to_vllm_mapper if isinstance(model, SupportsQuant) else None
        self._fused = config.packed_modules_mapping

    def find(self, name: str) -> Place | None:
        """The place of a module of the checkpoint; None where vLLM has none, or one of several."""
        places = [(f"{name}.weight", torch.empty(0, device="cpu"))]
        if self._mapper is not None:
            places = list(self._mapper.apply(places))
        if len(places) != 1:
            return None
        ((mapped, tensor),) = places
        place = mapped.removesuffix(".weight")
        if place in self._modules:
            shard = vars(tensor).get("shard_id", 0)
            return Place(place, self._modules[place], _PARTS.get(shard, shard))
        parent, _, last = place.rpartition(".")
        for whole, parts in self._fused.items():
            fused = f"{parent}.{whole}".lstrip(".")
            if last in parts and fused in self._modules:
                return Place(fused, self._modules[fused], parts.index(last))
        return None


@dataclass(frozen=True)
class PlainLinear:
    """One linear that vLLM gets dequantized, in ``dtype``."""

    plan: LinearPlan
    dtype: torch.dtype
    why: str


@dataclass(frozen=True)
class BankedLinear:
    """One linear of vLLM's that is served from banks, one for each part."""

    name: str
    module: LinearBase
    method: OwnLinearMethod
    plans: tuple[LinearPlan, ...]


@dataclass(frozen=True)
class OwnLinears:
    """The linears of one rank that vLLM does not load itself; ``plain`` by checkpoint name."""

    plain: dict[str, PlainLinear] = field(default_factory=dict)
    banked: list[BankedLinear] = field(default_factory=list)

    def plans(self) -> list[LinearPlan]:
        """All plans, for the loader's buffers."""
        banked = [plan for one in self.banked for plan in one.plans]
        return [*banked, *(one.plan for one in self.plain.values())]

    def rows(self) -> dict[int, str]:
        """Catalog row -> checkpoint name of the linear that it is a part of."""
        return {row: plan.name for plan in self.plans() for row in plan.source.rows}

    def install(self, linears: LinearLoader) -> None:
        """Load the banks onto vLLM's modules."""
        for one in self.banked:
            banks = [linears.bank(plan, with_bias=False) for plan in one.plans]
            one.method.install(one.module, banks)


@dataclass(frozen=True)
class LinearPlanner:
    """Plans the linears of one model on one rank."""

    checkpoint: Checkpoint
    policy: ResolvedPolicy
    implementation: Implementation
    device: torch.device

    def plan(self, model: torch.nn.Module, config: QuantizationConfig) -> OwnLinears:
        """Decide each linear; those to be dequantized get plain parameters now.

        Raises a :class:`loader.LoaderError` for one whose format is not known or whose weights are
        not in the checkpoint.
        """
        names, result = Names(model, config), OwnLinears()
        fused: dict[str, dict[int, LinearSource]] = defaultdict(dict)
        for name, source in self._sources(names).items():
            place = names.find(name)
            assert place is not None
            if isinstance(place.method, OwnLinearMethod):
                fused[place.name][place.part] = source
            else:
                dtype = place.module.get_parameter("weight").dtype
                result.plain[name] = PlainLinear(
                    self._plan(source, dtype, plain_because=BY_THE_MODEL), dtype, BY_THE_MODEL
                )
        for name, module in model.named_modules():
            method = vars(module).get("quant_method")
            if isinstance(method, OwnLinearMethod):
                self._own(name, module, method, fused.get(name, {}), result)
        return result

    def _sources(self, names: Names) -> Mapping[str, LinearSource]:
        def wanted(name: str) -> bool:
            place = names.find(name)
            ours = (*PLAIN_METHODS, OwnLinearMethod)
            return place is not None and isinstance(place.method, ours)

        return find_linears(self.checkpoint, wanted)

    def _own(
        self,
        name: str,
        module: LinearBase,
        method: OwnLinearMethod,
        parts: Mapping[int, LinearSource],
        result: OwnLinears,
    ) -> None:
        """Banks for a linear where every part fits one, else a plain weight for vLLM to fill."""
        cut = method.cut
        if cut is None or not parts:
            raise CheckpointError(
                "the checkpoint has no quantized weights for a linear of vLLM's model",
                tensor=name,
                expected="codes and scales under a name that vLLM maps to it",
                found="none",
            )
        plans, lacking = self._banks(module, cut, parts)
        if lacking is None:
            result.banked.append(BankedLinear(name, module, method, plans))
            return
        method.make_plain(module, self.device)
        for source in parts.values():
            plan = self._plan(source, cut.dtype, plain_because=lacking)
            result.plain[source.name] = PlainLinear(plan, cut.dtype, f"{lacking}; {method.why}")

    def _banks(
        self, module: LinearBase, cut: Cut, parts: Mapping[int, LinearSource]
    ) -> tuple[tuple[LinearPlan, ...], str | None]:
        """Plans of the parts in order, and what stands against banks, None for nothing."""
        if sorted(parts) != list(range(len(cut.outs))):
            return (), "its parts are not those of vLLM's fused linear"
        plans = []
        for part, source in sorted(parts.items()):
            try:
                own = _slice(source, cut, cut.outs[part], module.tp_rank, module.tp_size)
                plans.append(self._plan(source, cut.dtype, own))
            except ShardError as error:
                return (), str(error)
        lacking = next((plan.reason for plan in plans if plan.served != BANK), None)
        return tuple(plans), lacking

    def _plan(
        self,
        source: LinearSource,
        dtype: torch.dtype,
        part: LinearSlice | None = None,
        plain_because: str | None = None,
    ) -> LinearPlan:
        catalog = self.checkpoint.catalog
        return plan_linear(
            source,
            self.policy,
            self.implementation,
            Places(catalog.file, catalog.begin),
            dtype,
            part or LinearSlice(),
            plain_because,
        )


def _slice(source: LinearSource, cut: Cut, outs: int, rank: int, ranks: int) -> LinearSlice:
    """This rank's part of one linear; key and value heads may be the same on several ranks."""
    if outs == source.n:
        out_run = None
    elif source.n % outs or ranks % (source.n // outs):
        raise ShardError(
            "vLLM cuts a linear in a way that is not known",
            tensor=source.name,
            expected=f"{source.n} output features in equal parts over {ranks} ranks",
            found=outs,
        )
    else:
        same = ranks // (source.n // outs)
        out_run = (rank // same * outs, outs)
    in_run = None if cut.ins == source.k else (rank * cut.ins, cut.ins)
    return LinearSlice(out_run, in_run)

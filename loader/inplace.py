"""In place: banks from the checkpoint-format parameters that a module already holds.

The parameters are read as fused experts (experts on axis 0, gate before up) under the same tables,
pieces, converter and lifecycle as a checkpoint; each parameter is one chunk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from loader import memory, request
from loader.checkpoint.model import USUAL_TOP_K
from loader.converter import (
    ConversionCache,
    LayerBanks,
    LayerConverter,
    cache_bytes,
    card_cache_bytes,
    guarded,
)
from loader.crossover import Crossovers
from loader.errors import CapacityError, LifecycleError, LoaderError
from loader.experts import LayerFacts, PreparedExperts
from loader.layer_plan import layer_spec, require_scales
from loader.lifecycle import Lifecycle, Observer
from loader.native import Implementation, implementation_for
from loader.parameters import Parameters, read_parameters
from loader.pieces import Pieces, Slice, build_pieces, descriptors_of
from loader.policy import Policy, ResolvedPolicy
from loader.reference.routes import least_scratch_bytes
from loader.rollback import SignalsHeld, ended_once, whole_or_undone
from loader.room import Room, room_for
from loader.route import Router, decide, fast_tokens, require_implementation
from loader.scale_planes import Found, ScalePlanes
from loader.shard import Shard
from loader.verdict import Judge
from loader.workspace import Workspace

_LOG = logging.getLogger(__name__)

SUBMODULE = "experts"


@ended_once
def prepare_module(
    module: torch.nn.Module,
    *,
    quantization: Mapping[str, Any],
    layer: int = 0,
    shard: Shard | None = None,
    policy: Policy | None = None,
    observers: Iterable[Observer] = (),
    num_experts: int | None = None,
    workspace: Workspace | None = None,
    empty_cache: bool = True,
    card_memory: int | None = None,
) -> PreparedExperts:
    """Convert the expert parameters of ``module`` and add the result as its submodule ``experts``.

    ``module`` holds ``w13_*`` and ``w2_*`` parameters or buffers in checkpoint format, experts of
    this card on axis 0, gate before up. ``quantization`` is the checkpoint's own
    ``quantization_config``. ``shard`` gives the phase of W2 and, with ``num_experts`` (all experts
    of the layer; default: those on the module times ``ep_size``), the global ids. ``workspace`` is
    that of an earlier call, to share one for all layers. ``empty_cache`` returns the sources'
    memory to the system or driver. ``card_memory`` is the card's budget in bytes, beside the
    sources that lie there already (None: what is free).

    Banks that do not fit beside the sources are refused by a :class:`CapacityError` before anything
    is allocated. A failure leaves the source parameters untouched; success removes them. An
    observer that raises at ``released`` or ``ready`` is reported, but the module stays prepared:
    the sources are gone.
    """
    module = request.asked_of(torch.nn.Module, "module", module, None)
    resolved, shard = request.asked_policy(policy), request.asked_shard(shard)
    workspace = request.asked_or_none(Workspace, "workspace", workspace)
    num_experts = request.asked_budget("num_experts", num_experts, least=1)
    layer, observers = request.asked_number("layer", layer), request.asked_observers(observers)
    card_memory = request.asked_budget("card_memory", card_memory)
    with memory.nothing_kept(on_card=empty_cache and _is_on_card(module)):
        _check_name_is_free(module, layer)
        found = read_parameters(module, quantization, layer, shard)
        facts = _decide(found, layer, shard, resolved, num_experts)
        work = _InPlace(module, found, facts, observers, empty_cache)
        del found
        work.require_fit(workspace, room_for(work.device, card_memory))
        return whole_or_undone(partial(work.run, workspace), work.abandon)


def _is_on_card(module: torch.nn.Module) -> bool:
    return any(tensor.is_cuda for tensor in (*module.parameters(), *module.buffers()))


def _check_name_is_free(module: torch.nn.Module, layer: int) -> None:
    """Refuse a second call, and a module that uses the name of the submodule for something else."""
    prepared = isinstance(module._modules.get(SUBMODULE), PreparedExperts)
    if prepared or hasattr(module, SUBMODULE):
        raise LifecycleError(
            "the module is prepared already"
            if prepared
            else f"the module has no room for a submodule named {SUBMODULE!r}",
            layer=layer,
            expected="a module that holds checkpoint-format parameters",
            found=f"an attribute {SUBMODULE!r}",
        )


def _decide(
    found: Parameters,
    layer: int,
    shard: Shard,
    policy: ResolvedPolicy,
    num_experts: int | None,
) -> LayerFacts:
    """Everything that can be refused before anything is allocated."""
    implementation = require_implementation(found.device, implementation_for(found.device))
    local = len(found.part.expert_ids)
    experts = num_experts or local * shard.ep_size
    wanted = shard.count_of(experts)  # before the ids: the caller's number sizes nothing yet
    if wanted != local:
        raise LoaderError(
            "the module does not hold the experts of this shard",
            layer=layer,
            expected=f"{wanted} experts on axis 0, of {experts} in all",
            found=local,
        )
    ids = shard.experts_of(experts)
    require_scales(found.source, implementation)
    spec, _ = layer_spec(found.source, found.part, policy, found.phase)
    router = Router(min(USUAL_TOP_K, experts), experts)
    return LayerFacts(
        layer=layer,
        format=found.source.scheme.format,
        spec=spec,
        expert_ids=ids,
        experts=experts,
        shard=shard,
        policy=policy,
        routes=decide(layer, spec, implementation, policy, found.source.reason, router),
    )


class _InPlace:
    """State of one running conversion: everything it allocated, so that a failure can drop it."""

    def __init__(
        self,
        module: torch.nn.Module,
        found: Parameters,
        facts: LayerFacts,
        observers: Iterable[Observer],
        empty_cache: bool,
    ) -> None:
        self.module = module
        self.found: Parameters | None = found
        self.facts = facts
        self.empty_cache = empty_cache
        self.lifecycle = Lifecycle([facts.layer], observers)
        self.cache: ConversionCache | None = None
        self.prepared: PreparedExperts | None = None
        self.nbytes = facts.spec.nbytes()
        self.device = found.device

    def require_fit(self, workspace: Workspace | None, room: Room) -> None:
        """Refuse a workspace of other experts, and what does not fit beside the sources.

        Raises :class:`CapacityError`, saying by how much; nothing was allocated then.
        """
        facts = self.facts
        if workspace is not None:
            least = least_scratch_bytes(facts.spec)
            workspace.require(least, facts.expert_ids, facts.experts, facts.layer)
        needed = self._predicted_peak(workspace is None)
        if needed > room.nbytes:
            raise CapacityError(
                f"the banks do not fit beside their sources: {needed - room.nbytes} bytes too many",
                layer=facts.layer,
                expected=f"a need within {room.nbytes} bytes, the {room.limit}",
                found=f"{needed} bytes on {self.device}",
            )

    def run(self, workspace: Workspace | None) -> PreparedExperts:
        """Convert, take the sources off the module, release, add the result."""
        facts, layer = self.facts, self.facts.layer
        assert self.found is not None
        device = self.device
        self.lifecycle.enter(layer, "planned", self.found.read_bytes)
        predicted = self._predicted_peak(workspace is None)
        with memory.allocating("the banks", self.nbytes, layer, predicted):
            if workspace is None:
                workspace = Workspace(
                    self._scratch_bytes(), facts.expert_ids, facts.experts, device
                )
            banks = LayerBanks.allocate(facts.spec, device, self.found.zero_point)
            self.cache = ConversionCache(facts.spec, device)
        self.lifecycle.enter(layer, "reading")
        self._convert(LayerConverter(banks, self.cache))
        facts = replace(facts, spec=banks.spec)
        if facts.policy.policy.grouped_max_tokens == "measure":
            facts = self._settled(facts, banks, workspace)
        self.prepared = PreparedExperts(facts, banks.tensors, workspace)
        self.lifecycle.enter(layer, "prepared", self.nbytes)
        with SignalsHeld():
            # First what may be refused: from here on the module has the sources or the result.
            self.module.add_module(SUBMODULE, self.prepared)
            freed = self._take_sources() + self.cache.release()
        if self.empty_cache and device.type != "cpu":
            torch.accelerator.empty_cache()
        self.lifecycle.enter(layer, "released", freed)
        self.lifecycle.enter(layer, "ready", self.nbytes)
        return self.prepared

    def _predicted_peak(self, own_workspace: bool) -> int:
        """Bytes that this takes at most beside what the module holds."""
        facts, on_card = self.facts, self.device.type != "cpu"
        cache = card_cache_bytes(facts.spec) if on_card else cache_bytes(facts.spec)
        workspace = self._scratch_bytes() + 4 * facts.experts if own_workspace else 0
        return self.nbytes + workspace + cache + self._code.temporary_bytes

    @property
    def _code(self) -> Implementation:
        return require_implementation(self.device, implementation_for(self.device))

    def _scratch_bytes(self) -> int:
        """Scratch of a workspace of this layer's own."""
        tokens = fast_tokens(self.facts.routes)
        return self._code.scratch_bytes([self.facts.spec], tokens, self._top_k)

    @property
    def _top_k(self) -> int:
        """A module says nothing of its top-k: the usual one."""
        return min(USUAL_TOP_K, self.facts.experts)

    def _settled(self, facts: LayerFacts, banks: LayerBanks, workspace: Workspace) -> LayerFacts:
        crossovers = Crossovers(self._code, workspace, self._top_k)
        return replace(facts, routes=crossovers.settle(facts.routes, facts.spec, banks.tensors))

    def _convert(self, converter: LayerConverter) -> None:
        found, layer = self.found, self.facts.layer
        assert found is not None
        files = found.names
        judge = Judge(
            found.source,
            Slice(self.facts.expert_ids, 0, found.part.count),
            self.facts.policy.policy.nonfinite == "warn",
            lambda row: files[row],
            lambda row: None,
        )
        pieces = build_pieces(found.source, found.places, found.part, self.facts.spec)
        pieces["offset"] = pieces["begin"]
        planes = ScalePlanes(converter)
        consumed = 0
        for number, tensor in enumerate(found.tensors):
            own = pieces[pieces["file"] == number]
            if not len(own):
                continue
            data = tensor.detach().view(torch.uint8).flatten()
            descriptors = torch.from_numpy(descriptors_of(own))
            write = partial(guarded, layer, partial(converter.write, data, descriptors))
            for findings, pieces_found in planes.settle(partial(_found, write, own)):
                for line in judge.after_write(findings, pieces_found):
                    _LOG.warning("kept under nonfinite='warn': %s", line)
            consumed += data.numel()
            del data, write
            self.lifecycle.enter(layer, "reading", consumed)
        self.lifecycle.enter(layer, "converting")
        closing = guarded(layer, converter.finish)
        judge.after_layer(closing, guarded(layer, planes.spots), lambda: pieces)
        memory.merge_pages(converter.banks.tensors)

    def _take_sources(self) -> int:
        """Remove the source parameters; returns the bytes that are free now.

        Says so if something outside the module still holds their memory.
        """
        found = self.found
        assert found is not None
        self.found = None
        held = _storages(found.tensors)
        for name in found.names:
            delattr(self.module, name)
        del found
        outside = sum(nbytes for storage, nbytes in held if not storage.expired())
        if outside:
            _LOG.warning(
                "layer %d: %d bytes of source parameters are still held by a reference outside "
                "the module, and stay allocated",
                self.facts.layer,
                outside,
            )
        return sum(nbytes for _, nbytes in held) - outside

    def abandon(self) -> None:
        """After a failure: the sources stay, everything that was made is dropped.

        Once the sources are gone (an observer raised at ``released`` or later) the prepared
        experts stay on the module instead: nothing is lost.
        """
        if self.cache is not None and not self.cache.released:
            self.cache.discard()
        if self.found is not None and self.module._modules.get(SUBMODULE) is self.prepared:
            self.module._modules.pop(SUBMODULE, None)
        self.found = self.prepared = self.cache = None
        for error in self.lifecycle.fail():
            _LOG.error("%s", error)


def _found(write: Callable[[], torch.Tensor], pieces: Pieces) -> list[Found]:
    """One call of the converter, with the pieces that its findings count."""
    return [(write(), pieces)]


def _storages(tensors: Iterable[torch.Tensor]) -> list[tuple[StorageWeakRef, int]]:
    """The distinct storages behind some tensors, weakly, each with the tensors' bytes in it.

    Storages, not tensors: a view or a state dict keeps the memory without keeping the parameter.
    """
    found: dict[int, tuple[StorageWeakRef, int]] = {}
    for tensor in tensors:
        storage = StorageWeakRef(tensor.untyped_storage())
        _, before = found.get(storage.cdata, (storage, 0))
        found[storage.cdata] = (storage, before + tensor.nbytes)
    return list(found.values())

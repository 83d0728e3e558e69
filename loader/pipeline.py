"""Pipeline: the one loop of a load: read, convert, release, measure; all or nothing."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Protocol

import torch

from loader import memory, request
from loader.checkpoint.family import Family
from loader.checkpoint.folder import open_checkpoint
from loader.checkpoint.hub import HubSource, located
from loader.checkpoint.source import Source
from loader.converter import ConversionCache, LayerBanks, LayerConverter, guarded
from loader.crossover import Crossovers, Share
from loader.experts import LayerFacts, LoadedExperts, PreparedExperts
from loader.layer_plan import LayerPlan, scale_dtypes
from loader.ledger import Ledger
from loader.lifecycle import Lifecycle, Observer
from loader.native import log_missing_core
from loader.plan import DEFAULT_STAGING_BYTES, Plan, plan_checkpoint
from loader.policy import Policy
from loader.report import LayerMeasured, LoadReport
from loader.ring import Ring
from loader.rollback import ended_once, whole_or_undone
from loader.route import fallbacks
from loader.scale_planes import ScalePlanes
from loader.shard import Shard
from loader.stream import Delivered, Reader, Scheduled, Staging, open_reader, open_staging
from loader.verdict import Judge
from loader.workspace import Workspace

_LOG = logging.getLogger(__name__)


class Peers(Protocol):
    """The other ranks of a load, which ``loader/ranks.py`` speaks to."""

    def beat(self) -> None:
        """Shows the others that this rank gets on."""

    def agree(self, plan: Plan) -> None:
        """Returns when all ranks hold plans that agree with this one; raises where they do not."""

    def share(self, tokens: int) -> int:
        """The crossover that the first rank measured, for the one that this rank measured."""
        ...


def load(
    source: str | os.PathLike[str] | Source,
    device: str | torch.device = "cpu",
    shard: Shard | None = None,
    policy: Policy | None = None,
    layers: Iterable[int] | None = None,
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    observers: Iterable[Observer] = (),
    *,
    card_memory: int | None = None,
    family: Family | None = None,
    revision: str | None = None,
) -> LoadedExperts:
    """Load the experts of a checkpoint into QPN banks on one card.

    ``source``: a local folder, or a Hub repo (``owner/name``) at ``revision``. ``layers``: indices
    outright, None for all. ``staging_bytes``: of the read buffers. ``observers``: get all events.
    ``card_memory``: the card's budget in bytes, None for what is free. ``family``: a naming
    pattern of your own, tried first.

    Returns the experts by layer; the caller owns them. Raises a :class:`loader.LoaderError`; a
    load that fails leaves nothing allocated.
    """
    return load_with(
        None,
        source,
        device,
        shard,
        policy,
        layers,
        staging_bytes,
        observers,
        card_memory=card_memory,
        family=family,
        revision=revision,
    )


@ended_once
def load_with(
    peers: Peers | None,
    source: str | os.PathLike[str] | Source,
    device: str | torch.device,
    shard: Shard | None,
    policy: Policy | None,
    layers: Iterable[int] | None,
    staging_bytes: int,
    observers: Iterable[Observer],
    *,
    card_memory: int | None,
    family: Family | None,
    revision: str | None,
) -> LoadedExperts:
    """:func:`load`, as one of several ranks: they agree on the plan before payload is read."""
    began = time.perf_counter()
    baseline = memory.host_baseline()
    resolved, families = request.asked_policy(policy), request.asked_families(family)
    observers = request.asked_observers(observers)
    # What an error would keep alive lives in the frames below this one, which are cleared.
    with (
        memory.nothing_kept(on_card=str(device).startswith("cuda")),
        located(source, revision) as opened,
    ):
        # An error keeps this frame, and what has a name in it.
        @memory.uncollected()
        def planned() -> Plan:
            return plan_checkpoint(
                open_checkpoint(opened, families),
                shard=request.asked_shard(shard),
                policy=resolved,
                layers=request.asked_layers(layers),
                device=device,
                staging_bytes=request.asked_number("staging_bytes", staging_bytes),
                card_memory=request.asked_budget("card_memory", card_memory),
            )

        return load_plan(planned(), observers, baseline, began, peers)


@ended_once
def load_plan(
    plan: Plan,
    observers: Iterable[Observer],
    baseline: memory.HostMemory,
    began: float,
    peers: Peers | None = None,
) -> LoadedExperts:
    """Do what a plan says; its checkpoint's source is open and stays the caller's.

    ``baseline`` and ``began`` (``time.perf_counter``) are what the report counts from.
    """
    plan.require_fit()
    if peers is not None:
        peers.agree(plan)
    source = plan.checkpoint.source
    if isinstance(source, HubSource):
        # Only now: what configs and headers are enough to refuse costs no download.
        source.fetch(peers.beat if peers is not None else lambda: None)
    run = _Load(plan, peers, observers, baseline, began)
    return whole_or_undone(run.run, run.abandon)


class _Load:
    """State of one running load: everything it allocated, so that a failure can drop it."""

    def __init__(
        self,
        plan: Plan,
        peers: Peers | None,
        observers: Iterable[Observer],
        baseline: memory.HostMemory,
        began: float,
    ) -> None:
        self.plan = plan
        self.share: Share = (lambda tokens: tokens) if peers is None else peers.share
        self.began = began
        self.lifecycle = Lifecycle([layer.layer for layer in plan.layers], observers, began)
        self.measured = {layer.layer: LayerMeasured() for layer in plan.layers}
        self.modules: dict[int, PreparedExperts] = {}
        self.nonfinite: list[str] = []
        self.bytes_read = 0
        self.ledger = Ledger(plan, baseline)
        self.allocating = partial(memory.allocating, predicted_peak=plan.predicted_peak)
        self.workspace: Workspace | None = None
        self.crossovers: Crossovers | None = None
        self.staging: Staging | Ring | None = None
        self.reader: Reader | None = None
        self.banks: LayerBanks | None = None
        self.banks_ahead: dict[int, LayerBanks] = {}
        self.cache: ConversionCache | None = None

    def run(self) -> LoadedExperts:
        """Load every layer of the plan."""
        plan = self.plan
        for layer in plan.layers:
            self.lifecycle.enter(layer.layer, "planned", plan.read_bytes(layer.layer))
        with self.ledger:
            with self.allocating("the workspace", plan.workspace_bytes):
                self.workspace = Workspace(
                    plan.scratch_bytes,
                    plan.layers[0].part.expert_ids,
                    plan.checkpoint.model.experts,
                    plan.device,
                )
            code = plan.implementation
            self.crossovers = Crossovers(code, self.workspace, plan.top_k, self.share)
            if self.ledger.on_card:
                # While bytes stream, an allocation waits for the card, and then the ring for it.
                for layer in plan.layers:
                    self.banks_ahead[layer.layer] = self._allocate(layer)
            self.staging = open_staging(plan)
            self.reader = open_reader(plan, self.staging)
            stream = self.reader.stream(self._schedule())
            for layer in plan.layers:
                self._layer(layer, stream)
            seconds = time.perf_counter() - self.began
            uss = memory.host_uss()
            self.reader.close()
            self.staging.close()
            memory.return_to_system()
        experts = LoadedExperts(self.modules, self._report(seconds, uss))
        self._log_routes()
        _LOG.info("%s", experts.report.memory_line())
        return experts

    def _allocate(self, layer: LayerPlan) -> LayerBanks:
        with self.allocating("the banks", layer.spec.nbytes(), layer.layer):
            return LayerBanks.allocate(layer.spec, self.plan.device, layer.zero_point)

    def _schedule(self) -> Iterator[Scheduled]:
        for layer in self.plan.layers:
            chunks = self.plan.chunks(layer)
            for number, chunk in enumerate(chunks, 1):
                yield Scheduled(layer.layer, chunk, number == len(chunks))

    def _layer(self, layer: LayerPlan, stream: Iterator[Delivered]) -> None:
        plan, measured = self.plan, self.measured[layer.layer]
        number = layer.layer
        self.lifecycle.enter(number, "reading")
        nbytes = layer.spec.nbytes()
        self.banks = self.banks_ahead.pop(number, None) or self._allocate(layer)
        with self.allocating("the conversion cache", plan.conversion_bytes, number):
            self.cache = ConversionCache(layer.spec, plan.device)
        self.ledger.after_allocation()
        converter = LayerConverter(self.banks, self.cache)
        catalog = plan.checkpoint.catalog
        judge = Judge(
            layer.source,
            layer.part,
            plan.policy.policy.nonfinite == "warn",
            lambda row: catalog.names[row],
            lambda row: catalog.files[int(catalog.file[row])],
        )
        self._convert(layer, converter, judge, stream)
        memory.merge_pages(self.banks.tensors)
        self.modules[number] = self._module(layer, self.banks)
        self.lifecycle.enter(number, "prepared", nbytes)
        started = time.perf_counter()
        freed = self.cache.release()
        measured.release_seconds = time.perf_counter() - started
        measured.releases = self.cache.released
        self.banks = self.cache = None
        self.lifecycle.enter(number, "released", freed)
        self.lifecycle.enter(number, "ready", nbytes)

    def _convert(
        self,
        layer: LayerPlan,
        converter: LayerConverter,
        judge: Judge,
        stream: Iterator[Delivered],
    ) -> None:
        number, measured = layer.layer, self.measured[layer.layer]
        planes = ScalePlanes(converter)
        consumed, last = 0, False
        while not last:
            filled = next(stream)
            last = filled.scheduled.last
            measured.read_seconds += filled.read_seconds
            started = time.perf_counter()
            convert = partial(filled.convert, converter, judge.name_of)
            for findings, pieces in planes.settle(partial(guarded, number, convert)):
                self.nonfinite += judge.after_write(findings, pieces)
            measured.convert_seconds += time.perf_counter() - started
            consumed += filled.scheduled.chunk.bytes_read
            self.bytes_read += filled.scheduled.chunk.bytes_read
            # The buffer behind `filled` is read into again as soon as the stream goes on.
            del filled, convert
            self.ledger.after_chunk()
            self.lifecycle.enter(number, "reading", consumed)
        self.lifecycle.enter(number, "converting", 0)
        started = time.perf_counter()
        found = guarded(number, converter.finish), guarded(number, planes.spots)
        self.nonfinite += judge.after_layer(*found, layer.pieces)
        measured.convert_seconds += time.perf_counter() - started

    def _module(self, layer: LayerPlan, banks: LayerBanks) -> PreparedExperts:
        assert self.workspace is not None and self.crossovers is not None
        routes = layer.routes
        if self.plan.policy.policy.grouped_max_tokens == "measure":
            routes = self.crossovers.settle(routes, banks.spec, banks.tensors)
            self.measured[layer.layer].routes = routes
        facts = LayerFacts(
            layer=layer.layer,
            format=layer.source.scheme.format,
            spec=banks.spec,
            expert_ids=layer.part.expert_ids,
            experts=self.plan.checkpoint.model.experts,
            shard=self.plan.shard,
            policy=self.plan.policy,
            routes=routes,
        )
        return PreparedExperts(facts, banks.tensors, self.workspace)

    def _report(self, seconds: float, uss: int) -> LoadReport:
        assert self.workspace is not None
        tensors = [tensor for module in self.modules.values() for tensor in module.banks()]
        tensors += self.workspace.tensors()
        planned = self.plan.to_dict()
        for entry in planned["layers"]:
            entry["scale_dtypes"] = scale_dtypes(self.modules[entry["layer"]].spec)
        return LoadReport(
            planned=planned,
            layers=self.measured,
            memory=self.ledger.measured(tensors, uss, self.staging),
            seconds=seconds,
            bytes_read=self.bytes_read,
            nonfinite=tuple(self.nonfinite),
        )

    def _log_routes(self) -> None:
        """One warning for each distinct reason that a fast route was not admitted."""
        log_missing_core()
        routes = {layer.layer: layer.routes for layer in self.plan.layers}
        for reason, layers in fallbacks(routes, self.plan.policy).items():
            _LOG.warning("layers %s run the legacy route: %s", sorted(set(layers)), reason)

    def abandon(self) -> None:
        """Drop everything after a failure: banks of finished layers, cache, staging, reader."""
        self.ledger.stop()
        if self.reader is not None:
            self.reader.close()
        if self.staging is not None:
            self.staging.close()
        if self.cache is not None:
            self.cache.discard()
        self.modules.clear()
        self.banks_ahead.clear()
        self.crossovers = None
        self.workspace = self.staging = self.reader = self.banks = self.cache = None
        # Last: whatever an observer does now, the memory is back.
        for error in self.lifecycle.fail():
            _LOG.error("%s", error)

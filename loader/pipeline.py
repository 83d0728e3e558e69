"""Pipeline: the one loop of a load: read, convert, release, measure; all or nothing."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Protocol

import torch

from loader import memory
from loader.checkpoint.family import FAMILIES, Family
from loader.checkpoint.folder import open_checkpoint
from loader.checkpoint.hub import HubSource, locate
from loader.checkpoint.source import Source
from loader.converter import ConversionCache, LayerBanks, LayerConverter, guarded
from loader.crossover import Crossovers, Share
from loader.experts import LayerFacts, LoadedExperts, PreparedExperts
from loader.layer_plan import LayerPlan, scale_dtypes
from loader.lifecycle import Lifecycle, Observer
from loader.native import log_missing_core
from loader.plan import DEFAULT_STAGING_BYTES, Plan, plan_checkpoint
from loader.policy import Policy
from loader.report import LayerMeasured, LoadReport, MemoryMeasured
from loader.route import FAST_ROUTES
from loader.scale_planes import ScalePlanes
from loader.shard import Shard
from loader.stream import DirectReads, Filled, Lent, ReadAhead, Scheduled, Staging
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

    ``source``: a local folder, or a Hub repo (``owner/name``) at ``revision``.
    ``layers``: indices outright, None for all MoE layers.
    ``staging_bytes``: budget of the read buffers. ``observers`` get every ``LayerEvent``.
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
    baseline = memory.host_memory()
    resolved = (policy or Policy()).resolve()
    families = FAMILIES if family is None else (family, *FAMILIES)
    # What an error would keep alive lives in the frames below this one, which are cleared.
    with memory.nothing_kept():
        opened = locate(source, revision)
        try:
            make_plan = partial(
                plan_checkpoint,
                shard=shard or Shard(),
                policy=resolved,
                layers=layers,
                device=device,
                staging_bytes=staging_bytes,
                card_memory=card_memory,
            )
            return load_plan(
                make_plan(open_checkpoint(opened, families)), observers, baseline, began, peers
            )
        finally:
            if opened is not source:
                opened.close()


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
    try:
        return run.run()
    except BaseException:
        run.abandon()
        raise


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
        self.baseline = baseline
        self.began = began
        self.lifecycle = Lifecycle([layer.layer for layer in plan.layers], observers, began)
        self.measured = {layer.layer: LayerMeasured() for layer in plan.layers}
        self.modules: dict[int, PreparedExperts] = {}
        self.nonfinite: list[str] = []
        self.bytes_read = 0
        self.peak = memory.HostPeak()
        self.workspace: Workspace | None = None
        self.crossovers: Crossovers | None = None
        self.staging: Staging | None = None
        self.reader: ReadAhead | DirectReads | None = None
        self.banks: LayerBanks | None = None
        self.cache: ConversionCache | None = None

    def run(self) -> LoadedExperts:
        """Load every layer of the plan."""
        plan = self.plan
        for layer in plan.layers:
            self.lifecycle.enter(layer.layer, "planned", plan.read_bytes(layer.layer))
        with self.peak:
            with memory.allocating("the workspace", plan.workspace_bytes):
                self.workspace = Workspace(
                    plan.scratch_bytes,
                    plan.layers[0].part.expert_ids,
                    plan.checkpoint.model.experts,
                    plan.device,
                )
            self.crossovers = Crossovers(
                plan.implementation, self.workspace, plan.top_k, self.share
            )
            self.staging = Staging(plan.buffers, plan.buffer_bytes)
            reads = DirectReads if plan.direct else ReadAhead
            self.reader = reads(plan.checkpoint.source, plan.checkpoint.catalog.files, self.staging)
            stream = self.reader.stream(self._schedule())
            for layer in plan.layers:
                self._layer(layer, stream)
            uss = memory.host_uss()
            self.reader.close()
            self.staging.close()
            memory.return_to_system()
        seconds = time.perf_counter() - self.began
        experts = LoadedExperts(self.modules, self._report(seconds, uss))
        self._log_routes()
        _LOG.info("%s", experts.report.memory_line())
        return experts

    def _schedule(self) -> Iterator[Scheduled]:
        for layer in self.plan.layers:
            chunks = layer.chunks(self.plan.chunk_limit)
            for number, chunk in enumerate(chunks, 1):
                yield Scheduled(layer.layer, chunk, number == len(chunks))

    def _layer(self, layer: LayerPlan, stream: Iterator[Filled | Lent]) -> None:
        plan, measured = self.plan, self.measured[layer.layer]
        number = layer.layer
        self.lifecycle.enter(number, "reading")
        nbytes = layer.spec.nbytes()
        with memory.allocating("the banks", nbytes, number):
            self.banks = LayerBanks.allocate(layer.spec, plan.device, layer.zero_point)
            self.cache = ConversionCache(layer.spec, plan.device)
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
        stream: Iterator[Filled | Lent],
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
            self.peak.sample()
            self.lifecycle.enter(number, "reading", consumed)
        self.lifecycle.enter(number, "converting", 0)
        started = time.perf_counter()
        self.nonfinite += judge.after_finish(guarded(number, converter.finish))
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
        measured = MemoryMeasured(
            resident=memory.storage_bytes([*tensors, *self.workspace.tensors()]),
            baseline=self.baseline.anonymous,
            peak=self.peak.anonymous,
            after=memory.host_memory().anonymous,
            host_anonymous_peak=self.peak.anonymous,
            host_file_peak=self.peak.file,
            host_file_baseline=self.baseline.file,
            host_uss_peak=uss,
        )
        planned = self.plan.to_dict()
        for entry in planned["layers"]:
            entry["scale_dtypes"] = scale_dtypes(self.modules[entry["layer"]].spec)
        return LoadReport(
            planned=planned,
            layers=self.measured,
            memory=measured,
            seconds=seconds,
            bytes_read=self.bytes_read,
            nonfinite=tuple(self.nonfinite),
        )

    def _log_routes(self) -> None:
        """One warning for each distinct reason that a fast route was not admitted."""
        log_missing_core()
        reasons: dict[str, list[int]] = {}
        for layer in self.plan.layers:
            for fast, route in zip(FAST_ROUTES, layer.routes, strict=False):
                if route.route == "legacy" and self.plan.policy.switch(fast) != "off":
                    reasons.setdefault(route.reason, []).append(layer.layer)
        for reason, layers in reasons.items():
            _LOG.warning("layers %s run the legacy route: %s", sorted(set(layers)), reason)

    def abandon(self) -> None:
        """Drop everything after a failure: banks of finished layers, cache, staging, reader."""
        self.peak.stop()
        if self.reader is not None:
            self.reader.close()
        if self.staging is not None:
            self.staging.close()
        if self.cache is not None:
            self.cache.discard()
        self.modules.clear()
        self.crossovers = None
        self.workspace = self.staging = self.reader = self.banks = self.cache = None
        # Last: whatever an observer does now, the memory is back.
        for error in self.lifecycle.fail():
            _LOG.error("%s", error)

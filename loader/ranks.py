"""Ranks: one load over the ranks of a process group, each its own shard, all of them or none.

Built on ``torch.distributed`` alone. Every rank plans, the plans are compared, and only then is
payload read; a rank that fails takes the others down with its error.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from loader import memory
from loader.checkpoint.family import Family
from loader.checkpoint.source import Source
from loader.errors import ShardError
from loader.experts import LoadedExperts, PreparedExperts
from loader.lifecycle import Observer
from loader.meeting import DEFAULT_TIMEOUT_SECONDS, Meeting, RankError
from loader.pipeline import load_with
from loader.plan import DEFAULT_STAGING_BYTES, Plan
from loader.policy import Policy, ResolvedPolicy
from loader.render import ranks_text
from loader.report import LoadReport, MemoryMeasured
from loader.rollback import ended_once
from loader.shard import Shard
from loader.table import merged_layers

Facts = dict[str, Any]


class DisagreementError(RankError):
    """The ranks were given different settings, or see different checkpoints; on every rank."""


class CoverError(ShardError):
    """Shards that leave a part out or hold one twice; raised alike on every rank."""


class RankedExperts(LoadedExperts):
    """This rank's experts, with the JSON reports of all ranks (``cards``, by rank)."""

    def __init__(
        self,
        modules: Mapping[int, PreparedExperts],
        report: LoadReport,
        cards: Sequence[Mapping[str, Any]],
    ) -> None:
        super().__init__(modules, report)
        self.cards = tuple(cards)

    def cards_text(self) -> str:
        """The table of all cards: predicted, resident, peak and host USS of each."""
        return ranks_text(self.cards)


class Ranks(Meeting):
    """The other ranks, as the pipeline speaks to them (``loader.pipeline.Peers``)."""

    _shared = 0

    def agree(self, plan: Plan) -> None:
        """Compare this rank's plan with all others.

        Raises :class:`DisagreementError` or :class:`CoverError`, the same on every rank.
        """
        everyone = self.gather("plan", facts_of(plan))
        compare(everyone)
        check_cover(everyone)
        # Rank 0, unless it has nothing to load, and so nothing to measure.
        self.first = next(rank for rank, one in enumerate(everyone) if "experts" in one)

    def share(self, tokens: int) -> int:
        """The first rank's crossover: all ranks measure theirs in one order, layer by layer."""
        self._shared += 1
        return self.from_first(f"crossover/{self._shared}", lambda: tokens)

    def agree_on_settings(self, settings: Facts) -> None:
        """Compare what was asked for. Raises :class:`DisagreementError` on every rank."""
        compare(self.gather("settings", settings))


def shard_of(rank: int, ranks: int, tp_size: int, ep_size: int = 1) -> Shard:
    """The shard of one rank: TP ranks lie next to each other, ``rank = ep_rank * tp + tp_rank``.

    Raises :class:`ShardError` where the sizes do not make the number of ranks.
    """
    if tp_size * ep_size != ranks:
        raise ShardError(
            "tp_size times ep_size is not the number of ranks",
            expected=f"{ranks} ranks",
            found=f"{tp_size} x {ep_size}",
        )
    return Shard(rank % tp_size, tp_size, rank // tp_size, ep_size)


@ended_once
def load(
    source: str | os.PathLike[str] | Source,
    device: str | torch.device = "cpu",
    shard: Shard | None = None,
    policy: Policy | None = None,
    layers: Iterable[int] | None = None,
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    observers: Iterable[Observer] = (),
    *,
    tp_size: int | None = None,
    ep_size: int = 1,
    group: dist.ProcessGroup | None = None,
    timeout: float = DEFAULT_TIMEOUT_SECONDS,
    card_memory: int | None = None,
    family: Family | None = None,
    revision: str | None = None,
) -> RankedExperts:
    """:func:`loader.load` on every rank of ``group`` (None: all ranks), which all call it.

    ``shard`` is this rank's own; None lays ``tp_size`` (None: what ``ep_size`` leaves) and
    ``ep_size`` over the ranks, see :func:`shard_of`. ``layers=[]`` is a rank with nothing to load.
    ``timeout`` in seconds: how long a rank may show no progress.

    Returns this rank's experts when all ranks have theirs. Where one fails, every rank raises and
    holds nothing: its own error, or a :class:`RankError` that quotes the first one. Settings or
    checkpoints that differ raise :class:`DisagreementError` on all, before any payload is read.
    """
    ranks = Ranks(group, timeout)
    with memory.nothing_kept(on_card=str(device).startswith("cuda")):
        try:
            return _load(
                ranks,
                source,
                device,
                _Sizes(shard, tp_size, ep_size),
                policy or Policy(),
                None if layers is None else sorted(set(layers)),
                staging_bytes,
                [*observers, ranks],
                card_memory=card_memory,
                family=family,
                revision=revision,
            )
        except (DisagreementError, CoverError):
            ranks.leave()  # raised alike on every rank: there is nothing to tell
            raise
        except Exception as error:
            first = ranks.fail(error)
            if first is error:
                raise
            raise first from None
        except BaseException as error:
            ranks.fail(error)  # an interrupt stays one, whoever failed first
            raise


class _Sizes(NamedTuple):
    """How a rank was told which shard is its own."""

    shard: Shard | None
    tp_size: int | None
    ep_size: int

    def of(self, rank: int, ranks: int) -> Shard:
        """The shard of this rank."""
        if self.shard is not None:
            return self.shard
        tp_size = self.tp_size or max(ranks // self.ep_size, 1)
        return shard_of(rank, ranks, tp_size, self.ep_size)

    def settings(self) -> Facts:
        """What must be equal on all ranks."""
        if self.shard is not None:
            return {"tp_size": self.shard.tp_size, "ep_size": self.shard.ep_size}
        return {"tp_size": self.tp_size, "ep_size": self.ep_size}


def _load(
    ranks: Ranks,
    source: str | os.PathLike[str] | Source,
    device: str | torch.device,
    sizes: _Sizes,
    policy: Policy,
    layers: list[int] | None,
    *rest: Any,
    **more: Any,
) -> RankedExperts:
    resolved = policy.resolve()
    settings = _settings(resolved)
    if layers != []:  # a rank with nothing to load has no shard either
        settings |= sizes.settings()
        settings |= {"layers": layers, "family": repr(more["family"])}
        settings |= {"revision": more["revision"]}
    ranks.agree_on_settings(settings)
    modules: Mapping[int, PreparedExperts]
    if layers == []:
        ranks.gather("plan", _settings(resolved))
        modules, report = {}, _nothing(source, device, resolved)
    else:
        shard = sizes.of(ranks.rank, ranks.size)
        loaded = load_with(ranks, source, device, shard, policy, layers, *rest, **more)
        modules, report = loaded, loaded.report
    cards = ranks.gather("report", report.to_dict())
    ranks.commit()
    return RankedExperts(modules, report, cards)


def _nothing(
    source: str | os.PathLike[str] | Source,
    device: str | torch.device,
    policy: ResolvedPolicy,
) -> LoadReport:
    """The report of a rank that loaded no layer."""
    name = os.fspath(source) if isinstance(source, (str, os.PathLike)) else source.name
    sizes = ("predicted_resident", "predicted_peak", "workspace", "staging", "conversion")
    planned: dict[str, Any] = {
        "schema": 1,
        "source": name,
        "device": str(device),
        "shard": Shard().to_dict(),
        "policy": policy.to_dict(),
        "layers": [],
        "skipped": [],
        "left_alone": {},
        "memory": {**dict.fromkeys(sizes, 0), "card": None, "fits": None},
    }
    now = memory.host_memory()
    measured = MemoryMeasured(baseline=now.anonymous, peak=now.anonymous, after=now.anonymous)
    measured.host_uss_peak = memory.host_uss()
    return LoadReport(planned=planned, layers={}, memory=measured, seconds=1e-9, bytes_read=0)


def facts_of(plan: Plan) -> Facts:
    """What one rank brings to the comparison: its shard, and everything that must be equal.

    Crossovers that are measured at load are no part of it: they are taken from rank 0.
    """
    measured = plan.policy.policy.grouped_max_tokens == "measure"
    agreed = plan.fingerprint()["layers"]
    facts: Facts = {
        "shard": plan.shard.to_dict(),
        "experts": plan.checkpoint.model.experts,
        **_settings(plan.policy),
        "kind of device": plan.device.type,
        "the checkpoint (headers, by digest)": checkpoint_digest(plan),
        "layers": merged_layers([layer for layer, *_ in agreed]),
    }
    for layer, form, layout, *routes in agreed:
        facts[f"format of layer {layer}"] = form
        facts[f"metadata layout of layer {layer}"] = layout
        facts[f"routes of layer {layer}"] = [r[2:] for r in routes] if measured else routes
    return facts


def _settings(policy: ResolvedPolicy) -> Facts:
    """The policy in force, by name, as it is shown; where it came from is told, not compared."""
    values = policy.to_dict()
    origins = values.pop("origins")
    return {"origins": origins, **{f"policy.{name}": value for name, value in values.items()}}


def checkpoint_digest(plan: Plan) -> str:
    """A digest of the model's facts and of every tensor's name, file, dtype, shape and place."""
    catalog = plan.checkpoint.catalog
    digest = hashlib.sha256(repr((plan.checkpoint.model, catalog.files, catalog.shapes)).encode())
    digest.update("\0".join(catalog.names).encode())
    for column in (catalog.file, catalog.dtype, catalog.shape_id, catalog.begin, catalog.end):
        digest.update(column.tobytes())
    return digest.hexdigest()[:16]


_NOT_COMPARED = ("shard", "origins")


def compare(everyone: Sequence[Facts]) -> None:
    """Raise :class:`DisagreementError` for facts that differ; ``everyone`` is by rank.

    A rank that has not got a fact is not compared in it.
    """
    names = dict.fromkeys(n for one in everyone for n in one if n not in _NOT_COMPARED)
    differ = [n for n in names if len({repr(one[n]) for one in everyone if n in one}) > 1]
    if not differ:
        return
    first, rest = differ[0], differ[1:]
    more = f" (and on {', '.join(rest[:3])}{', ...' if len(rest) > 3 else ''})" if rest else ""
    raise DisagreementError(
        f"the ranks do not agree on {first}{more}",
        expected="the same on every rank",
        found=_by_value(everyone, first),
    )


def _by_value(facts: Sequence[Facts], name: str) -> str:
    """``off on ranks 0, 2; on (environment QPN_M1=1) on rank 1``."""
    ranks: dict[str, list[int]] = {}
    for rank, one in enumerate(facts):
        if name in one:
            origin = one.get("origins", {}).get(name.removeprefix("policy."))
            ranks.setdefault(f"{one[name]}{f' ({origin})' if origin else ''}", []).append(rank)
    return "; ".join(
        f"{value} on rank{'s' if len(own) > 1 else ''} {merged_layers(own)}"
        for value, own in ranks.items()
    )


def check_cover(everyone: Sequence[Facts]) -> None:
    """Together the ranks hold the model: each part of each expert on as many ranks as every other.

    Raises :class:`CoverError`. A rank that loads nothing holds nothing.
    """
    loading = [one for one in everyone if "experts" in one]
    held: Counter[tuple[int, int]] = Counter()
    for one in loading:
        shard = Shard(**one["shard"])
        held.update((shard.tp_rank, expert) for expert in shard.experts_of(one["experts"]))
    wanted = [
        (tp_rank, expert)
        for one in loading[:1]
        for expert in range(one["experts"])
        for tp_rank in range(one["shard"]["tp_size"])
    ]
    if len({held[part] for part in wanted}) < 2:
        return
    tp_rank, expert = min(wanted, key=lambda part: held[part])
    tp_most, most = max(wanted, key=lambda part: held[part])
    raise CoverError(
        "the shards of the ranks do not make one model",
        experts=str(expert),
        expected="every slice of every expert on one rank, or on as many as every other",
        found=f"slice {tp_rank} of expert {expert} on {held[tp_rank, expert]} ranks, "
        f"slice {tp_most} of expert {most} on {held[tp_most, most]}",
    )

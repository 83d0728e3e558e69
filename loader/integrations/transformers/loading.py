"""Loading: one model: planned on meta, its plain weights by Transformers, the rest from banks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch

from loader import memory
from loader.checkpoint.catalog import NOT_INDEXED
from loader.checkpoint.hub import HubSource
from loader.checkpoint.linears import find_linears
from loader.errors import CapacityError, CheckpointError, LoaderError
from loader.experts import LoadedExperts
from loader.integrations.transformers.report import ModelMemory, ModelReport
from loader.integrations.transformers.skeleton import (
    Seat,
    await_modules,
    seat_experts,
    seat_linears,
    stored_bytes,
)
from loader.integrations.transformers.values import Unread
from loader.lifecycle import Observer
from loader.linears import LinearLoader, LinearPlan, plan_linear
from loader.linears.plan import BANK, WHOLE
from loader.pieces import Places
from loader.pipeline import load_plan
from loader.plain import DTYPES, PIECE_BYTES, read_tensor
from loader.plan import Plan
from loader.table import human_bytes

_LOG = logging.getLogger(__name__)


class ModelLoad:
    """State of one running load; ``plan`` is that of the routed experts."""

    def __init__(
        self,
        plan: Plan,
        framework: str,
        observers: Sequence[Observer],
        began: float,
    ) -> None:
        self.plan = plan
        self.framework = framework
        self.observers = observers
        self.began = began
        self.memory = ModelMemory()
        self.peak = memory.HostPeak()
        self.values: dict[str, Unread] = {}
        self.unused: list[str] = []
        self.linears: list[tuple[LinearPlan, str]] = []
        self.read_bytes = 0
        self.seats: dict[int, str] = {}
        self._stack = ExitStack()
        self._failed: list[Exception] = []
        self._dtype = torch.float32
        self._loader: LinearLoader | None = None
        self._turn = threading.Lock()  # Transformers may ask from several threads
        self._experts: LoadedExperts | None = None

    def run(self, cls: Any, config: Any, dtype: torch.dtype) -> Any:
        """The loaded model. Raises a :class:`LoaderError`."""
        self._dtype = dtype
        with self._stack:
            model, info = self._build(cls, config)
            self._account(info)
            assert self._loader is not None
            for plan, path in self.linears:
                if plan.served == BANK:
                    model.set_submodule(path, self._loader.bank(plan))
                    self.peak.sample()
            self._loader.close()
            now = memory.host_baseline()
            experts = load_plan(self.plan, self.observers, now, time.perf_counter())
            for layer, path in self.seats.items():
                model.set_submodule(path, experts[layer])
            self._experts = experts
        self.read_bytes += self._loader.bytes_read + experts.report.bytes_read
        return model

    def _build(self, cls: Any, config: Any) -> tuple[Any, Mapping[str, Any]]:
        from loader.integrations.transformers import hook

        try:
            return hook.build(
                cls, config, self.values, self._dtype, self.plan.device, self._prepare
            )
        except LoaderError:
            raise
        except Exception as error:
            if self._failed:  # Transformers keeps what a read raised for a summary of its own
                raise self._failed[0] from None
            raise CheckpointError(
                f"Transformers {self.framework} could not load the model",
                file=self.plan.checkpoint.source.name,
                expected=f"weights that {cls.__name__} takes",
                found=f"{type(error).__name__}: {error}",
            ) from error

    def _prepare(self, model: Any) -> None:
        """Everything that can be refused is refused here, with the model on meta."""
        from loader.integrations.transformers import hook

        plan, checkpoint = self.plan, self.plan.checkpoint
        ties = model.all_tied_weights_keys
        sources = find_linears(checkpoint)
        self.seats = seat_experts(model, {layer.layer: layer for layer in plan.layers})
        tied = frozenset((*ties, *ties.values()))
        seats = seat_linears(model, sources, hook.Names(model), tied)
        self._plan_linears(seats)
        self._fill(seats)
        banks = [path for linear, path in self.linears if linear.served == BANK]
        await_modules(model, [*self.seats.values(), *banks])
        self._loader = LinearLoader(
            checkpoint,
            [linear for linear, _ in self.linears],
            plan.device,
            plan.implementation,
            plan.policy,
            plan.staging_limit,
        )
        kept = hook.kept_in_fp32(model, self._dtype)
        self._predict(stored_bytes(model, frozenset(ties), kept))
        if isinstance(checkpoint.source, HubSource):
            # Only now: what configs and headers are enough to refuse costs no download.
            checkpoint.source.fetch()
        self.memory.baseline = memory.host_baseline().anonymous
        self._stack.enter_context(self.peak)
        self._stack.enter_context(self._loader)

    def _plan_linears(self, seats: Sequence[Seat]) -> None:
        plan, catalog = self.plan, self.plan.checkpoint.catalog
        places = Places(catalog.file, catalog.begin)
        reasons: dict[str, list[str]] = {}
        for seat in seats:
            if seat.path is None:
                continue
            linear = plan_linear(
                seat.source,
                plan.policy,
                plan.implementation,
                places,
                self._dtype,
                WHOLE,
                seat.plain_because,
            )
            self.linears.append((linear, seat.path))
            if linear.served != BANK:
                reasons.setdefault(linear.reason, []).append(linear.name)
        for reason, names in reasons.items():
            _LOG.warning("%d linears are dequantized (%s, ...): %s", len(names), names[0], reason)

    def _fill(self, seats: Sequence[Seat]) -> None:
        """Name everything that Transformers may load; its own report lists what it has no use for.

        Biases of dequantized linears are plain tensors, those of banks go with their bank.
        """
        catalog = self.plan.checkpoint.catalog
        own = np.zeros(len(catalog.names), bool)
        loaded = {layer.layer for layer in self.plan.layers}
        for row in np.flatnonzero(catalog.layer >= 0).tolist():
            own[row] = True
            if int(catalog.layer[row]) not in loaded:
                self.unused.append(catalog.names[row])
        for seat in seats:
            own[list(seat.source.rows)] = True
            if seat.path is None:
                self.unused += [catalog.names[row] for row in seat.source.rows]
        for linear, _ in self.linears:
            if linear.served != BANK:
                shape = (linear.n, linear.k)
                read = partial(self._dequantize, linear)
                self.values[f"{linear.name}.weight"] = self._unread(read, shape, self._dtype)
            elif linear.source.bias is not None:
                own[linear.source.bias] = True
        for row in np.flatnonzero(~own & (catalog.reason != NOT_INDEXED)).tolist():
            name, on_disk, size = catalog.describe(row)
            dtype = DTYPES.get(on_disk, torch.uint8)
            self.values[name] = self._unread(partial(self._read, row), size, dtype)

    def _unread(self, read: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Unread:
        return Unread(read, shape, dtype, self._failed.append)

    def _read(self, row: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        checkpoint = self.plan.checkpoint
        catalog = checkpoint.catalog
        self.read_bytes += int(catalog.end[row] - catalog.begin[row])
        return read_tensor(checkpoint.source, catalog, row, dtype, device)

    def _dequantize(
        self, linear: LinearPlan, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        assert self._loader is not None
        with self._turn:
            return self._loader.dequantize(linear, dtype).to(device)

    def _predict(self, plain_bytes: int) -> None:
        """Sizes from headers and the model on meta. Raises :class:`CapacityError`."""
        assert self._loader is not None
        plan, linears = self.plan, self._loader
        catalog = plan.checkpoint.catalog
        m = self.memory
        m.workspace = plan.workspace_bytes + linears.scratch_bytes
        m.experts = plan.resident_bytes - plan.workspace_bytes
        for linear, _ in self.linears:
            if linear.served == BANK:
                bias = linear.source.bias
                m.linears += linear.nbytes(self._dtype)
                m.linears += 0 if bias is None else int(catalog.end[bias] - catalog.begin[bias])
        m.plain = plain_bytes
        m.predicted_resident = m.workspace + m.experts + m.linears + m.plain
        m.predicted_peak = m.predicted_resident + max(
            linears.staging_bytes + linears.conversion_bytes + PIECE_BYTES,
            plan.staging_bytes + plan.conversion_bytes,
        )
        linears.predicted_peak = m.predicted_peak
        card = plan.card_bytes
        if card is not None and m.predicted_peak > card:
            raise CapacityError(
                f"the model does not fit: {m.predicted_peak - card} bytes too many",
                expected=f"a predicted peak within {card} bytes of free memory",
                found=f"{m.predicted_peak} bytes on {plan.device} "
                f"(experts {human_bytes(m.experts)}, linears {human_bytes(m.linears)}, "
                f"plain {human_bytes(m.plain)})",
            )

    def _account(self, info: Mapping[str, Any]) -> None:
        """Every weight of the model came from the checkpoint, and what was not used is known."""
        missing = sorted(info["missing_keys"])
        if missing or self._failed:
            if self._failed:
                raise self._failed[0]
            raise CheckpointError(
                f"the checkpoint lacks weights of the model ({len(missing)})",
                file=self.plan.checkpoint.source.name,
                tensor=missing[0],
                expected="every weight of the model",
                found=f"none of {', '.join(missing[:4])}",
            )
        self.unused += [name for name, value in self.values.items() if value.read_as is None]
        if self.unused:
            shown = ", ".join(self.unused[:4])
            _LOG.info("%d tensors have no place in the model: %s", len(self.unused), shown)

    def report(self, model: torch.nn.Module) -> ModelReport:
        """What the finished load did."""
        assert self._experts is not None and self._loader is not None
        m = self.memory
        workspace = next(iter(self._experts.values())).workspace
        kept = [*model.parameters(), *model.buffers(), *workspace.tensors(), self._loader.scratch]
        m.resident = memory.storage_bytes(kept)
        m.peak = self.peak.anonymous
        return ModelReport(
            source=self.plan.checkpoint.source.name,
            device=str(self.plan.device),
            dtype=str(self._dtype).removeprefix("torch."),
            framework=f"transformers {self.framework}",
            experts=self._experts.report,
            linears=tuple({**one.to_dict(), "path": path} for one, path in self.linears),
            plain=tuple(n for n, value in self.values.items() if value.read_as is not None),
            unused=tuple(sorted(self.unused)),
            memory=m,
            seconds=time.perf_counter() - self.began,
            read_bytes=self.read_bytes,
        )

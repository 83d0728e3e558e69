"""Load of linears: each is streamed through one staging ring, into its bank or a plain weight."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType

import torch

from loader import memory
from loader.bank import TILE, initialise, named
from loader.checkpoint.folder import Checkpoint
from loader.converter import (
    ConversionCache,
    LayerBanks,
    LayerConverter,
    cache_bytes,
    card_cache_bytes,
    guarded,
)
from loader.errors import ConversionError
from loader.linears.module import PreparedLinear
from loader.linears.plan import BANK, RUN_BYTES, LinearPlan
from loader.linears.staging import stage_linears
from loader.native import Implementation, implementation_for
from loader.plain import PIECE_BYTES, read_tensor
from loader.plan import DEFAULT_STAGING_BYTES
from loader.policy import ResolvedPolicy
from loader.reference import TEMPORARY_BYTES
from loader.stream import Scheduled, open_reader, open_staging
from loader.verdict import Judge

_FP16_MOST = torch.finfo(torch.float16).max


def _numbers_at_once(run: LinearPlan) -> int:
    """fp32 weights of a run that are dequantized at a time: whole tiles, one at least."""
    tile = TILE * run.k
    return min(max(RUN_BYTES // 4 // tile, 1), run.bank.n_padded // TILE) * tile


def _host() -> Implementation:
    host = implementation_for(torch.device("cpu"))
    assert host is not None and host.dequantize is not None, "the host always has the reference"
    return host


class LinearLoader:
    """Loads the linears of some plans on one card; a context that owns staging and reader.

    ``staging_bytes``, ``conversion_bytes`` and ``scratch_bytes`` are known before it is entered.
    ``scratch`` fp32 is shared by all modules that :meth:`bank` makes; ``seconds``, ``bytes_read``
    and ``nonfinite`` (values that ``nonfinite="warn"`` kept) grow with each call.
    ``predicted_peak`` is told where memory runs out: that of the banks here, until the caller sets
    that of its whole load.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        plans: Iterable[LinearPlan],
        device: torch.device,
        implementation: Implementation,
        policy: ResolvedPolicy,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
    ) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._implementation = implementation
        # What the card's code cannot dequantize is converted on the host, a run at a time.
        on_card = implementation.dequantize is not None
        self._run_device = device if on_card else torch.device("cpu")
        self._run_code = implementation if on_card else _host()
        self._keep = policy.policy.nonfinite == "warn"
        self.seconds = 0.0
        self.bytes_read = 0
        self.nonfinite: list[str] = []
        wanted = tuple(plans)
        self._shape = stage_linears(
            checkpoint, wanted, self._run_device, self._run_code, staging_bytes
        )
        self.staging_bytes = self._shape.nbytes
        self.conversion_bytes = self._conversion(wanted)
        self.scratch_bytes = max((plan.scratch_bytes(implementation) for plan in wanted), default=0)
        self.predicted_peak = (
            sum(plan.bank.nbytes() for plan in wanted if plan.served == BANK)
            + self.scratch_bytes
            + self.staging_bytes
            + self.conversion_bytes
        )

    def __enter__(self) -> LinearLoader:
        """Allocates scratch and staging; until then everything is a number."""
        with self._allocating("the scratch of linears", self.scratch_bytes):
            # Zeroed so that its pages are there: what is counted as resident is resident.
            shape = (self.scratch_bytes // 4,)
            self.scratch = memory.fresh(shape, torch.float32, self._device).zero_()
        self._staging = open_staging(self._shape)
        self._reader = open_reader(self._shape, self._staging)
        return self

    def _allocating(
        self, what: str, nbytes: int, layer: int | None = None
    ) -> AbstractContextManager[None]:
        return memory.allocating(what, nbytes, layer, self.predicted_peak)

    def _conversion(self, plans: tuple[LinearPlan, ...]) -> int:
        """Most that converting one linear takes beside the ring: the temporaries of one run."""
        on_card = self._run_code.card is not None
        beside = (
            (card_cache_bytes if on_card else cache_bytes)(plan.spec)
            + 3 * plan.pieces().nbytes
            + (0 if plan.served == BANK else max(self._run_bytes(run) for run in plan.runs()))
            for plan in plans
        )
        spare = self._implementation.temporary_bytes + PIECE_BYTES
        if on_card and any(plan.served != BANK for plan in plans):
            spare += TEMPORARY_BYTES  # of the reference, which gives their weights
        return max(beside, default=0) + spare

    def _run_bytes(self, run: LinearPlan) -> int:
        return run.bank.nbytes() + 4 * _numbers_at_once(run)

    def bank(self, plan: LinearPlan, with_bias: bool = True) -> PreparedLinear:
        """The linear as a module that serves it from its bank; its bias joins the product."""
        tensors = self._convert(plan, self._device)
        row = plan.source.bias
        bias = None
        if row is not None and with_bias:
            first, count = plan.part.outs or (0, plan.n)
            bias = self._plain(row)
            if count != bias.numel():
                bias = bias[first : first + count].clone()
        return PreparedLinear(plan, tensors, bias, self.scratch)

    def dequantize(
        self, plan: LinearPlan, dtype: torch.dtype, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The weight ``(N, K)`` in ``dtype``, rounded once from fp32; ``out`` takes it if given.

        Raises :class:`ConversionError` where ``dtype`` cannot hold a weight.
        """
        if out is None:
            nbytes = plan.n * plan.k * dtype.itemsize
            with self._allocating(f"the weight of {plan.name}", nbytes, plan.source.source.layer):
                out = memory.fresh((plan.n, plan.k), dtype, self._device)
        first_out, first_in = (plan.part.outs or (0, 0))[0], plan.part.offset
        for run in plan.runs():
            tensors = self._convert(run, self._run_device)
            row, column = (run.part.outs or (0, 0))[0] - first_out, run.part.offset - first_in
            target = out[row : row + run.n, column : column + run.k]
            self._weights(run, tensors, target)
        return out

    def _weights(self, run: LinearPlan, tensors: list[torch.Tensor], target: torch.Tensor) -> None:
        """Dequantize one run, some tiles at a time, into a view of the weight."""
        dequantize = self._run_code.dequantize
        assert dequantize is not None
        spec = run.spec.to_ints()
        tiles = run.bank.n_padded // TILE
        work = torch.empty(_numbers_at_once(run), dtype=torch.float32, device=self._run_device)
        each = work.numel() // (TILE * run.k)
        for first in range(0, tiles, each):
            last = min(first + each, tiles)
            count = min(last * TILE, run.bank.n) - first * TILE
            weights = work[: count * run.k].view(count, run.k)
            call = partial(dequantize, weights, 1, 0, (first, last), tensors, spec)
            guarded(run.source.source.layer, call)
            weights = weights[: run.n - first * TILE]  # without the pad of an odd N
            if target.dtype == torch.float16 and weights.abs().max() > _FP16_MOST:
                raise ConversionError(
                    "float16 cannot hold a weight of a linear",
                    layer=run.source.source.layer,
                    tensor=run.name,
                    expected=f"|w| of at most {_FP16_MOST:g}; bfloat16 and float32 hold it",
                    found=f"{float(weights.abs().max()):g}",
                )
            target[first * TILE : first * TILE + len(weights)].copy_(weights)

    def _plain(self, row: int) -> torch.Tensor:
        catalog = self._checkpoint.catalog
        self.bytes_read += int(catalog.end[row] - catalog.begin[row])
        return read_tensor(self._checkpoint.source, catalog, row, device=self._device)

    def _convert(self, plan: LinearPlan, device: torch.device) -> list[torch.Tensor]:
        """The bank tensors of one plan or run, read and converted."""
        started = time.perf_counter()
        source, catalog = plan.source.source, self._checkpoint.catalog
        with self._allocating(f"the bank of {plan.name}", plan.bank.nbytes(), source.layer):
            banks = LayerBanks.allocate(plan.spec, device, plan.zero_point)
            cache = ConversionCache(plan.spec, device)
        if plan.bank.n != plan.n:
            # No source writes the pad of an odd N, and the closing pass looks at every column.
            for tensor in banks.tensors:
                tensor.zero_()
            initialise(plan.bank, named(plan.bank, banks.tensors), plan.zero_point)
        judge = Judge(
            source,
            plan.part,
            self._keep,
            lambda row: catalog.names[row],
            lambda row: catalog.files[int(catalog.file[row])],
        )
        converter = LayerConverter(banks, cache)
        try:
            for filled in self._reader.stream(self._schedule(plan)):
                for findings, pieces in guarded(
                    source.layer, partial(filled.convert, converter, judge.name_of)
                ):
                    self.nonfinite += judge.after_write(findings, pieces)
                self.bytes_read += filled.scheduled.chunk.bytes_read
            found = guarded(source.layer, converter.finish), guarded(source.layer, converter.spots)
            self.nonfinite += judge.after_layer(*found, plan.pieces)
        finally:
            cache.discard()
        memory.merge_pages(banks.tensors)
        self.seconds += time.perf_counter() - started
        return banks.tensors

    def _schedule(self, plan: LinearPlan) -> Iterator[Scheduled]:
        chunks = self._shape.chunks(plan)
        for number, chunk in enumerate(chunks, 1):
            yield Scheduled(plan.source.source.layer, chunk, number == len(chunks))

    def close(self) -> None:
        """Give staging and reader back; what was loaded stays. May be called again."""
        self._reader.close()
        self._staging.close()
        memory.return_to_system()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

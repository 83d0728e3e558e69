"""Crossover: up to which token count ``qpn_grouped`` beats ``legacy``, measured while loading.

Asked for by ``Policy(grouped_max_tokens="measure")``: each geometry of a load is measured once, on
its first finished layer, with random activations and distinct random experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import torch

from loader import native
from loader.bank import LayerSpec
from loader.native import Implementation
from loader.route import RouteRange, limits, settle
from loader.workspace import Workspace

Share = Callable[[int], int]
"""Turns this rank's measurement into the one that all ranks use: rank 0's."""

_RUNS = 3
_DTYPES = (torch.bfloat16, torch.float16)


class Crossovers:
    """The measured crossovers of one load, by geometry."""

    def __init__(
        self,
        implementation: Implementation,
        workspace: Workspace,
        top_k: int,
        share: Share = lambda tokens: tokens,
    ) -> None:
        self._dtype = next(dtype for dtype in _DTYPES if dtype in implementation.dtypes)
        self._workspace = workspace
        self._top_k = top_k
        self._share = share
        self._measured: dict[LayerSpec, int] = {}

    def settle(
        self, routes: tuple[RouteRange, ...], spec: LayerSpec, banks: Sequence[torch.Tensor]
    ) -> tuple[RouteRange, ...]:
        """The routes of a finished layer, with the crossover measured in place of the bound."""
        most = limits(routes)[1]
        if not most:
            return routes
        if spec not in self._measured:
            self._measured[spec] = self._share(self._measure(spec, banks, most))
        return settle(routes, self._measured[spec])

    def _measure(self, spec: LayerSpec, banks: Sequence[torch.Tensor], most: int) -> int:
        """The largest power of two up to ``most`` at which grouped is not slower; 1 for none.

        Found by bisection: more tokens favour ``legacy``, which dequantizes an expert once however
        many rows it has.
        """
        low, high = 0, most.bit_length() - 1
        while low < high:
            middle = (low + high + 1) // 2
            tokens = 1 << middle
            grouped = self._seconds(tokens, [0, tokens], spec, banks)
            if grouped <= self._seconds(tokens, [0, 0], spec, banks):
                low = middle
            else:
                high = middle - 1
        return 1 << low

    def _seconds(
        self, tokens: int, route_limits: list[int], spec: LayerSpec, banks: Sequence[torch.Tensor]
    ) -> float:
        """Best of a few steps under the given routes, each with experts of its own."""
        device = self._workspace.scratch.device
        experts = self._workspace.expert_map.numel()
        generator = torch.Generator("cpu").manual_seed(tokens)
        x = _random((tokens, spec.w13.k), generator).to(device, self._dtype)
        weights = torch.full(
            (tokens, self._top_k), 1 / self._top_k, dtype=torch.float32, device=device
        )
        out = torch.empty_like(x)
        seconds = []
        for _ in range(_RUNS):
            ids = _random((tokens, experts), generator).topk(self._top_k).indices.to(device)
            if device.type != "cpu":
                # What other layers would have left in the card's cache by then: not these banks.
                self._workspace.scratch.zero_()
            with _Clock(device) as clock:
                native.moe(
                    out,
                    self._workspace.scratch,
                    x,
                    ids,
                    weights,
                    self._workspace.expert_map,
                    banks,
                    spec.to_ints(),
                    route_limits,
                )
            seconds.append(clock.seconds)
        return min(seconds)


class _Clock:
    """Seconds that the work of a block took: on a card by its own clock, from event to event."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events = (
            []
            if device.type == "cpu"
            else [torch.Event(device, enable_timing=True) for _ in range(2)]
        )
        self.seconds = 0.0

    def __enter__(self) -> _Clock:
        for first in self._events[:1]:
            first.record(torch.accelerator.current_stream(self._device))
        self._started = perf_counter()
        return self

    def __exit__(self, *raised: object) -> None:
        self.seconds = perf_counter() - self._started
        for last in self._events[1:]:
            last.record(torch.accelerator.current_stream(self._device))
            last.synchronize()
            self.seconds = self._events[0].elapsed_time(last) / 1e3


def _random(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

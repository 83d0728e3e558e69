"""Route: which kernel serves which token counts of a layer, decided by capability, with reasons.

Admission is a pure function of layer, implementation and policy. It never looks at a name of a
model or of a path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from loader.bank import LayerSpec
from loader.crossover_table import known_crossover
from loader.errors import PolicyError, UnsupportedError
from loader.native import Implementation, why_nothing_serves
from loader.policy import ResolvedPolicy

DEFAULT_GROUPED_MAX_TOKENS = 8
"""Last token count of ``qpn_grouped`` where neither policy, table nor measurement says."""

MEASURED_GROUPED_MOST = 256
"""Most tokens that a measured crossover can reach: a power of two; scratch is planned for it."""

#: The routes that read banks directly, in the order of their token counts.
FAST_ROUTES = ("qpn_m1", "qpn_grouped")


@dataclass(frozen=True)
class RouteRange:
    """One range of token counts and the route that serves it; ``last`` None means no end."""

    first: int
    last: int | None
    route: str
    implementation: str
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """The form of the JSON report."""
        return {
            "tokens": [self.first, self.last],
            "route": self.route,
            "implementation": self.implementation,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Router:
    """How many experts a token is sent to, of how many."""

    top_k: int
    experts: int

    @property
    def rows_per_token(self) -> float:
        """Rows that a token gives each expert on average."""
        return self.top_k / self.experts


ONE_EXPERT = Router(1, 1)
"""Of a linear, which gets every token."""


@dataclass(frozen=True)
class Need:
    """One capability that a fast route needs: its name, a test, what it needs, what was found."""

    capability: str
    holds: Callable[[LayerSpec, Implementation], bool]
    needs: Callable[[Implementation], str]
    found: Callable[[LayerSpec], str]


NEEDS: tuple[Need, ...] = (
    Need(
        "quantized experts",
        lambda spec, code: spec.w13.kind in code.kinds,
        lambda code: " or ".join(code.kinds) + " codes",
        lambda spec: "not quantized" if spec.w13.kind == "plain" else spec.w13.kind,
    ),
    Need(
        "metadata layout",
        lambda spec, code: spec.w13.layout in code.layouts,
        lambda code: " or ".join(code.layouts),
        lambda spec: spec.w13.layout,
    ),
    Need(
        "group size",
        lambda spec, code: all(not bank.group % code.group_multiple for bank in spec.banks),
        lambda code: f"a multiple of {code.group_multiple}",
        lambda spec: f"{spec.w13.group} and {spec.w2.group}",
    ),
    Need(
        "sizes",
        lambda spec, code: all(not bank.k % code.row_multiple for bank in spec.banks),
        lambda code: f"hidden and intermediate sizes that are multiples of {code.row_multiple}",
        lambda spec: f"{spec.w13.k} and {spec.w2.k}",
    ),
)


def known_device(device: str | torch.device) -> torch.device:
    """The device of that name; :class:`UnsupportedError` where torch knows none.

    A card gets its number: the current one where the name has none.
    """
    try:
        known = torch.device(device)
    except (RuntimeError, TypeError) as error:  # TypeError: nothing that could name one
        raise UnsupportedError(
            "no such device", expected="cpu, cuda or cuda:N", found=repr(device)
        ) from error
    if known.type != "cuda" or not torch.cuda.is_available():
        return known
    count = torch.cuda.device_count()
    if known.index is not None and known.index >= count:
        raise UnsupportedError(
            "no such device", expected=f"cuda:0 to cuda:{count - 1}", found=repr(str(device))
        )
    return torch.device("cuda", torch.cuda.current_device() if known.index is None else known.index)


def require_implementation(
    device: torch.device, implementation: Implementation | None
) -> Implementation:
    """The implementation of a device; :class:`UnsupportedError` where there is none."""
    if implementation is None:
        raise UnsupportedError(
            "this build has no native code for the device, and the reference never stands in on "
            "a card",
            expected="an implementation for the device, or device='cpu'",
            found=f"device {device}" + (f": {why}" if (why := why_nothing_serves(device)) else ""),
        )
    return implementation


def decide(
    layer: int | None,
    spec: LayerSpec,
    implementation: Implementation,
    policy: ResolvedPolicy,
    source_reason: str,
    router: Router = ONE_EXPERT,
) -> tuple[RouteRange, ...]:
    """Routes of one layer, covering every token count from 1.

    ``router`` is that of the layer.
    Raises :class:`PolicyError` where a switch is ``on`` and the layer or the device lacks a
    capability; nothing has been allocated then.
    """
    grouped_last, why = _grouped_last(spec, implementation, policy, router)
    ranges = [
        _fast("qpn_m1", 1, 1, layer, spec, implementation, policy),
        _fast("qpn_grouped", 2, grouped_last, layer, spec, implementation, policy),
    ]
    if grouped_last < 2:
        return (ranges[0], RouteRange(2, None, "legacy", implementation.name, why))
    if why and ranges[1].route != "legacy":
        ranges[1] = replace(ranges[1], reason=f"{ranges[1].reason}, {why}")
    legacy = f"more than {grouped_last} tokens" if ranges[1].route != "legacy" else "any tokens"
    if spec.w13.kind == "plain":
        legacy = source_reason
    ranges.append(RouteRange(grouped_last + 1, None, "legacy", implementation.name, legacy))
    return tuple(ranges)


def _grouped_last(
    spec: LayerSpec, implementation: Implementation, policy: ResolvedPolicy, router: Router
) -> tuple[int, str]:
    """Last token count of ``qpn_grouped``, and why where it is not the default or the policy's."""
    limit = policy.policy.grouped_max_tokens
    known = known_crossover(implementation.architecture, spec.w13.kind)
    last, why = DEFAULT_GROUPED_MAX_TOKENS, ""
    if limit == "measure":
        last, why = MEASURED_GROUPED_MOST, "crossover measured at load"
    elif limit is not None:
        last = int(limit)
    elif known is not None:
        last = known.tokens(router.rows_per_token)
        why = f"crossover as measured on {known.measured_on}"
    if implementation.most_tokens is None or spec.w13.kind not in implementation.kinds:
        return last, why
    most = implementation.most_tokens(spec, router.top_k)
    if last <= most:
        return last, why
    return most, f"at most {most} tokens in one step" + (f", {why}" if why else "")


def settle(ranges: Sequence[RouteRange], tokens: int) -> tuple[RouteRange, ...]:
    """Ranges whose crossover from ``qpn_grouped`` to ``legacy`` was measured at so many tokens."""
    m1, grouped, legacy = ranges
    grouped = replace(grouped, last=tokens, reason=f"{grouped.reason}: {tokens} tokens")
    reason = f"faster from {tokens + 1} tokens on, measured at load"
    legacy = replace(legacy, first=tokens + 1, reason=reason)
    return (m1, grouped, legacy) if tokens >= grouped.first else (m1, legacy)


def _fast(
    route: str,
    first: int,
    last: int,
    layer: int | None,
    spec: LayerSpec,
    implementation: Implementation,
    policy: ResolvedPolicy,
) -> RouteRange:
    switch = policy.switch(route)
    asked = policy.describe(route)
    if switch == "off":
        return RouteRange(first, last, "legacy", implementation.name, asked)
    lacking = _lacking(route, spec, implementation)
    if lacking is None:
        return RouteRange(first, last, route, implementation.name, f"admitted, {asked}")
    capability, needs, found = lacking
    if switch == "on":
        raise PolicyError(
            f"{asked} cannot be honoured: {capability}", layer=layer, expected=needs, found=found
        )
    reason = f"{route} needs {capability}: {needs}; found {found}"
    return RouteRange(first, last, "legacy", implementation.name, reason)


def _lacking(
    route: str, spec: LayerSpec, implementation: Implementation
) -> tuple[str, str, str] | None:
    """The first capability that is missing: its name, what is needed, what was found."""
    if route not in implementation.routes:
        return ("native operator", f"{route} for this device", implementation.name)
    for need in NEEDS:
        if not need.holds(spec, implementation):
            return (need.capability, need.needs(implementation), need.found(spec))
    return None


def fast_tokens(ranges: Sequence[RouteRange]) -> int:
    """Last token count that a fast route serves, 0 where none does."""
    return max((r.last or 0 for r in ranges if r.route != "legacy"), default=0)


def limits(ranges: Sequence[RouteRange]) -> list[int]:
    """What the operator takes: last token count of qpn_m1 and of qpn_grouped, 0 for off."""
    last = {r.route: r.last or 0 for r in ranges}
    return [last.get(route, 0) for route in FAST_ROUTES]


def fallbacks(
    routes: Mapping[int, Sequence[RouteRange]], policy: ResolvedPolicy
) -> dict[str, list[int]]:
    """Layers by the reason that they lack a fast route which was not turned off."""
    reasons: dict[str, list[int]] = {}
    for layer, ranges in routes.items():
        for fast, route in zip(FAST_ROUTES, ranges, strict=False):
            if route.route == "legacy" and policy.switch(fast) != "off":
                reasons.setdefault(route.reason, []).append(layer)
    return reasons

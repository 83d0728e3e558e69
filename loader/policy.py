"""Policy: what the user asks of routes and metadata, read once and frozen with every layer.

This is the only module of the library that reads the environment (docs/routes.md).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from types import NoneType
from typing import Any

from loader.errors import PolicyError

SWITCHES = ("auto", "on", "off")
LAYOUTS = ("wide", "record", "compact")
ROUNDINGS = ("exact", "fused_bias")
NONFINITE = ("error", "warn")

MOST_TOKENS = (1 << 31) - 1
"""Largest ``grouped_max_tokens``: scratch for so many tokens is still a number of 64 bits."""

#: Environment variable of each switch.
ENVIRONMENT = {
    "qpn_m1": "QPN_M1",
    "qpn_grouped": "QPN_GROUPED",
    "compact_metadata": "QPN_COMPACT_METADATA",
}
_FROM_ENVIRONMENT = {"0": "off", "1": "on"}


@dataclass(frozen=True)
class Policy:
    """What is asked of a load. Every field has a safe default.

    ``qpn_m1``, ``qpn_grouped``, ``compact_metadata``: ``"auto"``, ``"on"`` or ``"off"``. An
    ``auto`` switch is filled from the environment by :meth:`resolve`.
    ``layout``: a metadata layout by name, over ``compact_metadata``.
    ``awq_rounding``: ``"exact"`` or ``"fused_bias"`` (docs/routes.md).
    ``grouped_max_tokens``: last token count of ``qpn_grouped``; None means what is known of such a
    card (``loader/crossover_table.py``), else 8; ``"measure"`` asks for a measurement at load.
    ``nonfinite``: ``"error"``, or ``"warn"`` to keep NaN and Inf scales and list them in the
    report.

    Raises :class:`PolicyError` for any other value.
    """

    qpn_m1: str = "auto"
    qpn_grouped: str = "auto"
    compact_metadata: str = "auto"
    layout: str | None = None
    awq_rounding: str = "exact"
    grouped_max_tokens: int | str | None = None
    nonfinite: str = "error"

    def __post_init__(self) -> None:
        for name, allowed in (
            *((switch, SWITCHES) for switch in ENVIRONMENT),
            ("layout", (*LAYOUTS, None)),
            ("awq_rounding", ROUNDINGS),
            ("nonfinite", NONFINITE),
        ):
            value = getattr(self, name)
            # An array compares element by element: what is no text is none of the words.
            if not isinstance(value, (str, NoneType)) or value not in allowed:
                raise PolicyError(
                    f"Policy.{name} is not valid",
                    expected=" or ".join(repr(option) for option in allowed),
                    found=repr(value),
                )
        limit = self.grouped_max_tokens
        whole = isinstance(limit, int) and 2 <= limit <= MOST_TOKENS
        if not (limit is None or whole or (isinstance(limit, str) and limit == "measure")):
            raise PolicyError(
                "Policy.grouped_max_tokens is not valid",
                expected=f"None, 'measure' or a whole number of at least 2, at most {MOST_TOKENS}",
                found=repr(limit),
            )

    def resolve(self, environment: Mapping[str, str] | None = None) -> ResolvedPolicy:
        """Fill every ``auto`` switch from ``environment`` (default: the process environment).

        Raises :class:`PolicyError` for a variable that is neither unset, ``0`` nor ``1``.
        """
        variables = os.environ if environment is None else environment
        values: dict[str, str] = {}
        origins: dict[str, str] = {}
        for switch, variable in ENVIRONMENT.items():
            values[switch], origins[switch] = self._switch(switch, variable, variables)
        return ResolvedPolicy(replace(self, **values), origins)

    def _switch(self, switch: str, variable: str, variables: Mapping[str, str]) -> tuple[str, str]:
        setting = variables.get(variable)
        # A bad variable is an error even where the argument wins: it would surprise the next load.
        if setting is not None and setting not in _FROM_ENVIRONMENT:
            raise PolicyError(
                f"environment variable {variable} is not valid",
                expected="unset, 0 or 1",
                found=repr(setting),
            )
        asked: str = getattr(self, switch)
        if asked != "auto":
            return asked, "argument"
        if setting is not None:
            return _FROM_ENVIRONMENT[setting], f"environment {variable}={setting}"
        return "auto", "default"


@dataclass(frozen=True)
class ResolvedPolicy:
    """A policy with the environment filled in, and where each switch came from."""

    policy: Policy
    origins: Mapping[str, str]

    def switch(self, name: str) -> str:
        """``auto``, ``on`` or ``off`` for one of the three switches."""
        return str(getattr(self.policy, name))

    def describe(self, name: str) -> str:
        """The switch as it is shown to people, such as ``qpn_m1=off (environment QPN_M1=0)``."""
        return f"{name}={self.switch(name)} ({self.origins[name]})"

    def layout_for(self, kind: str) -> tuple[str, str]:
        """Metadata layout for one kind of code, and the reason.

        Raises :class:`PolicyError` where the layout asked for does not exist for this kind.
        """
        if kind == "plain":
            return "plain", "not quantized: no metadata"
        if self.policy.layout is not None:
            if kind == "e2m1" and self.policy.layout == "record":
                raise PolicyError(
                    "the metadata layout asked for does not exist for this format",
                    expected="wide or compact for NVFP4",
                    found="layout='record'",
                )
            return self.policy.layout, "asked by Policy.layout"
        if self.switch("compact_metadata") == "off":
            return "wide", self.describe("compact_metadata")
        return "compact", self.describe("compact_metadata")

    def to_dict(self) -> dict[str, Any]:
        """The settings in force and the origin of each switch."""
        return {**asdict(self.policy), "origins": dict(self.origins)}

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """Names of the settings, for command lines and tables."""
        return tuple(field.name for field in fields(Policy))

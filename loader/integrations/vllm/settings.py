"""Settings: what ``--model-loader-extra-config`` says to this load format, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loader.errors import PolicyError
from loader.plan import DEFAULT_STAGING_BYTES
from loader.policy import Policy, ResolvedPolicy


@dataclass(frozen=True)
class Settings:
    """``policy``: of the load; ``staging_bytes``: budget of the read buffers."""

    policy: Policy = field(default_factory=Policy)
    staging_bytes: int = DEFAULT_STAGING_BYTES


def read_settings(given: object) -> Settings:
    """The settings of one load, from the JSON object that vLLM was given.

    Raises :class:`PolicyError` for a key or a value that is not known.
    """
    keys = ("policy", "staging_bytes")
    whole = _object(given or {}, keys, "--model-loader-extra-config")
    switches = _object(whole.get("policy", {}), ResolvedPolicy.field_names(), "policy")
    staging = whole.get("staging_bytes", DEFAULT_STAGING_BYTES)
    if not isinstance(staging, int) or isinstance(staging, bool) or staging < 1:
        raise PolicyError(
            "staging_bytes of --model-loader-extra-config is not valid",
            expected="a whole number of bytes",
            found=repr(staging),
        )
    return Settings(Policy(**switches), staging)


def _object(given: object, keys: tuple[str, ...], what: str) -> Mapping[str, Any]:
    unknown = [key for key in given if key not in keys] if isinstance(given, Mapping) else None
    if unknown is None or unknown:
        raise PolicyError(
            f"{what} is not valid",
            expected=f"an object with keys among {', '.join(keys)}",
            found=repr(given) if unknown is None else ", ".join(map(repr, unknown)),
        )
    assert isinstance(given, Mapping)
    return given

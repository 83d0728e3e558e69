"""compressed-tensors checkpoints (llm-compressor): ``pack-quantized`` int4 and NVFP4.

Source of the format: compressed-tensors ``compressors/``, ``quantization/quant_args.py``. Groups of
``config_groups`` are matched to modules as the tool matches them: an exact name or a ``re:``
pattern first, then the class name ``Linear``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from types import NoneType
from typing import Any

from loader.checkpoint.model import CONFIG
from loader.checkpoint.scheme import (
    INT4_PACK_PARTS,
    NVFP4_PACK_PARTS,
    IntegerSettings,
    Scheme,
    Unhandled,
)
from loader.checkpoint.wildcard import Numbered, Wildcard, loosen, loosen_expression
from loader.errors import CheckpointError, UnsupportedError

_ANY_LINEAR = "Linear"


@dataclass(frozen=True)
class Names:
    """A list of module names: exact ones, and ``re:`` patterns."""

    exact: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]
    loosened: tuple[Wildcard, ...]

    def match(self, module: str) -> bool:
        """As the tool matches: equal, or ``re.match`` of a pattern."""
        return module in self.exact or any(one.match(module) for one in self.patterns)


@dataclass(frozen=True)
class CompressedDialect:
    """Groups in the order of the config, each with its targets, and the ignore list."""

    groups: tuple[tuple[Names, Scheme | Unhandled], ...]
    ignore: Names
    transforms: tuple[tuple[Names, Names], ...] = ()
    """Targets, and exceptions, of what happens to activations at run time."""
    name: str = "compressed-tensors"

    def scheme(self, module: str) -> Scheme | Unhandled:
        """The group whose targets name the module, else the one that targets every Linear."""
        for targets, but in self.transforms:
            if (targets.match(module) or _ANY_LINEAR in targets.exact) and not but.match(module):
                return Unhandled(
                    "weights that need their activations transformed (transform_config)"
                )
        for targets, scheme in self.groups:
            if targets.match(module):
                return scheme
        for targets, scheme in self.groups:
            if _ANY_LINEAR in targets.exact:
                return scheme
        return Unhandled("no config group targets this module")

    def excluded(self, module: str) -> frozenset[bool]:
        """Entries match exactly, or ``re:`` by ``re.match``: one reading."""
        return frozenset((self.ignore.match(module),))

    @cached_property
    def _numbered(self) -> Numbered:
        lists = (self.ignore, *(targets for targets, _ in self.groups), *chain(*self.transforms))
        return Numbered.of(chain(*(names.loosened for names in lists)))

    def tells_apart(self, module: str) -> bool:
        """Where a name or an expression with a number in it may match."""
        return self._numbered.tell_apart(module)


def _names(key: str, entries: object) -> Names:
    if entries is not None and not isinstance(entries, list):
        raise CheckpointError(
            f"{key} of quantization_config is not a list of names",
            file=CONFIG,
            expected="a list or null",
            found=repr(entries),
        )
    texts = [str(entry) for entry in entries or ()]
    patterns = []
    for text in (text for text in texts if text.startswith("re:")):
        try:
            patterns.append(re.compile(text.removeprefix("re:")))
        except (re.error, OverflowError, RecursionError) as error:
            raise CheckpointError(
                "a pattern of quantization_config is no regular expression",
                file=CONFIG,
                expected="a regular expression behind re:",
                found=f"{text!r} ({error})",
            ) from None
    # One alternation instead of a loop, since lists can name every layer; but groups are numbered
    # and flags are set for a whole expression, so patterns that may use either stay alone.
    alone = [one for one in patterns if one.groups or "(?" in one.pattern]
    plain = [f"(?:{one.pattern})" for one in patterns if one not in alone]
    joined = (re.compile("|".join(plain)),) if plain else ()
    loosened = [loosen_expression(one.pattern) for one in patterns] + [
        loosen(text) for text in texts if not text.startswith("re:")
    ]
    return Names(frozenset(texts), (*joined, *alone), tuple(loosened))


def read_compressed(quantization: Mapping[str, Any]) -> CompressedDialect:
    """Build the dialect from ``quantization_config``; formats not loaded stay per module."""
    groups = quantization.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError(
            "quantization_config has no config_groups",
            file=CONFIG,
            expected="an object of groups",
            found=repr(groups)[:80],
        )
    top = quantization.get("format")
    read = []
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            raise CheckpointError(
                f"config group {name} is not an object", file=CONFIG, found=repr(group)[:80]
            )
        read.append((_names("targets", group.get("targets")), _scheme(group, top)))
    ignore = _names("ignore", quantization.get("ignore"))
    transforms = _transforms(quantization.get("transform_config"))
    return CompressedDialect(tuple(read), ignore, transforms)


def _transforms(config: object) -> tuple[tuple[Names, Names], ...]:
    """Transforms of inputs and outputs; those of weights alone are in the numbers already.

    Left out of the forward step they would give wrong results without a word.
    """
    if not config:
        return ()
    found = []
    for scheme in _object(_object(config).get("config_groups") or {}).values():
        for one in map(_object, _list(_object(scheme).get("apply"))):
            if one.get("location") in ("input", "output"):
                given = [(key, one.get(key)) for key in ("targets", "ignore")]
                names = [_names(k, [v] if isinstance(v, str) else v) for k, v in given]
                found.append((names[0], names[1]))
    return tuple(found)


def _object(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _no_transform("objects", value)
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise _no_transform("a list under apply", value)
    return value


def _no_transform(expected: str, found: object) -> CheckpointError:
    what = "transform_config of quantization_config is not valid"
    return CheckpointError(what, file=CONFIG, expected=expected, found=repr(found)[:80])


def _scheme(group: Mapping[str, Any], top_format: object) -> Scheme | Unhandled:
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        return Unhandled("weights not quantized by this group")
    kind, bits = weights.get("type", "int"), weights.get("num_bits")
    written = group.get("format") or top_format
    if kind == "float" and bits == 4 and written == "nvfp4-pack-quantized":
        if weights.get("group_size") != 16:
            return Unhandled(f"nvfp4-pack-quantized with group {weights.get('group_size')}")
        if weights.get("strategy") not in (None, "group", "tensor_group"):
            return Unhandled(f"nvfp4-pack-quantized with strategy {weights.get('strategy')}")
        return Scheme("nvfp4-pack-quantized", "e2m1", 16, NVFP4_PACK_PARTS, "none", "divisor")
    if kind == "int" and written == "pack-quantized":
        return _int4(weights)
    return Unhandled(f"{written} with {bits} bits of type {kind}")


def _int4(weights: Mapping[str, Any]) -> Scheme | Unhandled:
    if weights.get("num_bits") != 4:
        return Unhandled(f"pack-quantized with {weights.get('num_bits')} bits of type int")
    if weights.get("actorder") not in (None, False, "weight", "static"):
        raise UnsupportedError(
            "actorder (activation order) is not supported",
            file=CONFIG,
            expected="actorder null",
            found=repr(weights.get("actorder")),
        )
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy not in (None, "group", "channel"):
        return Unhandled(f"pack-quantized with strategy {strategy}")
    if strategy == "channel":
        # One scale for a row: the tool itself takes no group size beside it.
        if size not in (None, -1):
            raise CheckpointError(
                "strategy and group_size of quantization_config contradict each other",
                file=CONFIG,
                expected="no group_size with strategy channel",
                found=f"group_size {size!r}",
            )
        size = -1
    group = IntegerSettings(4, size, CONFIG).checked_group()
    symmetric = weights.get("symmetric")
    if not isinstance(symmetric, (bool, NoneType)):
        raise CheckpointError(
            "symmetric is not true or false",
            file=CONFIG,
            expected="a boolean",
            found=repr(symmetric),
        )
    symmetric = symmetric is not False
    parts = dict(INT4_PACK_PARTS)
    parts["weight_zero_point"] = replace(parts["weight_zero_point"], required=not symmetric)
    return Scheme("pack-quantized", "int4", group, parts, "eight" if symmetric else "stored")

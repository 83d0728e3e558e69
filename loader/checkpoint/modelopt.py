"""ModelOpt checkpoints (nvidia-modelopt): NVFP4, per model or per module.

Source of the format: modelopt ``torch/export``. ``weight_scale_2`` is a multiplier;
``input_scale`` belongs to quantized activations and is not used. The settings stand in
``hf_quant_config.json``, in ``quantization_config`` of ``config.json``, or in both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from functools import cached_property
from itertools import chain
from typing import Any

from loader.checkpoint.model import CONFIG
from loader.checkpoint.scheme import NVFP4_PARTS, Scheme, Unhandled
from loader.checkpoint.wildcard import Numbered, Wildcard, loosen
from loader.errors import CheckpointError, UnsupportedError

QUANT_CONFIG = "hf_quant_config.json"
_LOADED = ("NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8")
_NVFP4 = Scheme("modelopt-nvfp4", "e2m1", 16, NVFP4_PARTS, "none", "multiplier")


@dataclass(frozen=True)
class Excludes:
    """An exclude list: names and globs, the globs joined into one expression."""

    entries: tuple[str, ...]
    exact: frozenset[str]
    globs: re.Pattern[str] | None
    _above: dict[str, bool] = field(default_factory=dict, compare=False, repr=False)

    def select(self, module: str) -> bool:
        """Exactly or by glob."""
        return module in self.exact or (
            self.globs is not None and self.globs.match(module) is not None
        )

    def select_above(self, module: str) -> bool:
        """Whether any module above is selected; kept, since thousands have the same ones."""
        parent = module.rpartition(".")[0]
        if not parent:
            return False
        known = self._above.get(parent)
        if known is None:
            known = self._above[parent] = self.select(parent) or self.select_above(parent)
        return known

    def loosened(self) -> Iterator[Wildcard]:
        """What takes every module that an entry selects, itself or from above."""
        for entry in (*self.entries, *self.exact):
            yield loosen(entry)
            yield loosen(f"{entry}.*")


def _excludes(file: str, section: Mapping[str, Any]) -> Excludes:
    key = "exclude_modules" if "exclude_modules" in section else "ignore"
    listed = section[key]
    if listed is not None and not isinstance(listed, list):
        raise CheckpointError(
            f"{key} is not a list of names",
            file=file,
            expected="a list or null",
            found=repr(listed),
        )
    entries = tuple(str(entry) for entry in listed or ())
    globs = [translate(entry) for entry in entries if any(mark in entry for mark in "*?[")]
    return Excludes(
        entries,
        frozenset(entry.rstrip(".") for entry in entries),
        re.compile("|".join(globs)) if globs else None,
    )


@dataclass(frozen=True)
class ModelOptDialect:
    """One algorithm for the model, or one for each module, and the exclude lists by file."""

    everywhere: Scheme | Unhandled | None
    modules: Mapping[str, Scheme | Unhandled]
    excludes: Mapping[str, Excludes]
    name: str = "modelopt"

    def scheme(self, module: str) -> Scheme | Unhandled:
        """The module's own entry under MIXED_PRECISION, else the algorithm of the model."""
        if self.everywhere is not None:
            return self.everywhere
        for name in (module, *_ancestors(module)):
            if name in self.modules:
                return self.modules[name]
        return Unhandled("not listed in quantized_layers")

    def excluded(self, module: str) -> frozenset[bool]:
        """Exactly or by glob; the module itself, or (second reading) a module above it.

        Raises :class:`CheckpointError` where the two files select differently.
        """
        by_file = {
            file: frozenset(
                (own := entries.select(module), own or entries.select_above(module)),
            )
            for file, entries in self.excludes.items()
        }
        readings = list(by_file.values())
        if len(readings) == 2 and not readings[0] & readings[1]:
            raise CheckpointError(
                "the two quantization configs disagree on excluding a module",
                file=" and ".join(by_file),
                tensor=module,
                expected="the same modules excluded in both",
                found="; ".join(
                    f"{file}: {list(self.excludes[file].entries[:8])}" for file in by_file
                ),
            )
        shared = readings[0] & readings[-1] if readings else frozenset((False,))
        unlisted = self.everywhere is None and isinstance(self.scheme(module), Unhandled)
        return frozenset((True, *shared)) if unlisted else shared

    @cached_property
    def _numbered(self) -> Numbered:
        return Numbered.of(chain(*(entries.loosened() for entries in self.excludes.values())))

    def tells_apart(self, module: str) -> bool:
        """Where each module has an entry of its own, or one with a number may select it."""
        return self.everywhere is None or self._numbered.tell_apart(module)


def _ancestors(module: str) -> tuple[str, ...]:
    parts = module.split(".")
    return tuple(".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))


def read_modelopt(
    quantization: Mapping[str, Any] | None, quant_file: Mapping[str, Any] | None
) -> ModelOptDialect:
    """Build the dialect from either config or both; they must name one algorithm."""
    sections: dict[str, Mapping[str, Any]] = {}
    if quant_file is not None:
        section = quant_file.get("quantization")
        if not isinstance(section, Mapping):
            raise CheckpointError(
                "no quantization section", file=QUANT_CONFIG, expected="an object", found=section
            )
        sections[QUANT_CONFIG] = section
    if quantization and quantization.get("quant_method", "modelopt") == "modelopt":
        sections[CONFIG] = quantization
    # A file that names no algorithm leaves it to the other.
    stated = {f: s["quant_algo"] for f, s in sections.items() if s.get("quant_algo") is not None}
    algorithms = list(stated.values())
    if any(other != algorithms[0] for other in algorithms[1:]):
        raise CheckpointError(
            "the two quantization configs disagree on the algorithm",
            file=" and ".join(stated),
            expected="one quant_algo",
            found=stated,
        )
    file = next(iter(stated or sections))
    algorithm = stated.get(file)
    excludes = {name: _excludes(name, part) for name, part in sections.items() if _has_list(part)}
    if algorithm == "MIXED_PRECISION":
        return ModelOptDialect(None, _per_module(sections), excludes)
    _refuse_pre_quant_scale(file, sections[file], algorithm)
    if algorithm in _LOADED:
        _one_meaning(sections, str(algorithm))
    sized = [section for section in sections.values() if section.get("group_size") is not None]
    section = (*sized, sections[file])[0]
    return ModelOptDialect(_for_algorithm(algorithm, section), {}, excludes)


def _one_meaning(sections: Mapping[str, Mapping[str, Any]], algorithm: str) -> None:
    """Raise :class:`CheckpointError` where sizes or types are stated that contradict each other."""
    sizes = {f: s["group_size"] for f, s in sections.items() if s.get("group_size") is not None}
    if any(other != first for first in sizes.values() for other in sizes.values()):
        raise CheckpointError(
            "the two quantization configs disagree on the group",
            file=" and ".join(sizes),
            expected="one group_size",
            found=sizes,
        )
    wanted = {"num_bits": 4, "type": "float", "group_size": next(iter(sizes.values()), 16)}
    groups = sections.get(CONFIG, {}).get("config_groups")
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        stated = weights if isinstance(weights, Mapping) else {}
        for key, value in wanted.items():
            if stated.get(key) not in (None, value):
                raise CheckpointError(
                    "quant_algo and config_groups of quantization_config disagree",
                    file=CONFIG,
                    expected=f"{key} {value} for {algorithm}",
                    found=f"{key} {stated[key]} in {name}",
                )


def _has_list(section: Mapping[str, Any]) -> bool:
    return "exclude_modules" in section or "ignore" in section


def _refuse_pre_quant_scale(file: str, section: Mapping[str, Any], algorithm: object) -> None:
    if section.get("pre_quant_scale") or (algorithm in ("W4A16_AWQ", "W4A8_AWQ", "NVFP4_AWQ")):
        raise UnsupportedError(
            f"quant_algo {algorithm} scales the activations by pre_quant_scale, "
            "which is not supported",
            file=file,
            expected=" or ".join(_LOADED),
            found=algorithm,
        )


def _for_algorithm(algorithm: object, section: Mapping[str, Any]) -> Scheme | Unhandled:
    if algorithm not in _LOADED:
        return Unhandled(f"quant_algo {algorithm}")
    group = section.get("group_size", 16)
    if group != 16:
        return Unhandled(f"{algorithm} with group {group}")
    return _NVFP4


def _per_module(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Scheme | Unhandled]:
    maps = {
        file: layers
        for file, section in sections.items()
        if isinstance(layers := section.get("quantized_layers"), Mapping)
    }
    found = list(maps.values())
    if any(other != found[0] for other in found[1:]):
        differ = sorted(
            name for name in {*found[0], *found[1]} if found[0].get(name) != found[1].get(name)
        )
        raise CheckpointError(
            "the two quantization configs disagree on quantized_layers",
            file=" and ".join(maps),
            tensor=differ[0],
            expected="the same algorithms in both",
            found="; ".join(f"{file}: {layers.get(differ[0])}" for file, layers in maps.items()),
        )
    for layers in found:
        return {
            str(name): _for_algorithm(entry.get("quant_algo"), entry)
            if isinstance(entry, Mapping)
            else Unhandled(repr(entry))
            for name, entry in layers.items()
        }
    raise CheckpointError(
        "MIXED_PRECISION without quantized_layers",
        file=" and ".join(sections),
        expected="an object of modules",
        found="none",
    )

"""Family: how a model family names its experts. A family is data; adding one is adding a row.

A pattern is the module name below the layers' prefix, with ``{layer}``, ``{expert}`` and
``{projection}``; a pattern without ``{expert}`` names experts fused on a leading axis. The prefix
(``model.``, ``model.language_model.``, none, ...) is found in the checkpoint, not assumed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loader.checkpoint.scan import ALONE, NO_EXPERT, scan_kinds
from loader.errors import LoaderError

Ints = npt.NDArray[np.int64]

# No leading zeros: two spellings of one number would be two sources for one slot.
NUMBER = "(?:0|[1-9][0-9]{0,8})"
_NUMBER = re.compile(NUMBER)

PROJECTIONS = ("gate", "up", "down", "gate_up")
GATE, UP, DOWN, GATE_UP = range(4)

#: Prefixes of draft models that some checkpoints carry beside the model itself.
DRAFT_PREFIXES = ("mtp.", "model.mtp.", "draft.", "eagle.")


@dataclass(frozen=True)
class Family:
    """Names of one family.

    ``pattern`` such as ``layers.{layer}.mlp.experts.{expert}.{projection}``; ``projections`` maps
    ``gate``, ``up``, ``down`` (or ``gate_up``, ``down`` for fused experts) to the names on disk.
    """

    name: str
    pattern: str
    projections: Mapping[str, str]

    def __post_init__(self) -> None:
        if not (
            isinstance(self.pattern, str)
            and isinstance(self.projections, Mapping)
            and set(map(type, self.projections.values())) <= {str}
        ):
            raise LoaderError(
                f"family {self.name} is not valid",
                expected="a pattern, and a mapping of projections to names",
                found=f"{self.pattern!r} and {self.projections!r}",
            )
        wanted = {"gate", "up", "down"} if "{expert}" in self.pattern else {"gate_up", "down"}
        if set(self.projections) != wanted or len(set(self.projections.values())) != len(wanted):
            raise LoaderError(
                f"family {self.name} does not name its projections",
                expected=f"distinct names for {sorted(wanted)}",
                found=dict(self.projections),
            )
        for field in ("{layer}", "{expert}", "{projection}"):
            times = self.pattern.count(field)
            if times != 1 and (times or field != "{expert}"):
                raise LoaderError(
                    f"the pattern of family {self.name} is not valid",
                    expected=f"{field} exactly once",
                    found=self.pattern,
                )

    def regex(self) -> str:
        """The pattern as a regular expression with unnamed groups: layer, (expert), projection."""
        text = re.escape(self.pattern)
        text = text.replace(re.escape("{layer}"), f"({NUMBER})")
        text = text.replace(re.escape("{expert}"), f"({NUMBER})")
        names = "|".join(re.escape(name) for name in self.projections.values())
        return text.replace(re.escape("{projection}"), f"({names})")

    @property
    def counts_behind_experts(self) -> bool:
        """Whether a number behind the one ``.experts.`` of a name is its expert's, or it has none.

        Then names that differ in that number alone have the same parse but for it, and a name
        without that component has none.
        """
        behind = self.pattern.partition(_EXPERTS)[2]
        if behind.startswith("{expert}."):
            return _EXPERTS not in f".{behind}."
        fused = behind.startswith("{projection}") and "{expert}" not in self.pattern
        return fused and not any(word[:1].isdigit() for word in self.projections.values())

    def module(self, layer: int, expert: int, projection: str) -> str:
        """The module name below the prefix; ``expert`` is unused where experts are fused."""
        text = self.pattern.replace("{layer}", str(layer)).replace("{expert}", str(expert))
        return text.replace("{projection}", self.projections[projection])


_EXPERTS = ".experts."
_HF = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}
_FUSED = {"gate_up": "gate_up_proj", "down": "down_proj"}

FAMILIES: tuple[Family, ...] = (
    # Qwen2-MoE, Qwen3-MoE, Qwen3-Next, Qwen3.5, DeepSeek-V2/V3, GLM-4-MoE, Mixtral from GPTQModel
    Family("mlp", "layers.{layer}.mlp.experts.{expert}.{projection}", _HF),
    # Mixtral, MiniMax
    Family("mixtral", "layers.{layer}.block_sparse_moe.experts.{expert}.{projection}", _MIXTRAL),
    # Mixtral written through transformers 5
    Family("mixtral-hf5", "layers.{layer}.block_sparse_moe.experts.{expert}.{projection}", _HF),
    Family("mlp-fused", "layers.{layer}.mlp.experts.{projection}", _FUSED),
    Family("mixtral-fused", "layers.{layer}.block_sparse_moe.experts.{projection}", _FUSED),
)


class ExpertName(NamedTuple):
    """One tensor name, parsed in full; ``expert`` is -1 for fused experts."""

    prefix: str
    family: int
    layer: int
    expert: int
    projection: int
    part: str


def split_kinds(names: Sequence[str]) -> tuple[npt.NDArray[np.int32], Ints, list[int]]:
    """The same as :func:`scan_kinds`, in Python."""
    numbers = {"": -1}
    known: dict[tuple[str, str], int] = {}
    kinds: list[int] = []
    experts: list[int] = []
    firsts: list[int] = []
    for row, name in enumerate(names):
        head, found, tail = name.partition(_EXPERTS)
        number, dot, rest = tail.partition(".")
        expert = numbers.get(number)
        if expert is None:
            expert = numbers[number] = int(number) if _NUMBER.fullmatch(number) else -1
        if not found:
            kind, expert = NO_EXPERT, -1
        elif expert < 0 or not dot or _EXPERTS in f".{rest}.":
            kind, expert = ALONE, -1
        else:
            kind = known.setdefault((head, rest), len(known))
            if kind == len(firsts):
                firsts.append(row)
        kinds.append(kind)
        experts.append(expert)
    return np.asarray(kinds, np.int32), np.asarray(experts, np.int64), firsts


class NameParser:
    """Parses tensor names against a list of families, all at once."""

    def __init__(self, families: Iterable[Family] = FAMILIES) -> None:
        self.families = tuple(families)
        self._projections = [
            {on_disk: PROJECTIONS.index(name) for name, on_disk in family.projections.items()}
            for family in self.families
        ]
        self._fused = ["{expert}" not in family.pattern for family in self.families]
        self._plain = all(family.counts_behind_experts for family in self.families)
        #: A substring of every expert name, to skip the other names cheaply.
        self.keyword = "experts" if all("experts" in f.pattern for f in self.families) else ""
        patterns = (f"(?:{family.regex()})" for family in self.families)
        # The prefix is greedy up to the last `layers.`-like start that still parses in full; parts
        # are a single component, so that `experts.0.gate_proj.lora.weight` is not an expert.
        self._regex = re.compile(rf"((?:[^.]+\.)*?)(?:{'|'.join(patterns)})(?:\.([^.]+))?")

    def parse(self, name: str) -> ExpertName | None:
        """Parse one name, or None where it is no expert's."""
        match = self._regex.fullmatch(name)
        if match is None:
            return None
        groups = match.groups()
        at = 1
        for family, fused in enumerate(self._fused):
            if groups[at] is not None:
                expert = -1 if fused else int(groups[at + 1])
                word = groups[at + 1] if fused else groups[at + 2]
                projection = self._projections[family][word]
                part = groups[-1] or ""
                return ExpertName(groups[0], family, int(groups[at]), expert, projection, part)
            at += 2 if fused else 3
        return None

    def parse_all(self, names: Sequence[str]) -> tuple[list[ExpertName], Ints, Ints]:
        """Parse many names: kinds of name, and for each name its kind (-1 for none) and expert.

        Names of one kind differ in the expert's number alone, so that each is parsed in full once:
        a checkpoint has a name for every part of every projection of every expert.
        """
        if not self._plain:
            return self._parse_each(names, range(len(names)))
        kind_of, experts, firsts = scan_kinds(names) or split_kinds(names)
        kinds: list[ExpertName] = []
        # By kind as it was found; the last two are NO_EXPERT and ALONE.
        numbers = np.full(len(firsts) + 2, -1, np.int64)
        for number, first in enumerate(firsts):
            one = self.parse(names[first])
            if one is not None:
                numbers[number] = len(kinds)
                kinds.append(one)
        ids = numbers[kind_of]
        experts = np.where(ids < 0, -1, experts)
        alone = np.flatnonzero(kind_of == ALONE)
        others, other_ids, other_experts = self._parse_each(names, alone.tolist())
        ids[alone] = np.where(other_ids < 0, -1, other_ids + len(kinds))
        experts[alone] = other_experts
        return kinds + others, ids, experts

    def _parse_each(
        self, names: Sequence[str], rows: Sequence[int]
    ) -> tuple[list[ExpertName], Ints, Ints]:
        """Some of the names one by one, each of a kind of its own."""
        found = [self.parse(name) if self.keyword in (name := names[row]) else None for row in rows]
        kinds = [one for one in found if one is not None]
        is_expert = np.fromiter((one is not None for one in found), bool, len(found))
        ids = np.where(is_expert, np.cumsum(is_expert) - 1, -1)
        experts = np.fromiter((-1 if one is None else one.expert for one in found), np.int64)
        return kinds, ids.astype(np.int64), experts


_LAYER = re.compile(r"(?:^|\.)layers\.([0-9]{1,9})\.")


def layer_of(name: str) -> int | None:
    """Layer index of any tensor name, None where it belongs to no layer."""
    match = _LAYER.search(name)
    return int(match.group(1)) if match else None


def looks_like_expert(name: str) -> bool:
    """True for names with a component ``experts``: a routed expert that no family knows."""
    return ".experts." in f".{name}."

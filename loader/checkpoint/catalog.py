"""Catalog: every tensor of a checkpoint as columns, names parsed once.

Nothing here is an object per tensor: a checkpoint of 200,000 tensors is a few arrays and one list
of names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from loader.checkpoint.family import (
    DRAFT_PREFIXES,
    FAMILIES,
    NUMBER,
    Family,
    NameParser,
    looks_like_expert,
)
from loader.checkpoint.header import DTYPES, Header
from loader.checkpoint.index import Index
from loader.errors import CheckpointError

Ints = npt.NDArray[np.int64]

#: Why a tensor is left alone, by code; experts that are loaded have no reason.
REASONS = (
    "",
    "not an expert",
    "not named by the index",
    "draft model",
)
NOT_EXPERT, NOT_INDEXED, _DRAFT = 1, 2, 3


@dataclass(frozen=True, eq=False)
class Catalog:
    """Columns over all tensors of all shards, in file order.

    ``file`` indexes ``files``; ``dtype`` indexes ``DTYPES``; ``shape_id`` indexes ``shapes``;
    ``begin`` and ``end`` are absolute byte offsets; ``layer``, ``expert``, ``projection``,
    ``part`` are -1 where a tensor is no expert's (``expert`` is -1 for fused experts too);
    ``reason`` indexes ``REASONS``.
    """

    files: tuple[str, ...]
    names: list[str]
    shapes: list[tuple[int, ...]]
    parts: list[str]
    prefix: str
    families: tuple[Family, ...]
    file: Ints
    dtype: Ints
    shape_id: Ints
    begin: Ints
    end: Ints
    layer: Ints
    expert: Ints
    projection: Ints
    part: Ints
    family: Ints
    reason: Ints
    header_bytes: int

    def describe(self, row: int) -> tuple[str, str, tuple[int, ...]]:
        """Name, dtype and shape of one tensor."""
        return self.names[row], DTYPES[self.dtype[row]], self.shapes[self.shape_id[row]]

    def module(self, row: int) -> str:
        """Module name of one expert tensor: its name without the part."""
        part = self.parts[self.part[row]]
        return self.names[row][: -len(part) - 1] if part else self.names[row]

    def expert_layers(self) -> list[int]:
        """Layers that hold routed experts, ascending."""
        return list(self._expert_layers)

    @cached_property
    def _expert_layers(self) -> tuple[int, ...]:
        return tuple(np.unique(self.layer[self.layer >= 0]).tolist())

    def other_layers(self) -> list[int]:
        """Layers of the model without routed experts, ascending."""
        return list(self._other_layers)

    @cached_property
    def _other_layers(self) -> tuple[int, ...]:
        stems = {family.pattern.partition("{layer}")[0] for family in self._families_used()}
        any_stem = "|".join(map(re.escape, stems))
        found = self._find_layers(rf"(?:{any_stem})(?P<layer>{NUMBER})(?![0-9]).*")
        return tuple(sorted(found.keys() - set(self.expert_layers())))

    def routers(self) -> dict[int, str]:
        """Name of a router's tensor by layer, for layers without experts that any family knows."""
        blocks = {f.pattern.partition(".experts.")[0] for f in self.families}
        found: dict[int, str] = {}
        for block in blocks:
            layers = re.escape(block).replace(re.escape("{layer}"), f"(?P<layer>{NUMBER})")
            found |= self._find_layers(rf"{layers}\.(?:gate|router)\..*")
        return {layer: found[layer] for layer in sorted(found.keys() - set(self.expert_layers()))}

    def _families_used(self) -> list[Family]:
        used = np.unique(self.family[self.family >= 0]).tolist()
        return [self.families[number] for number in used]

    def _find_layers(self, below_prefix: str) -> dict[int, str]:
        """A name by layer, of the tensors that are no experts and match below the prefix."""
        pattern = re.compile(re.escape(self.prefix) + below_prefix, re.DOTALL)
        rows = np.flatnonzero((self.layer < 0) & (self.reason == NOT_EXPERT)).tolist()
        matches = (pattern.fullmatch(self.names[row]) for row in rows)
        return {int(match["layer"]): match.string for match in matches if match is not None}

    def unknown_experts(self) -> list[str]:
        """Names with a component ``experts`` that no family knows and no reason covers."""
        rows = np.flatnonzero((self.layer < 0) & (self.reason == NOT_EXPERT))
        return [name for row in rows.tolist() if looks_like_expert(name := self.names[row])]


def build_catalog(
    headers: Sequence[Header], index: Index, families: Iterable[Family] = FAMILIES
) -> Catalog:
    """Join the headers of all shards and parse every name once.

    Raises :class:`CheckpointError` where the experts lie under more than one prefix.
    """
    shapes: dict[tuple[int, ...], int] = {}
    names: list[str] = []
    columns: list[tuple[npt.NDArray[np.generic], ...]] = []
    for number, header in enumerate(headers):
        ids = [shapes.setdefault(shape, len(shapes)) for shape in header.shapes]
        local = np.asarray(ids, np.int64)
        names += header.names
        columns.append(
            (
                np.full(len(header.names), number, np.int64),
                header.dtypes.astype(np.int64),
                local[header.shape_ids] if len(ids) else np.zeros(0, np.int64),
                header.begins,
                header.ends,
            )
        )
    file, dtype, shape_id, begin, end = (
        np.concatenate(part) for part in zip(*columns, strict=True)
    )
    # Each tensor of the index is in its file: equal counts leave none that it does not name.
    owned = np.ones(len(names), bool)
    if index.weight_map is not None and len(index.weight_map) != len(names):
        owned = index.weight_map.owned(headers)
    parser = NameParser(families)
    parsed = _parse(names, parser, owned)
    prefix = _choose_prefix(parsed)
    _drop_drafts(parsed, prefix)
    return Catalog(
        files=tuple(header.file for header in headers),
        names=names,
        shapes=list(shapes),
        parts=parsed.parts,
        prefix=prefix,
        families=parser.families,
        file=file,
        dtype=dtype,
        shape_id=shape_id,
        begin=begin,
        end=end,
        layer=parsed.columns[1],
        expert=parsed.columns[2],
        projection=parsed.columns[3],
        part=parsed.columns[4],
        family=parsed.columns[0],
        reason=parsed.columns[5],
        header_bytes=sum(int(header.begins[0]) if len(header.names) else 8 for header in headers),
    )


@dataclass(eq=False)
class _Parsed:
    prefixes: list[str]
    parts: list[str]
    prefix: Ints
    columns: list[Ints]


def _parse(names: list[str], parser: NameParser, owned: npt.NDArray[np.generic]) -> _Parsed:
    prefixes: dict[str, int] = {}
    parts: dict[str, int] = {}
    kinds, ids, experts = parser.parse_all(names)
    rows = [
        (
            prefixes.setdefault(kind.prefix, len(prefixes)),
            kind.family,
            kind.layer,
            kind.expert,
            kind.projection,
            parts.setdefault(kind.part, len(parts)),
        )
        for kind in kinds
    ]
    outside = (-1, -1, -1, -1, -1, -1)  # the last row: what kind -1 stands for
    table = np.asarray([*rows, outside], np.int64)[np.asarray(ids, np.int64)]
    table[:, 3] = experts
    reason = np.where(table[:, 2] < 0, NOT_EXPERT, 0)
    reason[~owned.astype(bool)] = NOT_INDEXED
    table[reason == NOT_INDEXED] = -1
    columns = [np.ascontiguousarray(table[:, column]) for column in range(1, 6)]
    return _Parsed(list(prefixes), list(parts), table[:, 0].copy(), [*columns, reason])


def _choose_prefix(parsed: _Parsed) -> str:
    used = [parsed.prefixes[number] for number in np.unique(parsed.prefix[parsed.prefix >= 0])]
    models = [prefix for prefix in used if prefix not in DRAFT_PREFIXES]
    if len(models) > 1:
        raise CheckpointError(
            "experts lie under more than one prefix, and which is the model is undecidable",
            expected="one prefix before 'layers.'",
            found=", ".join(repr(prefix) for prefix in models[:4]),
        )
    return models[0] if models else ""


def _drop_drafts(parsed: _Parsed, prefix: str) -> None:
    drafts = [number for number, name in enumerate(parsed.prefixes) if name != prefix]
    rows = np.isin(parsed.prefix, drafts)
    for column in parsed.columns[:5]:
        column[rows] = -1
    parsed.columns[5][rows] = _DRAFT

"""Tables: the tensors of one layer by projection and part, checked against the layer's scheme.

Completeness, dtypes and shapes are checked here, from headers alone; a finished table is what the
plan cuts into pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from loader.checkpoint.catalog import Catalog, Ints
from loader.checkpoint.family import DOWN, GATE, GATE_UP, PROJECTIONS, UP
from loader.checkpoint.header import DTYPES
from loader.checkpoint.model import Model
from loader.checkpoint.scheme import SCALE_ROLES, Arrangement, Part, Role, Scheme
from loader.checkpoint.wording import shown_few
from loader.errors import CheckpointError, LoaderError


@dataclass(frozen=True, eq=False)
class Table:
    """One part of one projection over all experts.

    ``rows`` are catalog rows in expert order, one for each expert, or a single one where the
    experts are fused on a leading axis (``fused``). ``shape`` is that of one expert's tensor on
    disk, without the leading axis.
    """

    projection: int
    role: Role
    arrangement: Arrangement | None
    element_bytes: int
    shape: tuple[int, ...]
    rows: Ints


@dataclass(frozen=True, eq=False)
class LayerSource:
    """One MoE layer on disk: scheme, full geometry, tables, and why it is written so.

    A linear outside the experts has this form too (``checkpoint/linears.py``): no routed experts,
    one projection in the place of W2, and no layer where it belongs to none. ``top_k`` is the
    model's, 1 where there is no router.
    """

    layer: int | None
    scheme: Scheme
    fused: bool
    experts: int
    hidden: int
    intermediate: int
    group13: int
    group2: int
    scale_dtypes: tuple[str, str]
    zeros_stored: bool
    zeros_must_be_eight: bool
    tables: tuple[Table, ...]
    reason: str
    top_k: int = 1


@dataclass(frozen=True, eq=False)
class TableReader:
    """Checks the tensors of one layer against its scheme and gathers them into tables."""

    catalog: Catalog
    model: Model
    layer: int | None
    scheme: Scheme
    fused: bool

    def read(self, groups: Mapping[tuple[int, str], tuple[Part, Ints]], reason: str) -> LayerSource:
        """Tables of the layer from its rows by (projection, part); ``reason`` is its scheme's.

        Raises :class:`CheckpointError` for missing tensors, wrong dtypes and shapes.
        """
        projections = (GATE_UP, DOWN) if self.fused else (GATE, UP, DOWN)
        self._complete(groups, projections)
        hidden, intermediate = self._geometry(groups)
        group13, group2 = (
            (hidden, intermediate) if self.scheme.group == -1 else (self.scheme.group,) * 2
        )
        sizes = {
            GATE: {"n": intermediate, "k": hidden, "g": -(-hidden // group13)},
            DOWN: {"n": hidden, "k": intermediate, "g": -(-intermediate // group2)},
        }
        sizes[UP] = sizes[GATE]
        sizes[GATE_UP] = {**sizes[GATE], "n": 2 * intermediate}
        tables = [
            table
            for (projection, name), (part, rows) in groups.items()
            if part.role is not Role.UNUSED
            and (table := self.table(projection, name, part, rows, sizes[projection])) is not None
        ]
        zeros = {t.projection for t in tables if t.role in (Role.ZEROS_GN, Role.ZEROS_NG)}
        if zeros and zeros != set(projections):
            raise self._error(
                "zero points are stored for some projections only",
                groups[projections[0], next(iter(self.scheme.parts))][1][:1],
                "all projections, or none",
                ", ".join(PROJECTIONS[p] for p in sorted(zeros)),
            )
        return LayerSource(
            layer=self.layer,
            scheme=self.scheme,
            fused=self.fused,
            experts=self.model.experts,
            hidden=hidden,
            intermediate=intermediate,
            group13=group13,
            group2=group2,
            scale_dtypes=self._scale_dtypes(tables),
            zeros_stored=bool(zeros),
            zeros_must_be_eight=self.scheme.zero_points == "eight",
            tables=tuple(tables),
            reason=reason,
            top_k=self.model.top_k,
        )

    def _complete(
        self, groups: Mapping[tuple[int, str], tuple[Part, Ints]], projections: tuple[int, ...]
    ) -> None:
        """Every projection has every required part of every expert, and no part of only some."""
        experts = 1 if self.fused else self.model.experts
        missing: list[tuple[int, str, Ints]] = []
        for projection in projections:
            for name, part in self.scheme.parts.items():
                entry = groups.get((projection, name))
                rows = entry[1] if entry else np.zeros(0, np.int64)
                if part.role is Role.UNUSED or (not part.required and not len(rows)):
                    continue
                if len(rows) != experts:
                    ids = np.setdiff1d(np.arange(experts), self.catalog.expert[rows])
                    missing.append((projection, name, ids))
        if missing:
            raise self._incomplete(groups, missing)

    def _incomplete(
        self,
        groups: Mapping[tuple[int, str], tuple[Part, Ints]],
        missing: Sequence[tuple[int, str, Ints]],
    ) -> LoaderError:
        """All missing tensors of the layer in one error."""
        catalog = self.catalog
        rows = np.concatenate([rows for _, rows in groups.values()])
        family = catalog.families[int(catalog.family[rows[0]])]
        projection, name, ids = missing[0]
        assert self.layer is not None, "routed experts belong to a layer"
        module = family.module(self.layer, int(ids[0]), PROJECTIONS[projection])
        every = np.unique(np.concatenate([ids for *_, ids in missing]))
        lacking = [
            f"no {PROJECTIONS[p]}.{part}" + ("" if self.fused else f" of experts {some_of(ids)}")
            for p, part, ids in missing
        ]
        more = f"; {len(lacking) - 4} more parts alike" if len(lacking) > 4 else ""
        files = [catalog.files[number] for number in np.unique(catalog.file[rows]).tolist()]
        return CheckpointError(
            f"expert tensors are missing ({sum(len(ids) for *_, ids in missing)})",
            file=shown_few(files),
            layer=self.layer,
            experts=None if self.fused else some_of(every),
            tensor=f"{catalog.prefix}{module}.{name}",
            expected="one fused tensor of each part"
            if self.fused
            else f"every part of {self.model.experts} experts",
            found="; ".join(lacking[:4]) + more,
        )

    def _geometry(self, groups: Mapping[tuple[int, str], tuple[Part, Ints]]) -> tuple[int, int]:
        """Hidden and intermediate size: the config's where it states them, else the tensors'."""
        name = next(iter(self.scheme.parts))
        gate = GATE_UP if self.fused else GATE
        first = self.disk_sizes(groups[gate, name])
        down = self.disk_sizes(groups[DOWN, name])
        hidden = self.model.hidden_size or first["k"]
        intermediate = self.model.moe_intermediate_size or down["k"]
        if self.model.moe_intermediate_size is None and not self.fused and down["k"] != first["n"]:
            raise self._error(
                "gate and down disagree on the intermediate size",
                groups[DOWN, name][1][:1],
                f"{first['n']} input features",
                f"{down['k']}",
            )
        return hidden, intermediate

    def disk_sizes(self, entry: tuple[Part, Ints]) -> dict[str, int]:
        """Sizes by axis that the first tensor of a part has on disk."""
        part, rows = entry
        arrangement = part.arrangement
        shape = self._one_shape(int(rows[0]))
        assert arrangement is not None
        if len(shape) != len(arrangement.axes):
            raise self._error(
                "the tensor has the wrong rank",
                rows[:1],
                f"{len(arrangement.axes) + self.fused} axes",
                list(self.catalog.shapes[self.catalog.shape_id[rows[0]]]),
            )
        return {
            axis: size * per
            for axis, size, per in zip(arrangement.axes, shape, arrangement.per, strict=True)
        }

    def _one_shape(self, row: int) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.catalog.shapes[self.catalog.shape_id[row]]
        return shape[1:] if self.fused else shape

    def table(
        self, projection: int, name: str, part: Part, rows: Ints, sizes: Mapping[str, int]
    ) -> Table | None:
        """Check dtype and shape of all tensors of one part; None for zero points left empty."""
        catalog = self.catalog
        allowed = [DTYPES.index(dtype) for dtype in part.dtypes]
        wrong = ~np.isin(catalog.dtype[rows], allowed)
        if not wrong.any():
            wrong = catalog.dtype[rows] != np.bincount(catalog.dtype[rows]).argmax()
        if wrong.any():
            raise self._error(
                f"{name} has the wrong dtype",
                rows[wrong],
                " or ".join(part.dtypes) + ", one for the whole layer",
                f"{DTYPES[catalog.dtype[rows[wrong][0]]]} in {int(wrong.sum())} tensors",
            )
        # Empty zero points are absent ones. An AWQ writer leaves those of a symmetric layer empty
        # whatever the config says of the model; for others, only a symmetric config may.
        may_be_empty = part.role is Role.ZEROS_GN or (
            part.role is Role.ZEROS_NG and not part.required
        )
        if may_be_empty and all(0 in catalog.shapes[n] for n in np.unique(catalog.shape_id[rows])):
            return None
        shapes = self._expected_shapes(part, projection, sizes)
        good = [n for n, shape in enumerate(catalog.shapes) if shape in shapes]
        wrong = ~np.isin(catalog.shape_id[rows], good)
        if wrong.any():
            raise self._wrong_shape(name, part, rows[wrong], shapes, sizes)
        dtype = DTYPES[catalog.dtype[rows[0]]]
        role, arrangement, element = part.stored_as(dtype)
        return Table(projection, role, arrangement, element, self._one_shape(rows[0]), rows)

    def _expected_shapes(
        self, part: Part, projection: int, sizes: Mapping[str, int]
    ) -> list[tuple[int, ...]]:
        lead = (self.model.experts,) if self.fused else ()
        if part.arrangement is None:  # globals: one number for each projection
            if not self.fused:
                return [(), (1,), (1, 1)]
            both = [(*lead, 2)] if projection == GATE_UP else []
            return [lead, (*lead, 1), *both]
        if part.role is Role.CHECK_SHAPE:
            return [(*lead, 2)]
        shape = part.arrangement.shape(sizes)
        if shape is None:
            raise CheckpointError(
                f"the sizes do not divide into words of {self.scheme.format}",
                layer=self.layer,
                expected=f"multiples of {max(part.arrangement.per)}",
                found=dict(sizes),
            )
        return [(*lead, *shape)]

    def _wrong_shape(
        self,
        name: str,
        part: Part,
        rows: Ints,
        shapes: list[tuple[int, ...]],
        sizes: Mapping[str, int],
    ) -> LoaderError:
        found = self.catalog.shapes[self.catalog.shape_id[rows[0]]]
        hint = ""
        one = found[1:] if self.fused else found
        if part.arrangement and "g" in part.arrangement.axes and len(one) == 2:
            stored = one[part.arrangement.axes.index("g")]
            hint = f" (group {self._group(sizes)} in the config"
            hint += f", {_group_of(sizes['k'], stored)} in the file)" if stored else ")"
        return self._error(
            f"{name} has the wrong shape",
            rows,
            " or ".join(str(list(shape)) for shape in shapes[:3]) + hint,
            f"{list(found)}" + (f" and {len(rows) - 1} more tensors" if len(rows) > 1 else ""),
        )

    def _group(self, sizes: Mapping[str, int]) -> int:
        return sizes["k"] if self.scheme.group == -1 else self.scheme.group

    def _scale_dtypes(self, tables: Sequence[Table]) -> tuple[str, str]:
        """Dtype of the scales (of the weights, where plain) of W13 and of W2."""
        roles = (*SCALE_ROLES, Role.PLAIN_NK)
        by_bank: list[dict[str, Ints]] = [{}, {}]
        for table in tables:
            if table.role in roles:
                dtype = DTYPES[self.catalog.dtype[table.rows[0]]]
                by_bank[table.projection == DOWN][dtype] = table.rows
        # e4m3 bytes stored as U8 are the same bytes
        names = [
            {
                "F8_E4M3" if self.scheme.kind == "e2m1" else dtype: rows
                for dtype, rows in found.items()
            }
            for found in by_bank
        ]
        if len(names[0]) > 1:
            dtype, rows = list(names[0].items())[1]
            raise self._error(
                "gate and up differ in scale dtype", rows, next(iter(names[0])), dtype
            )
        return next(iter(names[0])), next(iter(names[1]))

    def _error(self, what: str, rows: Ints, expected: object, found: object) -> CheckpointError:
        """An error about the first of ``rows`` that names the experts of all."""
        experts = np.unique(self.catalog.expert[rows])
        return CheckpointError(
            what,
            file=self.catalog.files[self.catalog.file[rows[0]]],
            layer=self.layer,
            experts=None if experts[0] < 0 else some_of(experts),
            tensor=self.catalog.names[rows[0]],
            expected=expected,
            found=found,
        )


def _group_of(k: int, groups: int) -> int:
    """The group that cuts ``k`` into so many, as writers choose groups; for messages only."""
    usual = (16, 32, 64, 128, 256, 512, 1024)
    return next((size for size in usual if -(-k // size) == groups), -(-k // groups))


def some_of(ids: Ints) -> str:
    """The first few of many ids, for an error message."""
    text = ", ".join(str(int(number)) for number in ids[:8])
    return text + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")

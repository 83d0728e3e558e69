"""Layers: how each MoE layer is written, decided from the config and checked against the file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from loader.checkpoint.catalog import Catalog, Ints
from loader.checkpoint.family import PROJECTIONS
from loader.checkpoint.header import DTYPES
from loader.checkpoint.model import CONFIG, Model
from loader.checkpoint.scheme import PLAIN, Dialect, Part, Scheme, Unhandled
from loader.checkpoint.tables import LayerSource, TableReader, some_of
from loader.checkpoint.wording import shown_few
from loader.errors import CheckpointError, LoaderError, UnsupportedError

_FLOATS = ("BF16", "F16", "F32")
_REFUSED_PARTS = {
    "bias": "expert biases are not supported",
    "pre_quant_scale": "pre_quant_scale on the experts' activations is not supported",
}


@dataclass(frozen=True, eq=False)
class _Resolved:
    """A layer that was resolved, with the run of its rows that each table has."""

    source: LayerSource
    runs: tuple[slice, ...]

    @classmethod
    def of(cls, source: LayerSource, rows: Ints) -> _Resolved:
        starts = (int(np.flatnonzero(rows == table.rows[0])[0]) for table in source.tables)
        runs = zip(starts, source.tables, strict=True)
        return cls(source, tuple(slice(at, at + len(table.rows)) for at, table in runs))

    def at(self, layer: int, rows: Ints, reason: str) -> LayerSource:
        """The same for another layer that is alike."""
        pairs = zip(self.source.tables, self.runs, strict=True)
        tables = tuple(replace(table, rows=rows[run]) for table, run in pairs)
        return replace(self.source, layer=layer, tables=tables, reason=reason)


@dataclass(frozen=True, eq=False)
class _Alike:
    """What is found once for all layers whose tensors differ in layer, file and place alone.

    ``sources`` by the identity of the scheme, which the dialect keeps.
    """

    fused: bool
    plain: bool
    sources: dict[int, _Resolved] = field(default_factory=dict)


class LayerResolver:
    """Resolves layers of one catalog; one instance for a plan."""

    def __init__(self, catalog: Catalog, model: Model, dialect: Dialect | None) -> None:
        self.catalog = catalog
        self.model = model
        self.dialect = dialect
        order = np.lexsort((catalog.expert, catalog.part, catalog.projection, catalog.layer))
        self._order = order[catalog.layer[order] >= 0]
        self._layers = catalog.layer[self._order]
        columns = (catalog.family, catalog.projection, catalog.part, catalog.expert)
        kinds = (catalog.dtype, catalog.shape_id)
        facts = [column[self._order].astype(np.int32) for column in (*columns, *kinds)]
        self._facts = np.stack(facts, axis=1)
        self._alike: dict[bytes, _Alike] = {}

    def resolve(self, layer: int) -> LayerSource:
        """Resolve one layer.

        Raises :class:`CheckpointError` where tensors are missing, left over or contradict the
        config, :class:`UnsupportedError` where the layer's format is not loaded.
        """
        first, last = np.searchsorted(self._layers, (layer, layer + 1))
        rows = self._order[first:last]
        facts = self._facts[first:last].tobytes()
        alike = self._alike.get(facts)
        if alike is None:
            alike = _Alike(self._one_family(layer, rows), self._is_plain(layer, rows))
            self._alike[facts] = alike
        scheme, reason = self._scheme(layer, rows, alike.plain)
        known = alike.sources.get(id(scheme))
        if known is not None:
            return known.at(layer, rows, reason)
        groups = self._groups(layer, rows, scheme)
        reader = TableReader(self.catalog, self.model, layer, scheme, alike.fused)
        source = reader.read(groups, reason)
        alike.sources[id(scheme)] = _Resolved.of(source, rows)
        return source

    def _one_family(self, layer: int, rows: Ints) -> bool:
        catalog = self.catalog
        found = np.unique(catalog.family[rows])
        if len(found) != 1:
            families = [catalog.families[number].pattern for number in found]
            raise CheckpointError(
                "one layer names its experts in more than one way",
                file=self._files(rows),
                layer=layer,
                tensor=catalog.names[rows[catalog.family[rows] == found[1]][0]],
                expected="one family",
                found=" and ".join(families),
            )
        fused = "{expert}" not in catalog.families[int(found[0])].pattern
        experts = np.unique(catalog.expert[rows])
        beyond = experts[experts >= self.model.experts]
        if len(beyond):
            first = rows[catalog.expert[rows] >= self.model.experts]
            raise CheckpointError(
                "the file holds experts that the config does not declare",
                file=self._files(first),
                layer=layer,
                experts=some_of(beyond),
                tensor=catalog.names[first[0]],
                expected=f"{self.model.experts} experts ({CONFIG})",
                found=f"expert ids up to {int(experts[-1])}",
            )
        return fused

    def _scheme(self, layer: int, rows: Ints, plain: bool) -> tuple[Scheme, str]:
        catalog = self.catalog
        if plain and self.model.layers is not None and layer >= self.model.layers:
            return PLAIN, f"beyond num_hidden_layers={self.model.layers}, not quantized in the file"
        if self.dialect is None:
            if not plain:
                raise CheckpointError(
                    "the experts are quantized, but the config has no quantization_config",
                    file=CONFIG,
                    layer=layer,
                    tensor=catalog.names[rows[0]],
                    expected="bf16 or fp16 weights",
                    found=DTYPES[catalog.dtype[rows[0]]],
                )
            return PLAIN, "the checkpoint is not quantized"
        modules = self._modules(self.dialect, rows, plain)
        self._agree_on_exclusion(layer, modules, plain)
        if plain:
            return PLAIN, "excluded by config"
        schemes = {self.dialect.scheme(module): module for module in modules}
        if len(schemes) > 1:
            raise UnsupportedError(
                "the experts of one layer are written in different formats",
                file=CONFIG,
                layer=layer,
                expected="one format",
                found="; ".join(f"{module}: {s.format}" for s, module in schemes.items()),
            )
        scheme = next(iter(schemes))
        if isinstance(scheme, Unhandled):
            raise UnsupportedError(
                "the experts of this layer are in a format that is not loaded",
                file=self._files(rows),
                layer=layer,
                tensor=modules[0],
                expected=scheme.expected,
                found=scheme.format,
            )
        return scheme, f"{self.dialect.name}: {scheme.format}"

    def _modules(self, dialect: Dialect, rows: Ints, plain: bool) -> list[str]:
        """The modules to hold against the config: one of each projection where it speaks for all.

        All of them where their numbers may matter, or where there is something to refuse.
        """
        catalog = self.catalog
        codes, projections = catalog.part[rows], catalog.projection[rows]
        heads = rows[codes == codes[0]]
        at = np.unique(projections[codes == codes[0]], return_index=True)[1]
        few = [catalog.module(row) for row in heads[at].tolist()]
        family = catalog.families[int(catalog.family[rows[0]])]
        try:
            one_for_all = (
                family.counts_behind_experts
                and not any(dialect.tells_apart(module) for module in few)
                and all(plain in dialect.excluded(module) for module in few)
            )
        except LoaderError:
            one_for_all = False
        if one_for_all and (plain or len({dialect.scheme(module) for module in few}) == 1):
            return few
        return [catalog.module(row) for row in heads.tolist()]

    def _is_plain(self, layer: int, rows: Ints) -> bool:
        """True where the file holds floating weights, False where it holds packed codes."""
        catalog = self.catalog
        weights = [n for n, part in enumerate(catalog.parts) if part in ("weight", "")]
        is_weight = np.isin(catalog.part[rows], weights)
        is_float = np.isin(catalog.dtype[rows], [DTYPES.index(name) for name in _FLOATS])
        plain = is_weight & is_float
        if not plain.any():
            return False
        # Every projection of every expert must be in the same form, under whatever part names.
        place = catalog.expert[rows] * len(PROJECTIONS) + catalog.projection[rows]
        packed = ~np.isin(place, place[plain])
        if not packed.any():
            return True
        first, other = rows[plain], rows[packed]
        raise CheckpointError(
            "some experts of one layer are quantized and some are not",
            file=self._files(first),
            layer=layer,
            experts=_experts(catalog.expert[first]),
            tensor=catalog.names[first[0]],
            expected=f"{DTYPES[catalog.dtype[other[0]]]} as {catalog.names[other[0]]}",
            found=DTYPES[catalog.dtype[first[0]]],
        )

    def _agree_on_exclusion(self, layer: int, modules: Sequence[str], plain: bool) -> None:
        assert self.dialect is not None
        try:
            wrong = [module for module in modules if plain not in self.dialect.excluded(module)]
        except LoaderError as error:
            raise error.at(layer=layer) from None
        if wrong:
            form = "unquantized" if plain else "quantized"
            raise CheckpointError(
                "config and file disagree on whether the experts are quantized",
                file=CONFIG,
                layer=layer,
                tensor=wrong[0],
                expected="quantized experts" if plain else "experts excluded by the config",
                found=f"{form} weights in the file, {len(wrong)} such modules of {len(modules)}",
            )

    def _files(self, rows: Ints) -> str:
        """The files that hold some tensors, for messages."""
        files = self.catalog.files
        return shown_few([files[number] for number in np.unique(self.catalog.file[rows]).tolist()])

    def _groups(
        self, layer: int, rows: Ints, scheme: Scheme
    ) -> dict[tuple[int, str], tuple[Part, Ints]]:
        """Rows by (projection, part name), each part known to the scheme."""
        catalog = self.catalog
        found: dict[tuple[int, str], tuple[Part, Ints]] = {}
        keys = catalog.projection[rows] * len(catalog.parts) + catalog.part[rows]
        for start, stop in _runs(keys):
            row = int(rows[start])
            projection = int(catalog.projection[row])
            name = catalog.parts[catalog.part[row]] or "weight"
            part = scheme.parts.get(name)
            if part is None:
                self._refuse_part(layer, row, name, scheme)
            elif (projection, name) in found:
                raise CheckpointError(
                    "an expert tensor is spelled twice",
                    file=self._files(rows[start:stop]),
                    layer=layer,
                    tensor=catalog.names[row],
                    expected=f"{name} once",
                    found="both spellings",
                )
            else:
                found[projection, name] = (part, rows[start:stop])
        return found

    def _refuse_part(self, layer: int, row: int, name: str, scheme: Scheme) -> None:
        what = _REFUSED_PARTS.get(name)
        raise (UnsupportedError if what else CheckpointError)(
            what or "an expert tensor is no part of the format",
            file=self.catalog.files[self.catalog.file[row]],
            layer=layer,
            experts=_experts(self.catalog.expert[[row]]),
            tensor=self.catalog.names[row],
            expected=f"{scheme.format}: {', '.join(scheme.parts)}",
            found=name,
        )


def _experts(ids: Ints) -> str | None:
    """Expert ids for a message; None for fused experts, whose tensors hold all."""
    return None if ids.min() < 0 else some_of(np.unique(ids))


def _runs(keys: Ints) -> list[tuple[int, int]]:
    """Start and stop of each run of equal keys."""
    edges = np.flatnonzero(np.diff(keys)) + 1
    return list(zip([0, *edges.tolist()], [*edges.tolist(), len(keys)], strict=True))

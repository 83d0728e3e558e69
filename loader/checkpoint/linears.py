"""Linears: the quantized modules outside the routed experts, found from headers alone.

Attention, shared experts, dense layers, a quantized router or ``lm_head``. On disk such a module is
one projection in the layer's own scheme, so it is described like the W2 of a layer of one expert:
``hidden`` is its output size N, ``intermediate`` its input size K.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from loader.checkpoint.catalog import NOT_EXPERT, Catalog
from loader.checkpoint.family import DOWN, layer_of
from loader.checkpoint.folder import Checkpoint
from loader.checkpoint.header import DTYPES
from loader.checkpoint.scheme import Role, Scheme, Unhandled
from loader.checkpoint.tables import LayerSource, Table, TableReader
from loader.errors import CheckpointError, LoaderError, UnsupportedError

FLOATS = ("BF16", "F16", "F32", "F64")
_CODES = ("qweight", "weight_packed", "weight")
_ZEROS = (Role.ZEROS_GN, Role.ZEROS_NG)
_SCALES = (Role.SCALES_GN, Role.SCALES_NG, Role.SCALES_NG8)


@dataclass(frozen=True, eq=False)
class LinearSource:
    """One quantized linear on disk: ``y = x @ W.T + bias`` with W ``(n, k)``.

    ``name`` is the module's in the checkpoint; ``source`` its tables, as W2 of a layer of no routed
    experts; ``bias`` the catalog row of its bias, None where it has none; ``rows`` all catalog
    rows that the quantized weight accounts for, those that are left unread included.
    """

    name: str
    source: LayerSource
    bias: int | None
    rows: tuple[int, ...]

    @property
    def n(self) -> int:
        """Output features."""
        return self.source.hidden

    @property
    def k(self) -> int:
        """Input features."""
        return self.source.intermediate

    @property
    def scheme(self) -> Scheme:
        """How the weight is written."""
        return self.source.scheme


def find_linears(
    checkpoint: Checkpoint, wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, LinearSource]:
    """Every quantized linear outside the routed experts whose module name is ``wanted``.

    Raises :class:`CheckpointError` for missing or misshapen parts and where config and file
    disagree, :class:`UnsupportedError` for a format that is not loaded.
    """
    catalog = checkpoint.catalog
    rows = np.flatnonzero((catalog.layer < 0) & (catalog.reason == NOT_EXPERT))
    floats = np.isin(catalog.dtype[rows], [DTYPES.index(name) for name in FLOATS])
    heads: dict[str, int] = {}
    for row in rows[~floats].tolist():
        module, _, part = catalog.names[row].rpartition(".")
        if part in _CODES and wanted(module):
            heads[module] = row
    parts: dict[str, dict[str, int]] = defaultdict(dict)
    for row in rows.tolist() if heads else ():
        module, _, part = catalog.names[row].rpartition(".")
        if module in heads:
            parts[module][part] = row
    return {
        module: _Reader(checkpoint, module, row).read(parts[module])
        for module, row in heads.items()
    }


@dataclass(frozen=True, eq=False)
class _Reader:
    """Reads one module; ``head`` is the row of its codes."""

    checkpoint: Checkpoint
    module: str
    head: int

    @property
    def catalog(self) -> Catalog:
        return self.checkpoint.catalog

    def read(self, parts: Mapping[str, int]) -> LinearSource:
        scheme = self._scheme()
        self._check_parts(scheme, parts)
        reader = TableReader(
            self.catalog, self.checkpoint.model, layer_of(self.module), scheme, False
        )
        own = {name: np.asarray([parts[name]]) for name in scheme.parts if name in parts}
        codes = next(iter(scheme.parts))
        disk = reader.disk_sizes((scheme.parts[codes], own[codes]))
        group = disk["k"] if scheme.group == -1 else scheme.group
        sizes = {**disk, "g": -(-disk["k"] // group)}
        tables: list[Table] = []
        for name, rows in own.items():
            if scheme.parts[name].role is Role.UNUSED:
                continue
            table = reader.table(DOWN, name, scheme.parts[name], rows, sizes)
            if table is not None:
                tables.append(table)
        (scales,) = (table for table in tables if table.role in _SCALES)
        dtype = DTYPES[self.catalog.dtype[scales.rows[0]]]
        dtype = "F8_E4M3" if scheme.kind == "e2m1" else dtype
        source = LayerSource(
            layer=reader.layer,
            scheme=scheme,
            fused=False,
            experts=0,
            hidden=disk["n"],
            intermediate=disk["k"],
            group13=group,
            group2=group,
            scale_dtypes=(dtype, dtype),
            zeros_stored=any(table.role in _ZEROS for table in tables),
            zeros_must_be_eight=scheme.zero_points == "eight",
            tables=tuple(tables),
            reason=f"a linear outside the experts: {scheme.format}",
        )
        bias = parts.get("bias")
        return LinearSource(self.module, source, bias, tuple(int(r[0]) for r in own.values()))

    def _scheme(self) -> Scheme:
        dialect = self.checkpoint.dialect
        name, dtype, _ = self.catalog.describe(self.head)
        scheme: Scheme | Unhandled = Unhandled("no quantization_config")
        if dialect is not None:
            scheme = dialect.scheme(self.module)
        codes = name.rpartition(".")[2]
        known = isinstance(scheme, Scheme) and codes in scheme.parts
        if not isinstance(scheme, Scheme) or not known or dtype not in scheme.parts[codes].dtypes:
            raise self._error(
                UnsupportedError,
                "a linear outside the experts is in a format that is not loaded",
                Unhandled("").expected,
                f"{dtype} ({scheme.format})",
            )
        assert dialect is not None
        if False not in dialect.excluded(self.module):
            raise self._error(
                CheckpointError,
                "config and file disagree on whether a linear is quantized",
                "a module excluded by the config is not quantized",
                f"{dtype} codes in the file",
            )
        return scheme

    def _check_parts(self, scheme: Scheme, parts: Mapping[str, int]) -> None:
        if "pre_quant_scale" in parts:
            raise self._error(
                UnsupportedError,
                "pre_quant_scale on a linear's activations is not supported",
                scheme.format,
                "pre_quant_scale",
            )
        missing = [name for name, p in scheme.parts.items() if p.required and name not in parts]
        if missing:
            raise self._error(
                CheckpointError,
                "parts of a quantized linear are missing",
                f"{scheme.format}: {', '.join(n for n, p in scheme.parts.items() if p.required)}",
                f"no {', '.join(missing)}",
            )

    def _error(
        self, kind: type[LoaderError], what: str, expected: object, found: object
    ) -> LoaderError:
        return kind(
            what,
            file=self.catalog.files[int(self.catalog.file[self.head])],
            layer=layer_of(self.module),
            tensor=self.catalog.names[self.head],
            expected=expected,
            found=found,
        )

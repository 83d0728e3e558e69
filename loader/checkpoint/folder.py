"""Checkpoint: configs, index and headers of one source, opened together.

Configs come first: what they alone refuse is refused before any shard is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

import numpy as np

from loader.checkpoint.awq import read_awq
from loader.checkpoint.catalog import Catalog, build_catalog
from loader.checkpoint.compressed import read_compressed
from loader.checkpoint.family import FAMILIES, Family
from loader.checkpoint.index import read_headers, select_files
from loader.checkpoint.json_file import load_json
from loader.checkpoint.layers import LayerResolver
from loader.checkpoint.model import CONFIG, Model, read_model
from loader.checkpoint.modelopt import QUANT_CONFIG, read_modelopt
from loader.checkpoint.scheme import Dialect
from loader.checkpoint.source import Source
from loader.checkpoint.wording import shown_few, shown_ranges
from loader.errors import CheckpointError, UnsupportedError

_Reader = Callable[[Mapping[str, Any], Mapping[str, Any] | None], Dialect]

#: quant_method of ``quantization_config`` -> the dialect that reads it.
DIALECTS: Mapping[str, _Reader] = {
    "awq": lambda config, quant_file: read_awq(config),
    "compressed-tensors": lambda config, quant_file: read_compressed(config),
    "modelopt": read_modelopt,
}


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Everything that the headers and configs of one source say."""

    source: Source
    model: Model
    dialect: Dialect | None
    catalog: Catalog
    resolver: LayerResolver

    def require_all_layers(self) -> None:
        """Refuse a layer that has a router but no experts, or no tensor at all.

        A dense layer has neither router nor experts. Raises :class:`CheckpointError`.
        """
        catalog, count = self.catalog, self.model.layers or 0
        routers = {n: name for n, name in catalog.routers().items() if n < (count or n + 1)}
        held = {*catalog.expert_layers(), *catalog.other_layers()}
        # The count is the config's own claim: only a few of what is absent are looked for.
        absent = [n for n in range(min(count, len(held) + 9)) if n not in held]
        lost = sorted({*routers, *absent})
        if not lost:
            return
        layer = lost[0]
        what = f"a router, {routers[layer]}" if layer in routers else "no tensor of this layer"
        more = f"; such layers: {shown_ranges(lost)}" if len(lost) > 1 else ""
        raise CheckpointError(
            "a layer of the model holds no experts and is no dense layer",
            file=shown_few(catalog.files),
            layer=layer,
            tensor=routers.get(layer),
            expected=f"{self.model.experts} experts, or a dense layer; layers=... leaves it out",
            found=f"{what}, and no experts of any known family{more}",
        )


def open_checkpoint(source: Source, families: Iterable[Family] = FAMILIES) -> Checkpoint:
    """Read configs, index and headers.

    Raises :class:`CheckpointError` for anything broken, :class:`UnsupportedError` for a
    quantization, activation or family that is not loaded.
    """
    files = source.list()
    if CONFIG not in files:
        raise CheckpointError(
            "the checkpoint has no config.json",
            file=f"{source.name}/{CONFIG}",
            expected="a Hugging Face checkpoint folder",
            found=", ".join(files[:5]) or "no files",
        )
    model = read_model(load_json(source, CONFIG, allow_nonfinite=True))
    quant_file = load_json(source, QUANT_CONFIG) if QUANT_CONFIG in files else None
    dialect = read_dialect(model.quantization, quant_file)
    index = select_files(source)
    catalog = build_catalog(read_headers(source, index), index, families)
    _refuse_unknown_experts(catalog, model)
    _refuse_too_many_experts(catalog, model)
    return Checkpoint(source, model, dialect, catalog, LayerResolver(catalog, model, dialect))


def read_dialect(
    quantization: Mapping[str, Any] | None, quant_file: Mapping[str, Any] | None
) -> Dialect | None:
    """The dialect that the configs declare; None where nothing is quantized."""
    if quantization is None and quant_file is None:
        return None
    if not isinstance(quantization, (Mapping, NoneType)):
        raise CheckpointError(
            "the quantization config is not an object",
            expected="the checkpoint's quantization_config",
            found=repr(quantization),
        )
    method = "modelopt" if quantization is None else quantization.get("quant_method")
    if method is None and quantization is not None and "quant_algo" in quantization:
        method = "modelopt"
    reader = DIALECTS.get(str(method))
    if reader is None:
        raise UnsupportedError(
            "this quantization is not loaded",
            file=CONFIG,
            expected="quant_method " + ", ".join(DIALECTS),
            found=repr(method),
        )
    if quant_file is not None and method != "modelopt":
        raise CheckpointError(
            "the two quantization configs name different tools",
            file=f"{CONFIG} and {QUANT_CONFIG}",
            expected="quant_method modelopt",
            found=repr(method),
        )
    return reader(quantization or {}, quant_file)


def _refuse_unknown_experts(catalog: Catalog, model: Model) -> None:
    unknown = catalog.unknown_experts()
    if unknown or not (catalog.layer >= 0).any():
        found = len({int(e) for e in catalog.expert[catalog.layer >= 0]})
        names = unknown or catalog.names
        raise UnsupportedError(
            "tensors look like experts but no known family names them"
            if unknown
            else "no tensor is named like an expert by any known family",
            file=catalog.files[0] if catalog.files else None,
            expected=f"{model.experts} experts in each MoE layer; pass family=... for other names",
            found=f"{found} known, and {len(names)} tensors such as {', '.join(names[:4])}",
        )


def _refuse_too_many_experts(catalog: Catalog, model: Model) -> None:
    """The count is the config's own claim: it sizes nothing before the files bear it out."""
    rows = np.flatnonzero(catalog.layer >= 0)
    fused = np.unique(catalog.shape_id[rows[catalog.expert[rows] < 0]]).tolist()
    leading = [shape[0] for n in fused if (shape := catalog.shapes[n]) and 0 not in shape]
    most = max([len(rows), *leading])
    if model.experts > most:
        raise CheckpointError(
            "the config declares more experts than the files can hold",
            file=CONFIG,
            layer=int(catalog.layer[rows[0]]),
            expected=f"at most {most}, from {len(rows)} expert tensors",
            found=f"{model.experts} experts",
        )

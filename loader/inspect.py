"""Inspect: what is in a checkpoint, for people, from headers and configs alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from loader.checkpoint.catalog import REASONS
from loader.checkpoint.family import FAMILIES, Family
from loader.checkpoint.folder import Checkpoint, open_checkpoint
from loader.checkpoint.header import DTYPES
from loader.checkpoint.hub import located
from loader.checkpoint.source import Source
from loader.errors import LoaderError
from loader.render import WIDTH
from loader.table import Table, human_bytes, merged_layers, render


def inspect(
    source: str | os.PathLike[str] | Source,
    family: Family | None = None,
    *,
    revision: str | None = None,
) -> dict[str, Any]:
    """Facts of a checkpoint: model, dialect, files, dtypes, and each layer's format.

    A layer that cannot be loaded is listed with its error. Raises :class:`loader.LoaderError` where
    the checkpoint cannot be opened at all.
    """
    with located(source, revision) as opened:
        families = FAMILIES if family is None else (family, *FAMILIES)
        checkpoint = open_checkpoint(opened, families)
        catalog = checkpoint.catalog
        return {
            "source": opened.name,
            "model_type": checkpoint.model.model_type,
            "quantization": checkpoint.dialect.name if checkpoint.dialect else "none",
            "experts": checkpoint.model.experts,
            "top_k": checkpoint.model.top_k,
            "num_hidden_layers": checkpoint.model.layers,
            "prefix": catalog.prefix,
            "files": list(_files(checkpoint)),
            "dtypes": list(_dtypes(checkpoint)),
            "layers": [_layer(checkpoint, layer) for layer in catalog.expert_layers()],
            "other_layers": catalog.other_layers(),
            "not_experts": {
                REASONS[code]: int((catalog.reason == code).sum())
                for code in np.unique(catalog.reason).tolist()
                if code
            },
        }


def _files(checkpoint: Checkpoint) -> Iterator[dict[str, Any]]:
    for number, name in enumerate(checkpoint.catalog.files):
        tensors = int((checkpoint.catalog.file == number).sum())
        yield {"file": name, "tensors": tensors, "bytes": checkpoint.source.size(name)}


def _dtypes(checkpoint: Checkpoint) -> Iterator[dict[str, Any]]:
    catalog = checkpoint.catalog
    for code in np.unique(catalog.dtype).tolist():
        rows = catalog.dtype == code
        size = int((catalog.end[rows] - catalog.begin[rows]).sum())
        yield {"dtype": DTYPES[code], "tensors": int(rows.sum()), "bytes": size}


def _layer(checkpoint: Checkpoint, layer: int) -> dict[str, Any]:
    catalog = checkpoint.catalog
    rows = np.flatnonzero(catalog.layer == layer)
    facts: dict[str, Any] = {
        "layer": layer,
        "family": catalog.families[int(catalog.family[rows[0]])].name,
        "bytes": int((catalog.end[rows] - catalog.begin[rows]).sum()),
        "tensors": len(rows),
    }
    try:
        found = checkpoint.resolver.resolve(layer)
    except LoaderError as error:
        return {**facts, "format": "cannot be loaded", "geometry": "-", "why": str(error)}
    group = "" if found.scheme.kind == "plain" else f", group {found.group13}"
    geometry = f"E={found.experts} H={found.hidden} I={found.intermediate}{group}"
    return {**facts, "format": found.scheme.format, "geometry": geometry, "why": found.reason}


def inspect_text(facts: dict[str, Any], width: int = WIDTH) -> str:
    """The facts as tables."""
    head = (
        f"{facts['source']}\n"
        f"model {facts['model_type'] or '?'}, quantization {facts['quantization']}, "
        f"{facts['experts']} experts, top-k {facts['top_k']}, "
        f"{facts['num_hidden_layers']} layers, prefix {facts['prefix']!r}"
    )
    files = [(f["file"], f["tensors"], human_bytes(f["bytes"])) for f in facts["files"]]
    dtypes = [(d["dtype"], d["tensors"], human_bytes(d["bytes"])) for d in facts["dtypes"]]
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for layer in facts["layers"]:
        key = (layer["format"], layer["geometry"], layer["family"], layer["why"])
        groups.setdefault(key, []).append(layer)
    layers = [
        (
            merged_layers([layer["layer"] for layer in alike]),
            *key[:3],
            sum(layer["tensors"] for layer in alike),
            human_bytes(sum(layer["bytes"] for layer in alike)),
        )
        for key, alike in groups.items()
    ]
    why = [f"Layers {row[0]}: {key[3]}." for row, key in zip(layers, groups, strict=True)]
    text = ("layers", "format", "geometry", "family", "file", "dtype")
    columns = ("layers", "format", "geometry", "family", "tensors", "bytes")
    rest = ", ".join(f"{count:,} {why}" for why, count in facts["not_experts"].items())
    other = merged_layers(facts["other_layers"])
    return render(
        head,
        Table("Files", ("file", "tensors", "bytes"), files, text),
        Table("Dtypes", ("dtype", "tensors", "bytes"), dtypes, text),
        Table("Expert layers", columns, layers, text),
        "\n".join(why),
        f"Layers without experts: {other or 'none'}. Tensors beside the experts: {rest or 'none'}.",
        width=width,
    )

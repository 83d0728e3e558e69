"""Render: a plan or load report, in the form of its JSON, as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loader.table import human_bytes, merged_layers, render, table

Report = Mapping[str, Any]
_TEXT = ("layers", "format", "metadata", "tokens", "route", "code", "reason")


def plan_text(reports: Sequence[Report], width: int = 120) -> str:
    """The tables of one card's plan, or of the plans of several cards of one model."""
    return render(*plan_parts(reports), width=width)


def plan_parts(reports: Sequence[Report]) -> list[object]:
    """Tables and lines: cards, layers, routes, and what is left alone."""
    first = reports[0]
    parts: list[object] = [*_cards(reports), _layers(first), _routes(first)]
    skipped: dict[str, list[int]] = {}
    for entry in first["skipped"]:
        skipped.setdefault(entry["reason"], []).append(entry["layer"])
    if skipped:
        rows = [(merged_layers(layers), reason) for reason, layers in skipped.items()]
        parts.append(table("Layers left alone", ("layers", "reason"), rows, _TEXT))
    left = ", ".join(f"{entry['tensors']} ({why})" for why, entry in first["left_alone"].items())
    if left:
        parts.append(f"Tensors left to the serving framework, unread: {left}.")
    return parts


def load_parts(report: Report) -> list[object]:
    """The tables of a finished load: the plan's, and memory predicted and measured."""
    m = report["memory"]
    rows = [
        ("resident, predicted", m["predicted_resident"]),
        ("resident, measured", m["resident"]),
        ("  of it workspace", m["workspace"]),
        ("peak above baseline, predicted", m["predicted_peak"]),
        ("peak above baseline, measured", m["peak"] - m["baseline"]),
        ("overhead: peak - baseline - resident", m["overhead"]),
        ("  staging ring", m["staging"]),
        ("host anonymous + shared, peak", m["host_anonymous_peak"]),
        ("host file-backed, peak", m["host_file_peak"]),
        ("host USS (psutil), peak", m["host_uss_peak"]),
    ]
    sized = [(name, human_bytes(count), count) for name, count in rows]
    releases = sum(layer["releases"] for layer in report["layers"])
    speed = (
        f"Read {human_bytes(report['bytes_read'])} in {report['seconds']:.3f} s, "
        f"{report['gb_per_s']:.2f} GB/s; conversion cache released {releases} times in "
        f"{len(report['layers'])} layers."
    )
    warned = [f"Kept under nonfinite='warn': {line}" for line in report["nonfinite"]]
    title = f"Memory on {report['device']}"
    return [
        *plan_parts([report]),
        table(title, ("", "size", "bytes"), sized, ("",)),
        speed,
        *warned,
    ]


def total_bytes(report: Report) -> dict[str, int]:
    """Sum over layers of each entry of ``bytes``."""
    totals: dict[str, int] = {}
    for layer in report["layers"]:
        for name, count in layer["bytes"].items():
            totals[name] = totals.get(name, 0) + count
    return totals


_CARDS_PER_TABLE = 8


def _cards(reports: Sequence[Report]) -> list[object]:
    """Categories as rows, cards as columns, so that the numbers of one card stand together."""
    tables: list[object] = []
    for first in range(0, len(reports), _CARDS_PER_TABLE):
        shown = reports[first : first + _CARDS_PER_TABLE]
        columns = [_card_sizes(report) for report in shown]
        rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
        title = f"{reports[0]['source']}: what each card holds"
        tables.append(table(title, ("", *map(_card_name, shown)), rows, ("",)))
    return tables


def _card_name(report: Report) -> str:
    shard = report["shard"]
    parts = [report["device"]]
    parts += [f"tp {shard['tp_rank']}/{shard['tp_size']}"] if shard["tp_size"] > 1 else []
    parts += [f"ep {shard['ep_rank']}/{shard['ep_size']}"] if shard["ep_size"] > 1 else []
    return "\n".join(parts)


def _card_sizes(report: Report) -> dict[str, str]:
    totals, m = total_bytes(report), report["memory"]
    sizes = {name: totals[name] for name in ("weight", "metadata", "globals", "unquantized")}
    sizes["workspace"] = m["workspace"]
    sizes["resident"] = m["predicted_resident"]
    sizes["staging (transient)"] = m["staging"]
    sizes["conversion (transient)"] = m["conversion"]
    sizes["predicted peak"] = m["predicted_peak"]
    sizes["metadata if wide"] = totals["metadata_wide"]
    sizes["saved against wide"] = totals["saved"]
    sizes["memory of the card"] = m["card"]
    fits = {True: "yes", False: "NO", None: "?"}[m["fits"]]
    return {**{name: human_bytes(count) for name, count in sizes.items()}, "fits": fits}


def _groups(report: Report) -> list[list[Report]]:
    """Layers that differ in nothing but their number, together."""
    found: dict[str, list[Report]] = {}
    for layer in report["layers"]:
        keys = ("format", "metadata_layout", "geometry", "routes", "bytes")
        found.setdefault(repr([layer[key] for key in keys]), []).append(layer)
    return list(found.values())


def _layers(report: Report) -> object:
    rows = []
    for layers in _groups(report):
        one = layers[0]
        g, b = one["geometry"], one["bytes"]
        banks = b["weight"] + b["metadata"] + b["globals"] + b["unquantized"]
        quantized = one["metadata_layout"] != "plain"
        rows.append(
            (
                merged_layers([layer["layer"] for layer in layers]),
                one["format"],
                one["metadata_layout"],
                g["hidden"],
                f"{g['intermediate_local']} of {g['intermediate']}",
                f"{g['experts_local']} of {g['experts']}",
                f"{g['group_w13']}, {g['group_w2']}" if quantized else "-",
                g["phase"],
                human_bytes(b["source"]),
                human_bytes(banks),
                human_bytes(b["saved"]),
            )
        )
    columns = ["layers", "format", "metadata", "H", "I here", "experts here", "group", "phase"]
    columns += ["source", "banks", "saved"]
    return table("Layers (bytes of each)", columns, rows, _TEXT)


def _routes(report: Report) -> object:
    rows = []
    for layers in _groups(report):
        where = merged_layers([layer["layer"] for layer in layers])
        for route in layers[0]["routes"]:
            first, last = route["tokens"]
            tokens = str(first) if first == last else f"{first}-{'' if last is None else last}"
            rows.append((where, tokens, route["route"], route["implementation"], route["reason"]))
    return table("Routes", ("layers", "tokens", "route", "code", "reason"), rows, _TEXT)

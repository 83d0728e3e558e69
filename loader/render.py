"""Render: a plan or load report, in the form of its JSON, as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loader.table import Table, human_bytes, merged_layers, render

Report = Mapping[str, Any]
Parts = list[str | Table]
_TEXT = ("", "layers", "format", "metadata", "tokens", "route", "code", "reason")

WIDTH = 120
"""Columns of text where nobody says how wide the terminal is."""


def plan_text(reports: Sequence[Report], width: int = WIDTH) -> str:
    """The tables of one card's plan, or of the plans of several cards of one model."""
    return render(*_plan_parts(reports, width), width=width)


def load_text(report: Report, width: int = WIDTH) -> str:
    """The tables of a finished load: the plan's, and memory predicted and measured."""
    return render(*_plan_parts([report], width), *_memory_parts(report), width=width)


def ranks_text(reports: Sequence[Report], width: int = WIDTH) -> str:
    """The load of several ranks: the tables of rank 0's card, and every card's memory in one."""
    first = [report for report in reports if report["layers"]][:1]
    parts = _plan_parts(first, width) if first else []
    return render(*parts, _all_cards(reports), width=width)


def _all_cards(reports: Sequence[Report]) -> Table:
    rows = []
    for rank, report in enumerate(reports):
        m = report["memory"]
        sizes = (
            m["predicted_resident"],
            m["resident"],
            m["predicted_peak"],
            m["peak"] - m["baseline"],
            m["host_uss_peak"],
            report["bytes_read"],
        )
        card = _card_name(report).replace("\n", " ")
        rows.append((rank, card, *map(human_bytes, sizes), f"{report['seconds']:.2f}"))
    columns = (
        "rank",
        "card",
        "resident\npredicted",
        "resident\nmeasured",
        "peak\npredicted",
        "peak\nmeasured",
        "host USS",
        "read",
        "s",
    )
    return Table("Memory of all cards (peaks above the baseline)", columns, rows, ("card",))


def _plan_parts(reports: Sequence[Report], width: int) -> Parts:
    """Tables and lines: cards, layers, routes, and what is left alone."""
    first = reports[0]
    # Slices differ from card to card, their phases above all: say whose are shown.
    whose = "this card" if len(reports) == 1 else "the first card"
    parts: Parts = [
        first["source"],
        *_cards(reports, width),
        _layers(first, whose),
        _layer_bytes(first, whose),
        _routes(first),
    ]
    skipped: dict[str, list[int]] = {}
    for entry in first["skipped"]:
        skipped.setdefault(entry["reason"], []).append(entry["layer"])
    if skipped:
        rows = [(merged_layers(layers), reason) for reason, layers in skipped.items()]
        parts.append(Table("Layers left alone", ("layers", "reason"), rows, _TEXT))
    left = ", ".join(f"{entry['tensors']:,} ({why})" for why, entry in first["left_alone"].items())
    if left:
        parts.append(f"Tensors left to the serving framework, unread: {left}.")
    return parts


def _memory_parts(report: Report) -> Parts:
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
    rows += _card_rows(m)
    sized = [(name, human_bytes(count), f"{count:,}") for name, count in rows]
    releases = sum(layer["releases"] for layer in report["layers"])
    speed = (
        f"Read {human_bytes(report['bytes_read'])} in {report['seconds']:.3f} s, "
        f"{report['gb_per_s']:.2f} GB/s; conversion cache released {releases} times in "
        f"{len(report['layers'])} layers."
    )
    warned = [f"Kept under nonfinite='warn': {line}" for line in report["nonfinite"]]
    pageable = (m["counters"] or {}).get("why_pageable")
    warned += [f"Staging is pageable memory: {pageable}."] if pageable else []
    warned += [f"Note: {overhead_text(m['overhead'])}."] if m["overhead"] < 0 else []
    title = f"Memory on {report['device']}"
    return [Table(title, ("", "size", "bytes"), sized, _TEXT), speed, *warned]


def overhead_text(nbytes: int) -> str:
    """``overhead 3.00 MiB``; below 0, what that says of the rest of the process, or of the card.

    A load takes 0 bytes or more beside what stays: what is missing was given back by others.
    """
    if nbytes >= 0:
        return f"overhead {human_bytes(nbytes)}"
    return f"overhead unknown: at least {human_bytes(-nbytes)} from before was given back meanwhile"


def _card_rows(memory: Report) -> list[tuple[str, int]]:
    """What a card's counters say after the load, and what their differences are."""
    counters = memory["counters"]
    if counters is None:
        return []
    rows = [
        ("host pinned", memory["host_pinned"]),
        ("card: allocated", memory["allocated"]),
        ("  of it rounding by this load", counters["rounding"]),
        ("card: reserved by the allocator", memory["reserved"]),
        ("  of it unused", counters["unused"]),
        ("card: used, as the driver says", memory["device_used"]),
        ("  of it not the allocator's", counters["foreign"]),
    ]
    if counters["nvml_used"] is not None:
        rows.append(("card: used, as NVML says", counters["nvml_used"]))
    return rows


def total_bytes(report: Report) -> dict[str, int]:
    """Sum over layers of each entry of ``bytes``."""
    totals: dict[str, int] = {}
    for layer in report["layers"]:
        for name, count in layer["bytes"].items():
            totals[name] = totals.get(name, 0) + count
    return totals


_NAME_WIDTH, _CARD_WIDTH = 24, 12
"""Columns that the names of the sizes take, and that each card takes."""


def _cards(reports: Sequence[Report], width: int) -> list[Table]:
    """Categories as rows, cards as columns, so that the numbers of one card stand together."""
    tables = []
    each = max((width - _NAME_WIDTH) // _CARD_WIDTH, 1)
    for first in range(0, len(reports), each):
        shown = reports[first : first + each]
        columns = [_card_sizes(report) for report in shown]
        rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
        names = [_card_name(report) for report in shown]
        tables.append(Table("What each card holds", ("", *names), rows, _TEXT))
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
    shown = {name: human_bytes(count) for name, count in sizes.items()}
    shown["fits"] = {True: "yes", False: "NO", None: "?"}[m["fits"]]
    lacking = 0 if m["card"] is None else max(m["predicted_peak"] - m["card"], 0)
    return {**shown, "lacking": human_bytes(lacking)}


def _groups(report: Report) -> list[list[Report]]:
    """Layers that differ in nothing but their number, together."""
    found: dict[str, list[Report]] = {}
    for layer in report["layers"]:
        keys = ("format", "metadata_layout", "geometry", "routes", "bytes")
        found.setdefault(repr([layer[key] for key in keys]), []).append(layer)
    return list(found.values())


def _numbers(layers: Sequence[Report]) -> str:
    return merged_layers([layer["layer"] for layer in layers])


def _layers(report: Report, whose: str) -> Table:
    rows = []
    for layers in _groups(report):
        one, g = layers[0], layers[0]["geometry"]
        groups = dict.fromkeys((g["group_w13"], g["group_w2"]))
        quantized = one["metadata_layout"] != "plain"
        rows.append(
            (
                _numbers(layers),
                one["format"],
                one["metadata_layout"],
                g["hidden"],
                f"{g['intermediate_local']}/{g['intermediate']}",
                f"{g['experts_local']}/{g['experts']}",
                "/".join(map(str, groups)) if quantized else "-",
                g["phase"],
            )
        )
    columns = ("layers", "format", "metadata", "H", "I here", "experts", "group", "phase")
    title = f"Layers (I and experts: on {whose} / in the model)"
    return Table(title, columns, rows, _TEXT)


def _layer_bytes(report: Report, whose: str) -> Table:
    names = ("source", "weight", "metadata", "globals", "unquantized", "saved")
    columns = ("layers", "source", "weight", "scales", "globals", "unquantized", "saved")
    rows = [
        (_numbers(layers), *(human_bytes(layers[0]["bytes"][name]) for name in names))
        for layers in _groups(report)
    ]
    return Table(f"Bytes of each layer on {whose}", columns, rows, _TEXT)


def _routes(report: Report) -> Table:
    rows = []
    for layers in _groups(report):
        for route in layers[0]["routes"]:
            first, last = route["tokens"]
            tokens = str(first) if first == last else f"{first}-{'' if last is None else last}"
            where = _numbers(layers)
            rows.append((where, tokens, route["route"], route["implementation"], route["reason"]))
    return Table("Routes", ("layers", "tokens", "route", "code", "reason"), rows, _TEXT)

"""Rendering of plans and loads: at 80 and 120 columns every number is there and lines up."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import loader
from loader import Policy, Shard
from loader.plan import plan_cards
from loader.render import load_text, plan_text, total_bytes
from loader.table import human_bytes
from loader.testing.checkpoint import tiny_checkpoint

WIDTHS = (80, 120)
DIALECTS = ("awq-gemm", "ct-int4-asym", "ct-nvfp4", "modelopt-nvfp4")
NUMBER = re.compile(r"\d[\d.,/]*(?: [KMGT]?i?B)?")


def _reports(folder: Path, cards: int, **settings: Any) -> list[dict[str, Any]]:
    sizes: dict[str, Any] = {"hidden": 2560, "intermediate": 1280, "experts": 512, "top_k": 10}
    tiny_checkpoint(folder, **{**sizes, "layers": 2, "payload": "sparse", **settings})
    shards = [Shard(rank, cards) for rank in range(cards)]
    return [plan.to_dict() for plan in plan_cards(folder, shards, card_memory=1 << 33)]


def _tables(text: str) -> list[list[str]]:
    """The bodies of all tables: header lines and rows, the rule between them left out."""
    blocks, lines = [], text.splitlines()
    for number, line in enumerate(lines):
        if line.strip() and set(line.strip()) == {"─"}:
            top = number
            while lines[top - 1].strip():
                top -= 1
            end = number
            while end + 1 < len(lines) and lines[end + 1].strip():
                end += 1
            blocks.append([*lines[top:number], line, *lines[number + 1 : end + 1]])
    return blocks


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("cards", (1, 4, 8))
def test_a_plan_fits_and_every_number_is_whole(
    width: int, dialect: str, cards: int, tmp_path: Path
) -> None:
    reports = _reports(tmp_path, cards, dialect=dialect, excluded=(1,))
    text = plan_text(reports, width)
    assert "…" not in text
    for table in _tables(text):
        assert max(map(len, table)) <= width
    for report in reports:
        totals, memory = total_bytes(report), report["memory"]
        wanted = [totals[n] for n in ("weight", "metadata", "globals", "unquantized", "saved")]
        wanted += [memory[name] for name in ("workspace", "staging", "conversion", "card")]
        wanted += [memory["predicted_resident"], memory["predicted_peak"], totals["metadata_wide"]]
        shown = NUMBER.findall(text)
        assert not [n for n in map(human_bytes, wanted) if n not in shown]
        assert text.count(f"tp {report['shard']['tp_rank']}/{cards}") == (cards > 1)
    whose = "the first card" if cards > 1 else "this card"
    assert f"on {whose} / in the model" in text and f"Bytes of each layer on {whose}" in text
    for layer in reports[0]["layers"]:
        assert layer["format"] in text
        for name in ("source", "weight", "metadata", "globals", "unquantized", "saved"):
            assert human_bytes(layer["bytes"][name]) in text
        for route in layer["routes"]:
            assert all(word in text for word in route["reason"].split())


@pytest.mark.parametrize("width", WIDTHS)
def test_the_columns_of_cards_line_up(width: int, tmp_path: Path) -> None:
    text = plan_text(_reports(tmp_path, 4, dialect="awq-gemm"), width)
    cards = _tables(text)[0]
    rule = next(n for n, line in enumerate(cards) if set(line.strip()) == {"─"})
    assert {len(line) for line in cards[rule:]} == {len(cards[rule])}
    assert [line.split() for line in cards[:rule]] == [
        ["cpu"] * 4,
        ["tp", "0/4", "tp", "1/4", "tp", "2/4", "tp", "3/4"],
    ]
    starts = [m.end() for m in re.finditer("cpu", cards[0])]
    for line in cards[rule + 1 :]:
        assert all(line[end - 1] != " " and line[end : end + 1] in (" ", "") for end in starts)


def test_a_card_that_does_not_hold_the_plan_says_so_and_by_how_much(tmp_path: Path) -> None:
    (report,) = _reports(tmp_path, 1, dialect="awq-gemm")
    lines = {line[:24].strip(): line[24:].strip() for line in plan_text([report]).splitlines()}
    assert (lines["fits"], lines["lacking"]) == ("yes", "0 B")
    memory = {**report["memory"], "card": report["memory"]["predicted_peak"] - 1536, "fits": False}
    text = plan_text([{**report, "memory": memory}])
    lines = {line[:24].strip(): line[24:].strip() for line in text.splitlines()}
    assert (lines["fits"], lines["lacking"]) == ("NO", "1.50 KiB")
    unknown = {**report["memory"], "card": None, "fits": None}
    text = plan_text([{**report, "memory": unknown}])
    lines = {line[:24].strip(): line[24:].strip() for line in text.splitlines()}
    assert (lines["fits"], lines["memory of the card"], lines["lacking"]) == ("?", "-", "0 B")


def test_many_cards_stand_in_several_tables(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, layers=1, experts=16, payload="sparse")
    shards = [Shard(tp, 2, ep, 8) for ep in range(8) for tp in range(2)]
    reports = [plan.to_dict() for plan in plan_cards(tmp_path, shards)]
    for width, each in ((80, 4), (120, 8)):
        cards = [t for t in _tables(plan_text(reports, width)) if "ep" in "".join(t[:4])]
        assert [table[0].split().count("cpu") for table in cards] == [each] * (16 // each)


def test_layers_that_are_alike_share_a_row_and_others_do_not(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, layers=6, excluded=(3,), payload="sparse")
    plan = loader.plan(tmp_path, policy=Policy(qpn_grouped="off"))
    text, code = str(plan), plan.implementation.name
    layers = _tables(text)[1]
    assert [line.split("  ")[0].strip() for line in layers[2:]] == ["0-2, 4-5", "3"]
    routes = [line.split() for line in _tables(text)[3][2:]]
    assert [row[row.index(code) - 2 :][:2] for row in routes] == [
        ["1", "qpn_m1"],
        ["2-8", "legacy"],
        ["9-", "legacy"],
        ["1", "legacy"],
        ["2-8", "legacy"],
        ["9-", "legacy"],
    ]


def test_what_is_left_alone_is_told(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, family="deepseek-v3", layers=3, dense=(0,), payload="sparse")
    plan = loader.plan(tmp_path, layers=[2])
    text = str(plan)
    table = _tables(text)[-1]
    assert [line.strip() for line in table[2:]] == ["0       dense layer", "1       not asked for"]
    for reason, names in plan.left_alone().items():
        assert f"{len(names)} ({reason})" in " ".join(text.split())


@pytest.mark.parametrize("width", WIDTHS)
def test_a_load_shows_predicted_beside_measured_in_bytes(width: int, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, hidden=64, intermediate=64, experts=2, layers=2, group=32)
    report = loader.load(tmp_path).report
    described = report.to_dict()
    text = load_text(described, width)
    assert text.startswith(plan_text([described], width))
    memory = described["memory"]
    for name in (
        "predicted_resident",
        "resident",
        "workspace",
        "predicted_peak",
        "overhead",
        "staging",
        "host_anonymous_peak",
        "host_file_peak",
        "host_uss_peak",
    ):
        assert f"{memory[name]:,}" in text.split("Memory on cpu")[1]
    assert f"{memory['peak'] - memory['baseline']:,}" in text
    assert "released 2 times in 2 layers" in " ".join(text.split())
    assert str(report) == load_text(described)
    described["memory"]["overhead"] = -3 << 20
    assert load_text(described).endswith(
        "Note: overhead unknown: at least 3.00 MiB from before was given back meanwhile."
    )
    described["memory"]["overhead"] = 0
    described["nonfinite"] = ["a scale", "another"]
    assert load_text(described).endswith(
        "Kept under nonfinite='warn': a scale\n\nKept under nonfinite='warn': another"
    )

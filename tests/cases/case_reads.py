"""What the cases of section 9 share: the reads of a load, and those that it needs."""

from __future__ import annotations

from typing import Any

from case_checks import Recorder, nan_memory

import loader
from loader.testing.checkpoint import TinyCheckpoint
from loader.testing.container import read_header

GAP = 4096
MIB = 1 << 20
UNUSED = ("input_scale", "input_global_scale")
Interval = tuple[str, int, int]


def needed(checkpoint: TinyCheckpoint, layer: int, experts: tuple[int, ...]) -> list[Interval]:
    """(file, first byte, last byte) of every expert tensor that a rank needs, in file order."""
    found = []
    for path in checkpoint.files():
        header, begin = read_header(path)
        for name, entry in header.items():
            words = name.split(".")
            if f".layers.{layer}." not in name or "experts" not in words:
                continue
            expert = words[words.index("experts") + 1]
            if words[-1] in UNUSED or (expert.isdecimal() and int(expert) not in experts):
                continue
            first, last = entry["data_offsets"]
            found.append((path.name, begin + first, begin + last))
    return sorted(found)


def merged(intervals: list[Interval], gap: int = GAP) -> list[Interval]:
    """Runs of intervals that lie no further apart than ``gap``."""
    runs: list[Interval] = []
    for file, first, last in sorted(intervals):
        if runs and runs[-1][0] == file and first - runs[-1][2] <= gap:
            runs[-1] = (file, runs[-1][1], max(last, runs[-1][2]))
        else:
            runs.append((file, first, last))
    return runs


def reads_by_layer(
    checkpoint: TinyCheckpoint, **settings: Any
) -> tuple[dict[int, list[Interval]], loader.LoadReport]:
    """Payload reads of a load, by the layer whose tensors they begin with."""
    layer_at: dict[str, list[tuple[int, int]]] = {}
    for path in checkpoint.files():
        header, begin = read_header(path)
        layer_at[path.name] = sorted(
            (begin + entry["data_offsets"][0], int(name.split(".layers.")[1].split(".")[0]))
            for name, entry in header.items()
            if ".experts." in name and entry["data_offsets"][0] < entry["data_offsets"][1]
        )
    source = Recorder(checkpoint.folder)
    with source, nan_memory():
        report = loader.load(source, **settings).report
    by_layer: dict[int, list[Interval]] = {}
    for file, offset, length in source.payload_reads():
        layer = max((at, n) for at, n in layer_at[file] if at <= offset)[1]
        by_layer.setdefault(layer, []).append((file, offset, offset + length))
    return by_layer, report


def check_reads(reads: list[Interval], wanted: list[Interval], *, sliced: bool = False) -> None:
    """In file order, no byte twice, all that is needed, and small gaps but nothing else beside."""
    assert reads == sorted(reads), "not in file order"
    for (file, _, last), (other, first, _) in zip(reads, reads[1:], strict=False):
        assert file != other or last <= first, "a byte is read twice"
    runs = merged(wanted)
    for file, first, last in reads:
        inside = any(f == file and a <= first and last <= b for f, a, b in runs)
        assert inside, "more is read than the runs that are needed"
    for file, first, last in [] if sliced else wanted:
        inside = any(f == file and a <= first and last <= b for f, a, b in merged(reads, 0))
        assert inside, "a byte that is needed is not read"

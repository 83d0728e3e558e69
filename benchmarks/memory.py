"""Host memory of a load against what stays, each side in a fresh process.

    python benchmarks/memory.py [--json FILE]

Sides: ``qpn`` is ``loader.load``; ``usual`` holds a layer's source tensors, converts expert by
expert into lists, stacks them and drops the sources, as loaders commonly do. Both convert the same
checkpoints to the same bytes. The counter is RssAnon + RssShmem, sampled every 2 ms; one small
warm-up load comes first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MIB = 1 << 20
PRESETS = ("awq-1.2gb", "awq-2.4gb", "nvfp4-1.2gb")


def measure(side: str, folder: Path, warm: Path) -> dict[str, Any]:
    """Run one side in a fresh process and return its counters."""
    command = [sys.executable, __file__, "--child", side, str(folder), str(warm)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def child(side: str, folder: str, warm: str) -> None:
    """What the fresh process does."""
    import loader
    from loader.memory import HostPeak, host_memory, return_to_system

    run = _usual if side == "usual" else loader.load
    run(warm)
    return_to_system()
    before = host_memory()
    with HostPeak(0.002) as peak:
        held = run(folder)
    after = host_memory()
    plan = loader.plan(folder)
    result = {
        "side": side,
        "baseline": before.anonymous,
        "peak": peak.anonymous - before.anonymous,
        "stays": after.anonymous - before.anonymous,
        "file_peak": peak.file - before.file,
        "resident": plan.resident_bytes,
        "layers": len(plan.layers),
        "layer_source": plan.layers[0].source_bytes,
        "predicted_peak": plan.predicted_peak,
    }
    del held
    print(json.dumps(result))


def _usual(folder: str) -> list[list[Any]]:
    """Load, then convert: a layer's sources resident, experts converted one by one and stacked."""
    import torch
    from safetensors import safe_open

    import loader
    from loader.converter import LayerBanks, LayerConverter
    from loader.pieces import descriptors_of

    plan = loader.plan(folder)
    catalog = plan.checkpoint.catalog
    layers = []
    for layer in plan.layers:
        pieces = layer.pieces()
        sources = {}
        for number, name in enumerate(catalog.files):
            rows = pieces["tensor"][pieces["file"] == number]
            if len(rows):
                with safe_open(Path(folder) / name, "pt") as file:
                    for row in rows.tolist():
                        sources[row] = file.get_tensor(catalog.names[row]).clone()
        spec = _one_expert(layer.spec)
        experts = []
        for slot in range(layer.spec.w13.experts):
            banks = LayerBanks.allocate(spec, torch.device("cpu"), layer.zero_point)
            cache = torch.empty((0, 3))
            for one in pieces[pieces["slot"] == slot]:
                own = one.reshape(1).copy()
                own["slot"], own["offset"] = 0, 0
                data = sources[int(one["tensor"])].reshape(-1).view(torch.uint8)
                converter = LayerConverter(banks, _Cache(cache))
                converter.write(data, torch.from_numpy(descriptors_of(own)))
            LayerConverter(banks, _Cache(cache)).finish()
            experts.append(banks.tensors)
        layers.append([torch.cat(parts) for parts in zip(*experts, strict=True)])
    return layers


class _Cache:
    def __init__(self, numbers: Any) -> None:
        self.globals = numbers


def _one_expert(spec: Any) -> Any:
    from dataclasses import replace

    return replace(spec, w13=replace(spec.w13, experts=1), w2=replace(spec.w2, experts=1))


def main() -> None:
    """Make the checkpoints, measure every side, print a table and JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help="keep (and reuse) the checkpoints here")
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    from loader.table import Table, render
    from loader.testing.checkpoint import PRESETS as SETTINGS
    from loader.testing.checkpoint import tiny_checkpoint

    results = []
    with tempfile.TemporaryDirectory() as scratch:
        root = options.folder or Path(scratch)
        warm = Path(scratch) / "warm"
        tiny_checkpoint(warm)
        for preset in PRESETS:
            folder = root / preset
            if not folder.exists():
                tiny_checkpoint(folder, **SETTINGS[preset])
            for side in ("qpn", "usual"):
                results.append({"checkpoint": preset, **measure(side, folder, warm)})
    rows = [
        (
            r["checkpoint"],
            r["side"],
            r["layers"],
            f"{r['resident'] / MIB:.0f}",
            f"{r['stays'] / MIB:.0f}",
            f"{r['peak'] / MIB:.0f}",
            f"{(r['peak'] - r['resident']) / MIB:.0f}",
            f"{r['predicted_peak'] / MIB:.0f}" if r["side"] == "qpn" else "-",
            f"{r['file_peak'] / MIB:.0f}",
            f"{r['layer_source'] / MIB:.0f}",
        )
        for r in results
    ]
    columns = ["checkpoint", "side", "layers", "resident", "stays", "peak", "overhead"]
    columns += ["predicted peak", "file peak", "one layer's source"]
    print(
        render(
            Table("Host memory in MiB above the baseline", columns, rows, ("checkpoint", "side"))
        )
    )
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""The report of a load: the keys that stay, complete, serializable, and true."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import loader
from loader import Shard
from loader.errors import LoaderError
from loader.report import LayerMeasured, LoadReport, MemoryMeasured, write_json
from loader.testing.checkpoint import tiny_checkpoint
from loader.testing.container import edit_tensor

#: Keys that stay, whatever else is added.
TOP = {"schema", "source", "device", "shard", "policy", "layers", "memory", "seconds", "gb_per_s"}
LAYER = {
    "layer",
    "format",
    "geometry",
    "metadata_layout",
    "bytes",
    "routes",
    "seconds",
    "releases",
}
BYTES = {"source", "weight", "metadata", "globals", "unquantized", "metadata_wide", "saved"}
MEMORY = {
    "predicted_resident",
    "predicted_peak",
    "resident",
    "workspace",
    "baseline",
    "peak",
    "overhead",
    "staging",
    "conversion",
    "host_pinned",
    "allocated",
    "reserved",
    "device_used",
    "host_anonymous_peak",
    "host_file_peak",
    "host_uss_peak",
}
MEASURED_TOP = {"seconds", "gb_per_s", "bytes_read", "nonfinite"}
MEASURED_LAYER = {"seconds", "releases"}


def _load(folder: Path, **settings: Any) -> Any:
    sizes: dict[str, Any] = {"hidden": 64, "intermediate": 64, "experts": 3, "layers": 2}
    tiny_checkpoint(folder, **{**sizes, **settings})
    return loader.load(folder, shard=Shard(ep_rank=1, ep_size=2))


@pytest.mark.parametrize("dialect", ("awq-gemm", "ct-int4", "ct-nvfp4", "modelopt-nvfp4"))
def test_the_keys_of_the_contract_are_all_there(dialect: str, tmp_path: Path) -> None:
    described = _load(tmp_path, dialect=dialect, excluded=(1,)).report.to_dict()
    assert set(described) >= TOP
    assert described["schema"] == 1
    assert set(described["memory"]) >= MEMORY
    for layer in described["layers"]:
        assert set(layer) >= LAYER
        assert set(layer["bytes"]) == BYTES
        assert set(layer["seconds"]) == {"read", "convert", "release"}
        assert layer["releases"] == 1
        for route in layer["routes"]:
            assert set(route) == {"tokens", "route", "implementation", "reason"}
            first, last = route["tokens"]
            assert type(first) is int and (last is None or type(last) is int)
    assert json.loads(json.dumps(described, allow_nan=False)) == described


def test_the_report_is_the_plan_with_what_was_measured(tmp_path: Path) -> None:
    experts = _load(tmp_path, dialect="awq-gemm")
    described = experts.report.to_dict()
    planned = loader.plan(tmp_path, Shard(ep_rank=1, ep_size=2)).to_dict()
    assert set(described) - set(planned) == MEASURED_TOP
    for layer, before in zip(described["layers"], planned["layers"], strict=True):
        assert set(layer) - set(before) == MEASURED_LAYER
        assert {key: layer[key] for key in before} == before
    for section in ("shard", "policy", "skipped", "left_alone", "source", "device"):
        assert described[section] == planned[section]
    card = ("card", "fits")  # what is free now is not what was free then
    for key, value in planned["memory"].items():
        assert key in card or described["memory"][key] == value


def test_what_was_measured_is_true(tmp_path: Path) -> None:
    experts = _load(tmp_path, dialect="modelopt-nvfp4")
    report = experts.report
    described, memory = report.to_dict(), report.to_dict()["memory"]
    banks = sum(t.numel() * t.itemsize for layer in experts.values() for t in layer.banks())
    workspace = sum(t.numel() * t.itemsize for t in experts[0].workspace.tensors())
    assert memory["workspace"] == workspace
    assert memory["resident"] == banks + workspace == memory["predicted_resident"]
    assert memory["overhead"] == memory["peak"] - memory["baseline"] - memory["resident"]
    assert memory["device_used"] is None
    assert memory["peak"] == memory["host_anonymous_peak"] >= memory["baseline"] > 0
    assert memory["host_file_peak"] > 0 and memory["host_uss_peak"] > 0
    plan = loader.plan(tmp_path, Shard(ep_rank=1, ep_size=2))
    assert report.bytes_read == sum(plan.read_bytes(layer) for layer in (0, 1))
    assert described["gb_per_s"] == report.bytes_read / report.seconds / 1e9
    spent = [second for layer in described["layers"] for second in layer["seconds"].values()]
    assert all(second >= 0 for second in spent) and sum(spent) > 0
    assert report.seconds > 0


def test_numbers_become_sentences_and_files(tmp_path: Path) -> None:
    layers = {"layer": 3, "bytes": {}}
    planned = {"device": "cpu", "layers": [layers], "memory": {"predicted_resident": 1 << 20}}
    measured = MemoryMeasured(resident=1 << 20, baseline=5 << 20, peak=9 << 20)
    report = LoadReport(planned, {3: LayerMeasured(0.5, 0.25, 0.125, 1)}, measured, 2.0, 4 * 10**9)
    assert measured.overhead == 3 << 20
    assert report.gb_per_s == 2.0
    assert report.memory_line() == (
        "cpu: resident 1.00 MiB (predicted 1.00 MiB), overhead 3.00 MiB, 2.00 GB/s in 2.00 s"
    )
    measured.peak = 4 << 20
    assert measured.overhead == report.to_dict()["memory"]["overhead"] == -2 << 20
    assert "overhead unknown: at least 2.00 MiB from before was" in report.memory_line()
    described = report.to_dict()
    seconds = {"read": 0.5, "convert": 0.25, "release": 0.125}
    assert described["layers"] == [{**layers, "seconds": seconds, "releases": 1}]
    report.to_json(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == described
    assert (tmp_path / "report.json").read_text().endswith("}\n")
    write_json({"a": [1]}, str(tmp_path / "more.json"))
    assert json.loads((tmp_path / "more.json").read_text()) == {"a": [1]}


def test_kept_values_are_listed(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden": 64, "intermediate": 64, "experts": 2, "layers": 1}
    checkpoint = tiny_checkpoint(tmp_path, group=32, **sizes)
    name = checkpoint.name(0, 1, "down", "scales")

    def spoil(values: Any) -> None:
        values[1, 3] = float("nan")

    edit_tensor(tmp_path, name, spoil)
    experts = loader.load(tmp_path, policy=loader.Policy(nonfinite="warn"))
    (line,) = experts.report.to_dict()["nonfinite"]
    assert name in line
    json.dumps(experts.report.to_dict(), allow_nan=False)


def test_a_report_that_cannot_be_written_whole_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_json({"a": 1}, path)
    with pytest.raises(TypeError):
        write_json({"a": object()}, path)
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_report_goes_to_what_cannot_be_replaced_as_it_is(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    link.symlink_to(target)
    write_json([1], link)
    assert link.is_symlink() and json.loads(target.read_text()) == [1]
    write_json([2], "/dev/null")
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("name", ["", None, 5, "there/is/none/x.json", ".", "/dev/full", "a\0b"])
def test_a_report_that_cannot_be_written_is_an_error_of_ours_with_its_name(
    name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LoaderError, match="the report cannot be written; file ") as caught:
        write_json({"a": 1}, name)
    assert caught.value.file == (str(name) or "''") and caught.value.found
    assert not list(tmp_path.iterdir())


def test_a_report_may_have_as_long_a_name_as_any_file(tmp_path: Path) -> None:
    for name in ("x" * 250 + ".json", "é" * 125 + ".json"):
        write_json([1], tmp_path / name)
        assert json.loads((tmp_path / name).read_text()) == [1]
    with pytest.raises(LoaderError, match="File name too long"):
        write_json([1], tmp_path / ("x" * 256))

"""What loading a whole model costs beside what stays, measured in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from load_fakes import RecordingSource

from loader.integrations.transformers import from_pretrained
from loader.testing.checkpoint import tiny_checkpoint

pytest.importorskip("transformers", reason="Transformers is not installed")

FIXTURES = Path(__file__).parents[2] / "fixtures" / "checkpoints"
MIB = 1 << 20
STAGING = 8 * MIB


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    tiny_checkpoint(
        folder,
        family="mixtral",
        dialect="awq-gemm",
        group=128,
        hidden=1024,
        intermediate=2048,
        experts=8,
        layers=2,
        vocabulary=32000,
        payload="fast",
    )
    probe = Path(__file__).with_name("model_memory_probe.py")
    result = subprocess.run(
        [sys.executable, str(probe), str(folder), "float32", str(STAGING)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    found["files"] = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return found


def test_the_peak_is_what_stays_and_the_staging(measured: Any) -> None:
    report = measured["report"]
    assert report["resident"] == report["predicted_resident"] > 250 * MIB
    rise = measured["peak"] - measured["before"]
    assert rise - report["resident"] <= STAGING + 64 * MIB
    # Half of the embedding alone would show: it is converted to fp32 on its way.
    assert rise <= report["predicted_peak"] + 8 * MIB
    assert report["predicted_peak"] - rise <= 32 * MIB


def test_the_bytes_of_the_files_are_read_once(measured: Any) -> None:
    assert measured["payload"] <= measured["files"] <= 1.01 * measured["payload"]


def test_what_stays_is_what_the_report_says_and_goes_with_the_model(measured: Any) -> None:
    report = measured["report"]
    assert report["resident"] - measured["tensors"] <= report["workspace"]
    assert abs(measured["after"] - measured["before"] - report["resident"]) <= 16 * MIB
    assert measured["dropped"] - measured["before"] <= 16 * MIB


@pytest.mark.parametrize(
    "name", ["deepseekv3-awq-gemm-g64", "qwen3moe-awq-gemm-g64-router", "qwen3next-ct-nvfp4a16"]
)
def test_no_range_is_asked_for_twice(name: str) -> None:
    with RecordingSource(FIXTURES / name) as source:
        from_pretrained(source, dtype="bfloat16")
    ranges = [(file, at, length) for _, file, at, length in source.log]
    assert len(ranges) > 30 and len(set(ranges)) == len(ranges)

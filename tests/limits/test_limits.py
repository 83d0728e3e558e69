"""Limits of the machine: memory, descriptors, folders, sizes at the edge."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import loader
from loader.command import main
from loader.testing.checkpoint import TinyCheckpoint, tiny_checkpoint

REPOSITORY = Path(__file__).parents[2]
GROUPS = Path("/sys/fs/cgroup/memory")
MIB = 1 << 20
SMALL: dict[str, Any] = {"hidden": 64, "intermediate": 64, "group": 32, "attention": False}


def probe(name: str, *arguments: object) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("limit_probe.py")), name]
        + [str(argument) for argument in arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert result.returncode == 0, (result.returncode, result.stderr[-3000:])
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory control group of our own, below none of anyone else's."""
    folder = GROUPS / f"qpn-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").read_text()
    except OSError as error:
        pytest.skip(f"no memory control group can be made here: {error}")
    yield folder
    folder.rmdir()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """256 MiB in 8 layers."""
    return tiny_checkpoint(
        tmp_path_factory.mktemp("large"),
        hidden=1024,
        intermediate=1024,
        experts=20,
        layers=8,
        group=128,
        payload="fast",
        attention=False,
    )


def test_a_memory_limit_below_the_size_of_the_file(large: TinyCheckpoint, group: Path) -> None:
    size = sum(path.stat().st_size for path in large.files())
    for path in large.files():  # so that the pages are the reader's own, and counted as such
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    found = probe("under_group", large.folder, group, 96 * MIB)
    assert found["read"] > 0.9 * size and size > 2 * 96 * MIB
    assert found["most"] <= found["limit"]
    assert found["killed"] == 0
    assert found["pressure"] > 0, "the limit was never felt"
    kind, text = found["refusal"]
    assert kind == "CapacityError" and "bytes too many" in text and str(group) in text


def test_an_address_space_that_is_too_small(large: TinyCheckpoint) -> None:
    found = probe("under_address_space", large.folder)
    ends = found["ends"]
    assert set(ends) <= {"CapacityError", "loaded"}, ends
    assert ends["CapacityError"] > 5 and ends["loaded"] > 1
    kind, text = found["refusal"]
    assert kind == "CapacityError" and "address space" in text


def test_a_hundred_shards_under_64_descriptors(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, **SMALL, experts=16, layers=4, shards=100)
    assert len(list(tmp_path.glob("*.safetensors"))) == 100
    found = probe("few_descriptors", tmp_path, 64)
    assert found["layers"] > 0 and found["equal"] and found["open"] < 32


def test_a_folder_that_cannot_be_written() -> None:
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        folder = Path(name) / "model"
        tiny_checkpoint(folder, **SMALL)
        os.chmod(folder, 0o555)
        assert probe("read_only", folder) == {"status": 0, "unchanged": True}
        os.chmod(folder, 0o755)


@pytest.mark.parametrize("name", ["with two  spaces", "模型 é ñ 😀", "a'b\"c$(d)", "-x", "%s{}"])
def test_paths_of_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    tiny_checkpoint(tmp_path / name, **SMALL)
    monkeypatch.chdir(tmp_path)
    experts = loader.load(tmp_path / name)
    assert loader.verify(experts, tmp_path / name, samples=4).ok
    assert main(["load", f"./{name}", f"--json={name}.json"]) in (0, None)
    assert json.loads((tmp_path / f"{name}.json").read_text())["source"] == f"./{name}"
    assert capsys.readouterr().err == ""


def forward64(checkpoint: TinyCheckpoint, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """One layer in fp64 from the generator's own numbers, all router weights 1."""
    x = x.double()
    out = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        gate, up, down = (
            torch.from_numpy(checkpoint.weight(0, expert, part)) for part in ("gate", "up", "down")
        )
        rows, times = (ids == expert).any(1), (ids == expert).sum(1, keepdim=True)
        taken = x[rows]
        y = torch.nn.functional.silu(taken @ gate.t()) * (taken @ up.t()) @ down.t()
        out[rows] += y * times[rows]
    return out


@pytest.mark.parametrize(
    ("experts", "top_k", "tokens"),
    [(1, 1, 1), (1, 1, 9), (8, 8, 1), (8, 8, 5), (8, 8, 40), (4, 2, 0), (2, 1, 20_000)],
)
@pytest.mark.parametrize("dialect", ["awq-gemm", "ct-nvfp4"])
def test_sizes_at_the_edge(
    tmp_path: Path, dialect: str, experts: int, top_k: int, tokens: int
) -> None:
    """One layer, one expert, k = E, no token, very many tokens."""
    settings = {**SMALL, "group": 32 if dialect == "awq-gemm" else None}
    made = tiny_checkpoint(
        tmp_path, **settings, dialect=dialect, experts=experts, layers=1, top_k=top_k
    )
    layer = loader.load(tmp_path)[0]
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 64, generator=generator)
    ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k]
    y = layer(x, ids, torch.ones(tokens, top_k))
    assert y.shape == (tokens, 64)
    if tokens:
        right = forward64(made, x, ids)
        assert (y.double() - right).norm() <= 1e-5 * right.norm()


@pytest.mark.parametrize("fused", [False, True])
def test_twenty_thousand_experts(tmp_path: Path, fused: bool) -> None:
    made = tiny_checkpoint(
        tmp_path,
        dialect="ct-int4",
        fused=fused,
        hidden=32,
        intermediate=32,
        group=32,
        experts=20_000,
        layers=1,
        top_k=4,
        payload="fast",
        attention=False,
    )
    layer = loader.load(tmp_path)[0]
    right = torch.from_numpy(made.weight(0, 19_999, "up"))
    assert torch.equal(layer.dequantize(19_999)["up"].double(), right)
    last = layer(torch.randn(2, 32), torch.tensor([[19_999], [-1]]), torch.ones(2, 1))
    assert last[0].any() and not last[1].any()


def test_many_loads_in_one_process_do_not_grow(tmp_path: Path) -> None:
    """The recorded run has a thousand; here there are enough to see 64 KiB a load."""
    tiny_checkpoint(tmp_path, **SMALL)
    found = probe("many_loads", tmp_path, 150)
    assert max(found["growth"]) < 8 * MIB, found
    assert found["descriptors"] == 0

"""A default device or dtype of the caller's decides nothing: tensors are made where they belong."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from load_fakes import SMALL, banks_of, module_of, quantization_of, same_bits

import loader
from loader import Policy, Shard
from loader.bench import bench_steps
from loader.testing.checkpoint import TinyCheckpoint, tiny_checkpoint

PACKAGE = Path(loader.__file__).parent
MAKERS = {
    "arange",
    "as_tensor",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "scalar_tensor",
    "tensor",
    "zeros",
}
"""Functions of torch that ask the caller's default device."""

CASES = [("awq-gemm", "compact"), ("ct-int4", "record"), ("ct-nvfp4", "wide")]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SURROUNDINGS: dict[str, Any] = {
    "meta": lambda: torch.device("meta"),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
}
AROUND = pytest.mark.parametrize("around", SURROUNDINGS)


@pytest.fixture(params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[TinyCheckpoint, Policy]:
    dialect, layout = request.param
    sizes = {**SMALL, "group": None if "nvfp4" in dialect else 32}
    if "nvfp4" not in dialect:
        sizes["scale_dtype"] = "F16"
    made = tiny_checkpoint(tmp_path, dialect=dialect, layers=2, attention=False, **sizes)
    return made, Policy(layout=layout)


def steps(module: loader.PreparedExperts) -> list[torch.Tensor]:
    """Results of every route; the inputs are made on the host outright."""
    found = []
    for tokens in (1, 3, 12):
        x = torch.linspace(-1, 1, tokens * 64, dtype=torch.float32, device="cpu").view(tokens, 64)
        ids = torch.arange(2 * tokens, device="cpu").view(tokens, 2) % 4
        found.append(module(x, ids, torch.ones(ids.shape, dtype=torch.float32, device="cpu")))
    return found


@AROUND
def test_a_load_and_its_steps(case: tuple[TinyCheckpoint, Policy], around: str, way: str) -> None:
    made, policy = case
    shard = Shard(ep_size=2, ep_rank=1)
    before = loader.load(made, shard=shard, policy=policy)
    with SURROUNDINGS[around]():
        plan = loader.plan(made, shard=shard, policy=policy)
        experts = loader.load(made, shard=shard, policy=policy)
        results = steps(experts[1])
        weights = experts[0].dequantize(3)
        report = loader.verify(experts, made, samples=32)
        measured = bench_steps(experts, [1, 3], 2, torch.bfloat16)
    assert plan.resident_bytes == experts.report.memory.resident
    assert same_bits(banks_of(experts), banks_of(before))
    assert all(map(torch.equal, results, steps(before[1])))
    wanted = before[0].dequantize(3)
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert report.ok and len(measured) == 2


@AROUND
def test_a_conversion_in_place(case: tuple[TinyCheckpoint, Policy], around: str) -> None:
    made, policy = case
    one, two = module_of(made, 1), module_of(made, 1)
    quantization = quantization_of(made)
    before = loader.prepare_module(one, quantization=quantization, policy=policy)
    with SURROUNDINGS[around]():
        prepared = loader.prepare_module(two, quantization=quantization, policy=policy)
        results = steps(prepared)
    assert same_bits(banks_of(prepared), banks_of(before))
    assert all(map(torch.equal, results, steps(before)))


@AROUND
def test_findings_are_found(tmp_path: Path, around: str, way: str) -> None:
    """What is reported of a bad value is a table of its own, made by whatever converts."""
    from loader.testing.container import edit_tensor

    made = tiny_checkpoint(tmp_path, dialect="ct-nvfp4", **{**SMALL, "group": None})
    name = made.name(1, 2, "up", "weight_global_scale")
    edit_tensor(tmp_path, name, lambda value: value * 0)
    with SURROUNDINGS[around](), pytest.raises(loader.ConversionError, match="a global scale"):
        loader.load(made)


def test_every_tensor_is_made_with_a_device() -> None:
    vague = []
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and (node.func.value.id, node.func.attr in MAKERS) == ("torch", True)
                and not any(keyword.arg in ("device", None) for keyword in node.keywords)
            ):
                vague.append(f"{file.relative_to(PACKAGE)}:{node.lineno} torch.{node.func.attr}")
    assert vague == []

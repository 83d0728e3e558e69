"""The public surface: names, signatures, docstrings, and what ``import loader`` brings along."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch

import loader
from loader.errors import LoaderError
from loader.testing.checkpoint import TinyCheckpoint, tiny_checkpoint

ERRORS = {
    "CapacityError",
    "CheckpointError",
    "ConversionError",
    "LifecycleError",
    "LoaderError",
    "PolicyError",
    "ShardError",
    "UnsupportedError",
}
NAMES = ERRORS | {
    "FAMILIES",
    "Family",
    "LayerEvent",
    "LoadReport",
    "LoadedExperts",
    "Plan",
    "Policy",
    "PreparedExperts",
    "Shard",
    "VerifyReport",
    "__version__",
    "load",
    "plan",
    "prepare_module",
    "verify",
}


def test_the_names() -> None:
    assert set(loader.__all__) == NAMES
    assert len(loader.__all__) == len(NAMES)
    assert all(hasattr(loader, name) for name in NAMES)
    errors = {
        name
        for name in loader.__all__
        if isinstance(getattr(loader, name), type) and issubclass(getattr(loader, name), Exception)
    }
    assert errors == ERRORS
    assert all(issubclass(getattr(loader, name), LoaderError) for name in errors)


def test_the_functions_that_share_a_name_with_a_module_are_functions() -> None:
    importlib.import_module("loader.plan")
    importlib.import_module("loader.verify")
    assert isinstance(loader.plan, FunctionType) and isinstance(loader.verify, FunctionType)


SIGNATURES: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    # callable, positional or keyword with defaults, keyword only
    (
        loader.plan,
        {"source": None, "shard": None, "policy": None, "layers": None},
        {
            "device": "cpu",
            "staging_bytes": 64 << 20,
            "card_memory": None,
            "family": None,
            "revision": None,
        },
    ),
    (
        loader.load,
        {
            "source": None,
            "device": "cpu",
            "shard": None,
            "policy": None,
            "layers": None,
            "staging_bytes": 64 << 20,
            "observers": (),
        },
        {"card_memory": None, "family": None, "revision": None},
    ),
    (
        loader.verify,
        {"experts": None, "source": None, "samples": 1152, "seed": 0},
        {"names": None, "route_of": None, "revision": None},
    ),
    (
        loader.prepare_module,
        {"module": None},
        {
            "quantization": None,
            "layer": 0,
            "shard": None,
            "policy": None,
            "observers": (),
            "num_experts": None,
            "workspace": None,
            "empty_cache": True,
            "card_memory": None,
        },
    ),
    (
        loader.Policy,
        {
            "qpn_m1": "auto",
            "qpn_grouped": "auto",
            "compact_metadata": "auto",
            "layout": None,
            "awq_rounding": "exact",
            "grouped_max_tokens": None,
            "nonfinite": "error",
        },
        {},
    ),
    (
        loader.Shard,
        {"tp_rank": 0, "tp_size": 1, "ep_rank": 0, "ep_size": 1, "expert_ids": None},
        {},
    ),
    (loader.LayerEvent, {"layer": None, "state": None, "seconds": None, "bytes": None}, {}),
    (loader.Family, {"name": None, "pattern": None, "projections": None}, {}),
    (
        loader.PreparedExperts.forward,
        {"self": None, "hidden_states": None, "topk_ids": None, "topk_weights": None, "out": None},
        {},
    ),
    (loader.PreparedExperts.dequantize, {"self": None, "expert_id": None}, {}),
    (loader.LoadReport.to_json, {"self": None, "path": None}, {}),
]


@pytest.mark.parametrize(
    ("function", "positional", "keyword"), SIGNATURES, ids=lambda v: getattr(v, "__name__", "")
)
def test_the_signatures(function: Any, positional: dict[str, Any], keyword: dict[str, Any]) -> None:
    parameters = inspect.signature(function).parameters.values()
    default = {p.name: None if p.default is p.empty else p.default for p in parameters}
    both = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    only = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert both == list(positional)
    assert set(only) == set(keyword)
    assert default == {**positional, **keyword}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    sizes: dict[str, Any] = {"hidden": 64, "intermediate": 64, "experts": 4, "group": 32}
    return tiny_checkpoint(tmp_path_factory.mktemp("public"), layers=4, excluded=(0,), **sizes)


def test_the_lines_of_the_contract(checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    """The public surface, line by line."""
    source = checkpoint.folder
    shard = loader.Shard(tp_rank=0, tp_size=2)
    planned = loader.plan(source, shard=shard, policy=loader.Policy(), layers=None)
    assert planned.to_dict()["schema"] == 1 and str(planned)
    events: list[loader.LayerEvent] = []
    experts = loader.load(
        source, device="cpu", shard=shard, layers=None, staging_bytes=64 << 20,
        observers=[events.append],
    )  # fmt: skip
    assert isinstance(experts, Mapping) and list(experts) == [0, 1, 2, 3] and len(experts) == 4
    assert isinstance(experts[3], loader.PreparedExperts)
    assert isinstance(experts[3], torch.nn.Module)
    assert 9 not in experts
    assert {event.state for event in events} >= {"planned", "reading", "ready"}
    x = torch.ones(3, 64)
    ids, weights = torch.tensor([[0, 1]] * 3), torch.full((3, 2), 0.5)
    y = experts[3](x, ids, weights)
    assert y.shape == (3, 64)
    out = torch.empty_like(y)
    assert experts[3](x, ids, weights, out=out) is out and torch.equal(out, y)
    one = experts[3].dequantize(2)
    assert {name: tuple(weight.shape) for name, weight in one.items()} == {
        "gate": (32, 64),
        "up": (32, 64),
        "down": (64, 32),
    }
    assert all(weight.dtype == torch.float32 for weight in one.values())
    experts.report.to_json(tmp_path / "report.json")
    assert isinstance(experts.report, loader.LoadReport) and str(experts.report)
    checked = loader.verify(experts, source, samples=24)
    assert isinstance(checked, loader.VerifyReport) and checked.ok


def _modules() -> Iterator[ModuleType]:
    root = Path(loader.__file__).parent
    for file in sorted(root.rglob("*.py")):
        parts = ("loader", *file.relative_to(root).with_suffix("").parts)
        if "vllm" in parts and find_spec("vllm") is None:
            continue  # looked at where vLLM is, by `make test-vllm`
        if parts[-1] != "__main__":
            yield importlib.import_module(".".join(parts).removesuffix(".__init__"))


def _documented(module: ModuleType) -> Iterator[tuple[str, object]]:
    """Public functions, classes and methods that a module defines."""
    for name, value in vars(module).items():
        own = getattr(value, "__module__", None) == module.__name__
        if name.startswith("_") or not own or not isinstance(value, (type, FunctionType)):
            continue
        yield f"{module.__name__}.{name}", value
        if not isinstance(value, type):
            continue
        for part, member in vars(value).items():
            methods = (FunctionType, property, classmethod, staticmethod)
            if not part.startswith("_") and isinstance(member, methods):
                yield f"{module.__name__}.{name}.{part}", getattr(value, part)


def test_every_public_function_class_and_method_says_what_it_is() -> None:
    found = [entry for module in _modules() for entry in _documented(module)]
    assert len(found) > 250
    silent = []
    for name, value in found:
        text = inspect.getdoc(value) or ""
        # A dataclass without a docstring is given its signature as one.
        if not text or text.startswith(f"{name.rsplit('.', 1)[1]}("):
            silent.append(name)
    assert silent == []


def test_every_module_says_what_it_is() -> None:
    silent = [m.__name__ for m in _modules() if not (m.__doc__ or "").strip()]
    assert silent == []


def test_import_brings_nothing_that_only_some_uses_need() -> None:
    """Tables, progress, the generator and the command line come when they are asked for."""
    lazy = ("rich", "huggingface_hub", "transformers", "vllm", "loader.testing", "loader.command")
    code = f"import loader, sys; print([m for m in {lazy} if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_import_is_quick_beside_that_of_torch() -> None:
    """0.3 s of the processor, on the best of three tries: other processes slow it down, too."""
    code = (
        "import torch, time; t = time.process_time(); import loader; print(time.process_time() - t)"
    )
    seconds = []
    while len(seconds) < 3 and min(seconds, default=1.0) > 0.3:
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        seconds.append(float(ran.stdout))
    assert min(seconds) <= 0.3, seconds


def test_the_version_is_that_of_the_distribution() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert f'version = "{loader.__version__}"' in text
    assert 'qpn = "loader.command:main"' in text

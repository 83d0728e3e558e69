"""Which modules prepared experts can stand in for: by what they take and do, not by name."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

import pytest
import torch

from loader.integrations.transformers.contract import fault_of, sizes_of, takes_router_output


class Experts(torch.nn.Module):
    """The contract in its plainest form."""

    is_transposed = False

    def __init__(self, experts: int = 3, hidden: int = 8, width: int = 5) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.zeros(experts, 2 * width, hidden))
        self.down_proj = torch.nn.Parameter(torch.zeros(experts, hidden, width))
        self.act_fn: Any = torch.nn.SiLU()
        self.has_bias = False

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        return hidden_states


def test_what_keeps_the_contract_has_no_fault() -> None:
    module = Experts()
    assert takes_router_output(module) and fault_of(module) is None
    assert sizes_of(module) == (3, 8, 5)


def test_a_forward_that_takes_something_else_is_no_experts_module() -> None:
    assert not takes_router_output(torch.nn.Linear(2, 2))
    assert not takes_router_output(torch.nn.Module())

    class Other(Experts):
        def forward(self, hidden_states: Any, weights: Any, top_k_index: Any) -> Any:  # type: ignore[override]  # wrong on purpose
            return hidden_states

    assert not takes_router_output(Other())


def gelu(module: Experts) -> None:
    module.act_fn = torch.nn.GELU()


def biased(module: Experts) -> None:
    module.has_bias = True


def normed(module: Experts) -> None:
    module.has_post_expert_norm = True


def scaled(module: Experts) -> None:
    module.register_buffer("scale", torch.ones(1))


def flat(module: Experts) -> None:
    module.down_proj = torch.nn.Parameter(torch.zeros(8, 5))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (gelu, "another way"),
        (biased, "biases"),
        (normed, "norm"),
        (scaled, "scale"),
        (flat, "leading axis"),
    ],
)
def test_what_computes_something_else_has_a_fault(change: Any, words: str) -> None:
    module = Experts()
    change(module)
    fault = fault_of(module)
    assert fault is not None and words in fault


class Limited(Experts):
    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up.clamp(-40, 40)


class Interleaved(Experts):
    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(gate_up[..., ::2]) * gate_up[..., 1::2]


class Usual(Experts):
    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up


def test_a_gate_of_its_own_is_judged_by_what_it_gives() -> None:
    assert fault_of(Usual()) is None
    for module in (Limited(), Interleaved()):
        assert "another way" in str(fault_of(module))


def test_transposed_weights_are_measured_the_other_way() -> None:
    module = Experts(3, 5, 8)
    module.__dict__["is_transposed"] = True
    assert sizes_of(module) == (3, 8, 5)


def test_the_experts_of_transformers_keep_the_contract_or_are_told_apart() -> None:
    """Every experts class that Transformers has takes the router's output under these names."""
    transformers = pytest.importorskip("transformers", reason="Transformers is not installed")
    models = ("qwen3_moe", "qwen2_moe", "qwen3_next", "mixtral", "deepseek_v2", "deepseek_v3")
    seen = 0
    for name in (*models, "glm4_moe", "minimax", "olmoe", "gpt_oss"):
        package = importlib.import_module(f"transformers.models.{name}")
        assert any(m.name == f"modeling_{name}" for m in pkgutil.iter_modules(package.__path__))
        modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        for cls in vars(modeling).values():
            if inspect.isclass(cls) and cls.__name__.endswith("Experts"):
                seen += 1
                taken = list(inspect.signature(cls.forward).parameters)[1:4]
                assert name == "gpt_oss" or taken == [
                    "hidden_states",
                    "top_k_index",
                    "top_k_weights",
                ]
    assert seen >= 10 and transformers.__version__

"""Contract: which modules of a model are routed experts that prepared experts can stand in for.

A module is known by what it takes and what it does, never by its name: its forward takes hidden
states, selected experts and their weights, and it computes ``down(silu(gate(x)) * up(x))``.
"""

from __future__ import annotations

import inspect

import torch

ROUTER_CONTRACT = ("hidden_states", "top_k_index", "top_k_weights")
"""What the forward of an experts module takes, in order."""

_WEIGHTS = {"gate_up_proj", "down_proj"}
_UNSERVED = {
    "has_bias": "its experts have biases",
    "has_post_expert_norm": "its experts end in a norm",
}
_PROBE = torch.tensor(
    [
        [-50.0, -3.0, 0.5, 40.0, -60.0, -1.0, 2.0, 70.0],
        [0.0, 9.0, -9.0, 1.0, 1.0, 30.0, -30.0, 0.1],
    ],
    dtype=torch.float32,
    device="cpu",
)
"""Gate then up: large values too, so that a limit on either shows."""


def takes_router_output(module: torch.nn.Module) -> bool:
    """Whether the forward of ``module`` takes what a router gives to routed experts."""
    taken = list(inspect.signature(type(module).forward).parameters)[1:]
    return tuple(taken[: len(ROUTER_CONTRACT)]) == ROUTER_CONTRACT


def fault_of(module: torch.nn.Module) -> str | None:
    """Why prepared experts cannot stand in for an experts module; None where they can."""
    state = vars(module)
    for flag, what in _UNSERVED.items():
        if state.get(flag):
            return what
    own = {name for name, _ in module.named_parameters()} | {n for n, _ in module.named_buffers()}
    if own != _WEIGHTS:
        return f"it holds {', '.join(sorted(own)) or 'nothing'}, not {', '.join(sorted(_WEIGHTS))}"
    if any(tensor.dim() != 3 for tensor in module.parameters()):
        return "its weights have no leading axis of experts"
    gate, up = _PROBE.chunk(2, dim=-1)
    wanted = torch.nn.functional.silu(gate) * up
    if not torch.allclose(_gated(module), wanted, rtol=1e-5, atol=1e-6):
        return "it combines gate and up in another way than silu(gate) * up"
    return None


def _gated(module: torch.nn.Module) -> torch.Tensor:
    apply_gate = inspect.getattr_static(type(module), "_apply_gate", None)
    if apply_gate is not None:
        return torch.as_tensor(apply_gate(module, _PROBE), device="cpu")
    gate, up = _PROBE.chunk(2, dim=-1)
    return torch.as_tensor(module.get_submodule("act_fn")(gate), device="cpu") * up


def sizes_of(module: torch.nn.Module) -> tuple[int, int, int]:
    """Experts, hidden size and intermediate size of an experts module without a fault."""
    shape = module.get_parameter("down_proj").shape
    experts, hidden, intermediate = (int(size) for size in shape)
    if vars(module).get("is_transposed"):
        hidden, intermediate = intermediate, hidden
    return experts, hidden, intermediate

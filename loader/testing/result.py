"""Result: what an operator returns, in the shapes that its own fake implementation gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_map


def zeros(
    operator: torch._ops.OpOverload, positional: Sequence[Any], by_name: Mapping[str, Any]
) -> Any:
    """Zeros as a call of ``operator`` returns them; 0 rows where only a run knows how many."""
    # Static: only what the fake itself makes up, such as a count of findings, has no number.
    with FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True) as mode:

        def fake(value: Any) -> Any:
            return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

        described = operator(*tree_map(fake, positional), **tree_map(fake, by_name))
    return tree_map(_real, described)


def _real(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    shape = [size if isinstance(size, int) else 0 for size in value.shape]
    return torch.zeros(shape, dtype=value.dtype, device=value.device)

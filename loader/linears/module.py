"""PreparedLinear: a quantized linear outside the experts as a module, served from its bank."""

from __future__ import annotations

from typing import Any

import torch

from loader import native
from loader.bank import BankSpec
from loader.banked import BankedModule
from loader.errors import LoaderError
from loader.linears.plan import LinearPlan
from loader.route import RouteRange, limits

_BIAS = "bias"


class PreparedLinear(BankedModule):
    """``y = x @ W.T + bias`` from a bank; stands where the model had a ``torch.nn.Linear``.

    Buffers ``bank_*`` are the tensors of the bank (``loader/bank.py``), ``bias`` is in the
    checkpoint's dtype.
    ``scratch`` fp32 is shared by the linears of one load; one forward at a time uses it.
    """

    what = "prepared linears"

    def __init__(
        self,
        plan: LinearPlan,
        tensors: list[torch.Tensor],
        bias: torch.Tensor | None,
        scratch: torch.Tensor,
    ) -> None:
        # Not `weight`: code that reads a weight directly must fail, not take words for numbers.
        names = [f"bank_{tensor.name}" for tensor in plan.bank.tensors()]
        extra = [] if bias is None else [_BIAS]
        super().__init__([*names, *extra], [*tensors, *([] if bias is None else [bias])])
        self._count = len(names)
        self._plan = plan
        self._spec_ints = plan.spec.to_ints()
        self._route_limits = limits(plan.routes)
        self._scratch = [scratch]  # a list: shared, no buffer, in no state dict

    @property
    def layer(self) -> int | None:
        """Layer index in the model, None outside of layers."""
        return self._plan.source.source.layer

    @property
    def name(self) -> str:
        """Module name in the checkpoint."""
        return self._plan.name

    @property
    def format(self) -> str:
        """Format on disk, such as ``awq-gemm``."""
        return self._plan.source.scheme.format

    @property
    def in_features(self) -> int:
        """K on this card."""
        return self._plan.k

    @property
    def out_features(self) -> int:
        """N on this card."""
        return self._plan.n

    @property
    def spec(self) -> BankSpec:
        """Layout, sizes, group, phase and meaning of the bank."""
        return self._plan.bank

    @property
    def routes(self) -> tuple[RouteRange, ...]:
        """Routes by token count, each with its reason."""
        return self._plan.routes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(..., K)`` fp16, bf16 or fp32 -> ``(..., N)`` of the same dtype. For inference.

        Raises :class:`LoaderError` for a dtype, shape or device that does not match.
        """
        device = self._scratch[0].device
        self.require_dense("input", x)
        if x.dim() < 1 or x.shape[-1] != self.in_features:
            self.refuse("input", f"(..., {self.in_features})", tuple(x.shape))
        if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            self.refuse("input", "float16, bfloat16 or float32", x.dtype)
        if x.device != device:
            self.refuse("input", f"device {device}", x.device)
        rows = x.reshape(-1, self.in_features).contiguous()
        out = rows.new_empty((rows.shape[0], self.out_features))
        tensors = self.banks()
        bias = tensors[self._count] if len(tensors) > self._count else None
        native.linear(
            out,
            self._scratch[0],
            rows,
            bias,
            tensors[: self._count],
            self._spec_ints,
            self._route_limits,
        )
        return out.view(*x.shape[:-1], self.out_features)

    def refuse(self, what: str, expected: object, found: object) -> None:
        """Raise the error that says what does not match the linear."""
        raise LoaderError(
            f"{what} does not match the linear",
            layer=self.layer,
            tensor=self.name,
            expected=expected,
            found=found,
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"format={self.format}, layout={self.spec.layout}, group={self.spec.group}"
        )

    def get_extra_state(self) -> dict[str, Any]:
        """Everything that gives the bytes of the bank their meaning."""
        return {"schema": 1, "format": self.format, "spec": list(self._spec_ints)}

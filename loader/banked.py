"""Banked: a module whose buffers are banks: bits that no cast changes, decisions that stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from loader.errors import LifecycleError

_BIT_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_Self = TypeVar("_Self", bound="BankedModule")


class BankedModule(torch.nn.Module):
    """Base of what a load leaves on a card; its banks are registered buffers.

    A subclass gives ``layer``, ``get_extra_state`` and ``refuse``; nothing makes a bare base.

    ``what`` names such modules in errors. What gives the bytes their meaning travels in the extra
    state. A property of a subclass is a decision of the load: assigning to it raises.
    """

    what = "prepared banks"
    _is_strict = False
    """Whether the running ``load_state_dict`` is our own and strict; torch does not say."""

    def __init__(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in zip(names, tensors, strict=True):
            self.register_buffer(name, tensor)
        self._bank_names = tuple(names)

    def __setattr__(self, name: str, value: Any) -> None:
        if any(isinstance(vars(one).get(name), property) for one in type(self).__mro__):
            raise LifecycleError(
                f"{name} was decided when the layer was loaded and does not change",
                layer=self.layer,
                expected="another load with other settings",
                found=f"an assignment to {name}",
            )
        self._require_no_bank(name, "an assignment to")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._require_no_bank(name, "a removal of")
        super().__delattr__(name)

    def _require_no_bank(self, name: str, found: str) -> None:
        """Captured graphs hold the addresses of banks, and their bytes fit no other place."""
        if name in vars(self).get("_bank_names", ()):
            raise LifecycleError(
                f"{name} is a bank and stays where it is",
                layer=self.layer,
                expected="load_state_dict, or another load",
                found=f"{found} {name}",
            )

    @property
    def layer(self) -> int | None:
        """Layer index in the model, None outside of layers."""
        raise NotImplementedError  # of the base alone

    def get_extra_state(self) -> dict[str, Any]:
        """Everything that gives the bytes of the banks their meaning."""
        raise NotImplementedError  # of the base alone

    def refuse(self, what: str, expected: object, found: object) -> None:
        """Raise the error that says what does not match."""
        raise NotImplementedError  # of the base alone

    def require_dense(self, name: str, tensor: torch.Tensor) -> None:
        """Refuse what has no number at every place: other layouts, and what is no tensor."""
        if not isinstance(tensor, torch.Tensor):
            self.refuse(name, "a tensor", type(tensor).__name__)
        if tensor.is_nested or tensor.layout != torch.strided:
            self.refuse(name, "a dense tensor", "nested" if tensor.is_nested else tensor.layout)

    def banks(self) -> list[torch.Tensor]:
        """The bank tensors, in the order that operators take them."""
        buffers = self._buffers
        return [tensor for name in self._bank_names if (tensor := buffers[name]) is not None]

    def set_extra_state(self, state: Any) -> None:
        """Accepts only a state that agrees with this layer; see ``load_state_dict``."""
        if state != self.get_extra_state():
            self.refuse("extra state", self.get_extra_state(), state)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As torch's; a key that is unknown is found before anything is copied, too."""
        self._is_strict = strict
        try:
            return super().load_state_dict(state_dict, strict, assign)
        finally:
            self._is_strict = False

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """All or nothing: every bank is checked before the first is copied; addresses stay."""
        faults = []
        key = prefix + "_extra_state"
        if state_dict.get(key) != self.get_extra_state():
            faults.append(f"{key}: expected {self.get_extra_state()}, found {state_dict.get(key)}")
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, own in zip(self._bank_names, self.banks(), strict=True):
            new = state_dict.get(prefix + name)
            if not isinstance(new, torch.Tensor):
                kind = (
                    "missing" if new is None else f"expected a tensor, found {type(new).__name__}"
                )
                faults.append(f"{prefix}{name}: {kind}")
            elif new.shape != own.shape or new.dtype != own.dtype:
                faults.append(
                    f"{prefix}{name}: expected {tuple(own.shape)} {own.dtype}, "
                    f"found {tuple(new.shape)} {new.dtype}"
                )
            elif new.is_meta or new.layout != torch.strided:
                faults.append(f"{prefix}{name}: expected values, found {new.layout} {new.device}")
            else:
                copies.append((own, new))
        if local_metadata.get("assign_to_params_buffers"):
            faults.append("assign=True would move the banks")
        known = {prefix + name for name in (*self._bank_names, "_extra_state")}
        unknown = [k for k in state_dict if k.startswith(prefix) and k not in known]
        unexpected_keys += unknown
        if unknown and self._is_strict:
            faults.append(f"unknown: {', '.join(unknown)}")
        if faults:
            error_msgs.append(f"{self.what} refuse the state: " + "; ".join(faults))
            return
        with torch.no_grad():
            for own, new in copies:
                own.copy_(new)

    def _apply(
        self: _Self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> _Self:
        """Banks are bits, not numbers, and stay where they are, in the order that kernels read.

        Dtype casts, memory formats and copies pass them by; device moves raise.
        """
        for own in self.banks():
            moved = fn(own.view(_BIT_TYPES[own.dtype.itemsize]))
            if moved.device != own.device:
                raise LifecycleError(
                    f"{self.what} do not move between devices",
                    layer=self.layer,
                    expected=f"another load with device={str(moved.device)!r}",
                    found=f"banks on {own.device}",
                )
        return self

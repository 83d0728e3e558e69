"""Lifecycle: the states of a layer, and the events that observers get (DESIGN section 7)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from loader.errors import LifecycleError

STATES = ("planned", "reading", "converting", "prepared", "released", "ready", "failed")

_NEXT = {
    None: ("planned",),
    "planned": ("reading",),
    "reading": ("reading", "converting"),
    "converting": ("prepared",),
    "prepared": ("released",),
    "released": ("ready",),
    "ready": (),
    "failed": (),
}


@dataclass(frozen=True)
class LayerEvent:
    """One transition of one layer.

    ``seconds`` since the load began; ``bytes``: what the layer will read in ``planned``, what it
    has consumed so far in ``reading``, its banks in ``prepared`` and ``ready``, what went back in
    ``released``, else 0.
    """

    layer: int
    state: str
    seconds: float
    bytes: int


Observer = Callable[[LayerEvent], None]


@dataclass(eq=False)
class Lifecycle:
    """Where each layer of one load stands; tells observers, and fails the load if one raises."""

    layers: Sequence[int]
    observers: Iterable[Observer] = ()
    began: float = field(default_factory=time.perf_counter)
    _state: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.observers = tuple(self.observers)

    def enter(self, layer: int, state: str, nbytes: int = 0) -> None:
        """Move a layer on and tell the observers.

        Raises :class:`LifecycleError` for a transition that is not one, or where an observer
        raised (which is then the cause).
        """
        before = self._state.get(layer)
        if state not in _NEXT[before]:
            raise LifecycleError(
                "a layer cannot take this step",
                layer=layer,
                expected=" or ".join(_NEXT[before]) or f"nothing after {before}",
                found=state,
            )
        self._state[layer] = state
        self._tell(LayerEvent(layer, state, time.perf_counter() - self.began, nbytes))

    def _tell(self, event: LayerEvent) -> None:
        for observer in self.observers:
            try:
                observer(event)
            except Exception as error:
                raise LifecycleError(
                    f"an observer failed at {event.state}: {type(error).__name__}: {error}",
                    layer=event.layer,
                    expected="an observer that returns",
                    found=getattr(observer, "__qualname__", type(observer).__name__),
                ) from error

    def fail(self) -> list[Exception]:
        """Move every layer that is not ready to ``failed``; returns what observers raised on it.

        The load has failed already: an observer that fails now must not hide the first error.
        """
        raised: list[Exception] = []
        for layer in self.layers:
            if self._state.get(layer) in (None, "ready", "failed"):
                continue
            self._state[layer] = "failed"
            try:
                self._tell(LayerEvent(layer, "failed", time.perf_counter() - self.began, 0))
            except LifecycleError as error:
                raised.append(error)
        return raised

    def state(self, layer: int) -> str | None:
        """Present state of a layer, None before it was planned."""
        return self._state.get(layer)

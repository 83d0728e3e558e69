"""Lifecycle: the states of a layer, and the events that observers get (docs/lifecycle.md)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import FunctionType, MethodType

from loader.errors import LifecycleError, described

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
        event = LayerEvent(layer, state, time.perf_counter() - self.began, nbytes)
        for observer in self.observers:
            _tell(observer, event)

    def fail(self) -> list[LifecycleError]:
        """Move every layer to ``failed``, finished ones too; returns what observers raised on it.

        The load has failed already: an observer that fails now must neither hide the first error
        nor keep the news from the other observers.
        """
        raised: list[LifecycleError] = []
        for layer in self.layers:
            if self._state.get(layer) in (None, "failed"):
                continue
            self._state[layer] = "failed"
            event = LayerEvent(layer, "failed", time.perf_counter() - self.began, 0)
            for observer in self.observers:
                try:
                    _tell(observer, event)
                except LifecycleError as error:
                    raised.append(error)
        return raised

    def state(self, layer: int) -> str | None:
        """Present state of a layer, None before it was planned."""
        return self._state.get(layer)


def _tell(observer: Observer, event: LayerEvent) -> None:
    try:
        observer(event)
    except Exception as error:
        raise LifecycleError(
            f"an observer failed at {event.state}: {described(error)}",
            layer=event.layer,
            expected="an observer that returns",
            found=_name_of(observer),
        ) from error


def _name_of(observer: Observer) -> str:
    """Any callable may observe; only functions have a name of their own."""
    named = isinstance(observer, (FunctionType, MethodType))
    return observer.__qualname__ if named else type(observer).__name__

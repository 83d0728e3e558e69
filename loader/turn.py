"""Turn: steps on the host take turns, since the layers of one load share its scratch.

On a card the order of its stream does the same; another stream asks for its own workspace.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_FREE: AbstractContextManager[Any] = nullcontext()
_HOST = threading.RLock()


def turn_on(device: torch.device) -> AbstractContextManager[Any]:
    """Held for one step: a step uses every core anyway, so two at once would gain nothing."""
    return _HOST if device.type == "cpu" else _FREE


def _renew() -> None:
    """In a child whose parent forked during a step: nobody is there to end it."""
    global _HOST
    _HOST = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew)

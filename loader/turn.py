"""Turn: steps on one device take turns, since the layers of one load share its workspace.

On a card a turn is the time it takes to enqueue a step: steps of one stream run in that order.
Another stream asks for its own workspace.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager
from typing import Any

import torch

_TURNS: dict[torch.device, AbstractContextManager[Any]] = {}


def turn_on(device: torch.device) -> AbstractContextManager[Any]:
    """Held for one step. On the host a step uses every core, so two at once would gain nothing."""
    return _TURNS.get(device) or _TURNS.setdefault(device, threading.RLock())


if hasattr(os, "register_at_fork"):  # not on Windows
    # A parent may fork during a step, and in the child nobody is there to end it.
    os.register_at_fork(after_in_child=_TURNS.clear)

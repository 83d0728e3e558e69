"""Card: what a GPU can do, as a value, and the counters of its memory.

Each counter keeps its own name: ``requested`` is what was asked of PyTorch's allocator,
``allocated`` the same with its rounding, ``reserved`` what the allocator holds of the driver,
``used`` what the driver has given to anyone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec

import torch


@dataclass(frozen=True)
class CardFacts:
    """What admission asks of a card. ``architecture`` is 90 for SM 9.0."""

    name: str
    architecture: int

    @property
    def has_bf16(self) -> bool:
        """Whether tensor cores take bf16."""
        return self.architecture >= 80

    @property
    def block_bytes(self) -> int:
        """Most shared memory that one block can ask for; the least of all for a card not known."""
        known = {70: 96, 72: 96, 75: 64, 80: 163, 87: 163, 86: 99, 89: 99, 120: 99, 121: 99}
        later = 227 if 90 <= self.architecture < 120 else min(known.values())
        return known.get(self.architecture, later) << 10


def card_facts(device: torch.device) -> CardFacts:
    """Facts of an existing card."""
    properties = torch.cuda.get_device_properties(device)
    return CardFacts(properties.name, 10 * properties.major + properties.minor)


@dataclass(frozen=True)
class CardMemory:
    """Counters of one card at one moment, in bytes; see the module for their names."""

    requested: int = 0
    allocated: int = 0
    reserved: int = 0
    used: int = 0

    def highest(self, other: CardMemory) -> CardMemory:
        """The higher of each counter."""
        mine, theirs = asdict(self), asdict(other)
        return CardMemory(**{name: max(mine[name], theirs[name]) for name in mine})


def card_memory(device: torch.device) -> CardMemory:
    """All counters now."""
    stats = torch.cuda.memory_stats_as_nested_dict(device)

    def current(name: str) -> int:
        return int(stats[name]["all"]["current"]) if stats else 0

    free, total = torch.cuda.mem_get_info(device)
    return CardMemory(
        current("requested_bytes"),
        current("allocated_bytes"),
        current("reserved_bytes"),
        int(total - free),
    )


class CardPeak:
    """Highest counters of a card at the moments of :meth:`sample`.

    A load samples after every allocation it makes, so that its own peak is among the samples;
    the allocator's peak counter, which is the whole process's, is neither read nor reset.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.baseline = card_memory(device)
        self.highest = self.baseline

    def sample(self) -> CardMemory:
        """Take one sample now."""
        now = card_memory(self.device)
        self.highest = self.highest.highest(now)
        return now


_POOLS = threading.RLock()
"""Pools begin, are allocated from and end one at a time: the allocator aborts the process where one
ends while another is open for allocations."""


class CardPool:
    """Memory of a card apart from everyone else's: back with the driver when it is closed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with _POOLS, torch.cuda.device(device):
            self._pool: torch.cuda.MemPool | None = torch.cuda.MemPool()

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Tensors that this thread makes inside the block come from the pool."""
        assert self._pool is not None, "the pool was closed"
        with _POOLS, torch.cuda.use_mem_pool(self._pool, self._device):
            yield

    def close(self) -> None:
        """Give everything back to the driver; the caller has dropped its tensors."""
        with _POOLS:
            self._pool = None


def nvml_used(device: torch.device) -> int | None:
    """Used memory of the card as its management library counts it, None without the library."""
    if find_spec("pynvml") is None:
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
            return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:  # a machine that hides its cards from the library
        return None

"""Room: how many bytes a card has left for a load, and which limit says so.

On the host the least of several limits counts: what the machine has available, the memory limit of
each control group that the process is in, and the limit of its address space.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

GROUPS_FILE = Path("/proc/self/cgroup")
GROUPS_MOUNT = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60
"""Version 1 says "no limit" as the largest number of pages; no machine has so many bytes."""

_Names = tuple[str, str, tuple[str, ...]]
_V1: _Names = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_V2: _Names = ("memory.max", "memory.current", ("inactive_file", "active_file"))


@dataclass(frozen=True)
class Room:
    """``nbytes`` that can still be taken, and the ``limit`` that says so, in words."""

    nbytes: int
    limit: str


def room_of(device: torch.device) -> Room:
    """What a card has left: the driver's figure for a GPU, the least limit of the host."""
    if device.type != "cpu":
        # What the allocator keeps for later is ours to use, whatever the driver says.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return Room(int(torch.cuda.mem_get_info(device)[0]) + kept, f"free memory of {device}")
    available = Room(int(psutil.virtual_memory().available), "available memory of the machine")
    rooms = [available, *group_rooms(GROUPS_FILE, GROUPS_MOUNT), *_address_space()]
    return min(rooms, key=lambda room: room.nbytes)


def room_for(device: torch.device, budget: int | None) -> Room:
    """What a card has left, or the ``budget`` in bytes that a caller gave."""
    return room_of(device) if budget is None else Room(budget, "budget that was given")


def group_rooms(groups_file: Path, mount: Path) -> Iterator[Room]:
    """Room in each control group of the process that has a memory limit, ancestors included.

    ``groups_file`` is ``/proc/self/cgroup``; ``mount`` is where version 2 is mounted, or the
    controllers of version 1 are. A container may see only its own group, as the root of the mount.
    """
    if not groups_file.exists():
        return
    for line in groups_file.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, names = mount, _V2
        elif "memory" in controllers.split(","):
            top, names = mount / "memory", _V1
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts), -1, -1):
            room = _group_room(top.joinpath(*parts[:depth]), names)
            if room is not None:
                yield room


def _group_room(folder: Path, names: _Names) -> Room | None:
    """Room in one group; None where it has no limit, or is not to be seen from here."""
    limit_file, usage_file, caches = names
    try:
        text = (folder / limit_file).read_text().strip()
        if text == "max" or int(text) >= _NO_LIMIT:
            return None
        usage = int((folder / usage_file).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    # Pages of the file cache are counted as usage, but go before anyone is refused.
    cache = sum(int(stat.get(name, 0)) for name in caches)
    limit = int(text)
    return Room(max(0, limit - max(0, usage - cache)), f"memory limit of {limit} bytes ({folder})")


def _address_space() -> Iterator[Room]:
    if sys.platform != "linux":
        return
    import resource  # not on Windows

    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        used = int(psutil.Process().memory_info().vms)
        yield Room(max(0, soft - used), f"address space limit of {soft} bytes")

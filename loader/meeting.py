"""Meeting: what the ranks of one load tell each other, through the store of their process group.

Keys and values alone, no collective: a rank that is late, stuck or gone leaves nobody waiting in
native code. A load ends with one decision, the first that is written: it counts on every rank, or
it failed on every rank by one and the same first error.
"""

from __future__ import annotations

import base64
import json
import os
import platform
import sys
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from loader.errors import LoaderError
from loader.lifecycle import LayerEvent

T = TypeVar("T")

DEFAULT_TIMEOUT_SECONDS = 300.0
"""How long a rank may take without a sign of progress before the others give it up."""

_POLL_SECONDS = 0.05
_WATCH_SECONDS = 0.25
"""How often a rank looks at the others while it loads."""

_MOST_BETWEEN_LOOKS_SECONDS = 1.0
"""A longer pause between two looks at a rank is this process's own."""

_LEAVE_SECONDS = 30.0
"""Most that a rank waits, at the end, for the others to have read the decision."""

_COUNTS = {"ok": True}


class RankError(LoaderError):
    """Another rank failed or is gone, or the ranks cannot reach each other."""


class Meeting:
    """The ranks of one process group during one load; every rank makes one, and in turn.

    ``group`` is the process group (None: all ranks). ``timeout`` in seconds bounds every wait for a
    rank that shows no progress. Raises :class:`RankError` where there is no group.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, timeout: float = DEFAULT_TIMEOUT_SECONDS
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RankError(
                "there is no process group",
                expected="torch.distributed.init_process_group, in workers that torchrun starts",
                found="one process on its own",
            )
        if not timeout > 0:
            raise RankError("timeout is not valid", expected="seconds above 0", found=timeout)
        self.rank: int = dist.get_rank(group)
        if self.rank < 0:
            raise RankError("this rank is not in the group", found=f"rank {dist.get_rank()}")
        self.size: int = dist.get_world_size(group)
        self.timeout = timeout
        self.first = 0  # whose measurements count
        whole = group if group is not None else dist.group.WORLD
        assert whole is not None
        store = whole.get_group_store()
        # Each load has keys of its own, so that the next one starts clean also after a failure.
        turn = _asked(store.add, f"qpn/turn/{self.rank}", 1)
        self._store = PrefixStore(f"qpn/{turn}", store)
        self._beats = 0
        self._looked = time.monotonic()
        self._seen: dict[int, tuple[bytes, float, float]] = {}
        self._who: dict[int, list[Any]] = {}
        self._set(f"who/{self.rank}", [_house(), os.getpid(), psutil.Process().create_time()])
        self.beat()

    def beat(self) -> None:
        """Show the others that this rank gets on."""
        self._beats += 1
        self._set(f"beat/{self.rank}", self._beats)

    def __call__(self, event: LayerEvent) -> None:
        """As an observer of the load: shows progress, and fails the load where another failed."""
        now = time.monotonic()
        if now - self._looked >= _WATCH_SECONDS:
            self._looked = now
            self.beat()
            self._watch(self._others(), late=False)

    def gather(self, name: str, value: T) -> list[T]:
        """Values of all ranks, by rank; ``value`` is this rank's, in JSON's types.

        Raises :class:`RankError` where a rank failed, or shows no progress for ``timeout``.
        """
        self._set(f"{name}/{self.rank}", value)
        self.beat()
        self._await({rank: f"{name}/{rank}" for rank in self._others()})
        return [self._get(f"{name}/{rank}") for rank in range(self.size)]

    def from_first(self, name: str, make: Callable[[], T]) -> T:
        """What ``make`` returns on rank ``first``, in JSON's types, on every rank that asks."""
        if self.rank == self.first:
            self._set(name, make())
        else:
            self._await({self.first: name})
        value: T = self._get(name)
        return value

    def commit(self) -> None:
        """The load counts, now that all ranks have finished it. Raises where one gave it up."""
        decided = self._decide(_COUNTS)
        if decided != _COUNTS:
            raise _first(decided)
        self.leave()

    def fail(self, error: BaseException) -> BaseException:
        """Tell the others, and wait until they know; returns the error to raise on this rank.

        That is the first one: ``error`` itself, or a :class:`RankError` that quotes another rank's.
        """
        # The pipeline wraps what an observer raises.
        if isinstance(error.__cause__, RankError):
            error = error.__cause__
        if isinstance(error, RankError):
            self.leave()
            return error
        mine = {"rank": self.rank, "error": _sentence(error)}
        try:
            decided = self._decide(mine)
        except RankError:  # nobody can be told; our own error says more than that
            return error
        self.leave()
        return error if decided in (mine, _COUNTS) else _first(decided)

    def leave(self) -> None:
        """Wait until every rank has read the decision: its process may keep the store."""
        until = time.monotonic() + min(self.timeout, _LEAVE_SECONDS)
        try:
            self._set(f"read/{self.rank}", True)
            self._await_until(until, "read")
            self._set(f"left/{self.rank}", True)
            if dist.get_rank() == 0:
                # Where no launcher keeps the store this rank does: it is the last to go.
                self._await_until(until, "left")
        except RankError:
            return  # the store is gone, and with it whoever could have waited for us

    def _await_until(self, until: float, name: str) -> None:
        """Wait for a key of every rank whose process still runs, as long as there is time."""
        waiting = self._others()
        while waiting and time.monotonic() < until:
            waiting = [r for r in waiting if not self._has(f"{name}/{r}") and not self._ended(r)]
            time.sleep(_POLL_SECONDS if waiting else 0)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _await(self, keys: dict[int, str]) -> None:
        """Wait until every key is there; each is to come from the rank that it stands under."""
        self._seen.clear()
        while keys := {rank: key for rank, key in keys.items() if not self._has(key)}:
            self._watch(keys, late=True)
            time.sleep(_POLL_SECONDS)

    def _watch(self, ranks: Iterable[int], late: bool) -> None:
        """Raise where the load was given up, or where one of ``ranks`` is gone (or ``late``)."""
        if self._has("end"):
            decided = self._get("end")
            if decided != _COUNTS:
                raise _first(decided)
        for rank in ranks:
            if self._ended(rank):
                self._give_up(rank, f"its process {self._who[rank][1]} ended without a word")
            elif late and self._is_late(rank):
                did = "made no progress" if self._has(f"beat/{rank}") else "did not arrive"
                self._give_up(rank, f"it {did} within {self.timeout:g} s")

    def _is_late(self, rank: int) -> bool:
        """Whether this process has waited ``timeout`` seconds since it saw ``rank`` get on."""
        now, key = time.monotonic(), f"beat/{rank}"
        beats = _asked(self._store.get, key) if self._has(key) else b""
        before, looked, waited = self._seen.get(rank, (beats, now, 0.0))
        # Time in which this process itself was stopped says nothing about the others.
        waited += min(now - looked, _MOST_BETWEEN_LOOKS_SECONDS)
        self._seen[rank] = (beats, now, waited if before == beats else 0.0)
        return before == beats and waited > self.timeout

    def _ended(self, rank: int) -> bool:
        """Whether the process of ``rank`` is known to be gone: seen on this machine alone."""
        if rank not in self._who:
            if not self._has(f"who/{rank}"):
                return False
            self._who[rank] = self._get(f"who/{rank}")
        house, pid, created = self._who[rank]
        if house != _house():
            return False
        try:
            process = psutil.Process(pid)
            other = process.create_time() != created  # its id was given to another process
            return bool(other or process.status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True

    def _give_up(self, rank: int, why: str) -> None:
        decided = self._decide({"rank": rank, "error": why})
        if decided != _COUNTS:
            raise _first(decided)

    def _decide(self, value: dict[str, Any]) -> dict[str, Any]:
        """Write the end of the load, unless it is written; returns what stands."""
        decided: dict[str, Any] = _unpack(_asked(self._store.compare_set, "end", "", _pack(value)))
        return decided

    def _has(self, key: str) -> bool:
        return bool(_asked(self._store.check, [key]))

    def _get(self, key: str) -> Any:
        return _unpack(_asked(self._store.get, key))

    def _set(self, key: str, value: object) -> None:
        _asked(self._store.set, key, _pack(value))


def _first(decided: dict[str, Any]) -> RankError:
    return RankError(f"rank {decided['rank']} failed: {decided['error']}")


def _sentence(error: BaseException) -> str:
    return str(error) if isinstance(error, LoaderError) else f"{type(error).__name__}: {error}"


def _house() -> str:
    """Where process ids mean the same: one boot of one machine, one namespace of ids."""
    if sys.platform != "linux":
        return platform.node()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"


def _pack(value: object) -> str:
    """Stores have a bound on a value, and reports repeat themselves."""
    return base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()


def _unpack(data: bytes) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(data)))


def _asked(call: Callable[..., T], *arguments: object) -> T:
    """One call of the store; it fails where the process that keeps it has ended."""
    try:
        return call(*arguments)
    except RuntimeError as error:  # torch.distributed's errors derive from it
        raise RankError(
            "the store of the process group is out of reach: the process that keeps it has ended",
            found=str(error).partition("\n")[0],
        ) from error

"""Loads under limits of the machine, in a process of its own; run by tests, prints JSON.

python limit_probe.py PROBE FOLDER [ARGUMENT ...]
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import loader
from loader import memory
from loader.errors import LoaderError

torch.set_num_threads(1)
STAGING = 8 << 20
MIB = 1 << 20


def under_group(folder: Path, group: str, room: str) -> dict[str, Any]:
    """Join a memory control group, load every layer in turn, then all at once.

    The limit is what the process has now, plus ``room`` bytes: less than the file.
    """
    control = Path(group)
    warm = loader.load(folder, layers=[0], staging_bytes=STAGING)  # what the first load imports
    del warm
    (control / "cgroup.procs").write_text(str(os.getpid()))
    limit = int((control / "memory.usage_in_bytes").read_text()) + int(room)
    (control / "memory.limit_in_bytes").write_text(str(limit))
    layers = loader.plan(folder, card_memory=1 << 40).layers
    read = 0
    for layer in layers:
        experts = loader.load(folder, layers=[layer.layer], staging_bytes=STAGING)
        read += experts.report.bytes_read
        del experts
    events = dict(
        line.split() for line in (control / "memory.oom_control").read_text().splitlines()
    )
    try:
        loader.load(folder, staging_bytes=STAGING)
        refusal = None
    except LoaderError as error:
        refusal = [type(error).__name__, str(error)]
    return {
        "limit": limit,
        "most": int((control / "memory.max_usage_in_bytes").read_text()),
        "pressure": int((control / "memory.failcnt").read_text()),
        "killed": int(events.get("oom_kill", 0)),
        "read": read,
        "refusal": refusal,
    }


def under_address_space(folder: Path) -> dict[str, Any]:
    """Load under less and less address space; each load ends in success or one clear error."""
    big = 1 << 40  # the plan is to let it through, so that the allocations themselves fail
    reference = loader.load(folder, staging_bytes=STAGING)
    wanted = [tensor.clone() for layer in reference.values() for tensor in layer.banks()]
    resident = reference.report.memory.resident
    del reference
    ends: Counter[str] = Counter()
    status = {line.split(":")[0]: line.split()[1] for line in _status()}
    # Below some MiB CPython itself may hang: a thread whose first lines find no memory never
    # says that it started, and Thread.start waits for that. A plan refuses long before.
    for extra in range(24 * MIB, resident + 64 * MIB, resident // 16):
        limit = (int(status["VmSize"]) << 10) + extra
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        try:
            experts = loader.load(folder, staging_bytes=STAGING, card_memory=big)
            ends["loaded"] += 1
            found = [tensor for layer in experts.values() for tensor in layer.banks()]
            assert all(map(torch.equal, found, wanted))
            del experts, found
        except LoaderError as error:
            ends[type(error).__name__] += 1
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    room = 16 * MIB
    limit = (
        int({line.split(":")[0]: line.split()[1] for line in _status()}["VmSize"]) << 10
    ) + room
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        loader.load(folder, staging_bytes=STAGING)
        refusal = None
    except LoaderError as error:
        refusal = [type(error).__name__, str(error)]
    return {"ends": dict(ends), "refusal": refusal, "resident": resident}


def _status() -> list[str]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return [line for line in lines if line.startswith(("VmSize", "RssAnon"))]


def few_descriptors(folder: Path, limit: str) -> dict[str, Any]:
    """Load many shards under a small limit of descriptors, from two threads at once."""
    from concurrent.futures import ThreadPoolExecutor

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(limit), hard))
    with ThreadPoolExecutor(2) as pool:
        loads = [pool.submit(loader.load, folder, staging_bytes=STAGING) for _ in range(2)]
        banks = [[t for layer in one.result().values() for t in layer.banks()] for one in loads]
    return {
        "layers": len(banks[0]),
        "equal": all(map(torch.equal, *banks)),
        "open": len(os.listdir("/proc/self/fd")),
    }


def read_only(folder: Path) -> dict[str, Any]:
    """Load as a user who may write nothing there."""
    before = sorted(os.listdir(folder))
    child = os.fork()
    if child == 0:
        if os.getuid() == 0:
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
        may_write = os.access(folder, os.W_OK)
        experts = loader.load(folder)
        os._exit(0 if len(experts) == 2 and not may_write else 3)
    status = os.waitpid(child, 0)[1]
    return {"status": status, "unchanged": sorted(os.listdir(folder)) == before}


def many_loads(folder: Path, count: str) -> dict[str, Any]:
    """Load again and again; anonymous memory after each tenth of the loads."""
    import gc

    def settled() -> int:
        gc.collect()
        memory.return_to_system()
        return memory.host_memory().anonymous

    for _ in range(3):
        loader.load(folder)
    start, found = settled(), []
    descriptors = len(os.listdir("/proc/self/fd"))
    for number in range(1, int(count) + 1):
        loader.load(folder)
        if number % (int(count) // 10) == 0:
            found.append(settled() - start)
    return {"growth": found, "descriptors": len(os.listdir("/proc/self/fd")) - descriptors}


PROBES = (under_group, under_address_space, few_descriptors, read_only, many_loads)

if __name__ == "__main__":
    chosen = {probe.__name__: probe for probe in PROBES}[sys.argv[1]]
    print(json.dumps(chosen(Path(sys.argv[2]), *sys.argv[3:])))

"""One rank of the worlds that ``ranks_fakes.py`` starts: runs a scenario, writes what came of it.

``python ranks_worker.py SCENARIO FOLDER`` takes the checkpoints in FOLDER and writes its findings
to ``out.RANK.json`` there. The launcher's variables say which rank this is.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from moe_oracle import activations, routing

import loader
from loader import memory, ranks
from loader.crossover import Crossovers
from loader.lifecycle import LayerEvent

SCENARIOS: dict[str, Callable[[Path], Any]] = {}
PATIENCE = 120.0
SHORT = 3.0


def scenario(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
    SCENARIOS[function.__name__] = function
    return function


def outcome(call: Callable[[], Any]) -> dict[str, Any]:
    """What a load came to: its error, or which layers and shard this rank holds."""
    began = time.monotonic()
    try:
        experts = call()
    except loader.LoaderError as error:
        facts = {"error": type(error).__name__, "text": str(error)}
        return {**facts, "seconds": time.monotonic() - began}
    return {"layers": list(experts), "cards": experts.cards, "text": experts.cards_text()}


def at(state: str, layer: int, act: Callable[[], None]) -> Callable[[LayerEvent], None]:
    def observe(event: LayerEvent) -> None:
        if event.state == state and event.layer == layer:
            act()

    return observe


def summed(experts: ranks.RankedExperts, tokens: int, dtype: torch.dtype) -> list[list[float]]:
    """The layer's output, summed over ranks in fp32."""
    layer = experts[0]
    y = layer(activations(tokens, layer.hidden_size, dtype), *routing(tokens, 4, 2)).float()
    dist.all_reduce(y)
    return y.tolist()


@scenario
def sums(folder: Path) -> Any:
    """Forward passes over TP, EP and both, of every checkpoint: sums for the test to judge."""
    found: dict[str, Any] = {}
    for name in ("awq", "nvfp4", "plain"):
        for tp_size, ep_size in ((4, 1), (1, 4), (2, 2)):
            experts = ranks.load(
                folder / name, layers=[0], tp_size=tp_size, ep_size=ep_size, timeout=PATIENCE
            )
            for tokens in (1, 5, 17):
                for dtype in (torch.float32, torch.bfloat16, torch.float16):
                    key = f"{name} {tp_size} {ep_size} {tokens} {str(dtype)[6:]}"
                    found[key] = summed(experts, tokens, dtype)
    return {"sums": found, "disk": {name: disk(folder / "large", name) for name in ("tp", "ep")}}


def disk(folder: Path, axis: str) -> dict[str, int]:
    """Bytes that a load asks for, and those that the kernel read from disk for this process."""
    if dist.get_rank() == 0:
        for file in folder.glob("*.safetensors"):
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dist.barrier()
    before = from_disk()
    experts = ranks.load(folder, timeout=PATIENCE, **{f"{axis}_size": 4})
    return {"asked": experts.report.bytes_read, "disk": from_disk() - before}


def from_disk() -> int:
    """What the kernel counts as read from storage for this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


@scenario
def agreements(folder: Path) -> Any:
    """Loads that disagree or fail in turn, each followed by others on the same group."""
    rank, awq = dist.get_rank(), folder / "awq"

    def load(source: Path = awq, short: bool = False, **more: Any) -> dict[str, Any]:
        timeout = SHORT if short else PATIENCE
        return outcome(lambda: ranks.load(source, timeout=timeout, **more))

    found: dict[str, Any] = {}
    os.environ["QPN_M1"] = "0" if rank == 1 else "1"
    found["environment"], found["environment again"] = load(), load()
    os.environ["QPN_M1"] = "2" if rank == 2 else "1"
    found["bad variable"] = load()
    del os.environ["QPN_M1"]
    found["flag"] = load(policy=loader.Policy(awq_rounding="fused_bias" if rank == 3 else "exact"))
    found["sizes"] = load(tp_size=2 if rank == 0 else 4, ep_size=2 if rank == 0 else 1)
    found["wrong sizes"] = load(tp_size=2, ep_size=1)
    found["layers"] = load(layers=[0] if rank == 2 else None)
    found["checkpoint"] = load(folder / ("longer" if rank == 3 else "awq"), layers=[0])
    found["short file"] = load(folder / ("short" if rank == 1 else "awq"))
    found["same shard"] = load(shard=loader.Shard(0, 4))
    before = memory.host_memory().anonymous

    def burst() -> None:
        raise ValueError("burst pipe")

    # The others are slow: they stop in the middle, they do not finish a load that cannot count.
    states: list[str] = []

    def dawdle(event: LayerEvent) -> None:
        states.append(event.state)
        time.sleep(0.3 if event.state != "failed" else 0)

    found["mid-load"] = load(observers=[at("reading", 0, burst) if rank == 2 else dawdle])
    found["kept"] = memory.host_memory().anonymous - before
    found["states"] = states
    nothing = rank == 1
    ids = None if nothing else [[0, 1], [], [2], [3]][rank]
    shard = None if nothing else loader.Shard(expert_ids=ids)
    found["idle"] = load(layers=[] if nothing else None, shard=shard)
    found["good"] = load()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    found["group"] = load(group=pairs[rank // 2])
    Crossovers._measure = lambda self, spec, banks, most: 2 << rank  # type: ignore[method-assign]  # a measurement as a stand-in
    measure = loader.Policy(grouped_max_tokens="measure")
    found["measured"] = load(policy=measure)
    shard = None if rank == 0 else loader.Shard(ep_rank=rank - 1, ep_size=3)
    found["measured on 1"] = load(policy=measure, layers=[] if rank == 0 else None, shard=shard)
    dozes = [lambda event: time.sleep(0.4)] if rank == 2 else []
    began = time.monotonic()
    found["slow"] = {**load(observers=dozes, short=True), "seconds": time.monotonic() - began}
    if rank == 3:
        time.sleep(2 * SHORT)
    found["late"] = load(short=True)
    return found


def _group_of_cards(*arguments: Any) -> Any:
    return dist.ProcessGroupGloo(*arguments)


@scenario
def cards_only(folder: Path) -> Any:
    """A group that, as with NCCL, takes nothing but tensors on cards: loads, and a failure."""
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        found = {"refused": str(error).partition("\n")[0]}
    policy = loader.Policy(grouped_max_tokens="measure")
    call = {"timeout": PATIENCE, "tp_size": 2}
    found["load"] = outcome(lambda: ranks.load(folder / "awq", policy=policy, **call))
    part = dist.new_group([0, 1], backend="cards_only")
    found["group"] = outcome(lambda: ranks.load(folder / "awq", group=part, **call))
    folder = folder / ("awq" if dist.get_rank() == 0 else "none")
    found["failed"] = outcome(lambda: ranks.load(folder, **call))
    return found


def _dying(number: int, state: str = "converting") -> Callable[[Path], Any]:
    """The rank that FOLDER/dies names ends by a signal in the middle of its load."""

    def run(folder: Path) -> Any:
        def act() -> None:
            os.kill(os.getpid(), number)

        dies = dist.get_rank() == int((folder / "dies").read_text())
        observers = [at(state, 1, act)] if dies else []
        timeout = SHORT if number == signal.SIGSTOP else PATIENCE
        more = {"observers": observers, "timeout": timeout, "ep_size": dist.get_world_size()}
        return outcome(lambda: ranks.load(folder / "awq", **more))

    return run


SCENARIOS["killed"] = _dying(signal.SIGKILL)
SCENARIOS["stuck"] = _dying(signal.SIGSTOP)


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.Backend.register_backend("cards_only", _group_of_cards, devices=["cuda"])
    backend = "cards_only" if name == "cards_only" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=PATIENCE))
    rank = dist.get_rank()
    found = SCENARIOS[name](folder)
    (folder / f"out.{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

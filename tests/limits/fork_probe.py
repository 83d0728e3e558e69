"""A process that loads, computes with all its threads, and forks; run by tests.

python fork_probe.py FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

import loader
from loader import native

CHILDREN = 3


def main(folder: Path) -> int:
    experts = loader.load(folder)
    x = torch.randn(40, 64)
    ids, weights = torch.randint(0, 8, (40, 2)), torch.rand(40, 2)
    wanted = [experts[0](x[:t], ids[:t], weights[:t]) for t in (1, 5, 40)]
    banks = [tensor.clone() for layer in experts.values() for tensor in layer.banks()]
    statuses = []
    for _ in range(CHILDREN):
        child = os.fork()
        if child == 0:
            os._exit(in_child(folder, experts, x, ids, weights, wanted, banks))
        # The parent computes on while its child does.
        again = [experts[0](x[:t], ids[:t], weights[:t]) for t in (1, 5, 40)]
        assert all(map(torch.equal, again, wanted))
        statuses.append(os.waitpid(child, 0)[1])
    assert all(map(torch.equal, banks_of(loader.load(folder)), banks))
    return max(statuses)


def banks_of(experts: loader.experts.LoadedExperts) -> list[torch.Tensor]:
    return [tensor for layer in experts.values() for tensor in layer.banks()]


def in_child(
    folder: Path,
    experts: loader.experts.LoadedExperts,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    wanted: list[torch.Tensor],
    banks: list[torch.Tensor],
) -> int:
    """Run the parent's layers and load anew; 0 where all is right."""
    torch.set_num_threads(1)  # threads of OpenMP do not survive a fork, which is OpenMP's affair
    fast = [experts[0](x[:t], ids[:t], weights[:t]) for t in (1, 5, 40)]
    if not all(map(torch.allclose, fast, wanted)):
        return 1
    if not all(map(torch.equal, banks_of(loader.load(folder)), banks)):
        return 2
    with native.serving(native.REFERENCE):
        return 0 if all(map(torch.equal, banks_of(loader.load(folder)), banks)) else 3


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

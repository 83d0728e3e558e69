"""Turns: threads that call the layers of one load, which share a workspace, and forks meanwhile."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from moe_oracle import activations, make, routing

from loader import native
from loader.turn import turn_on

CPU = torch.device("cpu")


@pytest.mark.parametrize("implementation", native.implementations() + (native.REFERENCE,))
def test_threads_get_what_each_would_get_alone(
    implementation: native.Implementation, tmp_path: Path
) -> None:
    with native.serving(implementation):
        module = make(tmp_path)
        calls = []
        for tokens in (1, 4, 40):
            for number in range(4):
                x = activations(tokens, module.hidden_size, torch.float32) * (number + 1)
                calls.append((x, *routing(tokens, 4, 2)))
        wanted = [module(*call) for call in calls]

        def repeated(number: int) -> int:
            found = [module(*calls[number]) for _ in range(40)]
            return sum(not torch.equal(one, wanted[number]) for one in found)

        with ThreadPoolExecutor(len(calls)) as pool:
            assert sum(pool.map(repeated, range(len(calls)))) == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_does_not_wait_for_a_step_of_its_parent() -> None:
    held, over = threading.Event(), threading.Event()

    def step() -> None:
        with turn_on(CPU):
            held.set()
            over.wait()

    thread = threading.Thread(target=step)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        taken = turn_on(CPU).acquire(timeout=20)  # type: ignore[attr-defined]
        os._exit(0 if taken else 1)
    over.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_a_step_inside_a_step_does_not_wait_for_itself() -> None:
    with turn_on(CPU), turn_on(CPU):
        pass


def test_devices_do_not_wait_for_one_another() -> None:
    card = turn_on(torch.device("cuda", 0))
    assert card is turn_on(torch.device("cuda", 0))
    assert len({id(card), id(turn_on(torch.device("cuda", 1))), id(turn_on(CPU))}) == 3

"""Launch: the part of ``qpn load`` that one of several processes plays, as torchrun starts them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from loader import ranks
from loader.errors import LoaderError
from loader.meeting import DEFAULT_TIMEOUT_SECONDS, RankError
from loader.policy import Policy
from loader.progress import ProgressBar


def add_options(command: argparse.ArgumentParser) -> None:
    """The options that only several ranks have."""
    command.add_argument(
        "--backend",
        choices=("gloo", "nccl"),
        help="load as one of several ranks (where left out: under torchrun, nccl for cuda)",
    )
    command.add_argument(
        "--timeout",
        type=seconds,
        default=DEFAULT_TIMEOUT_SECONDS,
        help="seconds that a rank may show no progress (default %(default)g)",
    )


def seconds(text: str) -> float:
    """A time above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return value


def is_rank(options: argparse.Namespace) -> bool:
    """Whether this process loads as one of several that a launcher started."""
    return options.command == "load" and (
        options.backend is not None or (dist.is_available() and dist.is_torchelastic_launched())
    )


def check_call(options: argparse.Namespace) -> None:
    """Refuse options that the launcher decides. Raises :class:`LoaderError`."""
    if (options.rank, options.ep_rank) != (None, None):
        raise LoaderError("--rank and --ep-rank come from the launcher where several ranks load")


def run(options: argparse.Namespace, policy: Policy) -> list[Mapping[str, Any]]:
    """Load this rank's shard; the reports of all cards on rank 0, nothing on the others.

    Sets ``options.who``, which names this process in errors. Raises :class:`loader.LoaderError`.
    """
    on_cuda = options.device.partition(":")[0] == "cuda"
    rank = _join(options.backend or ("nccl" if on_cuda else "gloo"), options.timeout)
    options.who = f"qpn: rank {rank}"
    try:
        with ProgressBar() if rank == 0 else nullcontext() as bar:
            experts = ranks.load(
                options.source,
                _own_card(options.device, rank),
                None,
                policy,
                options.layers,
                options.staging,
                [] if bar is None else [bar],
                tp_size=options.tp,
                ep_size=options.ep,
                timeout=options.timeout,
                card_memory=options.card_memory,
                revision=options.revision,
            )
    finally:
        dist.destroy_process_group()
    return list(experts.cards) if rank == 0 else []


def _join(backend: str, timeout: float) -> int:
    """Make the process group from what the launcher set; returns this process's rank."""
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    except (ValueError, RuntimeError) as error:
        raise RankError(
            "the process group could not be made",
            expected=f"processes that torchrun starts, and a PyTorch that has {backend}",
            found=str(error).partition("\n")[0],
        ) from error
    return dist.get_rank()


def _own_card(device: str, rank: int) -> str:
    """``cuda`` is the card that the launcher's local rank counts to; others are as they are."""
    if device != "cuda":
        return device
    return f"cuda:{dist.get_node_local_rank(fallback_rank=rank)}"

"""Command line: ``qpn inspect | plan | load | verify | bench SOURCE``.

Exit code 0 on success, 2 on a wrong call, 1 on a refused or failed load (with one clear line on
stderr; ``--debug`` shows the traceback) or a difference that ``verify`` found.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch

from loader import launch
from loader.bench import bench_dict, bench_steps, bench_text
from loader.errors import LoaderError
from loader.experts import LoadedExperts
from loader.inspect import inspect, inspect_text
from loader.pipeline import load
from loader.plan import DEFAULT_STAGING_BYTES, plan_cards
from loader.policy import LAYOUTS, NONFINITE, ROUNDINGS, SWITCHES, Policy
from loader.progress import ProgressBar
from loader.render import WIDTH, load_text, plan_text, ranks_text
from loader.report import check_target, write_json
from loader.request import MOST_LAYERS
from loader.shard import Shard
from loader.verify import verify

_DESCRIPTION = "Command line: qpn inspect | plan | load | verify | bench SOURCE."
_SUFFIXES = {"k": 10, "m": 20, "g": 30, "t": 40}
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_LEAST_WIDTH = 80

_INTERRUPTED = 130
"""Exit code of a command that was interrupted, as shells give it."""

_MOST_COUNT = (1 << 31) - 1
"""Largest number of anything that is counted on the command line."""

_MOST_PLANS = 1 << 16
"""Cards that one call plans, each of which has a row: a slip must not fill the memory."""

Result = tuple[str | None, Any, int]
"""What a command shows, what it writes as JSON, and its exit code.

Nothing to show: a rank other than the first, which shows and writes for all.
"""


def size(text: str) -> int:
    """Bytes from ``64MiB``, ``1.5g`` or ``67108864``; binary units."""
    number = text.strip().lower().removesuffix("b").removesuffix("i")
    shift = _SUFFIXES.get(number[-1:], 0)
    try:
        value = float(number[:-1] if shift else number) * (1 << shift)
    except ValueError:
        value = -1.0
    if not 1 <= value < 1 << 60:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 64MiB")
    return int(value)


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_COUNT:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to {_MOST_COUNT}")
    return int(text)


def seed(text: str) -> int:
    """A whole number, 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 0")
    return int(text)


def crossover(text: str) -> int | str:
    """Tokens, or ``measure``; what the number may be is the policy's."""
    return text if text == "measure" else int(text)


def layer_list(text: str) -> list[int]:
    """Layer indices from ``0-3,7``."""
    layers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise argparse.ArgumentTypeError(f"{text!r} is no list of layers such as 0-3,7")
        run = range(int(first), int(last or first) + 1)
        if not run or run[-1] >= MOST_LAYERS:
            raise argparse.ArgumentTypeError(f"{text!r} names layers that no model has")
        layers += run
    return layers


def token_list(text: str) -> list[int]:
    """Token counts from ``1,8,64``."""
    return [count(part) for part in text.split(",")]


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser("qpn", description=_DESCRIPTION)
    parser.set_defaults(who="qpn")
    commands = parser.add_subparsers(dest="command", required=True)
    helps = {
        "inspect": "show what is in a checkpoint, from headers",
        "plan": "show what each card will hold, from headers",
        "load": "load, and report what was held and how fast",
        "verify": "load, then check the banks against the checkpoint in fp64",
        "bench": "load, then time forward steps",
    }
    for name, text in helps.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("source", metavar="SOURCE", help="checkpoint folder, or Hub repo id")
        command.add_argument("--revision", help="branch, tag or commit of a Hub repo")
        command.add_argument("--json", metavar="FILE", help="also write the result as JSON")
        command.add_argument("--debug", action="store_true", help="show tracebacks and more log")
        if name != "inspect":
            _add_load_options(command)
        if name == "load":
            launch.add_options(command)
        if name == "verify":
            command.add_argument("--samples", type=count, default=1152, help="columns to compare")
            command.add_argument("--seed", type=seed, default=0, help="seed of the draw")
        if name == "bench":
            command.add_argument(
                "--tokens", type=token_list, default=[1, 2, 8, 64], help="such as 1,8,64"
            )
            command.add_argument("--dtype", choices=_DTYPES, default="bf16", help="activations")
    return parser


def _add_load_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--device", default="cpu", help="cpu or cuda:N")
    command.add_argument("--tp", type=count, default=1, help="tensor parallel size")
    command.add_argument("--ep", type=count, default=1, help="expert parallel size")
    left_out = "where left out: 0, and all ranks for plan"
    command.add_argument("--rank", type=int, help=f"TP rank ({left_out})")
    command.add_argument("--ep-rank", type=int, help=f"EP rank ({left_out})")
    command.add_argument("--layers", type=layer_list, help="layers, such as 0-3,7")
    command.add_argument(
        "--staging", type=size, default=DEFAULT_STAGING_BYTES, help="budget of the read buffers"
    )
    command.add_argument("--card-memory", type=size, help="budget of a card, such as 32GiB")
    for switch, what in {
        "qpn-m1": "the route of one token",
        "qpn-grouped": "the route of few tokens",
        "compact-metadata": "metadata as the checkpoint has it",
    }.items():
        command.add_argument(f"--{switch}", choices=SWITCHES, default="auto", help=what)
    command.add_argument("--layout", choices=LAYOUTS, help="metadata layout by name")
    rounding = "int4 weights as stored, or as engines that store wide round them"
    command.add_argument("--awq-rounding", choices=ROUNDINGS, default="exact", help=rounding)
    limit = "last token count of qpn_grouped, or measured"
    command.add_argument("--grouped-max-tokens", type=crossover, metavar="N|measure", help=limit)
    nonfinite = "scales that are not finite: refused, or kept and reported"
    command.add_argument("--nonfinite", choices=NONFINITE, default="error", help=nonfinite)


def _policy(options: argparse.Namespace) -> Policy:
    return Policy(
        qpn_m1=options.qpn_m1,
        qpn_grouped=options.qpn_grouped,
        compact_metadata=options.compact_metadata,
        layout=options.layout,
        awq_rounding=options.awq_rounding,
        grouped_max_tokens=options.grouped_max_tokens,
        nonfinite=options.nonfinite,
    )


def _shards(options: argparse.Namespace) -> list[Shard]:
    """The card that is asked for; every card for ``plan`` where no rank is."""
    every = options.command == "plan"
    ranks = range(options.tp) if every and options.rank is None else [options.rank or 0]
    if every and options.tp * options.ep > _MOST_PLANS:
        raise LoaderError("--tp times --ep is too many cards", expected=f"at most {_MOST_PLANS}")
    ep_ranks = range(options.ep) if every and options.ep_rank is None else [options.ep_rank or 0]
    return [
        Shard(tp_rank=rank, tp_size=options.tp, ep_rank=ep_rank, ep_size=options.ep)
        for ep_rank, rank in product(ep_ranks, ranks)
    ]


def _check_call(options: argparse.Namespace) -> None:
    """Refuse what the call alone shows to be wrong, before a checkpoint is looked at."""
    if options.json is not None:
        check_target(options.json)
    if options.command != "inspect":
        _policy(options)
        _shards(options)
    if launch.is_rank(options):
        launch.check_call(options)


def _width() -> int:
    """Columns to draw in: the terminal's, and 120 where there is none."""
    return max(shutil.get_terminal_size((WIDTH, 24)).columns, _LEAST_WIDTH)


def _run_inspect(options: argparse.Namespace) -> Result:
    facts = inspect(options.source, revision=options.revision)
    return inspect_text(facts, _width()), facts, 0


def _run_plan(options: argparse.Namespace) -> Result:
    plans = plan_cards(
        options.source,
        _shards(options),
        _policy(options),
        options.layers,
        device=options.device,
        staging_bytes=options.staging,
        card_memory=options.card_memory,
        revision=options.revision,
    )
    reports = [one.to_dict() for one in plans]
    result = reports[0] if len(reports) == 1 else {"schema": 1, "cards": reports}
    return plan_text(reports, _width()), result, 0


def _load(options: argparse.Namespace) -> LoadedExperts:
    (shard,) = _shards(options)
    with ProgressBar() as bar:
        return load(
            options.source,
            options.device,
            shard,
            _policy(options),
            options.layers,
            options.staging,
            [bar],
            card_memory=options.card_memory,
            revision=options.revision,
        )


def _run_load(options: argparse.Namespace) -> Result:
    if launch.is_rank(options):
        cards = launch.run(options, _policy(options))
        if not cards:
            return None, None, 0
        return ranks_text(cards, _width()), {"schema": 1, "cards": cards}, 0
    report = _load(options).report.to_dict()
    return load_text(report, _width()), report, 0


def _run_verify(options: argparse.Namespace) -> Result:
    experts = _load(options)
    checked = verify(
        experts, options.source, options.samples, options.seed, revision=options.revision
    )
    return f"{experts.report.memory_line()}\n{checked}", checked.to_dict(), int(not checked.ok)


def _run_bench(options: argparse.Namespace) -> Result:
    experts = _load(options)
    report = experts.report.to_dict()
    steps = bench_steps(experts, options.tokens, report["top_k"], _DTYPES[options.dtype])
    text = f"{load_text(report, _width())}\n\n{bench_text(steps)}"
    return text, {**report, "steps": bench_dict(steps)}, 0


_COMMANDS = {
    "inspect": _run_inspect,
    "plan": _run_plan,
    "load": _run_load,
    "verify": _run_verify,
    "bench": _run_bench,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        _check_call(options)
    except LoaderError as error:
        parser.error(str(error))
    level = logging.DEBUG if options.debug else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(message)s", stream=sys.stderr)
    try:
        text, result, code = _COMMANDS[options.command](options)
        if options.json and result is not None:
            write_json(result, options.json)
    except (Exception, KeyboardInterrupt) as error:
        if options.debug:
            raise
        if sys.stderr is not None:  # None where it is closed: print would take stdout instead
            print(f"{options.who}: {_one_line(error)}", file=sys.stderr)
        return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    if text is not None:
        _show(text)
    return code


def _one_line(error: BaseException) -> str:
    """The error in one line; one that is not ours says what it is."""
    text = " ".join(str(error).split())
    if isinstance(error, (LoaderError, OSError)):
        return text
    return f"{type(error).__name__}: {text} (--debug shows where)"


def _show(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # The reader of our output went away (`qpn plan | head`): not an error of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())

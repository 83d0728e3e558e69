"""The options of several ranks: what is a wrong call. The ranks themselves are in test_ranks."""

from __future__ import annotations

import argparse

import pytest
import torch.distributed as dist

from loader import launch
from loader.command import build_parser, main
from loader.meeting import DEFAULT_TIMEOUT_SECONDS


def _options(*arguments: str) -> argparse.Namespace:
    return build_parser().parse_args(arguments)


@pytest.mark.parametrize(("text", "value"), [("1", 1.0), ("0.5", 0.5), ("1e3", 1000.0)])
def test_seconds(text: str, value: float) -> None:
    assert launch.seconds(text) == value


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "1e7", "soon"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no number of seconds"):
        launch.seconds(text)


def test_a_process_is_a_rank_where_a_launcher_or_the_call_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not launch.is_rank(_options("load", "x"))
    assert launch.is_rank(_options("load", "x", "--backend", "gloo"))
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    assert launch.is_rank(_options("load", "x"))
    assert not launch.is_rank(_options("plan", "x"))


def test_the_timeout_has_a_default_that_the_help_states(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _options("load", "x").timeout == DEFAULT_TIMEOUT_SECONDS == 300
    with pytest.raises(SystemExit):
        main(["load", "--help"])
    assert "default 300" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["load", "x", "--backend", "mpi"],
        ["load", "x", "--backend", "gloo", "--rank", "1", "--tp", "2"],
        ["load", "x", "--backend", "gloo", "--ep-rank", "0"],
        ["load", "x", "--backend", "gloo", "--timeout", "0"],
        ["plan", "x", "--backend", "gloo"],
        ["bench", "x", "--timeout", "5"],
    ],
)
def test_wrong_calls_exit_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(("local", "card"), [("cuda", "cuda:3"), ("cuda:1", "cuda:1")])
def test_cuda_is_the_card_of_the_local_rank(
    local: str, card: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert launch._own_card(local, 7) == card
    assert launch._own_card("cpu", 7) == "cpu"
    monkeypatch.delenv("LOCAL_RANK")
    assert launch._own_card("cuda", 7) == "cuda:7"

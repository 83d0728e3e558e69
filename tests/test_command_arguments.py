"""The arguments of the command line: what each kind takes, and wrong calls, which exit with 2."""

from __future__ import annotations

import argparse
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.command import build_parser, count, crossover, layer_list, main, seed, size, token_list

COMMANDS = ("inspect", "plan", "load", "verify", "bench")

UNITS = {
    "": 0,
    "b": 0,
    "k": 10,
    "kb": 10,
    "KiB": 10,
    "m": 20,
    "MIB": 20,
    "g": 30,
    "GiB": 30,
    "t": 40,
}


@settings(deadline=None)
@given(st.integers(1, 1 << 18), st.sampled_from(sorted(UNITS)), st.sampled_from(("", " ")))
def test_sizes_are_binary(number: int, unit: str, gap: str) -> None:
    assert size(f"{number}{gap}{unit}") == number << UNITS[unit]


def test_sizes_by_hand() -> None:
    assert size("64MiB") == 67_108_864 == size("67108864")
    assert size("1.5g") == 3 << 29
    assert size("0.5k") == 512


@pytest.mark.parametrize(
    "text", ["", "MiB", "0", "0.5", "-1", "nan", "inf", "1x", "1 2", "9999999t"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no size"):
        size(text)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 5)), min_size=1, max_size=5))
def test_layer_lists(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{first}-{first + more}" if more else f"{first}" for first, more in runs)
    assert layer_list(text) == [n for first, more in runs for n in range(first, first + more + 1)]


@pytest.mark.parametrize("text", ["", ",", "1,", "-1", "1-", "1--2", "a", "2-1", "1.5", "65536"])
def test_what_is_no_layer_list(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=re.escape(repr(text))):
        layer_list(text)


@settings(deadline=None)
@given(st.lists(st.integers(1, 1 << 20), min_size=1, max_size=6))
def test_token_lists(counts: list[int]) -> None:
    assert token_list(",".join(map(str, counts))) == counts
    assert count(str(counts[0])) == counts[0]


@pytest.mark.parametrize("text", ["", "0", "1,0", "1,,2", "-1", "x", "1.0"])
def test_what_is_no_token_list(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        token_list(text)


@settings(deadline=None)
@given(st.text(max_size=12))
def test_arguments_of_any_text_are_taken_or_refused(text: str) -> None:
    for parse in (size, count, layer_list, token_list, seed, crossover):
        try:
            value = parse(text)
        except (argparse.ArgumentTypeError, ValueError):  # argparse takes both for a wrong call
            continue
        assert value == 0 or value


def test_a_crossover_is_a_number_or_asks_for_a_measurement() -> None:
    assert crossover("measure") == "measure" and crossover("16") == 16 and seed("0") == 0


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["plan"],
        ["unknown", "x"],
        ["plan", "x", "--tp", "0"],
        ["plan", "x", "--tp", "-1"],
        ["plan", "x", "--ep", "two"],
        ["plan", "x", "--rank", "1"],
        ["plan", "x", "--tp", "4", "--rank", "4"],
        ["load", "x", "--ep-rank", "-1"],
        ["load", "x", "--layers", "3-1"],
        ["load", "x", "--layers", ""],
        ["load", "x", "--layers", "0-99999999999"],
        ["load", "x", "--staging", "lots"],
        ["load", "x", "--card-memory", "0"],
        ["load", "x", "--qpn-m1", "yes"],
        ["load", "x", "--layout", "plain"],
        ["load", "x", "--awq-rounding", "fused"],
        ["load", "x", "--nonfinite", "ignore"],
        ["load", "x", "--grouped-max-tokens", "1"],
        ["load", "x", "--json", "/there/is/no/such/folder/file.json"],
        ["load", "x", "--json", ""],
        ["load", "x", "--json", "/"],
        ["plan", "x", "--tp", "99999999999999999999"],
        ["plan", "x", "--tp", "2147483647"],
        ["plan", "x", "--tp", "60000", "--ep", "60000"],
        ["load", "x", "--grouped-max-tokens", "999999999999"],
        ["load", "x", "--grouped-max-tokens", "measured"],
        ["verify", "x", "--samples", "0"],
        ["verify", "x", "--samples", "9" * 20],
        ["verify", "x", "--seed", "-1"],
        ["verify", "x", "--seed", "one"],
        ["bench", "x", "--tokens", "9" * 20],
        ["bench", "x", "--tokens", "1,0"],
        ["bench", "x", "--dtype", "int8"],
        ["inspect", "x", "--tp", "2"],
    ],
)
def test_a_wrong_call_exits_2_before_anything_is_opened(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loader.checkpoint.source.LocalSource.__init__", None)
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == "" and "usage:" in shown.err and "error:" in shown.err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)
    for name in COMMANDS:
        with pytest.raises(SystemExit):
            main([name, "--help"])
        assert "SOURCE" in capsys.readouterr().out


def test_every_option_says_what_it_is() -> None:
    commands = next(
        action.choices
        for action in build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    assert set(commands) == {"inspect", "plan", "load", "verify", "bench"}
    for name, command in commands.items():
        silent = [action.dest for action in command._actions if not action.help]
        assert not silent, (name, silent)

"""The command line: what each command shows and writes, refusals in one line, terminals."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import loader
from loader import command
from loader.command import build_parser, main
from loader.errors import LoaderError
from loader.plan import DEFAULT_STAGING_BYTES
from loader.progress import ProgressBar
from loader.testing.checkpoint import TinyCheckpoint, tiny_checkpoint

COMMANDS = ("inspect", "plan", "load", "verify", "bench")
LOADING = COMMANDS[1:]
SMALL: dict[str, Any] = {"hidden": 64, "intermediate": 64, "experts": 4, "group": 32}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return tiny_checkpoint(tmp_path_factory.mktemp("command"), layers=2, **SMALL)


@pytest.fixture
def folder(checkpoint: TinyCheckpoint) -> str:
    return str(checkpoint.folder)


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "QPN_M1", "QPN_GROUPED", "QPN_COMPACT_METADATA"):
        monkeypatch.delenv(name, raising=False)


def _fast(name: str) -> list[str]:
    return {"verify": ["--samples", "16"], "bench": ["--tokens", "1,2", "--dtype", "fp32"]}.get(
        name, []
    )


# --- every command ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_succeeds_writes_to_stdout_alone_and_json_as_asked(
    name: str, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "result.json"
    assert main([name, folder, "--json", str(written), *_fast(name)]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    result = json.loads(written.read_text())
    texts = {
        "inspect": "Expert layers",
        "plan": "What each card holds",
        "load": "Memory on cpu",
        "verify": "result      ok",
        "bench": "ms a layer",
    }
    assert texts[name] in shown.out
    keys = {
        "inspect": {"files", "dtypes", "layers"},
        "plan": {"schema", "layers", "memory"},
        "load": {"schema", "layers", "memory", "seconds", "gb_per_s"},
        "verify": {"ok", "columns", "forward_worst"},
        "bench": {"schema", "seconds", "steps"},
    }
    assert keys[name] <= set(result)
    if name == "bench":
        assert [step["tokens"] for step in result["steps"]] == [1, 2]


def test_plan_json_is_the_load_json_without_what_was_measured(folder: str, tmp_path: Path) -> None:
    planned, loaded = tmp_path / "plan.json", tmp_path / "load.json"
    assert main(["plan", folder, "--json", str(planned)]) == 0
    assert main(["load", folder, "--json", str(loaded)]) == 0
    before, after = json.loads(planned.read_text()), json.loads(loaded.read_text())
    assert before == loader.plan(folder, card_memory=before["memory"]["card"]).to_dict()
    assert set(after) - set(before) == {"seconds", "gb_per_s", "bytes_read", "nonfinite"}
    for layer, planned_layer in zip(after["layers"], before["layers"], strict=True):
        assert set(layer) - set(planned_layer) == {"seconds", "releases"}


def test_tp_4_shows_four_cards(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "cards.json"
    assert main(["plan", folder, "--tp", "4", "--json", str(written)]) == 0
    shown = capsys.readouterr().out
    assert [f"tp {rank}/4" in shown for rank in range(5)] == [True] * 4 + [False]
    cards = json.loads(written.read_text())["cards"]
    assert [card["shard"]["tp_rank"] for card in cards] == [0, 1, 2, 3]
    assert main(["plan", folder, "--tp", "2", "--ep", "2", "--json", str(written)]) == 0
    cards = json.loads(written.read_text())["cards"]
    shards = [(card["shard"]["tp_rank"], card["shard"]["ep_rank"]) for card in cards]
    assert shards == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert main(["plan", folder, "--tp", "4", "--rank", "2", "--json", str(written)]) == 0
    assert json.loads(written.read_text())["shard"]["tp_rank"] == 2


def test_load_takes_one_card(folder: str, tmp_path: Path) -> None:
    written = tmp_path / "load.json"
    options = ["--tp", "2", "--ep", "4", "--json", str(written)]
    for ranks, wanted in ((["--rank", "1", "--ep-rank", "3"], (1, 3)), ([], (0, 0))):
        assert main(["load", folder, *options, *ranks]) == 0
        shard = json.loads(written.read_text())["shard"]
        assert (shard["tp_rank"], shard["ep_rank"]) == wanted
        assert (shard["tp_size"], shard["ep_size"]) == (2, 4)


def test_every_setting_reaches_the_plan(folder: str, tmp_path: Path) -> None:
    written = tmp_path / "plan.json"
    options = "--qpn-m1 off --qpn-grouped on --compact-metadata off --awq-rounding fused_bias"
    options += " --grouped-max-tokens 5 --nonfinite warn --layout record --layers 1 --staging 64KiB"
    options += " --card-memory 3GiB --device cpu"
    assert main(["plan", folder, "--json", str(written), *options.split()]) == 0
    plan = json.loads(written.read_text())
    assert {key: plan["policy"][key] for key in plan["policy"] if key != "origins"} == {
        "qpn_m1": "off",
        "qpn_grouped": "on",
        "compact_metadata": "off",
        "layout": "record",
        "awq_rounding": "fused_bias",
        "grouped_max_tokens": 5,
        "nonfinite": "warn",
    }
    assert [layer["layer"] for layer in plan["layers"]] == [1]
    assert plan["layers"][0]["metadata_layout"] == "record"
    assert [route["route"] for route in plan["layers"][0]["routes"]] == [
        "legacy",
        "qpn_grouped",
        "legacy",
    ]
    assert plan["memory"]["card"] == 3 << 30
    assert plan["memory"]["staging"] <= 64 << 10
    assert build_parser().parse_args(["plan", folder]).staging == DEFAULT_STAGING_BYTES == 64 << 20


def test_verify_exits_1_on_a_difference_also_into_a_closed_pipe(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(*args: Any, **kwargs: Any) -> Any:
        experts = loader.load(*args, **kwargs)
        experts[1].w2_weight[0, 0, 0, 0] ^= 1
        return experts

    monkeypatch.setattr(command, "load", spoilt)
    samples = ["--samples", "100000"]
    assert main(["verify", folder, *samples]) == 1
    assert "FAILED" in capsys.readouterr().out
    monkeypatch.setattr(command, "_show", lambda text: None)
    assert main(["verify", folder, *samples]) == 1


# --- errors -------------------------------------------------------------------------------------


def _refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a load that is refused."""
    assert main(arguments) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith("qpn: ") and "Traceback" not in line
    return line


@pytest.mark.parametrize("name", COMMANDS)
def test_a_missing_source_is_one_clear_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no such folder" in _refused([name, str(tmp_path / "nothing")], capsys)


@pytest.mark.parametrize("name", LOADING)
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--tp 3", "tp sizes that work: 1, 2, 4"),
        ("--ep 9", "ep_size of at most 4"),
        ("--layers 7", "holds no experts; layer 7"),
        ("--staging 100", "at least 512 bytes, found 100 bytes"),
        ("--device cuda:0", "no native code for the device"),
        ("--device xyz", "no such device"),
    ],
)
def test_a_refused_load_is_one_clear_line(
    name: str, options: str, says: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in _refused([name, folder, *options.split()], capsys)


def test_a_card_that_is_too_small_refuses_load_and_is_shown_by_plan(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("load", "verify", "bench"):
        line = _refused([name, folder, "--card-memory", "1KiB"], capsys)
        assert "the plan does not fit" in line and "bytes too many" in line
    assert main(["plan", folder, "--card-memory", "1KiB"]) == 0
    assert re.search(r"fits +NO", capsys.readouterr().out)


def test_a_bad_variable_is_one_clear_line(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QPN_M1", "yes")
    assert "QPN_M1" in _refused(["plan", folder], capsys)


@pytest.mark.parametrize(
    "error",
    [
        LoaderError("two\nlines", found="of\ttext"),
        OSError(28, "No space left on device"),
        RuntimeError("not\nours"),
        KeyboardInterrupt(),
        MemoryError(),
    ],
)
def test_whatever_is_raised_is_one_line_and_a_traceback_only_with_debug(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(options: argparse.Namespace) -> Any:
        raise error

    monkeypatch.setitem(command._COMMANDS, "inspect", fail)
    assert main(["inspect", "x"]) == (130 if isinstance(error, KeyboardInterrupt) else 1)
    (line,) = capsys.readouterr().err.splitlines()
    assert "not ours" in line or not isinstance(error, RuntimeError)
    if isinstance(error, LoaderError):
        assert line.startswith("qpn: two") and line.endswith("text")
    elif not isinstance(error, OSError):
        assert line.startswith(f"qpn: {type(error).__name__}: ") and "--debug" in line
    with pytest.raises(type(error)):
        main(["inspect", "x", "--debug"])


# --- terminals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("columns", "width"), [("80", 80), ("100", 100), ("40", 80), (None, 120)])
def test_text_is_as_wide_as_the_terminal(
    columns: str | None,
    width: int,
    folder: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    assert command._width() == width
    assert main(["plan", folder, "--tp", "4", "--ep", "4"]) == 0
    lines = capsys.readouterr().out.replace(folder, "").splitlines()
    assert max(map(len, lines)) <= width
    cards = max(line.split().count("cpu") for line in lines)
    assert cards == (width - 24) // 12


def test_the_bar_is_drawn_on_stderr_of_a_terminal_only(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bars = []

    def terminal() -> ProgressBar:
        console = Console(stderr=True, force_terminal=True, width=100)
        bars.append(ProgressBar(console))
        return bars[-1]

    monkeypatch.setattr(command, "ProgressBar", terminal)
    assert main(["load", folder]) == 0
    shown = capsys.readouterr()
    assert "layer" in shown.err and "━" in shown.err and "━" not in shown.out
    assert bars[0].completed == bars[0].total > 0


def test_it_starts_without_docstrings_and_with_a_closed_stderr(folder: str) -> None:
    """``python -OO`` strips docstrings; without a stderr an error must not go to stdout."""
    run = [sys.executable, "-OO", "-c", "import sys; from loader.command import main"]
    run[-1] += "; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([*run, "plan", folder], capture_output=True, check=True)
    assert b"qpn_m1" in done.stdout and not done.stderr
    shell = ["sh", "-c", '"$@" 2>&-', "sh", *run, "plan", folder + "/none"]
    failed = subprocess.run(shell, stdout=subprocess.PIPE, check=False)
    assert failed.returncode == 1 and not failed.stdout

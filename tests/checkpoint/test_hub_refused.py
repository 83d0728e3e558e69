"""What the Hub, its cache and its repos are refused for, in a sentence each, and going on."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hub_calls import Client, header_bytes, weights
from hub_server import TOKEN, Hub, Repo

import loader
from loader.checkpoint.hub import HubError, HubSource


def test_offline_says_what_is_missing(
    client: Client, offline: Client, server: Hub, repo: str
) -> None:
    with server.logged() as log:
        found = offline("load", repo)
    assert log == [] and found["error"] == "HubError"
    assert "the Hub is out of reach, and the file is not in its cache" in found["text"]
    assert f"{repo}/config.json" in found["text"] and "HF_HUB_OFFLINE unset" in found["text"]
    client("plan", repo)  # leaves configs and index in the cache, no weights
    found = offline("plan", repo)
    assert found["error"] == "HubError"
    assert f"its cache does not hold all of {repo}" in found["text"]
    assert "model-00001-of-00002.safetensors" in found["text"]


def test_a_hub_that_is_down_is_as_offline(client: Client, server: Hub, repo: str) -> None:
    client("load", repo)
    server.repos[repo].faults["api"] = 503
    with server.logged() as log:
        assert client("load", repo)["source"] == repo
    assert weights(log) == {}


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        (None, "no such local folder, and the Hub has no such repo or does not show it"),
        ({"gated": True}, "the Hub repo is gated; "),
        ({"faults": {"config.json": 403}}, "the Hub refuses the request"),
        ({"faults": {"config.json": 429}}, "the Hub refuses the request"),
        ({"faults": {"config.json": 503}}, "the Hub is out of reach, and the file is not in"),
        ({"faults": {"FIRST": 403}}, "the Hub refuses the request"),
        ({"faults": {"FIRST": "whole"}}, "does not answer with the byte range"),
        ({"faults": {"FIRST": "less"}}, "the Hub sent another number of bytes than was asked for"),
        ({"faults": {"FIRST": "more"}}, "the Hub sent another number of bytes than was asked for"),
        ({"faults": {"FIRST": "unsized"}}, "the Hub does not say how large a file is"),
        ({"faults": {"FIRST": "slow"}}, "the Hub does not answer in time"),
        ({"faults": {"FIRST": "cut"}}, "the transfer from the Hub broke off"),
        ({"faults": {"api": 403}}, "the Hub refuses the request"),
    ],
    ids=lambda value: re.sub("[^a-z0-9]+", "-", str(value).lower())[:40],
)
def test_each_refusal_is_one_sentence(
    facts: dict[str, Any] | None, says: str, client: Client, server: Hub, repo: str, folder: Path
) -> None:
    first = min(header_bytes(folder))
    if facts is None:
        del server.repos[repo]
    else:
        faults = {first if k == "FIRST" else k: v for k, v in facts.get("faults", {}).items()}
        server.repos[repo] = Repo(folder, **{**facts, "faults": faults})
    with server.logged() as log:
        found = client("plan", repo)
    assert found["error"] == "HubError", found
    assert says in found["text"] and repo in found["text"], found["text"]
    assert "\n" not in found["text"] and TOKEN not in found["text"]
    assert len(log) < 40
    ran = client("main", "plan", repo)
    assert ran["code"] == 1 and ran["out"] == ""
    assert ran["err"].splitlines()[-1].startswith("qpn: ")


def test_a_range_that_breaks_off_once_is_asked_for_again(
    client: Client, server: Hub, repo: str, folder: Path
) -> None:
    first = min(header_bytes(folder))
    server.repos[repo].faults[first] = "cut once"
    with server.logged() as log:
        assert client("plan", repo)["layers"] == loader.plan(folder).to_dict()["layers"]
    assert [one.range for one in weights(log)[first]][:2] == ["bytes=0-7"] * 2


def test_a_download_that_breaks_off_is_one_sentence_and_can_go_on(
    client: Client, server: Hub, repo: str, folder: Path
) -> None:
    first = min(header_bytes(folder))
    server.repos[repo].faults[first] = "cut"
    found = client("load", repo)
    assert found["error"] == "HubError" and "broke off" in found["text"]
    server.repos[repo].faults.clear()
    assert client("load", repo)["memory"]["resident"] == loader.plan(folder).resident_bytes


def test_a_repo_of_pickles_is_refused_and_they_are_never_asked_for(
    client: Client, server: Hub, repo: str, folder: Path, tmp_path: Path
) -> None:
    shutil.copy(folder / "config.json", tmp_path / "config.json")
    for name in ("pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"):
        (tmp_path / name).write_bytes(b"PK\x03\x04")
    server.repos[repo] = Repo(tmp_path)
    with server.logged() as log:
        for call in ("plan", "load"):
            found = client(call, repo)
            assert found["error"] == "CheckpointError"
            assert "holds no safetensors file" in found["text"]
            assert "only pickles, which are never opened" in found["text"]
    # A request of the test before may end only now: those of this repo count.
    names = {one.path.rsplit("/", 1)[1] for one in log if repo in one.path}
    assert names <= {"config.json", Repo(tmp_path).commit}


def test_an_index_that_names_a_pickle_or_leaves_the_repo_is_refused(
    client: Client, server: Hub, repo: str, folder: Path, tmp_path: Path
) -> None:
    shutil.copy(folder / "config.json", tmp_path / "config.json")
    index = tmp_path / "model.safetensors.index.json"
    for name, says in (
        ("pytorch_model.bin", "index names a file that is no safetensors"),
        ("../../other/secret.safetensors", "unsafe file name"),
        ("gone.safetensors", "1 of the 1 files that the index names do not exist"),
    ):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        (tmp_path / f"more{len(name)}").write_text("so that the commit is another one")
        server.repos[repo] = Repo(tmp_path)
        with server.logged() as log:
            assert says in client("load", repo)["text"]
        asked = [one.path for one in log if repo in one.path]
        assert asked and not any(path.endswith((".bin", ".safetensors")) for path in asked)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "README.md", "model.safetensors.py"])
def test_no_other_file_is_ever_fetched(tmp_path: Path, file: str) -> None:
    """Whoever asks: neither bytes nor a descriptor of it."""
    with HubSource("own/model", "own/model", "0" * 40, tmp_path, {file: 4}) as source:
        with pytest.raises(HubError, match="only safetensors, index and configs") as caught:
            source.read_into(file, 0, memoryview(bytearray(4)))
        assert caught.value.file == f"own/model/{file}"
        with pytest.raises(HubError, match="only safetensors"), source.descriptor(file):
            pass
    assert not list(tmp_path.iterdir())


def test_a_repo_without_a_config_is_refused(
    client: Client, server: Hub, repo: str, tmp_path: Path
) -> None:
    (tmp_path / "README.md").write_text("nothing here")
    server.repos[repo] = Repo(tmp_path)
    found = client("plan", repo)
    assert found["error"] == "MissingFileError"
    assert f"the Hub repo has no such file; file {repo}/config.json" in found["text"]

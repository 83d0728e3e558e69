"""The Hub, by its real client against a small server: what is asked, what is kept, who is told."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hub_calls import REPOSITORY, Client, header_bytes, weights
from hub_server import TOKEN, Hub, Repo
from worlds import finish, start

import loader
from loader.checkpoint.hub import HubError, locate
from loader.checkpoint.source import LocalSource
from loader.errors import CheckpointError
from loader.inspect import inspect

# --- what is asked ------------------------------------------------------------------------------


def test_plan_reads_headers_and_nothing_else_of_the_weights(
    client: Client, server: Hub, repo: str, folder: Path
) -> None:
    with server.logged() as log:
        planned = client("plan", repo)
    local = loader.plan(folder).to_dict()
    assert planned["source"] == repo
    assert planned["layers"] == local["layers"]
    for key in ("predicted_resident", "predicted_peak", "staging", "conversion"):
        assert planned["memory"][key] == local["memory"][key], key
    asked = weights(log)
    assert set(asked) == set(header_bytes(folder))
    for file, size in header_bytes(folder).items():
        assert [one.range for one in asked[file]] == ["bytes=0-7", f"bytes=8-{size - 1}"]
        assert sum(one.sent for one in asked[file]) == size
    assert client.kept(repo) == {"config.json", "model.safetensors.index.json"}
    names = {one.path.rsplit("/", 1)[1] for one in log}
    assert not {"pytorch_model.bin", "README.md", "original.safetensors"} & names
    with server.logged() as log:
        client("plan", repo)
    assert not any(one.sent for one in log if one.path.endswith("config.json"))


def test_load_fetches_the_files_of_the_model_into_the_cache(
    client: Client, server: Hub, repo: str, folder: Path, offline: Client
) -> None:
    with server.logged() as log:
        report = client("load", repo)
    assert report["source"] == repo
    assert report["memory"]["resident"] == loader.plan(folder).resident_bytes
    assert report["bytes_read"] == loader.load(folder).report.bytes_read
    files = set(header_bytes(folder))
    assert client.kept(repo) == files | {"config.json", "model.safetensors.index.json"}
    for file, requests in weights(log).items():
        whole = [one for one in requests if one.range is None]
        assert len(whole) == 1 and whole[0].sent == (folder / file).stat().st_size
    with server.logged() as log:
        assert client("load", repo)["memory"]["resident"] == report["memory"]["resident"]
        planned = client("plan", repo)
    assert weights(log) == {}  # headers, too, come from the cache now
    assert planned["layers"] == [
        {key: value for key, value in layer.items() if key in planned["layers"][0]}
        for layer in report["layers"]
    ]
    with server.logged() as log:
        assert offline("load", repo)["memory"]["resident"] == report["memory"]["resident"]
        assert offline("plan", repo)["layers"] == planned["layers"]
        assert offline("verify", repo) is True
    assert log == []


def test_what_headers_refuse_costs_no_download(client: Client, server: Hub, repo: str) -> None:
    with server.logged() as log:
        found = client("load", repo, shard=None, layers=[7])
    assert "holds no experts" in found["text"]
    assert all(one.range for requests in weights(log).values() for one in requests)
    with server.logged() as log:
        found = client("load", repo, card_memory=1)
    assert found["error"] == "CapacityError"
    assert all(one.range for requests in weights(log).values() for one in requests)


def test_verify_and_inspect_take_a_repo(client: Client, repo: str, folder: Path) -> None:
    assert client("verify", repo) is True
    facts, local = client("inspect", repo), inspect(folder)
    assert facts == {**local, "source": repo}


def test_every_command_takes_a_repo_and_a_revision(
    client: Client, server: Hub, repo: str, folder: Path
) -> None:
    server.repos[repo] = Repo(folder, branches=("tagged",))
    for name, more in {
        "inspect": [],
        "plan": ["--tp", "2"],
        "load": [],
        "verify": ["--samples", "8"],
        "bench": ["--tokens", "1", "--dtype", "fp32"],
    }.items():
        ran = client("main", name, repo, "--revision", "tagged", *more)
        assert ran["code"] == 0, ran
        if name != "verify":
            assert f"{repo}@tagged" in ran["out"]


# --- revisions, names, tokens -------------------------------------------------------------------


def test_a_revision_is_a_branch_or_a_commit(
    client: Client, server: Hub, repo: str, folder: Path
) -> None:
    server.repos[repo] = Repo(folder, branches=("main", "v2"))
    commit = server.repos[repo].commit
    for revision in ("v2", commit):
        assert client("plan", repo, revision=revision)["source"] == f"{repo}@{revision}"
    found = client("plan", repo, revision="v3")
    assert found["error"] == "HubError"
    assert found["text"].startswith("the Hub repo has no such revision; file ")
    assert f"{repo}@v3" in found["text"] and "\n" not in found["text"]


def test_the_token_goes_to_the_hub_and_to_no_other_host(
    client: Client, server: Hub, repo: str, folder: Path
) -> None:
    server.repos[repo] = Repo(folder, private=True)
    with server.logged() as log:
        assert client("load", repo)["source"] == repo
    own = [one for one in log if not one.stored]
    assert own and {one.token for one in own} == {f"Bearer {TOKEN}"}
    other = [one for one in log if one.stored]
    assert other and {one.token for one in other} == {None}


def test_a_local_folder_wins_and_has_no_revision(tmp_path: Path, folder: Path) -> None:
    here = Path.cwd()
    (tmp_path / "own").mkdir()
    shutil.copytree(folder, tmp_path / "own" / "model")
    os.chdir(tmp_path)
    try:
        with locate("own/model") as source:
            assert isinstance(source, LocalSource)
        with pytest.raises(HubError, match="only a Hub repo has revisions"):
            locate("own/model", "main")
        with pytest.raises(HubError, match="only a Hub repo has revisions"):
            locate(Path("own/other"), "main")
    finally:
        os.chdir(here)
    with pytest.raises(CheckpointError, match="no such folder"):
        locate(Path("own/nothing"))  # a path object is no repo id
    for name in ("nothing", "/own/model", "own/model/more", "../model", "own/.hidden", ".own/x"):
        with pytest.raises(CheckpointError, match="no such folder"):
            locate(name)


def test_without_the_client_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(HubError, match=r"no such folder.*pip install 'qpn-loader\[hub\]'"):
        loader.plan("own/model")


def test_the_client_is_imported_for_a_repo_id_alone(server: Hub, folder: Path) -> None:
    code = (
        f"import sys, loader; loader.load({str(folder)!r}); print('huggingface_hub' in sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert ran.stdout.strip() == "False"


# --- the cache ----------------------------------------------------------------------------------


def test_links_within_the_cache_are_followed_and_others_refused(tmp_path: Path) -> None:
    repo = tmp_path / "models--own--model"
    snapshot, shared = repo / "snapshots" / "abc", tmp_path / "blobs"
    for made in (snapshot, repo / "blobs", shared / "12"):
        made.mkdir(parents=True)
    (shared / "12" / "1234").write_bytes(b"bytes")
    (repo / "blobs" / "etag").symlink_to("../../blobs/12/1234")
    (snapshot / "shared.safetensors").symlink_to("../../blobs/etag")
    (tmp_path / "models--other" / "blobs").mkdir(parents=True)
    (tmp_path / "models--other" / "blobs" / "etag").write_bytes(b"no")
    (snapshot / "foreign.safetensors").symlink_to("../../../models--other/blobs/etag")
    with LocalSource(snapshot) as source, pytest.raises(CheckpointError, match="outside"):
        source.size("shared.safetensors")  # not the cache's own: it is not marked
    (shared / ".huggingface-shared-blobs").write_text("1\n")
    with LocalSource(snapshot) as source:
        assert source.size("shared.safetensors") == 5
        with pytest.raises(CheckpointError, match="outside"):
            source.size("foreign.safetensors")


def test_a_cache_with_another_file_than_the_hub_is_refused(
    client: Client, repo: str, folder: Path
) -> None:
    client("load", repo)
    first = min(header_bytes(folder))
    (link,) = client.cache.glob(f"models--{repo.replace('/', '--')}/snapshots/*/{first}")
    blob = link.resolve()
    blob.write_bytes(blob.read_bytes()[:-4])
    assert client("load", repo)["error"] in ("CheckpointError", "HubError")


def test_ranks_of_one_host_download_each_file_once(
    server: Hub, repo: str, folder: Path, tmp_path: Path
) -> None:
    command = ["-m", "loader", "load", repo, "--ep", "2", "--backend", "gloo"]
    where = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": server.endpoint, "HF_HUB_OFFLINE": "0"}
    with server.logged() as log:
        ended = finish(start([command, command], where))
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert "Memory of all cards" in ended[0][1] and ended[1][1] == ""
    for file, requests in weights(log).items():
        whole = [one for one in requests if one.range is None]
        assert [one.sent for one in whole] == [(folder / file).stat().st_size], file

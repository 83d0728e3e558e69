"""The Hub, by its real client against a small server: what is asked, what is kept, what is said."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import TOKEN, Hub, Repo, Request
from worlds import finish, start

import loader
from loader.checkpoint.hub import HubError, locate
from loader.checkpoint.source import LocalSource
from loader.errors import CheckpointError
from loader.inspect import inspect
from loader.testing.checkpoint import tiny_checkpoint
from loader.testing.container import read_header

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
SMALL: dict[str, Any] = {"hidden": 64, "intermediate": 64, "experts": 4, "group": 32, "layers": 2}

Call = Callable[..., dict[str, Any]]


class Client:
    """A process of ``hub_client.py`` in an environment of its own."""

    def __init__(self, home: Path, endpoint: str, **environment: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        self.cache = home / "hub"
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "hub_client.py")],
            env={
                **kept,
                "HF_HOME": str(home),
                "HF_ENDPOINT": endpoint,
                "HF_HUB_DISABLE_TELEMETRY": "1",
                "PYTHONPATH": str(REPOSITORY),
                "OMP_NUM_THREADS": "1",
                **environment,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        """The result of a call; ``error`` and ``text`` where it was refused."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, arguments, keywords]) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return answer.get("result", answer)

    def kept(self, repo: str) -> set[str]:
        """Names of the files that the cache has of a repo."""
        snapshots = self.cache / f"models--{repo.replace('/', '--')}" / "snapshots"
        return {str(path.relative_to(path.parents[0])) for path in snapshots.glob("*/*")}

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards with an index, and files that are nobody's business."""
    made = tiny_checkpoint(tmp_path_factory.mktemp("hub") / "made", shards=2, **SMALL).folder
    (made / "pytorch_model.bin").write_bytes(b"PK\x03\x04 never opened")
    (made / "README.md").write_text("hello")
    (made / "original.safetensors").write_bytes(b"no part of the model")
    return made


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    served = Hub()
    yield served
    served.close()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def client(server: Hub, home: Path) -> Iterator[Client]:
    """Logged in, online, and impatient."""
    waits = {"HF_HUB_ETAG_TIMEOUT": "1", "HF_HUB_DOWNLOAD_TIMEOUT": "1"}
    one = Client(home, server.endpoint, HF_TOKEN=TOKEN, **waits)
    yield one
    one.close()


@pytest.fixture(scope="module")
def offline(server: Hub, home: Path, client: Client) -> Iterator[Client]:
    """The same cache, in offline mode."""
    one = Client(home, server.endpoint, HF_HUB_OFFLINE="1")
    yield one
    one.close()


@pytest.fixture
def repo(server: Hub, folder: Path, request: pytest.FixtureRequest) -> str:
    """A repo of this test alone, so that nothing of it is in the cache."""
    name = "own/" + re.sub(r"[^A-Za-z0-9]+", "-", request.node.name).strip("-")[:80]
    server.repos[name] = Repo(folder)
    return name


def header_bytes(folder: Path) -> dict[str, int]:
    """Prefix and JSON of each file of the model."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return {file: read_header(folder / file)[1] for file in set(index["weight_map"].values())}


def weights(log: list[Request]) -> dict[str, list[Request]]:
    """Requests for weight files that had a body, by file."""
    found: dict[str, list[Request]] = {}
    for one in log:
        if one.path.endswith(".safetensors") and one.sent:
            found.setdefault(one.path.rsplit("/", 1)[1], []).append(one)
    return found


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


# --- offline ------------------------------------------------------------------------------------


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


# --- refusals -----------------------------------------------------------------------------------


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


def test_a_repo_without_a_config_is_refused(
    client: Client, server: Hub, repo: str, tmp_path: Path
) -> None:
    (tmp_path / "README.md").write_text("nothing here")
    server.repos[repo] = Repo(tmp_path)
    found = client("plan", repo)
    assert found["error"] == "MissingFileError"
    assert f"the Hub repo has no such file; file {repo}/config.json" in found["text"]


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

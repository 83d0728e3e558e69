"""Fixtures of the Hub's tests: one small server, and clients with a cache of their own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_calls import Client
from hub_server import TOKEN, Hub, Repo

from loader.testing.checkpoint import tiny_checkpoint

SMALL: dict[str, Any] = {"hidden": 64, "intermediate": 64, "experts": 4, "group": 32, "layers": 2}


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
    name = "own/" + re.sub(r"[^A-Za-z0-9]+", "-", request.node.name)[:80].strip("-")
    server.repos[name] = Repo(folder)
    return name

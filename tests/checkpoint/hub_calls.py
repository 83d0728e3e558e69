"""What tests of the Hub share: a client in a process of its own, and what it asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hub_server import Request

from loader.testing.container import read_header

HERE = Path(__file__).parent

REPOSITORY = HERE.parents[1]

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

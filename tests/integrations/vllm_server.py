"""A ``vllm serve`` process for tests: started, asked over HTTP, killed and looked for."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

START_SECONDS = 420
STOP_SECONDS = 90
SHARED = Path("/dev/shm")


@dataclass(frozen=True)
class Completion:
    """What the server answered: a token for each step, and its most likely ones with logprobs."""

    tokens: list[int]
    top: list[dict[int, float]]


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Server:
    """``vllm serve FOLDER --load-format qpn``; the block ends when the server has been killed."""

    def __init__(self, folder: Path, scratch: Path, options: Sequence[str] = ()) -> None:
        self.port = free_port()
        self.log_file = scratch / "server.log"
        self._shared_before = _shared()
        temporary = scratch / "tmp"
        temporary.mkdir()
        # Nothing of the user's settings, and no thread bound to a core that others use.
        known = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        environment = known | {
            "TMPDIR": str(temporary),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
        command = [
            *(str(Path(sys.executable).with_name("vllm")), "serve", str(folder)),
            *("--load-format", "qpn", "--skip-tokenizer-init", "--enforce-eager"),
            *("--max-model-len", "128", "--served-model-name", "tiny"),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *options,
        ]
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self.family: list[psutil.Process] = []

    @property
    def log(self) -> str:
        """Everything that the server's processes have written so far."""
        return self.log_file.read_text(errors="replace")

    def wait_until_ready(self) -> None:
        """Returns when the server answers; fails with its log where it ends before."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            assert self.process.poll() is None, f"the server ended early:\n{self.log[-6000:]}"
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    break
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        else:
            raise AssertionError(f"not ready in {START_SECONDS} s:\n{self.log[-6000:]}")
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def complete(self, prompt: list[int], tokens: int, top: int) -> Completion:
        """Greedy completion of a prompt of token ids, over the OpenAI-style endpoint."""
        asked = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "logprobs": top,
            "ignore_eos": True,
            "detokenize": False,
            "return_tokens_as_token_ids": True,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            found = json.load(answer)["choices"][0]["logprobs"]

        def number(name: str) -> int:
            return int(name.removeprefix("token_id:"))

        return Completion(
            [number(name) for name in found["tokens"]],
            [{number(name): p for name, p in step.items()} for step in found["top_logprobs"]],
        )

    def kill(self) -> None:
        """``kill`` as a user does it; everything is gone afterwards, or the test fails."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(STOP_SECONDS)
        _, alive = psutil.wait_procs(self.family, STOP_SECONDS)
        assert alive == [], f"left running: {alive}"
        until = time.monotonic() + STOP_SECONDS
        # Other processes may share memory for a moment.
        while left := [name for name in _shared() - self._shared_before if not _of_ranks(name)]:
            assert time.monotonic() < until, f"left in shared memory: {left}"
            time.sleep(0.5)
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", self.port))

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Whatever happened, no process of the session outlives the block."""
        if self.process.poll() is None:
            self.family = psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            self.process.wait(STOP_SECONDS)
        for one in self.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


def _of_ranks(name: str) -> bool:
    """Whether a name in shared memory is that of the all-reduce of vLLM's CPU ranks.

    vLLM 0.32 leaves one for each rank behind whatever it serves, since its workers end without
    running destructors. They are no work of the plugin; they are removed and not counted.
    """
    if not (name.startswith("vllm_dist_") and "-cpushm_" in name):
        return False
    (SHARED / name).unlink(missing_ok=True)
    return True


def _shared() -> set[str]:
    """Names in shared memory that are this user's."""
    mine = set()
    for file in SHARED.iterdir() if SHARED.is_dir() else ():
        try:
            if file.stat().st_uid == os.getuid():
                mine.add(file.name)
        except FileNotFoundError:
            continue
    return mine

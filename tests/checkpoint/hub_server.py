"""A small Hub on the loopback, with the endpoints that its client asks, and a store beside it.

Small files are served by the Hub itself, weights by a redirect to the store, which is another
origin, as on the real one. Every request is logged with the bytes that were sent.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

TOKEN = "hf_a_token_of_the_tests"
_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_INFO = re.compile(r"/api/models/([^/]+/[^/]+)/revision/([^/]+)")
_STORED = re.compile(r"/store/([^/]+/[^/]+)/(.+)")


@dataclass
class Repo:
    """A folder as a repo: one commit, on ``main`` and on each of ``branches``."""

    folder: Path
    branches: tuple[str, ...] = ("main",)
    private: bool = False
    gated: bool = False
    #: A fault by file: ``cut``, ``cut once``, ``slow``, ``whole`` (ranges are ignored), ``less``
    #: and ``more`` than the range that the answer names, ``unsized`` (nobody says its size), a
    #: status.
    faults: dict[str, str | int] = field(default_factory=dict)

    @property
    def commit(self) -> str:
        """Forty hex digits that name the content."""
        names = sorted(str(path.relative_to(self.folder)) for path in self.files())
        return hashlib.sha1("\n".join(names).encode()).hexdigest()

    def files(self) -> Iterator[Path]:
        """All files."""
        return (path for path in sorted(self.folder.rglob("*")) if path.is_file())


@dataclass(frozen=True)
class Request:
    """One request, and the bytes of its answer's body."""

    method: str
    path: str
    range: str | None
    token: str | None
    sent: int
    stored: bool


class Hub:
    """The two servers, the repos they show, and the log."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.log: list[Request] = []
        self.slow = threading.Event()
        self.slow_seconds = 2.5
        self._servers = [self._server(stored=False), self._server(stored=True)]
        self.endpoint, self.store = (
            f"http://127.0.0.1:{server.server_port}" for server in self._servers
        )

    def _server(self, stored: bool) -> ThreadingHTTPServer:
        handler = type("Handler", (_Handler,), {"hub": self, "stored": stored})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    def close(self) -> None:
        """Stop serving."""
        self.slow.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    @contextmanager
    def logged(self) -> Iterator[list[Request]]:
        """The requests made inside the block."""
        first = len(self.log)
        found: list[Request] = []
        yield found
        time.sleep(0.05)  # the log is written after the body was sent
        found += self.log[first:]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    stored: bool
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        """Nothing on stderr."""

    def do_HEAD(self) -> None:
        """As GET, without the body."""
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if self.stored:
            match = _STORED.fullmatch(path)
            assert match is not None, path
            self._file(self.hub.repos[match[1]], match[2])
        elif match := _INFO.fullmatch(path):
            if (repo := self._allowed(match[1], match[2])) is not None:
                self._info(match[1], repo)
        elif match := _RESOLVE.fullmatch(path):
            if (repo := self._allowed(match[1], match[2])) is not None:
                self._resolve(match[1], repo, match[3])
        else:
            self._answer(404, {}, b"")

    def _allowed(self, name: str, revision: str) -> Repo | None:
        repo = self.hub.repos.get(name)
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo is None or (repo.private and not known):
            self._refuse(404 if known else 401, "RepoNotFound", "Repository not found")
        elif repo.gated:
            self._refuse(403 if known else 401, "GatedRepo", f"Access to {name} is restricted")
        elif revision not in (*repo.branches, repo.commit):
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return repo
        return None

    def _refuse(self, status: int, code: str, message: str) -> None:
        body = json.dumps({"error": message}).encode()
        self._answer(status, {"X-Error-Code": code, "X-Error-Message": message}, body)

    def _info(self, name: str, repo: Repo) -> None:
        if (fault := repo.faults.get("api")) is not None:
            self._answer(int(fault), {}, b"down")
            return
        siblings: list[dict[str, str | int]] = []
        for path in repo.files():
            file = str(path.relative_to(repo.folder))
            unsized = repo.faults.get(file) == "unsized"
            siblings.append(
                {"rfilename": file, **({} if unsized else {"size": path.stat().st_size})}
            )
        facts = {"id": name, "sha": repo.commit, "siblings": siblings, "tags": []}
        self._answer(200, {"Content-Type": "application/json"}, json.dumps(facts).encode())

    def _resolve(self, name: str, repo: Repo, file: str) -> None:
        path = repo.folder / file
        common = {"X-Repo-Commit": repo.commit}
        if not path.is_file():
            body = b'{"error": "Entry not found"}'
            self._answer(404, {**common, "X-Error-Code": "EntryNotFound"}, body)
            return
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if file.endswith(".json"):
            self._file(repo, file, {**common, "ETag": f'"{digest[:40]}"'})
            return
        linked = {"X-Linked-Size": str(path.stat().st_size), "X-Linked-Etag": f'"{digest}"'}
        place = {"Location": f"{self.hub.store}/store/{name}/{file}"}
        unsized = repo.faults.get(file) == "unsized"
        if unsized:
            del linked["X-Linked-Size"]
        self._answer(302, {**common, **linked, **place}, b"", sized=not unsized)

    def _file(self, repo: Repo, file: str, headers: dict[str, str] | None = None) -> None:
        data, fault = (repo.folder / file).read_bytes(), repo.faults.get(file)
        if isinstance(fault, int):
            self._answer(fault, {}, b"down")
            return
        if fault == "cut once":
            del repo.faults[file]
        if fault == "slow":
            self.hub.slow.wait(self.hub.slow_seconds)
        asked = re.fullmatch(r"bytes=([0-9]+)-([0-9]*)", self.headers.get("Range", ""))
        status, answer = 200, dict(headers or {})
        if asked is not None and fault != "whole":
            first, last = int(asked[1]), min(int(asked[2] or len(data)), len(data) - 1)
            answer["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            data, status = data[first : last + 1], 206
        data = data[:-1] if fault == "less" else data + b"." if fault == "more" else data
        self._answer(status, answer, data, cut=str(fault).startswith("cut"))

    def _answer(
        self,
        status: int,
        headers: dict[str, str],
        body: bytes,
        *,
        cut: bool = False,
        sized: bool = True,
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if sized:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        sent = b"" if self.command == "HEAD" else body[: len(body) // 2] if cut else body
        self.hub.log.append(
            Request(
                self.command,
                urlsplit(self.path).path,
                self.headers.get("Range"),
                self.headers.get("Authorization"),
                len(sent),
                self.stored,
            )
        )
        try:
            self.wfile.write(sent)
            self.wfile.flush()
        except OSError:
            self.close_connection = True  # the client went away, as it may
        if cut or not sized:
            self.close_connection = True

"""The Hub: a checkpoint by its repo id, through the client and the cache of ``huggingface_hub``.

Nothing of that library is imported before a repo id is asked for. Token, offline mode, endpoint and
cache folder are its own business: it reads its environment itself.

Configs and the index come into the cache as whole files. Of a weight file that is not in the cache,
planning reads the header alone, over HTTP ranges; :meth:`HubSource.fetch` downloads the files that
the index names, and from then on all bytes come from the cache. No other file is ever opened.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import NoneType, TracebackType

from loader.checkpoint.hub_client import (
    HubError,
    asking,
    broke_off,
    client,
    out_of_reach,
    translated,
    way_out,
)
from loader.checkpoint.index import select_files
from loader.checkpoint.model import CONFIG
from loader.checkpoint.source import LocalSource, MissingFileError, Source, open_source
from loader.checkpoint.wording import shown
from loader.errors import CheckpointError

_LOG = logging.getLogger(__name__)

_REPO_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_TRIES = 3
"""Requests for one range before a transfer that breaks off is an error."""


def locate(source: str | os.PathLike[str] | Source, revision: str | None = None) -> Source:
    """A Source as it is, a local folder, or else a repo of the Hub of that id.

    A local folder wins over a repo id of the same spelling; a path object is always local.
    ``revision`` is a branch, tag or commit of a repo. Raises CheckpointError, HubError.
    """
    if not isinstance(revision, (str, NoneType)):
        raise HubError("revision is not valid", expected="a name, or None", found=repr(revision))
    if isinstance(source, str) and not os.path.exists(source) and _REPO_ID.fullmatch(source):
        return open_repo(source, revision)
    if revision is not None:
        raise HubError(
            "only a Hub repo has revisions",
            file=shown(source if isinstance(source, str) else "") or None,
            expected="a repo id (owner/name) that is no local folder",
            found=f"revision {shown(revision)!r} of a local source",
        )
    return open_source(source)


@contextmanager
def located(
    source: str | os.PathLike[str] | Source, revision: str | None = None
) -> Iterator[Source]:
    """What :func:`locate` returns; closed after the block where it was opened here."""
    opened = locate(source, revision)
    try:
        yield opened
    finally:
        if opened is not source:
            opened.close()


def open_repo(repo: str, revision: str | None = None) -> Source:
    """The repo at ``revision`` (None: its default branch), pinned to one commit.

    Where the Hub is out of reach, what the cache holds of it. Raises HubError.
    """
    name = f"{repo}@{revision}" if revision else repo
    hub = client(name)
    with asking(name, CONFIG):
        # Writes the branch into the cache too, so that the same call works offline afterwards.
        path = Path(hub.hf_hub_download(repo, CONFIG, revision=revision))
    folder, commit = path.parent, path.parent.name
    try:
        timeout = hub.constants.HF_HUB_ETAG_TIMEOUT
        info = hub.HfApi().model_info(repo, revision=commit, files_metadata=True, timeout=timeout)
    except Exception as error:
        if not out_of_reach(error):
            raise translated(error, name, None) from error
        return _cached(name, folder, error)
    sizes = {file.rfilename: file.size for file in info.siblings or ()}
    return HubSource(name, repo, commit, folder, sizes)


def _cached(name: str, folder: Path, error: Exception) -> LocalSource:
    """What the cache holds, all of it that a load needs."""
    source = LocalSource(folder, name=name)
    try:
        select_files(source)
    except CheckpointError as missing:
        source.close()
        raise HubError(
            f"the Hub is out of reach, and its cache does not hold all of {name}",
            file=missing.file,
            expected=f"the files of the checkpoint in {folder}, or {way_out(error)}",
            found=missing.what,
        ) from error
    _LOG.warning("the Hub is out of reach: %s is taken from its cache, %s", name, folder)
    return source


class HubSource:
    """One commit of a model repo, as a :class:`loader.checkpoint.source.Source`.

    ``folder`` is where the cache keeps the files of this commit: those that it has.
    """

    def __init__(
        self, name: str, repo: str, commit: str, folder: Path, sizes: dict[str, int | None]
    ) -> None:
        self.name = name
        self.folder: Path | None = folder
        self._hub = client(name)
        self._repo = repo
        self._commit = commit
        self._sizes = sizes
        self._local = LocalSource(folder, name=name)

    def __enter__(self) -> HubSource:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def list(self) -> list[str]:
        """Names of the files of the repo, sorted."""
        return sorted(self._sizes)

    def size(self, file: str) -> int:
        """Bytes of ``file``. Raises MissingFileError, HubError."""
        if file not in self._sizes:
            raise MissingFileError(
                "file does not exist", file=shown(file), found=f"no such file in {self.name}"
            )
        size = self._sizes[file]
        if size is None:
            with asking(self.name, file):
                size = self._hub.get_hf_file_metadata(self._url(file)).size
            if size is None:
                raise HubError(
                    "the Hub does not say how large a file is", file=f"{self.name}/{shown(file)}"
                )
            self._sizes[file] = size
        return size

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fills ``buffer``: from the cache, for a weight file that it does not have over HTTP.

        Raises HubError, CheckpointError.
        """
        if self._is_cached(file) or not file.endswith(".safetensors"):
            self._download(file)
            self._local.read_into(file, offset, buffer)
        elif len(buffer):
            self._read_range(file, offset, buffer)

    @property
    def lends_descriptors(self) -> bool:
        """True: what :meth:`fetch` brought is local."""
        return True

    def descriptor(self, file: str) -> AbstractContextManager[int]:
        """A descriptor of ``file`` in the cache; downloads it if need be."""
        self._download(file)
        return self._local.descriptor(file)

    def fetch(self, each: Callable[[], object] = lambda: None) -> None:
        """Download the files of the model that the cache lacks; ``each`` is called after each.

        Raises HubError for a transfer that fails; what arrived before stays in the cache.
        """
        for file in select_files(self).files:
            self._download(file)
            each()

    def close(self) -> None:
        """Gives everything back; may be called again."""
        self._local.close()

    def _is_cached(self, file: str) -> bool:
        found = self._hub.try_to_load_from_cache(self._repo, file, revision=self._commit)
        return isinstance(found, str)

    def _download(self, file: str) -> None:
        """The whole file into the cache, where it is not there yet."""
        if not file.endswith((".safetensors", ".json")):
            raise HubError(
                "only safetensors, index and configs are fetched",
                file=f"{self.name}/{shown(file)}",
            )
        expected = self.size(file)
        if not self._is_cached(file):
            with asking(self.name, file):
                self._hub.hf_hub_download(self._repo, file, revision=self._commit)
        if self._local.size(file) != expected:
            raise HubError(
                "the cache holds another file than the Hub",
                file=f"{self.name}/{shown(file)}",
                expected=f"{expected} bytes",
                found=f"{self._local.size(file)} bytes",
            )

    def _url(self, file: str) -> str:
        return str(self._hub.hf_hub_url(self._repo, file, revision=self._commit))

    def _read_range(self, file: str, offset: int, buffer: memoryview) -> None:
        got = 0
        for left in reversed(range(_TRIES)):
            with asking(self.name, file):
                try:
                    got = self._request(file, offset, buffer)
                except self._hub.errors.HTTPError as error:
                    if not left or not broke_off(error):
                        raise
            if got == len(buffer):
                return
        raise HubError(
            "the Hub sent another number of bytes than was asked for",
            file=f"{self.name}/{shown(file)}",
            expected=f"{len(buffer)} bytes at offset {offset}",
            found=f"{got} bytes",
        )

    def _request(self, file: str, offset: int, buffer: memoryview) -> int:
        """One request for one range, into ``buffer``; returns how many bytes came."""
        hub, wanted = self._hub, len(buffer)
        headers = hub.utils.build_hf_headers()
        headers["Range"] = f"bytes={offset}-{offset + wanted - 1}"
        headers["Accept-Encoding"] = "identity"
        with hub.utils.http_stream_backoff(
            "GET",
            self._url(file),
            headers=headers,
            timeout=hub.constants.HF_HUB_DOWNLOAD_TIMEOUT,
            retry_on_exceptions=(),
            retry_on_status_codes=(408, 429),
            max_retries=_TRIES,
        ) as response:
            hub.utils.hf_raise_for_status(response)
            given = response.headers.get("Content-Range", "")
            # The body of any other answer may be the whole file: it is not read.
            if response.status_code != 206 or not given.startswith(f"bytes {offset}-"):
                raise HubError(
                    "the Hub does not answer with the byte range that was asked for",
                    file=f"{self.name}/{shown(file)}",
                    expected=f"206 with bytes {offset}-{offset + wanted - 1}",
                    found=f"{response.status_code} {shown(given)}".strip(),
                )
            got = 0
            for part in response.iter_bytes():
                if got + len(part) > wanted:
                    return got + len(part)
                buffer[got : got + len(part)] = part
                got += len(part)
        return got

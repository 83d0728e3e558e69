"""Hub client: ``huggingface_hub``, imported when it is asked for, and its errors in our words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from loader.checkpoint.source import MissingFileError
from loader.checkpoint.wording import shown
from loader.errors import CheckpointError, LoaderError

_INSTALL = "pip install 'qpn-loader[hub]'"


class HubError(CheckpointError):
    """The Hub refuses, does not answer, or has no such repo, revision or file."""


def client(name: str) -> ModuleType:
    """``huggingface_hub``, with the parts that are used."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError as error:
        raise HubError(
            "there is no such folder, and to take it as a Hub repo huggingface_hub is needed",
            file=shown(name),
            expected=f"a local folder, or {_INSTALL}",
            found=str(error),
        ) from error
    return huggingface_hub


@contextmanager
def asking(name: str, file: str) -> Iterator[None]:
    """Whatever the client, its HTTP library or the disk under the cache raises, in one sentence."""
    try:
        yield
    except LoaderError:
        raise
    except Exception as error:
        raise translated(error, name, file) from error


def out_of_reach(error: BaseException) -> bool:
    """Whether the Hub could not be asked at all: offline, no connection, no answer, or down."""
    errors = client("").errors
    if isinstance(error, errors.HfHubHTTPError):
        return bool(error.response.status_code >= 500)
    return isinstance(
        error, (errors.OfflineModeIsEnabled, errors.HTTPError, ConnectionError, TimeoutError)
    )


def broke_off(error: BaseException) -> bool:
    """Whether a transfer began and did not end: worth another try at once."""
    answered = isinstance(error, client("").errors.HfHubHTTPError)
    return out_of_reach(error) and not answered and not is_late(error)


def is_late(error: BaseException) -> bool:
    """Whether the time for an answer ran out; HTTP libraries have names of their own for it."""
    return isinstance(error, TimeoutError) or "Timeout" in type(error).__name__


def way_out(error: BaseException) -> str:
    """What would help, for a Hub that is out of reach."""
    offline = isinstance(error, client("").errors.OfflineModeIsEnabled)
    return "HF_HUB_OFFLINE unset" if offline else "a connection to it"


def translated(error: Exception, name: str, file: str | None) -> LoaderError:
    """The library's own error for one of the client's."""
    errors = client(name).errors
    cause = error.__cause__
    missing = isinstance(error, errors.LocalEntryNotFoundError)
    if missing and isinstance(cause, Exception):
        if not out_of_reach(cause):
            return translated(cause, name, file)
        error = cause
    first_line = shown(str(error).strip().partition("\n")[0])
    facts: dict[str, Any] = {
        "file": f"{name}/{file}" if file else name,
        "found": f"{type(error).__name__}: {first_line}",
    }
    if missing:
        return HubError(
            "the Hub is out of reach, and the file is not in its cache",
            expected=f"the file in the cache, or {way_out(error)}",
            **facts,
        )
    if isinstance(error, errors.EntryNotFoundError):
        return MissingFileError("the Hub repo has no such file", **facts)
    for kind, what, expected in (
        (
            errors.GatedRepoError,
            "the Hub repo is gated",
            "its terms accepted on its page, and a token (hf auth login, or HF_TOKEN)",
        ),
        (
            errors.RepositoryNotFoundError,
            "no such local folder, and the Hub has no such repo or does not show it",
            "a folder, a public repo, or a token that may read it (hf auth login, or HF_TOKEN)",
        ),
        (
            errors.RevisionNotFoundError,
            "the Hub repo has no such revision",
            "a branch, a tag or a commit of the repo",
        ),
        (errors.HfHubHTTPError, "the Hub refuses the request", "leave to read the repo"),
        (errors.HFValidationError, "this is no Hub repo id", "owner/name"),
    ):
        if isinstance(error, kind):
            return HubError(what, expected=expected, **facts)
    if is_late(error):
        return HubError("the Hub does not answer in time", **facts)
    if out_of_reach(error):
        return HubError("the transfer from the Hub broke off", **facts)
    return HubError("the file could not be fetched from the Hub", **facts)

"""The errors of the library: one sentence each, with the facts a user needs to act.

Every error derives from :class:`LoaderError` and carries its facts as fields, so that a caller
can test them instead of parsing a message.
"""

from __future__ import annotations

import traceback
from typing import Any

_MOST_CHARACTERS = 1000
"""Most characters of one fact in a message; the attribute of the error keeps all of it."""


class LoaderError(Exception):
    """Base of every error this library raises.

    ``what`` is a short clause; the facts that are known are appended in a fixed order and kept
    as attributes: ``file`` (str), ``layer`` (int), ``experts`` (str), ``tensor`` (str),
    ``expected`` and ``found`` (anything with a useful ``str``).
    """

    def __init__(
        self,
        what: str,
        *,
        file: str | None = None,
        layer: int | None = None,
        experts: str | None = None,
        tensor: str | None = None,
        expected: Any = None,
        found: Any = None,
    ) -> None:
        self.what = what
        self.file = file
        self.layer = layer
        self.experts = experts
        self.tensor = tensor
        self.expected = expected
        self.found = found
        super().__init__(self._sentence())

    def at(self, **facts: Any) -> LoaderError:
        """The same error with more facts: those given fill what this one does not know yet."""
        known = {
            name: getattr(self, name)
            for name in ("file", "layer", "experts", "tensor", "expected", "found")
        }
        known.update({name: value for name, value in facts.items() if known[name] is None})
        return type(self)(self.what, **known)

    def _sentence(self) -> str:
        where = [
            f"{label} {_one_line(value)}"
            for label, value in (
                ("file", self.file),
                ("layer", self.layer),
                ("experts", self.experts),
                ("tensor", self.tensor),
            )
            if value is not None
        ]
        facts = [
            f"{label} {_one_line(value)}"
            for label, value in (("expected", self.expected), ("found", self.found))
            if value is not None
        ]
        return "; ".join(
            [_one_line(self.what)]
            + ([", ".join(where)] if where else [])
            + ([", ".join(facts)] if facts else [])
        )


def described(error: BaseException) -> str:
    """The kind and the words of an error that is not ours, whose own ``__str__`` may raise."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as unsaid:
        return f"{type(error).__name__}, whose message is a {type(unsaid).__name__} itself"


def _one_line(value: Any) -> str:
    """A fact as a message carries it: names and causes are not ours, and may hold anything."""
    text = str(value)
    text = text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + "..."
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


class CheckpointError(LoaderError):
    """The checkpoint is broken or contradicts itself: header, index, config, missing tensors."""


class UnsupportedError(LoaderError):
    """The checkpoint is sound, but in a form this library does not load; the form is named."""


class PolicyError(LoaderError):
    """A policy or environment setting is not valid, or an explicit ``on`` cannot be honoured."""


class ShardError(LoaderError):
    """A TP or EP setting that cannot work for this checkpoint, with the settings that would."""


class CapacityError(LoaderError):
    """The plan does not fit: memory of the card, or a staging budget below the smallest piece."""


class ConversionError(LoaderError):
    """A value in the payload cannot be loaded: a NaN scale, a value that fp16 cannot hold."""


class LifecycleError(LoaderError):
    """A layer was used outside its lifecycle: an observer failed, a frozen decision was changed."""


def clear_frames(error: BaseException, handled: BaseException | None = None) -> None:
    """Drop the locals of all frames that an error and its causes hold: they keep no tensor.

    ``handled`` is what was being handled before: the caller's own, and left alone.
    """
    seen = {id(handled)}
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        pending += [one.__cause__, one.__context__]

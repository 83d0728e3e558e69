"""A process that uses the Hub as a user's does: its environment says where that is, and who asks.

Takes a call as a line of JSON (``[name, arguments, keywords]``), answers with a line of JSON.
"""

from __future__ import annotations

import io
import json
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import loader
from loader.command import main
from loader.inspect import inspect

_SLEEP = time.sleep


def _main(*arguments: str) -> dict[str, Any]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(arguments)
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def _load(*arguments: Any, **keywords: Any) -> dict[str, Any]:
    return loader.load(*arguments, **keywords).report.to_dict()


def _verify(source: str, **keywords: Any) -> bool:
    return loader.verify(loader.load(source, **keywords), source, samples=16, **keywords).ok


CALLS = {
    "plan": lambda *a, **k: loader.plan(*a, **k).to_dict(),
    "inspect": inspect,
    "load": _load,
    "verify": _verify,
    "main": _main,
    "modules": lambda: [m for m in ("huggingface_hub", "transformers") if m in sys.modules],
}


def serve() -> None:
    """Answer calls until there are no more."""
    # The client of the Hub waits seconds between its tries.
    time.sleep = lambda seconds: _SLEEP(min(seconds, 0.01))
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        name, arguments, keywords = json.loads(line)
        try:
            answer = {"result": CALLS[name](*arguments, **keywords)}
        except loader.LoaderError as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve()

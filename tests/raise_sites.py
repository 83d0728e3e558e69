"""Which error messages of the package a test run reached.

    pytest --raise-sites DIR          records, in every process of the run
    python tests/raise_sites.py DIR   lists the places never reached; exits 1 if there are any

A place is a ``raise`` of a new error, or a call of a function that does nothing but raise. Errors
that are no ``LoaderError`` (of the native core's checks, of programming faults) are not followed.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

PACKAGE = Path(__file__).parents[1] / "loader"
_NOT_OURS = {"ValueError", "OSError", "AssertionError", "RuntimeError", "TypeError", "KeyError"}
_NOT_OURS |= {
    "SystemExit",
    "ArgumentTypeError",
    "NotImplementedError",
    "DescriptorError",
    "AttributeError",
}

#: Places that no test can reach, each with its reason.
UNREACHED: dict[str, str] = {}


class Site(NamedTuple):
    """One place: its file below the package, its first and last line, its source."""

    file: str
    first: int
    last: int
    text: str

    @property
    def key(self) -> str:
        """What ``UNREACHED`` calls it: no line number, which would not last."""
        return f"{self.file}: {self.text}"


def sites() -> list[Site]:
    """Every place of the package."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    raisers = {
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and node.returns is not None
        and ast.unparse(node.returns) == "NoReturn"
    }
    found = []
    for path, tree in trees.items():
        lines = path.read_text().splitlines()
        for node in _places(tree, raisers):
            text = " ".join(line.strip() for line in lines[node.lineno - 1 : node.lineno + 1])
            name = path.relative_to(PACKAGE).as_posix()
            found.append(Site(name, node.lineno, node.end_lineno or node.lineno, text[:120]))
    return found


def _places(tree: ast.Module, raisers: set[str]) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            if _name(node.exc) not in _NOT_OURS:
                yield node
        elif (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Call)
            and _name(node.value) in raisers
        ):
            yield node


def _name(call: ast.Call) -> str:
    return ast.unparse(call.func).split(".")[-1]


def record(reached: set[tuple[str, int]]) -> None:
    """From now on, note where in the package every new ``LoaderError`` comes from."""
    from loader.errors import LoaderError

    inner = LoaderError.__init__
    package = str(PACKAGE) + os.sep

    def noting(self: LoaderError, *args: Any, **facts: Any) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            path = frame.f_code.co_filename
            if path.startswith(package):
                reached.add((path[len(package) :], frame.f_lineno))
            frame = frame.f_back
        inner(self, *args, **facts)

    LoaderError.__init__ = noting  # type: ignore[method-assign]  # every error is to be seen


def write(reached: set[tuple[str, int]], folder: Path) -> None:
    """What one process reached."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{os.getpid()}.json").write_text(json.dumps(sorted(reached)))


def main(folder: Path) -> int:
    """Compare the places with what all processes reached."""
    reached: dict[str, set[int]] = {}
    for path in folder.glob("*.json"):
        for file, line in json.loads(path.read_text()):
            reached.setdefault(file, set()).add(line)
    everything = sites()
    missed = [
        site
        for site in everything
        if not reached.get(site.file, set()).intersection(range(site.first, site.last + 1))
        and site.key not in UNREACHED
    ]
    for site in missed:
        print(f"loader/{site.file}:{site.first}: {site.text}")
    print(f"{len(everything)} places that raise, {len(missed)} never reached")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

"""Which error messages of the library a test run reached.

    pytest --raise-sites DIR             records, in every process of the run
    python tests/raise_sites.py DIR...   lists what was never reached; exits 1 if there is any

A place of the package is a ``raise`` of a new error, or a call of a function that does nothing but
raise. Errors that are no ``LoaderError`` (of the native core's checks, of programming faults) are
not followed. A message of native code is a sentence in ``csrc/``, of the host's or of the cards'
library. What only some environment can reach is listed with it (``ELSEWHERE``); a run there records
it, too, and several folders are taken together.
"""

from __future__ import annotations

import ast
import atexit
import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

HERE = Path(__file__).parent
PACKAGE = HERE.parent / "loader"
CSRC = HERE.parent / "csrc"
FOLDER = "QPN_TEST_RAISE_SITES"
"""Tells a process that a test starts where to record."""

_NOT_OURS = {"ValueError", "OSError", "AssertionError", "RuntimeError", "TypeError", "KeyError"}
_NOT_OURS |= {
    "SystemExit",
    "ArgumentTypeError",
    "NotImplementedError",
    "DescriptorError",
    "AttributeError",
}

A_CARD = "a card (tests marked gpu)"
VLLM = "vLLM (make test-vllm)"


class Elsewhere(NamedTuple):
    """What only some environment reaches: which one, and the test there, or the file of tests."""

    environment: str
    test: str


_CUDA = "test_cuda_messages.py"
#: By the beginning of a key.
ELSEWHERE: dict[str, Elsewhere] = {
    "card: the conversion could not be launched": Elsewhere(
        A_CARD, f"{_CUDA}::test_a_launch_that_cuda_refuses_is_told"
    ),
    "card: the closing pass could not be launched": Elsewhere(
        A_CARD, f"{_CUDA}::test_a_launch_that_cuda_refuses_is_told"
    ),
    "card: more rows or experts than one step of these kernels takes": Elsewhere(
        A_CARD, f"{_CUDA}::test_more_than_one_step_takes_is_refused"
    ),
    "integrations/vllm/": Elsewhere(VLLM, "integrations/test_vllm_plugin.py"),
}


class Site(NamedTuple):
    """One place: its file below the package or ``csrc/``, its lines, its source or sentence.

    ``native``: the library that says the sentence, ``host`` or ``card``; empty for Python.
    """

    file: str
    first: int
    last: int
    text: str
    native: str = ""

    @property
    def key(self) -> str:
        """What the tables call it: no line number, which would not last."""
        return f"{self.native or self.file}: {self.text}"

    def is_in(self, reached: Reached) -> bool:
        """Whether a run reached it."""
        if self.native:
            return self.text in reached.sentences.get(self.native, ())
        lines = reached.lines.get(self.file, set())
        return bool(lines.intersection(range(self.first, self.last + 1)))


class Reached:
    """What the processes of a run reached: lines by file, sentences by library."""

    def __init__(self) -> None:
        self.lines: dict[str, set[int]] = {}
        self.sentences: dict[str, set[str]] = {}

    def write(self, folder: Path) -> None:
        """Leave what this process reached."""
        folder.mkdir(parents=True, exist_ok=True)
        found = [
            {key: sorted(values) for key, values in table.items()}
            for table in (self.lines, self.sentences)
        ]
        (folder / f"{os.getpid()}.json").write_text(json.dumps(found))

    def add(self, path: Path) -> None:
        """Join what another process left."""
        for mine, theirs in zip(
            (self.lines, self.sentences), json.loads(path.read_text()), strict=True
        ):
            for key, values in theirs.items():
                mine.setdefault(key, set()).update(values)


# Where errors can come from


def sites() -> list[Site]:
    """Every place of the package, and every sentence of native code once for each library."""
    return [*_python_sites(), *_native_sites()]


def _python_sites() -> Iterator[Site]:
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    raisers = {
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and node.returns is not None
        and ast.unparse(node.returns) == "NoReturn"
    }
    for path, tree in trees.items():
        lines = path.read_text().splitlines()
        for node in _places(tree, raisers):
            text = " ".join(line.strip() for line in lines[node.lineno - 1 : node.lineno + 1])
            name = path.relative_to(PACKAGE).as_posix()
            yield Site(name, node.lineno, node.end_lineno or node.lineno, text[:120])


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


_SENTENCE = re.compile(r'"((?:[A-Z] |[a-z]+[ \'])[^"\\]+)"')
_LIBRARIES = {"host": ("host",), "card": ("launch", "host/check.cpp", "host/error.h")}


def _native_sites() -> Iterator[Site]:
    for library, parts in _LIBRARIES.items():
        seen: set[str] = set()
        for path in sorted(file for part in parts for file in _files(CSRC / part)):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                code = line.partition("//")[0]
                if "static_assert" in code or "#" in code:
                    continue
                for text in _SENTENCE.findall(code):
                    if text not in seen:
                        seen.add(text)
                        name = path.relative_to(CSRC.parent).as_posix()
                        yield Site(name, number, number, text, library)


def _files(path: Path) -> Iterable[Path]:
    return [path] if path.is_file() else (one for one in path.iterdir() if one.is_file())


# What a run reaches


def record(reached: Reached) -> None:
    """From now on, note where errors of the package come from, and what native code says."""
    from loader.errors import LoaderError
    from loader.structs import Error

    inner = LoaderError.__init__
    package = str(PACKAGE) + os.sep

    def noting(self: LoaderError, *args: Any, **facts: Any) -> None:
        for path, line in _frames():
            if path.startswith(package):
                file = path[len(package) :]
                # Whatever file system or path: the names are those of the package.
                reached.lines.setdefault(file.replace(os.sep, "/"), set()).add(line)
        inner(self, *args, **facts)

    LoaderError.__init__ = noting  # type: ignore[method-assign]  # every error is to be seen
    field: Any = vars(Error)["what"]

    def read(self: ctypes.Structure) -> bytes:
        """The sentence."""
        said: bytes = field.__get__(self)
        files = {os.path.basename(path) for path, _ in _frames()}
        card = bool(files & {"cuda_core.py", "cuda_routes.py", "test_device_convert.py"})
        # CUDA's own words stand behind a colon.
        sentence = said.decode(errors="replace").partition(":")[0]
        if not getattr(self, "_is_made_up", False):
            reached.sentences.setdefault("card" if card else "host", set()).add(sentence)
        return said

    def made_up(self: Any, said: bytes) -> None:
        self._is_made_up = True  # by a test: no native code said it
        field.__set__(self, said)

    Error.what = property(read, made_up)  # type: ignore[misc,assignment]  # as is every sentence


def _frames() -> Iterator[tuple[str, int]]:
    frame: Any = sys._getframe(2)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def follow_children(folder: Path) -> None:
    """Every Python that this process starts records, too, whatever environment it is given."""
    recording = str(HERE / "recording")
    os.environ[FOLDER] = str(folder.resolve())
    # For those that are started otherwise, such as by multiprocessing.
    os.environ["PYTHONPATH"] = _first(recording, os.environ.get("PYTHONPATH", ""))
    inner = subprocess.Popen.__init__

    def started(self: Any, *args: Any, **named: Any) -> None:
        given = dict(os.environ if named.get("env") is None else named["env"])
        paths = _first(recording, given.get("PYTHONPATH", ""))
        given |= {FOLDER: os.environ[FOLDER], "PYTHONPATH": paths}
        inner(self, *args, **{**named, "env": given})

    subprocess.Popen.__init__ = started  # type: ignore[method-assign]  # processes record too


def _first(path: str, paths: str) -> str:
    return os.pathsep.join(
        [path, *(one for one in paths.split(os.pathsep) if one not in ("", path))]
    )


class Awaited(MetaPathFinder):
    """Records from the moment on at which a process has imported the package, if it does."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Waits for the module of the native structs: the one of errors is there by then."""
        if name != "loader.structs":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None or spec.origin != str(PACKAGE / "structs.py"):
            return spec
        loader: Any = spec.loader
        inner: Callable[[ModuleType], None] = loader.exec_module

        def run(module: ModuleType) -> None:
            inner(module)
            reached = Reached()
            record(reached)
            atexit.register(reached.write, self._folder)

        loader.exec_module = run
        return spec


# What is missing


def main(folders: list[Path]) -> int:
    """Compare the places with what all processes reached."""
    reached = Reached()
    for folder in folders:
        for path in folder.glob("*.json"):
            reached.add(path)
    everything = sites()
    rest = [one for one in everything if not one.is_in(reached)]
    elsewhere = dict.fromkeys((one.environment for one in ELSEWHERE.values()), 0)
    missed = []
    for site in rest:
        keys = (key for key in ELSEWHERE if site.key.startswith(key))
        where = next((ELSEWHERE[key].environment for key in keys), None)
        if where is None:
            missed.append(site)
        else:
            elsewhere[where] += 1
    for site in missed:
        print(f"{'' if site.native else 'loader/'}{site.file}:{site.first}: {site.key}")
    native = sum(bool(site.native) for site in everything)
    print(f"{len(everything) - native} places that raise, {native} sentences of native code")
    for where, count in elsewhere.items():
        print(f"{count} not reached here: they need {where}")
    print(f"{len(everything) - len(rest)} reached, {len(missed)} never")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main([Path(name) for name in sys.argv[1:]]))

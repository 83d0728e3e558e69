"""The package as syntax trees, for tests of its architecture."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "loader"


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its name below ``loader``."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts).removesuffix("__init__").removesuffix(".")] = file
    return found


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text())


def walk(name: str) -> Iterator[ast.AST]:
    return ast.walk(tree(name))


def chain(node: ast.AST) -> str:
    """``a.b.c`` of nested attributes, or nothing."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def at(name: str, node: ast.AST) -> str:
    return f"{modules()[name].relative_to(REPOSITORY)}:{node.lineno}"  # type: ignore[attr-defined]  # what is asked about has a line

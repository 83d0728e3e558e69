"""Names of writers and models: they stand where they decide nothing. Exceptions with a reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from package_tree import at, modules, walk

WRITERS = re.compile(r"awq|gptq|compressed.?tensors|model.?opt|llm.?compressor|autoround", re.I)
MODELS = re.compile(r"qwen|mixtral|minimax|deepseek|glm|llama|kimi", re.I)

NAMES_ANYWHERE = {
    "awq_rounding": "the name of a setting on the public surface",
    "awq-rounding": "the same on the command line",
}
NAMES_IN: dict[tuple[str, str], str] = {
    ("reference.convert", "_AWQ_NIBBLE"): "an order of nibbles, known by the format that has it",
}
KNOWS_WRITERS = {
    "checkpoint": "one file for each writer",
    "testing": "the generator plays the writers",
    "verify": "independent by contract: it knows formats by code of its own",
}


def words(name: str) -> Iterator[tuple[str, ast.AST]]:
    """Identifiers and strings of a module; docstrings and comments are for people."""
    prose = {
        id(node.body[0].value)
        for node in walk(name)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    prose |= {id(node.value) for node in walk(name) if isinstance(node, ast.Expr)}
    for node in walk(name):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in prose:
                yield node.value, node
        elif isinstance(node, ast.Name):
            yield node.id, node
        elif isinstance(node, ast.Attribute):
            yield node.attr, node
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield node.name, node
        elif isinstance(node, (ast.arg, ast.keyword)) and node.arg:
            yield node.arg, node


@pytest.mark.parametrize("names", (WRITERS, MODELS), ids=("writers", "models"))
def test_no_name_of_a_writer_or_a_model_stands_where_it_could_decide(
    names: re.Pattern[str],
) -> None:
    found = []
    for name in modules():
        if name.split(".")[0] in KNOWS_WRITERS:
            continue
        for word, node in words(name):
            rest = word
            for allowed in NAMES_ANYWHERE:
                rest = rest.replace(allowed, "")
            if names.search(rest) and (name, word) not in NAMES_IN:
                found.append(f"{at(name, node)}: {word!r}")
    assert found == []


def test_the_exceptions_for_names_are_still_needed() -> None:
    present = {(name, word) for name in modules() for word, _ in words(name)}
    assert set(NAMES_IN) <= present
    assert all(any(allowed in word for _, word in present) for allowed in NAMES_ANYWHERE)

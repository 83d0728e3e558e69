"""The architecture: what lint cannot enforce. A wanted exception stands here, with its reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from loader import errors
from loader.checkpoint.scheme import Role
from loader.pieces import DESCRIPTOR_FIELDS

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "loader"

MOST_LINES_OF_A_FILE = 350
MOST_LINES_OF_A_FUNCTION = 60
LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}

#: Data flows down this list, and so do imports: a module imports only from modules above it.
LAYERS = (
    "errors rollback policy shard table",
    "checkpoint",
    "checkpoint.wording checkpoint.model checkpoint.scheme checkpoint.family",
    "checkpoint.entries checkpoint.header checkpoint.disk checkpoint.open_file checkpoint.source",
    "checkpoint.index",
    "checkpoint.hub_client checkpoint.hub",
    "checkpoint.awq checkpoint.compressed checkpoint.modelopt",
    "checkpoint.catalog checkpoint.tables checkpoint.layers checkpoint.folder checkpoint.linears",
    "bank",
    "reference reference.findings reference.closing reference.convert",
    "reference.weights reference.routes reference.linear",
    "structs core host card cuda_core cuda_routes implementation card_serving native memory room",
    "pieces chunks spots converter ring",
    "route layer_choice layer_plan render plan report",
    "scale_planes reading_thread stream ledger lifecycle workspace crossover verdict banked",
    "experts pipeline",
    "parameters",
    "inplace",
    "plain linears.plan linears.module linears.load linears",
    "meeting ranks",
    "integrations integrations.transformers.version integrations.transformers.contract",
    "integrations.transformers.values integrations.transformers.skeleton",
    "integrations.transformers.report integrations.transformers.hook",
    "integrations.transformers.loading integrations.transformers.door integrations.transformers",
    "integrations.vllm.support integrations.vllm.settings integrations.vllm.experts",
    "integrations.vllm.linear_method integrations.vllm.quantization integrations.vllm.linears",
    "integrations.vllm.weights integrations.vllm.filling integrations.vllm.model_loader",
    "integrations.vllm",
    "verify.layer verify.raw verify.naming verify.config verify.decode verify.slice",
    "verify.report verify.sample verify.forward verify.run verify",
    "testing.encode testing.container testing.family testing.dialect testing.spec testing.values",
    "testing.model testing.config testing.payload testing.checkpoint",
    "testing.call testing.result testing.stubs testing.difference testing.watch testing.recorder",
    "testing",
    "inspect bench progress launch command __main__",
)
ORDER = [name for layer in LAYERS for name in layer.split()]

#: The package itself gathers the public surface, so it stands at no one place.
NO_PLACE = {""}


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
    return f"{modules()[name].relative_to(REPOSITORY)}:{node.lineno}"  # type: ignore[attr-defined]


def test_the_package_was_found() -> None:
    assert {"errors", "policy", "checkpoint.header", "verify.run", ""} <= set(modules())


# --- imports ------------------------------------------------------------------------------------


def imports(name: str) -> Iterator[tuple[str, ast.AST]]:
    """Modules of the package that a module imports when it runs, wherever the import stands."""
    typing_only = {
        id(inner)
        for node in walk(name)
        if isinstance(node, ast.If) and chain(node.test).endswith("TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    for node in walk(name):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{at(name, node)}: a relative import"
            if (node.module or "").split(".")[0] != "loader":
                continue
            base = (node.module or "")[len("loader.") :]
            for alias in node.names:
                inner = f"{base}.{alias.name}".strip(".")
                yield (inner if inner in modules() else base), node
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "loader":
                    yield alias.name[len("loader.") :], node


def test_the_order_names_every_module_once() -> None:
    assert len(ORDER) == len(set(ORDER))
    # Modules that are not built or not written yet may be named already, never the reverse.
    assert set(modules()) - NO_PLACE - set(ORDER) == set()


def test_imports_go_only_downwards() -> None:
    place = {name: number for number, name in enumerate(ORDER)}
    upwards = [
        f"{at(name, node)} imports {other}"
        for name in modules()
        if name not in NO_PLACE
        for other, node in imports(name)
        if other not in place or place[other] >= place[name]
    ]
    assert upwards == []


#: Stubs and recorder judge how the library is used, by the library's own terms.
JUDGE_NO_NUMBERS = {"", "call", "result", "stubs", "difference", "watch", "recorder"}


@pytest.mark.parametrize("package", ("verify", "testing"))
def test_what_judges_shares_nothing_with_what_it_judges_but_the_errors(package: str) -> None:
    aside = {f"testing.{name}".rstrip(".") for name in JUDGE_NO_NUMBERS}
    inside = [n for n in modules() if n.split(".")[0] == package and n not in aside]
    assert len(inside) > 5
    foreign = [
        f"{at(name, node)} imports {other}"
        for name in inside
        for other, node in imports(name)
        if other != "errors" and other.split(".")[0] != package
    ]
    assert foreign == []


def test_nothing_that_a_load_needs_imports_the_generator_or_the_command_line() -> None:
    doors = ("testing", "command", "__main__")
    for name in modules():
        if name.split(".")[0] not in doors:
            assert [o for o, _ in imports(name) if o.split(".")[0] in doors] == [], name


# --- one place for each -------------------------------------------------------------------------


def test_the_environment_is_read_in_policy_alone() -> None:
    found = {
        name
        for name in modules()
        for node in walk(name)
        if (
            isinstance(node, (ast.Attribute, ast.Name))
            and re.search(r"\b(environb?|getenvb?|putenv)$", chain(node))
        )
        or (isinstance(node, ast.alias) and node.name in ("environ", "getenv"))
    }
    assert found == {"policy"}


def test_operators_are_reached_through_native_alone() -> None:
    found = {
        name
        for name in modules()
        for node in walk(name)
        if isinstance(node, ast.Attribute) and chain(node).startswith("torch.ops")
    }
    assert found == {"native"}


def test_only_the_command_line_prints() -> None:
    found = {
        name
        for name in modules()
        for node in walk(name)
        if isinstance(node, ast.Call) and chain(node.func) in ("print", "sys.stdout.write")
    }
    assert found == {"command"}


# --- names that decide nothing ------------------------------------------------------------------

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


# --- shape of the code --------------------------------------------------------------------------


def test_files_stay_small() -> None:
    lines = {name: len(file.read_text().splitlines()) for name, file in modules().items()}
    long = {name: count for name, count in lines.items() if count > MOST_LINES_OF_A_FILE}
    assert set(long) == set(LONG_FILES), long


def test_functions_stay_small() -> None:
    long = {
        f"{name}.{node.name}": node.end_lineno - node.lineno + 1
        for name in modules()
        for node in walk(name)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > MOST_LINES_OF_A_FUNCTION
    }
    assert set(long) == set(LONG_FUNCTIONS), long


PROBES = {
    "inplace": "a module must have room for the name of the submodule, whatever holds it now",
}


def test_no_attribute_is_looked_for_that_may_not_be_there() -> None:
    """``getattr`` with a default, and ``hasattr`` on anything but a module of the system's."""
    probing = []
    for name in modules():
        system = {
            alias.name
            for node in walk(name)
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        for node in walk(name):
            if not isinstance(node, ast.Call) or name in PROBES:
                continue
            call = chain(node.func)
            default = call == "getattr" and len(node.args) + len(node.keywords) > 2
            probes = call == "hasattr" and chain(node.args[0]) not in system
            if default or probes:
                probing.append(at(name, node))
    assert probing == []


def test_no_except_is_bare() -> None:
    bare = [
        at(name, node)
        for name in modules()
        for node in walk(name)
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert bare == []


def test_no_file_is_named_after_nothing() -> None:
    vague = {"util", "utils", "common", "helpers", "misc", "tools"}
    assert [name for name in modules() if name.split(".")[-1] in vague] == []


# --- errors -------------------------------------------------------------------------------------


def test_every_error_of_the_library_is_raised_somewhere() -> None:
    ours = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.LoaderError)
    }
    for _ in range(2):  # errors of single modules, and errors below those
        ours |= {
            node.name
            for name in modules()
            for node in walk(name)
            if isinstance(node, ast.ClassDef) and {chain(base) for base in node.bases} & ours
        }
    assert len(ours) > 8
    raised = {
        chain(node.exc.func)
        for name in modules()
        for node in walk(name)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    }
    assert ours - raised == set()


def test_no_plain_exception_is_raised() -> None:
    plain = [
        at(name, node)
        for name in modules()
        for node in walk(name)
        if isinstance(node, ast.Raise)
        and node.exc is not None
        and chain(node.exc.func if isinstance(node.exc, ast.Call) else node.exc)
        in ("Exception", "BaseException", "RuntimeError")
    ]
    assert plain == []


# --- what native code mirrors -------------------------------------------------------------------


def test_the_columns_of_a_descriptor_keep_their_order() -> None:
    assert DESCRIPTOR_FIELDS == (
        "role",
        "bank",
        "projection",
        "slot",
        "offset",
        "rows",
        "row_bytes",
        "skip",
        "cols",
        "dest_row",
        "expect_a",
        "expect_b",
    )


def test_the_roles_keep_their_values() -> None:
    assert {role.name: role.value for role in Role} == {
        "CODES_KN": 0,
        "CODES_NK": 1,
        "SCALES_GN": 2,
        "SCALES_NG": 3,
        "SCALES_NG8": 4,
        "ZEROS_GN": 5,
        "ZEROS_NG": 6,
        "GLOBAL_F32": 7,
        "GLOBAL_BF16": 8,
        "CHECK_SHAPE": 9,
        "CHECK_GROUPS": 10,
        "PLAIN_NK": 11,
        "UNUSED": 12,
        "SCALES_GN32": 13,
        "SCALES_NG32": 14,
    }


def test_native_code_reads_no_environment_and_meets_torch_in_one_place() -> None:
    """Holds for every file under ``csrc/``, of which there may be none yet."""
    for file in sorted((REPOSITORY / "csrc").rglob("*")):
        if file.suffix not in (".h", ".hpp", ".cuh", ".c", ".cc", ".cpp", ".cu"):
            continue
        text = file.read_text()
        assert "getenv" not in text, file
        if "torch" not in file.relative_to(REPOSITORY / "csrc").parts[:1]:
            assert not re.search(r"#\s*include\s*[<\"](torch|ATen|c10)/", text), file

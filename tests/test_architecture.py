"""The architecture: what lint cannot enforce. A wanted exception stands here, with its reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from package_tree import at, chain, modules, walk

from loader import PreparedExperts, errors
from loader.linears import PreparedLinear

MOST_LINES_OF_A_FILE = 350
MOST_LINES_OF_A_FUNCTION = 60
LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}

#: Data flows down this list, and so do imports: a module imports only from modules above it.
LAYERS = (
    "errors rollback policy shard table library turn",
    "checkpoint",
    "checkpoint.wording checkpoint.model checkpoint.wildcard checkpoint.scheme checkpoint.scan",
    "checkpoint.family request",
    "checkpoint.entries checkpoint.header checkpoint.disk checkpoint.open_file checkpoint.source",
    "checkpoint.json_file checkpoint.weight_map checkpoint.index",
    "checkpoint.hub_client checkpoint.hub",
    "checkpoint.awq checkpoint.compressed checkpoint.modelopt",
    "checkpoint.catalog checkpoint.tables checkpoint.layers checkpoint.folder checkpoint.linears",
    "bank",
    "reference reference.findings reference.closing reference.convert",
    "reference.weights reference.routes reference.linear",
    "structs core host card cuda_core arguments cuda_legacy_calls cuda_legacy cuda_routes",
    "cuda_linears implementation card_serving native memory room",
    "pieces chunks spots converter ring",
    "crossover_table route layer_choice layer_plan render plan report",
    "scale_planes scheduled reading_thread staging_plan stream ledger lifecycle workspace",
    "crossover verdict banked experts pipeline",
    "parameters",
    "inplace",
    "plain linears.plan linears.staging linears.module linears.load linears",
    "meeting ranks",
    "integrations integrations.transformers.version integrations.transformers.contract",
    "integrations.transformers.values integrations.transformers.skeleton",
    "integrations.transformers.report integrations.transformers.hook",
    "integrations.transformers.loading integrations.transformers.door integrations.transformers",
    "integrations.vllm.support integrations.vllm.settings integrations.vllm.experts",
    "integrations.vllm.linear_method integrations.vllm.quantization integrations.vllm.linears",
    "integrations.vllm.weights integrations.vllm.filling integrations.vllm.model_loader",
    "integrations.vllm",
    "verify.layer verify.raw_file verify.raw verify.naming verify.config verify.decode",
    "verify.slice verify.report verify.sample verify.forward verify.run verify",
    "testing.encode testing.container testing.family testing.dialect testing.spec testing.values",
    "testing.model testing.config testing.payload testing.checkpoint",
    "testing.call testing.result testing.stubs testing.difference testing.watch testing.recorder",
    "testing",
    "inspect bench progress launch command __main__",
)
ORDER = [name for layer in LAYERS for name in layer.split()]

#: The package itself gathers the public surface, so it stands at no one place.
NO_PLACE = {""}


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


#: Classes whose subclasses give what they leave out.
BASES = {"banked": "no user meets one: PreparedExperts and PreparedLinear give all of it"}


def test_nothing_is_left_unimplemented_where_a_user_could_reach_it() -> None:
    """``UnsupportedError`` says what to do instead."""
    raising = {
        name
        for name in modules()
        for node in walk(name)
        if isinstance(node, ast.Raise) and node.exc is not None
        if chain(node.exc.func if isinstance(node.exc, ast.Call) else node.exc)
        == "NotImplementedError"
    }
    assert raising == set(BASES)
    for made in (PreparedExperts, PreparedLinear):
        for left_out in ("layer", "get_extra_state", "refuse"):
            assert left_out in vars(made), f"{made.__name__}.{left_out}"


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

"""The plugin of pytest: found by its entry point, free of charge, and as the documentation says.

Downstream projects are run in processes of their own, where the package looks installed: its
entry points are written from pyproject.toml, since a checkout need not be installed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from loader import testing

pytest_plugins = ["pytester"]

REPOSITORY = Path(__file__).parents[2]
DOCUMENT = REPOSITORY / "docs" / "testing.md"
FIXTURES = ("lifecycle_recorder", "stub_converters", "stub_kernels", "tiny_checkpoint")


def entry_points() -> str:
    """The table of pyproject.toml in the form of an installed package."""
    text = (REPOSITORY / "pyproject.toml").read_text()
    match = re.search(r"^\[project.entry-points.pytest11\]\n(.*?)\n\n", text, re.S | re.M)
    assert match is not None
    lines = [line.replace('"', "") for line in match[1].splitlines() if "=" in line]
    return "\n".join(["[pytest11]", *lines, ""])


@pytest.fixture
def project(
    pytester: pytest.Pytester,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> pytest.Pytester:
    """A project of somebody else's, in whose environment the package is installed."""
    site = tmp_path_factory.mktemp("site")
    info = site / "qpn_loader-0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: qpn-loader\nVersion: 0.0\n")
    (info / "entry_points.txt").write_text(entry_points())
    (site / "there.pth").write_text("")
    monkeypatch.setenv("PYTHONPATH", f"{site}:{REPOSITORY}")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:cacheprovider")
    return pytester


def documented_files() -> dict[str, str]:
    """Name to text of the files that the document shows."""
    text = DOCUMENT.read_text()
    return dict(re.findall(r"`(\w+\.py)`:\n\n```python\n(.*?)```", text, re.S))


def test_the_documented_file_passes_in_a_project_of_its_own(project: pytest.Pytester) -> None:
    files = documented_files()
    assert list(files) == ["serving.py", "test_serving.py"]
    for name, text in files.items():
        (project.path / name).write_text(text)
    result = project.runpytest_subprocess("-W", "error")
    result.assert_outcomes(passed=6)
    assert all(fixture in files["test_serving.py"] for fixture in FIXTURES)


def test_the_documented_tables_name_what_there_is() -> None:
    text = DOCUMENT.read_text()
    for name in (*testing.DIALECTS, *testing.FAMILIES, *FIXTURES):
        assert f"`{name}`" in text, name
    for owner in (testing.Stubs, testing.LifecycleRecorder):
        public = [name for name in vars(owner) if not name.startswith("_") and name != "serve"]
        assert all(f"`{name}" in text for name in public), public


def test_a_failure_is_told_as_in_the_document(project: pytest.Pytester) -> None:
    table = re.search(r"```\n(the bytes of the card.*?)```", DOCUMENT.read_text(), re.S)
    assert table is not None
    project.makepyfile(
        """
        import loader

        def test_it(tiny_checkpoint, lifecycle_recorder):
            sizes = {"hidden": 64, "intermediate": 64, "experts": 4, "group": 32}
            checkpoint = tiny_checkpoint(**sizes, layers=2)
            whole = {n: layer.spec.nbytes() for n, layer in loader.load(checkpoint).items()}
            half = loader.Shard(ep_rank=0, ep_size=2)
            for layers, shard in (([0], None), ([1], half)):
                loader.load(checkpoint, "cpu", shard, None, layers, observers=[lifecycle_recorder])
            lifecycle_recorder.assert_bytes(whole)
        """
    )
    result = project.runpytest_subprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"E *{line}" for line in table[1].splitlines() if line])
    result.stdout.fnmatch_lines([">       lifecycle_recorder.assert_bytes(whole)"])
    result.stdout.no_fnmatch_line("*recorder.py*")


def test_the_fixtures_are_there_and_say_what_they_are(project: pytest.Pytester) -> None:
    result = project.runpytest_subprocess("--fixtures", "-q")
    for name in FIXTURES:
        (line,) = [n for n, one in enumerate(result.outlines) if one.startswith(f"{name} --")]
        assert result.outlines[line + 1].strip()


PLAIN = {
    "conftest.py": """
import sys

def pytest_sessionfinish():
    heavy = sorted({"torch", "numpy", "loader"} & set(sys.modules))
    print("imported:", heavy, "loader_pytest" in sys.modules)
""",
    "test_plain.py": "def test_it():\n    pass\n",
}


def test_a_project_that_does_not_use_it_pays_nothing(project: pytest.Pytester) -> None:
    for name, text in PLAIN.items():
        (project.path / name).write_text(text)
    result = project.runpytest_subprocess("-s")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*imported: [[][]] True"])


def test_it_can_be_turned_off_and_named_beside_its_entry_point(project: pytest.Pytester) -> None:
    for name, text in PLAIN.items():
        (project.path / name).write_text(text)
    off = project.runpytest_subprocess("-s", "-p", "no:loader_pytest")
    off.stdout.fnmatch_lines(["*imported: [[][]] False"])
    twice = project.runpytest_subprocess("-s", "-p", "loader_pytest")
    twice.assert_outcomes(passed=1)
    twice.stdout.fnmatch_lines(["*imported: [[][]] True"])


def test_checkpoints_of_one_test_lie_apart(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        def test_it(tiny_checkpoint):
            sizes = {"hidden": 64, "intermediate": 64, "experts": 2, "group": 32, "layers": 1}
            one, two = tiny_checkpoint(**sizes), tiny_checkpoint(
                **sizes, config_overrides={"hidden_act": "gelu"}
            )
            assert one.folder != two.folder
            assert "gelu" in (two.folder / "config.json").read_text()
            assert "gelu" not in (one.folder / "config.json").read_text()
        """
    )
    project.runpytest_subprocess().assert_outcomes(passed=1)


def test_without_pytest_the_functions_work() -> None:
    script = """
import sys
sys.modules["pytest"] = sys.modules["_pytest"] = None
import loader, tempfile
from loader.testing import *
from loader.testing import __all__ as names
recorder = lifecycle_recorder()
checkpoint = tiny_checkpoint(tempfile.mkdtemp(), hidden=64, intermediate=64, experts=2, group=32)
with stub_converters():
    loader.load(checkpoint, observers=[recorder])
recorder.assert_released_once()
print(all(name in globals() for name in names))
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=REPOSITORY
    )
    assert (ran.stdout, ran.returncode) == ("True\n", 0), ran.stderr

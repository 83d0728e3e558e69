"""The plugin without vLLM: registration, versions, settings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from loader import LoaderError, PolicyError, UnsupportedError
from loader.integrations.vllm import support
from loader.integrations.vllm.settings import Settings, read_settings


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that stands for vLLM, 0.32.0 with one function."""
    module = ModuleType("vllm")
    module.__version__ = "0.32.0"  # type: ignore[attr-defined]  # a module has any attribute
    module.serve = lambda folder, port: None  # type: ignore[attr-defined]  # a module has any attribute
    monkeypatch.setitem(sys.modules, "vllm", module)
    return module


def run_apart(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter, with ``paths`` before all others."""
    first = "".join(f"sys.path.insert(0, {str(path)!r}); " for path in paths)
    command = [sys.executable, "-c", f"import sys; {first}{code}"]
    return subprocess.run(command, capture_output=True, text=True, check=True)


def test_the_package_and_the_plugin_import_no_vllm() -> None:
    done = run_apart("import loader, loader.integrations.vllm; print('vllm' in sys.modules)")
    assert done.stdout.strip() == "False"


def test_registering_with_a_vllm_that_has_no_load_formats_is_one_sentence_and_no_error(
    tmp_path: Path,
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    done = run_apart("from loader.integrations.vllm import register; register()", tmp_path)
    (line,) = done.stderr.splitlines()
    assert "--load-format qpn is not there" in line
    assert "0.32.*" in line


# --- versions -----------------------------------------------------------------------------------


GOOD = (support.Piece("vllm", "serve", ("folder", "port")),)


def test_the_supported_version_with_all_pieces_passes(fake: ModuleType) -> None:
    support.require_support(GOOD)
    fake.__version__ = "0.32.9.dev1+cpu"
    support.require_support(GOOD)


@pytest.mark.parametrize("version", ("0.31.2", "0.33.0", "1.32.0", "0.3.2", "dev"))
def test_another_version_is_refused_with_the_versions_that_work(
    fake: ModuleType, version: str
) -> None:
    fake.__version__ = version
    with pytest.raises(UnsupportedError) as caught:
        support.require_support(GOOD)
    assert caught.value.expected == "vllm 0.32.*"
    assert caught.value.found == f"vllm {version}"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("piece", "fault"),
    (
        (support.Piece("vllm", "gone"), "no vllm.gone"),
        (support.Piece("vllm", "serve.gone"), "no vllm.serve.gone"),
        (support.Piece("vllm.nowhere", "gone"), "no vllm.nowhere.gone"),
        (support.Piece("vllm", "serve", ("folder", "host")), "vllm.serve takes no host"),
        (support.Piece("vllm", "__version__", ("x",)), "vllm.__version__ cannot be called"),
        (support.Piece("vllm", "serve", holds=("x",)), "vllm.serve is no dataclass"),
        (support.Piece("loader", "Shard", holds=("tp_rank", "x")), "loader.Shard has no x"),
    ),
)
def test_a_piece_that_differs_is_named_beside_the_version(
    fake: ModuleType, piece: support.Piece, fault: str
) -> None:
    with pytest.raises(UnsupportedError) as caught:
        support.require_support((*GOOD, piece))
    assert fault in str(caught.value.found)
    assert "vllm 0.32.0" in str(caught.value.found)


# --- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize("given", (None, {}))
def test_no_settings_are_the_defaults(given: object) -> None:
    assert read_settings(given) == Settings()


def test_policy_and_staging_are_read() -> None:
    given = {"policy": {"qpn_m1": "off", "layout": "wide"}, "staging_bytes": 1 << 20}
    found = read_settings(given)
    assert (found.policy.qpn_m1, found.policy.layout) == ("off", "wide")
    assert found.staging_bytes == 1 << 20


@pytest.mark.parametrize(
    ("given", "named"),
    (
        ([1], "--model-loader-extra-config"),
        ({"polcy": {}}, "'polcy'"),
        ({"policy": []}, "policy"),
        ({"policy": {"m1": "on"}}, "'m1'"),
        ({"policy": {"qpn_m1": "yes"}}, "qpn_m1"),
        ({"staging_bytes": "64M"}, "'64M'"),
        ({"staging_bytes": True}, "True"),
        ({"staging_bytes": 0}, "0"),
    ),
)
def test_a_setting_that_is_not_known_is_refused_by_name(given: object, named: str) -> None:
    with pytest.raises(PolicyError) as caught:
        read_settings(given)
    assert named in str(caught.value)
    assert isinstance(caught.value, LoaderError)

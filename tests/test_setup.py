"""What the build decides: whether the part for cards is built, for what, and by which commands."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("qpn_setup", REPOSITORY / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["qpn_setup"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("9.0", ("90",)),
        ("7.5;8.0", ("75", "80")),
        ("7.5 8.6, 9.0+PTX", ("75", "86", "90", "90+")),
        ("9.0a;9.0;10.0f", ("90", "100")),
        (" 12.0+PTX ", ("120", "120+")),
    ],
)
def test_the_list_of_architectures(build: ModuleType, text: str, targets: tuple[str, ...]) -> None:
    assert build.targets_of(text) == targets


@pytest.mark.parametrize("text", ("Hopper", "9", "9.0+", "90", "-1.0"))
def test_what_is_no_architecture_is_named(build: ModuleType, text: str) -> None:
    reason = build.decide_card_build({"TORCH_CUDA_ARCH_LIST": text}, "/usr/bin/nvcc", [])
    assert isinstance(reason, str) and "TORCH_CUDA_ARCH_LIST has" in reason


def test_the_list_wins_over_the_cards_that_are_here(build: ModuleType) -> None:
    made = build.decide_card_build({"TORCH_CUDA_ARCH_LIST": "8.0"}, "nvcc", ["9.0"])
    assert made.targets == ("80",)
    assert build.decide_card_build({}, "nvcc", ["9.0", "7.0"]).targets == ("90", "70")
    assert build.decide_card_build({"TORCH_CUDA_ARCH_LIST": " "}, "nvcc", ["9.0"]).targets == (
        "90",
    )


def test_without_nvcc_or_a_card_the_reason_is_said(build: ModuleType) -> None:
    assert "nvcc was not found" in build.decide_card_build({}, None, ["9.0"])
    assert "there is no card here" in build.decide_card_build({}, "nvcc", [])


def test_cuda_home_comes_before_the_path(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert build.find_nvcc({}) == "/usr/bin/nvcc"
    assert build.find_nvcc({"CUDA_HOME": str(tmp_path)}) == "/usr/bin/nvcc"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    assert build.find_nvcc({"CUDA_HOME": str(tmp_path)}) == str(tmp_path / "bin" / "nvcc")


def test_cards_are_asked_of_their_driver(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    assert build.present_cards() == []

    class Found:
        returncode, stdout = 0, "9.0\n9.0\n8.0\n"

    monkeypatch.setattr(build.shutil, "which", lambda name: name)
    monkeypatch.setattr(build.subprocess, "run", lambda *a, **k: Found)
    assert build.present_cards() == ["8.0", "9.0"]
    Found.returncode = 9
    assert build.present_cards() == []


def test_every_source_is_compiled_for_every_target(build: ModuleType) -> None:
    made = build.CardBuild("nvcc", ("75", "90", "90+"))
    *compiled, link = made.commands(
        ["csrc/launch/a.cu", "csrc/host/b.cpp"], Path("o"), Path("l.so")
    )
    assert [command[-1] for command in compiled] == ["o/a.o", "o/b.o"]
    for command in compiled:
        assert "-gencode=arch=compute_75,code=sm_75" in command
        assert "-gencode=arch=compute_90,code=compute_90" in command
        assert '-DQPN_ARCHITECTURES="75 90 90+"' in command
    assert link[-2:] == ["o/a.o", "o/b.o"] and "-shared" in link and "-cudart=static" in link


def test_every_device_source_is_in_the_source_distribution() -> None:
    patterns = (REPOSITORY / "MANIFEST.in").read_text()
    suffixes = {path.suffix for path in (REPOSITORY / "csrc").rglob("*") if path.is_file()}
    assert all(f"*{suffix}" in patterns for suffix in suffixes), suffixes

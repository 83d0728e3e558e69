"""Builds native code beside the package: plain C++ and CUDA, no PyTorch and no Python headers.

Where there is no compiler the package installs without the host core, and the reference serves. The
part for cards is built where nvcc is found and somebody says for which cards: TORCH_CUDA_ARCH_LIST,
else the cards of this machine. Where it is not built, this says so once, and the rest goes on.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HOST = Path("csrc/host")
X86 = platform.machine() in ("x86_64", "AMD64")
#: Files that are compiled for one instruction set; everything else runs on any machine.
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
ISA_FLAGS = {
    **{f"{noun}_avx2.cpp": AVX2 for noun in ("codes", "tiles")},
    "codes_avx512.cpp": AVX512,
    "tiles_avx512.cpp": [*AVX512, "-mavx512vnni"],
}


CARD = Path("csrc/launch")
#: Host code that the library for cards shares: it checks every number of a call.
CARD_SHARES = ("csrc/host/check.cpp",)
NVCC_FLAGS = [
    "-std=c++17",
    "-O3",
    "--expt-relaxed-constexpr",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
]
NVCC_FLAGS += ["-Xcompiler=-Wno-unknown-pragmas"]


@dataclass(frozen=True)
class CardBuild:
    """How the library for cards is built: by which nvcc, for which targets (``90+`` is PTX)."""

    nvcc: str
    targets: tuple[str, ...]

    def flags(self) -> list[str]:
        """What nvcc is told of the targets."""
        flags = []
        for target in self.targets:
            number = target.rstrip("+")
            code = f"compute_{number}" if target.endswith("+") else f"sm_{number}"
            flags.append(f"-gencode=arch=compute_{number},code={code}")
        return [*flags, f'-DQPN_ARCHITECTURES="{" ".join(self.targets)}"']

    def commands(self, sources: Sequence[str], objects: Path, library: Path) -> list[list[str]]:
        """One command for each source, then the one that links."""
        made = [str(objects / f"{Path(source).stem}.o") for source in sources]
        compile_each = [
            [self.nvcc, *NVCC_FLAGS, *self.flags(), "-c", source, "-o", target]
            for source, target in zip(sources, made, strict=True)
        ]
        link = [
            self.nvcc,
            *self.flags()[:-1],
            "-shared",
            "-cudart=static",
            "-o",
            str(library),
            *made,
        ]
        return [*compile_each, link]


def targets_of(wanted: str) -> tuple[str, ...]:
    """Targets of a list such as ``7.0;8.0 9.0+PTX``. Raises ValueError for what is no number."""
    targets: list[str] = []
    for word in re.split(r"[;,\s]+", wanted.strip()):
        match = re.fullmatch(r"([0-9]+)\.([0-9])[af]?(\+PTX)?", word)
        if match is None:
            raise ValueError(f"TORCH_CUDA_ARCH_LIST has {word!r}, which is no number such as 9.0")
        number = match[1] + match[2]
        targets += [number, f"{number}+"] if match[3] else [number]
    return tuple(dict.fromkeys(targets))


def decide_card_build(
    environment: Mapping[str, str], nvcc: str | None, present: Sequence[str]
) -> CardBuild | str:
    """How to build for cards, or why not. ``present``: capabilities of those here, as ``9.0``."""
    if nvcc is None:
        return "nvcc was not found on PATH or under CUDA_HOME"
    wanted = environment.get("TORCH_CUDA_ARCH_LIST", "").strip() or ";".join(present)
    if not wanted:
        return "there is no card here, and TORCH_CUDA_ARCH_LIST names none (such as 8.0;9.0)"
    try:
        return CardBuild(nvcc, targets_of(wanted))
    except ValueError as error:
        return str(error)


def find_nvcc(environment: Mapping[str, str]) -> str | None:
    """nvcc of CUDA_HOME, else the one on PATH."""
    home = environment.get("CUDA_HOME")
    own = Path(home) / "bin" / "nvcc" if home else None
    return str(own) if own is not None and own.exists() else shutil.which("nvcc")


def present_cards() -> list[str]:
    """Capabilities of the cards of this machine, as their driver says."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    asked = [tool, "--query-gpu=compute_cap", "--format=csv,noheader"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False)
    return sorted(set(found.stdout.split())) if found.returncode == 0 else []


class BuildNative(build_ext):
    """Gives each source its own instruction set flags, and adds the library for cards."""

    def build_extensions(self) -> None:
        compile_one = self.compiler._compile

        def with_flags(obj, src, ext, cc_args, extra, pp_opts):  # type: ignore[no-untyped-def]  # a callback of distutils
            flags = ISA_FLAGS.get(Path(src).name, [])
            compile_one(obj, src, ext, cc_args, [*extra, *flags], pp_opts)

        self.compiler._compile = with_flags
        super().build_extensions()

    def run(self) -> None:
        super().run()
        self._build_for_cards()

    def _build_for_cards(self) -> None:
        build = decide_card_build(os.environ, find_nvcc(os.environ), present_cards())
        if isinstance(build, str):
            print(f"qpn-loader: not built for cards: {build}", file=sys.stderr)
            return
        beside = Path(self.get_ext_fullpath("loader._core")).parent
        objects = Path(self.build_temp) / "card"
        for folder in (beside, objects):
            folder.mkdir(parents=True, exist_ok=True)
        sources = [*(str(path) for path in sorted(CARD.glob("*.cu"))), *CARD_SHARES]
        try:
            for command in build.commands(sources, objects, beside / "_cuda.so"):
                subprocess.run(command, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"qpn-loader: not built for cards: {error}", file=sys.stderr)


def host_core() -> Extension:
    """The host core."""
    sources = [
        str(path) for path in sorted(HOST.glob("*.cpp")) if X86 or path.name not in ISA_FLAGS
    ]
    return Extension(
        "loader._core",
        sources=sources,
        depends=[str(path) for path in (*HOST.glob("*.h"), *Path("csrc/device").glob("*.cuh"))],
        extra_compile_args=["-std=c++17", "-O3", "-fvisibility=hidden", "-pthread", "-Wno-psabi"],
        extra_link_args=["-pthread"],
        define_macros=[("QPN_X86", "1")] if X86 else [],
        language="c++",
        optional=True,
    )


if __name__ == "__main__":
    setup(ext_modules=[host_core()], cmdclass={"build_ext": BuildNative})

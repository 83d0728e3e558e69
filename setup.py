"""Builds the native host core beside the package: plain C++, no PyTorch and no Python headers.

Where there is no compiler the package installs without it, and the reference serves.
"""

import platform
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


class BuildCore(build_ext):
    """Gives each source its own instruction set flags."""

    def build_extensions(self) -> None:
        compile_one = self.compiler._compile

        def with_flags(obj, src, ext, cc_args, extra, pp_opts):  # type: ignore[no-untyped-def]
            flags = ISA_FLAGS.get(Path(src).name, [])
            compile_one(obj, src, ext, cc_args, [*extra, *flags], pp_opts)

        self.compiler._compile = with_flags
        super().build_extensions()


sources = [str(path) for path in sorted(HOST.glob("*.cpp")) if X86 or path.name not in ISA_FLAGS]
core = Extension(
    "loader._core",
    sources=sources,
    depends=[str(path) for path in HOST.glob("*.h")],
    extra_compile_args=["-std=c++17", "-O3", "-fvisibility=hidden", "-pthread", "-Wno-psabi"],
    extra_link_args=["-pthread"],
    define_macros=[("QPN_X86", "1")] if X86 else [],
    language="c++",
    optional=True,
)
setup(ext_modules=[core], cmdclass={"build_ext": BuildCore})

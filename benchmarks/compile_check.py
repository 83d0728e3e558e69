"""Compiles the device code for cards that this machine need not have; reports registers, spills.

    python benchmarks/compile_check.py [--arch 75 80 90 100] [--jobs 2]

nvcc compiles every file of ``csrc/launch`` for each architecture; NVRTC 12.8 makes PTX of
``csrc/rtc/sm70.cu`` and its ptxas a cubin for SM70 (packages of the extra ``compile-check``). A
spill in a decode kernel is a failure.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "csrc/launch").glob("*.cu"))
ARCHITECTURES = (75, 80, 90, 100)
_FUNCTION = re.compile(r"Function properties for (\S+)")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True)
class KernelUse:
    """What ptxas says of one kernel: registers of a thread, bytes spilled."""

    name: str
    registers: int
    spilled: int


def kernels_of(report: str) -> list[KernelUse]:
    """The kernels of a report of ``ptxas -v``."""
    found: list[KernelUse] = []
    name, spilled = "", 0
    for line in report.splitlines():
        if match := _FUNCTION.search(line):
            name = match[1]
        if match := _SPILLS.search(line):
            spilled = int(match[1]) + int(match[2])
        if match := _REGISTERS.search(line):
            found.append(KernelUse(name, int(match[1]), spilled))
    return found


def nvcc(source: Path, architecture: int, folder: Path) -> list[KernelUse]:
    """Compile one file for one architecture. Raises RuntimeError with what nvcc says."""
    target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    command = ["nvcc", "-std=c++17", "-O3", "--expt-relaxed-constexpr", target, "-Xptxas=-v"]
    command += [f'-DQPN_ARCHITECTURES="{architecture}"', "-Xcompiler=-Wno-unknown-pragmas", "-c"]
    made = folder / f"{source.stem}_{architecture}.o"
    run = subprocess.run(
        [*command, str(source), "-o", str(made)], capture_output=True, text=True, check=False
    )
    if run.returncode:
        raise RuntimeError(f"{source.name} for sm_{architecture}:\n{run.stderr}")
    return kernels_of(run.stderr)


def package_file(package: str, pattern: str) -> Path:
    """A file of one of the CUDA packages of the environment."""
    for base in map(Path, sys.path):
        for found in sorted((base / "nvidia" / package).glob(pattern)):
            return found
    raise SystemExit(f"there is no nvidia/{package}/{pattern}: pip install '.[compile-check]'")


def nvrtc_ptx(source: Path) -> bytes:
    """PTX for SM70 of a unit and the headers it names, by NVRTC 12. Raises RuntimeError."""
    library = ctypes.CDLL(str(package_file("cuda_nvrtc", "lib/libnvrtc.so.12")))
    program = ctypes.c_void_p()
    text = source.read_bytes()
    library.nvrtcCreateProgram(ctypes.byref(program), text, str(source).encode(), 0, None, None)
    options = [
        b"--gpu-architecture=compute_70",
        b"--std=c++17",
        b"-I" + str(source.parent).encode(),
        b"-I" + str(package_file("cuda_runtime", "include")).encode(),
    ]
    code = library.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )
    size = ctypes.c_size_t()
    if code:
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"{source.name} by NVRTC:\n{log.value.decode()}")
    library.nvrtcGetPTXSize(program, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    library.nvrtcGetPTX(program, ptx)
    return ptx.value


def sm70(folder: Path) -> list[KernelUse]:
    """The SM70 unit to a cubin, by the ptxas of CUDA 12. Raises RuntimeError."""
    ptx, cubin = folder / "sm70.ptx", folder / "sm70.cubin"
    ptx.write_bytes(nvrtc_ptx(ROOT / "csrc/rtc/sm70.cu"))
    tool = package_file("cuda_nvcc", "bin/ptxas")
    run = subprocess.run(
        [str(tool), "-arch=sm_70", "-v", str(ptx), "-o", str(cubin)],
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise RuntimeError(f"ptxas for sm_70:\n{run.stderr}")
    return kernels_of(run.stderr)


def show(title: str, kernels: list[KernelUse]) -> int:
    """Print what was used; the number of decode kernels that spill.

    A conversion kernel may: it runs once a chunk and waits for memory. It is shown all the same.
    """
    spilling = [kernel for kernel in kernels if kernel.spilled]
    most = max((kernel.registers for kernel in kernels), default=0)
    print(f"{title}: {len(kernels)} kernels, at most {most} registers, {len(spilling)} spill")
    for kernel in spilling:
        print(f"  {kernel.name}: {kernel.spilled} bytes, {kernel.registers} registers")
    return sum("convert" not in kernel.name for kernel in spilling)


def main() -> None:
    """Compile everything; exit 1 where something does not compile or spills."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--arch", type=int, nargs="*", default=list(ARCHITECTURES))
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    if options.arch and shutil.which("nvcc") is None:
        raise SystemExit("nvcc was not found on PATH")
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(options.jobs) as pool:
        folder = Path(name)
        first = pool.submit(sm70, folder)
        jobs = {
            number: [pool.submit(nvcc, source, number, folder) for source in SOURCES]
            for number in options.arch
        }
        try:
            failures = show("sm_70 (NVRTC)", first.result())
            for number, made in jobs.items():
                failures += show(f"sm_{number}", [use for job in made for use in job.result()])
        except RuntimeError as error:
            raise SystemExit(str(error)) from error
    if failures:
        raise SystemExit(f"{failures} decode kernels spill")


if __name__ == "__main__":
    main()

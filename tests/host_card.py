"""The whole path of a load to a card, on the host: the library over a CUDA that is not there."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loader import card_serving, converter, cuda_core, ledger, native, report, ring
from loader.bank import LayerSpec
from loader.card import CardFacts, CardMemory
from loader.cuda_core import CudaCore

REPOSITORY = Path(__file__).parents[1]
COMPILER = shutil.which("g++")
LIBRARY = "card.so"
"""Name of what :func:`build` leaves in its folder."""


def build(folder: Path) -> CudaCore:
    """The library for cards, compiled by g++."""
    path = folder / LIBRARY
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-fPIC"]
    flags += ["-pthread", "-shared", "-I", "tests/native/fake_cuda", "-o", str(path)]
    sources = ("tests/native/ring_host.cpp", "csrc/host/check.cpp")
    subprocess.run([str(COMPILER), *flags, *sources], check=True, cwd=REPOSITORY)
    return CudaCore(path)


class HostPool:
    """Memory that is nobody else's, on the host."""

    def __init__(self, device: torch.device) -> None:
        self.allocating = nullcontext

    def close(self) -> None:
        """Nothing to give back."""


class HostPeak:
    """Counters that count nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.baseline, self.highest = device, CardMemory(), CardMemory()

    def sample(self) -> CardMemory:
        """Nothing."""
        return self.baseline


@contextmanager
def host_as_card(core: CudaCore, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, loads to ``cpu`` take the way of a card."""
    wait = core.library.qpn_test_wait

    class Cache(converter.ConversionCache):
        def __init__(self, spec: LayerSpec, device: torch.device) -> None:
            super().__init__(spec, device)
            self._pool = HostPool(device)  # type: ignore[assignment]  # a pool of the host as a stand-in
            nbytes = converter.card_cache_bytes(spec)
            self._state = torch.zeros(nbytes // 8, dtype=torch.int64).view(torch.uint8)
            self.nbytes = nbytes

        def spots(self) -> torch.Tensor | None:
            wait()
            found = super().spots()
            return None if found is None else found.clone()

    def arrived(self: ring.Ring, buffer: torch.Tensor) -> torch.Tensor:
        wait()  # on a card the copy is ordered behind what still reads the chunk
        return own_arrived(self, buffer)

    own_arrived = ring.Ring.arrived
    none: Any = ctypes.c_void_p(None)
    stream = SimpleNamespace(synchronize=wait)
    for module, name, stand_in in (
        (ring, "CardPool", HostPool),
        (ring.Ring, "arrived", arrived),
        (ring, "stream_of", lambda device: none),
        (ring, "index_of", lambda device: 0),
        (cuda_core, "_place", lambda device: (ctypes.c_int(0), none)),
        (cuda_core, "index_of", lambda device: 0),
        (ledger, "CardPeak", HostPeak),
        (report, "nvml_used", lambda device: None),
        (torch.cuda, "current_stream", lambda device: stream),
    ):
        patch.setattr(module, name, stand_in)
    for module in ("pipeline", "inplace", "linears.load"):
        patch.setattr(f"loader.{module}.ConversionCache", Cache)
    made, why = card_serving.card_implementation(CardFacts("the host", 90), core)
    assert made is not None, why
    host = native.REFERENCE
    kernels = {"linear": host.linear, "dequantize": host.dequantize}
    with native.serving(replace(made, device_type="cpu", dtypes=host.dtypes, **kernels)):
        yield

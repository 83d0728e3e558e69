"""One generator of synthetic 4-bit MoE checkpoints for tests, demo and benchmarks alike.

It writes any dialect, family and geometry, knows the numbers it wrote, and shares no code with
the loader: what it says about a checkpoint is an independent opinion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from loader.errors import CheckpointError, UnsupportedError
from loader.testing.config import write_configs
from loader.testing.container import RawTensor, model_files, read_header, read_tensor
from loader.testing.dialect import decode, fused_parts, parts
from loader.testing.encode import Array, from_bits
from loader.testing.model import expert_module
from loader.testing.payload import Progress, write_model
from loader.testing.spec import Settings, Spec, resolve
from loader.testing.values import (
    Codes,
    dequantize_f32,
    dequantize_f64,
    draw_plain,
    expert_codes,
    stream,
)

if TYPE_CHECKING:  # typing has it from Python 3.11
    from typing_extensions import Unpack

_FAST: Settings = {"payload": "fast", "attention": False}
_QWEN_30B: Settings = {
    "hidden": 2048,
    "intermediate": 768,
    "experts": 128,
    "top_k": 8,
    "layers": 4,
    **_FAST,
}
_QWEN_512: Settings = {
    "hidden": 2560,
    "intermediate": 640,
    "experts": 512,
    "top_k": 10,
    "group": 32,
}

PRESETS: dict[str, Settings] = {
    "awq-1.2gb": {**_QWEN_30B, "dialect": "awq-gemm", "group": 128},
    "awq-2.4gb": {**_QWEN_30B, "dialect": "awq-gemm", "group": 128, "layers": 8, "shards": 2},
    "nvfp4-1.2gb": {**_QWEN_30B, "dialect": "modelopt-nvfp4"},
    "reference-geometry": {**_QWEN_512, "layers": 48, "shards": 24, "payload": "sparse"},
    "experts-512": {**_QWEN_512, "layers": 1, **_FAST},
}
"""Named arguments of :func:`tiny_checkpoint`; sizes in the names are of the expert tensors."""


@dataclass(frozen=True, kw_only=True)
class TinyCheckpoint(Spec):
    """A checkpoint that was written to ``folder``, and the numbers that it holds.

    Projections are ``gate``, ``up``, ``down`` (a trailing ``_proj`` is accepted). With payload
    ``random`` the numbers are drawn again from the seed, whatever became of the files; with
    ``fast`` they are read back. :meth:`stored_codes` always reads the files as they are now. It
    stands for its folder wherever a path is taken: ``loader.load(checkpoint)``.
    """

    folder: Path

    def __fspath__(self) -> str:
        return str(self.folder)

    def codes(self, layer: int, expert: int, projection: str) -> Codes:
        """The unpacked codes of one projection as generated; see :class:`Codes` for dtypes."""
        projection = projection.removesuffix("_proj")
        self._check(layer, expert, projection)
        if self.plain(layer):
            raise UnsupportedError("a layer without 4-bit codes", layer=layer)
        if self.payload == "fast":
            return self.stored_codes(layer, expert, projection)
        return expert_codes(self, layer, expert, projection)

    def weight(self, layer: int, expert: int, projection: str) -> Array:
        """``(out, in) float64``: the weight that the checkpoint's own numbers mean."""
        if self.plain(layer):
            return self._plain_weight(layer, expert, projection).astype(np.float64)
        return dequantize_f64(self, self.codes(layer, expert, projection))

    def weight_f32(self, layer: int, expert: int, projection: str) -> Array:
        """``(out, in) float32``: rounded as the tools do, fp32(e2m1 * fp32(e4m3 o global))."""
        if self.plain(layer):
            return self._plain_weight(layer, expert, projection)
        return dequantize_f32(self, self.codes(layer, expert, projection))

    def stored_codes(self, layer: int, expert: int, projection: str) -> Codes:
        """The same as :meth:`codes`, unpacked from the files by the generator's own reader."""
        projection = projection.removesuffix("_proj")
        self._check(layer, expert, projection)
        module = expert_module(self, layer, expert, projection)
        rows = self.size(projection)
        gated = self.fused and projection != "down"
        size = (2 * rows[0], rows[1]) if gated else rows
        listed = fused_parts(self, *size, gated) if self.fused else parts(self, *size)
        read = self._read([f"{module}.{part.name}" for part in listed])
        stored = {part.role: read[f"{module}.{part.name}"].array() for part in listed}
        if self.fused:
            stored = {role: array[expert] for role, array in stored.items()}
        stored["scale"] = stored["scale"].view(f"u{stored['scale'].itemsize}")
        q, z, scale = decode(self, stored)
        if gated:
            half = slice(0, rows[0]) if projection == "gate" else slice(rows[0], None)
            q, z, scale = q[half], None if z is None else z[half], scale[half]
        if "global" not in stored:
            return Codes(q, z, scale, None)
        globals_ = stored["global"].reshape(-1)
        return Codes(q, z, scale, np.float32(globals_[-1 if projection == "up" else 0]))

    def name(self, layer: int, expert: int, projection: str, part: str) -> str:
        """The full tensor name of one part, for example ``part="qweight"``."""
        module = expert_module(self, layer, expert, projection.removesuffix("_proj"))
        return f"{module}.{part}"

    def files(self) -> list[Path]:
        """The model's safetensors files, sorted by name."""
        return model_files(self.folder)

    def tensor_names(self) -> list[str]:
        """Names of all tensors in all files, in file order."""
        return [name for path in self.files() for name in read_header(path)[0]]

    def file_of(self, name: str) -> Path:
        """The file whose header holds a tensor."""
        for path in self.files():
            if name in read_header(path)[0]:
                return path
        raise CheckpointError("no such tensor", file=str(self.folder), tensor=name)

    def tensor(self, name: str) -> RawTensor:
        """One tensor as stored now."""
        return self._read([name])[name]

    def _read(self, names: list[str]) -> dict[str, RawTensor]:
        """Some tensors, each header parsed once; nothing is kept from call to call."""
        found: dict[str, RawTensor] = {}
        for path in self.files():
            header = read_header(path)
            found |= {name: read_tensor(path, name, header) for name in names if name in header[0]}
        for name in names:
            if name not in found:
                raise CheckpointError("no such tensor", file=str(self.folder), tensor=name)
        return found

    def _check(self, layer: int, expert: int, projection: str) -> None:
        if projection not in ("gate", "up", "down"):
            raise CheckpointError("no such projection", found=projection)
        below = self.layers + self.extra_layers
        if self.payload == "sparse":
            raise UnsupportedError("a sparse checkpoint has no numbers", file=str(self.folder))
        if layer in self.dense or not 0 <= layer < below or not 0 <= expert < self.experts:
            raise CheckpointError("no such routed expert", layer=layer, experts=str(expert))

    def _plain_weight(self, layer: int, expert: int, projection: str) -> Array:
        projection = projection.removesuffix("_proj")
        self._check(layer, expert, projection)
        rows, columns = self.size(projection)
        if self.payload != "fast":
            rng = stream(self, layer, expert, projection)
            return from_bits(draw_plain(self, rng, rows, columns), self.plain_dtype)
        bits = self.tensor(f"{expert_module(self, layer, expert, projection)}.weight").array()
        if self.fused:
            bits = bits[expert]
            bits = bits[:rows] if projection != "up" else bits[rows:]
        return from_bits(bits, self.plain_dtype)


def tiny_checkpoint(
    folder: Path | str,
    *,
    config_overrides: dict[str, Any] | None = None,
    header_lengths: Sequence[int] = (),
    progress: Progress | None = None,
    **settings: Unpack[Settings],
) -> TinyCheckpoint:
    """Write a checkpoint to ``folder`` (made if need be, without safetensors in it).

    ``settings`` are the fields of :class:`loader.testing.Settings`, described there: ``dialect``
    and ``family`` name a row of ``DIALECTS`` and ``FAMILIES`` (``awq-gemm``, ``qwen3-moe``), sizes
    default to H=256, I=512, E=8 in 2 layers, and the same ``seed`` gives the same numbers.
    ``config_overrides`` is merged into config.json, key by key at every depth.
    ``header_lengths``: the least length in bytes of each file's header text, in file order.
    ``progress`` gets (bytes written, bytes in all) after each piece.

    Raises ``UnsupportedError`` for settings that cannot be written and ``CheckpointError`` where
    the folder already holds a model.
    """
    spec = resolve(settings)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.safetensors")):
        raise CheckpointError("the folder already holds a model", file=str(folder))
    write_configs(folder, spec, config_overrides or {})
    write_model(folder, spec, header_lengths, progress)
    return TinyCheckpoint(folder=folder, **asdict(spec))

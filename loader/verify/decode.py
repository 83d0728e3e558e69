"""From raw tensors to weights, in fp64, one format at a time.

Every format answers ``weights(columns, rows, rounding)``: the weights of some output columns over
a range of inputs as float64 (columns, rows), rounded only where the bank's contract rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from loader.errors import CheckpointError
from loader.verify.config import RawConfig, Scheme
from loader.verify.naming import ModuleRef
from loader.verify.raw import RawCheckpoint

Float64 = npt.NDArray[np.float64]
Index = npt.NDArray[np.int64]
Array = npt.NDArray[Any]

# Column 8c + i of an AWQ word sits in this nibble.
_AWQ_NIBBLE = np.array([0, 4, 1, 5, 2, 6, 3, 7], dtype=np.uint32)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
NVFP4_GROUP = 16


def _e4m3(byte: int) -> float:
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -size if byte & 0x80 else size


_E4M3 = np.array([_e4m3(byte) for byte in range(256)])


@dataclass(frozen=True)
class Rounding:
    """Where the bank rounds: int4 with an fp16 bias, NVFP4 with fp16 scales, or (``fp64``) not."""

    fused_bias: bool = False
    wide: bool = False
    fp64: bool = False


class Decoder(Protocol):
    """One projection of one expert; ``shape`` is (output columns, inputs)."""

    format: str
    shape: tuple[int, int]

    def weights(self, columns: Index, rows: slice, rounding: Rounding) -> Float64:
        """``(columns, rows) float64``: the weights that the checkpoint's own numbers mean."""


@dataclass(frozen=True)
class Parts:
    """The raw parts of one module, read on demand, with errors that name file and tensor."""

    checkpoint: RawCheckpoint
    ref: ModuleRef

    def name(self, part: str) -> str:
        """Full tensor name of one part."""
        return f"{self.ref.name}.{part}"

    def has(self, part: str) -> bool:
        """Whether the checkpoint holds this part."""
        return part in self.checkpoint.modules.get(self.ref.name, ())

    def empty(self, part: str) -> bool:
        """Whether the tensor of this part holds no value, in whatever shape."""
        return 0 in self.checkpoint.shape(self.name(part))

    def dtype(self, part: str) -> str:
        """Dtype of one part as its header says."""
        return self.checkpoint.dtype(self.name(part))

    def bits(self, part: str, dtypes: tuple[str, ...], rank: int) -> Array:
        """Packed codes or bytes, unsigned."""
        tensor = self.checkpoint.read(self._checked(part, dtypes), self.ref.lead)
        self.require(part, "a tensor per expert", rank == tensor.ndim, list(tensor.shape))
        if dtypes == ("I32",):
            return tensor.numpy().view(np.uint32)
        return tensor.contiguous().view(torch.uint8).numpy()

    def floats(self, part: str, dtypes: tuple[str, ...]) -> Float64:
        """Values, widened to float64 without loss."""
        tensor = self.checkpoint.read(self._checked(part, dtypes), self.ref.lead)
        array: Float64 = tensor.double().numpy()
        return array

    def require(self, part: str, expected: Any, holds: bool, found: Any) -> None:
        """Raises :class:`CheckpointError` about ``part`` unless ``holds``."""
        if not holds:
            name = self.name(part)
            raise CheckpointError(
                "a tensor does not fit its format",
                file=self.checkpoint.file_of(name),
                tensor=name,
                expected=expected,
                found=found,
            )

    def require_shape(self, part: str, array: Array, shape: tuple[int, ...]) -> None:
        """Raise :class:`CheckpointError` for any other shape."""
        self.require(part, f"shape {list(shape)}", array.shape == shape, list(array.shape))

    def offset(self, total: int) -> tuple[int, int]:
        """(first column, count) of this projection among ``total`` columns."""
        if self.ref.half is None:
            return 0, total
        return self.ref.half * (total // 2), total // 2

    def _checked(self, part: str, dtypes: tuple[str, ...]) -> str:
        found = self.dtype(part)
        self.require(part, f"dtype {' or '.join(dtypes)}", found in dtypes, f"dtype {found}")
        return self.name(part)


def _int4(q: Float64, z: Float64, s: Float64, rounding: Rounding) -> Float64:
    """(q - z) * s, or q * s + b with b = fp16(-z * s), rounded once to fp16; all (columns, rows).

    Both are exact in float64, and numpy rounds float64 to float16 in one step.
    """
    if not rounding.fused_bias:
        return (q - z) * s
    with np.errstate(all="ignore"):
        bias = (-z * s).astype(np.float16).astype(np.float64)
        return (q * s + bias).astype(np.float16).astype(np.float64)


def _nibbles(words: Array, positions: Array) -> Float64:
    return ((words >> (np.uint32(4) * positions)) & np.uint32(15)).astype(np.float64)


class AwqGemm:
    """``qweight`` (k, n // 8) int32, ``qzeros`` (groups, n // 8), ``scales`` (groups, n)."""

    format = "awq"

    def __init__(self, parts: Parts, config: RawConfig) -> None:
        self._words = parts.bits("qweight", ("I32",), 2)
        self._scales = parts.floats("scales", ("F16", "BF16", "F32"))
        k, packed = self._words.shape
        self._first, count = parts.offset(packed * 8)
        self.shape = (count, k)
        parts.require_shape("scales", self._scales, (len(self._scales), packed * 8))
        scheme = config.scheme(k, len(self._scales), parts.name("scales"))
        self._group = scheme.group_size or k
        # A writer leaves those of a symmetric layer empty, whatever the config says of the model.
        self._zeros = _zero_points(parts, "qzeros", scheme, (len(self._scales), packed), True)

    def weights(self, columns: Index, rows: slice, rounding: Rounding) -> Float64:
        """See :class:`Decoder`."""
        column = columns + self._first
        word, nibble = column // 8, _AWQ_NIBBLE[column % 8]
        group = np.arange(rows.start, rows.stop) // self._group
        q = _nibbles(self._words[rows][:, word], nibble).T
        s = self._scales[:, column][group].T
        if self._zeros is None:
            return _int4(q, np.full_like(q, 8.0), s, rounding)
        return _int4(q, _nibbles(self._zeros[:, word], nibble)[group].T, s, rounding)


class PackQuantized:
    """``weight_packed`` (n, k // 8) int32, ``weight_scale`` (n, groups), zeros (n // 8, groups)."""

    format = "pack-quantized"

    def __init__(self, parts: Parts, config: RawConfig) -> None:
        self._words = parts.bits("weight_packed", ("I32",), 2)
        self._scales = parts.floats("weight_scale", ("F16", "BF16", "F32"))
        n, packed = self._words.shape
        self._first, count = parts.offset(n)
        self.shape = (count, packed * 8)
        groups = self._scales.shape[-1]
        parts.require_shape("weight_scale", self._scales, (n, groups))
        scheme = config.scheme(packed * 8, groups, parts.name("weight_scale"))
        self._group = scheme.group_size or packed * 8
        shape = (-(-n // 8), groups)
        self._zeros = _zero_points(parts, "weight_zero_point", scheme, shape, scheme.symmetric)

    def weights(self, columns: Index, rows: slice, rounding: Rounding) -> Float64:
        """See :class:`Decoder`."""
        column = columns + self._first
        row = np.arange(rows.start, rows.stop)
        group = row // self._group
        q = _nibbles(self._words[column][:, row // 8], (row % 8).astype(np.uint32))
        s = self._scales[column][:, group]
        if self._zeros is None:
            return _int4(q, np.full_like(q, 8.0), s, rounding)
        nibble = (column % 8).astype(np.uint32)[:, None]
        return _int4(q, _nibbles(self._zeros[column // 8], nibble)[:, group], s, rounding)


def _zero_points(
    parts: Parts, part: str, scheme: Scheme, shape: tuple[int, int], may_be_empty: bool
) -> Array | None:
    """Packed zero points of that shape; None where they are 8: absent, or empty where they may."""
    if parts.has(part):
        if may_be_empty and parts.empty(part):
            return None
        zeros = parts.bits(part, ("I32",), 2)
        parts.require_shape(part, zeros, shape)
        return zeros
    if scheme.symmetric:
        return None
    raise CheckpointError(
        "zero points are missing",
        file=str(parts.checkpoint.folder),
        tensor=parts.name(part),
        expected="present, since the config declares asymmetric weights",
        found="absent",
    )


class Nvfp4:
    """Codes (n, k // 2) uint8, ``weight_scale`` e4m3 (n, k // 16), one fp32 global scale."""

    format = "nvfp4"

    def __init__(self, parts: Parts, codes: str, global_scale: str, *, divisor: bool) -> None:
        self._codes = parts.bits(codes, ("U8",), 2)
        self._scales = parts.bits("weight_scale", ("F8_E4M3", "U8"), 2)
        self._divisor = divisor
        n, packed = self._codes.shape
        self._first, count = parts.offset(n)
        self.shape = (count, packed * 2)
        parts.require_shape("weight_scale", self._scales, (n, -(-packed * 2 // NVFP4_GROUP)))
        values = parts.floats(global_scale, ("F32", "BF16")).reshape(-1)
        allowed = (1, 2) if parts.ref.half is not None else (1,)
        parts.require(global_scale, "one value", values.size in allowed, f"{values.size} values")
        # A fused gate_up may have a global for each half; one value serves both.
        self._global = np.float32(values[parts.ref.half or 0 if values.size == 2 else 0])

    def weights(self, columns: Index, rows: slice, rounding: Rounding) -> Float64:
        """See :class:`Decoder`."""
        column = columns + self._first
        row = np.arange(rows.start, rows.stop)
        code = (self._codes[column][:, row // 2] >> (4 * (row % 2)).astype(np.uint8)) & 15
        block = _E4M3[self._scales[column]]
        e2m1 = _E2M1[code]
        group = row // NVFP4_GROUP
        with np.errstate(all="ignore"):
            if rounding.fp64 and not rounding.wide:
                factor = float(self._global)
                scale64 = block / factor if self._divisor else block * factor
                exact: Float64 = e2m1 * scale64[:, group]
                return exact
            block32 = block.astype(np.float32)
            scale = block32 / self._global if self._divisor else block32 * self._global
            if rounding.wide:
                scale = scale.astype(np.float16).astype(np.float32)
            rounded: Float64 = (e2m1.astype(np.float32) * scale[:, group]).astype(np.float64)
        return rounded


class Plain:
    """``weight`` (n, k) bf16 or fp16: not quantized."""

    format = "plain"

    def __init__(self, parts: Parts) -> None:
        self._weight = parts.checkpoint.read(parts.name("weight"), parts.ref.lead)
        parts.require("weight", "two axes", self._weight.ndim == 2, list(self._weight.shape))
        n, k = self._weight.shape
        self._first, count = parts.offset(n)
        self.shape = (count, k)

    def weights(self, columns: Index, rows: slice, rounding: Rounding) -> Float64:
        """See :class:`Decoder`."""
        chosen = self._weight[torch.from_numpy(columns + self._first), rows]
        array: Float64 = chosen.double().numpy()
        return array


def decoder(checkpoint: RawCheckpoint, config: RawConfig, ref: ModuleRef) -> Decoder:
    """The decoder for ``ref``, recognised by the parts that are there and their dtypes.

    Raises :class:`CheckpointError` when no format explains them, or a part is missing or misshaped.
    """
    parts = Parts(checkpoint, ref)
    if parts.has("qweight"):
        return AwqGemm(parts, config)
    if parts.has("weight_packed"):
        dtype = parts.dtype("weight_packed")
        if dtype == "I32":
            return PackQuantized(parts, config)
        if dtype == "U8":
            return Nvfp4(parts, "weight_packed", "weight_global_scale", divisor=True)
    elif parts.has("weight"):
        dtype = parts.dtype("weight")
        if dtype == "U8" and not parts.has("pre_quant_scale"):
            return Nvfp4(parts, "weight", "weight_scale_2", divisor=False)
        if dtype in ("BF16", "F16"):
            return Plain(parts)
    found = sorted(checkpoint.modules.get(ref.name, ()))
    raise CheckpointError(
        "the tensors of a module are in no format known here",
        file=str(checkpoint.folder),
        tensor=ref.name,
        expected="qweight, weight_packed (I32 or U8), weight (U8 with weight_scale_2, BF16, F16)",
        found=", ".join(f"{part} {parts.dtype(part)}" for part in found) or "nothing",
    )

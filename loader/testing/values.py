"""The numbers of a synthetic checkpoint: drawn from the seed, so that they need not be kept.

Every projection has its own stream, keyed by (seed, layer, expert, projection). Scales step
through all values of a range that activations of rms 1 can pass through without leaving fp16, so
that neighbouring columns and groups have different scales and a swap shows.
"""

from __future__ import annotations

import math
import zlib
from typing import NamedTuple

import numpy as np

from loader.testing.encode import E2M1, E4M3, Array, from_bits, to_bits
from loader.testing.spec import PROJECTIONS, Spec

OUTPUT_RMS = 1.5
"""rms of a projection's result when its input has rms 1; twice in a row it stays near 1."""

INT4_RMS = 6.0
"""rms of q - z, between the symmetric case (4.6) and the asymmetric one (6.5)."""

E2M1_RMS = 2.93
"""rms of e2m1 over uniformly drawn nibbles."""

SCALE_STEPS = {"F16": 2039, "F32": 2039, "BF16": 251, "F8_E4M3": 23}
"""How many neighbouring values a scale steps through: primes, so that every step visits all.

The first three span two octaves; 23 bytes of e4m3 span nearly three, whose rms is 3.7 times the
lowest value.
"""

E4M3_LOWEST, E4M3_HIGHEST = 0x10, 0x66
"""Bounds of the first of 23 neighbouring e4m3 bytes: globals then spread over three decades."""


class Codes(NamedTuple):
    """One projection as it is stored, unpacked.

    ``q``: ``(out, in) uint8`` nibbles. ``z``: ``(out, groups) uint8`` or None for NVFP4 (8 where
    the checkpoint is symmetric). ``scale``: raw bits, ``(out, groups)`` uint16, uint32 (F32) or
    uint8 (e4m3). ``global_scale``: float32 as it stands in the file, or None for AWQ and int4.
    """

    q: Array
    z: Array | None
    scale: Array
    global_scale: np.float32 | None


def stream(
    spec: Spec, layer: int, expert: int, projection: str, purpose: int = 0
) -> np.random.Generator:
    """The random stream of one projection of one expert."""
    key = [spec.seed, layer, expert, PROJECTIONS.index(projection), purpose]
    return np.random.default_rng(np.random.SeedSequence(key))


def named_stream(spec: Spec, name: str) -> np.random.Generator:
    """The random stream of a tensor that belongs to no expert."""
    key = [spec.seed, zlib.crc32(name.encode()), 0, 0, 9]
    return np.random.default_rng(np.random.SeedSequence(key))


def steps(rng: np.random.Generator, out: int, groups: int, modulus: int) -> Array:
    """``(out, groups) int64`` below ``modulus``: no value twice in a run of columns or groups.

    A run is ``modulus`` long. Runs are shifted at random against each other, so that moving a
    whole run shows as well; where two runs meet, neighbours may agree by chance.
    """
    column_step = int(rng.integers(0, modulus // 2)) * 2 + 1
    group_step = column_step * 3
    column, group = np.arange(out), np.arange(groups)
    shift = rng.integers(0, modulus, size=out // modulus + 1)[column // modulus]
    turn = rng.integers(0, modulus, size=groups // modulus + 1)[group // modulus]
    along = (column * column_step + shift)[:, None] + (group * group_step + turn)[None, :]
    return np.asarray(along % modulus)


def lowest_scale_bits(dtype: str, features_in: int) -> int:
    """Bits of the lowest int4 scale for K inputs; the highest is four times as much."""
    lowest = OUTPUT_RMS / (math.sqrt(features_in) * INT4_RMS * 2.4)
    return int(to_bits(np.array([lowest]), "F16" if dtype == "F32" else dtype)[0])


def lowest_block_value(features_in: int) -> float:
    """The lowest product of block scale and global scale for K inputs."""
    return OUTPUT_RMS / (math.sqrt(features_in) * E2M1_RMS * 3.7)


def draw_global(
    spec: Spec, layer: int, expert: int, projection: str, features_in: int, first: int | None = None
) -> tuple[int, np.float32]:
    """The first block-scale byte and the global scale that goes with it.

    Gate and up share both where a fused tensor has one global an expert. ``first`` fixes the byte.
    """
    if projection == "up" and spec.fused and spec.fused_globals != "E2":
        projection = "gate"
    rng = stream(spec, layer, expert, projection, purpose=1)
    byte = int(rng.integers(E4M3_LOWEST, E4M3_HIGHEST + 1))
    byte = byte if first is None else first
    multiplier = lowest_block_value(features_in) / float(E4M3[byte]) * rng.uniform(0.8, 1.25)
    return byte, np.float32(1 / multiplier if spec.writer.divisor else multiplier)


def draw_codes(
    spec: Spec,
    rng: np.random.Generator,
    out: int,
    features_in: int,
    global_: tuple[int, np.float32],
) -> Codes:
    """Codes, zero points and scales of a projection from its stream."""
    groups = spec.groups(features_in)
    q = rng.integers(0, 16, size=(out, features_in), dtype=np.uint8)
    step = steps(rng, out, groups, SCALE_STEPS[spec.scale_dtype])
    if spec.writer.kind == "e2m1":
        return Codes(q, None, (global_[0] + step).astype(np.uint8), global_[1])
    z = np.full((out, groups), 8, np.uint8)
    if not spec.symmetric:
        z = steps(rng, out, groups, 16).astype(np.uint8)
    first = lowest_scale_bits(spec.scale_dtype, features_in)
    if spec.scale_dtype == "F32":
        half = (first + step).astype(np.uint16)
        return Codes(q, z, to_bits(from_bits(half, "F16"), "F32"), None)
    return Codes(q, z, (first + step).astype(np.uint16), None)


def expert_codes(spec: Spec, layer: int, expert: int, projection: str) -> Codes:
    """The codes of one projection of one routed expert."""
    out, features_in = spec.size(projection)
    global_ = draw_global(spec, layer, expert, projection, features_in)
    return draw_codes(spec, stream(spec, layer, expert, projection), out, features_in, global_)


def draw_plain(spec: Spec, rng: np.random.Generator, out: int, features_in: int) -> Array:
    """``(out, in) uint16``: bits of a weight that is not quantized, in ``plain_dtype``."""
    values = rng.standard_normal((out, features_in), np.float32)
    return to_bits(values * np.float32(OUTPUT_RMS / math.sqrt(features_in)), spec.plain_dtype)


def dequantize_f64(spec: Spec, codes: Codes) -> Array:
    """``(out, in) float64``: the weights that the stored numbers mean, in double precision."""
    group = codes.q.shape[1] if spec.group == -1 else spec.group
    column_group = np.arange(codes.q.shape[1]) // group
    scale = from_bits(codes.scale, spec.scale_dtype).astype(np.float64)[:, column_group]
    if codes.global_scale is None:
        assert codes.z is not None
        return (codes.q.astype(np.float64) - codes.z[:, column_group]) * scale
    product = E2M1[codes.q].astype(np.float64) * scale
    wide = np.float64(codes.global_scale)
    return np.asarray(product / wide if spec.writer.divisor else product * wide)


def dequantize_f32(spec: Spec, codes: Codes) -> Array:
    """``(out, in) float32`` as the tools: fp32(e2m1 * fp32(e4m3 o global)) or fp32((q - z) * s)."""
    group = codes.q.shape[1] if spec.group == -1 else spec.group
    column_group = np.arange(codes.q.shape[1]) // group
    scale = from_bits(codes.scale, spec.scale_dtype)
    if codes.global_scale is None:
        assert codes.z is not None
        return (codes.q.astype(np.float32) - codes.z[:, column_group]) * scale[:, column_group]
    wide = codes.global_scale
    block = scale / wide if spec.writer.divisor else scale * wide
    return np.asarray(E2M1[codes.q] * block[:, column_group])

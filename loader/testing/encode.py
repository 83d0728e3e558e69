"""How four-bit codes and small floats sit in bytes: numpy only, in both directions.

This is the oracle's own code. It shares nothing with the rest of the library, so that an error
there cannot hide behind the same error here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble i of an AWQ word is column ``8 * word + AWQ_ORDER[i]``."""

PLAIN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
"""Nibble i of a compressed-tensors word is element ``8 * word + i``."""


def pack_words(nibbles: Array, order: tuple[int, ...]) -> Array:
    """``(rows, n) uint8`` below 16 to ``(rows, n // 8) int32``, nibble i from ``order[i]``."""
    rows, columns = nibbles.shape
    octets = nibbles.reshape(rows, columns // 8, 8)[:, :, list(order)]
    packed = octets[:, :, 0::2] | (octets[:, :, 1::2] << 4)
    return np.ascontiguousarray(packed).view("<i4").reshape(rows, columns // 8)


def unpack_words(words: Array, order: tuple[int, ...]) -> Array:
    """The reverse of :func:`pack_words`: ``(rows, m) int32`` to ``(rows, 8 * m) uint8``."""
    rows, count = words.shape
    packed = np.ascontiguousarray(words).view(np.uint8).reshape(rows, count, 4)
    octets = np.empty((rows, count, 8), np.uint8)
    octets[:, :, list(order[0::2])] = packed & 15
    octets[:, :, list(order[1::2])] = packed >> 4
    return octets.reshape(rows, count * 8)


def pack_pairs(nibbles: Array) -> Array:
    """``(rows, n) uint8`` below 16 to ``(rows, n // 2) uint8``, the even column low."""
    return np.ascontiguousarray(nibbles[:, 0::2] | (nibbles[:, 1::2] << 4))


def unpack_pairs(packed: Array) -> Array:
    """The reverse of :func:`pack_pairs`: ``(rows, m) uint8`` to ``(rows, 2 * m) uint8``."""
    nibbles = np.empty((packed.shape[0], packed.shape[1] * 2), np.uint8)
    nibbles[:, 0::2] = packed & 15
    nibbles[:, 1::2] = packed >> 4
    return nibbles


def _e4m3_table() -> Array:
    values = np.empty(256, np.float32)
    for byte in range(256):
        exponent, mantissa = (byte >> 3) & 15, byte & 7
        if exponent == 15 and mantissa == 7:
            value = float("nan")
        elif exponent == 0:
            value = mantissa * 2.0**-9
        else:
            value = (8 + mantissa) * 2.0 ** (exponent - 10)
        values[byte] = -value if byte & 128 else value
    return values


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""``(16,) float32``: the value of each nibble."""

E4M3 = _e4m3_table()
"""``(256,) float32``: the value of each byte; 0x7F and 0xFF are NaN."""


def to_bits(values: Array, dtype: str) -> Array:
    """Round float values to the bits of ``F16`` or ``BF16`` (uint16) or ``F32`` (uint32)."""
    single = np.asarray(values, np.float32)
    if dtype == "F16":
        return single.astype("<f2").view(np.uint16)
    if dtype == "F32":
        return single.view(np.uint32)
    bits = single.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bits(bits: Array, dtype: str) -> Array:
    """The float32 values of raw ``F16``, ``BF16``, ``F32`` or ``F8_E4M3`` bits; all are exact."""
    if dtype == "F16":
        return bits.view("<f2").astype(np.float32)
    if dtype == "F32":
        return bits.view("<f4")
    if dtype == "F8_E4M3":
        return E4M3[bits]
    return (bits.astype(np.uint32) << 16).view(np.float32)

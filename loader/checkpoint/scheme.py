"""Scheme: how the weights of one module are written on disk, as data.

A dialect (one file for each writing tool) answers with schemes; everything below
``loader/checkpoint`` looks only at what a scheme says, never at who wrote the file.

Axes: ``n`` output features, ``k`` input features, ``g`` groups along k, ``one`` a single index.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from loader.errors import CheckpointError, UnsupportedError


class Role(IntEnum):
    """What a tensor is to the converter, and in which order its numbers lie.

    The values are the first column of a descriptor (``loader/converter.py``) and are mirrored by
    native code.
    """

    CODES_KN = 0  #: int32 (K, N / 8), columns of a word in AWQ order
    CODES_NK = 1  #: int32 (N, K / 8) or uint8 (N, K / 2), low nibble first along K
    SCALES_GN = 2  #: 16-bit (G, N)
    SCALES_NG = 3  #: 16-bit (N, G)
    SCALES_NG8 = 4  #: e4m3 bytes (N, G)
    ZEROS_GN = 5  #: int32 (G, N / 8), columns of a word in AWQ order
    ZEROS_NG = 6  #: int32 (N / 8, G), low nibble first along N
    GLOBAL_F32 = 7  #: fp32, one number for each projection
    GLOBAL_BF16 = 8  #: bf16, one number for each projection
    CHECK_SHAPE = 9  #: int64 (2,) = N, K of the projection
    CHECK_GROUPS = 10  #: int32 (K,): i // group, or all -1
    PLAIN_NK = 11  #: 16-bit weights (N, K)
    UNUSED = 12  #: known, and left unread
    SCALES_GN32 = 13  #: fp32 (G, N), stored in 16 bits where one format holds all of a bank
    SCALES_NG32 = 14  #: fp32 (N, G), likewise


SCALE_ROLES = (
    Role.SCALES_GN,
    Role.SCALES_NG,
    Role.SCALES_NG8,
    Role.SCALES_GN32,
    Role.SCALES_NG32,
)


@dataclass(frozen=True)
class Arrangement:
    """Order of the numbers of one tensor: axes, features for each index, bytes for each element.

    ``row_quantum`` is how many rows must stay together when a tensor is read in pieces.
    """

    axes: tuple[str, ...]
    per: tuple[int, ...]
    element_bytes: int
    row_quantum: int = 1

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...] | None:
        """Shape on disk for axis sizes ``n``, ``k``, ``g``; None where a size does not divide."""
        if any(sizes[axis] % per for axis, per in zip(self.axes, self.per, strict=True)):
            return None
        return tuple(sizes[axis] // per for axis, per in zip(self.axes, self.per, strict=True))


@dataclass(frozen=True)
class Part:
    """One tensor that a projection has on disk, by the last component of its name."""

    role: Role
    arrangement: Arrangement | None
    dtypes: tuple[str, ...]
    required: bool = True

    def stored_as(self, dtype: str) -> tuple[Role, Arrangement | None, int]:
        """Role, arrangement and bytes of an element for one of ``dtypes``."""
        if self.arrangement is None:
            narrow = self.role is Role.GLOBAL_F32 and dtype == "BF16"
            return Role.GLOBAL_BF16 if narrow else self.role, None, 2 if narrow else 4
        if dtype == "F32" and self.role in _WIDE_SCALES:
            return _WIDE_SCALES[self.role], self.arrangement, 4
        return self.role, self.arrangement, self.arrangement.element_bytes


@dataclass(frozen=True)
class Scheme:
    """How one module is written.

    ``kind`` is the kind of code (``int4``, ``e2m1``, ``plain``); ``group`` the run of K that shares
    a scale, -1 for a whole row; ``zero_points`` says what the config promises of stored zero
    points: ``stored``, ``eight`` (absent, or present and all 8) or ``none``.
    """

    format: str
    kind: str
    group: int
    parts: Mapping[str, Part] = field(hash=False)
    zero_points: str = "none"
    global_sense: str = "none"


@dataclass(frozen=True)
class Unhandled:
    """A module whose format is known by name and not loaded by this library."""

    format: str
    expected: str = "AWQ or NVFP4 at 4 bits, or bf16/fp16"


class Dialect(Protocol):
    """What one writing tool says of each module; built once from the configs of a checkpoint."""

    @property
    def name(self) -> str:
        """The tool's name as it is shown."""
        ...

    def scheme(self, module: str) -> Scheme | Unhandled:
        """How ``module`` is written where it is quantized."""
        ...

    def excluded(self, module: str) -> frozenset[bool]:
        """Whether the ignore list excludes ``module``, under each reading that tools give it."""
        ...

    def tells_apart(self, module: str) -> bool:
        """Whether modules that differ from this one in the expert's number may be told apart.

        False: all of them have one scheme, and are excluded alike.
        """
        ...


_WORDS_KN = Arrangement(("k", "n"), (1, 8), 4, row_quantum=8)
_WORDS_NK = Arrangement(("n", "k"), (1, 8), 4, row_quantum=32)
_BYTES_NK = Arrangement(("n", "k"), (1, 2), 1, row_quantum=32)
_HALVES_GN = Arrangement(("g", "n"), (1, 1), 2)
_HALVES_NG = Arrangement(("n", "g"), (1, 1), 2, row_quantum=32)
_BYTES_NG = Arrangement(("n", "g"), (1, 1), 1, row_quantum=32)
_WORDS_GN = Arrangement(("g", "n"), (1, 8), 4)
_WORDS_N8G = Arrangement(("n", "g"), (8, 1), 4, row_quantum=4)
_PAIR = Arrangement(("pair",), (1,), 8)
_ROW_GROUPS = Arrangement(("k",), (1,), 4)
_HALVES_NK = Arrangement(("n", "k"), (1, 1), 2, row_quantum=32)

UNUSED = Part(Role.UNUSED, None, (), required=False)
_SCALES = ("F16", "BF16", "F32")
_WIDE_SCALES = {Role.SCALES_GN: Role.SCALES_GN32, Role.SCALES_NG: Role.SCALES_NG32}
_GROUP_INDEX = Part(Role.CHECK_GROUPS, _ROW_GROUPS, ("I32",), required=False)

AWQ_PARTS: Mapping[str, Part] = {
    "qweight": Part(Role.CODES_KN, _WORDS_KN, ("I32",)),
    "qzeros": Part(Role.ZEROS_GN, _WORDS_GN, ("I32",)),
    "scales": Part(Role.SCALES_GN, _HALVES_GN, _SCALES),
    "g_idx": _GROUP_INDEX,
}

INT4_PACK_PARTS: Mapping[str, Part] = {
    "weight_packed": Part(Role.CODES_NK, _WORDS_NK, ("I32",)),
    "weight_scale": Part(Role.SCALES_NG, _HALVES_NG, _SCALES),
    "weight_zero_point": Part(Role.ZEROS_NG, _WORDS_N8G, ("I32",)),
    "weight_shape": Part(Role.CHECK_SHAPE, _PAIR, ("I64",), required=False),
    "weight_g_idx": _GROUP_INDEX,
}

_FP4_CODES = Part(Role.CODES_NK, _BYTES_NK, ("U8",))
_FP4_SCALES = Part(Role.SCALES_NG8, _BYTES_NG, ("F8_E4M3", "U8"))
_FP4_GLOBAL = Part(Role.GLOBAL_F32, None, ("F32", "BF16"))

NVFP4_PACK_PARTS: Mapping[str, Part] = {
    "weight_packed": _FP4_CODES,
    "weight_scale": _FP4_SCALES,
    "weight_global_scale": _FP4_GLOBAL,
    "input_global_scale": UNUSED,
}

NVFP4_PARTS: Mapping[str, Part] = {
    "weight": _FP4_CODES,
    "weight_scale": _FP4_SCALES,
    "weight_scale_2": _FP4_GLOBAL,
    "input_scale": UNUSED,
}

PLAIN = Scheme(
    "not quantized",
    "plain",
    -1,
    {"weight": Part(Role.PLAIN_NK, _HALVES_NK, ("BF16", "F16"))},
)


MOST_GROUP = 1 << 24
"""Inputs of the largest group, and of the longest row, that native code takes."""


@dataclass(frozen=True)
class IntegerSettings:
    """``bits`` and ``group_size`` as a config gives them, checked for what this library loads."""

    bits: object
    group: object
    where: str
    kind: str = "int"
    extra: Mapping[str, object] = field(default_factory=dict)

    def checked_group(self) -> int:
        """The group size; raises :class:`UnsupportedError` for bits other than 4 by name."""
        if self.bits != 4 or isinstance(self.bits, bool):
            raise UnsupportedError(
                "only 4-bit weights are loaded",
                file=self.where,
                expected="4 bits",
                found=f"{self.bits} bits of type {self.kind}",
            )
        if (
            not isinstance(self.group, int)
            or isinstance(self.group, bool)
            or not (self.group == -1 or 0 < self.group <= MOST_GROUP)
        ):
            raise CheckpointError(
                "the group size in the config is not a whole number",
                file=self.where,
                expected=f"a whole number from 1 to {MOST_GROUP}, or -1 for a whole row",
                found=repr(self.group),
            )
        return self.group

"""Verdict: what a finding of the converter means for the load, in one sentence."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from loader.checkpoint.family import DOWN, GATE, GATE_UP, UP
from loader.checkpoint.scheme import SCALE_ROLES, Role
from loader.checkpoint.tables import LayerSource
from loader.errors import CheckpointError, ConversionError, LoaderError
from loader.pieces import Pieces, Slice
from loader.reference.findings import Kind
from loader.spots import findings_of_spots

_ZEROS = (Role.ZEROS_GN, Role.ZEROS_NG)

_WARNABLE = (Kind.NONFINITE, Kind.GLOBAL)
"""Findings that ``nonfinite="warn"`` keeps: numbers that are wrong but are the checkpoint's own."""


@dataclass(frozen=True)
class _Meaning:
    error: type[LoaderError]
    what: str
    expected: str


_NEITHER = _Meaning(
    ConversionError,
    "scales of 32 bits fit neither 16-bit format",
    "every scale of a bank exact in fp16, or every one exact in bf16",
)

_MEANINGS: Mapping[Kind, _Meaning] = {
    Kind.NONFINITE: _Meaning(ConversionError, "a scale is not finite", "finite scales"),
    Kind.GLOBAL: _Meaning(
        ConversionError,
        "a global scale cannot be used",
        "a positive finite number (as a divisor, one with a finite reciprocal)",
    ),
    Kind.ZERO_POINT: _Meaning(
        CheckpointError,
        "a zero point contradicts the config, which says symmetric",
        "zero points of 8 everywhere",
    ),
    Kind.SHAPE: _Meaning(
        CheckpointError, "weight_shape disagrees with the packed tensor", "[{}, {}] as packed"
    ),
    Kind.GROUPS: _Meaning(
        CheckpointError, "the group index reorders the rows", "i // {} for all i, or all -1"
    ),
    Kind.NOT_HELD: _Meaning(
        ConversionError,
        "fp16 cannot hold a value that the layout or rounding stores in it",
        "0, or finite with |x| >= 2**-14 and exact; "
        "layout='compact' with awq_rounding='exact' keeps the value as it is",
    ),
    Kind.NOT_FP16: _NEITHER,
    Kind.NOT_BF16: _NEITHER,
}


@dataclass(frozen=True, eq=False)
class Judge:
    """Turns findings of one layer into an error, or into lines of the report.

    ``name_of`` and ``file_of`` take the row that pieces and tables call a tensor by.
    """

    source: LayerSource
    part: Slice
    keep: bool
    name_of: Callable[[int], str]
    file_of: Callable[[int], str | None]

    def after_write(self, findings: torch.Tensor, pieces: Pieces) -> list[str]:
        """Judge the findings of one ``write``; raises, or returns what is kept."""
        kept = []
        rows = findings.tolist()
        tensors = len({int(pieces[row[0]]["tensor"]) for row in rows})
        for subject, kind, count, row, column, bits in rows:
            piece = pieces[subject]
            role, projection = Role(piece["role"]), int(piece["projection"])
            matrix = role in SCALE_ROLES or role in _ZEROS
            kept.append(
                self._judge(
                    Kind(kind),
                    int(piece["tensor"]),
                    int(piece["slot"]),
                    count,
                    self._in_tensor(projection, row, column) if matrix else (row, column),
                    _value(role, bits, self._scale_dtype(int(piece["bank"]))),
                    tensors,
                    (int(piece["expect_a"]), int(piece["expect_b"])),
                )
            )
        return kept

    def after_finish(self, findings: torch.Tensor) -> list[str]:
        """Judge the findings of ``finish``, whose subjects are bank * experts + slot."""
        experts = len(self.part.expert_ids)
        rows = findings.tolist()
        for subject, kind, count, row, column, bits in rows:
            bank, slot = divmod(subject, experts)
            projection = DOWN if bank else (UP if column % 2 else GATE)
            tensor = self._scale_tensor(projection, slot)
            wide_fp4 = self.source.scheme.kind == "e2m1"
            value = f"{_float(bits, '<i', '<f'):g}" if wide_fp4 else _half(bits, "F16")
            at = self._in_tensor(projection, row, column if bank else column // 2)
            self._judge(Kind(kind), tensor, slot, count, at, value, len(rows))
        return []

    def after_layer(
        self, closing: torch.Tensor, spots: torch.Tensor | None, pieces: Callable[[], Pieces]
    ) -> list[str]:
        """Judge what was found once a layer is whole: ``finish``, and what a card counted.

        ``spots`` is the table of ``loader/spots.py``, or None; ``pieces`` are those of the layer.
        """
        if spots is None:
            return self.after_finish(closing)
        own = pieces()
        found, closing = findings_of_spots(spots, own, len(self.part.expert_ids))
        return self.after_write(found, own) + self.after_finish(closing)

    def _in_tensor(self, projection: int, group: int, column: int) -> tuple[int, int]:
        """Where a group and column of this card's slice stand in the tensor of the checkpoint."""
        if projection == DOWN:
            first = self.part.outs[0] if self.part.outs else 0
            return group + self.part.offset // self.source.group2, column + first
        gate_rows = self.source.intermediate * (self.source.fused and projection == UP)
        return group, column + self.part.offset + gate_rows

    def _judge(
        self,
        kind: Kind,
        tensor: int,
        slot: int,
        count: int,
        at: tuple[int, int],
        value: str,
        tensors: int,
        wanted: tuple[int, int] = (-1, -1),
    ) -> str:
        meaning = _MEANINGS[kind]
        more = f"; {tensors - 1} more tensors alike" if tensors > 1 else ""
        place = f"[{at[0]}, {at[1]}] (group, column)"
        if kind in (Kind.SHAPE, Kind.GROUPS):
            place = f"[{at[1]}]"
        error = meaning.error(
            meaning.what,
            file=self.file_of(tensor),
            layer=self.source.layer,
            experts=str(self.part.expert_ids[slot]) if self.source.experts else None,
            tensor=self.name_of(tensor),
            expected=meaning.expected.format(*wanted),
            found=f"{value} at {place}, {count} such values{more}",
        )
        if self.keep and kind in _WARNABLE:
            return str(error)
        raise error

    def _scale_dtype(self, bank: int) -> str:
        return self.source.scale_dtypes[bank]

    def _scale_tensor(self, projection: int, slot: int) -> int:
        for table in self.source.tables:
            if table.role in SCALE_ROLES and table.projection in (
                projection,
                GATE_UP if projection != DOWN else DOWN,
            ):
                return int(table.rows[0 if self.source.fused else self.part.expert_ids[slot]])
        raise AssertionError("a quantized layer has scales")


def _value(role: Role, bits: int, scale_dtype: str) -> str:
    if role in (Role.SCALES_GN, Role.SCALES_NG):
        return _half(bits, scale_dtype)
    if role == Role.SCALES_NG8:
        return f"e4m3 byte 0x{bits & 0xFF:02x}"
    if role in (Role.GLOBAL_F32, Role.GLOBAL_BF16, Role.SCALES_GN32, Role.SCALES_NG32):
        return f"{_float(bits, '<i', '<f'):g}"
    return str(bits)


def _half(bits: int, dtype: str) -> str:
    word = bits & 0xFFFF
    is_bf16 = dtype == "BF16"
    value = _float(word << 16, "<I", "<f") if is_bf16 else _float(word, "<H", "<e")
    return f"{value:g} (0x{word:04x})"


def _float(bits: int, as_integer: str, as_float: str) -> float:
    return float(struct.unpack(as_float, struct.pack(as_integer, bits))[0])

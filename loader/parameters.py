"""Parameters: what a module already holds in checkpoint format, read as one layer on disk is.

Names are ``w13_`` or ``w2_`` and the part's name in the format; experts of this card lie on axis 0,
gate before up (docs/integration.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from loader.checkpoint.family import DOWN, GATE_UP
from loader.checkpoint.folder import read_dialect
from loader.checkpoint.scheme import Part, Role, Scheme, Unhandled
from loader.checkpoint.tables import LayerSource, Table
from loader.errors import CheckpointError, LoaderError, UnsupportedError
from loader.pieces import Places, Slice
from loader.shard import Shard

_BANKS = {"w13": GATE_UP, "w2": DOWN}
_CHECKS = (Role.CHECK_SHAPE, Role.CHECK_GROUPS, Role.UNUSED)
"""Parts that frameworks keep for themselves, filled as they like: not read, removed at the end."""

_ZEROS = (Role.ZEROS_GN, Role.ZEROS_NG)

_DTYPE_NAMES = {
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
}


@dataclass(frozen=True, eq=False)
class Parameters:
    """The source parameters of one layer, in the form that pieces are built from.

    ``tensors[i]`` is named ``names[i]`` and is "file" i of ``places``. ``phase`` is that of W2.
    """

    names: list[str]
    tensors: list[torch.Tensor]
    source: LayerSource
    part: Slice
    places: Places
    phase: int
    device: torch.device

    @property
    def read_bytes(self) -> int:
        """Bytes that the conversion takes: the frameworks' own tables are not read."""
        return sum(self.tensors[row].nbytes for t in self.source.tables for row in t.rows)

    @property
    def zero_point(self) -> int | None:
        """8 where no zero points are stored, None where there is nothing to fill."""
        return 8 if self.source.scheme.kind == "int4" and not self.source.zeros_stored else None


def read_parameters(
    module: torch.nn.Module, quantization: Mapping[str, Any], layer: int, shard: Shard
) -> Parameters:
    """Find and check the parameters of ``module``.

    Raises :class:`CheckpointError` for missing or misshapen ones, :class:`UnsupportedError` for a
    format that is not loaded.
    """
    scheme = _scheme(quantization, layer)
    own = {
        name: tensor
        for name, tensor in (
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        )
        if name.startswith(("w13_", "w2_"))
    }
    names = list(own)
    tensors = [own[name] for name in names]
    parts = _parts(names, scheme, layer)
    reader = _Reader(layer, scheme, names, tensors, parts)
    w13, w2 = reader.sizes("w13"), reader.sizes("w2")
    hidden, intermediate, experts = w13["k"], w2["k"], int(reader.codes("w13").shape[0])
    group2 = intermediate * shard.tp_size if scheme.group == -1 else scheme.group
    offset, _ = shard.slice_of(intermediate * shard.tp_size, group2, layer)
    phase = offset % group2
    group13 = hidden if scheme.group == -1 else scheme.group
    sizes = {
        GATE_UP: {"n": 2 * intermediate, "k": hidden, "g": -(-hidden // group13)},
        DOWN: {"n": hidden, "k": intermediate, "g": -(-(phase + intermediate) // group2)},
    }
    tables = reader.tables(sizes, experts)
    source = LayerSource(
        layer=layer,
        scheme=scheme,
        fused=True,
        experts=experts,
        hidden=hidden,
        intermediate=intermediate,
        group13=group13,
        group2=group2,
        scale_dtypes=reader.scale_dtypes(),
        zeros_stored=any(t.role in _ZEROS for t in tables),
        zeros_must_be_eight=scheme.zero_points == "eight",
        tables=tables,
        reason="parameters of a module",
    )
    places = Places(np.arange(len(names)), np.zeros(len(names), np.int64))
    part = Slice(tuple(range(experts)), 0, intermediate)
    return Parameters(names, tensors, source, part, places, phase, reader.codes("w13").device)


def _scheme(quantization: Mapping[str, Any], layer: int) -> Scheme:
    dialect = read_dialect(quantization, None)
    if dialect is None:
        raise UnsupportedError(
            "experts that are not quantized are not converted in place",
            layer=layer,
            expected="the checkpoint's quantization_config",
            found=quantization,
        )
    scheme = dialect.scheme(f"model.layers.{layer}.mlp.experts.0.gate_proj")
    if isinstance(scheme, Unhandled):
        raise UnsupportedError(
            "the experts of this layer are in a format that is not loaded",
            layer=layer,
            expected=scheme.expected,
            found=scheme.format,
        )
    return scheme


def _parts(names: list[str], scheme: Scheme, layer: int) -> dict[str, tuple[int, Part]]:
    """Parts by parameter name; every name is known and every required part is there."""
    found: dict[str, tuple[int, Part]] = {}
    for name in names:
        bank, _, part_name = name.partition("_")
        part = scheme.parts.get(part_name)
        if part is None:
            raise CheckpointError(
                "the module holds an expert parameter that is no part of the format",
                layer=layer,
                tensor=name,
                expected=f"{scheme.format}: {', '.join(scheme.parts)}",
                found=part_name,
            )
        found[name] = (_BANKS[bank], part)
    for bank in _BANKS:
        for part_name, part in scheme.parts.items():
            if part.required and part.role not in _CHECKS and f"{bank}_{part_name}" not in found:
                raise CheckpointError(
                    "the module lacks an expert parameter",
                    layer=layer,
                    tensor=f"{bank}_{part_name}",
                    expected=f"{scheme.format} parameters with experts on axis 0",
                    found=", ".join(names) or "none",
                )
    return found


@dataclass(frozen=True, eq=False)
class _Reader:
    layer: int
    scheme: Scheme
    names: list[str]
    tensors: list[torch.Tensor]
    parts: Mapping[str, tuple[int, Part]]

    def codes(self, bank: str) -> torch.Tensor:
        """The packed codes of one bank: the first part of every scheme."""
        return self.tensors[self.names.index(f"{bank}_{next(iter(self.scheme.parts))}")]

    def sizes(self, bank: str) -> dict[str, int]:
        """Axis sizes that the packed codes of one bank imply."""
        part_name, part = next(iter(self.scheme.parts.items()))
        arrangement, shape = part.arrangement, self.codes(bank).shape
        assert arrangement is not None
        if len(shape) != 3:
            name = f"{bank}_{part_name}"
            raise self._error(name, "experts, then two axes", tuple(shape))
        return {
            axis: size * per
            for axis, size, per in zip(arrangement.axes, shape[1:], arrangement.per, strict=True)
        }

    def tables(self, sizes: Mapping[int, Mapping[str, int]], experts: int) -> tuple[Table, ...]:
        """One table for each parameter that is read, its dtype, shape, strides, device checked."""
        device = self.codes("w13").device
        built = []
        for row, (name, tensor) in enumerate(zip(self.names, self.tensors, strict=True)):
            projection, part = self.parts[name]
            empty = part.role in _ZEROS and not part.required and not tensor.numel()
            if part.role in _CHECKS or empty:
                continue
            dtype = _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
            if dtype not in part.dtypes:
                raise self._error(name, " or ".join(part.dtypes), dtype)
            shapes = _shapes(part, projection, sizes[projection], experts)
            if tuple(tensor.shape) not in shapes:
                wanted = " or ".join(str(shape) for shape in shapes) or "sizes that divide"
                raise self._error(name, wanted, tuple(tensor.shape))
            if not tensor.is_contiguous():
                raise self._error(name, "contiguous", f"strides {tensor.stride()}")
            if tensor.device != device:
                raise self._error(name, f"on {device}, as all others", f"on {tensor.device}")
            role, arrangement, _ = part.stored_as(dtype)
            shape = tuple(tensor.shape[1:])
            rows = np.asarray([row])
            table = Table(projection, role, arrangement, tensor.itemsize, shape, rows)
            built.append(table)
        zeros = {table.projection for table in built if table.role in _ZEROS}
        if len(zeros) == 1:
            raise self._lopsided(zeros.pop())
        return tuple(built)

    def _lopsided(self, stored: int) -> LoaderError:
        bank = next(bank for bank, projection in _BANKS.items() if projection != stored)
        part_name = next(n for n, part in self.scheme.parts.items() if part.role in _ZEROS)
        return CheckpointError(
            "zero points are there for one bank only",
            layer=self.layer,
            tensor=f"{bank}_{part_name}",
            expected="zero points of w13 and w2, or of neither",
            found="none" if f"{bank}_{part_name}" not in self.names else "an empty tensor",
        )

    def scale_dtypes(self) -> tuple[str, str]:
        """Dtype of the scales of W13 and of W2."""
        found = {}
        for name, tensor in zip(self.names, self.tensors, strict=True):
            projection, part = self.parts[name]
            if part.role in (Role.SCALES_GN, Role.SCALES_NG):
                found[projection] = _DTYPE_NAMES[tensor.dtype]
            elif part.role is Role.SCALES_NG8:
                found[projection] = "F8_E4M3"
        return found[GATE_UP], found[DOWN]

    def _error(self, name: str, expected: object, found: object) -> LoaderError:
        return CheckpointError(
            "an expert parameter does not match the format",
            layer=self.layer,
            tensor=name,
            expected=expected,
            found=found,
        )


def _shapes(
    part: Part, projection: int, sizes: Mapping[str, int], experts: int
) -> list[tuple[int, ...]]:
    if part.arrangement is None:
        both = [(experts, 2)] if projection == GATE_UP else []
        return [*both, (experts,), (experts, 1)]
    shape = part.arrangement.shape(sizes)
    return [] if shape is None else [(experts, *shape)]

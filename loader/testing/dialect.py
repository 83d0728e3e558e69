"""How each writer stores one projection: its parts, their shapes, and the packing both ways.

The table holds facts; the three layouts (AWQ, packed integers, packed floats) are the only code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from loader.testing.encode import (
    AWQ_ORDER,
    PLAIN_ORDER,
    Array,
    pack_pairs,
    pack_words,
    unpack_pairs,
    unpack_words,
)

if TYPE_CHECKING:  # a spec names its dialect, so the tables come first
    from loader.testing.spec import Spec
    from loader.testing.values import Codes


@dataclass(frozen=True)
class Dialect:
    """One writer: what kind of code, which layout, and what it calls the parts.

    ``scale_dtype`` and ``symmetric`` are the writer's defaults. ``divisor`` says that the global
    scale divides. ``global_shape`` is the shape of one projection's global scale.
    ``writes_eights``: zero points are stored even where they are all 8.
    """

    kind: str
    layout: str
    codes: str
    scale: str
    zeros: str = ""
    global_: str = ""
    input_: str = ""
    scale_dtype: str = "BF16"
    symmetric: bool = True
    divisor: bool = False
    global_shape: tuple[int, ...] = ()
    plain_dtype: str = "BF16"
    writes_eights: bool = False


_AWQ = Dialect(
    "int4",
    "awq",
    "qweight",
    "scales",
    "qzeros",
    scale_dtype="F16",
    symmetric=False,
    plain_dtype="F16",
)
_INT4 = Dialect("int4", "packed", "weight_packed", "weight_scale", "weight_zero_point")

DIALECTS: dict[str, Dialect] = {
    "awq-gemm": _AWQ,
    "awq-gptqmodel": Dialect("int4", "awq", "qweight", "scales", "qzeros", writes_eights=True),
    "ct-int4": _INT4,
    "ct-int4-asym": Dialect(
        "int4", "packed", _INT4.codes, _INT4.scale, _INT4.zeros, symmetric=False
    ),
    "ct-nvfp4": Dialect(
        "e2m1",
        "pairs",
        "weight_packed",
        "weight_scale",
        global_="weight_global_scale",
        input_="input_global_scale",
        scale_dtype="F8_E4M3",
        divisor=True,
        global_shape=(1,),
    ),
    "modelopt-nvfp4": Dialect(
        "e2m1",
        "pairs",
        "weight",
        "weight_scale",
        global_="weight_scale_2",
        input_="input_scale",
        scale_dtype="F8_E4M3",
    ),
}


class Part(NamedTuple):
    """One stored tensor of a projection; ``role`` is codes, scale, zeros, global,
    input or shape.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str


def parts(spec: Spec, out: int, features_in: int) -> list[Part]:
    """The tensors of one quantized projection of logical size (out, in), not fused."""
    writer, groups = spec.writer, spec.groups(features_in)
    if writer.layout == "awq":
        listed = [
            Part(writer.codes, "I32", (features_in, out // 8), "codes"),
            Part(writer.zeros, "I32", (groups, out // 8), "zeros"),
            Part(writer.scale, spec.scale_dtype, (groups, out), "scale"),
        ]
        return [part for part in listed if part.role != "zeros" or spec.zero_points]
    if writer.layout == "packed":
        listed = [
            Part(writer.codes, "I32", (out, features_in // 8), "codes"),
            Part(writer.scale, spec.scale_dtype, (out, groups), "scale"),
            Part("weight_shape", "I64", (2,), "shape"),
            Part(writer.zeros, "I32", (out // 8, groups), "zeros"),
        ]
        return [part for part in listed if part.role != "zeros" or spec.zero_points]
    listed = [
        Part(writer.codes, "U8", (out, features_in // 2), "codes"),
        Part(writer.scale, "F8_E4M3", (out, groups), "scale"),
        Part(writer.global_, "F32", writer.global_shape, "global"),
        Part(writer.input_, "F32", writer.global_shape, "input"),
    ]
    return [part for part in listed if part.role != "input" or spec.input_scale]


def fused_parts(spec: Spec, out: int, features_in: int, gated: bool) -> list[Part]:
    """The same with a leading E axis on every part; ``gated`` for gate_up_proj."""
    shapes: dict[str, tuple[int, ...]] = {"E": (), "E1": (1,), "E2": (2,) if gated else ()}
    listed = []
    for part in parts(spec, out, features_in):
        scalar = part.role in ("global", "input")
        shape = shapes[spec.fused_globals] if scalar else part.shape
        listed.append(part._replace(shape=(spec.experts, *shape)))
    return listed


def encode(spec: Spec, codes: Codes) -> dict[str, Array]:
    """The codes, scale and zeros of one projection by role, as arrays of what is stored."""
    if spec.writer.layout == "awq":
        stored = {
            "codes": pack_words(codes.q.T, AWQ_ORDER),
            "scale": np.ascontiguousarray(codes.scale.T),
        }
        if codes.z is not None:
            stored["zeros"] = pack_words(codes.z.T, AWQ_ORDER)
        return stored
    if spec.writer.layout == "packed":
        stored = {
            "codes": pack_words(codes.q, PLAIN_ORDER),
            "scale": codes.scale,
            "shape": np.array(codes.q.shape, "<i8"),
        }
        if codes.z is not None and spec.zero_points:
            stored["zeros"] = np.ascontiguousarray(pack_words(codes.z.T, PLAIN_ORDER).T)
        return stored
    return {"codes": pack_pairs(codes.q), "scale": codes.scale}


def decode(spec: Spec, stored: dict[str, Array]) -> tuple[Array, Array | None, Array]:
    """The reverse of :func:`encode`: q, z (8 where absent, None for e2m1) and scale bits."""
    if spec.writer.layout == "pairs":
        return unpack_pairs(stored["codes"]), None, stored["scale"]
    if spec.writer.layout == "awq":
        q = unpack_words(stored["codes"], AWQ_ORDER).T
        scale = np.ascontiguousarray(stored["scale"].T)
        zeros = unpack_words(stored["zeros"], AWQ_ORDER).T if "zeros" in stored else None
    else:
        q, scale = unpack_words(stored["codes"], PLAIN_ORDER), stored["scale"]
        zeros = unpack_words(stored["zeros"].T, PLAIN_ORDER).T if "zeros" in stored else None
    return q, np.full(scale.shape, 8, np.uint8) if zeros is None else zeros, scale

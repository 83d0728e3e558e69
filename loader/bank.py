"""Bank: all local experts of one projection of one layer, in QPN layout (docs/bank.md).

Weight words
    ``(experts, Np / 32, Kp / 8, 32) int32``. Word ``(e, t, k8, c)`` holds eight codes of column
    ``n = 32 t + c``, rows ``k = 8 k8 + j``::

        bit  31..28 27..24 23..20 19..16 15..12 11..8  7..4   3..0
        row   j=7    j=5    j=3    j=1    j=6    j=4    j=2    j=0

    so that a 16-bit half-pair trick yields consecutive rows, and one tile row of 32 words is one
    128-byte line. Kp and Np are K and N padded to multiples of 32; pad codes are 0.

W13 columns are interleaved: column ``2 i`` is gate ``i``, column ``2 i + 1`` is up ``i``.

Metadata planes are ``(experts, G, Np)`` row-major with ``G = ceil((phase + K) / group)``; row k
belongs to group ``(phase + k) // group``. ``TENSORS`` below names the tensors of every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch

from loader.errors import UnsupportedError

TILE = 32
"""Columns of one tile, and the multiple that K and N are padded to."""

ROWS_PER_WORD = 8
"""Consecutive K in one weight word."""

NIBBLE_OF_ROW = (0, 4, 1, 5, 2, 6, 3, 7)
"""Code j of a word sits at bits ``4 p .. 4 p + 3`` with ``p = NIBBLE_OF_ROW[j]``."""

KINDS = ("int4", "e2m1", "plain", "absent")
LAYOUTS = ("compact", "record", "wide", "plain")
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.uint8)
GLOBAL_SENSES = ("none", "multiplier", "divisor")

E2M1_VALUES = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    -0.0,
    -0.5,
    -1.0,
    -1.5,
    -2.0,
    -3.0,
    -4.0,
    -6.0,
)
"""Value of each e2m1 code: bit 3 is the sign (OCP Microscaling formats, FP4 E2M1)."""


def pad(size: int) -> int:
    """``size`` rounded up to a multiple of 32."""
    return -(-size // TILE) * TILE


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape, dtype and accounting category of one tensor of a bank."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    category: str

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class BankSpec:
    """Everything about a bank except its bytes.

    ``k``, ``n`` are this card's logical sizes; ``group`` and ``phase`` count rows of K;
    ``projections`` is 2 where gate and up are interleaved, else 1; ``scale_dtype`` is the dtype of
    the checkpoint's scales (uint8 for e4m3 bytes), for ``plain`` the dtype of the weights;
    ``global_sense`` says how the fp32 globals of NVFP4 apply.
    """

    kind: str
    layout: str
    experts: int
    k: int
    n: int
    group: int
    phase: int
    projections: int
    scale_dtype: torch.dtype
    global_sense: str = "none"

    @property
    def k_padded(self) -> int:
        """Kp: K padded to whole tiles."""
        return pad(self.k)

    @property
    def n_padded(self) -> int:
        """Np: N padded to whole tiles."""
        return pad(self.n)

    @property
    def groups(self) -> int:
        """Scale groups along K, the first and last possibly cut by the slice."""
        return -(-(self.phase + self.k) // self.group)

    @property
    def columns(self) -> int:
        """Columns of one projection: I_local for gate and for up, H for down."""
        return self.n // self.projections

    def tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors of this bank, in the order that operators take them."""
        return _TENSORS[self.kind, self.layout](self)

    def nbytes(self, category: str | None = None) -> int:
        """Bytes of the bank, or of one accounting category of it."""
        return sum(t.nbytes for t in self.tensors() if category in (None, t.category))

    def with_layout(self, layout: str) -> BankSpec:
        """The same bank under another metadata layout."""
        return BankSpec(**{**self.__dict__, "layout": layout})


def _weight(spec: BankSpec) -> TensorSpec:
    shape = (spec.experts, spec.n_padded // TILE, spec.k_padded // ROWS_PER_WORD, TILE)
    return TensorSpec("weight", shape, torch.int32, "weight")


def _plane(
    spec: BankSpec, name: str, dtype: torch.dtype, per_byte: int = 1, *last: int
) -> TensorSpec:
    shape = (spec.experts, spec.groups, spec.n_padded // per_byte, *last)
    return TensorSpec(name, shape, dtype, "metadata")


def _globals(spec: BankSpec) -> TensorSpec:
    return TensorSpec("globals", (spec.experts, spec.projections), torch.float32, "globals")


_TENSORS: Mapping[tuple[str, str], Callable[[BankSpec], tuple[TensorSpec, ...]]] = {
    # int32 = scale (fp16, low half) and bias = fp16(-z * scale) (high half)
    ("int4", "wide"): lambda s: (_weight(s), _plane(s, "metadata", torch.int32)),
    # three bytes: scale little-endian, zero point
    ("int4", "record"): lambda s: (_weight(s), _plane(s, "metadata", torch.uint8, 1, 3)),
    # scales as in the checkpoint; zero points two per byte, even column in the low nibble
    ("int4", "compact"): lambda s: (
        _weight(s),
        _plane(s, "scales", s.scale_dtype),
        _plane(s, "zeros", torch.uint8, 2),
    ),
    # fp16(fp32(e4m3 o global)): the one layout that rounds
    ("e2m1", "wide"): lambda s: (_weight(s), _plane(s, "metadata", torch.float16)),
    # the checkpoint's e4m3 byte, and its fp32 globals as they stand
    ("e2m1", "compact"): lambda s: (_weight(s), _plane(s, "scales", torch.uint8), _globals(s)),
    ("absent", "plain"): lambda s: (),
    ("plain", "plain"): lambda s: (
        TensorSpec("weight", (s.experts, s.n, s.k), s.scale_dtype, "unquantized"),
    ),
}


ABSENT = BankSpec("absent", "plain", 1, 1, 1, 1, 0, 1, torch.float16)
"""No bank: W13 of a linear outside the experts, which is W2 of a layer of one expert."""


@dataclass(frozen=True)
class LayerSpec:
    """The two banks of one MoE layer and how their numbers are meant.

    ``awq_rounding`` is ``exact`` or ``fused_bias``. ``to_ints`` is the form that operators take;
    ``csrc/`` mirrors its order.
    """

    w13: BankSpec
    w2: BankSpec
    awq_rounding: str = "exact"

    @property
    def banks(self) -> tuple[BankSpec, BankSpec]:
        """W13 and W2."""
        return (self.w13, self.w2)

    @property
    def checks_fp16(self) -> bool:
        """True where every scale must be held by fp16 (docs/bank.md)."""
        return self.w2.layout in ("wide", "record") or self.awq_rounding == "fused_bias"

    def nbytes(self, category: str | None = None) -> int:
        """Bytes of both banks, or of one accounting category of them."""
        return self.w13.nbytes(category) + self.w2.nbytes(category)

    def to_ints(self) -> list[int]:
        """Flat integers: rounding, then ten numbers for each bank."""
        numbers = [int(self.awq_rounding == "fused_bias")]
        for bank in self.banks:
            numbers += [
                KINDS.index(bank.kind),
                LAYOUTS.index(bank.layout),
                bank.experts,
                bank.k,
                bank.n,
                bank.group,
                bank.phase,
                bank.projections,
                SCALE_DTYPES.index(bank.scale_dtype),
                GLOBAL_SENSES.index(bank.global_sense),
            ]
        return numbers


def layer_spec_from_ints(numbers: list[int]) -> LayerSpec:
    """The reverse of :meth:`LayerSpec.to_ints`."""
    return _layer_spec(tuple(numbers))


@lru_cache(maxsize=1024)
def _layer_spec(numbers: tuple[int, ...]) -> LayerSpec:
    def bank(part: tuple[int, ...]) -> BankSpec:
        kind, layout, experts, k, n, group, phase, projections, dtype, sense = part
        return BankSpec(
            KINDS[kind],
            LAYOUTS[layout],
            experts,
            k,
            n,
            group,
            phase,
            projections,
            SCALE_DTYPES[dtype],
            GLOBAL_SENSES[sense],
        )

    rounding = "fused_bias" if numbers[0] else "exact"
    return LayerSpec(bank(numbers[1:11]), bank(numbers[11:21]), rounding)


Tensors = dict[str, torch.Tensor]
"""Tensors of one bank by name."""


def named(spec: BankSpec, tensors: Sequence[torch.Tensor]) -> Tensors:
    """Bank tensors by name, from the order of ``BankSpec.tensors``."""
    return {t.name: tensor for t, tensor in zip(spec.tensors(), tensors, strict=True)}


def split_banks(layer: LayerSpec, banks: Sequence[torch.Tensor]) -> tuple[Tensors, Tensors]:
    """The flat list that operators take, as tensors by name for W13 and for W2."""
    count = len(layer.w13.tensors())
    return named(layer.w13, banks[:count]), named(layer.w2, banks[count:])


def check_group(group: int, layer: int | None = None) -> None:
    """Refuse group sizes that the bank's phase rule cannot serve (a multiple of 16 is needed)."""
    if group < 16 or group % 16:
        raise UnsupportedError(
            "group size is not supported",
            layer=layer,
            expected="a multiple of 16 (32, 64 and 128 are usual), or -1 for a whole row",
            found=group,
        )


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit codes ``(K, N) uint8`` into words ``(Np / 32, Kp / 8, 32) int32``; pads are 0."""
    k, n = codes.shape
    words = pack_rows(codes)
    padded = words.new_zeros((pad(k) // ROWS_PER_WORD, pad(n)))
    padded[: words.shape[0], :n] = words
    return padded.reshape(-1, pad(n) // TILE, TILE).transpose(0, 1).contiguous()


def pack_rows(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes ``(K, N) uint8`` along K into words ``(ceil(K / 8), N) int32``, untiled."""
    k, n = codes.shape
    words = torch.zeros((-(-k // ROWS_PER_WORD), n), dtype=torch.int32, device=codes.device)
    for row, nibble in enumerate(NIBBLE_OF_ROW):
        rows = codes[row::ROWS_PER_WORD].to(torch.int32)
        words[: rows.shape[0]] |= rows << (4 * nibble)
    return words


def unpack_codes(words: torch.Tensor, k: int, n: int) -> torch.Tensor:
    """Unpack words ``(tiles, Kp / 8, 32) int32`` into codes ``(K, N) uint8``."""
    tiles, k8, _ = words.shape
    codes = torch.empty((k8, ROWS_PER_WORD, tiles, TILE), dtype=torch.uint8, device=words.device)
    by_row = words.transpose(0, 1)
    for row, nibble in enumerate(NIBBLE_OF_ROW):
        codes[:, row] = ((by_row >> (4 * nibble)) & 0xF).to(torch.uint8)
    return codes.reshape(k8 * ROWS_PER_WORD, tiles * TILE)[:k, :n]


def pack_zeros(zeros: torch.Tensor) -> torch.Tensor:
    """Pack zero points ``(..., N) uint8`` two per byte, the even column in the low nibble."""
    return zeros[..., 0::2] | (zeros[..., 1::2] << 4)


def unpack_zeros(packed: torch.Tensor) -> torch.Tensor:
    """Unpack ``(..., N / 2) uint8`` into zero points ``(..., N) uint8``."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def group_of_rows(spec: BankSpec, device: torch.device) -> torch.Tensor:
    """Group of each of the K rows, ``(K,) int64``, clamped to the last group."""
    rows = torch.arange(spec.k, device=device)
    return ((rows + spec.phase) // spec.group).clamp_(max=spec.groups - 1)


def initialise(spec: BankSpec, tensors: Mapping[str, torch.Tensor], zero_point: int | None) -> None:
    """Give every byte that no source tensor will write its value: pads, and absent zero points.

    ``tensors`` are fresh (their bytes are undefined); ``zero_point`` is the symmetric one where the
    checkpoint stores none, else None.
    """
    if spec.kind in ("plain", "absent"):
        return
    weight = tensors["weight"]
    weight[:, spec.n // TILE :, :, spec.n % TILE :] = 0
    weight[:, :, spec.k // ROWS_PER_WORD :, :] = 0
    for tensor in spec.tensors():
        if tensor.category != "metadata":
            continue
        plane = tensors[tensor.name]
        columns = tensor.shape[2] * spec.n // spec.n_padded
        plane[:, :, columns:] = 0
        if zero_point is not None and tensor.name == "zeros":
            plane[:, :, :columns] = zero_point | (zero_point << 4)
        elif zero_point is not None and spec.layout == "record":
            plane[:, :, :columns, 2] = zero_point
        elif zero_point is not None and spec.kind == "int4" and spec.layout == "wide":
            plane[:, :, :columns] = zero_point << 16

"""What a synthetic checkpoint is to be: one frozen record of every setting, checked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from loader.errors import UnsupportedError
from loader.testing.dialect import DIALECTS, Dialect
from loader.testing.family import FAMILIES, Family

PROJECTIONS = ("gate", "up", "down")


class Settings(TypedDict, total=False):
    """What a caller may choose; None means the default of the dialect or the family.

    ``dialect``, ``family``: rows of ``DIALECTS`` and ``FAMILIES``. ``hidden``, ``intermediate``,
    ``experts``, ``top_k``: H, I, E, k. ``layers`` counts dense layers too. ``group``: inputs that
    share a scale, 128, or 16 for NVFP4; -1 for one scale per output. ``scale_dtype``: F16, BF16 or
    F32. ``symmetric``: zero points of 8. ``input_scale``: NVFP4 activation scales are written.

    ``shards``: files, cut by size alone. ``order`` of payloads in a file: ``name``, ``dtype`` (as
    the safetensors package), or ``random`` within a layer. ``prefix``: what stands before
    ``layers.``. ``fused``: experts as one tensor with a leading E axis; ``fused_globals``: NVFP4
    globals of those, ``E``, ``E1`` for [E, 1], or ``E2`` for [E, 2] on gate_up and [E] on down.

    ``excluded``: layers with plain experts, on the ignore list. ``dense``: layers with a 4-bit
    mlp. ``extra_layers``: draft layers past ``layers`` with plain experts, named nowhere.
    ``shared_expert``: ``none``, ``bf16`` or ``quantized``. ``attention``: True (4-bit), ``plain``,
    or False (no attention tensors). ``plain_dtype``: BF16 or F16 for what is not quantized.

    ``payload``: ``random``; ``fast`` for GBs at the speed of the disk; ``sparse`` for headers
    alone, with files at full size. ``vocabulary``: rows of embedding and lm_head.
    """

    dialect: str
    family: str
    hidden: int
    intermediate: int
    experts: int
    layers: int
    top_k: int
    group: int | None
    scale_dtype: str | None
    symmetric: bool | None
    input_scale: bool | None
    seed: int
    shards: int
    order: str
    prefix: str | None
    fused: bool
    fused_globals: str
    excluded: Sequence[int]
    dense: Sequence[int]
    extra_layers: int
    shared_expert: str | None
    attention: bool | str
    plain_dtype: str | None
    payload: str
    vocabulary: int


DEFAULTS: Settings = {
    "dialect": "awq-gemm",
    "family": "qwen3-moe",
    "hidden": 256,
    "intermediate": 512,
    "experts": 8,
    "layers": 2,
    "top_k": 2,
    "group": None,
    "scale_dtype": None,
    "symmetric": None,
    "input_scale": None,
    "seed": 0,
    "shards": 1,
    "order": "name",
    "prefix": None,
    "fused": False,
    "fused_globals": "E",
    "excluded": (),
    "dense": (),
    "extra_layers": 0,
    "shared_expert": None,
    "attention": True,
    "plain_dtype": None,
    "payload": "random",
    "vocabulary": 64,
}


@dataclass(frozen=True, kw_only=True)
class Spec:
    """:class:`Settings` with every default resolved, and whether ``zero_points`` are stored."""

    dialect: str
    family: str
    hidden: int
    intermediate: int
    experts: int
    layers: int
    top_k: int
    group: int
    scale_dtype: str
    symmetric: bool
    zero_points: bool
    input_scale: bool
    seed: int
    shards: int
    order: str
    prefix: str
    fused: bool
    fused_globals: str
    excluded: tuple[int, ...]
    dense: tuple[int, ...]
    extra_layers: int
    shared_expert: str
    attention: bool | str
    plain_dtype: str
    payload: str
    vocabulary: int

    @property
    def writer(self) -> Dialect:
        """The dialect's row of the table."""
        return DIALECTS[self.dialect]

    @property
    def naming(self) -> Family:
        """The family's row of the table."""
        return FAMILIES[self.family]

    @property
    def dense_width(self) -> int:
        """Width of the mlp of a dense layer; twice I, so that it is never taken for an expert."""
        return 2 * self.intermediate

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers below ``layers`` that have experts, quantized or not."""
        return tuple(layer for layer in range(self.layers) if layer not in self.dense)

    @property
    def quantized_layers(self) -> tuple[int, ...]:
        """Layers whose experts are 4-bit."""
        return tuple(layer for layer in self.moe_layers if layer not in self.excluded)

    def groups(self, features_in: int) -> int:
        """Scales along K inputs: ceil(K / group)."""
        return 1 if self.group == -1 else -(-features_in // self.group)

    def size(self, projection: str) -> tuple[int, int]:
        """(out, in) of one expert's projection."""
        if projection == "down":
            return self.hidden, self.intermediate
        return self.intermediate, self.hidden

    def plain(self, layer: int) -> bool:
        """Whether the experts of a layer are bf16 or fp16 ``weight``."""
        return layer in self.excluded or layer >= self.layers


CHOICES = {
    "order": ("name", "dtype", "random"),
    "payload": ("random", "fast", "sparse"),
    "scale_dtype": ("F16", "BF16", "F32", "F8_E4M3"),
    "fused_globals": ("E", "E1", "E2"),
    "shared_expert": ("none", "bf16", "quantized"),
    "attention": (True, False, "plain"),
    "plain_dtype": ("BF16", "F16"),
}


def resolve(settings: Settings) -> Spec:
    """Put in the defaults and refuse what the tables do not know or what cannot be packed."""
    unknown = settings.keys() - DEFAULTS.keys()
    if unknown:
        raise UnsupportedError("unknown settings", found=", ".join(sorted(unknown)))
    chosen: dict[str, Any] = {**DEFAULTS, **settings}
    for field, choices in (("dialect", tuple(DIALECTS)), ("family", tuple(FAMILIES))):
        _check_choice(field, choices, chosen[field])
    writer, naming = DIALECTS[chosen["dialect"]], FAMILIES[chosen["family"]]
    floats = writer.kind == "e2m1"
    fixed = (chosen["group"], chosen["scale_dtype"], chosen["symmetric"])
    if floats and any(
        value not in (None, only) for value, only in zip(fixed, (16, "F8_E4M3", True), strict=True)
    ):
        raise UnsupportedError("NVFP4 has no such choice", expected="group 16, e4m3", found=fixed)
    symmetric = writer.symmetric if chosen["symmetric"] is None else chosen["symmetric"]
    defaults = {
        "group": 16 if floats else 128,
        "scale_dtype": writer.scale_dtype,
        "symmetric": writer.symmetric,
        "input_scale": chosen["dialect"] == "modelopt-nvfp4",
        "prefix": naming.prefix,
        "shared_expert": naming.shared_default,
        "plain_dtype": writer.plain_dtype,
    }
    for field, value in defaults.items():
        chosen[field] = value if chosen[field] is None else chosen[field]
    # GPTQModel stores zero points of 8 although it calls the checkpoint symmetric.
    chosen["zero_points"] = not floats and (not symmetric or writer.writes_eights)
    chosen["excluded"], chosen["dense"] = tuple(chosen["excluded"]), tuple(chosen["dense"])
    spec = Spec(**chosen)
    _check(spec)
    return spec


def _check_choice(field: str, choices: tuple[object, ...], value: object) -> None:
    if value not in choices:
        expected = " | ".join(map(str, choices))
        raise UnsupportedError(f"unknown {field}", expected=expected, found=value)


def _check(spec: Spec) -> None:
    for field, choices in CHOICES.items():
        _check_choice(field, choices, getattr(spec, field))
    unit = 16 if spec.writer.kind == "e2m1" else 8
    for field in ("hidden", "intermediate"):
        size = getattr(spec, field)
        if size % unit:
            raise UnsupportedError(
                f"{field} cannot be packed", expected=f"a multiple of {unit}", found=size
            )
    if set(spec.excluded) & set(spec.dense):
        raise UnsupportedError("a layer is both excluded and dense", found=spec.excluded)
    first = tuple(range(len(spec.dense)))
    if spec.naming.dense_key == "first_k_dense_replace" and spec.dense != first:
        raise UnsupportedError("dense layers come first here", expected=first, found=spec.dense)

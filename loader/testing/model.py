"""The modules of a synthetic model in the order a real tool writes them, and their tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from loader.testing.dialect import Part, fused_parts, parts
from loader.testing.spec import PROJECTIONS, Spec

HEADS, KEY_HEADS = 4, 2


class Linear(NamedTuple):
    """A linear module of logical size (out, in).

    ``experts``: (expert, projection) pairs for routed experts, empty for any other module. A
    fused module lists the pairs of all experts, gate before up within each. ``layer`` is -1
    outside of layers.
    """

    name: str
    out: int
    features_in: int
    quantized: bool
    layer: int
    experts: tuple[tuple[int, str], ...] = ()
    fused: bool = False


class Vector(NamedTuple):
    """A tensor that is no linear module: norm, embedding, correction bias."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Entry(NamedTuple):
    """One tensor to write: its name, dtype, shape, and the module and part it comes from."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    module: Linear | Vector
    role: str
    layer: int


def _whole_layer_plain(spec: Spec, layer: int) -> bool:
    """AWQ excludes by substring of the layer's name, so attention and shared experts go along."""
    return spec.plain(layer) and (spec.writer.layout == "awq" or layer >= spec.layers)


def _attention(spec: Spec, layer: int) -> Iterator[Linear]:
    if not spec.attention:
        return
    key_width = spec.hidden // HEADS * KEY_HEADS
    quantized = spec.attention is True and not _whole_layer_plain(spec, layer)
    for letter, out in (("q", spec.hidden), ("k", key_width), ("v", key_width), ("o", spec.hidden)):
        name = f"{spec.prefix}layers.{layer}.self_attn.{letter}_proj"
        yield Linear(name, out, spec.hidden, quantized, layer)


def expert_module(spec: Spec, layer: int, expert: int, projection: str) -> str:
    """The module name of one projection; for fused experts the fused module that holds it."""
    base = f"{spec.prefix}layers.{layer}.{spec.naming.block}.experts."
    if spec.fused:
        return base + ("down_proj" if projection == "down" else "gate_up_proj")
    return f"{base}{expert}.{spec.naming.projections[projection]}"


def _experts(spec: Spec, layer: int) -> Iterator[Linear]:
    quantized = not spec.plain(layer)
    if spec.fused:
        gated = tuple((e, p) for e in range(spec.experts) for p in ("gate", "up"))
        down = tuple((e, "down") for e in range(spec.experts))
        width, hidden = spec.intermediate, spec.hidden
        name = expert_module(spec, layer, 0, "gate")
        yield Linear(name, 2 * width, hidden, quantized, layer, gated, True)
        name = expert_module(spec, layer, 0, "down")
        yield Linear(name, hidden, width, quantized, layer, down, True)
        return
    for expert in range(spec.experts):
        for projection in PROJECTIONS:
            name = expert_module(spec, layer, expert, projection)
            pair = ((expert, projection),)
            yield Linear(name, *spec.size(projection), quantized, layer, pair)


def _mlp(spec: Spec, base: str, width: int, quantized: bool, layer: int) -> Iterator[Linear]:
    """A gated mlp with the usual names: a dense layer's, or a shared expert's."""
    yield Linear(f"{base}.gate_proj", width, spec.hidden, quantized, layer)
    yield Linear(f"{base}.up_proj", width, spec.hidden, quantized, layer)
    yield Linear(f"{base}.down_proj", spec.hidden, width, quantized, layer)


def _block(spec: Spec, layer: int) -> Iterator[Linear | Vector]:
    family, base = spec.naming, f"{spec.prefix}layers.{layer}"
    if layer in spec.dense:
        yield from _mlp(spec, f"{base}.mlp", spec.dense_width, True, layer)
        return
    block = f"{base}.{family.block}"
    yield from _experts(spec, layer)
    yield Linear(f"{block}.gate", spec.experts, spec.hidden, False, layer)
    if family.router_bias:
        yield Vector(f"{block}.{family.router_bias}", "F32", (spec.experts,))
    if spec.shared_expert != "none":
        quantized = spec.shared_expert == "quantized" and not _whole_layer_plain(spec, layer)
        yield from _mlp(spec, f"{block}.{family.shared}", spec.intermediate, quantized, layer)
        if family.shared_gate:
            yield Linear(f"{block}.{family.shared_gate}", 1, spec.hidden, False, layer)


def modules(spec: Spec) -> Iterator[Linear | Vector]:
    """Every module of the model, extra layers included."""
    plain, hidden = spec.plain_dtype, spec.hidden
    yield Vector(f"{spec.prefix}embed_tokens.weight", plain, (spec.vocabulary, hidden))
    for layer in range(spec.layers + spec.extra_layers):
        base = f"{spec.prefix}layers.{layer}"
        yield Vector(f"{base}.input_layernorm.weight", plain, (hidden,))
        yield from _attention(spec, layer)
        yield Vector(f"{base}.post_attention_layernorm.weight", plain, (hidden,))
        yield from _block(spec, layer)
    yield Vector(f"{spec.prefix}norm.weight", plain, (hidden,))
    yield Linear("lm_head", spec.vocabulary, hidden, False, -1)


def _linear_parts(spec: Spec, module: Linear) -> list[Part]:
    size = (module.out, module.features_in)
    if not module.quantized:
        shape = (spec.experts, *size) if module.fused else size
        return [Part("weight", spec.plain_dtype, shape, "plain")]
    if module.fused:
        return fused_parts(spec, *size, gated=module.experts[1][1] == "up")
    return parts(spec, *size)


def entries(spec: Spec) -> Iterator[Entry]:
    """Every tensor of the model in model order."""
    listed: dict[tuple[int, int, bool, bool, bool], list[Part]] = {}
    layer = -1
    for module in modules(spec):
        if isinstance(module, Vector):
            name = module.name
            layer = int(name.split(".layers.")[1].split(".")[0]) if ".layers." in name else -1
            yield Entry(name, module.dtype, module.shape, module, "vector", layer)
            continue
        # Parts depend on the size alone; a model of 100,000 modules has a handful of sizes.
        gated = len(module.experts) > 1 and module.experts[1][1] == "up"
        key = (module.out, module.features_in, module.quantized, module.fused, gated)
        found = listed.get(key)
        if found is None:
            found = listed[key] = _linear_parts(spec, module)
        for part in found:
            name = f"{module.name}.{part.name}"
            yield Entry(name, part.dtype, part.shape, module, part.role, module.layer)

"""The bytes of each tensor of a synthetic checkpoint, and the files they go to.

Bounded memory: random payloads are encoded one module at a time and handed out part by part, fast
payloads are windows of one tile, sparse payloads are never written at all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from loader.testing.container import NUMPY_DTYPES, byte_count, header_bytes, write_index
from loader.testing.dialect import encode
from loader.testing.encode import Array, from_bits, to_bits
from loader.testing.model import Entry, Linear, Vector, entries
from loader.testing.spec import Spec
from loader.testing.values import (
    SCALE_STEPS,
    Codes,
    draw_codes,
    draw_global,
    draw_plain,
    expert_codes,
    lowest_block_value,
    lowest_scale_bits,
    named_stream,
    stream,
)

Progress = Callable[[int, int], None]
"""Called with the bytes written so far and the bytes in all."""

TILE_BYTES = 1 << 23
FAST_BLOCK_BYTE = 0x38
"""First e4m3 byte of every fast payload: 1.0, so that the globals carry the magnitude."""


def _module_codes(spec: Spec, module: Linear) -> list[Codes]:
    """One :class:`Codes` for each (expert, projection) of a module, or one of its own."""
    if module.experts:
        return [expert_codes(spec, module.layer, e, p) for e, p in module.experts]
    rng = named_stream(spec, module.name)
    multiplier = np.float32(lowest_block_value(module.features_in))
    global_ = np.float32(1) / multiplier if spec.writer.divisor else multiplier
    pair = (FAST_BLOCK_BYTE, np.float32(global_))
    return [draw_codes(spec, rng, module.out, module.features_in, pair)]


def _join(codes: list[Codes]) -> Codes:
    """Gate and up as one projection, gate rows first; their globals are stored apart."""
    if len(codes) == 1:
        return codes[0]
    z = None if codes[0].z is None else np.concatenate([c.z for c in codes if c.z is not None])
    q, scale = (np.concatenate([getattr(c, field) for c in codes]) for field in ("q", "scale"))
    return Codes(q, z, scale, codes[0].global_scale)


def _encode_module(spec: Spec, module: Linear) -> dict[str, Array]:
    """The stored arrays of a quantized module by role; ``global`` and ``input`` not yet shaped."""
    codes = _module_codes(spec, module)
    run = len(codes) // spec.experts if module.fused else 1
    encoded = [encode(spec, _join(codes[i : i + run])) for i in range(0, len(codes), run)]
    stored = {
        role: np.stack([part[role] for part in encoded]) if module.fused else encoded[0][role]
        for role in encoded[0]
    }
    if spec.writer.kind == "e2m1":
        two = module.fused and run == 2 and spec.fused_globals == "E2"
        picked = codes if two else codes[::run]
        stored["global"] = np.array([c.global_scale for c in picked], "<f4")
        stored["input"] = np.linspace(0.5, 2.0, len(picked), dtype="<f4")
    return stored


def _plain_module(spec: Spec, module: Linear) -> Array:
    """Bits of an unquantized linear module, fused experts stacked along E."""
    if not module.experts:
        return draw_plain(spec, named_stream(spec, module.name), module.out, module.features_in)
    drawn = [
        draw_plain(spec, stream(spec, module.layer, expert, projection), *spec.size(projection))
        for expert, projection in module.experts
    ]
    if not module.fused:
        return drawn[0]
    run = len(drawn) // spec.experts
    return np.stack([np.concatenate(drawn[i : i + run]) for i in range(0, len(drawn), run)])


class RandomPayload:
    """Distinct values everywhere; an encoded module is kept until its last part is taken."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._kept: dict[str, dict[str, Array]] = {}

    def chunks(self, entry: Entry) -> Iterator[memoryview | bytes]:
        """The bytes of one tensor."""
        module = entry.module
        if isinstance(module, Vector):
            rng = named_stream(self._spec, entry.name)
            values = 1 + 0.1 * rng.standard_normal(entry.shape, np.float32)
            yield to_bits(values, entry.dtype).tobytes()
        elif entry.role == "plain":
            yield _plain_module(self._spec, module).tobytes()
        else:
            if module.name not in self._kept:
                self._kept[module.name] = _encode_module(self._spec, module)
            parts = self._kept[module.name]
            yield parts.pop(entry.role).tobytes()
            if not parts:
                del self._kept[module.name]


class FastPayload:
    """Windows of prepared tiles: any nibbles, scales of the usual magnitude, exact globals."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._tiles: dict[tuple[str, str, int], memoryview] = {}
        self._at = 0

    def _tile(self, entry: Entry, features_in: int) -> memoryview:
        key = (entry.role, entry.dtype, features_in if entry.role in ("scale", "plain") else 0)
        if key not in self._tiles:
            self._tiles[key] = memoryview(self._fill(*key).tobytes())
        return self._tiles[key]

    def _fill(self, role: str, dtype: str, features_in: int) -> Array:
        rng = named_stream(self._spec, f"{role} {dtype} {features_in}")
        if role == "zeros" and self._spec.symmetric:
            return np.full(TILE_BYTES, 0x88, np.uint8)
        if role in ("codes", "zeros"):
            return rng.integers(0, 256, TILE_BYTES, np.uint8)
        count = TILE_BYTES // np.dtype(NUMPY_DTYPES[dtype]).itemsize
        if role != "scale":
            root = float(max(features_in, 1)) ** -0.5
            return to_bits(rng.standard_normal(count, np.float32) * np.float32(root), dtype)
        step = rng.integers(0, SCALE_STEPS[dtype], count)
        if dtype == "F8_E4M3":
            return np.asarray(FAST_BLOCK_BYTE + step).astype(np.uint8)
        bits = (lowest_scale_bits(dtype, features_in) + step).astype(np.uint16)
        return to_bits(from_bits(bits, "F16"), "F32") if dtype == "F32" else bits

    def _exact(self, entry: Entry, module: Linear) -> Array:
        spec, size = self._spec, (module.out, module.features_in)
        if entry.role == "shape":
            return np.broadcast_to(np.array(size, "<i8"), entry.shape)
        if entry.role == "input":
            return np.ones(entry.shape, "<f4")
        pairs = module.experts or ((0, "down"),)
        count = byte_count("F32", entry.shape) // 4
        picked = [pairs[i * len(pairs) // count] for i in range(count)]
        layer = max(module.layer, 0)
        drawn = [draw_global(spec, layer, e, p, size[1], FAST_BLOCK_BYTE) for e, p in picked]
        return np.array([global_ for _, global_ in drawn], "<f4")

    def chunks(self, entry: Entry) -> Iterator[memoryview | bytes]:
        """The bytes of one tensor, at most a tile at a time."""
        module = entry.module
        if isinstance(module, Linear) and entry.role in ("shape", "input", "global"):
            yield self._exact(entry, module).tobytes()
            return
        tile = self._tile(entry, module.features_in if isinstance(module, Linear) else 0)
        left = byte_count(entry.dtype, entry.shape)
        while left:
            # Each of 65,536 tensors starts elsewhere (an odd number of 64-byte steps), and 64
            # keeps values of every dtype whole.
            self._at = (self._at + 64 * 40503) % (TILE_BYTES // 2)
            size = min(left, TILE_BYTES - self._at)
            yield tile[self._at : self._at + size]
            left -= size


_BY_WIDTH = {"I64": 0, "F32": 1, "I32": 2, "BF16": 3, "F16": 4, "F8_E4M3": 5, "U8": 6}


def _ordered(spec: Spec, shard: list[Entry]) -> list[Entry]:
    """Payload order in a file: by name, by dtype (as the safetensors package), or shuffled."""
    if spec.order == "name":
        return sorted(shard, key=lambda entry: entry.name)
    if spec.order == "dtype":
        return sorted(shard, key=lambda entry: (_BY_WIDTH[entry.dtype], entry.name))
    rng = random.Random(spec.seed)
    rank = {id(entry): rng.random() for entry in shard}
    return sorted(shard, key=lambda entry: (entry.layer, rank[id(entry)]))


def _cut(spec: Spec) -> tuple[list[list[Entry]], int]:
    """Entries by shard, cut by size alone as the tools do, and the bytes in all."""
    listed = list(entries(spec))
    sizes = [byte_count(entry.dtype, entry.shape) for entry in listed]
    total, done = sum(sizes), 0
    shards: list[list[Entry]] = [[] for _ in range(spec.shards)]
    for entry, size in zip(listed, sizes, strict=True):
        shards[min(spec.shards - 1, done * spec.shards // total)].append(entry)
        done += size
    return shards, total


def write_model(
    folder: Path, spec: Spec, header_lengths: Sequence[int], progress: Progress | None
) -> None:
    """Write all safetensors files and, for more than one, the index."""
    shards, total = _cut(spec)
    source = FastPayload(spec) if spec.payload == "fast" else RandomPayload(spec)
    files: dict[str, str] = {}
    done = 0

    def put(file: BinaryIO, chunk: memoryview | bytes) -> None:
        nonlocal done
        file.write(chunk)
        done += len(chunk)
        if progress is not None:
            progress(done, total)

    for number, shard in enumerate(shards):
        ordered = _ordered(spec, shard)
        name = f"model-{number + 1:05d}-of-{spec.shards:05d}.safetensors"
        name = name if spec.shards > 1 else "model.safetensors"
        length = header_lengths[number] if number < len(header_lengths) else 0
        header, payload_bytes = header_bytes(((e.name, e.dtype, e.shape) for e in ordered), length)
        with open(folder / name, "wb", buffering=1 << 20) as file:
            file.write(header)
            if spec.payload == "sparse":
                file.truncate(len(header) + payload_bytes)
            else:
                for entry in ordered:
                    for chunk in source.chunks(entry):
                        put(file, chunk)
        files.update((entry.name, name) for entry in ordered)
    if spec.shards > 1:
        write_index(folder, files, total)

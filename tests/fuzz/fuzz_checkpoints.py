"""Whole checkpoints that are valid but for a few faults in configs, index, shards or folder."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz_choices import Choices, chance, shuffled
from fuzz_files import LITERALS, make_file

from loader.testing.checkpoint import tiny_checkpoint

CONFIG, QUANT_CONFIG = "config.json", "hf_quant_config.json"
INDEX = "model.safetensors.index.json"

_SIZES: dict[str, Any] = {"hidden": 32, "intermediate": 32, "experts": 2, "vocabulary": 8}
BASES: tuple[dict[str, Any], ...] = (
    {"dialect": "awq-gemm", "group": 32},
    {"dialect": "awq-gemm", "group": 32, "shards": 2, "symmetric": False},
    {"dialect": "awq-gptqmodel", "group": 16, "attention": False},
    {"dialect": "ct-int4", "group": 32, "fused": True, "attention": False},
    {"dialect": "ct-int4-asym", "group": 32, "shards": 2},
    {"dialect": "ct-nvfp4", "shards": 2, "attention": False},
    {"dialect": "ct-nvfp4", "fused": True},
    {"dialect": "modelopt-nvfp4", "shards": 2, "excluded": (1,)},
)

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, -1, 8, 16, 1 << 31, 1 << 40, 1 << 70, 1.5, float("nan")),
    *("", "awq", "silu", "x" * 300, "\x1b[31m", "../x", [], [1, "a"], {}, {"a": {"b": []}}),
)
FILE_NAMES = (
    *("../outside.safetensors", "/etc/hostname", "", "a\0b", ".", "model.bin", "x/../../y"),
    *("absent.safetensors", "linked.safetensors", "inside.safetensors", "pipe.safetensors"),
    *("folder.safetensors", "./model.safetensors", "other.safetensors", "pickle.safetensors"),
)
PICKLE = b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x05false\x85R."
FOREIGN = (
    b"",
    b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123\n",
    b"<!DOCTYPE html><html>",
    b"PK\x03\x04" + bytes(60),
    PICKLE,
)


@dataclass
class Shard:
    """One safetensors file as entries [name, dtype, shape, payload]."""

    entries: list[tuple[str, str, list[int], bytes]]

    @classmethod
    def parse(cls, data: bytes) -> Shard:
        start = 8 + struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:start])
        header.pop("__metadata__", None)
        entries = []
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            payload = data[start + begin : start + end]
            entries.append((name, entry["dtype"], entry["shape"], payload))
        return cls(entries)

    def to_bytes(self) -> bytes:
        parts, offset = [], 0
        for name, dtype, shape, payload in self.entries:
            offsets = [offset, offset + len(payload)]
            entry = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
            parts.append(f"{json.dumps(name)}:{json.dumps(entry)}")
            offset = offsets[1]
        text = ("{" + ",".join(parts) + "}").encode()
        payloads = b"".join(payload for *_, payload in self.entries)
        return struct.pack("<Q", len(text)) + text + payloads


@dataclass
class Checkpoint:
    """A checkpoint in memory: JSON files as values, shards as entries, and what else is there."""

    configs: dict[str, Any]
    shards: dict[str, Shard]
    raw: dict[str, bytes]
    links: dict[str, str]

    def write(self, folder: Path) -> None:
        """The folder on disk; ``outside`` beside it holds what no link may reach."""
        outside = folder.with_name("outside")
        outside.mkdir(parents=True)
        folder.mkdir()
        first = next(iter(self.shards.values()))
        (outside / "stolen.safetensors").write_bytes(first.to_bytes())
        for name, value in self.configs.items():
            (folder / name).write_text(json.dumps(value))
        for name, shard in self.shards.items():
            (folder / name).write_bytes(shard.to_bytes())
        for name, data in self.raw.items():
            (folder / name).unlink(missing_ok=True)
            (folder / name).write_bytes(data)
        for name, target in self.links.items():
            (folder / name).unlink(missing_ok=True)
            if target == "folder":
                (folder / name).mkdir()
            elif target == "pipe":
                os.mkfifo(folder / name)
            else:
                (folder / name).symlink_to(target)


def read_bases(scratch: Path) -> list[Checkpoint]:
    """The valid checkpoints that faults are put into."""
    bases = []
    for number, more in enumerate(BASES):
        made = tiny_checkpoint(scratch / str(number), **{**_SIZES, **more})
        names = [path.name for path in made.folder.iterdir()]
        configs = {
            name: json.loads((made.folder / name).read_text())
            for name in sorted(names)
            if name.endswith(".json")
        }
        shards = {path.name: Shard.parse(path.read_bytes()) for path in made.files()}
        bases.append(Checkpoint(configs, shards, {}, {}))
    return bases


def make_checkpoint(choices: Choices, bases: list[Checkpoint]) -> Checkpoint:
    """One of the bases with none to three faults."""
    base = choices.pick(bases)
    made = Checkpoint(
        json.loads(json.dumps(base.configs)),
        {name: Shard(list(shard.entries)) for name, shard in base.shards.items()},
        {},
        {},
    )
    for _ in range(choices.pick((0, 1, 1, 1, 2, 3))):
        choices.pick(FAULTS)(choices, made)
    return made


def _config(choices: Choices, made: Checkpoint) -> None:
    """One value anywhere in one JSON file is another, or gone."""
    name = choices.pick(sorted(made.configs))
    holder, key = made.configs, name
    while isinstance(holder[key], (dict, list)) and holder[key] and not chance(choices, 5):
        inner = holder[key]
        keys = sorted(inner) if isinstance(inner, dict) else range(len(inner))
        holder, key = inner, choices.pick(list(keys))
    if holder is not made.configs and chance(choices, 4):
        del holder[key]
    else:
        holder[key] = choices.pick(VALUES)


def _config_text(choices: Choices, made: Checkpoint) -> None:
    """One JSON file is cut, or has bytes in it that do not belong."""
    name = choices.pick(sorted(made.configs))
    data = json.dumps(made.configs[name]).encode()
    at = choices.integer(0, len(data))
    made.raw[name] = data[:at] + choices.data(4) + data[at + choices.integer(0, 40) :]


def _index(choices: Choices, made: Checkpoint) -> None:
    """The index names another file for a tensor, or another tensor."""
    index = made.configs.setdefault(
        INDEX,
        {"weight_map": {e[0]: name for name, shard in made.shards.items() for e in shard.entries}},
    )
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        return
    tensor = choices.pick(sorted(weight_map))
    if chance(choices, 3):
        weight_map[tensor + choices.pick((".x", "", "0"))] = weight_map.pop(tensor)
    else:
        weight_map[tensor] = choices.pick((*FILE_NAMES, *made.shards, 3))


def _some_shard(choices: Choices, made: Checkpoint) -> tuple[str, Shard]:
    name = choices.pick(sorted(made.shards))
    return name, made.shards[name]


def _entry(choices: Choices, made: Checkpoint) -> None:
    """One tensor is named otherwise, of another dtype or shape, twice there, or gone."""
    _, shard = _some_shard(choices, made)
    if not shard.entries:
        return
    at = choices.integer(0, len(shard.entries) - 1)
    name, dtype, shape, payload = shard.entries[at]
    how = choices.integer(0, 6)
    if how == 0:
        del shard.entries[at]
    elif how == 1:
        new = name.replace(choices.pick((".0.", ".1.", "expert", "gate", "up", "scale")), ".7.")
        shard.entries[at] = (new, dtype, shape, payload)
    elif how == 2:
        same = {1: ("U8", "I8", "F8_E4M3"), 2: ("F16", "BF16", "I16"), 4: ("F32", "I32", "U32")}
        bytes_each = len(payload) // max(1, _count(shape))
        if bytes_each in same:
            shard.entries[at] = (name, choices.pick(same[bytes_each]), shape, payload)
    elif how == 3:
        shard.entries[at] = (name, dtype, shuffled(choices, shape), payload)
    elif how == 4:
        flat = choices.pick(([_count(shape)], [1, *shape], [*shape, 1], [0, *shape]))
        shard.entries[at] = (name, dtype, flat, b"" if 0 in flat else payload)
    elif how == 5:
        shard.entries.insert(at, (name, dtype, shape, payload))
    else:
        more = payload * choices.integer(0, 2)
        shard.entries[at] = (name, dtype, shape, more)


def _count(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _payload(choices: Choices, made: Checkpoint) -> None:
    """Some bytes of one tensor are others: NaN, Inf, zero, or anything."""
    _, shard = _some_shard(choices, made)
    if not shard.entries:
        return
    at = choices.integer(0, len(shard.entries) - 1)
    name, dtype, shape, payload = shard.entries[at]
    if not payload:
        return
    new = choices.pick((b"\x7f", b"\xff", b"\x00\x7c", b"\x80\x7f", b"\xff" * 8, bytes(4)))
    place = choices.integer(0, len(payload) - 1) // len(new) * len(new)
    changed = (payload[:place] + new + payload[place + len(new) :])[: len(payload)]
    shard.entries[at] = (name, dtype, shape, changed)


def _header_text(choices: Choices, made: Checkpoint) -> None:
    """One shard is another file, or has one literal or byte in its header that does not belong."""
    name, shard = _some_shard(choices, made)
    if chance(choices, 3):
        made.raw[name] = make_file(choices)
        return
    data = shard.to_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    at = choices.integer(8, end - 1)
    literal = choices.pick(LITERALS).encode()
    text = data[8:at] + literal + data[at + choices.integer(0, 3) : end]
    made.raw[name] = struct.pack("<Q", len(text)) + text + data[end:]


def _cut(choices: Choices, made: Checkpoint) -> None:
    """One shard is cut short, or longer than it says."""
    name, shard = _some_shard(choices, made)
    data = shard.to_bytes()
    how = choices.integer(0, 2)
    cut = choices.integer(0, len(data)) if how == 0 else len(data) - choices.integer(1, 64)
    made.raw[name] = data + choices.data(9) if how == 2 else data[:cut]


def _foreign(choices: Choices, made: Checkpoint) -> None:
    """One shard is something else altogether, or a pickle lies beside it."""
    name = choices.pick((*sorted(made.shards), "pickle.safetensors", "pytorch_model.bin"))
    made.raw[name] = choices.pick(FOREIGN)


def _link(choices: Choices, made: Checkpoint) -> None:
    """One file is a link out of the folder or into it, a folder, or a pipe."""
    outside = "../outside/stolen.safetensors"
    name = choices.pick((*sorted(made.shards), "linked.safetensors", "config.json"))
    inside = choices.pick(sorted(made.shards))
    targets = (outside, os.path.join("..", "model", inside), "nowhere", name, "folder", "pipe")
    made.links[name] = choices.pick(targets)


FAULTS: tuple[Callable[[Choices, Checkpoint], None], ...] = (
    *(_config, _config, _config, _config, _entry, _entry, _payload, _payload),
    *(_config_text, _index, _header_text, _cut, _foreign, _link),
)

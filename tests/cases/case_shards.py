"""What the cases of section 1 share: names of shards, and the place of a tensor."""

from __future__ import annotations

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def place(name: str) -> tuple[int, str]:
    """Layer and expert of a tensor name, told apart by splitting."""
    words = name.split(".")
    return int(words[words.index("layers") + 1]), words[words.index("experts") + 1]

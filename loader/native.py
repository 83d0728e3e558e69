"""Operators: the three calls that implementations serve, and which implementation serves a device.

Each schema is defined once, here. The reference registers for the CPU; native code registers
over it where it was built. A device without an implementation is refused, never served by another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loader.reference import TEMPORARY_BYTES, convert, routes
from loader.reference.findings import FIELDS

_LIBRARY = torch.library.Library("qpn", "DEF")
_LIBRARY.define(
    "write(Tensor chunk, Tensor descriptors, Tensor(a!)[] banks, Tensor(b!) cache, int[] spec)"
    " -> Tensor"
)
_LIBRARY.define("finish(Tensor(a!)[] banks, Tensor(b!) cache, int[] spec) -> Tensor")
_LIBRARY.define(
    "moe(Tensor(a!) out, Tensor(b!) scratch, Tensor x, Tensor topk_ids, Tensor topk_weights, "
    "Tensor expert_map, Tensor[] banks, int[] spec, int[] routes) -> ()"
)
_LIBRARY.impl("write", convert.write, "CPU")
_LIBRARY.impl("finish", convert.finish, "CPU")
_LIBRARY.impl("moe", routes.moe, "CPU")


@torch.library.register_fake("qpn::write", lib=_LIBRARY)
def _fake_write(
    chunk: torch.Tensor,
    descriptors: torch.Tensor,
    banks: Sequence[torch.Tensor],
    cache: torch.Tensor,
    spec: list[int],
) -> torch.Tensor:
    return _unknown_findings(chunk)


@torch.library.register_fake("qpn::finish", lib=_LIBRARY)
def _fake_finish(
    banks: Sequence[torch.Tensor], cache: torch.Tensor, spec: list[int]
) -> torch.Tensor:
    return _unknown_findings(cache)


@torch.library.register_fake("qpn::moe", lib=_LIBRARY)
def _fake_moe(
    out: torch.Tensor,
    scratch: torch.Tensor,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor,
    banks: Sequence[torch.Tensor],
    spec: list[int],
    routes: list[int],
) -> None:
    return None


def _unknown_findings(like: torch.Tensor) -> torch.Tensor:
    count = torch.library.get_ctx().new_dynamic_size()
    return like.new_empty((count, len(FIELDS)), dtype=torch.int64)


write = torch.ops.qpn.write
finish = torch.ops.qpn.finish
moe = torch.ops.qpn.moe


@dataclass(frozen=True)
class Implementation:
    """Code that serves all three operators on one kind of device.

    ``dtypes`` are activation dtypes; ``routes`` what it can run; ``kinds`` and ``layouts`` the
    banks that its fast routes read; ``temporary_bytes`` bounds what converting takes beside the
    staging ring and the conversion cache.
    """

    name: str
    device_type: str
    dtypes: tuple[torch.dtype, ...]
    routes: tuple[str, ...]
    kinds: tuple[str, ...]
    layouts: tuple[str, ...]
    group_multiple: int
    temporary_bytes: int


REFERENCE = Implementation(
    name="reference",
    device_type="cpu",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    routes=("qpn_m1", "qpn_grouped", "legacy"),
    kinds=("int4", "e2m1"),
    layouts=("compact", "record", "wide"),
    group_multiple=16,
    temporary_bytes=TEMPORARY_BYTES,
)

_BY_DEVICE = {REFERENCE.device_type: REFERENCE}


def implementation_for(device: torch.device) -> Implementation | None:
    """The implementation that serves a device, or None where nothing does."""
    return _BY_DEVICE.get(device.type)

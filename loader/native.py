"""Operators: the calls that implementations serve, and which implementation serves a device.

Each schema is defined once, here. On the CPU the native core serves where it was built, else the
reference, which stays the oracle of all others (:func:`serving`). On a card the CUDA core serves
where it has code for the card's architecture. A device without an implementation is refused, never
served by another.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch

from loader import card_serving
from loader.core import CORE
from loader.cuda_core import index_of
from loader.errors import UnsupportedError
from loader.host import HostRoutes
from loader.implementation import Implementation as Implementation
from loader.library import WHY_NO_LIBRARY
from loader.reference import TEMPORARY_BYTES, convert, routes
from loader.reference import linear as reference_linear
from loader.reference.findings import FIELDS
from loader.turn import turn_on

_LOG = logging.getLogger(__name__)

_NAMESPACE = "qpn"
_LIBRARY = torch.library.Library(_NAMESPACE, "DEF")
_LIBRARY.define(
    "write(Tensor chunk, Tensor descriptors, Tensor(a!)[] banks, Tensor(b!) cache, int[] spec)"
    " -> Tensor"
)
_LIBRARY.define(
    "read(int file, int file_bytes, Tensor descriptors, Tensor(a!)[] banks, Tensor(b!) cache, "
    "Tensor(c!) buffers, int[] spec) -> Tensor"
)
_LIBRARY.define("finish(Tensor(a!)[] banks, Tensor(b!) cache, int[] spec) -> Tensor")
_LIBRARY.define(
    "moe(Tensor(a!) out, Tensor(b!) scratch, Tensor x, Tensor topk_ids, Tensor topk_weights, "
    "Tensor expert_map, Tensor[] banks, int[] spec, int[] routes) -> ()"
)
_LIBRARY.define(
    "linear(Tensor(a!) out, Tensor(b!) scratch, Tensor x, Tensor? bias, Tensor[] banks, "
    "int[] spec, int[] routes) -> ()"
)

REFERENCE = Implementation(
    name="reference",
    device_type="cpu",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    routes=("qpn_m1", "qpn_grouped", "legacy"),
    kinds=("int4", "e2m1"),
    layouts=("compact", "record", "wide"),
    group_multiple=16,
    temporary_bytes=TEMPORARY_BYTES,
    write=convert.write,
    finish=convert.finish,
    moe=routes.moe,
    scratch_bytes=routes.scratch_bytes,
    fp32_scales=True,
    linear=reference_linear.linear,
    linear_scratch_bytes=reference_linear.linear_scratch_bytes,
    dequantize=reference_linear.dequantize,
)

_NATIVE_TEMPORARY_BYTES = 8 << 20
"""Job lists of a native call and the allocator's own slack."""


def _host() -> Implementation | None:
    if CORE is None:
        return None
    host = HostRoutes(CORE)
    return Implementation(
        name="host",
        device_type="cpu",
        dtypes=REFERENCE.dtypes,
        routes=REFERENCE.routes,
        kinds=REFERENCE.kinds,
        layouts=REFERENCE.layouts,
        group_multiple=REFERENCE.group_multiple,
        temporary_bytes=_NATIVE_TEMPORARY_BYTES,
        write=CORE.write,
        finish=CORE.finish,
        moe=host.moe,
        scratch_bytes=host.scratch_bytes,
        linear=host.linear,
        linear_scratch_bytes=host.linear_scratch_bytes,
        dequantize=CORE.dequantize,
        read=CORE.read,
        threads=CORE.threads,
        buffer_bytes=CORE.buffer_bytes,
        fp32_scales=REFERENCE.fp32_scales,
    )


HOST = _host()
_SERVING: dict[str, Implementation] = {"cpu": HOST or REFERENCE}


def implementation_for(device: torch.device) -> Implementation | None:
    """The implementation that serves a device, or None where nothing does."""
    serving = _SERVING.get(device.type)
    if serving is None and device.type == "cuda":
        return card_serving.of_device(device)[0]
    return serving


def why_nothing_serves(device: torch.device) -> str:
    """Why :func:`implementation_for` has none; empty where there is no more to say."""
    return card_serving.of_device(device)[1] if device.type == "cuda" else ""


def _serving(device: torch.device) -> Implementation:
    """What serves tensors on a device; a device without an implementation is refused."""
    implementation = _SERVING.get(device.type)
    if implementation is None and device.type == "cuda":
        implementation = card_serving.of_card(index_of(device))[0]
    if implementation is None:
        raise UnsupportedError(
            "this build has no native code for the device",
            expected="an implementation for the device",
            found=f"device {device}: {why_nothing_serves(device)}",
        )
    return implementation


def implementations() -> tuple[Implementation, ...]:
    """What serves the devices of this process now, one for each."""
    return tuple(_SERVING.values())


def operators() -> dict[str, torch._ops.OpOverload]:
    """Every operator of this library that torch knows now, by its name: schema and all.

    Asked of torch, not listed here, so that what is generated from it never goes stale.
    """
    found = {}
    for qualified in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, name = qualified.partition("::")
        if namespace == _NAMESPACE:
            packet, _, overload = name.partition(".")
            found[name] = getattr(getattr(torch.ops.qpn, packet), overload or "default")
    return found


@cache
def log_missing_core() -> None:
    """Say once for a process that, and why, the reference serves the host."""
    if CORE is None:
        _LOG.warning("the reference serves the host: %s", WHY_NO_LIBRARY)


@contextmanager
def serving(implementation: Implementation) -> Iterator[None]:
    """Serve a device by another implementation inside the block, such as the reference.

    For comparisons and tests; plans and layers made inside keep the routes they were given.
    """
    before = _SERVING.get(implementation.device_type)
    _SERVING[implementation.device_type] = implementation
    try:
        yield
    finally:
        if before is None:
            del _SERVING[implementation.device_type]
        else:
            _SERVING[implementation.device_type] = before


def _write(
    chunk: torch.Tensor,
    descriptors: torch.Tensor,
    banks: Sequence[torch.Tensor],
    cache: torch.Tensor,
    spec: list[int],
) -> torch.Tensor:
    return _serving(banks[0].device).write(chunk, descriptors, banks, cache, spec)


def _read(
    file: int,
    file_bytes: int,
    descriptors: torch.Tensor,
    banks: Sequence[torch.Tensor],
    cache: torch.Tensor,
    buffers: torch.Tensor,
    spec: list[int],
) -> torch.Tensor:
    implementation = _serving(banks[0].device)
    serve = implementation.read
    if serve is None:
        raise UnsupportedError(
            "this implementation converts from memory only",
            expected="an implementation that reads files",
            found=implementation.name,
        )
    return serve(file, file_bytes, descriptors, banks, cache, buffers, spec)


def _finish(banks: Sequence[torch.Tensor], cache: torch.Tensor, spec: list[int]) -> torch.Tensor:
    return _serving(banks[0].device).finish(banks, cache, spec)


def _moe(
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
    # Inference only: the reference must not record what the native core cannot.
    with torch.no_grad(), turn_on(x.device):
        serve = _serving(x.device).moe
        serve(out, scratch, x, topk_ids, topk_weights, expert_map, banks, spec, routes)


def _linear(
    out: torch.Tensor,
    scratch: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    banks: Sequence[torch.Tensor],
    spec: list[int],
    routes: list[int],
) -> None:
    implementation = _serving(x.device)
    serve = implementation.linear
    if serve is None:
        raise UnsupportedError(
            "this implementation serves no linear from a bank",
            expected="a linear that is dequantized",
            found=implementation.name,
        )
    with torch.no_grad(), turn_on(x.device):
        serve(out, scratch, x, bias, banks, spec, routes)


for _name, _kernel in (
    ("write", _write),
    ("read", _read),
    ("finish", _finish),
    ("moe", _moe),
    ("linear", _linear),
):
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _kernel, _key)


@torch.library.register_fake("qpn::write", lib=_LIBRARY)
def _fake_write(
    chunk: torch.Tensor,
    descriptors: torch.Tensor,
    banks: Sequence[torch.Tensor],
    cache: torch.Tensor,
    spec: list[int],
) -> torch.Tensor:
    return _unknown_findings(chunk)


@torch.library.register_fake("qpn::read", lib=_LIBRARY)
def _fake_read(
    file: int,
    file_bytes: int,
    descriptors: torch.Tensor,
    banks: Sequence[torch.Tensor],
    cache: torch.Tensor,
    buffers: torch.Tensor,
    spec: list[int],
) -> torch.Tensor:
    return _unknown_findings(descriptors)


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


@torch.library.register_fake("qpn::linear", lib=_LIBRARY)
def _fake_linear(
    out: torch.Tensor,
    scratch: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    banks: Sequence[torch.Tensor],
    spec: list[int],
    routes: list[int],
) -> None:
    return None


def _unknown_findings(like: torch.Tensor) -> torch.Tensor:
    count = torch.library.get_ctx().new_dynamic_size()
    return like.new_empty((count, len(FIELDS)), dtype=torch.int64)


write = torch.ops.qpn.write
read = torch.ops.qpn.read
finish = torch.ops.qpn.finish
moe = torch.ops.qpn.moe
linear = torch.ops.qpn.linear

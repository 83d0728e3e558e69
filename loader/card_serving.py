"""Card serving: which native code serves a card, decided from the card's facts alone."""

from __future__ import annotations

from functools import cache

import torch

from loader.card import CardFacts, card_facts
from loader.cuda_core import CUDA_CORE, WHY_NO_CUDA_CORE, CudaCore, index_of
from loader.cuda_linears import CudaLinears
from loader.cuda_routes import ROW_MULTIPLE, CudaRoutes
from loader.implementation import Implementation
from loader.library import usable_cores
from loader.reference import linear as reference_linear


def card_implementation(
    facts: CardFacts, core: CudaCore | None = CUDA_CORE, why: str = WHY_NO_CUDA_CORE
) -> tuple[Implementation | None, str]:
    """What serves a card, decided from its facts alone; or None, and why nothing does."""
    if core is None:
        return None, why
    if not core.has_image(facts.architecture):
        return None, (
            f"native code was built for {core.images()}, and {facts.name} is "
            f"sm_{facts.architecture}"
        )
    kernels = CudaRoutes(core, facts)
    linears = CudaLinears(core, facts.architecture, kernels.dtypes)
    return Implementation(
        name=f"cuda sm_{facts.architecture}",
        device_type="cuda",
        dtypes=kernels.dtypes,
        routes=kernels.routes,
        kinds=kernels.kinds,
        layouts=kernels.layouts,
        group_multiple=kernels.group_multiple,
        temporary_bytes=_CARD_TEMPORARY_BYTES,
        write=core.write,
        finish=core.finish,
        moe=kernels.moe,
        scratch_bytes=kernels.scratch_bytes,
        most_tokens=kernels.most_tokens,
        linear=linears.linear,
        linear_scratch_bytes=linears.scratch_bytes,
        dequantize=reference_linear.dequantize,
        threads=usable_cores(),
        fp32_scales=True,
        row_multiple=ROW_MULTIPLE,
        card=core,
        architecture=facts.architecture,
    ), ""


_CARD_TEMPORARY_BYTES = 64 << 10
"""What the allocator of a card rounds up for the conversion cache and the ring."""


@cache
def of_card(index: int) -> tuple[Implementation | None, str]:
    """Decided once for each card of a process: every step of a layer asks."""
    return card_implementation(card_facts(torch.device("cuda", index)))


def of_device(device: torch.device) -> tuple[Implementation | None, str]:
    """What serves a device of CUDA, which need not exist; or None, and why nothing does."""
    if not torch.cuda.is_available():
        return None, "PyTorch finds no card"
    return of_card(index_of(device))

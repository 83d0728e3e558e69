"""Door: ``from_pretrained``, from a 4-bit MoE checkpoint to a Transformers model."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from loader import memory
from loader.checkpoint.family import FAMILIES, Family
from loader.checkpoint.folder import Checkpoint, open_checkpoint
from loader.checkpoint.hub import located
from loader.checkpoint.json_file import load_json
from loader.checkpoint.model import CONFIG
from loader.checkpoint.source import Source
from loader.errors import UnsupportedError
from loader.integrations.transformers.loading import ModelLoad
from loader.integrations.transformers.report import ModelReport
from loader.integrations.transformers.version import require_version
from loader.lifecycle import Observer
from loader.plan import DEFAULT_STAGING_BYTES, Plan, plan_checkpoint
from loader.policy import Policy
from loader.rollback import ended_once
from loader.shard import Shard

_LOG = logging.getLogger(__name__)
_GENERATION = "generation_config.json"
_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}


@ended_once
def from_pretrained(
    path_or_repo: str | os.PathLike[str] | Source,
    device: str | torch.device = "cpu",
    policy: Policy | None = None,
    dtype: str | torch.dtype = "auto",
    *,
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    observers: Iterable[Observer] = (),
    card_memory: int | None = None,
    family: Family | None = None,
    output_loading_info: bool = False,
    revision: str | None = None,
) -> Any:
    """A Transformers model of a 4-bit MoE checkpoint, ready to ``generate``.

    Routed experts run as :class:`loader.PreparedExperts`, other quantized linears from banks of
    their own or dequantized into ``dtype``, as the plan says fits; everything else is loaded by
    Transformers. No quantizer package is needed and no code of the checkpoint is run.

    ``dtype``: of activations and plain weights; ``auto`` is the config's. The other arguments are
    those of :func:`loader.load`; a repo id of the Hub may have a ``revision``. With
    ``output_loading_info`` the result is the model and its :class:`ModelReport`. Raises a
    :class:`loader.LoaderError`; nothing stays allocated then.
    """
    began = time.perf_counter()
    framework = require_version()
    resolved = (policy or Policy()).resolve()
    families = FAMILIES if family is None else (family, *FAMILIES)
    # What an error would keep alive lives in the frames below this one, which are cleared.
    with (
        memory.nothing_kept(on_card=str(device).startswith("cuda")),
        located(path_or_repo, revision) as opened,
    ):
        make_plan = partial(
            plan_checkpoint,
            shard=Shard(),
            policy=resolved,
            layers=None,
            device=device,
            staging_bytes=staging_bytes,
            card_memory=card_memory,
        )
        start = partial(ModelLoad, framework=framework, observers=tuple(observers), began=began)
        model, report = _load(open_checkpoint(opened, families), make_plan, start, dtype)
    _LOG.info("%s", report.memory_line())
    return (model, report) if output_loading_info else model


def _load(
    checkpoint: Checkpoint,
    make_plan: Callable[[Checkpoint], Plan],
    start: Callable[[Plan], ModelLoad],
    dtype: str | torch.dtype,
) -> tuple[Any, ModelReport]:
    # Here, not above: Transformers is imported when a model is asked for, not before.
    from loader.integrations.transformers import hook

    source = checkpoint.source
    config = hook.config_of(load_json(source, CONFIG, allow_nonfinite=True))
    wanted = _dtype_of(config.dtype if dtype == "auto" else dtype)
    load = start(make_plan(checkpoint))
    model = load.run(hook.class_of(config), config, wanted)
    if _GENERATION in source.list():
        hook.set_generation_config(model, load_json(source, _GENERATION, allow_nonfinite=True))
    model.config.name_or_path = model.name_or_path = source.name
    model.requires_grad_(False)
    return model, load.report(model)


def _dtype_of(asked: object) -> torch.dtype:
    """A dtype by name or value; ``auto`` of a config that states none is float32."""
    if asked is None:
        return torch.float32
    found = _DTYPES.get(str(asked).removeprefix("torch."))
    if found is None:
        raise UnsupportedError(
            "dtype is not one that activations can have",
            expected=f"auto, {', '.join(_DTYPES)}",
            found=repr(asked),
        )
    return found

"""Filling: one vLLM model gets its weights: experts as banks, the rest by vLLM's own loading."""

from __future__ import annotations

import logging

import torch

from loader.checkpoint.folder import Checkpoint
from loader.experts import LoadedExperts
from loader.integrations.vllm.experts import install, moe_layers, shard_of
from loader.integrations.vllm.linears import Names, PlainLinear, plain_linears
from loader.integrations.vllm.quantization import Reasons
from loader.integrations.vllm.settings import Settings
from loader.integrations.vllm.weights import require_complete, weights
from loader.linears import LinearLoader
from loader.native import implementation_for
from loader.pipeline import load
from loader.plan import require_implementation
from loader.report import LoadReport
from loader.table import human_bytes, merged_layers

LOG = logging.getLogger("vllm.qpn_loader")
"""Below vLLM's own logger, so that its handlers and its level are ours."""


def fill(
    model: torch.nn.Module, checkpoint: Checkpoint, settings: Settings, reasons: Reasons
) -> None:
    """Load everything that ``model`` needs from ``checkpoint``.

    ``reasons``: the linears that vLLM cannot run, from ``quantization.take_over``. Raises a
    :class:`loader.LoaderError`.
    """
    layers = moe_layers(model)
    device = _device(next(iter(layers.values())).moe_config.device)
    policy = settings.policy.resolve()
    implementation = require_implementation(device, implementation_for(device))
    config = next(iter(layers.values())).quant_config
    plain = plain_linears(checkpoint, Names(model, config), reasons, policy, implementation)
    experts = load(
        checkpoint.source,
        device,
        shard_of(layers),
        settings.policy,
        list(layers),
        settings.staging_bytes,
    )
    install(layers, experts)
    plans = [one.plan for one in plain.values()]
    with LinearLoader(
        checkpoint, plans, device, implementation, policy, settings.staging_bytes
    ) as linears:
        loaded = model.load_weights(weights(checkpoint, plain, linears))
    require_complete(model, loaded)
    _log(experts, plain)


def _device(device: torch.device | str) -> torch.device:
    """The device with its index: vLLM says ``cuda`` and means the current card."""
    found = torch.device(device)
    if found.type == "cpu" or found.index is not None:
        return found
    return torch.device(found.type, torch.accelerator.current_device_index())


def _log(experts: LoadedExperts, plain: dict[str, PlainLinear]) -> None:
    """Routes of each layer, linears by reason, and the memory of this rank's card."""
    for line in [*_route_lines(experts.report), *_linear_lines(plain)]:
        LOG.info("%s", line)
    LOG.info("experts: %s", experts.report.memory_line())


def _route_lines(report: LoadReport) -> list[str]:
    found: dict[str, list[int]] = {}
    for layer in report.planned["layers"]:
        routes = []
        for route in layer["routes"]:
            first, last = route["tokens"]
            tokens = str(first) if first == last else f"{first}-{'' if last is None else last}"
            name, code, why = route["route"], route["implementation"], route["reason"]
            routes.append(f"{tokens} tokens: {name} by {code} ({why})")
        text = f"{layer['format']}, {layer['metadata_layout']}; {'; '.join(routes)}"
        found.setdefault(text, []).append(layer["layer"])
    return [f"experts of layers {merged_layers(numbers)}: {text}" for text, numbers in found.items()]


def _linear_lines(plain: dict[str, PlainLinear]) -> list[str]:
    found: dict[tuple[str, torch.dtype], list[str]] = {}
    for name, one in plain.items():
        found.setdefault((one.reason, one.dtype), []).append(name)
    lines = []
    for (reason, dtype), names in found.items():
        nbytes = human_bytes(sum(plain[name].plan.nbytes(dtype) for name in names))
        few = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        lines.append(f"{len(names)} linears dequantized to {dtype}, {nbytes}: {few}: {reason}")
    return lines

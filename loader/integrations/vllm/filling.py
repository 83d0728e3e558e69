"""Filling: one vLLM model gets its weights: experts as banks, the rest by vLLM's own loading."""

from __future__ import annotations

import logging
from typing import Any

import torch

from loader.checkpoint.folder import Checkpoint
from loader.integrations.vllm.experts import install, moe_layers, shard_of
from loader.integrations.vllm.linears import BankedLinear, LinearPlanner, OwnLinears
from loader.integrations.vllm.settings import Settings
from loader.integrations.vllm.weights import require_complete, weights
from loader.linears import LinearLoader
from loader.native import implementation_for
from loader.pipeline import load
from loader.report import LoadReport
from loader.route import require_implementation
from loader.table import human_bytes, merged_layers

LOG = logging.getLogger("vllm.qpn_loader")
"""Below vLLM's own logger, so that its handlers and its level are ours."""


def fill(model: Any, checkpoint: Checkpoint, settings: Settings) -> None:
    """Load everything that ``model``, vLLM's, needs from ``checkpoint``. Raises a LoaderError."""
    layers = moe_layers(model)
    first = next(iter(layers.values()))
    device = _device(first.moe_config.device)
    policy = settings.policy.resolve()
    implementation = require_implementation(device, implementation_for(device))
    planner = LinearPlanner(checkpoint, policy, implementation, device)
    own = planner.plan(model, first.quant_config)
    experts = load(
        checkpoint.source,
        device,
        shard_of(layers),
        settings.policy,
        list(layers),
        settings.staging_bytes,
    )
    install(layers, experts)
    with LinearLoader(
        checkpoint, own.plans(), device, implementation, policy, settings.staging_bytes
    ) as linears:
        own.install(linears)
        loaded = model.load_weights(weights(checkpoint, own, linears))
    require_complete(model, loaded)
    for line in [*_route_lines(experts.report), *_bank_lines(own), *_plain_lines(own)]:
        LOG.info("%s", line)
    LOG.info("experts: %s", experts.report.memory_line())


def _device(device: torch.device | str) -> torch.device:
    """The device with its index: vLLM says ``cuda`` and means the current card."""
    found = torch.device(device)
    if found.type == "cpu" or found.index is not None:
        return found
    return torch.device(found.type, torch.accelerator.current_device_index())


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
    return [f"experts of layers {merged_layers(some)}: {text}" for text, some in found.items()]


def _bank_lines(own: OwnLinears) -> list[str]:
    found: dict[str, list[BankedLinear]] = {}
    for one in own.banked:
        found.setdefault(f"{one.plans[0].reason}; vLLM: {one.method.why}", []).append(one)
    lines = []
    for why, linears in found.items():
        plans = [plan for one in linears for plan in one.plans]
        nbytes = human_bytes(sum(plan.bank.nbytes() for plan in plans))
        size = f"{nbytes} on this rank"
        names = _few([plan.name for plan in plans])
        lines.append(f"{len(plans)} linears served from banks, {size}: {names}: {why}")
    return lines


def _plain_lines(own: OwnLinears) -> list[str]:
    found: dict[tuple[str, torch.dtype], list[str]] = {}
    for name, one in own.plain.items():
        found.setdefault((one.why, one.dtype), []).append(name)
    return [
        f"{len(names)} linears dequantized to {dtype}: {_few(names)}: {why}"
        for (why, dtype), names in found.items()
    ]


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")

"""Loads one checkpoint by vLLM within this process and prints, as JSON, what the model then holds.

A script of its own: a process can set up vLLM's parallel state once. Arguments: FOLDER DTYPE.
"""

from __future__ import annotations

import json
import os
import sys

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}

import torch  # noqa: E402
from torch.nn.modules import module as modules  # noqa: E402
from vllm import LLM  # noqa: E402
from vllm.model_executor.layers.fused_moe import RoutedExperts  # noqa: E402

from loader import PreparedExperts  # noqa: E402

#: Names of all parameters that anything ever registered on a layer of experts.
EVER: list[str] = []


def watch(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
    if isinstance(module, RoutedExperts) or "experts" in type(module).__name__.lower():
        EVER.append(f"{type(module).__name__}.{name}")


def held(model: torch.nn.Module) -> dict[str, object]:
    layers = [m for m in model.modules() if isinstance(m, RoutedExperts)]
    linears = {
        name: type(module.quant_method).__name__
        for name, module in model.named_modules()
        if name.endswith(("qkv_proj", "o_proj"))
    }
    return {
        "expert_layers": len(layers),
        "prepared": [type(m.prepared).__name__ for m in layers if m.prepared.layer is not None],
        "is_ours": all(isinstance(m.prepared, PreparedExperts) for m in layers),
        "parameters": [name for m in layers for name, _ in m.named_parameters()],
        "ever": EVER,
        "config": [kind.__name__ for kind in type(layers[0].quant_config).__mro__],
        "linears": linears,
    }


if __name__ == "__main__":
    folder, dtype = sys.argv[1:]
    modules.register_module_parameter_registration_hook(watch)
    llm = LLM(
        folder,
        load_format="qpn",
        dtype=dtype,
        max_model_len=64,
        enforce_eager=True,
        skip_tokenizer_init=True,
    )
    (found,) = llm.apply_model(held)
    print("FOUND " + json.dumps(found))

"""Loads one checkpoint by vLLM within this process; prints as JSON what it holds and generates.

A script of its own: a process can set up vLLM's parallel state once. Arguments: FOLDER, and the
arguments of ``vllm.LLM`` as JSON, with ``prompt`` and ``tokens`` beside them.
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

import torch  # noqa: E402 - after the environment is set
from torch.nn.modules import module as modules  # noqa: E402 - after the environment is set
from vllm import LLM, SamplingParams  # noqa: E402 - after the environment is set
from vllm.model_executor.layers.fused_moe import RoutedExperts  # noqa: E402 - after the environment is set

from loader import PreparedExperts  # noqa: E402 - after the environment is set

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
        "routes": [[route.route for route in m.prepared.routes] for m in layers],
        "is_ours": all(isinstance(m.prepared, PreparedExperts) for m in layers),
        "parameters": [name for m in layers for name, _ in m.named_parameters()],
        "ever": EVER,
        "config": [kind.__name__ for kind in type(layers[0].quant_config).__mro__],
        "linears": linears,
    }


if __name__ == "__main__":
    folder, given = sys.argv[1], json.loads(sys.argv[2])
    prompt, tokens = given.pop("prompt"), given.pop("tokens")
    modules.register_module_parameter_registration_hook(watch)
    llm = LLM(
        folder,
        load_format="qpn",
        max_model_len=64,
        enforce_eager=True,
        skip_tokenizer_init=True,
        **given,
    )
    (found,) = llm.apply_model(held)
    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    (answer,) = llm.generate({"prompt_token_ids": prompt}, greedy, use_tqdm=False)
    print("FOUND " + json.dumps(found | {"tokens": list(answer.outputs[0].token_ids)}))

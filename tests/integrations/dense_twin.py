"""The same model without quantization: every weight decoded by ``linear_oracle``, loaded as ever.

Nothing of the package takes part: the weights are written under the checkpoint's own names, and
Transformers loads them as it loads any checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from linear_oracle import decode, modules_of, quantization, tensors_of
from safetensors.torch import save_file

#: Spellings that Transformers itself does not read, in a checkpoint that is not quantized.
_RESPELL = {
    "mixtral": {
        ".mlp.gate.": ".block_sparse_moe.gate.",
        ".mlp.experts.": ".block_sparse_moe.experts.",
        ".gate_proj.weight": ".w1.weight",
        ".up_proj.weight": ".w3.weight",
        ".down_proj.weight": ".w2.weight",
    }
}


def write_dense(folder: Path, target: Path) -> dict[str, torch.Tensor]:
    """Write the dense twin of a checkpoint; the decoded weights by the checkpoint's names."""
    tensors, config = tensors_of(folder), json.loads((folder / "config.json").read_text())
    setting = quantization(folder)
    packed = modules_of(tensors)
    dense = {f"{module}.weight": decode(tensors, module, setting) for module in packed}
    own = set(packed)
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if module not in own or part == "bias":
            dense[name] = tensor.float() if tensor.is_floating_point() else tensor
    written = dict(dense)
    for before, after in _RESPELL.get(config["model_type"], {}).items():
        written = {name.replace(before, after): tensor for name, tensor in written.items()}
    for place in (config, config.get("text_config", {})):
        place.pop("quantization_config", None)
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(config))
    save_file(
        {n: t.contiguous() for n, t in written.items()},
        target / "model.safetensors",
        metadata={"format": "pt"},
    )
    return dense


def load_dense(folder: Path) -> Any:
    """The twin in fp32 as Transformers loads it, with nothing missing and nothing left over."""
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, experts_implementation="eager"
    )
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    return model.eval()

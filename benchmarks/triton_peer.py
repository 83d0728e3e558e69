"""Triton: vLLM's fused MoE kernel for int4, from its Python sources, as a peer."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
from decode_layer import Layer, Numbers
from peers import Absent, Prepared, Rows, rows_by_expert, swiglu


class Triton:
    """vLLM's module of fused MoE kernels, on its own: what else it imports is not needed."""

    name = "Triton"

    def __init__(self, folder: Path | None) -> None:
        if folder is None:
            raise Absent("no installation was named (--vllm)")
        path = folder / "model_executor/layers/fused_moe/fused_moe.py"
        if not path.exists():
            raise Absent(f"there is no {path.name} in {folder.name}")
        try:
            self._module = _alone(path)
        except Exception as error:  # whatever another's module raises is why it is absent
            raise Absent(f"its module does not load here: {error!r}") from error

    def prepare(self, layer: Layer) -> Prepared:
        """The layer's numbers in the kernel's layout."""
        return _TritonLayer(self._module, layer)


def _alone(path: Path) -> ModuleType:
    """A module of vLLM without vLLM: its own imports, but for Triton, are stand-ins."""
    import triton
    import triton.language

    names = ["vllm", "vllm.model_executor", "vllm.model_executor.layers"]
    for line in path.read_text().splitlines():
        words = line.split()
        if len(words) > 1 and words[0] in ("from", "import") and words[1].startswith("vllm"):
            parts = words[1].split(".")
            names += [".".join(parts[: i + 1]) for i in range(len(parts))]
    stand_ins: dict[str, Any] = {name: MagicMock() for name in names}
    stand_ins["vllm.triton_utils"] = MagicMock(triton=triton, tl=triton.language)
    before = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules.update(stand_ins)
    try:
        spec = importlib.util.spec_from_file_location("peer_fused_moe", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    finally:
        for name, own in before.items():
            if own is None:
                del sys.modules[name]
            else:
                sys.modules[name] = own


class _TritonBank:
    """``words`` (E, N, K / 2) uint8, ``scales`` (E, N, G), ``zeros`` (E, N / 2, G) uint8."""

    def __init__(self, numbers: Sequence[Numbers]) -> None:
        words, scales, zeros = [], [], []
        for own in numbers:
            words.append((own.codes[0::2] | own.codes[1::2] << 4).t().contiguous())
            scales.append(own.scales.t().contiguous())
            zeros.append((own.zeros[:, 0::2] | own.zeros[:, 1::2] << 4).t().contiguous())
        self.words, self.scales, self.zeros = (torch.stack(p) for p in (words, scales, zeros))


class _TritonLayer:
    def __init__(self, module: Any, layer: Layer) -> None:
        self._module, self._geometry = module, layer.geometry
        numbers = zip(*map(layer.numbers, range(layer.geometry.experts)), strict=True)
        self._banks = [_TritonBank(bank) for bank in numbers]

    def rows(self, ids: torch.Tensor) -> Rows:
        tokens = ids.shape[0]
        block = 16 if tokens <= 20 else 32 if tokens <= 40 else 64
        return rows_by_expert(ids, self._geometry.experts, block)

    def run(self, out: torch.Tensor, x: torch.Tensor, router: torch.Tensor, rows: Rows) -> None:
        tokens, top_k = router.shape
        width, hidden = self._geometry.intermediate, self._geometry.hidden
        both = x.new_empty((tokens, top_k, 2 * width))
        inner = x.new_empty((tokens * top_k, width))
        results = x.new_empty((tokens, top_k, hidden))
        self._multiply(both, x, self._banks[0], router, rows, False)
        swiglu(inner, both.view(-1, 2 * width))
        self._multiply(results, inner, self._banks[1], router, rows, True)
        torch.sum(results, 1, out=out)

    def _multiply(
        self,
        out: torch.Tensor,
        rows_in: torch.Tensor,
        bank: _TritonBank,
        router: torch.Tensor,
        rows: Rows,
        weighted: bool,
    ) -> None:
        import triton.language as tl

        try:
            self._module.invoke_fused_moe_wna16_triton_kernel(
                A=rows_in,
                B=bank.words,
                C=out,
                B_scale=bank.scales,
                B_zp=bank.zeros,
                topk_weights=router,
                sorted_token_ids=rows.rows,
                expert_ids=rows.experts,
                num_tokens_post_padded=rows.padded,
                mul_routed_weight=weighted,
                top_k=1 if weighted else router.shape[1],
                config={"BLOCK_SIZE_M": rows.block, "GROUP_SIZE_M": 1, "SPLIT_K": 1},
                compute_type=tl.bfloat16 if rows_in.dtype == torch.bfloat16 else tl.float16,
                use_int8_w8a16=False,
                use_int4_w4a16=True,
                block_shape=[0, self._geometry.group],
            )
        except Exception as error:  # a compiler's own errors, too, are why the cell is absent
            raise Absent(f"Triton cannot run it: {str(error).splitlines()[0]}") from error

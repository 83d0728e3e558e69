"""The real server: ``vllm serve FOLDER --load-format qpn`` on checkpoints of the real tools.

What it answers is compared with door 1, :mod:`loader.integrations.transformers` in fp32, which has
its own proof. Run by ``make test-vllm``, in an environment of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from vllm_server import Completion, Server

from loader.integrations.transformers import from_pretrained

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM: make test-vllm")

CHECKPOINTS = Path(__file__).parents[2] / "fixtures" / "checkpoints"
#: One token, a few, and more than the fast routes take: all three routes serve a step.
PROMPTS = ([7], [5, 17, 33, 101], [(37 * i + 11) % 250 + 3 for i in range(40)])
TOKENS, TOP = 24, 5


@dataclass(frozen=True)
class Case:
    """``tolerance``: most that a logprob may differ by, as the activations' dtype rounds."""

    checkpoint: str
    dtype: str
    tolerance: float
    ranks: int = 1
    options: tuple[str, ...] = ()
    banked: int = 0

    @property
    def name(self) -> str:
        return "-".join([self.checkpoint, f"tp{self.ranks}", *(o.strip("-") for o in self.options)])


CASES = (
    Case("qwen3moe-awq-gemm-g128", "float16", 0.01),
    Case("qwen3moe-ct-nvfp4a16", "float32", 1e-3, banked=8),
    # Its own dtype is bf16, in which a router's near tie may choose another expert now and then.
    Case("qwen3moe-modelopt-nvfp4", "float16", 0.01, banked=8),
    Case("qwen3moe-ct-nvfp4a16", "float32", 1e-3, ranks=2, banked=8),
    Case("qwen3moe-awq-gemm-g128", "float16", 0.01, 2, ("--enable-expert-parallel",)),
)


def reference(case: Case) -> torch.nn.Module:
    return from_pretrained(CHECKPOINTS / case.checkpoint, dtype=torch.float32)  # type: ignore[no-any-return]  # Transformers is Any


def judge(model: torch.nn.Module, prompt: list[int], found: Completion, case: Case) -> None:
    """Each step of the server, given what it said before, against the reference's logprobs."""
    ids = torch.tensor([prompt + found.tokens])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    expected = logits.log_softmax(-1)
    assert len(found.tokens) == TOKENS
    for step, (token, top) in enumerate(zip(found.tokens, found.top, strict=True)):
        best = float(expected[step].max())
        assert best - float(expected[step, token]) <= case.tolerance, (step, "not greedy")
        assert len(top) >= TOP
        worst = max(abs(p - float(expected[step, one])) for one, p in top.items())
        assert worst <= case.tolerance, (step, worst)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_server_answers_like_the_first_door_and_leaves_nothing(
    case: Case, tmp_path: Path
) -> None:
    options = ["--dtype", case.dtype, "--tensor-parallel-size", str(case.ranks), *case.options]
    with Server(CHECKPOINTS / case.checkpoint, tmp_path, options) as server:
        server.wait_until_ready()
        answers = [server.complete(prompt, TOKENS, TOP) for prompt in PROMPTS]
        log = server.log
        server.kill()
    model = reference(case)
    for prompt, found in zip(PROMPTS, answers, strict=True):
        judge(model, prompt, found, case)
        if case.dtype == "float32":
            ids = torch.tensor([prompt])
            greedy = model.generate(
                ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False
            )
            assert found.tokens == greedy[0, len(prompt) :].tolist()
    check_log(log, case)


def check_log(log: str, case: Case) -> None:
    """Routes of all layers, memory and linears, once for each rank."""
    for wanted in (
        r"experts of layers 0-1: .*; 1 tokens: qpn_m1 by \w+ \(.*2-8 tokens: qpn_grouped.*legacy",
        r"experts: cpu: resident [0-9.]+ \w+ \(predicted [0-9.]+ \w+\), overhead",
    ):
        assert len(re.findall(wanted, log)) == case.ranks, wanted
    banked = re.findall(r"(\d+) linears served from banks, [^:]*on this rank: .*; vLLM: \w", log)
    assert banked == [str(case.banked)] * case.ranks * bool(case.banked)
    assert "linears dequantized" not in log

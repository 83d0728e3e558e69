"""The Transformers door on checkpoints of the real tools, against twins without quantization.

The bound: docs/routes.md allows each prepared module a relative error of 1e-5 (fp32), 1e-3 (fp16)
or 8e-3 (bf16). What that comes to in the logits is measured on the twin itself: the output of every
module that is quantized gets a random error of just that size, and the logits may move as far.
In 16 bits that is asked of the usual token: no tolerance covers a router that stands at a tie.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_twin import load_dense, write_dense
from linear_oracle import modules_of, tensors_of
from safetensors.torch import load_file

from loader import PreparedExperts
from loader.errors import PolicyError, UnsupportedError
from loader.integrations.transformers import ModelReport, from_pretrained
from loader.linears import PreparedLinear
from loader.policy import Policy

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")

FIXTURES = Path(__file__).parents[2] / "fixtures" / "checkpoints"
NOT_LOADED = {"qwen3moe-modelopt-int4-awq"}  # scales activations: refused by name
CHECKPOINTS = sorted(p.name for p in FIXTURES.iterdir() if p.is_dir() and p.name not in NOT_LOADED)
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
PROMPTS = torch.randint(3, 250, (2, 12), generator=torch.Generator().manual_seed(5))
RUNS = {"legacy": PROMPTS, "qpn_grouped": PROMPTS[:1, :5], "qpn_m1": PROMPTS[:1, 3:4]}
"""Prompts by the route that serves so many tokens."""

SPELLINGS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


class Case:
    """One checkpoint, its twin, and the model under test in fp32."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = FIXTURES / name
        self.dense = write_dense(self.folder, folder)
        self.twin = load_dense(folder)
        self.model, self.report = from_pretrained(
            self.folder, dtype="float32", output_loading_info=True
        )
        self.expected = {name: self.logits(self.twin, prompts) for name, prompts in RUNS.items()}

    @staticmethod
    def logits(model: Any, prompts: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(prompts).logits.double()
        return found

    def distance(self, model: Any, run: str = "legacy") -> float:
        expected = self.expected[run]
        return float((self.logits(model, RUNS[run]) - expected).norm() / expected.norm())

    def usual_distance(self, model: Any, run: str = "legacy") -> float:
        """The median over tokens: a router at a tie may choose otherwise for one of them."""
        expected = self.expected[run]
        apart = (self.logits(model, RUNS[run]) - expected).norm(dim=-1) / expected.norm(dim=-1)
        return float(apart.median())


@pytest.fixture(scope="module", params=CHECKPOINTS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


def propagated(
    case: Case, tolerance: float, distance: Callable[[Any, str], float], run: str = "legacy"
) -> float:
    """How far the twin's logits move when every prepared module errs by ``tolerance``."""
    quantized = {
        path
        for path, module in case.model.named_modules()
        if isinstance(module, (PreparedExperts, PreparedLinear))
    }
    quantized |= {entry["path"] for entry in case.report.linears}
    furthest = 0.0
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)

        def err(module: Any, inputs: Any, output: Any, g: torch.Generator = generator) -> Any:
            if isinstance(output, tuple):  # a router: its logits
                return (err(module, inputs, output[0], g), *output[1:])
            noise = torch.randn(output.shape, generator=g)
            return output + noise * (tolerance * output.norm() / noise.norm())

        hooks = [case.twin.get_submodule(p).register_forward_hook(err) for p in sorted(quantized)]
        furthest = max(furthest, distance(case.twin, run))
        for hook in hooks:
            hook.remove()
    return furthest


def test_the_decoded_weights_are_those_of_the_tools(case: Case) -> None:
    reference = load_file(case.folder / "reference.safetensors")
    ours = {}
    for name, weight in case.dense.items():
        found = re.search(r"layers\.(\d+)\..*\.experts\.(\d+)\.(\w+)\.weight$", name)
        if found:
            projection = SPELLINGS.get(found[3], found[3])
            ours[f"layers.{found[1]}.experts.{found[2]}.{projection}"] = weight
    assert len(reference) >= 18
    for name, weight in reference.items():
        assert torch.equal(ours[name], weight), name


@pytest.mark.parametrize("run", RUNS)
def test_logits_are_within_the_propagated_tolerance(case: Case, run: str) -> None:
    distance = case.distance(case.model, run)
    bound = propagated(case, TOLERANCES[torch.float32], case.distance, run)
    assert distance <= bound < 1e-4, (distance, bound)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_logits_in_16_bits_are_within_the_propagated_tolerance(
    case: Case, dtype: torch.dtype
) -> None:
    model = from_pretrained(case.folder, dtype=dtype)
    assert model.dtype == dtype
    distance = case.usual_distance(model)
    assert distance <= propagated(case, TOLERANCES[dtype], case.usual_distance)


def test_greedy_tokens_are_equal_over_32_tokens(case: Case) -> None:
    def tokens(model: Any) -> torch.Tensor:
        model.generation_config.eos_token_id = None
        found: torch.Tensor = model.generate(PROMPTS, max_new_tokens=32, do_sample=False)
        return found

    found = tokens(case.model)
    assert found.shape == (2, 12 + 32)
    assert torch.equal(found, tokens(case.twin))


def test_every_tensor_of_the_checkpoint_is_accounted_for_once(case: Case) -> None:
    tensors = tensors_of(case.folder)
    packed = [module for module in modules_of(tensors) if ".experts." not in module]
    assert sorted(entry["name"] for entry in case.report.linears) == packed
    in_linears = {n for n in tensors if n.rpartition(".")[0] in packed}
    in_experts = {n for n in tensors if ".experts." in n}
    virtual = {
        f"{entry['name']}.weight"
        for entry in case.report.linears
        if entry["served"] == "dequantized"
    }
    plain = set(case.report.plain) - virtual
    assert case.report.unused == ()
    assert plain == set(tensors) - in_linears - in_experts


def test_modules_stand_where_the_model_had_its_own(case: Case) -> None:
    own = dict(case.twin.named_modules())
    prepared = dict(case.model.named_modules())
    for path in own:
        if re.search(r"\.experts$", path):
            assert isinstance(prepared[path], PreparedExperts), path
            assert prepared[path].layer == int(re.search(r"layers\.(\d+)\.", path)[1])
    for entry in case.report.linears:
        module = prepared[entry["path"]]
        assert isinstance(module, PreparedLinear) == (entry["served"] == "bank"), entry
        assert entry["reason"]
    theirs = dict(case.twin.named_parameters())
    for name, parameter in case.model.named_parameters():
        assert torch.equal(parameter, theirs[name]), name


def test_only_the_router_is_dequantized_since_the_model_has_no_linear_there(case: Case) -> None:
    plain = [entry for entry in case.report.linears if entry["served"] == "dequantized"]
    assert all(entry["name"].endswith(".mlp.gate") for entry in plain)
    assert len(plain) == (2 if case.folder.name == "qwen3moe-awq-gemm-g64-router" else 0)
    for entry in plain:
        assert "not a Linear" in entry["reason"]


def test_what_the_card_holds_is_what_was_predicted(case: Case) -> None:
    m = case.report.memory
    assert m.resident == m.predicted_resident == m.experts + m.linears + m.plain + m.workspace
    assert m.peak - m.baseline <= m.predicted_peak
    four_bit = sum(entry["n"] * entry["k"] for entry in case.report.linears) // 2
    assert m.linears < 1.5 * four_bit
    assert ModelReport.to_dict(case.report)["memory"]["overhead"] == m.overhead
    less = replace(case.report, memory=replace(m, peak=m.baseline))
    assert "overhead unknown: at least" in less.memory_line()


def test_a_quantized_model_runs_compiled_in_one_graph(case: Case) -> None:
    for module in case.model.modules():
        if isinstance(module, PreparedExperts):
            break
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    hidden = torch.randn(5, module.hidden_size, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[0, 1], [1, 0], [2, 3], [3, 2], [0, 3]])
    weights = torch.rand(5, 2, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert torch.equal(compiled(hidden, ids, weights), module(hidden, ids, weights))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("qwen3moe-ct-nvfp4a16", tmp_path_factory.mktemp("whole"))


def test_the_whole_model_compiles_in_one_graph(whole: Case) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(whole.model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        logits = compiled(PROMPTS, use_cache=False).logits.double()
        expected = whole.model(PROMPTS, use_cache=False).logits.double()
    assert (logits - expected).norm() < 1e-6 * expected.norm()


def test_experts_run_under_the_default_compiler(whole: Case) -> None:
    torch._dynamo.reset()
    block = whole.model.model.layers[0].mlp
    hidden = torch.randn(1, 3, 256, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = block(hidden)
        found = torch.compile(block, fullgraph=True)(hidden)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_the_memory_of_the_card_is_logged_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "loader"):
        from_pretrained(FIXTURES / "mixtral-awq-gemm-g32", dtype="float32")
    lines = [r.message for r in caplog.records if r.name.startswith("loader.integrations")]
    (line,) = (text for text in lines if "resident" in text)
    for part in ("cpu: resident", "predicted", "experts", "linears", "plain", "overhead"):
        assert part in line


def test_a_dequantized_linear_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "loader.integrations"):
        from_pretrained(FIXTURES / "qwen3moe-awq-gemm-g64-router")
    (line,) = (r.message for r in caplog.records if "dequantized" in r.message)
    assert "2 linears" in line and "not a Linear" in line


def test_auto_is_the_dtype_of_the_config_and_generation_settings_are_read() -> None:
    model = from_pretrained(FIXTURES / "mixtral-awq-gemm-g32")
    assert model.dtype == torch.float16 and model.name_or_path.endswith("mixtral-awq-gemm-g32")
    assert model.generation_config.eos_token_id == 2 and not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_model_of_prepared_banks_is_not_saved_as_a_checkpoint(
    whole: Case, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="serializ"):
        whole.model.save_pretrained(tmp_path)


def test_a_model_of_prepared_banks_is_not_dequantized_and_stays_as_it_is(whole: Case) -> None:
    with pytest.raises(UnsupportedError, match="not turned into plain weights") as caught:
        whole.model.dequantize()
    assert "dequantize(expert)" in str(caught.value) and "\n" not in str(caught.value)
    with torch.no_grad():
        assert whole.model(PROMPTS).logits.isfinite().all()


def test_the_state_of_the_model_goes_round(whole: Case) -> None:
    state = whole.model.state_dict()
    other = from_pretrained(whole.folder, dtype="float32")
    assert other.load_state_dict(state).missing_keys == []
    with torch.no_grad():
        assert torch.equal(other(PROMPTS).logits, whole.model(PROMPTS).logits)


def test_policy_reaches_experts_and_linears() -> None:
    folder = FIXTURES / "qwen3moe-awq-gemm-g128"
    model, report = from_pretrained(
        folder, policy=Policy(layout="wide", qpn_m1="off"), output_loading_info=True
    )
    layouts = {e["metadata_layout"] for e in report.linears}
    assert layouts == {"wide"} and report.experts.planned["layers"][0]["metadata_layout"] == "wide"
    linear = next(m for m in model.modules() if isinstance(m, PreparedLinear))
    assert linear.routes[0].route == "legacy" and "qpn_m1=off" in linear.routes[0].reason
    with pytest.raises(PolicyError, match="layout"):
        from_pretrained(FIXTURES / "mixtral-ct08-nvfp4", policy=Policy(layout="record"))


def test_observers_see_the_layers(whole: Case) -> None:
    seen: list[tuple[int, str]] = []

    def observe(event: Any) -> None:
        seen.append((event.layer, event.state))

    from_pretrained(whole.folder, observers=[observe])
    assert (0, "ready") in seen and (1, "ready") in seen


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    transformers.utils.logging.disable_progress_bar()
    yield

"""What a vLLM model holds after a load, and the parts of the plugin that stand on vLLM's classes.

Run by ``make test-vllm``, in an environment of its own.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM: make test-vllm")

from vllm.config.load import LoadConfig
from vllm.model_executor.layers.fused_moe import MoEActivation
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.models.interfaces import SupportsQuant
from vllm.model_executor.models.utils import WeightsMapper

from loader import CheckpointError, PolicyError, ShardError, UnsupportedError
from loader.integrations.transformers import from_pretrained
from loader.integrations.vllm import support
from loader.integrations.vllm.experts import PreparedExpertsMethod, shard_of
from loader.integrations.vllm.linear_method import Cut, OwnLinearMethod
from loader.integrations.vllm.linears import Names, _slice
from loader.integrations.vllm.model_loader import QpnModelLoader
from loader.integrations.vllm.quantization import take_over
from loader.integrations.vllm.weights import require_complete

CHECKPOINTS = Path(__file__).parents[2] / "fixtures" / "checkpoints"
INSPECT = Path(__file__).with_name("vllm_inspect.py")
PROMPT, TOKENS = [5, 17, 33, 101], 16


def inspected(folder: Path, **given: Any) -> dict[str, Any]:
    """What a model holds and generates, loaded in a process of its own."""
    arguments = json.dumps({"prompt": PROMPT, "tokens": TOKENS, **given})
    command = [sys.executable, str(INSPECT), str(folder), arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=420)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    found: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    return found


def test_moe_layers_hold_banks_and_never_held_a_parameter() -> None:
    folder = CHECKPOINTS / "mixtral-ct08-nvfp4"
    found = inspected(folder, dtype="float32")
    assert found["expert_layers"] == 2
    assert found["is_ours"]
    assert found["parameters"] == found["ever"] == []
    assert "CompressedTensorsConfig" in found["config"]
    assert set(found["linears"].values()) == {"OwnLinearMethod"}
    door = from_pretrained(folder, dtype=torch.float32)
    greedy = door.generate(
        torch.tensor([PROMPT]), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False
    )
    assert found["tokens"] == greedy[0, len(PROMPT) :].tolist()


def test_linears_that_vllm_can_run_stay_vllms() -> None:
    policy = {"policy": {"qpn_m1": "off"}}
    folder = CHECKPOINTS / "qwen3moe-awq-gemm-g64-router"  # its router is quantized too
    found = inspected(folder, dtype="float16", model_loader_extra_config=policy)
    assert set(found["linears"].values()) == {"AutoAWQMarlinLinearMethod"}
    assert found["routes"] == [["legacy", "qpn_grouped", "legacy"]] * 2
    assert found["parameters"] == found["ever"] == []


# --- the door -----------------------------------------------------------------------------------


def model_loader(**extra: Any) -> QpnModelLoader:
    return QpnModelLoader(LoadConfig(load_format="qpn", model_loader_extra_config=extra))


def asked(folder: Path, runner: str = "generate") -> Any:
    return SimpleNamespace(model=str(folder), revision=None, runner=runner, dtype=torch.float16)


def test_this_vllm_is_supported() -> None:
    support.require_support()


def test_another_version_is_one_sentence_when_the_load_format_is_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vllm.__version__", "0.33.1")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with pytest.raises(UnsupportedError, match=r"expected vllm 0\.32\.\*, found vllm 0\.33\.1"):
        model_loader()
    assert [record.exc_info for record in caplog.records] == [None]


def test_a_setting_that_is_not_known_is_refused() -> None:
    with pytest.raises(PolicyError, match="'threads'"):
        model_loader(threads=4)


def test_a_model_without_experts_is_refused_before_it_is_built(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "opt"}))
    with pytest.raises(UnsupportedError, match="declares no experts"):
        model_loader().load_model(SimpleNamespace(), asked(tmp_path))


def test_a_draft_model_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="draft_load_config"):
        model_loader().load_model(SimpleNamespace(), asked(CHECKPOINTS, runner="draft"))


def test_a_reload_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="a new server"):
        model_loader().load_weights(torch.nn.Module(), asked(CHECKPOINTS))


def test_nothing_to_take_over_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="not quantized"):
        take_over(SimpleNamespace(quant_config=None))


# --- experts ------------------------------------------------------------------------------------


def moe_config(**changes: Any) -> Any:
    parallel = {"dp_size": 1, "pcp_size": 1, "sp_size": 1, "tp_rank": 1, "tp_size": 2}
    plain: dict[str, Any] = {
        "activation": MoEActivation.SILU,
        "has_bias": False,
        "is_lora_enabled": False,
        **dict.fromkeys(("swiglu_limit", "swiglu_alpha", "swiglu_beta")),
    }
    parallel |= {name: value for name, value in changes.items() if name in parallel}
    plain |= {name: value for name, value in changes.items() if name not in parallel}
    return SimpleNamespace(**plain, moe_parallel_config=SimpleNamespace(**parallel))


@pytest.mark.parametrize(
    ("change", "named"),
    (
        ({"activation": MoEActivation.GELU}, "activation"),
        ({"swiglu_limit": 7.0}, "SwiGLU"),
        ({"has_bias": True}, "biases"),
        ({"is_lora_enabled": True}, "LoRA"),
        ({"dp_size": 2}, "data parallel"),
        ({"pcp_size": 2}, "prefill context"),
        ({"sp_size": 2}, "sequence parallel"),
    ),
)
def test_a_layer_that_the_operator_does_not_compute_is_refused(
    change: dict[str, Any], named: str
) -> None:
    PreparedExpertsMethod(moe_config(), "layers.0.mlp.experts")
    with pytest.raises(UnsupportedError, match=named) as caught:
        PreparedExpertsMethod(moe_config(**change), "layers.0.mlp.experts")
    assert caught.value.tensor == "layers.0.mlp.experts"


def layer(expert_map: list[int] | None, **changes: Any) -> Any:
    slots = None if expert_map is None else torch.tensor(expert_map)
    return SimpleNamespace(moe_config=moe_config(**changes), expert_map=slots)


def test_the_shard_is_what_vllm_has_cut() -> None:
    tensor = shard_of({0: layer(None), 1: layer(None)})
    assert (tensor.tp_rank, tensor.tp_size, tensor.expert_ids) == (1, 2, None)
    expert = shard_of({0: layer([-1, 1, -1, 0], tp_rank=0, tp_size=1)})
    assert expert.expert_ids == (3, 1)
    with pytest.raises(UnsupportedError, match="spread differently"):
        shard_of({0: layer([0, -1]), 1: layer([-1, 0])})


# --- linears ------------------------------------------------------------------------------------


class Model(torch.nn.Module, SupportsQuant):
    """The names of a model: one linear fused by a mapping of weights, one by a list of parts."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={"model.text.": "text."},
        orig_to_new_stacked={".q_proj": (".qkv_proj", "q"), ".v_proj": (".qkv_proj", "v")},
    )

    def __init__(self) -> None:
        super().__init__()
        self.text = torch.nn.ModuleDict(
            {"qkv_proj": torch.nn.Identity(), "gate_up_proj": torch.nn.Identity()}
        )


def test_names_are_found_where_vllm_has_put_them() -> None:
    packed = SimpleNamespace(packed_modules_mapping={"gate_up_proj": ["gate_proj", "up_proj"]})
    names = Names(Model(), packed)
    found = {
        name: (place.name, place.part)
        for name in ("q_proj", "v_proj", "up_proj", "gate_proj", "o_proj")
        if (place := names.find(f"model.text.{name}")) is not None
    }
    assert found == {
        "q_proj": ("text.qkv_proj", 0),
        "v_proj": ("text.qkv_proj", 2),
        "gate_proj": ("text.gate_up_proj", 0),
        "up_proj": ("text.gate_up_proj", 1),
    }


class Kernel(UnquantizedLinearMethod):
    """A method whose kernel takes no odd sizes, and says so when it has made half its weights."""

    def create_weights(self, layer: torch.nn.Module, *sizes: Any, **named: Any) -> None:
        layer.register_parameter("qweight", torch.nn.Parameter(torch.empty(1)))
        if sizes[0] % 2:
            raise ValueError("no kernel\n for odd sizes")


@pytest.mark.parametrize("size", (4, 5))
def test_a_linear_keeps_vllms_method_where_it_takes_the_sizes(size: int) -> None:
    linear, kernel = torch.nn.Module(), Kernel()
    own = OwnLinearMethod(kernel)
    own.create_weights(linear, size, [8], size, 8, torch.float16, weight_loader=None)
    if size == 4:
        assert linear.quant_method is kernel
        assert set(linear._parameters) == {"qweight"}
        return
    assert dict(linear.named_parameters()) == {}
    assert own.why == "no kernel for odd sizes"
    assert own.cut == Cut(5, (8,), 5, 8, torch.float16, {"weight_loader": None})


@pytest.mark.parametrize(
    ("n", "outs", "rank", "ranks", "run"),
    (
        (64, 64, 1, 2, None),
        (64, 32, 1, 2, (32, 32)),
        (64, 32, 3, 4, (32, 32)),  # two heads on four ranks: each on two
        (64, 32, 1, 4, (0, 32)),
    ),
)
def test_a_slice_is_what_vllm_cuts(
    n: int, outs: int, rank: int, ranks: int, run: tuple[int, int] | None
) -> None:
    source = SimpleNamespace(name="linear", n=n, k=128)
    cut = Cut(128, (outs,), 128, n, torch.float16, {})
    assert _slice(source, cut, outs, rank, ranks).outs == run
    half = Cut(64, (outs,), 128, n, torch.float16, {})
    assert _slice(source, half, n, rank % 2, 2).ins == (rank % 2 * 64, 64)


def test_a_slice_that_is_not_known_is_refused() -> None:
    source = SimpleNamespace(name="linear", n=96, k=128)
    with pytest.raises(ShardError, match="a way that is not known"):
        _slice(source, Cut(128, (40,), 128, 96, torch.float16, {}), 40, 0, 2)


def test_a_parameter_that_nothing_was_loaded_into_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].quant_method = OwnLinearMethod(None, "no kernel")  # its parameters are its own affair
    require_complete(model, {"0.weight", "0.bias"})
    require_complete(model, None)
    with pytest.raises(CheckpointError, match=r"0\.bias"):
        require_complete(model, {"0.weight"})

"""Cases, section 5: order of activation, and what else a config can say that is not loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from case_checks import PRESENT, ok, refuse, small
from case_configs import quantization, weights_of

import loader
from loader.testing.checkpoint import TinyCheckpoint
from loader.testing.container import edit_tensor, rewrite

# Order of activation


def with_group_index(
    folder: Path, checkpoint: TinyCheckpoint, part: str, values: dict[str, np.ndarray]
) -> None:
    """Adds a group index to every projection of every expert."""

    def edit(tensors: dict[str, Any]) -> None:
        for layer in range(checkpoint.layers):
            for expert in range(checkpoint.experts):
                for projection, array in values.items():
                    name = checkpoint.name(layer, expert, projection, part)
                    tensors[name] = array.astype(np.int32)

    rewrite(folder, edit)


@pytest.mark.parametrize("kind", ["ordered", "absent"])
@pytest.mark.parametrize("dialect, part", [("A", "g_idx"), ("P", "weight_g_idx")])
def test_a_group_index_that_changes_nothing(
    tmp_path: Path, dialect: str, part: str, kind: str
) -> None:
    checkpoint = small(tmp_path, dialect)
    rows = {"gate": 64, "up": 64, "down": 96}
    values = {name: np.arange(count) // 32 for name, count in rows.items()}
    if kind == "absent":
        values = {name: np.full(count, -1) for name, count in rows.items()}
    with_group_index(tmp_path, checkpoint, part, values)
    ok(checkpoint, truth=checkpoint.codes, dtypes=())
    ok(checkpoint, truth=checkpoint.codes, dtypes=(), ranks=2)


@pytest.mark.parametrize("projection", ["gate", "down"])
@pytest.mark.parametrize("dialect, part", [("A", "g_idx"), ("P", "weight_g_idx")])
@pytest.mark.parametrize("change", ["swap", "one", "minus"])
def test_a_group_index_that_reorders(
    tmp_path: Path, dialect: str, part: str, projection: str, change: str
) -> None:
    checkpoint = small(tmp_path, dialect)
    rows = {"gate": 64, "up": 64, "down": 96}
    with_group_index(
        tmp_path, checkpoint, part, {name: np.arange(count) // 32 for name, count in rows.items()}
    )
    name = checkpoint.name(1, 2, projection, part)

    def edit(array: np.ndarray) -> np.ndarray:
        if change == "swap":
            return np.ascontiguousarray(array[::-1])
        array[40] = -1 if change == "minus" else 0
        return array

    edit_tensor(tmp_path, name, edit)
    refuse(
        tmp_path,
        plan=False,
        file=PRESENT,
        tensor=name,
        layer=1,
        experts="2",
        expected="i // 32",
        found={"swap": "at [0]", "one": "0 at [40]", "minus": "-1 at [40]"}[change],
    )


def test_a_group_index_of_some_experts_only(tmp_path: Path) -> None:
    checkpoint = small(tmp_path, "A")
    name = checkpoint.name(1, 0, "gate", "g_idx")
    index = (np.arange(64) // 32).astype(np.int32)
    rewrite(tmp_path, lambda tensors: tensors.update({name: index}))
    refuse(tmp_path, layer=1, experts="1, 2, 3", found="gate.g_idx")


def test_activation_order_in_the_config(tmp_path: Path) -> None:
    small(tmp_path, "A")
    quantization(tmp_path, desc_act=True)
    refuse(tmp_path, loader.UnsupportedError, file="config.json", says=("desc_act",))


@pytest.mark.parametrize(
    "value, good", [("group", False), (True, False), ("weight", True), (None, True)]
)
def test_activation_order_of_compressed_tensors(tmp_path: Path, value: Any, good: bool) -> None:
    checkpoint = small(tmp_path, "P")
    weights_of(tmp_path, actorder=value)
    if good:
        ok(checkpoint, dtypes=())
    else:
        refuse(tmp_path, loader.UnsupportedError, file="config.json", says=("actorder",))


# What a config can say that is not loaded


@pytest.mark.parametrize(
    "keys, found",
    [
        ({"version": "gemv"}, "gemv"),
        ({"version": "marlin"}, "marlin"),
        ({"quant_method": "gptq"}, "gptq"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": None}, "None"),
        ({"zero_point": "yes"}, "yes"),
        ({"modules_to_not_convert": "lm_head"}, "lm_head"),
    ],
)
def test_a_quantization_that_is_not_loaded(
    tmp_path: Path, keys: dict[str, Any], found: str
) -> None:
    small(tmp_path, "A")
    quantization(tmp_path, **keys)
    broken = "zero_point" in keys or "modules_to_not_convert" in keys
    kind = loader.CheckpointError if broken else loader.UnsupportedError
    refuse(tmp_path, kind, file="config.json", expected=PRESENT, found=found)


@pytest.mark.parametrize("activation", ["gelu", "relu2", "swigluoai", None, 3])
@pytest.mark.parametrize("family", ["qwen3-moe", "qwen3.5"])
def test_an_activation_other_than_silu(tmp_path: Path, family: str, activation: Any) -> None:
    config = {"hidden_act": activation}
    if family == "qwen3.5":
        config = {"text_config": config}
    small(tmp_path, "N", family=family, config=config)
    refuse(
        tmp_path,
        loader.UnsupportedError,
        file="config.json",
        expected="silu",
        found=repr(activation),
    )


def test_modelopts_own_int4_is_refused_in_one_sentence() -> None:
    folder = Path(__file__).parents[2] / "fixtures/checkpoints/qwen3moe-modelopt-int4-awq"
    error = refuse(
        folder,
        loader.UnsupportedError,
        file=PRESENT,
        found="W4A16_AWQ",
        says=("pre_quant_scale",),
    )
    assert error.what.count("pre_quant_scale") == 1

"""Cases, section 5: group, bits and order come from the config and are checked against shapes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from case_checks import PRESENT, case, ok, refuse, small
from case_configs import quantization, weights_of

import loader
from loader import native
from loader.testing.checkpoint import TinyCheckpoint
from loader.testing.container import RawTensor, edit_json, edit_tensor, rewrite

FP32 = (torch.float32,)
INT4 = ["A", "P", "ct-int4-asym"]


# 5.1 Group size


@pytest.mark.parametrize("dialect", INT4)
def test_a_last_group_that_is_not_whole(tmp_path: Path, dialect: str) -> None:
    checkpoint = case(tmp_path, dialect, intermediate=704, group=128, experts=3)
    assert checkpoint.groups(704) == 6 and 704 - 5 * 128 == 64
    ok(checkpoint, dtypes=FP32)


@pytest.mark.parametrize("group", [16, 32, 64, 128, 256, -1])
@pytest.mark.parametrize("dialect", INT4)
def test_every_group_size(tmp_path: Path, dialect: str, group: int) -> None:
    checkpoint = case(tmp_path, dialect, group=group, experts=2, layers=1, shards=1)
    cards = ok(checkpoint, dtypes=FP32)
    (module,) = cards[0]
    assert module.spec.w13.group == (256 if group == -1 else group)
    assert module.spec.w2.group == (512 if group == -1 else group)


@pytest.mark.parametrize(
    "hidden, intermediate, group", [(64, 96, 128), (72, 104, 64), (40, 24, 32)]
)
@pytest.mark.parametrize("dialect", INT4)
def test_odd_sizes(
    tmp_path: Path, dialect: str, hidden: int, intermediate: int, group: int
) -> None:
    sizes = {"hidden": hidden, "intermediate": intermediate, "group": group}
    ok(small(tmp_path, dialect, **sizes), dtypes=FP32)


@pytest.mark.parametrize("told, stored", [(128, 64), (64, 128), (32, 64), (-1, 64)])
@pytest.mark.parametrize("dialect", ["A", "P"])
def test_the_config_and_the_shapes_disagree(
    tmp_path: Path, dialect: str, told: int, stored: int
) -> None:
    checkpoint = case(tmp_path, dialect, group=stored, experts=2, intermediate=704)
    if dialect == "A":
        quantization(tmp_path, group_size=told)
    else:
        weights_of(tmp_path, group_size=told, strategy="channel" if told == -1 else "group")
    error = refuse(
        tmp_path,
        file=PRESENT,
        layer=0,
        experts="0, 1",
        tensor=checkpoint.name(0, 0, "gate", ""),
        expected=f"group {256 if told == -1 else told} in the config, {stored} in the file",
        found="[",
    )
    assert "1 more tensors" in str(error.found)


def test_the_numbers_are_right_where_the_last_group_is_not_whole(tmp_path: Path) -> None:
    """Only the down projection, with 704 inputs, has a shape that tells the two apart."""
    checkpoint = case(tmp_path, "A", group=128, experts=1, top_k=1, hidden=64, intermediate=704)
    quantization(tmp_path, group_size=64)
    refuse(
        tmp_path,
        layer=0,
        tensor=checkpoint.name(0, 0, "down", ""),
        expected="group 64 in the config, 128 in the file",
    )


@pytest.mark.parametrize("group", [0, -2, 1 << 40, "128", 128.0, True, [128]])
@pytest.mark.parametrize("dialect", ["A", "P"])
def test_a_group_size_that_is_no_number(tmp_path: Path, dialect: str, group: Any) -> None:
    small(tmp_path, dialect)
    if dialect == "A":
        quantization(tmp_path, group_size=group)
    else:
        weights_of(tmp_path, group_size=group)
    refuse(tmp_path, file="config.json", expected="a whole number", found=repr(group))


@pytest.mark.parametrize("strategy", ["tensor", "block", "attn_head", "odd", 3])
@pytest.mark.parametrize("dialect", ["P", "N"])
def test_scales_of_another_meaning(tmp_path: Path, dialect: str, strategy: Any) -> None:
    """The shapes alone would fit: what one scale belongs to is the config's to say."""
    small(tmp_path, dialect)
    weights_of(tmp_path, strategy=strategy)
    refuse(
        tmp_path,
        loader.UnsupportedError,
        file=PRESENT,
        layer=0,
        tensor="experts.0",
        found=f"strategy {strategy}",
    )


def test_one_scale_for_a_row_and_a_group_size(tmp_path: Path) -> None:
    checkpoint = small(tmp_path, "P", group=-1)
    weights_of(tmp_path, group_size=32)
    refuse(tmp_path, file="config.json", expected="no group_size", found="group_size 32")
    weights_of(tmp_path, group_size=-1)
    ok(checkpoint, dtypes=())


@pytest.mark.parametrize("group", [8, 24, 40])
@pytest.mark.parametrize("dialect", ["A", "P"])
def test_a_group_size_that_banks_cannot_have(tmp_path: Path, dialect: str, group: int) -> None:
    small(tmp_path, dialect, group=group, hidden=120, intermediate=240)
    refuse(
        tmp_path,
        loader.UnsupportedError,
        layer=0,
        expected="a multiple of 16",
        found=str(group),
    )


@pytest.mark.parametrize("dialect", ["N", "M"])
def test_nvfp4_with_another_group(tmp_path: Path, dialect: str) -> None:
    small(tmp_path, dialect)
    weights_of(tmp_path, group_size=32)
    if dialect == "M":
        for file, key in (
            ("config.json", "quantization_config"),
            ("hf_quant_config.json", "quantization"),
        ):

            def edit(content: dict[str, Any], key: str = key) -> None:
                content[key]["group_size"] = 32

            edit_json(tmp_path, file, edit)
    refuse(
        tmp_path, loader.UnsupportedError, layer=0, file=PRESENT, tensor=PRESENT, found="group 32"
    )


@pytest.mark.parametrize(
    "key, value", [("group_size", 32), ("num_bits", 8), ("type", "int"), ("group_size", "16")]
)
def test_nvfp4_beside_config_groups_that_say_otherwise(
    tmp_path: Path, key: str, value: Any
) -> None:
    checkpoint = small(tmp_path, "M")
    ok(checkpoint, dtypes=())
    weights_of(tmp_path, **{key: value})
    refuse(tmp_path, file="config.json", expected=f"{key} ", found=f"{key} {value} in group_0")


@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json"])
def test_nvfp4_with_two_groups_or_another_one(tmp_path: Path, file: str) -> None:
    small(tmp_path, "M")
    hf = "hf_quant_config.json"
    sections = {"config.json": "quantization_config", hf: "quantization"}
    for name, key in sections.items():
        size = {"group_size": 32 if name == file else 16}
        edit_json(tmp_path, name, lambda c, key=key, size=size: c[key].update(size))
    refuse(tmp_path, file=" and ", expected="one group_size", found=f"'{file}': 32")
    other = next(name for name in sections if name != file)
    edit_json(tmp_path, other, lambda c: c[sections[other]].pop("group_size") and None)
    weights_of(tmp_path, group_size=32)
    refuse(tmp_path, loader.UnsupportedError, layer=0, file=PRESENT, found="group 32")


@pytest.mark.parametrize("group, admitted", [(16, False), (32, True), (64, True), (48, False)])
def test_a_kernel_that_supports_only_some_groups_says_so(
    tmp_path: Path, group: int, admitted: bool
) -> None:
    small(tmp_path, "A", group=group)
    with native.serving(replace(native.REFERENCE, group_multiple=32)):
        check_admission(tmp_path, group, admitted)


def check_admission(folder: Path, group: int, admitted: bool) -> None:
    """The fast routes of a kernel that wants multiples of 32, and why they are not used."""
    routes = loader.plan(folder).layers[0].routes
    assert [r.route for r in routes[:2]] == (
        ["qpn_m1", "qpn_grouped"] if admitted else ["legacy", "legacy"]
    )
    for route in routes[:2] if not admitted else ():
        assert "group size" in route.reason and "multiple of 32" in route.reason
        assert str(group) in route.reason
    if not admitted:
        refuse(
            folder,
            loader.PolicyError,
            settings={"policy": loader.Policy(qpn_m1="on")},
            cli=("--qpn-m1", "on"),
            layer=0,
            expected="a multiple of 32",
            found=str(group),
            says=("group size",),
        )


# 5.2 Bits


@pytest.mark.parametrize("bits", [8, 3, 2, 16, "4", 4.5, True, None])
def test_awq_of_other_bits(tmp_path: Path, bits: Any) -> None:
    small(tmp_path, "A")
    quantization(tmp_path, bits=bits)
    refuse(
        tmp_path,
        loader.UnsupportedError,
        file="config.json",
        expected="4 bits",
        found=f"{bits} bits of type int",
    )


@pytest.mark.parametrize(
    "dialect, keys, found",
    [
        ("P", {"num_bits": 8}, "8 bits of type int"),
        ("P", {"num_bits": 3}, "3 bits of type int"),
        ("P", {"type": "float"}, "4 bits of type float"),
        ("N", {"num_bits": 8}, "8 bits of type float"),
        ("N", {"type": "int"}, "4 bits of type int"),
    ],
)
def test_compressed_tensors_of_other_bits_or_type(
    tmp_path: Path, dialect: str, keys: dict[str, Any], found: str
) -> None:
    small(tmp_path, dialect)
    weights_of(tmp_path, **keys)
    refuse(
        tmp_path,
        loader.UnsupportedError,
        file=PRESENT,
        layer=0,
        tensor="experts.0",
        expected="4 bits",
        found=found,
    )


def widen(folder: Path, checkpoint: TinyCheckpoint, part: str, projection: str) -> list[int]:
    """Doubles the packed columns, as 8 bits would take; returns the new shape of one tensor."""
    shapes = []

    def edit(tensors: dict[str, Any]) -> None:
        for layer in (0, 1):
            for expert in range(checkpoint.experts):
                name = checkpoint.name(layer, expert, projection, part)
                old = tensors[name]
                shape = (old.shape[0], 2 * old.shape[1])
                tensors[name] = RawTensor(old.dtype, shape, 2 * old.data, old.file)
                shapes.append(list(shape))

    rewrite(folder, edit)
    return shapes[0]


@pytest.mark.parametrize("projection", ["gate", "down"])
@pytest.mark.parametrize(
    "dialect, part", [("A", "qweight"), ("P", "weight_packed"), ("N", "weight_packed")]
)
def test_four_bits_with_a_width_that_fits_eight(
    tmp_path: Path, dialect: str, part: str, projection: str
) -> None:
    checkpoint = small(tmp_path, dialect)
    wide = widen(tmp_path, checkpoint, part, projection)
    refuse(
        tmp_path,
        file=PRESENT,
        layer=0,
        experts="0, 1, 2, 3",
        tensor=checkpoint.name(0, 0, projection, part),
        expected=str([wide[0], wide[1] // 2]),
        found=str(wide),
    )


@pytest.mark.parametrize("dialect", ["A", "P"])
def test_the_same_where_the_config_states_no_sizes(tmp_path: Path, dialect: str) -> None:
    checkpoint = small(tmp_path, dialect)
    part = "qweight" if dialect == "A" else "weight_packed"
    for projection in ("gate", "up", "down"):
        widen(tmp_path, checkpoint, part, projection)
    edit_json(tmp_path, "config.json", lambda c: c.pop("hidden_size") and None)
    edit_json(tmp_path, "config.json", lambda c: c.pop("moe_intermediate_size") and None)
    refuse(tmp_path, file=PRESENT, layer=0, tensor=PRESENT, expected=PRESENT, found=PRESENT)


@pytest.mark.parametrize("dialect", ["A", "P", "N", "M"])
def test_sizes_from_the_tensors_alone(tmp_path: Path, dialect: str) -> None:
    checkpoint = small(tmp_path, dialect)
    edit_json(tmp_path, "config.json", lambda c: c.pop("hidden_size") and None)
    edit_json(tmp_path, "config.json", lambda c: c.pop("moe_intermediate_size") and None)
    ok(checkpoint, dtypes=())


@pytest.mark.parametrize("key, value", [("hidden_size", 128), ("moe_intermediate_size", 48)])
@pytest.mark.parametrize("dialect", ["A", "N"])
def test_the_config_states_other_sizes(tmp_path: Path, dialect: str, key: str, value: int) -> None:
    small(tmp_path, dialect, config={key: value})
    refuse(tmp_path, file=PRESENT, layer=0, tensor=PRESENT, expected=PRESENT, found=PRESENT)


@pytest.mark.parametrize(
    "layer, expert, projection", [(0, 0, "gate"), (1, 3, "down"), (1, 2, "up")]
)
@pytest.mark.parametrize("index", [0, 1])
def test_a_weight_shape_that_disagrees(
    tmp_path: Path, layer: int, expert: int, projection: str, index: int
) -> None:
    """The shape is payload: only ``load`` can know."""
    checkpoint = small(tmp_path, "P")
    name = checkpoint.name(layer, expert, projection, "weight_shape")

    def edit(array: np.ndarray) -> None:
        array[index] *= 2

    edit_tensor(tmp_path, name, edit)
    out, columns = checkpoint.size(projection)
    refuse(
        tmp_path,
        plan=False,
        file=checkpoint.file_of(name).name,
        tensor=name,
        layer=layer,
        experts=str(expert),
        expected=f"[{out}, {columns}]",
        found=f"{2 * (out, columns)[index]} at [{index}]",
    )
    loader.plan(tmp_path)

"""Which tensors the independent check reads: names, fused experts, files, and what it refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from verify_fakes import (
    AWQ,
    DIVISOR,
    FIXTURES,
    INT4,
    MULTIPLIER,
    REFUSED,
    FakeLayer,
    FakeShard,
    Weights,
    copied,
    edit,
    fakes,
    reference,
    swap_gate_and_up,
)

from loader.errors import CheckpointError, LoaderError, PolicyError
from loader.verify import VerifyReport, verify
from loader.verify.layer import PROJECTIONS, Projection


def fused(tensors: dict[str, torch.Tensor], axis: int) -> dict[str, torch.Tensor]:
    """Expert tensors with a leading expert axis, gate before up along ``axis``."""
    gathered: dict[str, list[torch.Tensor]] = {}
    order = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 2, "w2": 2}
    found = {}
    for key, value in tensors.items():
        if ".experts." in key:
            base, tail = key.split(".experts.")
            expert, projection, part = tail.split(".")
            found[base, int(expert), part, order[projection]] = value
    for base, expert, part, place in sorted(found):
        if place == 2:
            one = found[base, expert, part, 2]
            gathered.setdefault(f"{base}.experts.down_proj.{part}", []).append(one)
        elif place == 0:
            pair = [found[base, expert, part, half] for half in (0, 1)]
            both = torch.cat(
                [value.reshape(1) if value.ndim == 0 else value for value in pair], axis
            )
            gathered.setdefault(f"{base}.experts.gate_up_proj.{part}", []).append(both)
    return {key: torch.stack(values) for key, values in gathered.items()}


@pytest.mark.parametrize("name", [AWQ, INT4, DIVISOR, MULTIPLIER])
def test_fused_experts(name: str, tmp_path: Path) -> None:
    folder = copied(name, tmp_path)
    edit(folder, lambda tensors: fused(tensors, axis=1 if name == AWQ else 0))
    report = verify(fakes(name), folder)
    assert report.ok, str(report)
    layers = fakes(name)
    swap_gate_and_up(layers)
    assert not verify(layers, folder).ok


def test_plain_experts(tmp_path: Path) -> None:
    folder = copied(AWQ, tmp_path)
    held = reference(AWQ)
    plain: dict[str, torch.Tensor] = {}
    for layer, experts in held.items():
        for expert, weights in experts.items():
            for projection in PROJECTIONS:
                weights[projection] = weights[projection].bfloat16().float()
                key = f"layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"
                plain[key] = weights[projection].bfloat16()
    save_file(plain, folder / "model.safetensors")
    layers = {layer: FakeLayer(experts, metadata_layout="plain") for layer, experts in held.items()}
    report = verify(layers, folder)
    assert report.ok, str(report)
    assert dict(report.columns_by_format) == {"plain": 1152}


def test_prefixes_and_drafts(tmp_path: Path) -> None:
    folder = copied(DIVISOR, tmp_path)

    def rename(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        model = {f"model.language_{key}": value for key, value in tensors.items()}
        drafts = {key.replace("model.", "mtp.", 1): value * 0 for key, value in tensors.items()
                  if value.dtype == torch.uint8}  # fmt: skip
        return {**model, **drafts}

    edit(folder, rename)
    assert verify(fakes(DIVISOR), folder).ok


def test_a_family_of_the_callers_own(tmp_path: Path) -> None:
    folder = copied(DIVISOR, tmp_path)
    edit(
        folder, lambda tensors: {k.replace("block_sparse_moe", "ff"): v for k, v in tensors.items()}
    )

    def names(layer: int, expert: int, projection: Projection) -> str:
        part = {"gate": "w1", "up": "w3", "down": "w2"}[projection]
        return f"model.layers.{layer}.ff.experts.{expert}.{part}"

    assert verify(fakes(DIVISOR), folder, names=names).ok
    with pytest.raises(CheckpointError, match="pass names="):
        verify(fakes(DIVISOR), folder)


def test_the_index_alone_decides_which_file_supplies_a_tensor(tmp_path: Path) -> None:
    name = "deepseekv3-awq-gemm-g64"
    folder = copied(name, tmp_path)
    first, second = sorted(path.name for path in folder.glob("model-*.safetensors"))
    stale = {key: value * 0 for key, value in load_file(folder / first).items()}
    edit(folder, lambda tensors: {**stale, **tensors}, second)
    assert verify(fakes(name), folder).ok
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="two files hold the same tensor"):
        verify(fakes(name), folder)


@pytest.mark.parametrize("file", ["../x.safetensors", "/x.safetensors", "", "a\0b"])
def test_an_index_that_leaves_the_folder_is_refused(file: str, tmp_path: Path) -> None:
    folder = copied(AWQ, tmp_path)
    index = {"weight_map": {"model.layers.0.x": file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside the folder"):
        verify(fakes(AWQ), folder)


@pytest.mark.parametrize("part", ["qweight", "scales", "qzeros"])
def test_a_missing_tensor_is_named(part: str, tmp_path: Path) -> None:
    folder = copied(AWQ, tmp_path)
    gone = f"model.layers.1.block_sparse_moe.experts.3.w2.{part}"
    edit(folder, lambda tensors: {k: v for k, v in tensors.items() if k != gone})
    with pytest.raises(CheckpointError) as caught:
        verify(fakes(AWQ), folder)
    assert gone.rsplit(".", 1)[0] in str(caught.value)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="local folder"):
        verify(fakes(AWQ), "someone/some-model")
    with pytest.raises(CheckpointError, match="in no format known"):
        verify(fakes(REFUSED), FIXTURES / REFUSED)
    with pytest.raises(PolicyError, match="samples"):
        verify(fakes(AWQ), FIXTURES / AWQ, samples=0)
    folder = copied(AWQ, tmp_path)
    (folder / "model.safetensors").write_bytes(b"\x00" * 7)
    with pytest.raises(CheckpointError, match="cannot be opened"):
        verify(fakes(AWQ), folder)


def test_a_group_size_that_the_scales_contradict_is_refused(tmp_path: Path) -> None:
    folder = copied(AWQ, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["group_size"] = 64
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="declared group size"):
        verify(fakes(AWQ), folder)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_groups_stay_where_the_file_has_them(rank: int, tmp_path: Path) -> None:
    """I=96 in groups of 64: a ragged last group, and slices that start inside a group."""
    hidden, inner, group, experts = 32, 96, 64, 2
    rng = np.random.default_rng(7)
    tensors: dict[str, torch.Tensor] = {}
    held: dict[int, Weights] = {}
    own = slice(rank * 32, (rank + 1) * 32)
    sizes: dict[Projection, tuple[int, int]]
    sizes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    for expert in range(experts):
        held[expert] = {}
        for projection, (n, k) in sizes.items():
            codes = rng.integers(0, 16, (n, k))
            scales = torch.from_numpy(rng.uniform(0.01, 0.1, (n, -(-k // group)))).bfloat16()
            words = sum(codes[:, i::8].astype(np.uint32) << np.uint32(4 * i) for i in range(8))
            name = f"model.layers.5.mlp.experts.{expert}.{projection}_proj"
            tensors[f"{name}.weight_packed"] = torch.from_numpy(np.asarray(words).view(np.int32))
            tensors[f"{name}.weight_scale"] = scales.float()
            grown = scales.float().repeat_interleave(group, dim=1)[:, :k]
            full = torch.from_numpy(codes - 8).float() * grown
            held[expert][projection] = full[:, own] if projection == "down" else full[own]
    save_file(tensors, tmp_path / "only.safetensors")
    weights = {"num_bits": 4, "group_size": group, "symmetric": True}
    config = {
        "text_config": {"quantization_config": {"config_groups": {"a": {"weights": weights}}}}
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = verify({5: FakeLayer(held, FakeShard(rank, 3))}, tmp_path)
    assert report.ok, str(report)
    assert report.columns == experts * (32 + 32 + hidden)  # fewer than asked: exhaustive


def test_routes_label_the_calls() -> None:
    report: VerifyReport = verify(
        fakes(AWQ), FIXTURES / AWQ, route_of=lambda layer, tokens: f"r{tokens}"
    )
    assert {case.route for case in report.forward_worst} <= {"r1", "r2", "r9"}


@pytest.mark.parametrize("kind", ["pipe", "folder", "link to nothing"])
@pytest.mark.parametrize(
    "name", ["model.safetensors", "model.safetensors.index.json", "hf_quant_config.json"]
)
def test_what_is_no_file_is_neither_waited_for_nor_passed_over(
    kind: str, name: str, tmp_path: Path
) -> None:
    folder = copied(AWQ, tmp_path)
    (folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "folder":
        (folder / name).mkdir()
    else:
        (folder / name).symlink_to("nowhere")
    with pytest.raises(CheckpointError) as caught:
        verify(fakes(AWQ), folder, 8)
    assert str(folder / name) in str(caught.value)


@pytest.mark.parametrize("source", [None, 5, b"x", "", []])
def test_what_is_no_folder_is_refused(source: object) -> None:
    with pytest.raises(CheckpointError, match="source is not valid; expected a local folder"):
        verify(fakes(AWQ), source)  # type: ignore[arg-type]  # wrong on purpose


def test_arguments_of_another_kind_are_refused() -> None:
    folder, layers = FIXTURES / AWQ, fakes(AWQ)
    for samples in (0, -1, 1.5, "8", None, [8]):
        with pytest.raises(PolicyError, match="samples is not valid; expected a whole number of 1"):
            verify(layers, folder, samples)  # type: ignore[arg-type]  # wrong on purpose
    for seed in (-1, 1.5, "8", None):
        with pytest.raises(PolicyError, match="seed is not valid; expected a whole number of 0"):
            verify(layers, folder, 8, seed)  # type: ignore[arg-type]  # wrong on purpose
    for experts in (None, 5, [layers[0]]):
        with pytest.raises(LoaderError, match="experts is not valid; expected a mapping of layers"):
            verify(experts, folder)  # type: ignore[arg-type]  # wrong on purpose
    for layer in (None, torch.nn.Linear(2, 2), 5):
        with pytest.raises(LoaderError, match="layer 3 is not valid; expected prepared experts"):
            verify({3: layer}, folder)  # type: ignore[dict-item]  # wrong on purpose
    assert verify(layers, folder, np.int64(8), np.uint8(1)).ok  # type: ignore[arg-type]


def test_a_config_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    folder = copied(AWQ, tmp_path)
    (folder / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(CheckpointError, match="a JSON file cannot be read"):
        verify(fakes(AWQ), folder)


@pytest.mark.parametrize("size", [0, 4096])
def test_a_file_that_is_cut_during_the_check_is_refused(size: int, tmp_path: Path) -> None:
    """A mapped file would end the process here."""
    folder, layers = copied(AWQ, tmp_path), fakes(AWQ)
    dequantize = layers[0].dequantize

    def cut(expert: int) -> dict[str, torch.Tensor]:
        os.truncate(folder / "model.safetensors", size)
        return dequantize(expert)

    layers[0].dequantize = cut  # type: ignore[method-assign]  # the check calls it between reads
    with pytest.raises(CheckpointError, match="a file can no longer be read") as caught:
        verify(layers, folder, 512)
    assert str(folder / "model.safetensors") in str(caught.value) and caught.value.tensor

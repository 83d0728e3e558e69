"""Error messages that no other test reaches; ``make error-coverage`` says which those are."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from load_fakes import SMALL, RecordingSource, module_of, quantization_of

import loader
from loader import CapacityError, CheckpointError, ConversionError, LoaderError, memory, native
from loader.checkpoint.header import parse_header
from loader.checkpoint.source import LocalSource
from loader.converter import LayerBanks, guarded
from loader.core import DescriptorError
from loader.errors import UnsupportedError
from loader.testing.checkpoint import TinyCheckpoint, tiny_checkpoint
from loader.testing.container import INDEX, RawTensor, rewrite


def make(folder: Path, **more: Any) -> TinyCheckpoint:
    return tiny_checkpoint(folder, **{"attention": False, **SMALL, **more})


def test_a_header_that_is_one_entry() -> None:
    text = b'{"dtype":"U8","shape":[],"data_offsets":[0,1]}'
    with pytest.raises(CheckpointError, match="tensor entry has the wrong type") as caught:
        parse_header(struct.pack("<Q", len(text)) + text, 8 + len(text) + 1, "f")
    assert caught.value.tensor == "dtype"


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    with LocalSource(folder) as source:
        folder.rmdir()
        with pytest.raises(CheckpointError, match="folder cannot be listed"):
            source.list()


@pytest.mark.skipif(native.CORE is None, reason="the native core is not built")
@pytest.mark.parametrize("call", ["qpn_write", "qpn_finish"])
def test_memory_that_runs_out_in_native_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    make(tmp_path)
    assert native.CORE is not None

    def without(*arguments: Any) -> int:
        arguments[-1]._obj.what = b"memory ran out inside native code"
        return 3

    monkeypatch.setattr(native.CORE._library, call, without)
    with pytest.raises(CapacityError, match="inside native code") as caught:
        loader.load(tmp_path)
    assert caught.value.layer == 0


def test_memory_that_runs_out_in_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if native.CORE is None:
        pytest.skip("the native core is not built")
    make(tmp_path)
    layer = loader.load(tmp_path)[0]

    def without(*arguments: Any) -> int:
        arguments[-1]._obj.what = b"memory ran out inside native code"
        return 3

    monkeypatch.setattr(native.CORE._library, "qpn_moe", without)
    with pytest.raises(CapacityError, match="inside native code"):
        layer(torch.zeros(1, 64), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no room"),
        torch.OutOfMemoryError("no room"),
        RuntimeError("no room: can't allocate memory"),
    ],
)
def test_memory_that_runs_out_while_converting_is_no_fault_of_the_converter(
    error: Exception,
) -> None:
    def fail() -> torch.Tensor:
        raise error

    with pytest.raises(CapacityError, match="while converting; layer 4; found no room") as caught:
        guarded(4, fail)
    assert caught.value.__cause__ is error


def test_a_wrong_argument_is_no_matter_of_memory() -> None:
    wrong: Any = None
    with pytest.raises(AttributeError), memory.allocating("the banks", 1, 0):
        LayerBanks.allocate(wrong, torch.device("cpu"), None)


def test_an_extra_state_of_another_layer(tmp_path: Path) -> None:
    make(tmp_path)
    layer = loader.load(tmp_path)[1]
    with pytest.raises(LoaderError, match="extra state does not match the layer") as caught:
        layer.set_extra_state({**layer.get_extra_state(), "experts": 5})
    assert caught.value.layer == 1
    layer.set_extra_state(layer.get_extra_state())


def test_an_implementation_that_reads_no_files() -> None:
    table = torch.zeros((0, 12), dtype=torch.int64)
    with (
        native.serving(native.REFERENCE),
        pytest.raises(UnsupportedError, match="converts from memory only"),
    ):
        banks = [torch.zeros(1)]
        buffers = torch.zeros(1, 64, dtype=torch.uint8)
        native.read(0, 0, table, banks, torch.zeros(0, 3), buffers, [])


def test_a_piece_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the plan would be found by native code, and is told of by the tensor's name."""
    make(tmp_path)

    def refusing(*arguments: Any) -> Any:
        raise DescriptorError(0, "source reaches outside the chunk")

    monkeypatch.setattr(native, "write", refusing)
    with (
        RecordingSource(tmp_path) as source,
        pytest.raises(ConversionError, match="does not fit its buffers") as caught,
    ):
        loader.load(source)
    assert caught.value.layer == 0 and str(caught.value.tensor).startswith("model.layers.0.")


def test_a_module_in_a_format_that_is_not_loaded(tmp_path: Path) -> None:
    made = make(tmp_path, dialect="modelopt-nvfp4", group=None)
    quantization = quantization_of(made)
    quantization.update(
        quant_algo="MIXED_PRECISION",
        quantized_layers={"model.layers.0.mlp.experts*": {"quant_algo": "FP8"}},
    )
    with pytest.raises(UnsupportedError, match="in a format that is not loaded") as caught:
        loader.prepare_module(module_of(made), quantization=quantization)
    assert "not listed in quantized_layers" in str(caught.value.found)


def test_what_the_generator_does_not_have(tmp_path: Path) -> None:
    made = make(tmp_path, excluded=(1,))
    with pytest.raises(UnsupportedError, match="without 4-bit codes"):
        made.codes(1, 0, "gate")
    with pytest.raises(CheckpointError, match="no such projection"):
        made.codes(0, 0, "side")
    with pytest.raises(CheckpointError, match="no such tensor"):
        made.file_of("absent")
    with pytest.raises(CheckpointError, match="no such tensor"):
        made.tensor("absent")


def test_tensors_of_another_rank(tmp_path: Path) -> None:
    made = make(tmp_path)
    reshaped("qweight", lambda shape: (1, *shape))(made.folder)
    with pytest.raises(CheckpointError, match="the tensor has the wrong rank"):
        loader.plan(made.folder)


# What the independent check refuses, of a checkpoint that changed after its load


def verified(folder: Path, change: Callable[[Path], None], words: str, **more: Any) -> None:
    made = make(folder, **more)
    experts = loader.load(folder)
    change(folder)
    with pytest.raises(CheckpointError, match=words):
        loader.verify(experts, made.folder, samples=8)


def index(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / INDEX).write_text(text) and None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "a JSON file cannot be read"),
        ("[1]", "a JSON file is not an object"),
        ("{}", "the index has no weight_map"),
    ],
)
def test_verify_an_index_that_is_none(tmp_path: Path, text: str, words: str) -> None:
    verified(tmp_path, index(text), words, shards=2)


def test_verify_an_index_that_gives_tensors_to_other_files(tmp_path: Path) -> None:
    def swap(folder: Path) -> None:
        content = json.loads((folder / INDEX).read_text())
        one, other = sorted(set(content["weight_map"].values()))
        turned = {one: other, other: one}
        content["weight_map"] = {n: turned[f] for n, f in content["weight_map"].items()}
        (folder / INDEX).write_text(json.dumps(content))

    verified(tmp_path, swap, "does not hold the tensor", shards=2)


def test_verify_files_of_which_none_is_the_model(tmp_path: Path) -> None:
    def rename(folder: Path) -> None:
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        (folder / "b.safetensors").write_bytes(data)

    verified(tmp_path, rename, "no file is clearly the model")


def reshaped(name_part: str, shape: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Any:
    """Every tensor of some name in another shape; its bytes are cut to it."""

    def change(tensors: dict[str, RawTensor]) -> None:
        for name, old in list(tensors.items()):
            if name_part in name:
                new = shape(old.shape)
                kept = len(old.data) * int(np.prod(new)) // int(np.prod(old.shape))
                tensors[name] = RawTensor(old.dtype, new, old.data[:kept], old.file)

    return lambda folder: rewrite(folder, change)


def test_verify_a_tensor_of_another_shape(tmp_path: Path) -> None:
    turned = reshaped("down_proj.scales", lambda shape: (shape[1], shape[0]))
    verified(tmp_path, turned, "a tensor does not fit its format")


def test_verify_a_fused_tensor_without_some_expert(tmp_path: Path) -> None:
    fewer = reshaped("experts.", lambda shape: (1, *shape[1:]))
    verified(tmp_path, fewer, "no such expert", dialect="ct-int4", fused=True)


def test_verify_experts_under_another_name(tmp_path: Path) -> None:
    def rename(tensors: dict[str, RawTensor]) -> None:
        for name in list(tensors):
            tensors[name.replace("up_proj", "upper_proj")] = tensors.pop(name)

    verified(tmp_path, lambda folder: rewrite(folder, rename), "is not to be found")

"""The checkpoint as raw tensors: which file holds which name, and its bytes as a tensor.

Headers are checked by ``safetensors``, and nothing is taken from the loader's own reader. The
index, where present, is the only authority on which file supplies a tensor.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from loader.errors import CheckpointError
from loader.verify.raw_file import RawFile, require_regular

INDEX_NAME = "model.safetensors.index.json"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; raises :class:`CheckpointError` if it is anything else."""
    require_regular(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            "a JSON file cannot be read", file=str(path), expected="a JSON object", found=error
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            "a JSON file is not an object",
            file=str(path),
            expected="a JSON object",
            found=type(value).__name__,
        )
    return value


def _folder_of(source: str | os.PathLike[str], revision: str | None) -> Path:
    """The local folder, or where the Hub's cache keeps the repo of that id; nothing is fetched."""
    folder = Path(source)
    if folder.exists() or not isinstance(source, str) or source.count("/") != 1:
        return folder
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return folder  # then no load can have left one in the cache
    try:
        config = try_to_load_from_cache(source, "config.json", revision=revision)
    except HFValidationError:
        return folder
    return Path(config).parent if isinstance(config, str) else folder


class RawCheckpoint:
    """A local checkpoint folder; a context manager that owns the open files.

    ``modules`` maps a module's name to the parts it has (``qweight``, ``weight_scale``, ...).
    Raises :class:`CheckpointError` when the folder is not local, or files or tensors are missing.
    """

    def __init__(self, source: str | os.PathLike[str], revision: str | None = None) -> None:
        if not isinstance(source, (str, os.PathLike)) or not os.fspath(source):
            raise CheckpointError(
                "source is not valid", expected="a local folder", found=repr(source)
            )
        self.folder = _folder_of(source, revision)
        if not self.folder.is_dir():
            raise CheckpointError(
                "the check reads the checkpoint from a local folder",
                file=str(source),
                expected="a local folder",
                found="a file" if self.folder.exists() else "no such folder",
            )
        self._stack = ExitStack()
        self._handles: dict[str, RawFile] = {}
        try:
            self._files = self._locate()
        except BaseException:
            self._stack.close()
            raise
        self.modules: dict[str, set[str]] = {}
        for name in self._files:
            module, _, part = name.rpartition(".")
            self.modules.setdefault(module, set()).add(part)

    def __enter__(self) -> RawCheckpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._handles.clear()
        self._stack.close()

    def read_json(self, name: str, *, required: bool) -> dict[str, Any]:
        """The JSON object in the folder's file ``name``; empty if absent and not required."""
        path = self.folder / name
        return read_json(path) if required or os.path.lexists(path) else {}

    def file_of(self, name: str) -> str:
        """The file, relative to the folder, that supplies tensor ``name``."""
        try:
            return self._files[name]
        except KeyError:
            raise CheckpointError(
                "a tensor is missing",
                file=str(self.folder),
                tensor=name,
                expected="present",
                found="absent",
            ) from None

    def dtype(self, name: str) -> str:
        """The dtype of ``name`` as the header spells it, such as ``F8_E4M3``."""
        return self._handle(self.file_of(name)).dtype(name)

    def shape(self, name: str) -> list[int]:
        """The shape of ``name`` as the header has it."""
        return self._handle(self.file_of(name)).shape(name)

    def read(self, name: str, lead: int | None = None) -> torch.Tensor:
        """The tensor ``name`` on the host; with ``lead``, that index of its leading axis only."""
        shape = self.shape(name)
        if lead is not None and (not shape or lead >= shape[0]):
            raise CheckpointError(
                "a fused tensor has no such expert",
                file=self._files[name],
                experts=str(lead),
                tensor=name,
                expected=f"a leading axis of at least {lead + 1}",
                found=f"shape {shape}",
            )
        return self._handle(self.file_of(name)).read(name, lead)

    def _handle(self, file: str) -> RawFile:
        if file not in self._handles:
            self._handles[file] = self._stack.enter_context(RawFile(self.folder / file))
        return self._handles[file]

    def _locate(self) -> dict[str, str]:
        """Tensor name -> file name, from the index, or else from the headers."""
        index = self.folder / INDEX_NAME
        if os.path.lexists(index):  # a link to nothing is still the authority
            return self._from_index(index)
        files: dict[str, str] = {}
        for file in self._unindexed():
            for name in self._handle(file).names():
                if name in files:
                    raise CheckpointError(
                        "two files hold the same tensor and no index chooses",
                        file=f"{files[name]}, {file}",
                        tensor=name,
                        expected="one file",
                        found="two files",
                    )
                files[name] = file
        return files

    def _from_index(self, index: Path) -> dict[str, str]:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(
                "the index has no weight_map",
                file=str(index),
                expected="an object",
                found=type(weight_map).__name__,
            )
        for file in set(map(str, weight_map.values())):
            # A name that leaves the folder is no part of this model, whatever lies there.
            if not file or "\0" in file or Path(file).is_absolute() or ".." in Path(file).parts:
                raise CheckpointError(
                    "the index names a file outside the folder",
                    file=str(index),
                    expected="a name inside the folder",
                    found=repr(file),
                )
        return {str(name): str(file) for name, file in weight_map.items()}

    def _unindexed(self) -> list[str]:
        if os.path.lexists(self.folder / "model.safetensors"):
            return ["model.safetensors"]
        shards = sorted(path.name for path in self.folder.glob("model-*-of-*.safetensors"))
        if shards:
            return shards
        single = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if len(single) != 1:
            raise CheckpointError(
                "no file is clearly the model",
                file=str(self.folder),
                expected="an index, model.safetensors, numbered shards or one *.safetensors",
                found=", ".join(single) or "no *.safetensors",
            )
        return single

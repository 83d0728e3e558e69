"""Weight map: which file supplies each tensor, as the index says; columns instead of a dict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain

import numpy as np
import numpy.typing as npt

from loader.checkpoint.header import Header
from loader.checkpoint.json_file import decode_json, read_json
from loader.checkpoint.scan import IndexColumns, scan_index, scan_owned
from loader.checkpoint.source import Source, check_name
from loader.checkpoint.wording import shown, tensor_error
from loader.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class WeightMap(Mapping[str, str]):
    """Tensor -> file, in the order of the index; ``files`` are the distinct files, sorted."""

    def __init__(self, columns: IndexColumns) -> None:
        self._columns = columns
        self.files = tuple(sorted(columns.files))

    @cached_property
    def _file_of(self) -> dict[str, str]:
        """For single names: messages, and the checks that lead to them."""
        files = map(self._columns.files.__getitem__, self._columns.file_ids.tolist())
        return dict(zip(self._columns.names, files, strict=True))

    def __getitem__(self, name: str) -> str:
        return self._file_of[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns.names)

    def __len__(self) -> int:
        return len(self._columns.names)

    @classmethod
    def of(cls, file_of: Mapping[str, str]) -> WeightMap:
        """The same from a mapping."""
        files = list(dict.fromkeys(file_of.values()))
        numbers = {file: number for number, file in enumerate(files)}
        file_ids = map(numbers.__getitem__, file_of.values())
        column = np.fromiter(file_ids, np.int32, len(file_of))
        return cls(IndexColumns(list(file_of), files, column))

    def owned(self, headers: Sequence[Header]) -> npt.NDArray[np.bool_]:
        """bool [n] over all tensors of the headers: whether the index gives it to that file."""
        known = {file: number for number, file in enumerate(self._columns.files)}
        numbers = [known.get(header.file, -1) for header in headers]
        counts = [len(header.names) for header in headers]
        file_ids = np.repeat(np.asarray(numbers, np.int32), counts)
        owned = scan_owned(self._columns, list(chain(*(h.names for h in headers))), file_ids)
        if owned is not None:
            return owned
        found = [self._file_of.get(name) == h.file for h in headers for name in h.names]
        return np.asarray(found, np.bool_)


def read_weight_map(source: Source) -> WeightMap:
    """The index's tensor -> file, with every file name safe to open. Raises CheckpointError."""
    data = read_json(source, INDEX_FILE)
    columns = scan_index(data)
    weight_map = WeightMap(columns) if columns is not None else _decoded(data)
    for file in weight_map.files:
        check_name(file)
        if not file.endswith(".safetensors"):
            pickle = " (pickles are never opened)" if file.endswith(PICKLE_SUFFIXES) else ""
            raise CheckpointError(
                "index names a file that is no safetensors",
                file=shown(file),
                expected=f"*.safetensors{pickle}",
            )
    return weight_map


def _decoded(data: bytes) -> WeightMap:
    """The weight map of an index that native code did not take."""
    file_of = decode_json(data, INDEX_FILE).get("weight_map")
    if not isinstance(file_of, dict) or not file_of:
        raise CheckpointError(
            "index has no weight_map",
            file=INDEX_FILE,
            expected="a JSON object: tensor -> file",
            found="an empty one" if file_of == {} else type(file_of).__name__,
        )
    if not set(map(type, file_of.values())) <= {str}:
        names = [name for name, file in file_of.items() if type(file) is not str]
        found = shown(repr(file_of[names[0]]))
        raise tensor_error(
            "index gives no file name", INDEX_FILE, names, expected="a string", found=found
        )
    return WeightMap.of(file_of)

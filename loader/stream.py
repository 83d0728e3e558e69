"""Stream: the staging ring, and reads that run one chunk ahead of the conversion."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch

from loader import memory
from loader.checkpoint.source import Source
from loader.chunks import Chunk
from loader.errors import LoaderError


class Staging:
    """Read buffers of one load: allocated once, freed once, at the load's end or failure."""

    def __init__(self, buffers: int, buffer_bytes: int) -> None:
        self.buffer_bytes = buffer_bytes
        self.nbytes = buffers * buffer_bytes
        cpu = torch.device("cpu")
        self._buffers: list[torch.Tensor] = [
            memory.fresh((buffer_bytes,), torch.uint8, cpu) for _ in range(buffers)
        ]

    def buffer(self, number: int, nbytes: int) -> torch.Tensor:
        """The first ``nbytes`` of a buffer as uint8; a view that must not outlive the chunk."""
        return self._buffers[number % len(self._buffers)][:nbytes]

    def close(self) -> None:
        """Drop the buffers; may be called again."""
        self._buffers = []


class Scheduled(NamedTuple):
    """One chunk in the order of a load: its layer, and whether it is the layer's last."""

    layer: int
    chunk: Chunk
    last: bool


@dataclass(frozen=True, eq=False)
class Filled:
    """One chunk whose bytes are in ``data`` (uint8), and the seconds that reading took."""

    scheduled: Scheduled
    data: torch.Tensor
    read_seconds: float


class ReadAhead:
    """Fills buffers with chunks in order, one ahead of the caller.

    The chunk ahead may belong to the next layer, which then is read before this one is released.
    """

    def __init__(self, source: Source, files: Sequence[str], staging: Staging) -> None:
        self._source = source
        self._files = files
        self._staging = staging
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="qpn-read")

    def stream(self, schedule: Iterator[Scheduled]) -> Iterator[Filled]:
        """Yield filled chunks; a failed read raises when its chunk is due.

        The buffer handed out is read into again by the chunk after the next one: drop it before
        going on.
        """
        turn = 0
        current = next(schedule, None)
        future = self._submit(current, turn)
        while current is not None and future is not None:
            seconds = self._result(current.layer, future)
            following = next(schedule, None)
            future = self._submit(following, turn + 1)
            buffer = self._staging.buffer(turn, current.chunk.buffer_bytes)
            filled = [Filled(current, buffer, seconds)]
            del buffer
            # Popped, so that this frame holds no view while the caller converts.
            yield filled.pop()
            current, turn = following, turn + 1

    def _submit(self, item: Scheduled | None, turn: int) -> Future[float] | None:
        return None if item is None else self._executor.submit(self._fill, item.chunk, turn)

    def _result(self, layer: int, future: Future[float]) -> float:
        try:
            return future.result()
        except LoaderError as error:
            raise error.at(layer=layer) from None

    def _fill(self, chunk: Chunk, turn: int) -> float:
        started = time.perf_counter()
        data = memoryview(self._staging.buffer(turn, chunk.buffer_bytes).numpy())
        for read in chunk.reads:
            name = self._files[read.file]
            self._source.read_into(name, read.offset, data[read.at : read.at + read.length])
        return time.perf_counter() - started

    def close(self) -> None:
        """Wait for a read in flight (it still writes into a buffer) and stop the thread."""
        self._executor.shutdown(wait=True, cancel_futures=True)

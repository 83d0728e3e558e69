"""Stream: the staging ring, and reads that run one chunk ahead of the conversion."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from loader import memory
from loader.checkpoint.source import Source
from loader.chunks import Chunk, Read
from loader.converter import LayerConverter
from loader.core import DescriptorError
from loader.errors import CheckpointError, ConversionError, LoaderError
from loader.pieces import Pieces, descriptors_of


class Staging:
    """Read buffers of one load: allocated once, freed once, at the load's end or failure."""

    def __init__(self, buffers: int, buffer_bytes: int) -> None:
        self.buffer_bytes = buffer_bytes
        self.nbytes = buffers * buffer_bytes
        cpu = torch.device("cpu")
        with memory.allocating("staging", self.nbytes):
            self._table = memory.fresh((buffers, buffer_bytes), torch.uint8, cpu)

    def buffer(self, number: int, nbytes: int) -> torch.Tensor:
        """The first ``nbytes`` of a buffer as uint8; a view that must not outlive the chunk."""
        return self._table[number % len(self._table), :nbytes]

    def table(self) -> torch.Tensor:
        """All buffers as uint8 (buffers, bytes), for code that takes one for each thread."""
        return self._table

    def close(self) -> None:
        """Drop the buffers; may be called again."""
        self._table = torch.empty((0, 0), dtype=torch.uint8, device="cpu")


class Scheduled(NamedTuple):
    """One chunk in the order of a load: its layer, and whether it is the layer's last."""

    layer: int | None
    chunk: Chunk
    last: bool


NameOf = Callable[[int], str]
"""Name of a source tensor by the row that pieces call it by."""

Found = tuple[torch.Tensor, Pieces]
"""Findings of one call, and the pieces whose indices they count."""


def _found(call: Callable[..., torch.Tensor], pieces: Pieces, name_of: NameOf) -> Found:
    """One call of the converter; a descriptor that does not fit is named by its tensor."""
    try:
        return call(descriptors=torch.from_numpy(descriptors_of(pieces))), pieces
    except DescriptorError as error:
        raise ConversionError(
            f"a piece does not fit its buffers: {error}",
            tensor=name_of(int(pieces["tensor"][error.subject])),
        ) from error


@dataclass(frozen=True, eq=False)
class Filled:
    """One chunk whose bytes are in ``data`` (uint8), and the seconds that reading took."""

    scheduled: Scheduled
    data: torch.Tensor
    read_seconds: float

    def convert(self, converter: LayerConverter, name_of: NameOf) -> list[Found]:
        """Convert the chunk; findings with the pieces that they count."""
        pieces = self.scheduled.chunk.pieces
        return [_found(partial(converter.write, self.data), pieces, name_of)]


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
        if item is None:
            return None
        with memory.starting_threads():
            return self._executor.submit(self._fill, item.chunk, turn)

    def _result(self, layer: int | None, future: Future[float]) -> float:
        try:
            return future.result()
        except LoaderError as error:
            raise error.at(layer=layer) from error.__cause__

    def _fill(self, chunk: Chunk, turn: int) -> float:
        started = time.perf_counter()
        data = memoryview(self._staging.buffer(turn, chunk.buffer_bytes).numpy())
        for read in chunk.reads:
            name = self._files[read.file]
            try:
                self._source.read_into(name, read.offset, data[read.at : read.at + read.length])
            except LoaderError:
                raise
            except Exception as error:  # a source of someone else's, which owes us a LoaderError
                raise CheckpointError(
                    "file cannot be read",
                    file=name,
                    expected=f"{read.length} bytes at offset {read.offset}",
                    found=f"{type(error).__name__}: {error}",
                ) from error
        return time.perf_counter() - started

    def close(self) -> None:
        """Wait for a read in flight (it still writes into a buffer) and stop the thread."""
        self._executor.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True, eq=False)
class Lent:
    """One chunk that native code reads itself, from descriptors that the source lends."""

    scheduled: Scheduled
    reader: DirectReads
    read_seconds: float = 0.0

    def convert(self, converter: LayerConverter, name_of: NameOf) -> list[Found]:
        """Read and convert the chunk, a call for each file; findings with their pieces."""
        return self.reader.convert(self.scheduled.chunk, converter, name_of)


_CAN_ASK = hasattr(os, "posix_fadvise") and hasattr(os, "RWF_NOWAIT")  # Linux


def _is_cached(file: int, offset: int) -> bool:
    """Whether one byte of a file is there without waiting for a disk."""
    try:
        return os.preadv(file, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except OSError:  # EAGAIN, or a file system that cannot tell
        return False


class DirectReads:
    """Hands out chunks for native code to read, and asks the kernel for the next one meanwhile."""

    def __init__(self, source: Source, files: Sequence[str], staging: Staging) -> None:
        self._source = source
        self._files = files
        self._staging = staging

    def stream(self, schedule: Iterator[Scheduled]) -> Iterator[Lent]:
        """Yield chunks in order; the one after each is on its way into the page cache."""
        current = next(schedule, None)
        while current is not None:
            following = next(schedule, None)
            if following is not None and _CAN_ASK:
                self._ask(following.chunk)
            yield Lent(current, self)
            current = following

    def _ask(self, chunk: Chunk) -> None:
        """Start reading a chunk from disk; where its ends are in the page cache, so is the rest.

        A hint: a read that cannot be asked for ahead fails, if it does, when it is due.
        """
        by_file: dict[int, list[Read]] = {}
        for read in chunk.reads:
            by_file.setdefault(read.file, []).append(read)
        for number, reads in by_file.items():
            with (
                suppress(LoaderError, OSError),
                self._source.descriptor(self._files[number]) as file,
            ):
                if _is_cached(file, reads[0].offset) and _is_cached(file, reads[-1].offset):
                    continue
                for read in reads:
                    os.posix_fadvise(file, read.offset, read.length, os.POSIX_FADV_WILLNEED)

    def convert(self, chunk: Chunk, converter: LayerConverter, name_of: NameOf) -> list[Found]:
        """Read and convert one chunk; see :class:`Lent`."""
        done = []
        buffers = self._staging.table()
        chunk.pieces["offset"] = chunk.pieces["begin"]
        for number in dict.fromkeys(read.file for read in chunk.reads):
            own = chunk.pieces[chunk.pieces["file"] == number]
            name = self._files[number]
            nbytes = self._source.size(name)
            try:
                with self._source.descriptor(name) as file:
                    read = partial(converter.read, file, nbytes, buffers=buffers)
                    done.append(_found(read, own, name_of))
            except LoaderError as error:
                raise error.at(file=name) from error.__cause__
        return done

    def close(self) -> None:
        """Nothing runs beside the caller."""

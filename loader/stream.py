"""Stream: the staging ring, and reads that run one chunk ahead of the conversion."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

import torch

from loader import memory
from loader.checkpoint.source import Source
from loader.chunks import Chunk, Read
from loader.converter import LayerConverter
from loader.errors import CheckpointError, LoaderError
from loader.reading_thread import ReadingThread
from loader.ring import Ring
from loader.scheduled import Found, NameOf, found_by
from loader.scheduled import Scheduled as Scheduled
from loader.staging_plan import StagingPlan


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

    def arrived(self, buffer: torch.Tensor) -> torch.Tensor:
        """A filled buffer where the converter takes it: as it is, on the host."""
        return buffer

    def close(self) -> None:
        """Drop the buffers; may be called again."""
        self._table = torch.empty((0, 0), dtype=torch.uint8, device="cpu")


@dataclass(frozen=True, eq=False)
class Filled:
    """One chunk whose bytes are in ``data`` (uint8), and the seconds that reading took."""

    scheduled: Scheduled
    data: torch.Tensor
    read_seconds: float

    def convert(self, converter: LayerConverter, name_of: NameOf) -> list[Found]:
        """Convert the chunk; findings with the pieces that they count."""
        pieces = self.scheduled.chunk.pieces
        return [found_by(partial(converter.write, self.data), pieces, name_of)]


class ReadAhead:
    """Fills buffers with chunks in order, one ahead of the caller.

    The chunk ahead may belong to the next layer, which then is read before this one is released.
    """

    def __init__(self, source: Source, files: Sequence[str], staging: Staging | Ring) -> None:
        self._source = source
        self._files = files
        self._staging = staging
        self._thread = ReadingThread()

    def stream(self, schedule: Iterator[Scheduled]) -> Iterator[Filled]:
        """Yield filled chunks; a failed read raises when its chunk is due.

        The buffer handed out is read into again by the chunk after the next one: drop it before
        going on.
        """
        turn = 0
        current = next(schedule, None)
        self._submit(current, turn)
        while current is not None:
            seconds = self._result(current.layer)
            following = next(schedule, None)
            self._submit(following, turn + 1)
            buffer = self._staging.buffer(turn, current.chunk.buffer_bytes)
            filled = [Filled(current, self._staging.arrived(buffer), seconds)]
            del buffer
            # Popped, so that this frame holds no view while the caller converts.
            yield filled.pop()
            current, turn = following, turn + 1

    def _submit(self, item: Scheduled | None, turn: int) -> None:
        if item is not None:
            self._thread.begin(partial(self._fill, item.chunk, turn))

    def _result(self, layer: int | None) -> float:
        try:
            return self._thread.result()
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
        self._thread.close()


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
                    done.append(found_by(read, own, name_of))
            except LoaderError as error:
                raise error.at(file=name) from error.__cause__
        return done

    def close(self) -> None:
        """Nothing runs beside the caller."""


FILES_AT_ONCE = 2
"""Files that one chunk on its way keeps open: a source may have as few as eight for all of them."""


@dataclass(frozen=True, eq=False)
class Arriving:
    """One chunk on its way into a ring; its files are open until it is taken."""

    scheduled: Scheduled
    place: int
    ring: Ring
    files: dict[int, str]
    opened: ExitStack
    read_seconds: float = 0.0

    def convert(self, converter: LayerConverter, name_of: NameOf) -> list[Found]:
        """Enqueue the conversion of the chunk; what is found stays on the card."""
        chunk = self.scheduled.chunk
        data = self.ring.take(self.place, chunk.buffer_bytes, self.files)
        self.opened.close()
        found = found_by(partial(converter.write, data), chunk.pieces, name_of)
        self.ring.release(self.place)
        return [found]


class RingReads:
    """Keeps a ring full: chunks are read and copied while earlier ones are converted.

    The chunks ahead may belong to the next layer, whose banks need not exist yet.
    """

    def __init__(self, source: Source, files: Sequence[str], ring: Ring) -> None:
        self._source = source
        self._files = files
        self._ring = ring
        self._ahead: deque[Arriving] = deque()

    def stream(self, schedule: Iterator[Scheduled]) -> Iterator[Arriving]:
        """Yield chunks in order; each must be converted before the next is asked for."""
        for turn, scheduled in enumerate(schedule):
            if len(self._ahead) == self._ring.shape.chunks:
                yield self._ahead[0]
                self._ahead.popleft()
            self._begin(scheduled, turn % self._ring.shape.chunks)
        while self._ahead:
            yield self._ahead[0]
            self._ahead.popleft()

    def _begin(self, scheduled: Scheduled, place: int) -> None:
        arriving = Arriving(scheduled, place, self._ring, {}, ExitStack())
        # Kept before its files are opened: whatever fails, close() lets go of them.
        self._ahead.append(arriving)
        chunk = scheduled.chunk
        files = list(dict.fromkeys(read.file for read in chunk.reads))
        try:
            for first in range(0, len(files), FILES_AT_ONCE):
                if first:  # the others of the chunk, before more are opened
                    self._ring.take(place, chunk.buffer_bytes, arriving.files)
                    arriving.opened.close()
                self._submit(arriving, files[first : first + FILES_AT_ONCE])
        except LoaderError as error:
            raise error.at(layer=scheduled.layer) from error.__cause__

    def _submit(self, arriving: Arriving, files: Sequence[int]) -> None:
        """Open some files of a chunk, and begin the reads from them."""
        chunk = arriving.scheduled.chunk
        descriptors: dict[int, int] = {}
        for number in files:
            name = self._files[number]
            file = arriving.opened.enter_context(self._source.descriptor(name))
            descriptors[number] = file
            arriving.files[file] = name
        reads = [
            (descriptors[read.file], read.offset, read.length, read.at)
            for read in chunk.reads
            if read.file in descriptors
        ]
        self._ring.submit(arriving.place, chunk.buffer_bytes, reads)

    def close(self) -> None:
        """Wait for the reads in flight, then let go of their files; the ring is closed too."""
        self._ring.close()
        while self._ahead:
            with suppress(LoaderError):  # the load has failed already, or ended
                self._ahead.popleft().opened.close()


Reader = ReadAhead | DirectReads | RingReads
Delivered = Filled | Lent | Arriving


def open_staging(plan: StagingPlan) -> Staging | Ring:
    """The staging that a plan says; the caller closes it."""
    core = plan.implementation.card
    if plan.ring is None or core is None:
        return Staging(plan.buffers, plan.buffer_bytes)
    return Ring(core, plan.device, plan.ring)


def open_reader(plan: StagingPlan, staging: Staging | Ring) -> Reader:
    """What brings the chunks of a plan into its staging; the caller closes it first."""
    source, files = plan.checkpoint.source, plan.checkpoint.catalog.files
    if not plan.direct:
        return ReadAhead(source, files, staging)
    if isinstance(staging, Ring):
        return RingReads(source, files, staging)
    return DirectReads(source, files, staging)

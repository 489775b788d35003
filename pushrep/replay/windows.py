"""The walk over a log's batches (pushrep/log/walk.py) in long strides: a window of the file into memory used again.

    file    | batch | batch | bat|ch | ...        the window, and what is missing of its last batch
            ────── 768 KiB ──────▶ ──▶            small batches are checked together (records/batch_run.py)

It stops before whatever is not plainly as it should be: the end of the log, a hole, a fallen epoch, a CRC that does not
match. The log's own reader goes on from there and says what is the matter, so that this one raises nothing of its own.

Tail is the same for a reader that follows a log of another process closely: one read behind the batch given last.

    file    ... | last | new | new |          its header still stands there ─▶ one read, no index, nothing twice
                ^ remembered

The memory is read into again and again (Buffers): new pages cost more than what is read into them.

take ─▶ a view ─▶ views of its parts ─▶ ... ─▶ the last one is dropped        free: nobody has to give it back
"""

import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from os import preadv
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pushrep.env import File, Filesystem
from pushrep.log.directory_files import read_cleaned_offset
from pushrep.log.errors import CorruptBatch
from pushrep.log.reader import hold_against_seal
from pushrep.log.segment_files import segment_path
from pushrep.log.walk import ScanRange, count_in_place
from pushrep.records import HEADER_BYTES, BatchHeader, CorruptRecordBatch, RecordBatch
from pushrep.records.batch_run import checked_run, length_of_first
from pushrep.records.header import CRC_COVERS_FROM, LENGTH_ENDS_AT, crc32c_in_place
from pushrep.replay.slices import NoBatchThere, OpenSegments, SliceReader

_KEPT_MAX = 6
"""What a block of a local replay is made of, and one more."""
_ALIGNMENT = 64
"""Bytes of a processor's cache line. The kernel's copy to where none begins takes a third longer."""


class Buffers:
    """Buffers of `size_bytes`. Thread-safe. Who holds a view keeps its buffer, however many others come meanwhile."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._kept: list[tuple[bytearray, int]] = []
        self._lock = threading.Lock()

    def acquire(self) -> memoryview:
        """All of one that nobody looks into; what is in it is left from before. Never waits."""
        kept = self.acquire_kept()
        if kept is not None:
            return kept
        buffer, begin = made = self._made()
        if self._lock.acquire(blocking=False):  # else, a moment later, or in a fork never: one that is not kept
            self._kept = [*self._kept[1:], made]
            self._lock.release()
        return self._view(buffer, begin)

    def acquire_kept(self) -> memoryview | None:
        """The same, but None if somebody looks into each of as many as are kept: for who has another way."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            for number, (buffer, begin) in enumerate(self._kept):
                try:
                    buffer.append(buffer.pop())  # a view of it forbids that
                except BufferError:
                    continue
                self._kept.append(self._kept.pop(number))
                return self._view(buffer, begin)
            if len(self._kept) >= _KEPT_MAX:
                return None
            self._kept.append(self._made())
            return self._view(*self._kept[-1])
        finally:
            self._lock.release()

    def _made(self) -> tuple[bytearray, int]:
        made = bytearray(self._size_bytes + _ALIGNMENT)
        return made, -np.frombuffer(made, np.uint8).ctypes.data % _ALIGNMENT

    def _view(self, buffer: bytearray, begin: int) -> memoryview:
        return memoryview(buffer)[begin : begin + self._size_bytes]


class KeptBuffers:
    """For bodies of frames: who keeps many small ones keeps no whole buffer for each."""

    def __init__(self, size_bytes: int) -> None:
        self._buffers = Buffers(size_bytes)

    def acquire(self) -> memoryview | None:
        """See `Buffers.acquire_kept`."""
        return self._buffers.acquire_kept()

    def give_back(self, _buffer: object, /) -> None:
        """It came back when its last view was dropped."""


WINDOW_BYTES = 768 << 10
"""With the rest of its last batch it stays in a processor's own cache until it is checked."""
_BATCH_BYTES_MAX = 2 << 20
"""A larger batch is the log's own reader's: a buffer keeps its size."""
BUFFER_BYTES = WINDOW_BYTES + _BATCH_BYTES_MAX
_TOGETHER_MIN = 24
"""Fewer batches in a window are checked faster one by one: together costs 0.1 ms before the first."""


class Window(NamedTuple):
    """Batches that follow each other, and their bytes together."""

    batches: list[RecordBatch]
    size_bytes: int


class BatchWindows:
    """Whole batches of one log, read in windows. Not thread-safe."""

    def __init__(self, directory: Path, filesystem: Filesystem, buffers: Buffers) -> None:
        self._directory, self._filesystem, self._buffers = directory, filesystem, buffers

    def windows(self, start: int, end: int) -> Iterator[Window]:
        """Every batch that holds an offset in [start, end), as far as all is plain, by windows. Raises nothing."""
        files = OpenSegments(self._filesystem)
        places = SliceReader(self._directory, self._filesystem, files)
        with closing(files), suppress(NoBatchThere, CorruptBatch, OSError):
            what = places.place(start)
            segment, position, epoch = what.base_offset, what.position, what.leader_epoch
            expected = segment if what.next_offset is None else what.next_offset
            file = files.get(self._directory, segment).file
            while expected < end:
                batches, read_bytes = self._read(file, position)
                if not batches:
                    following = segment_path(self._directory, expected)
                    if segment == expected or not self._filesystem.exists(following):
                        return
                    segment, position = expected, 0
                    file = files.get(self._directory, segment).file  # held against its seal once, before its first
                    continue
                in_place = count_in_place([batch.header for batch in batches], expected, epoch)
                given = batches[:in_place]
                if given and (expected < start or given[-1].header.next_offset > end):
                    given = [batch for batch in given if _holds(batch.header, start, end)]
                if given:
                    yield Window(given, read_bytes if len(given) == len(batches) else sum(map(size_of_batch, given)))
                if in_place < len(batches):
                    return
                last = batches[-1].header
                expected, epoch, position = last.next_offset, last.leader_epoch, position + read_bytes

    def _read(self, file: File, position: int) -> tuple[list[RecordBatch], int]:
        """Whole batches from `position` on that passed their checks, and their bytes. Raises OSError."""
        view = self._buffers.acquire()
        size = preadv(file.fileno(), [view[:WINDOW_BYTES]], position)
        length = length_of_first(view[:LENGTH_ENDS_AT])  # type: ignore[arg-type]  # it reads any buffer
        if length * _TOGETHER_MIN < size:
            batches = checked_together(view[:size])
            return batches, sum(map(size_of_batch, batches))
        return _one_by_one(file, position, view, size)


def _one_by_one(file: File, position: int, view: memoryview, size: int) -> tuple[list[RecordBatch], int]:
    """The batches in the first `size` bytes of the view, the last one's rest read, and where they end.

    Up to the first that does not pass its checks.
    """
    batches: list[RecordBatch] = []
    raw, at = np.frombuffer(view, np.uint8), 0
    with suppress(CorruptRecordBatch):
        while at + HEADER_BYTES <= size:
            header = BatchHeader.parse(view, at)
            end = at + header.batch_length + LENGTH_ENDS_AT
            if size < end <= len(view):
                size += preadv(file.fileno(), [view[size:end]], position + size)
            if size < end or crc32c_in_place(raw[at + CRC_COVERS_FROM : end]) != header.crc:
                break
            batches.append(RecordBatch(view[at:end], header))
            at = end
    return batches, at


def checked_together(view: memoryview) -> list[RecordBatch]:
    """Small batches, up to the first that does not pass its checks or is not whole."""
    run = checked_run(view, 0, _BATCH_BYTES_MAX)  # type: ignore[arg-type]  # it reads any buffer
    return [RecordBatch(view[at : at + header.batch_length + LENGTH_ENDS_AT], header) for at, header in run.headers()]


def _holds(header: BatchHeader, start: int, end: int) -> bool:
    return header.next_offset > start and header.base_offset < end


def size_of_batch(batch: RecordBatch) -> int:
    """In bytes."""
    return len(batch.data)


_READ_BYTES = 16 << 10


class _Place(NamedTuple):
    """A batch, and where it stands."""

    header: BatchHeader
    segment: int
    position: int


class Tail:
    """Of one log. Not thread-safe."""

    def __init__(self, directory: Path, filesystem: Filesystem) -> None:
        self._directory, self._filesystem = directory, filesystem
        self._place: _Place | None = None
        self.has_more = False
        """Behind the last one found stands what seems to be another batch, which was above the limit then."""

    def behind(self, last: BatchHeader, limit: int) -> list[RecordBatch] | None:
        """Some of the batches behind `last` that hold offsets below `limit`, their CRCs checked.

        None if it is not known that `last` stands where it did; none of them if who knows more has to look.
        """
        self.has_more = False
        place = self._place
        if place is None or place.header != last:
            place = self._place = self._find(last)
        if place is None:
            return None
        found: list[RecordBatch] = []
        with suppress(CorruptBatch, CorruptRecordBatch, OSError):
            data = self._read(place.segment, place.position, last.size_bytes + _READ_BYTES)
            if BatchHeader.parse(data) != last:
                return None
            if last.next_offset >= limit:
                return []
            segment, position, at = place.segment, place.position, last.size_bytes
            if not _begins(data, at, last.next_offset) and segment != last.next_offset:
                segment, position, at = last.next_offset, 0, 0  # if there is such a segment: else this raises
                data = self._read(segment, position, _READ_BYTES)
            for byte, batch in self._plain(segment, position, at, data, last, limit):
                found.append(batch)
                self._place = _Place(batch.header, segment, byte)
            return found
        return found or None

    def _find(self, last: BatchHeader) -> _Place | None:
        """Where that batch stands, by the index."""
        files = OpenSegments(self._filesystem)
        with closing(files), suppress(NoBatchThere, CorruptBatch, CorruptRecordBatch, OSError):
            reader = SliceReader(self._directory, self._filesystem, files)
            for found in reader.read(last.base_offset, last.next_offset, 1, want_offsets=False):
                return _Place(last, found.segment, found.position)
        return None

    def _plain(  # noqa: PLR0913, PLR0917 - where the bytes stand, and what they follow
        self, segment: int, position: int, at: int, data: bytes, last: BatchHeader, limit: int
    ) -> Iterator[tuple[int, RecordBatch]]:
        """Batches that follow `last` and each other. Raises CorruptRecordBatch, OSError."""
        before, what = last, ScanRange(base_offset=segment)
        while before.next_offset < limit and _begins(data, at, before.next_offset):
            header = BatchHeader.parse(data, at)
            expected, epoch = before.next_offset, before.leader_epoch
            if what.why_misplaced(expected, epoch, header.base_offset, header.next_offset, header.leader_epoch):
                return
            if at + header.size_bytes > len(data):
                if before is not last:
                    return  # the next call reads it whole
                position, at, data = position + at, 0, self._read(segment, position + at, header.size_bytes)
            yield position + at, RecordBatch.check(memoryview(data)[at : at + header.size_bytes], header)
            at, before = at + header.size_bytes, header
        self.has_more = _begins(data, at, before.next_offset)

    def _read(self, segment: int, position: int, size: int) -> bytes:
        with closing(self._filesystem.open(segment_path(self._directory, segment), writable=False)) as file:
            if position == 0:
                cleaned_offset = partial(read_cleaned_offset, self._directory, self._filesystem)
                hold_against_seal(self._filesystem, self._directory, segment, file, cleaned_offset)
            return file.read_at(size, position)


def _begins(data: bytes, at: int, offset: int) -> bool:
    """Whether a batch with that base offset may begin there."""
    return at + HEADER_BYTES <= len(data) and data[at : at + 8] == offset.to_bytes(8)

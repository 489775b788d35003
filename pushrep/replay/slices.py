"""The batches of a log's segments as a replay reads them: as slices of files for a socket, or in windows of memory.

`SliceReader`: finds the next bytes for a session by the headers alone.

    position ─ segment, sparse index ─▶ header ─ length ─▶ header ─ length ─▶ ...     until the limit, or enough bytes

It checks only that each header follows the one before, in its segment; the reader of the bytes checks their CRC.
After a cut of the log call `forget`, and read again if `read` did not find an expected batch.

`BatchWindows`: scans a log's batches (pushrep/log/walk.py) in large windows, into reused memory.

    file    | batch | batch | bat|ch | ...        the window, and what is missing of its last batch
            ────── 768 KiB ──────▶ ──▶            small batches are checked together (records/header.py)

It stops before everything that is not plainly in order: the end of the log, a lower epoch, a wrong CRC. The
log's own reader goes on from there and raises the error; `BatchWindows` raises none.

`Tail` is the same for a reader that closely follows another process's log: one read after the last batch delivered.

    file    ... | last | new | new |          its header still stands there ─▶ one read, no index, nothing twice
                ^ remembered

`Buffers` holds that memory, because fresh pages cost more than reading into them. A buffer is free again when its last
view is dropped; nobody has to give it back.
"""

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import closing, suppress
from os import preadv
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pushrep.env import File, Filesystem
from pushrep.errors import PushrepError
from pushrep.log.directory_files import list_segments, segment_path
from pushrep.log.errors import CorruptBatch
from pushrep.log.segment import begin_near
from pushrep.log.walk import ScanRange, count_in_place, scan_headers, why_not
from pushrep.records import HEADER_BYTES, BatchHeader, CorruptRecordBatch, RecordBatch
from pushrep.records.header import (
    LENGTH_ENDS_AT,
    OFFSET_MAX,
    length_of_first,
    split_batches,
)
from pushrep.replay.plan import Span
from pushrep.wire.values import FileSlice

_FIRST_BYTES = 4096  # the header of a large batch, or some small batches: one read for a follower at the tip
_FILES_MAX = 64


class BatchNotFound(PushrepError):
    """Where offset `position` should be there is no batch's header: the log was cut meanwhile, or is damaged."""

    def __init__(self, position: int, segment: int, why: str) -> None:
        super().__init__(f"segment {segment} holds no batch for offset {position}: {why}")
        self.position, self.segment, self.why = position, segment, why


class OpenSegment:
    """A segment's file, open while it is being sent from."""

    def __init__(self, file: File) -> None:
        self.file, self._users, self._is_dropped = file, 0, False

    def use(self) -> "OpenSegment":
        """Count one user more."""
        self._users += 1
        return self

    def release(self) -> None:
        """One user less."""
        self._users -= 1
        self._close_if_last()

    def drop(self) -> None:
        """Give it to no new user; the last one closes it."""
        self._is_dropped = True
        self._close_if_last()

    def _close_if_last(self) -> None:
        if self._is_dropped and self._users == 0:
            self.file.close()


class OpenSegments:
    """The files that sessions send from; recently used ones stay open. Not thread-safe."""

    def __init__(self, filesystem: Filesystem) -> None:
        self._filesystem = filesystem
        self._open: OrderedDict[tuple[Path, int], OpenSegment] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def get(self, directory: Path, base: int) -> OpenSegment:
        """The open segment. Raises OSError."""
        key = (directory, base)
        found = self._open.get(key)
        if found is None:
            found = self._open[key] = OpenSegment(self._filesystem.open(segment_path(directory, base), writable=False))
            if len(self._open) > _FILES_MAX:
                self._open.popitem(last=False)[1].drop()
        self._open.move_to_end(key)
        return found

    def forget(self, directory: Path) -> None:
        """Forget the open files, because the log was cut, and a file of the same name may be another one."""
        for key in [key for key in self._open if key[0] == directory]:
            self._open.pop(key).drop()

    def close(self) -> None:
        """Drop all files."""
        while self._open:
            self._open.popitem()[1].drop()


class FoundBatch(NamedTuple):
    """A batch and its place in a file."""

    span: Span
    segment: int
    position: int
    leader_epoch: int

    @property
    def end(self) -> int:
        """The position after it."""
        return self.position + self.span.size_bytes


class _SliceRequest(NamedTuple):
    """What `SliceReader.read` is asked for."""

    position: int
    limit: int
    max_bytes: int
    written: int


class SliceReader:
    """The batches of one log, in order, by their headers. Not thread-safe."""

    def __init__(self, directory: Path, filesystem: Filesystem, files: OpenSegments) -> None:
        self._directory, self._filesystem, self._files = directory, filesystem, files
        self._next: tuple[int, int, int, int] | None = None  # where the last read ended: offset, segment, byte, epoch
        self._bases: list[int] = []

    def forget(self) -> None:
        """Forget the files, because the log was cut, or another process writes it now."""
        self._next, self._bases = None, []
        self._files.forget(self._directory)

    def read(self, position: int, limit: int, max_bytes: int, *, written: int = OFFSET_MAX) -> list[FoundBatch]:
        """The batches that hold offsets in [position, limit), about `max_bytes` of them, one at least.

        written: the log end when `limit` was taken: no batch may end above it. Raises BatchNotFound, OSError.
        """
        if position >= limit:
            return []
        if self._next is not None and self._next[0] == position:
            _, segment, at, epoch = self._next
            what = self._range(segment, at, position, epoch)
        else:
            what = self.place(position)
        wanted, found = _SliceRequest(position, limit, max_bytes, written), list[FoundBatch]()
        while True:
            segment = what.base_offset
            file = self._files.get(self._directory, segment).file
            what, is_all = self._collect(wanted, found, file, what)
            expected = found[-1].span.next_offset if found else position
            following = None if is_all else self._behind(segment)
            if following != expected:
                if not is_all and not found:
                    raise BatchNotFound(expected, segment, why_not(file, what))
                self._next = (expected, segment, what.position, what.leader_epoch)
                return found
            what = self._range(following, leader_epoch=what.leader_epoch)

    def _collect(
        self, wanted: _SliceRequest, found: list[FoundBatch], file: File, what: ScanRange
    ) -> tuple[ScanRange, bool]:
        """Add batches from the beginning of `what` on; returns where to go on, and whether that is all."""
        position, limit, max_bytes, written = wanted
        segment, at, due, last_epoch = what.base_offset, what.position, what.first_offset, what.leader_epoch
        size, expected = sum([one.span.size_bytes for one in found]), found[-1].span.next_offset if found else position
        is_all = False
        for byte, base, next_offset, size_bytes, epoch, records, _ in scan_headers(file, what, _FIRST_BYTES):
            if next_offset > written and self._is_misplaced(segment, next_offset):
                if not found:
                    raise BatchNotFound(expected, segment, f"a batch there says that it holds [{base}, {next_offset})")
                is_all = True  # bytes before it are sent first
            if is_all or base >= limit:
                is_all = True
                break
            at, due, last_epoch = byte + size_bytes, next_offset, epoch
            if next_offset <= position:
                continue
            found.append(FoundBatch(Span(base, next_offset, size_bytes, records), segment, byte, epoch))
            size, expected = size + size_bytes, next_offset
            if size >= max_bytes or expected >= limit:
                is_all = True
                break
        return self._range(segment, at, due, last_epoch), is_all  # `replace` takes thrice as long

    def slices(self, found: list[FoundBatch], held: list[OpenSegment]) -> tuple[FileSlice, ...]:
        """The bytes of the batches, neighbours in one slice. Adds the used files to `held`, for the caller to release.

        Raises OSError.
        """
        pieces: list[FileSlice] = []
        segment, begin, end = -1, 0, 0
        for one in found:
            if one.segment != segment or one.position != end:
                if end > begin:
                    pieces.append(FileSlice(held[-1].file, begin, end - begin))
                if one.segment != segment:
                    held.append(self._files.get(self._directory, one.segment).use())
                    segment = one.segment
                begin = one.position
            end = one.end
        if end > begin:
            pieces.append(FileSlice(held[-1].file, begin, end - begin))
        return tuple(pieces)

    def rewind(self, found: list[FoundBatch], taken: int) -> None:
        """Only the first `taken` batches were sent: the next read begins after them."""
        if taken < len(found):
            one, before = found[taken], found[taken - 1]
            self._next = (before.span.next_offset, one.segment, one.position, before.leader_epoch) if taken else None

    def place(self, offset: int) -> ScanRange:
        """The range from a batch at or before `offset` on. Raises as `read`."""
        if not self._bases or self._bases[-1] <= offset:
            self._bases = list_segments(self._filesystem, self._directory)
        at = bisect_right(self._bases, offset) - 1
        if at < 0:
            raise BatchNotFound(offset, self._bases[0] if self._bases else 0, "no segment begins so early")
        base = self._bases[at]
        file = self._files.get(self._directory, base).file
        return begin_near(self._filesystem, self._directory, file, self._range(base), offset)

    def _range(
        self, segment: int, position: int = 0, next_offset: int | None = None, leader_epoch: int = -1
    ) -> ScanRange:
        at = bisect_right(self._bases, segment)
        end_offset = self._bases[at] if at < len(self._bases) else None
        return ScanRange(
            base_offset=segment,
            position=position,
            next_offset=next_offset,
            end_offset=end_offset,
            leader_epoch=leader_epoch,
        )

    def _behind(self, segment: int) -> int | None:
        """The base offset of the next segment."""
        if not self._bases or self._bases[-1] <= segment:
            self._bases = list_segments(self._filesystem, self._directory)
        at = bisect_right(self._bases, segment)
        return self._bases[at] if at < len(self._bases) else None

    def _is_misplaced(self, segment: int, next_offset: int) -> bool:
        """Whether a batch that ends above what was written reaches beyond its segment, or is in the newest one."""
        following = self._behind(segment)
        return following is None or next_offset > following


_KEPT_MAX = 6
"""As many as a block of a local replay takes, and one more."""
_ALIGNMENT = 64
"""Bytes of a cache line: the kernel takes a third longer to copy to an unaligned address."""


class Buffers:
    """Buffers of `size_bytes`. Thread-safe. A view keeps its buffer from being used again."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._kept: list[tuple[bytearray, int]] = []
        self._lock = threading.Lock()

    def acquire(self) -> memoryview:
        """A whole buffer without views; its contents are left from before. Never waits."""
        kept = self.acquire_kept()
        if kept is not None:
            return kept
        buffer, begin = made = self._made()
        if self._lock.acquire(blocking=False):  # else this buffer is not kept: a thread holds it, or held it at a fork
            self._kept = [*self._kept[1:], made]
            self._lock.release()
        return self._view(buffer, begin)

    def acquire_kept(self) -> memoryview | None:
        """The same; None if all kept buffers have views and no more are kept, for callers that can do without."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            for number, (buffer, begin) in enumerate(self._kept):
                try:
                    buffer.append(buffer.pop())  # raises BufferError while it has a view
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


WINDOW_BYTES = 768 << 10
"""A window, with the rest of its last batch, fits a core's own cache until it is checked."""
_BATCH_BYTES_MAX = 2 << 20
"""Larger batches are left to the log's own reader, so that buffers keep one size."""
BUFFER_BYTES = WINDOW_BYTES + _BATCH_BYTES_MAX
_REST_MIN = 24
"""With fewer batches in a window, the rest of its last one is worth a read."""


class Window(NamedTuple):
    """Consecutive batches, and their bytes together."""

    batches: list[RecordBatch]
    size_bytes: int


class BatchWindows:
    """Whole batches of one log, read in windows. Not thread-safe."""

    def __init__(self, directory: Path, filesystem: Filesystem, buffers: Buffers) -> None:
        self._directory, self._filesystem, self._buffers = directory, filesystem, buffers

    def windows(self, start: int, end: int) -> Iterator[Window]:
        """The batches with an offset in [start, end), by windows, as far as they are in order. Raises nothing."""
        files = OpenSegments(self._filesystem)
        places = SliceReader(self._directory, self._filesystem, files)
        with closing(files), suppress(BatchNotFound, CorruptBatch, OSError):
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
                    file = files.get(self._directory, segment).file
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
        length = length_of_first(view[:LENGTH_ENDS_AT])
        found = split_batches(view[:size])
        placed, end = found.placed, found.end
        if found.is_cut and size - end >= HEADER_BYTES and length * _REST_MIN >= size:
            # The rest of a large last batch is read; small ones are left to the next window.
            whole = end + length_of_first(view[end : end + LENGTH_ENDS_AT])
            if size < whole <= len(view):
                size += preadv(file.fileno(), [view[size:whole]], position + size)
                last = split_batches(view[end:size])
                placed += [(end + at, header) for at, header in last.placed]
                end += last.end
        return [RecordBatch(view[at : at + header.size_bytes], header) for at, header in placed], end


def _holds(header: BatchHeader, start: int, end: int) -> bool:
    return header.next_offset > start and header.base_offset < end


def size_of_batch(batch: RecordBatch) -> int:
    """In bytes."""
    return len(batch.data)


_READ_BYTES = 16 << 10


class _Place(NamedTuple):
    """A batch, and its place."""

    header: BatchHeader
    segment: int
    position: int


class Tail:
    """The tail of one log. Not thread-safe."""

    def __init__(self, directory: Path, filesystem: Filesystem) -> None:
        self._directory, self._filesystem = directory, filesystem
        self._place: _Place | None = None
        self.has_more = False
        """Whether a batch seems to follow the last one found, above the former limit."""

    def behind(self, last: BatchHeader, limit: int) -> list[RecordBatch] | None:
        """Some batches after `last` with offsets below `limit`, their CRCs checked.

        None if `last` may not be there any more; empty if the log's own reader has to read.
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
        """The position of that batch, by the index."""
        files = OpenSegments(self._filesystem)
        with closing(files), suppress(BatchNotFound, CorruptBatch, CorruptRecordBatch, OSError):
            reader = SliceReader(self._directory, self._filesystem, files)
            for found in reader.read(last.base_offset, last.next_offset, 1):
                return _Place(last, found.segment, found.position)
        return None

    def _plain(  # noqa: PLR0913, PLR0917 - where the bytes stand, and what they follow
        self, segment: int, position: int, at: int, data: bytes, last: BatchHeader, limit: int
    ) -> Iterator[tuple[int, RecordBatch]]:
        """Batches that follow `last` and each other. Raises CorruptRecordBatch, OSError."""
        before, what, end = last, ScanRange(base_offset=segment), at
        found = split_batches(memoryview(data)[at:])
        if found.is_cut and not found.placed and at + HEADER_BYTES <= len(data):
            position, size = position + at, length_of_first(data[at:])
            at, end, data = 0, 0, self._read(segment, position, size)
            found = split_batches(memoryview(data))
        for begin, header in found.placed:
            expected, epoch = before.next_offset, before.leader_epoch
            if expected >= limit:
                break
            if what.why_misplaced(expected, epoch, header.base_offset, header.next_offset, header.leader_epoch):
                return
            byte, end, before = at + begin, at + begin + header.size_bytes, header
            yield position + byte, RecordBatch(memoryview(data)[byte:end], header)
        self.has_more = _begins(data, end, before.next_offset)

    def _read(self, segment: int, position: int, size: int) -> bytes:
        with closing(self._filesystem.open(segment_path(self._directory, segment), writable=False)) as file:
            return file.read_at(size, position)


def _begins(data: bytes, at: int, offset: int) -> bool:
    """Whether a batch with that base offset may begin there."""
    return at + HEADER_BYTES <= len(data) and data[at : at + 8] == offset.to_bytes(8)

"""The batches of a log's segments as a local replay reads them: in windows of memory.

`BatchWindows`: scans a log's batches (pushrep/log/walk.py) in large windows, into reused memory.

    file    | batch | batch | bat|ch | ...        the window, and what is missing of its last batch
            ────── 768 KiB ──────▶ ──▶            small batches are checked together (records/header.py)

It stops before everything that is not plainly in order: the end of the log, a lower epoch, a wrong CRC. The
log's own reader goes on from there and raises the error; `BatchWindows` raises none.

`Buffers` holds that memory, because fresh pages cost more than reading into them. A buffer is free again when its last
view is dropped; nobody has to give it back.
"""

import threading
from collections.abc import Iterator
from contextlib import suppress
from os import preadv
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pushrep.env import Filesystem
from pushrep.log.directory_files import segment_path
from pushrep.log.errors import CorruptBatch
from pushrep.log.reader import LogSlices, SlicedFile
from pushrep.log.seals import SealChecks
from pushrep.records import HEADER_BYTES, RecordBatch
from pushrep.records.header import LENGTH_ENDS_AT, length_of_first, split_batches

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
        if (kept := self.acquire_kept()) is not None:
            return kept
        made = self._made()
        if self._lock.acquire(blocking=False):  # else this buffer is not kept: a thread holds it, or held it at a fork
            self._kept = [*self._kept[1:], made]
            self._lock.release()
        return self._view(*made)

    def acquire_kept(self) -> memoryview | None:
        """The same; None if all kept buffers have views and no more are kept, for callers that can do without."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            for buffer, begin in self._kept:
                with suppress(BufferError):  # it has a view
                    buffer.append(buffer.pop())
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
        self._seals = SealChecks(filesystem, directory)

    def windows(self, start: int, end: int) -> Iterator[Window]:
        """The batches with an offset in [start, end), by windows, as far as they are in order. Raises nothing."""
        with suppress(CorruptBatch, OSError):
            found = LogSlices(self._filesystem, self._directory, seals=self._seals).read(start, end, 1)
            if found is None:
                return
            file, segment, ((position, expected, _, _, epoch, *_), *_) = found
            while expected < end:
                batches, read_bytes = self._read(file, position)
                if not batches:
                    following = segment_path(self._directory, expected)
                    if segment == expected or not self._filesystem.exists(following):
                        return
                    segment, position = expected, 0
                    file = SlicedFile(self._filesystem.open(following, writable=False))
                    if self._seals.contradiction(segment, file) is not None:
                        return
                    continue
                headers = [batch.header for batch in batches]
                ends = [(expected, epoch), *[(one.next_offset, one.leader_epoch) for one in headers]]
                places = zip(headers, ends, strict=False)
                if any(one.base_offset != at or one.leader_epoch < was for one, (at, was) in places):
                    return
                if expected < start or ends[-1][0] > end:
                    batches = [
                        one for one in batches if start < one.header.next_offset and one.header.base_offset < end
                    ]
                if batches:
                    yield Window(batches, sum(map(size_of_batch, batches)))
                (expected, epoch), position = ends[-1], position + read_bytes

    def _read(self, file: SlicedFile, position: int) -> tuple[list[RecordBatch], int]:
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


def size_of_batch(batch: RecordBatch) -> int:
    """In bytes."""
    return len(batch.data)

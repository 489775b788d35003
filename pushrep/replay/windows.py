"""The same walk over a log's batches in long strides: a window of the file at a time, into memory that is used again.

    file    | batch | batch | bat|ch | ...        the window, and what is missing of its last batch
            ────── 512 KiB ──────▶ ──▶            small batches are checked together (records/batch_run.py)

It stops before whatever is not plainly as it should be: the end of the log, a hole, a fallen epoch, a CRC that does not
match. The log's own reader goes on from there and says what is the matter, so that this one raises nothing of its own.
A buffer that somebody still looks into is left to them.
"""

import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import pairwise
from os import preadv
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pushrep.log.segment_files import segment_path
from pushrep.records import HEADER_BYTES, BatchHeader, CorruptRecordBatch, RecordBatch
from pushrep.records.batch_run import checked_run, length_of_first
from pushrep.records.checksum import crc32c
from pushrep.records.header import CRC_COVERS_FROM, LENGTH_ENDS_AT
from pushrep.replay.slices import NoBatchThere, OpenSegments, SliceReader
from pushrep.seams import File, Filesystem

WINDOW_BYTES = 512 << 10
"""With the rest of its last batch it stays in a processor's own cache until it is checked."""
_BATCH_BYTES_MAX = 2 << 20
"""A larger batch is the log's own reader's: a buffer keeps its size."""
_BUFFERS_MAX = 6
"""What a block of a local replay is made of, and one more."""
_ALIGNMENT = 64
"""Bytes of a processor's cache line. The kernel's copy to where none begins takes a third longer."""
_TOGETHER_MIN = 24
"""Fewer batches than that are checked faster one by one: together costs 0.1 ms before the first."""


class Buffers:
    """Memory for windows: fresh pages cost more than what is read into them. Thread-safe."""

    def __init__(self) -> None:
        self._kept: list[tuple[bytearray, int]] = []
        self._lock = threading.Lock()

    def get(self) -> memoryview:
        """All of one that nobody looks into."""
        with self._lock:
            for number, (buffer, begin) in enumerate(self._kept):
                try:
                    buffer.append(buffer.pop())  # a view of it forbids that
                except BufferError:
                    continue
                self._kept.append(self._kept.pop(number))
                return memoryview(buffer)[begin:]
            made = bytearray(WINDOW_BYTES + _BATCH_BYTES_MAX + _ALIGNMENT)
            begin = -np.frombuffer(made, np.uint8).ctypes.data % _ALIGNMENT
            self._kept = [*self._kept[-_BUFFERS_MAX + 1 :], (made, begin)]
            return memoryview(made)[begin:]


class _Window(NamedTuple):
    """What was read, and where the batches in it begin; the last bound is where the last one ends."""

    view: memoryview
    bounds: list[int]


class BatchWindows:
    """Whole batches of one log, read in windows. Not thread-safe."""

    def __init__(self, directory: Path, filesystem: Filesystem, buffers: Buffers) -> None:
        self._directory, self._filesystem, self._buffers = directory, filesystem, buffers

    def windows(self, start: int, end: int) -> Iterator[list[RecordBatch]]:
        """Every batch that holds an offset in [start, end), as far as all is plain, by windows. Raises nothing."""
        files = OpenSegments(self._filesystem)
        places = SliceReader(self._directory, self._filesystem, files)
        with closing(files), suppress(NoBatchThere, OSError):
            segment, position = places.place(start)
            expected, epoch = start, -1
            while expected < end:
                file = files.get(self._directory, segment).file
                window = self._read(file, position)
                size = window.bounds[-1]
                batches = checked_batches(*window)
                if not batches:
                    following = segment_path(self._directory, expected)
                    if size or segment == expected or not self._filesystem.exists(following):
                        return
                    segment, position = expected, 0
                    continue
                taken = _plain(batches, start, end, expected, epoch)
                given = [batch for batch in batches[:taken] if batch.header.next_offset > start]
                if given:
                    yield given
                    expected, epoch = given[-1].header.next_offset, given[-1].header.leader_epoch
                if taken < len(window.bounds) - 1:
                    return
                position += size

    def _read(self, file: File, position: int) -> _Window:
        """A window, with the rest of its last batch. Raises OSError."""
        view = self._buffers.get()
        size = preadv(file.fileno(), [view[:WINDOW_BYTES]], position)
        at, bounds = 0, [0]
        while at + HEADER_BYTES <= size:
            length = length_of_first(view[at : at + LENGTH_ENDS_AT])  # type: ignore[arg-type]  # it reads any buffer
            if not HEADER_BYTES <= length <= _BATCH_BYTES_MAX:
                break
            at += length
            if at > size and size + preadv(file.fileno(), [view[size:at]], position + size) < at:
                break
            bounds.append(at)
        return _Window(view, bounds)


def _plain(batches: list[RecordBatch], start: int, end: int, expected: int, epoch: int) -> int:
    """How many of them each follow the one before, with no lower epoch; the first may begin before `start`."""
    for number, batch in enumerate(batches):
        header = batch.header
        is_next = header.base_offset == expected or (expected == start and header.base_offset < start)
        if not is_next or header.leader_epoch < epoch or header.base_offset >= end:
            return number
        expected, epoch = max(expected, header.next_offset), header.leader_epoch
    return len(batches)


def checked_batches(view: memoryview, bounds: list[int]) -> list[RecordBatch]:
    """Those between the bounds, in order, up to the first that does not pass its checks."""
    if len(bounds) > _TOGETHER_MIN:
        run = checked_run(view[: bounds[-1]], 0, _BATCH_BYTES_MAX)  # type: ignore[arg-type]  # it reads any buffer
        return [RecordBatch(view[at : at + header.size_bytes], header) for at, header in run.headers()]
    batches = []
    with suppress(CorruptRecordBatch):
        for at, end in pairwise(bounds):
            header = BatchHeader.parse(view, at)
            if crc32c(view, at + CRC_COVERS_FROM, end) != header.crc:
                break
            batches.append(RecordBatch(view[at:end], header))
    return batches

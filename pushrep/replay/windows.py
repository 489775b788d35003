"""The same walk over a log's batches in long strides: a window of the file at a time, into memory that is used again.

    file    | batch | batch | bat|ch | ...        the window, and what is missing of its last batch
            ────── 768 KiB ──────▶ ──▶            small batches are checked together (records/batch_run.py)

It stops before whatever is not plainly as it should be: the end of the log, a hole, a fallen epoch, a CRC that does not
match. The log's own reader goes on from there and says what is the matter, so that this one raises nothing of its own.
"""

from collections.abc import Iterator
from contextlib import closing, suppress
from os import preadv
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pushrep.env import File, Filesystem
from pushrep.log.errors import CorruptBatch
from pushrep.log.segment_files import segment_path
from pushrep.log.walk import count_in_place
from pushrep.records import HEADER_BYTES, BatchHeader, CorruptRecordBatch, RecordBatch
from pushrep.records.batch_run import checked_run, length_of_first
from pushrep.records.checksum import crc32c_in_place
from pushrep.records.header import CRC_COVERS_FROM, LENGTH_ENDS_AT
from pushrep.replay.buffers import Buffers
from pushrep.replay.slices import NoBatchThere, OpenSegments, SliceReader

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

"""Tail: what came behind the batch that was given last, for who follows a log of another process.

    file    ... | last | new | new |          its header still stands there ─▶ one read, no index, nothing twice
                ^ remembered

It knows its way only from batch to batch. Whatever is not plainly as it should be - another header, a hole, a CRC that
does not match - is the log's own reader's to look at.
"""

from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pushrep.env import Filesystem
from pushrep.log.directory_files import read_cleaned_offset
from pushrep.log.errors import CorruptBatch
from pushrep.log.reader import hold_against_seal
from pushrep.log.segment_files import segment_path
from pushrep.log.walk import ScanRange
from pushrep.records import HEADER_BYTES, BatchHeader, CorruptRecordBatch, RecordBatch
from pushrep.replay.slices import NoBatchThere, OpenSegments, SliceReader

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

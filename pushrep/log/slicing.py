"""Neighbouring batches as a slice of their segment's file, found by their headers: for who sends them by sendfile.

    offset ─ segment, sparse index ─▶ header ─ length ─▶ header ─ length ─▶ ...      until the limit, or enough bytes
             | batch | batch | batch |                  one slice: whole batches, none of whose records was read

A header has to begin where the one before it ends, with the offset that follows; the CRC is the receiver's business.
Where that does not hold there is no slice, and `SegmentLog.read` says what is the matter.
"""

import struct
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from pushrep.log.index_file import IndexFile
from pushrep.log.segment import OFFSET_ENTRY
from pushrep.log.segment_files import INDEX_SUFFIX, segment_path
from pushrep.records.header import HEADER_BYTES, LENGTH_ENDS_AT, MAGIC
from pushrep.seams import File, Filesystem

_HEAD = struct.Struct(">qiibIhi")  # of a header, as far as the last offset's delta
_WINDOW_BYTES, _SMALL_BYTES = 64 << 10, 4096  # below, a read finds the next header, too


class Sliceable(Protocol):
    """A log as it is sliced; every answer may change between two calls."""

    def bases(self, *, fresh: bool) -> Sequence[int]:
        """Base offsets of the segments, ascending."""
        ...


class SlicedFile:
    """A segment's file, closed when nobody has it any more: what is on its way does not tell when it has left."""

    __slots__ = ("_file",)

    def __init__(self, file: File) -> None:
        self._file = file

    def read_at(self, size: int, position: int) -> bytes:
        """As a File's."""
        return self._file.read_at(size, position)

    def fileno(self) -> int:
        """For sendfile; it holds as long as this object does."""
        return self._file.fileno()

    def __del__(self) -> None:
        with suppress(OSError):
            self._file.close()


class LogSlice(NamedTuple):
    """The batches of [base_offset, end_offset): `size_bytes` from byte `position` of `file` on."""

    base_offset: int
    end_offset: int
    file: SlicedFile
    position: int
    size_bytes: int


class _Place(NamedTuple):
    """Where a batch begins that holds `offset`, or lies before it."""

    offset: int
    segment: int
    position: int


class LogSlices:
    """Slices of one log, best in order. Not thread-safe. Made by `SegmentLog.slices`."""

    def __init__(self, filesystem: Filesystem, directory: Path, log: Sliceable) -> None:
        self._filesystem, self._directory, self._log = filesystem, directory, log
        self._next: _Place | None = None  # where the last slice ended

    def read(self, offset: int, limit: int, max_bytes: int) -> LogSlice | None:
        """The batches that hold offsets in [offset, limit), from one segment: at most `max_bytes`, but at least one.

        None where the headers do not show the way. `limit`: a batch ends there, and everything below was written.
        Raises OSError.
        """
        place = self._place(offset)
        if place is None:
            return None
        try:
            path = segment_path(self._directory, place.segment)
            file = SlicedFile(self._filesystem.open(path, writable=False))
        except FileNotFoundError:  # retention was here
            return None
        found = _hop(file, place, offset, limit, max_bytes)
        if found is not None:
            self._next = _Place(found.end_offset, place.segment, found.position + found.size_bytes)
        return found

    def _place(self, offset: int) -> _Place | None:
        bases = self._log.bases(fresh=False)
        at = bisect_right(bases, offset) - 1
        if at < 0:
            return None
        segment = bases[at]
        if segment == offset:
            return _Place(offset, segment, 0)
        if self._next is not None and self._next[:2] == (offset, segment):
            return self._next
        index = IndexFile(self._filesystem, segment_path(self._directory, segment, INDEX_SUFFIX), OFFSET_ENTRY)
        entry = index.floor(offset - segment)
        return _Place(offset, segment, entry[1] if entry is not None else 0)


def _hop(file: SlicedFile, place: _Place, offset: int, limit: int, max_bytes: int) -> LogSlice | None:
    """From header to header. What a sparse index promised is as good as what stands there."""
    at, begin, first, end = place.position, -1, 0, offset
    window, window_at, window_bytes = b"", 0, HEADER_BYTES
    expected: int | None = None
    while True:
        if at - window_at + HEADER_BYTES > len(window):
            window, window_at = file.read_at(window_bytes, at), at
            if len(window) < HEADER_BYTES:
                break
        base, length, _, magic, _, _, delta = _HEAD.unpack_from(window, at - window_at)
        size, following = length + LENGTH_ENDS_AT, base + delta + 1
        is_batch = magic == MAGIC and size >= HEADER_BYTES and delta >= 0 and expected in {None, base}
        if not is_batch or base >= limit:
            break
        if following > offset:
            if begin < 0:
                if base > offset:
                    break
                begin, first = at, base
            elif at + size - begin > max_bytes:
                break
            end = following
        at, expected = at + size, following
        window_bytes = _WINDOW_BYTES if size < _SMALL_BYTES else HEADER_BYTES
    return LogSlice(first, end, file, begin, at - begin) if begin >= 0 else None

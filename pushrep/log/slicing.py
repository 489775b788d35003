"""Neighbouring batches as a slice of their segment's file, found by their headers: for who sends them by sendfile.

    offset ─ segment, sparse index ─▶ header ─▶ header ─▶ ...       until the limit, or enough bytes: header_walk.py
             | batch | batch | batch |                  one slice: whole batches, none of whose records was read

Each has to begin with the offset that follows the one before; the CRC is the receiver's business. Where that does not
hold there is no slice, and `SegmentLog.read` says what is the matter.
"""

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from pushrep.log.header_walk import position_near, walk
from pushrep.log.segment_files import segment_path
from pushrep.seams import File, Filesystem


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

    def size(self) -> int:
        """In bytes, now."""
        return self._file.size()

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
        bases = self._log.bases(fresh=False)
        at = bisect_right(bases, offset) - 1
        if at < 0:
            return None
        segment = bases[at]
        try:
            file = SlicedFile(self._filesystem.open(segment_path(self._directory, segment), writable=False))
        except FileNotFoundError:  # retention was here
            return None
        found = _slice(file, self._position(file, segment, offset), offset, limit, max_bytes)
        if found is not None and found.position + found.size_bytes > file.size():
            return None  # a length that is damaged: who sent it as it stands would never come to its end
        if found is not None:
            self._next = _Place(found.end_offset, segment, found.position + found.size_bytes)
        return found

    def _position(self, file: SlicedFile, segment: int, offset: int) -> int:
        if segment == offset:
            return 0
        if self._next is not None and self._next[:2] == (offset, segment):
            return self._next.position
        return position_near(self._filesystem, self._directory, segment, file, offset)


def _slice(file: SlicedFile, position: int, offset: int, limit: int, max_bytes: int) -> LogSlice | None:
    batches = walk(file, position)
    holds = next((batch for batch in batches if batch[2] > offset), None)
    if holds is None or holds[1] > offset or holds[1] >= limit:
        return None
    begin, first, end_offset, size, *_ = holds
    end, until = begin + size, begin + max_bytes
    if end < until and end_offset < limit:
        for _, base, following, size, _, _ in batches:
            if base != end_offset or end + size > until:
                break
            end, end_offset = end + size, following
            if end_offset >= limit:
                break
    return LogSlice(first, end_offset, file, begin, end - begin)

"""Neighbouring batches as a slice of their segment's file, found by their headers: for who sends them by sendfile.

    offset ─ segment, sparse index ─▶ header ─▶ header ─▶ ...       until the limit, or enough bytes: walk.py
             | batch | batch | batch |                  one slice: whole batches, none of whose records was read

Each has to begin with the offset that follows the one before; the CRC is the receiver's business. Where that does not
hold there is no slice, and `SegmentLog.read` says what is the matter.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from pushrep.env import File, Filesystem
from pushrep.log.errors import CorruptBatch
from pushrep.log.seal_check import hold_against_seal
from pushrep.log.segment import begin_near
from pushrep.log.segment_files import segment_path
from pushrep.log.walk import ScannedHeader, ScanRange, scan_headers
from pushrep.records.leader_epochs import LeaderEpochs


class Sliceable(Protocol):
    """A log as it is sliced; every answer may change between two calls."""

    def bases(self, *, fresh: bool) -> Sequence[int]:
        """Base offsets of the segments, ascending."""
        ...

    def cleaned_offset(self) -> int:
        """Below it Kafka's cleaner may have taken offsets."""
        ...

    @property
    def leader_epochs(self) -> LeaderEpochs:
        """Which leader epoch begins where: the witness of the batches' own, which no CRC covers."""
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
    """Where the batch of `offset` begins, and the leader epoch of the one before."""

    offset: int
    segment: int
    position: int
    leader_epoch: int


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
            opened = self._filesystem.open(segment_path(self._directory, segment), writable=False)
        except FileNotFoundError:  # retention was here
            return None
        file = SlicedFile(opened)
        cleaned_to = self._log.cleaned_offset()
        if segment < cleaned_to:  # asked here, too: it is in memory, and for a seal's file the system has to look
            try:
                hold_against_seal(self._filesystem, self._directory, segment, opened, self._log.cleaned_offset)
            except CorruptBatch:
                return None
        end_offset = bases[at + 1] if at + 1 < len(bases) else None
        batches = scan_headers(file, self._begun(file, segment, end_offset, cleaned_to, offset))
        found = _slice(batches, self._log.leader_epochs, file, offset, limit, max_bytes)
        if found is None:
            return None
        piece, epoch = found
        self._next = _Place(piece.end_offset, segment, piece.position + piece.size_bytes, epoch)
        return piece

    def _begun(
        self, file: SlicedFile, segment: int, end_offset: int | None, cleaned_offset: int, offset: int
    ) -> ScanRange:
        """Where a scan of the segment begins that meets `offset`."""
        position, epoch, is_next = 0, -1, segment == offset
        if self._next is not None and self._next.offset == offset:
            _, before, behind, epoch = self._next
            if before == segment:
                position, is_next = behind, True
        what = ScanRange(
            base_offset=segment,
            position=position,
            next_offset=offset if is_next else None,
            end_offset=end_offset,
            leader_epoch=epoch,
            cleaned_offset=cleaned_offset,
        )
        return what if is_next else begin_near(self._filesystem, self._directory, file, what, offset)


def _slice(  # noqa: PLR0913, PLR0917 - where to look, and for how much
    batches: Iterator[ScannedHeader], epochs: LeaderEpochs, file: SlicedFile, offset: int, limit: int, max_bytes: int
) -> tuple[LogSlice, int] | None:
    """The slice, up to the first batch whose leader epoch the log's list contradicts; and the epoch it ends with."""
    holds = next((batch for batch in batches if batch[2] > offset), None)
    if holds is None or holds[1] > offset or holds[1] >= limit:
        return None
    newest, newest_from = epochs.entries[-1] if epochs.entries else (-1, 0)
    begin, first, end_offset, size, epoch, *_ = holds
    if (epoch != newest or first < newest_from) and epochs.contradiction(first, epoch) is not None:
        return None
    end, until = begin + size, begin + max_bytes
    if end < until and end_offset < limit:
        for _, base, following, size, its_epoch, _, _ in batches:
            if base != end_offset or end + size > until:
                break
            if (its_epoch != newest or base < newest_from) and epochs.contradiction(base, its_epoch) is not None:
                break
            end, end_offset, epoch = end + size, following, its_epoch
            if end_offset >= limit:
                break
    return LogSlice(first, end_offset, file, begin, end - begin), epoch

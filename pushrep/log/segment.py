"""The newest segment of a log: one file that grows by whole batches, and its two indexes.

    .log         | batch | batch | ... | batch | zeros allocated ahead |
                                         size_bytes ^                  ^ allocated
    .index       | rel i32 | pos i32 |    rel = last offset of a batch - base offset, pos = where that batch begins;
                                          an entry once more than index_interval_bytes lie behind the last one
    .timeindex   | time i64 | rel i32 |   time = the greatest so far, rel = last offset of the batch that has it

Invariant: every batch before a time entry's has timestamps of at most its time.
Another program may remove, replace or cut the file. `check_file` looks after each sync, before the first write since,
and before a write that reaches its end: before each write into the page cache it would cost a third of a small append.
Source: Kafka's LogSegment.append, OffsetIndex, TimeIndex (its DumpLogSegments judges them in the tests).

How new is the newest record of a sealed segment? Its time index says it, checked against the batches:

    .timeindex   ... | time, rel |        the newest entry is used only if the batch that ends with that offset has
    .log         ...... | batch | .. |    just that time; batches after it are read, so an index that lost its last
                        ^ read from here  entries is made good; else the whole segment is read

A flipped bit in an index must not make records look old, because retention deletes by this time.
"""

import errno
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

from pushrep.env import SYSTEM_CLOCK, File, Filesystem, file_size
from pushrep.log.config import POSITION_MAX, LogConfig
from pushrep.log.directory_files import INDEX_SUFFIX, TIME_INDEX_SUFFIX, segment_path
from pushrep.log.errors import CorruptBatch, FileRemoved
from pushrep.log.indexes import IndexFile, IndexMark
from pushrep.log.seals import HeadersCrc, Seal, remove_seals
from pushrep.log.walk import (
    CleanEnd,
    ReadableFile,
    RunStep,
    ScannedHeader,
    ScanRange,
    WholeBatch,
    from_index_entry,
    scan,
    scan_headers,
    scan_vectorised,
)
from pushrep.records import HEADER_BYTES, BatchHeader, BatchRun, RecordBatch
from pushrep.records.header import OFFSET_MAX, SEALED_BYTES
from pushrep.records.leader_epochs import LeaderEpochs

OFFSET_ENTRY = struct.Struct(">ii")
TIME_ENTRY = struct.Struct(">qi")
assert (OFFSET_ENTRY.size, TIME_ENTRY.size) == (8, 12), "Kafka's index entries"


AHEAD_MS = 3_600_000
"""A record's time may be so far ahead of the clock: its producer has another one."""


def is_believed(timestamp_ms: int, now_ms: int) -> bool:
    """Whether a record's time may be the time at which it was appended."""
    return 0 <= timestamp_ms <= now_ms + AHEAD_MS


PREALLOCATE_BYTES_MIN = 64 << 10
_TOGETHER_BYTES_MAX, _TOGETHER_MAX = 4096, 64  # below about that size a copy costs less than a system call


@dataclass(slots=True)
class _Tail:
    """A segment's end, and the state for its next index entries."""

    size_bytes: int
    next_offset: int
    bytes_since_entry: int = 0
    max_timestamp_ms: int = -1
    offset_of_max: int = -1
    first_timestamp_ms: int | None = None

    def copy(self) -> "_Tail":
        # dataclasses.replace would take three times as long in every append.
        return _Tail(
            self.size_bytes,
            self.next_offset,
            self.bytes_since_entry,
            self.max_timestamp_ms,
            self.offset_of_max,
            self.first_timestamp_ms,
        )


class SegmentMark(NamedTuple):
    """The end of a segment before a write, to which `rewind` goes back if the write fails."""

    tail: _Tail
    offsets: IndexMark
    times: IndexMark


class Segment:
    """A segment that is written to. Its whole batches end at `size_bytes` and `next_offset`."""

    def __init__(self, filesystem: Filesystem, directory: Path, base_offset: int, config: LogConfig) -> None:
        self.base_offset = base_offset
        self.path = segment_path(directory, base_offset)
        self._filesystem, self.config = filesystem, config
        self.ahead_bytes_max: Callable[[], int] = lambda: config.preallocate_bytes
        """How many bytes the file may be allocated ahead of its data: the log's share in its directory. Called when the
        file grows: at each write it would cost a tenth of a small append."""
        self.wall_ms: Callable[[], int] = SYSTEM_CLOCK.wall_ms
        """The wall clock, which counts for batches without a time that can be believed."""
        self._file: File | None = None
        self._file_bytes = -1  # as this object made it; -1: not opened yet
        self.index = IndexFile(filesystem, segment_path(directory, base_offset, INDEX_SUFFIX), OFFSET_ENTRY)
        self.time_index = IndexFile(filesystem, segment_path(directory, base_offset, TIME_INDEX_SUFFIX), TIME_ENTRY)
        self._tail = _Tail(0, base_offset)
        self._all = ScanRange(base_offset=base_offset)
        self._unwritten: list[bytes | bytearray | memoryview] = []
        self._pending_headers: bytearray | None = None
        self._headers: HeadersCrc | None = None  # only of a segment that was made here and never cut

    @classmethod
    def create(cls, filesystem: Filesystem, directory: Path, base_offset: int, config: LogConfig) -> "Segment":
        """Make an empty segment whose name is on disk. Raises OSError; after any error nothing of it remains."""
        segment = cls(filesystem, directory, base_offset, config)
        segment._begin_headers()
        try:
            segment._file = filesystem.open(segment.path, create=True)
            segment._file_bytes = segment._file.size()
            for index in (segment.index, segment.time_index):
                if len(index):  # left by an earlier segment of this name that was cut off
                    index.keep(0)
                    index.write()
            filesystem.sync_directory(directory)
        except BaseException:  # Ctrl-C, too
            segment.close()
            if filesystem.exists(segment.path):
                filesystem.remove(segment.path)
            raise
        return segment

    @property
    def size_bytes(self) -> int:
        """The bytes of its whole batches."""
        return self._tail.size_bytes

    @property
    def next_offset(self) -> int:
        """The offset behind its last record."""
        return self._tail.next_offset

    @property
    def newest_timestamp_ms(self) -> int:
        """The newest time in it; -1: it has none."""
        return self._tail.max_timestamp_ms

    @property
    def is_open(self) -> bool:
        """Whether it holds a descriptor."""
        return self._file is not None

    @property
    def file(self) -> File:
        """The .log file, opened when it is first needed. Raises FileRemoved, OSError."""
        if self._file is None:
            try:
                self._file = self._filesystem.open(self.path)
            except FileNotFoundError as error:
                if self._file_bytes < 0:
                    raise
                raise FileRemoved(self.path, self._file_bytes, None) from error
            if self._file_bytes < 0:
                self._file_bytes = self._file.size()
        return self._file

    @property
    def lost_file(self) -> File | None:
        """The open file with all of its bytes, if its name leads elsewhere."""
        file = self._file
        is_lost = file is not None and file.named_size() is None and file.size() == self._file_bytes
        return file if is_lost else None

    def check_file(self) -> None:
        """Raise FileRemoved unless the name leads to the open file, and it is as long as this object made it.

        Also for a file that is opened again. Raises OSError.
        """
        found = self.file.named_size()
        if found is None or found != self._file_bytes:
            raise FileRemoved(self.path, self._file_bytes, found)

    def check_written(self) -> None:
        """`check_file` for the file in its final form, on disk; if it has holes, its batches are read back. Raises
        FileRemoved, OSError.

        A cut by another program, and a write behind it, leave the size that it had, and a hole.
        """
        self.check_file()
        if not self.file.has_hole(self.size_bytes):
            return
        for step in scan_vectorised(self.file, self._all):
            is_whole = isinstance(step, CleanEnd) and step.next_offset == self.next_offset
            if not is_whole and not isinstance(step, BatchRun):
                raise FileRemoved(self.path, self.size_bytes, step.position)

    def has_room(self, header: BatchHeader) -> bool:
        """Whether a batch still fits into this segment, by size, by time and by the 32 bits of index entries."""
        tail, config = self._tail, self.config
        if tail.size_bytes == 0:
            return True
        if tail.size_bytes + header.size_bytes > config.segment_bytes:
            return False
        if header.last_offset_delta + tail.next_offset - self.base_offset > POSITION_MAX:
            return False
        if config.segment_ms is None or tail.first_timestamp_ms is None:
            return True
        now_ms = self.wall_ms()
        if not is_believed(tail.first_timestamp_ms, now_ms):
            tail.first_timestamp_ms = now_ms  # counts from the second batch, or from the opening, on
        newest_ms = header.max_timestamp_ms if is_believed(header.max_timestamp_ms, now_ms) else now_ms
        return newest_ms - tail.first_timestamp_ms < config.segment_ms

    def append(self, batch: RecordBatch) -> None:
        """Append a stamped batch; it is in the file after `write` at the latest. Small ones are written together.

        Raises OSError, also if the end offset would be no valid one; the caller then calls `rewind`.
        """
        header, data, unwritten, pending = batch.header, batch.data, self._unwritten, self._pending_headers
        unwritten.append(data)
        if pending is not None:
            pending += data[:SEALED_BYTES]
        self.index_batch(self._tail.size_bytes, header)
        if self._tail.next_offset > OFFSET_MAX:
            why = f"{len(batch)} records from offset {header.base_offset} on reach the end of all offsets, 2^63 - 1"
            raise OSError(errno.EOVERFLOW, why)
        if len(data) > _TOGETHER_BYTES_MAX or len(unwritten) == _TOGETHER_MAX:
            self.write()

    def write(self) -> None:
        """Write pending batches to the file. Raises FileRemoved, OSError; the caller then calls `rewind`."""
        if not self._unwritten:
            return
        data = self._unwritten[0] if len(self._unwritten) == 1 else b"".join(self._unwritten)
        self._unwritten.clear()
        file, end = self.file, self._tail.size_bytes
        if reaches_end := end >= self._file_bytes:
            self.check_file()  # a file that was cut would get the size that it had
            if self.config.preallocate_bytes and end > self._file_bytes:
                self._allocate(file, end)
        file.write_at(data, end - len(data))
        if reaches_end:
            self._file_bytes = max(end, self._file_bytes)

    def index_batch(self, position: int, header: BatchHeader) -> None:
        """Add the batch at `position` to the segment's end, newest time and index entries."""
        tail, size_bytes, newest_ms = self._tail, header.size_bytes, header.max_timestamp_ms
        if tail.first_timestamp_ms is None:
            tail.first_timestamp_ms = newest_ms
        if newest_ms > tail.max_timestamp_ms:
            tail.max_timestamp_ms, tail.offset_of_max = newest_ms, header.last_offset
        if tail.bytes_since_entry > self.config.index_interval_bytes:
            self.index_time()
            self.index.append(header.last_offset - self.base_offset, position)
            tail.bytes_since_entry = 0
            if self._headers is not None:
                self._headers.fold_if_due()
        tail.bytes_since_entry += size_bytes
        tail.size_bytes = position + size_bytes
        tail.next_offset = header.next_offset

    def index_run(self, run: BatchRun) -> None:
        """`index_batch` for every batch of a run, which a scan has found."""
        tail, interval, base = self._tail, self.config.index_interval_bytes, self.base_offset
        if tail.first_timestamp_ms is None:
            tail.first_timestamp_ms = int(run.max_timestamp_ms[0])
        since, newest, offset_of_newest = tail.bytes_since_entry, tail.max_timestamp_ms, tail.offset_of_max
        columns = (run.position, run.size_bytes, run.last_offset, run.max_timestamp_ms)
        for position, size, last, time in zip(*(column.tolist() for column in columns), strict=True):
            if time > newest:
                newest, offset_of_newest = time, last
            if since > interval:
                tail.max_timestamp_ms, tail.offset_of_max = newest, offset_of_newest
                self.index_time()
                self.index.append(last - base, position)
                since = 0
            since += size
        tail.bytes_since_entry, tail.max_timestamp_ms, tail.offset_of_max = since, newest, offset_of_newest
        tail.size_bytes, tail.next_offset = run.end, run.next_offset

    def index_time(self) -> None:
        """A time entry for the greatest timestamp so far, unless there is one."""
        tail, last = self._tail, self.time_index.last
        if tail.max_timestamp_ms > (last[0] if last else -1):
            self.time_index.append(tail.max_timestamp_ms, tail.offset_of_max - self.base_offset)

    def write_indexes_if_due(self) -> None:
        """Write index entries to their files if enough are pending; on a full disk later.

        Times first: so if an offset entry is in its file, the times up to it are in theirs.
        """
        if self.index.is_due:
            with suppress(OSError):
                self.write_indexes()

    def write_indexes(self) -> None:
        """Write the index entries to their files. Raises OSError."""
        self.time_index.write()
        self.index.write()

    def sync_written_indexes(self) -> None:
        """Sync the index files; may run beside appends. Raises OSError."""
        self.time_index.sync_written()
        self.index.sync_written()

    def mark(self) -> SegmentMark:
        """The segment's end, for `rewind`."""
        return SegmentMark(self._tail.copy(), self.index.mark(), self.time_index.mark())

    def rewind(self, mark: SegmentMark) -> None:
        """Forget what was appended since `mark`. Calls no system; the caller then calls `cut_back`."""
        self._unwritten.clear()
        self._headers = self._pending_headers = None
        self.index.rewind(mark.offsets)
        self.time_index.rewind(mark.times)
        self._tail = mark.tail.copy()

    def cut_back(self) -> None:
        """Cut the file at the segment's end; never grow it. The caller syncs it. Raises OSError."""
        if self.file.size() >= self._tail.size_bytes:
            self.file.truncate(self._tail.size_bytes)
        self._file_bytes = self._tail.size_bytes

    def walk(
        self,
        recovery_point: int,
        end_offset: int | None,
        start_offset: int | None = None,
        closed_at: int | None = None,
        epochs: LeaderEpochs | None = None,
    ) -> Iterator[RunStep]:
        """Scan the file to find the segment's end, and rebuild the index entries on the way.

        The scan begins at the batch that the index names for `start_offset` (None: at its last entry), if that batch is
        there, else at the beginning; index entries after that point are dropped first.
        """
        self._begin_walk(start_offset)
        range_ = self._all._replace(
            position=self._tail.size_bytes,
            next_offset=self._tail.next_offset,
            end_offset=end_offset,
            recovery_point=recovery_point,
            closed_at=closed_at,
            epochs=epochs,
        )
        for step in scan_vectorised(self.file, range_):
            if isinstance(step, BatchRun):
                self.index_run(step)
            yield step

    def seal(self, log_id: UUID) -> Seal | None:
        """The seal of its present content; None unless this object appended every batch of it."""
        if self._headers is None:
            return None
        return self._headers.seal(log_id, self.path.parent, self.base_offset, self.next_offset, self.size_bytes)

    def _begin_headers(self) -> None:
        self._headers = HeadersCrc()
        self._pending_headers = self._headers.pending

    def _begin_walk(self, start_offset: int | None) -> None:
        self._headers = self._pending_headers = None
        if not self.file.size():  # empty: every batch is appended by this object
            self._begin_headers()
        self._tail = _Tail(0, self.base_offset)
        # With more entries than batches fit into the file the index is not read: a sparse file can seem terabytes long.
        entries_max = self.file.size() // HEADER_BYTES
        sane = len(self.index) <= entries_max and self.index.ascends(0, 1)
        sane = sane and len(self.time_index) <= entries_max and self.time_index.ascends(0, 1)
        relative = (POSITION_MAX if start_offset is None else start_offset - self.base_offset) if sane else -1
        self.index.keep(self.index.count_up_to(relative))
        entry = self.index.last
        begun = from_index_entry(self.file, self._all, entry)
        if entry is not None and begun is not self._all:
            self.time_index.keep(self.time_index.count_up_to(entry[0], column=1))
            first, (time, offset) = self._header(self._all), self.time_index.last or (-1, -1 - self.base_offset)
            first_time = first[6] if first is not None else None
            batch = self._header(begun)
            # The times up to an offset entry have to be there, too; else that file was lost, and both are rebuilt.
            if batch is not None and time >= max(batch[6], -1 if first_time is None else first_time):
                self._tail = _Tail(
                    size_bytes=entry[1],
                    next_offset=batch[1],
                    max_timestamp_ms=time,
                    offset_of_max=offset + self.base_offset,
                    first_timestamp_ms=first_time,
                )
                return
        self.index.keep(0)
        self.time_index.keep(0)

    def _header(self, what: ScanRange) -> ScannedHeader | None:
        """The header of the batch at which a scan begins, if it is in its place."""
        return next(scan_headers(self.file, what), None)

    def trim(self) -> None:
        """Cut off the space allocated ahead. Raises OSError."""
        if self.file.size() > self._tail.size_bytes:
            self.file.truncate(self._tail.size_bytes)
        self._file_bytes = self._tail.size_bytes

    def finish(self) -> None:
        """Give the files their final form: no space allocated ahead, every entry and the last time in the indexes.

        Raises FileRemoved; OSError: then nothing is lost, and it can be repeated.
        """
        self.check_file()  # before its size changes
        self.trim()
        self.index_time()
        self.write_indexes()

    def sync(self) -> None:
        """Sync the files. Raises OSError; then it is unknown what the disk holds."""
        self.file.sync()
        self.sync_written_indexes()

    def sync_indexes(self, *, retaken: bool = False) -> None:
        """Write and sync the index entries, so that a recovery point may rise over them.

        retaken: also those that a scan found in the files as another process wrote them.
        """
        self.time_index.sync(retaken=retaken)
        self.index.sync(retaken=retaken)

    def locate(self, offset: int) -> tuple[int, int]:
        """Where to cut `offset` off: (position, base offset) of the batch that holds it.

        Raises CorruptBatch if a scan does not reach it.
        """
        entry = self.index.floor(offset - self.base_offset)
        for step in scan(self.file, from_index_entry(self.file, self._all, entry)):
            if not isinstance(step, WholeBatch):
                reason = "the segment ends there" if isinstance(step, CleanEnd) else step.reason
                raise CorruptBatch(step.next_offset, self.path, step.position, reason)
            if step.batch.header.next_offset > offset:
                return step.position, step.batch.header.base_offset
        raise AssertionError("a scan ends with an answer")

    def cut(self, position: int, next_offset: int) -> None:
        """Cut the file durably at the beginning of a batch; next_offset: end of the one before. Raises OSError."""
        remove_seals(self._filesystem, self.path.parent, [self.base_offset])
        self.file.truncate(position)
        self.file.sync()
        self._file_bytes = position
        # From a batch that stays: `locate` has checked the ones after it, but none before.
        for _ in self.walk(0, None, next_offset - 1):
            pass
        if (self.size_bytes, self.next_offset) != (position, next_offset):  # appends would overwrite batches
            reason = f"whole batches up to byte {self.size_bytes} where there were some up to {position}"
            raise OSError(errno.EIO, reason, str(self.path))
        self.sync_indexes()

    def close(self) -> None:
        """Close the descriptor. Writes nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _allocate(self, file: File, end: int) -> None:
        """Grow the file ahead of `end`, so that an fdatasync has no new size to write.

        At most by its own size: else ten thousand small logs would fill a disk with space that they may never use.
        """
        ahead = min(max(end, PREALLOCATE_BYTES_MIN), self.config.preallocate_bytes, self.ahead_bytes_max())
        wanted = min(end + ahead, max(end, self.config.segment_bytes))
        try:
            file.allocate(wanted)
            self._file_bytes = wanted
        except OSError:  # on a nearly full disk the batch itself may still fit
            self._file_bytes = file.size()


def begin_near(  # noqa: PLR0913, PLR0917 - the files, what is looked for, what to call for a bad index
    filesystem: Filesystem,
    directory: Path,
    file: ReadableFile,
    what: ScanRange,
    offset: int,
    on_ignored: Callable[[int], None] | None = None,
) -> ScanRange:
    """`what`, beginning at a batch at or before `offset` that the sparse index names.

    on_ignored: called with the segment's base offset if the index named no such batch. Raises OSError.
    """
    index = IndexFile(filesystem, segment_path(directory, what.base_offset, INDEX_SUFFIX), OFFSET_ENTRY)
    entry = index.floor(offset - what.base_offset)
    begun = from_index_entry(file, what, entry)
    if on_ignored is not None and entry is not None and begun is what:
        on_ignored(what.base_offset)
    return begun


def size_of_sealed(filesystem: Filesystem, directory: Path, bases: Sequence[int], offset: int) -> int:
    """Bytes from `offset` on in the sealed segments that begin at `bases`.

    Too high by at most an index interval; a segment that is removed meanwhile counts 0. Raises OSError.
    """
    first = max(0, bisect_right(bases, offset) - 1)
    size = sum(file_size(filesystem, segment_path(directory, base)) or 0 for base in bases[first:])
    if bases and offset > bases[first]:
        index = IndexFile(filesystem, segment_path(directory, bases[first], INDEX_SUFFIX), OFFSET_ENTRY)
        entry = index.floor(offset - 1 - bases[first])
        size -= max(0, entry[1]) if entry is not None else 0  # a wrong one only makes it less exact
    return max(0, size)


@dataclass(frozen=True, slots=True)
class SealedSegment:
    """A sealed segment: the offsets [base_offset, end_offset)."""

    base_offset: int
    end_offset: int
    size_bytes: int


def newest_timestamp_ms(
    filesystem: Filesystem, directory: Path, segment: SealedSegment, *, limit_ms: int | None = None
) -> int:
    """The newest timestamp in the segment, up to `limit_ms`; -1 if it has none. With a limit all of it is read.

    Raises CorruptBatch where it can't be read, OSError.
    """
    path = segment_path(directory, segment.base_offset)
    with closing(filesystem.open(path, writable=False)) as file:
        newest = -1
        what = _believed(filesystem, directory, segment, file)
        if limit_ms is not None:
            what = ScanRange(base_offset=segment.base_offset, end_offset=segment.end_offset)
        for step in scan(file, what):
            if isinstance(step, WholeBatch):
                times = [step.batch.header.max_timestamp_ms]
                if limit_ms is not None and times[0] > limit_ms:
                    times = [one.timestamp_ms for one in step.batch.records() if one.timestamp_ms <= limit_ms]
                newest = max(newest, *times, -1)
            elif not isinstance(step, CleanEnd):
                raise CorruptBatch(step.next_offset, path, step.position, step.reason)
        return newest


def _believed(filesystem: Filesystem, directory: Path, segment: SealedSegment, file: File) -> ScanRange:
    """The scan from the batch of the newest time entry on, if that batch is as the entry says; else of the whole
    segment.
    """
    base = segment.base_offset
    whole = ScanRange(base_offset=base, end_offset=segment.end_offset)
    time = IndexFile(filesystem, segment_path(directory, base, TIME_INDEX_SUFFIX), TIME_ENTRY).last
    if time is None:
        return whole
    index = IndexFile(filesystem, segment_path(directory, base, INDEX_SUFFIX), OFFSET_ENTRY)
    for step in scan(file, from_index_entry(file, whole, index.floor(time[1]))):
        if isinstance(step, WholeBatch) and (header := step.batch.header).last_offset - base >= time[1]:
            # The entry names a batch's last record or, as some brokers write it, another one of the batch.
            is_true = header.base_offset - base <= time[1] and header.max_timestamp_ms == time[0]
            return whole._replace(position=step.position, next_offset=header.base_offset) if is_true else whole
    return whole

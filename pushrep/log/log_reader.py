"""LogReader: a log read beside its writer, or after it: no lock, no recovery, no writes.

where is the end?     what the writer published      (directory's mapped file, by the same start of the machine)
                      else the checkpoints           min(high watermark, recovery point), or the base of the batch
                                                     that this would cut in two: nobody knows of more
isolation "stable"    min(high watermark, flushed offset): what can never be taken back
          "written"   the log end offset
"""

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple, Self, TypeAlias
from uuid import UUID

from pushrep.env import REAL_FILESYSTEM, Filesystem
from pushrep.errors import BadArgument, ForkedProcess
from pushrep.log.directory_files import (
    parse_log_name,
    read_checkpoints,
    read_cleaned_offset,
    read_partition_metadata,
    real_log_path,
)
from pushrep.log.errors import LogClosed, NotALog
from pushrep.log.published import PublishedReader
from pushrep.log.reading import BatchReader, Bounds
from pushrep.log.segment_files import list_segments
from pushrep.records import Record, RecordBatch

Isolation: TypeAlias = Literal["stable", "written"]


class LogOffsets(NamedTuple):
    """A log at one moment, each the next offset."""

    start: int
    end: int
    flushed: int
    high_watermark: int


class LogReader:
    """Reads a log of any process. Thread-safe; a context manager. Made by `SegmentLog.open_reader`.

    The offsets are asked of the writer's published state each time. After `close` everything raises LogClosed, in a
    fork of the process that opened it ForkedProcess.
    """

    def __init__(
        self, directory: Path | str, *, isolation: Isolation = "stable", filesystem: Filesystem = REAL_FILESYSTEM
    ) -> None:
        """Use `SegmentLog.open_reader`."""
        if isolation not in {"stable", "written"}:
            raise BadArgument("isolation", f'give "stable" or "written", not {isolation!r}')
        self.path = real_log_path(directory)
        self.topic, self.partition = parse_log_name(self.path.name)
        self._filesystem, self._isolation = filesystem, isolation
        try:
            self._bases: Sequence[int] = list_segments(filesystem, self.path)
        except FileNotFoundError:
            raise NotALog(self.path) from None
        except NotADirectoryError:
            raise NotALog(self.path, "it is a file; a log is a directory") from None
        except PermissionError as error:
            raise NotALog(self.path, "it may not be read by this user") from error
        self._published = PublishedReader(self.path.parent, self.path.name, filesystem)
        self._published_lock = threading.Lock()
        self._reader = BatchReader(filesystem, self.path, self)
        self._whole_end = (0, 0)  # as the checkpoints told it last, and where the batches below it end
        self._owner_pid = os.getpid()
        self._closed = False

    @property
    def log_id(self) -> UUID | None:
        """The id in partition.metadata; None if the file is not there yet."""
        self._check()
        return read_partition_metadata(self.path, self._filesystem)

    @property
    def log_start_offset(self) -> int:
        """First offset that can be read."""
        return self._state().start

    @property
    def log_end_offset(self) -> int:
        """The offset that the writer's next record gets, as far as it is known here."""
        return self._state().end

    @property
    def flushed_offset(self) -> int:
        """First offset not known to be on disk."""
        return self._state().flushed

    @property
    def high_watermark(self) -> int:
        """First offset not yet held by enough replicas."""
        return self._state().high_watermark

    @property
    def stable_offset(self) -> int:
        """min(high watermark, flushed offset): nothing below is ever taken back."""
        state = self._state()
        return min(state.flushed, state.high_watermark)

    @property
    def ignored_index_entries(self) -> int:
        """So many entries of indexes led its reads to no batch that is theirs; the writer makes them anew."""
        return self._reader.ignored_entries

    def offsets(self) -> LogOffsets:
        """All of them at one moment, and for one look at what the writer published."""
        return self._state()

    def refresh(self) -> None:
        """Look again; reading the offsets does so by itself."""
        self._state()

    def read(self, offset: int, max_bytes: int) -> bytes:
        """Whole batches from the one that holds `offset` on, at most `max_bytes` but at least one.

        Empty at the end of what this isolation reads: a batch that crosses that waits until the end has passed it.
        Raises OffsetOutOfRange, CorruptBatch.
        """
        return self._reader.read(offset, max_bytes)

    def batches(self, start: int, end: int | None = None) -> Iterator[RecordBatch]:
        """Every batch that holds an offset in [start, end), up to what can be read now, as `read`. Raises as `read`."""
        return self._reader.batches(start, end)

    def records(self, start: int, end: int | None = None) -> Iterator[Record]:
        """Every record in [start, end), up to what can be read now, of a batch that waits, too. Raises as `read`."""
        return self._reader.records(start, end)

    def offset_for_timestamp(self, timestamp_ms: int) -> int | None:
        """Offset of the first record whose time is `timestamp_ms` or later; None if there is none."""
        return self._reader.offset_for_timestamp(timestamp_ms)

    def bounds(self) -> Bounds:
        """[log start, what this isolation reads to)."""
        state = self._state()
        end = state.end if self._isolation == "written" else min(state.flushed, state.high_watermark)
        return Bounds(state.start, max(state.start, end))

    def bases(self, *, fresh: bool) -> Sequence[int]:
        """Base offsets of the segments; `fresh` looks into the directory again."""
        if fresh or not self._bases:
            self._bases = list_segments(self._filesystem, self.path)
        return self._bases

    def cleaned_offset(self) -> int:
        """Below it Kafka's cleaner may have taken offsets; 0 for a log that it never saw."""
        return read_cleaned_offset(self.path, self._filesystem)

    def revision(self) -> int:
        """The same number before and after a look at the files: the writer cut nothing meanwhile."""
        self._check()
        with self._published_lock:
            state = self._published.read()
        return state.sequence if state is not None else 0

    def close(self) -> None:
        """Let go of the log; closing twice is fine."""
        self._closed = True
        if self._published_lock.acquire(blocking=False):  # in a fork nobody might ever give it back
            try:
                self._published.let_go()
            finally:
                self._published_lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LogReader({str(self.path)!r}, isolation={self._isolation!r})"

    def _state(self) -> LogOffsets:
        self._check()
        with self._published_lock:
            state = self._published.read()
        if state is not None:
            return LogOffsets(state.log_start_offset, state.log_end_offset, state.flushed_offset, state.high_watermark)
        name, known = self.path.name, read_checkpoints(self.path.parent, self._filesystem)
        bases = self.bases(fresh=True)
        start = known.log_start_offsets.get(name, bases[0] if bases else 0)
        recovery_point = known.recovery_points.get(name, start)
        end = min(recovery_point, known.high_watermarks.get(name, recovery_point))
        if self._whole_end[0] != end:
            self._whole_end = (end, self._reader.base_of(end))
        end = max(start, self._whole_end[1])
        return LogOffsets(start, end, end, end)

    def _check(self) -> None:
        if self._closed:
            raise LogClosed(self.path)
        if os.getpid() != self._owner_pid:
            raise ForkedProcess(f"the reader of {self.path}", owner_pid=self._owner_pid, pid=os.getpid())

"""LogSource: one log for a replay, of this process or another.

    SegmentLog of this process    exact offsets; retention waits for the lease
    any other log                 a reader beside its writer: no lock, no lease; records removed by retention are an
    error

The isolation is "written": the session's bound limits what is sent.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias, TypeVar
from uuid import UUID

from pushrep.env import REAL_FILESYSTEM, Filesystem
from pushrep.log import CorruptBatch, Lease, LeaseBroken, LogClosed, LogReader, NotALog, OffsetOutOfRange, SegmentLog
from pushrep.log.directory_files import list_segments, read_leader_epochs, read_partition_metadata
from pushrep.log.errors import CorruptPartitionMetadata
from pushrep.log.inspection import lock_holder
from pushrep.log.published import LogOffsets
from pushrep.log.retention import OnLeaseBroken
from pushrep.records import CorruptRecordBatch, RecordBatch
from pushrep.records.leader_epochs import LeaderEpochs
from pushrep.replay import events as e
from pushrep.replay.plan import MAX_TIMESTAMP, ReplayRefused
from pushrep.wire.error_codes import ErrorCode

Log: TypeAlias = SegmentLog | LogReader
_T = TypeVar("_T")
READ_ERRORS = (OffsetOutOfRange, CorruptBatch, CorruptRecordBatch, LogClosed, NotALog, OSError)
"""The errors of reading a log; `LogSource.failure` turns them into the session's event."""


class LogSource:
    """A log to replay. log: one that this process has open; its owner closes it, and then a reader replaces it here."""

    def __init__(self, path: Path, log: SegmentLog | None = None, filesystem: Filesystem = REAL_FILESYSTEM) -> None:
        """Raises NotALog, InvalidLogName."""
        self.filesystem = filesystem
        self._log: Log = log if log is not None else self._reader(path)
        self.path = self._log.path

    @property
    def log_id(self) -> UUID | None:
        """The id of the log, which another log of its name would not have; None if it has no file that says so."""
        return self._log.log_id

    @property
    def has_leases(self) -> bool:
        """Whether retention can be made to wait."""
        return isinstance(self._log, SegmentLog)

    def facts(self) -> LogOffsets:
        """The log's present ends."""
        return self._asked(lambda log: log.ends())

    def _asked(self, ask: Callable[[Log], _T]) -> _T:
        """The log's answer; the one of its successor here if its owner has closed it."""
        try:
            return ask(self._log)
        except LogClosed:
            if isinstance(self._log, LogReader):
                raise
            self._log = self._now_open()
            return ask(self._log)

    def history(self) -> int:
        """Changes before records are taken off the log's end; -1 once it is closed."""
        try:
            return self._log.history()
        except LogClosed:
            return -1

    def live_facts(self) -> tuple[LogOffsets, bool]:
        """The same, and whether a writer has the log open."""
        # The writer is looked at first: if it has stopped, the offsets read after that are final.
        log, is_live, facts = self._log, self._is_live(), self.facts()
        return (facts, is_live) if self._log is log else self.live_facts()

    def damaged_from(self, facts: LogOffsets) -> int | None:
        """The first offset that was on disk and can't be read, if it is known or the last record shows it."""
        if self.has_leases or facts.end == facts.start:
            return None if facts.damage is None else facts.damage.offset
        try:
            next(self.batches(facts.end - 1, facts.end), None)
        except CorruptBatch as error:
            return error.offset
        except READ_ERRORS:
            pass  # it was cut meanwhile, or is gone
        return None

    def why_invalid(self, facts: LogOffsets) -> str:
        """Why the log, or its first records, can't be read; empty if they can. Raises OSError."""
        try:
            read_partition_metadata(self.path, self.filesystem)
        except CorruptPartitionMetadata as error:
            return str(error)
        bases = list_segments(self.filesystem, self.path)
        if facts.start == facts.end or (bases and bases[0] <= facts.start):
            return ""
        first = f"the first one begins at {bases[0]}" if bases else "there is none"
        return f"{self.path} starts at offset {facts.start}, and of its files {first}: restore the missing ones"

    def first_at(self, timestamp_ms: int) -> int | None:
        """Offset of the first record at or after that time, or of MAX_TIMESTAMP's; None if there is none. Raises
        ReplayRefused (CORRUPT_MESSAGE) for damage on the way.
        """
        try:
            if timestamp_ms == MAX_TIMESTAMP:
                return self._asked(lambda log: log.offset_of_largest_timestamp())
            return self._asked(lambda log: log.offset_for_timestamp(timestamp_ms))
        except CorruptBatch as error:
            code, segment = ErrorCode.CORRUPT_MESSAGE, int(error.segment.stem)
            raise ReplayRefused(code, str(error), segment=segment) from error

    def batches(self, start: int, end: int) -> Iterator[RecordBatch]:
        """Every batch that holds an offset in [start, end). Raises as LogReader.batches."""
        return self._asked(lambda log: log.batches(start, end))

    def lease(self, offset: int, on_broken: OnLeaseBroken) -> Lease | None:
        """A lease from `offset` on, if this process writes the log. Raises OffsetOutOfRange, LeaseBroken."""
        if isinstance(self._log, LogReader):
            return None
        return self._log.acquire_lease("replay", offset, on_broken)

    def begin(self, position: int, take_lease: Callable[[], None]) -> e.SegmentOpened | e.OpenFailed:
        """Take the lease and read the batch at `position`; returns the session's event."""
        try:
            take_lease()
            return self._opened_at(position, self.facts())
        except LeaseBroken as error:
            return e.OpenFailed(ErrorCode.LEASE_BROKEN, str(error))
        except READ_ERRORS as error:
            failure = self.failure(error, position, self.facts())
            if isinstance(failure, e.ReadFailed):
                why = failure.why if failure.code is ErrorCode.INVALID_RECORDING else str(error)
                return e.OpenFailed(failure.code, why, failure.segment)
            return e.OpenFailed(ErrorCode.UNKNOWN_RECORDING, str(error))

    def _opened_at(self, position: int, facts: LogOffsets) -> e.SegmentOpened:
        """The batch at `position`, checked as every batch is. Raises as `batches`."""
        at = next(self.batches(position, position + 1), None) if position < facts.end else None
        before = next(self.batches(position - 1, position), None) if position > facts.start else None
        by_log = None
        if at is not None and (epochs := self.leader_epochs()) is not None:
            base_offset, epoch = at.header.base_offset, at.header.leader_epoch
            by_log = epochs.epoch_of(base_offset) if epochs.contradiction(base_offset, epoch) else None
        return e.SegmentOpened(
            leader_epoch=None if at is None else at.header.leader_epoch,
            epoch_by_log=by_log,
            epoch_before=None if before is None else before.header.leader_epoch,
        )

    def leader_epochs(self) -> LeaderEpochs | None:
        """The list of epochs; None if it is unknown beside the writer."""
        return self._asked(
            lambda log: (
                read_leader_epochs(self.path, self.filesystem) if isinstance(log, LogReader) else log.leader_epochs
            )
        )

    def cut_since(self, offset: int, leader_epoch: int, facts: LogOffsets) -> e.Truncated | e.ReadFailed:
        """The event for a log without its former batch of that epoch at `offset`."""
        try:
            epochs = self.leader_epochs()
        except READ_ERRORS as error:  # the cut may be lower than anything else shows
            return e.ReadFailed(ErrorCode.KAFKA_STORAGE_ERROR, str(error))
        cut = min(offset, facts.end)
        if epochs is None or not epochs.entries:
            return e.Truncated(cut)
        # If the log has gone on under another epoch, it was cut where that epoch ended (KIP-101).
        _, end = epochs.end_of(leader_epoch, facts.end)
        return e.Truncated(min(cut, end) if end >= 0 else cut, epochs.latest_epoch)

    def failure(
        self, error: Exception, position: int, facts: LogOffsets, given: tuple[int, int] | None = None
    ) -> e.ReadFailed | e.Truncated | e.Deleted:
        """The session's event for an error of a read. given: offset and leader epoch of the last batch before it."""
        if not self.filesystem.exists(self.path):
            return e.Deleted()
        if isinstance(error, CorruptBatch):
            return e.ReadFailed(ErrorCode.CORRUPT_MESSAGE, str(error), int(error.segment.stem))
        if isinstance(error, OffsetOutOfRange):
            if (end := min(facts.end, error.end)) < position:
                return self.cut_since(*(given or (position, -1)), facts._replace(end=end))
            if invalid := self.why_invalid(facts):
                return e.ReadFailed(ErrorCode.INVALID_RECORDING, invalid)
            why = f"retention took what lies below offset {facts.start}"
            return e.ReadFailed(ErrorCode.OFFSET_OUT_OF_RANGE, why)
        return e.ReadFailed(ErrorCode.KAFKA_STORAGE_ERROR, str(error))

    def close(self) -> None:
        """Close a reader; a log that was passed in stays open."""
        if isinstance(self._log, LogReader):
            self._log.close()

    def _reader(self, path: Path) -> LogReader:
        return SegmentLog.open_reader(path, isolation="written", filesystem=self.filesystem)

    def _now_open(self) -> Log:
        """A reader for a log whose writer has stopped: a following replay waits for the next writer."""
        return self._reader(self.path)

    def _is_live(self) -> bool:
        if isinstance(self._log, LogReader):
            return lock_holder(self.path.parent, self.filesystem) is not None
        return True

"""A partition's log as a consumer of startpoints needs it; the one in a local directory. Others: ReplayClient's."""

from itertools import islice
from pathlib import Path
from typing import Protocol

from pushrep.log import LogReader, OffsetOutOfRange, SegmentLog
from pushrep.log.published import read_published
from pushrep.records import Record
from pushrep.startpoints.resolve import LogFacts


class PartitionLog(Protocol):
    """One partition to read from any offset on. Methods raise what the log behind it raises."""

    @property
    def log_id(self) -> str:
        """The log's own id, "" if it tells none."""
        ...

    def bounds(self) -> tuple[int, int]:
        """Readable offsets [start, end), now."""
        ...

    def first_at(self, ms: int, /) -> int | None:
        """Offset of the first record at or after `ms` since 1970; None if there is none."""
        ...

    def fetch(self, position: int, count: int) -> tuple[list[Record], int]:
        """At most `count` records from `position` on, and the next position; none if none is there. Never waits."""
        ...

    def close(self) -> None: ...


class LocalLog:
    """A log on this machine, beside its writer. Raises NotALog."""

    def __init__(self, path: Path) -> None:
        self._reader = SegmentLog.open_reader(path)
        self.log_id = str(self._reader.log_id or "")

    def bounds(self) -> tuple[int, int]:
        return self._reader.bounds()

    def first_at(self, ms: int, /) -> int | None:
        return self._reader.offset_for_timestamp(ms)

    def fetch(self, position: int, count: int) -> tuple[list[Record], int]:
        """Raises OffsetOutOfRange if the log begins above the position, or ends below it for sure."""
        end = self._readable_end(position)
        records = list(islice(self._reader.records(position, end), count)) if position < end else []
        # Fewer than asked for: all of it was read, a hole that compaction left at the end included.
        return records, records[-1].offset + 1 if len(records) == count else max(position, end)

    def close(self) -> None:
        self._reader.close()

    def _readable_end(self, position: int) -> int:
        start, end = self._reader.bounds()
        # Without a writer since the machine started only checkpoints speak for the end, and they lag: then wait for it.
        if position > end:
            known = read_published(self._reader.path.parent, self._reader.path.name)
            if known is not None and position > known.log_end_offset:
                raise OffsetOutOfRange(position, start, end)
        return end


def facts_of(log: PartitionLog | LogReader) -> LogFacts:
    """A log as its readers see it now."""
    start, end = log.bounds()
    first_at = log.offset_for_timestamp if isinstance(log, LogReader) else log.first_at
    return LogFacts(start=start, end=end, first_at=first_at, log_id=str(log.log_id or ""))

"""What is being shipped, as its callers see it: every log's source, how far it is, what is in the way.

The event loop's thread changes it; callers of any thread ask. Numbers are read without a lock, waiting has one.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import monotonic
from typing import NamedTuple

from pushrep.kafka.errors import DestinationAhead, ShippingError, ShippingStopped, ShippingTimeout
from pushrep.kafka.progress import PartitionProgress, Progress
from pushrep.kafka.reading import ReusedMemory
from pushrep.kafka.source import LogSource, ShippedLog
from pushrep.seams import Clock

_LOG = logging.getLogger("pushrep.kafka")
_LOOK_S = 1.0  # how often who waits looks whether there is still something that moves


class DestinationLag(NamedTuple):
    """How far a Kafka topic is behind the logs.

    records, size_bytes: appended, and not acknowledged by the topic (bytes: too many by an index entry at most).
    age_ms: how old the oldest of these is, by its own timestamp; None if there is none.
    stopped: partitions that go no further until somebody acts. trouble: what is in the way of all; None: nothing.
    """

    records: int
    size_bytes: int
    age_ms: int | None
    stopped: tuple[ShippingStopped, ...]
    trouble: str | None


class Shipment:
    """See the file's map."""

    def __init__(self, logs: Sequence[ShippedLog], progress: Progress, pid_epoch: int, clock: Clock) -> None:
        """Raises DestinationAhead where a log ends below what the topic acknowledged of it under this PID epoch."""
        self._clock = clock
        memory = ReusedMemory()
        self.progress = progress.within({log.partition: log.log_end_offset for log in logs})
        self.sources: Mapping[int, LogSource] = {
            log.partition: _source_of(
                log, progress.partitions.get(log.partition), progress.pid_epoch == pid_epoch, memory
            )
            for log in logs
        }
        for number, source in self.sources.items():
            source.skipped = progress.skipped_of(number)
        self.trouble: str | None = None
        self.refusal: ShippingError | None = None
        """Why nothing is shipped until somebody acts."""
        self.pid_epoch = pid_epoch
        self._moved = threading.Condition()
        self._waiting = 0

    def void(self) -> None:
        """The topic is another one: everything is to be shipped again."""
        for source in self.sources.values():
            source.acknowledged, source.destination_offset = source.log.log_start_offset, -1

    def current(self) -> Progress:
        """The progress to write down now."""
        known = {
            number: PartitionProgress(one.acknowledged, one.destination_offset, one.log_crc)
            for number, one in self.sources.items()
            if one.destination_offset >= 0
        }
        return replace(self.progress, partitions=known, pid_epoch=self.pid_epoch)

    def moved(self) -> None:
        """Something was acknowledged, or went wrong: those who wait look again."""
        if self._waiting:
            with self._moved:
                self._moved.notify_all()

    def told(self, trouble: str | None) -> None:
        """What is in the way now; it is logged when it changes."""
        if trouble is not None and trouble != self.trouble:
            _LOG.warning("nothing is shipped for now: %s", trouble)
        self.trouble = trouble

    def refused(self, refusal: ShippingError | None) -> None:
        """Nothing is shipped until somebody acts; None: that is over."""
        self.refusal = refusal
        self.told(None if refusal is None else str(refusal))
        self.moved()

    def lag(self) -> DestinationLag:
        """How far the topic is behind."""
        records = size = 0
        oldest: int | None = None
        stopped = []
        for source in self.sources.values():
            behind = source.log.log_end_offset - source.acknowledged
            if source.stopped is not None:
                stopped.append(ShippingStopped(source.partition, source.acknowledged, source.stopped))
            if behind > 0:
                records += behind
                size += source.log.size_from(source.acknowledged)
                first = oldest_timestamp_ms(source)
                oldest = first if oldest is None or (first is not None and first < oldest) else oldest
        age_ms = None if oldest is None else max(0, self._clock.wall_ms() - oldest)
        return DestinationLag(records, size, age_ms, tuple(stopped), self.trouble)

    def wait(self, ends: Mapping[int, int], timeout: float | None, deadline_s: float | None) -> None:
        """Return when the topic acknowledged everything below these ends of the logs.

        Raises ShippingTimeout; ShippingStopped and what refuses the whole topic, as soon as that is known.
        """
        with self._moved:
            self._waiting += 1
            try:
                while missing := self._missing(ends):
                    self._raise_stop(ends)
                    left = _LOOK_S if deadline_s is None else min(_LOOK_S, deadline_s - monotonic())
                    if left <= 0:
                        assert timeout is not None, "without one there is no deadline"
                        raise ShippingTimeout(timeout, missing, self.trouble)
                    self._moved.wait(left)
            finally:
                self._waiting -= 1

    def _missing(self, ends: Mapping[int, int]) -> int:
        return sum(max(0, end - self.sources[number].acknowledged) for number, end in ends.items())

    def _raise_stop(self, ends: Mapping[int, int]) -> None:
        if self.refusal is not None:
            raise self.refusal
        for number, end in ends.items():
            source = self.sources[number]
            if source.stopped is not None and source.acknowledged < end:
                raise ShippingStopped(number, source.acknowledged, source.stopped)


def oldest_timestamp_ms(source: LogSource) -> int | None:
    """The time of the first record that is not acknowledged, to a batch; None if there is none."""
    for batch in source.log.batches(source.acknowledged):
        return batch.header.base_timestamp_ms
    return None


def _source_of(
    log: ShippedLog,
    at: PartitionProgress | None,
    is_same_epoch: bool,  # noqa: FBT001
    memory: ReusedMemory,
) -> LogSource:
    start, end = log.log_start_offset, log.log_end_offset
    if at is None:
        return LogSource(log, start, 0, memory)
    if at.acknowledged > end and is_same_epoch:
        raise DestinationAhead(log.partition, shipped_offset=at.acknowledged - 1, log_end_offset=end, pid_epoch=-1)
    if at.acknowledged < start:
        _LOG.warning("partition %d: offsets [%d, %d) were never shipped and are gone", log.partition, *(at[0], start))
        return LogSource(log, start, 0, memory)
    if at.acknowledged > end or not _is_batch_of(log, at):
        _LOG.warning("partition %d was cut and written anew: it is shipped from its start", log.partition)
        return LogSource(log, start, 0, memory)
    source = LogSource(log, at.acknowledged, at.log_crc, memory)
    source.destination_offset = at.destination_offset
    return source


def _is_batch_of(log: ShippedLog, at: PartitionProgress) -> bool:
    """Whether the log still has the batch that was shipped last; one that retention took has to be believed."""
    if at.acknowledged <= log.log_start_offset:
        return True
    return any(batch.header.crc == at.log_crc for batch in log.batches(at.acknowledged - 1, at.acknowledged))

"""The state of shipping to one topic: each log's source, the progress, and why nothing is shipped.

The event loop's thread changes the state, and any thread may read it. Numbers are read without a lock; `wait` uses one.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from typing import NamedTuple

from pushrep.env import Clock
from pushrep.kafka.errors import (
    DestinationAhead,
    DestinationRefused,
    RecordsParked,
    ShippingError,
    ShippingStopped,
    ShippingTimeout,
)
from pushrep.kafka.parking import ParkingLog
from pushrep.kafka.progress import PartitionProgress, ShippingProgress
from pushrep.kafka.source import STORED_EVERY_MS, UNREADABLE, ReusedMemory, ShippedPartition
from pushrep.log import SegmentLog
from pushrep.log.disk import Durations
from pushrep.status.value import REQUEST_BOUNDS_S

_LOG = logging.getLogger("pushrep.kafka")
_LOOK_S = 1.0  # a waiting caller checks so often whether shipping has stopped
IN_TROUBLE_MS = 5_000
"""A partition, broker or fence that keeps records waiting for so long is the topic's trouble."""
FENCE = "fence"
"""The subject of the trouble that partitions wait for the fence."""


class DestinationLag(NamedTuple):
    """A Kafka topic's lag behind the logs.

    records, size_bytes: the records that the topic has not acknowledged, or has lost (size_bytes: too high by at most
    an index interval of each log). age_ms: how long ago the oldest of them was appended, to the second, after a restart
    to the minute; by its own timestamp if it was appended while the outbox did not ship. None: there is none, or it
    can't be read. stopped: partitions that can't be shipped; each is tried again after some seconds. trouble: why
    nothing is shipped, or which partition, broker or fence has kept records waiting for five seconds; None: no trouble.
    """

    records: int
    size_bytes: int
    age_ms: int | None
    stopped: tuple[ShippingStopped, ...]
    trouble: str | None


class ShippingCounts:
    """Counters of shipping since the outbox was opened.

    records, size_bytes, batches: acknowledged by the topic. retried: batches sent again. connections: opened to leaders
    of partitions. taken_over: how often another instance fenced this one. errors: error answers for batches, by code.
    """

    __slots__ = ("batches", "connections", "errors", "records", "retried", "size_bytes", "taken_over")

    def __init__(self) -> None:
        self.records = self.size_bytes = self.batches = self.retried = self.connections = self.taken_over = 0
        self.errors: Counter[str] = Counter()


class SinkState:
    """The state of shipping to one topic; see the module's docstring for its threads."""

    def __init__(  # noqa: PLR0913, PLR0917 - what is shipped, and whence
        self,
        logs: Sequence[SegmentLog],
        progress: ShippingProgress,
        pid_epoch: int,
        clock: Clock,
        topic: str,
        servers: str,
        parking: ParkingLog | None = None,
    ) -> None:
        """parking: where refused records are; None: there were never any.

        Raises DestinationAhead if a log ends below the offset that the topic acknowledged under this PID epoch.
        """
        self._clock, self.topic, self.parking = clock, topic, parking
        self.counts, self.requests = ShippingCounts(), Durations(REQUEST_BOUNDS_S)
        memory = ReusedMemory()
        self.progress = progress.within(
            {log.partition: log.log_end_offset for log in logs if log.damaged_from is None}
        ).under(pid_epoch)
        self.sources: Mapping[int, ShippedPartition] = {
            log.partition: _source_of(
                log, progress.partitions.get(log.partition), progress.pid_epoch == pid_epoch, memory, pid_epoch
            )
            for log in logs
        }
        for number, source in self.sources.items():
            source.skipped = progress.skipped_of(number)
            source.is_matching = True
            self._begin_times(source, progress.appended.get(number, ()))
        self._troubles: dict[Hashable, tuple[str, int]] = {}  # by subject; None: all of the topic
        self._logged: set[str] = set()
        self.refusal: ShippingError | None = None
        """Why nothing is shipped until an operator acts."""
        self.pid_epoch = pid_epoch
        self.went_back: set[int] = set()
        """Kafka partitions whose end was below their acknowledged end."""
        self.unread: dict[int, tuple[int, int]] = {}
        """By Kafka partition: the offsets that other producers wrote between our records, and that are not read yet."""
        self.on_head_cut: Callable[[str], None] = lambda _why: None
        """Called by `head_was_cut`, in its thread."""
        self._moved = threading.Condition()
        self._waiting = 0
        self._no_answer = f"the brokers at {servers} have not answered yet"
        self._troubles[None] = self._no_answer, clock.monotonic_ms()

    def _begin_times(self, source: ShippedPartition, stored: Iterable[tuple[int, int]]) -> None:
        known = list(stored)
        if not known and (time_ms := oldest_timestamp_ms(source, source.acknowledged)) is not None:
            known = [(source.acknowledged, min(time_ms, self._clock.wall_ms()))]  # appended while nothing was shipped
        for offset, at_ms in known:
            source.append_times.on_append(offset, at_ms)

    def void(self) -> None:
        """Forget the progress, because the topic was replaced: all records of the logs are shipped again."""
        for source in self.sources.values():
            source.acknowledged, source.destination_offset = source.log.log_start_offset, -1
            source.newest = None
        self.went_back.clear()
        self.unread.clear()

    def known_ends(self) -> dict[int, int]:
        """By Kafka partition: the highest offset below which its content was known."""
        ends: dict[int, int] = {}
        for source in self.sources.values():
            if source.destination_offset > 0:
                partition = self.progress.topic_partition(source.partition, source.acknowledged)
                ends[partition] = max(source.destination_offset, ends.get(partition, 0))
        return ends

    def change(self, change: Callable[[ShippingProgress], ShippingProgress]) -> None:
        """Replace the progress; any thread may."""
        with self._moved:
            self.progress = change(self.progress)

    def head_was_cut(self, name: str, known: int, start: int) -> None:
        """A Kafka partition's records in [known, start) were removed unread. Some may be from this outbox."""
        why = f"{name} begins at {start}, and was read up to {known}: records of this outbox may be gone"
        _LOG.warning("%s", why)
        self.on_head_cut(why)

    def current(self) -> ShippingProgress:
        """The present progress, to be written."""
        known = {
            number: PartitionProgress(one.acknowledged, self._known_to(one), one.log_crc, one.newest)
            for number, one in self.sources.items()
            if one.destination_offset >= 0 or one.acknowledged > one.log.log_start_offset
        }
        appended = {
            number: tuple(one.append_times.every(STORED_EVERY_MS))
            for number, one in self.sources.items()
            if one.acknowledged < one.noted_end
        }
        return replace(self.progress, partitions=known, appended=appended)

    def note_ends(self) -> None:
        """Note when the newest records were appended; once a second."""
        now_ms = self._clock.wall_ms()
        for source in self.sources.values():
            source.note_end(now_ms)

    def _known_to(self, source: ShippedPartition) -> int:
        """The offset below which its Kafka partition's content is known; the next start reads on from there."""
        at = source.destination_offset
        if not self.unread:
            return at
        return min(at, *self.unread.get(self.progress.topic_partition(source.partition, source.acknowledged), (at,)))

    def moved(self) -> None:
        """Wake waiting callers, because records were acknowledged or shipping failed."""
        if self._waiting:
            with self._moved:
                self._moved.notify_all()

    def begin(self) -> None:
        """A session begins: the brokers answer, and what kept parts of the last one waiting is over."""
        self._troubles.clear()
        self._logged.clear()

    def set_trouble(self, trouble: str | None, subject: Hashable = None, *, age_ms: int = 0) -> None:
        """Set or clear the trouble. Each text is logged once until the trouble is cleared, because two texts may
        alternate while brokers do not answer.

        subject: the partition, broker or fence that keeps some records waiting; None: nothing is shipped. age_ms: for
        how long it has lasted already when it is first set.
        """
        if trouble is None:
            if self._troubles.pop(subject, None) is not None and not self._troubles:
                self._logged.clear()
            return
        _, since_ms = self._troubles.get(subject, (None, self._clock.monotonic_ms() - age_ms))
        self._troubles[subject] = trouble, since_ms
        if trouble not in self._logged:
            self._logged.add(trouble)
            said = "nothing is shipped at present: %s" if subject is None else "records wait: %s"
            _LOG.warning(said, trouble)

    def _trouble(self) -> tuple[str, int] | tuple[None, None]:
        """The present trouble, and its age in ms."""
        now_ms = self._clock.monotonic_ms()
        if (whole := self._troubles.get(None)) is not None:
            return whole[0], now_ms - whole[1]
        lasting = [(now_ms - since_ms, why) for why, since_ms in list(self._troubles.values())]
        age_ms, why = max(lasting, default=(0, ""))
        return (why, age_ms) if age_ms >= IN_TROUBLE_MS else (None, None)

    @property
    def trouble(self) -> str | None:
        """Why nothing is shipped, or for IN_TROUBLE_MS some records were not; None: no trouble."""
        return self._trouble()[0]

    def stopped_ms(self, partition: int) -> int:
        """For how long a stopped partition has been so, in ms."""
        return self._clock.monotonic_ms() - self.sources[partition].stopped_since_ms

    def trouble_ms(self) -> int | None:
        """How long the present trouble has lasted, in ms; None: no trouble."""
        return self._trouble()[1]

    def fence_waits(self) -> tuple[str, int] | None:
        """Why partitions have waited for the fence for IN_TROUBLE_MS or longer, and for how long, in ms."""
        why, since_ms = self._troubles.get(FENCE, ("", 0))
        age_ms = self._clock.monotonic_ms() - since_ms
        return (why, age_ms) if why and age_ms >= IN_TROUBLE_MS else None

    def refused(self, refusal: ShippingError | None) -> None:
        """Set why nothing is shipped until an operator acts; None: shipping goes on once the brokers answer."""
        if refusal is not None or self.refusal is not None:
            self.set_trouble(self._no_answer if refusal is None else str(refusal))
        self.refusal = refusal
        self.moved()

    def lag(self) -> DestinationLag:
        """The topic's lag."""
        records = size = 0
        oldest: int | None = None
        stopped = []
        for source in self.sources.values():
            first = min(source.acknowledged, *self.progress.lost.get(source.partition, (source.acknowledged,)))
            behind = source.log.log_end_offset - first
            if source.stopped is not None:
                stopped.append(ShippingStopped(source.partition, source.stopped_at, source.stopped))
            if behind > 0:
                records += behind
                size += source.log.size_from(first)
                time_ms = source.append_times.time_of(first) or self._clock.wall_ms()
                oldest = time_ms if oldest is None or (time_ms is not None and time_ms < oldest) else oldest
        age_ms = None if oldest is None else max(0, self._clock.wall_ms() - oldest)
        return DestinationLag(records, size, age_ms, tuple(stopped), self.trouble)

    def wait(self, ends: Mapping[int, int], timeout: float | None, deadline_s: float | None) -> None:
        """Return once the topic has acknowledged all records below these ends of the logs, or was found to hold them.

        Raises ShippingTimeout; as soon as they are known, ShippingStopped and the error that stops the whole topic;
        RecordsParked if the topic has all others.
        """
        unread: dict[int, int] | None = None  # written by others before all was acknowledged: read first, too
        with self._moved:
            self._waiting += 1
            try:
                while True:
                    missing = sum(max(0, end - self.sources[number].acknowledged) for number, end in ends.items())
                    is_known = not any(self.sources[number].is_matching for number in ends)
                    if not missing and unread is None:
                        unread = {partition: end for partition, (_, end) in list(self.unread.items())}
                    others = (unread or {}).items()
                    is_known = is_known and all(self.unread.get(one, (end, end))[0] >= end for one, end in others)
                    if not missing and is_known and isinstance(self.refusal, DestinationRefused | None):
                        return self._raise_parked(ends)
                    self._raise_stop(ends)
                    left = _LOOK_S if deadline_s is None else min(_LOOK_S, deadline_s - monotonic())
                    if left <= 0:
                        assert timeout is not None, "without one there is no deadline"
                        raise ShippingTimeout(timeout, missing, self.trouble)
                    self._moved.wait(left)
            finally:
                self._waiting -= 1

    def _raise_parked(self, ends: Mapping[int, int]) -> None:
        if (parking := self.parking) is None:
            return
        parked = [one for one in parking.waiting(self.topic) if one.offset < ends.get(one.partition, 0)]
        if parked:
            raise RecordsParked(self.topic, [(one.partition, one.offset) for one in parked], parking.log.path.parent)

    def _raise_stop(self, ends: Mapping[int, int]) -> None:
        if self.refusal is not None:
            raise self.refusal
        for number, end in ends.items():
            source = self.sources[number]
            if source.stopped is not None and (source.acknowledged < end or source.is_matching):
                raise ShippingStopped(number, source.stopped_at, source.stopped)


def oldest_timestamp_ms(source: ShippedPartition, at: int) -> int | None:
    """The base timestamp of the batch that holds offset `at`; None if there is no such record, or it can't be read."""
    if at < source.log.log_end_offset:  # a damaged log may end below
        with suppress(*UNREADABLE):
            for batch in source.log.batches(at):
                return batch.header.base_timestamp_ms
    return None


def _source_of(
    log: SegmentLog,
    at: PartitionProgress | None,
    is_same_epoch: bool,  # noqa: FBT001
    memory: ReusedMemory,
    pid_epoch: int,
) -> ShippedPartition:
    start, end = log.log_start_offset, log.log_end_offset
    if at is None:
        return ShippedPartition(log, start, 0, memory)
    if at.acknowledged > end and is_same_epoch and log.damaged_from is None:
        raise DestinationAhead(
            log.partition, shipped_offset=at.acknowledged - 1, log_end_offset=end, pid_epoch=pid_epoch
        )
    if at.acknowledged < start:
        _LOG.warning(
            "partition %d: offsets [%d, %d) were removed before they were shipped",
            log.partition,
            at.acknowledged,
            start,
        )
        return ShippedPartition(log, start, 0, memory)
    source = ShippedPartition(log, at.acknowledged, at.log_crc, memory)
    source.destination_offset, source.newest = at.destination_offset, at.newest
    source.is_doubtful = True
    if at.acknowledged > end and log.damaged_from is None:
        source.forget()
    else:
        with suppress(*UNREADABLE):  # `prove` runs again when shipping begins; an error then stops this partition alone
            source.prove()
    return source

"""LogConsumer: reads the partitions of one topic, starting where startpoints and checkpoints say.

    with ReplayClient(directory).subscribe("orders", consumer="billing") as consumer:
        while ...:
            for records in consumer.poll():      at most so many records, from every partition that may be read
                handle(records)
            consumer.commit()                    the polled records are done

Each poll checks whether the store has changed (one stat) and applies a newer startpoint at once, without a restart; a
running consumer goes on while the store can't be reached. Records that were polled and not committed are delivered
again after a crash: at least once.
"""

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

from filtering.closing import ClosedAtExit
from pushrep.env import Clock
from pushrep.errors import PushrepError
from pushrep.records import Record
from pushrep.replay.plan import FOLLOW, AtTime, RecordingInfo, ReplayRefused, ReplayRequest
from pushrep.replay.replay import Replay, ReplayTruncated
from pushrep.startpoints import (
    BootstrapGate,
    Claim,
    LogFacts,
    Origin,
    PartitionLost,
    Start,
    StartpointFailed,
    StartpointRefused,
    StartpointStore,
    StoreUnavailable,
)
from pushrep.startpoints.store import StorePoll
from pushrep.wire.error_codes import ErrorCode

ListRecordings: TypeAlias = Callable[[], list[RecordingInfo]]
StartReplay: TypeAlias = Callable[[ReplayRequest], Replay]
"""Of a ReplayClient: `recordings` and `replay`."""
EndIsPublished: TypeAlias = Callable[[str], bool]
"""Of the named recording: False if no writer opened it since its machine started, so that only checkpoints tell its
end, which lag."""
POLL_RECORDS = 1000


class ReplayedLog:
    """One recording, read from any offset by a following replay."""

    def __init__(
        self, recordings: ListRecordings, start: StartReplay, end_is_published: EndIsPublished, info: RecordingInfo
    ) -> None:
        self._recordings, self._start, self._name = recordings, start, info.name
        self._end_is_published = end_is_published
        self.log_id = str(info.log_id or "")
        self._replay: Replay | None = None
        self._position = -1
        self._ahead: deque[Record] = deque()
        self._cut: ReplayTruncated | None = None

    def _bounds(self) -> tuple[int, int]:
        """Readable offsets [start, end), now."""
        for info in self._recordings():
            if info.name == self._name:
                return info.start_offset, max(info.start_offset, info.stable_offset)
        raise ReplayRefused(ErrorCode.UNKNOWN_RECORDING, f"there is no recording {self._name} any more")

    def facts(self) -> LogFacts:
        """The log as its readers see it now. Raises ReplayRefused (UNKNOWN_RECORDING)."""
        start, end = self._bounds()
        return LogFacts(start=start, end=end, first_at=self._first_at, log_id=self.log_id)

    def _first_at(self, ms: int) -> int | None:
        _, end = self._bounds()
        # A time later than all records has the end as its position, where only FOLLOW may begin.
        with self._start(ReplayRequest(self._name, AtTime(ms), length=FOLLOW)) as replay:
            return replay.position if replay.position < end else None

    def fetch(self, position: int, count: int) -> tuple[list[Record], int]:
        """At most `count` present records from `position` on, and the next position. Never waits. There are none above
        an end that only checkpoints tell, until a writer has opened the log.

        A replay that has ended is begun again. Raises ReplayTruncated as long as the position is above the cut,
        ReplayFailed, ReplayRefused.
        """
        replay = self._replay
        if replay is None or position != self._position or (replay.end_reason is not None and not self._ahead):
            if self._cut is not None and position == self._position:
                raise self._cut
            self.close()
            try:
                replay = self._replay = self._start(ReplayRequest(self._name, position, length=FOLLOW))
            except ReplayRefused as error:
                is_above = error.code is ErrorCode.INVALID_POSITION and error.end is not None and position > error.end
                if not is_above or self._end_is_published(self._name):
                    raise
                return [], position
            self._position, self._cut = position, None
        if len(self._ahead) < count:
            try:
                self._ahead.extend(replay.poll())
            except ReplayTruncated as error:
                self._cut = error
                raise
        records = [self._ahead.popleft() for _ in range(min(count, len(self._ahead)))]
        if self._ahead:
            self._position = records[-1].offset + 1 if records else position
        else:
            self._position = max(position, replay.position)
        return records, self._position

    def close(self) -> None:
        if self._replay is not None:
            replay, self._replay = self._replay, None
            self._ahead.clear()
            replay.close()


class PartitionRecords(NamedTuple):
    """Records of one partition, in order. startpoint_epoch: the startpoint that this run started from, 0: none."""

    partition: int
    startpoint_epoch: int
    records: list[Record]


@dataclass(slots=True)
class _AssignedPartition:
    """One partition: its next position, and its committed one."""

    claim: Claim
    log: ReplayedLog
    start: Start | None = None  # None: stopped by a failed startpoint
    position: int = 0
    committed: int = -1
    is_consumed: bool = True  # False: started from a startpoint without a commit since


class LogConsumer(ClosedAtExit):
    """Reads the partitions of one topic from their start offsets on. For one thread."""

    def __init__(  # noqa: PLR0913 - what a consumer is
        self,
        logs: Mapping[int, ReplayedLog],
        topic: str,
        consumer: str,
        *,
        store: StartpointStore,
        reset: bool,
        clock: Clock,
    ) -> None:
        """Use `ReplayClient.subscribe`."""
        self._store, self._reset = store, reset
        self._assigned = {n: _AssignedPartition(store.claim(consumer, topic, n), log) for n, log in logs.items()}
        self._gate, self._poll = BootstrapGate(), StorePoll(store, clock)
        self._seen_bytes = -1  # unknown: the partitions have to start first
        self._stopped: dict[int, StartpointFailed] = {}
        self._failed: PushrepError | None = None
        self._closed = False

    @property
    def stopped(self) -> dict[int, StartpointFailed]:
        """The stopped partitions, each with its failed startpoint; a newer startpoint starts them again."""
        return dict(self._stopped)

    def positions(self) -> dict[int, int]:
        """By partition that is read, the next offset of `poll`."""
        return {partition: one.position for partition, one in self._assigned.items() if one.start is not None}

    def poll(self, max_records: int = POLL_RECORDS) -> list[PartitionRecords]:
        """At most `max_records` present records, shared by the partitions; perhaps none. Never waits.

        Raises StartpointFailed when a partition is stopped, once; the others go on with the next poll. Raises
        PartitionLost when a startpoint is to be applied and another instance took the partition, ReplayRefused when
        retention took what was to be read next, ReplayTruncated when a cut did. An error of one partition keeps no
        other unread: what was read of them is returned, and the error is raised by the next poll.
        """
        self._check()
        if self._failed is not None:
            error, self._failed = self._failed, None
            raise error
        self._follow_store()
        readable = [p for p, one in self._assigned.items() if one.start is not None and self._gate.may_read(p)]
        found: list[PartitionRecords] = []
        failed = None
        left = max_records
        for n, partition in enumerate(readable):
            share = -(-left // (len(readable) - n))  # rounded up, so at least one record, and at most all that is left
            try:
                got = self._fetch(partition, share)
            except PushrepError as error:
                failed = failed or error
                continue
            left -= len(got.records)
            if got.records:
                found.append(got)
        if failed is not None and not found:
            raise failed
        self._failed = failed
        return found

    def commit(self) -> None:
        """Commit everything polled. Raises PartitionLost, after the other partitions were committed."""
        self._check()
        lost: PartitionLost | None = None
        for partition, one in list(self._assigned.items()):
            if one.start is None or one.position == one.committed:
                continue
            sequence = one.start.sequence
            try:
                if self._store.commit(one.claim, one.position, sequence=sequence, log_id=one.log.log_id):
                    one.committed = one.position
                    if not one.is_consumed:
                        self._store.consume(one.claim, sequence)
                        one.is_consumed = True
            except PartitionLost as error:
                self._drop(partition)
                lost = error
        if lost is not None:
            raise lost

    def close(self) -> None:
        """Close the logs without a commit; closing twice is fine. A store that was passed in stays open."""
        self._closed = True
        for partition in list(self._assigned):
            self._drop(partition)

    # ---- inside

    def _check(self) -> None:
        if self._closed:
            raise StartpointRefused("the consumer is closed: subscribe again")

    def _follow_store(self) -> None:
        if self._seen_bytes < 0:
            size_bytes = self._store.size_bytes()
            for partition, one in list(self._assigned.items()):
                self._take_up(partition, one)
            self._seen_bytes = size_bytes  # the size before reading, so that the next poll finds a change meanwhile
            return
        with suppress(StoreUnavailable):
            size_bytes = self._poll.poll_size()
            if size_bytes == self._seen_bytes and self._poll.away is None:
                return
            for partition, one in list(self._assigned.items()):
                self._poll.ask(partial(self._take_up, partition, one))
            self._seen_bytes = size_bytes

    def _take_up(self, partition: int, one: _AssignedPartition) -> None:
        """Apply the newer startpoint of one partition, if there is one."""
        reader = one.claim.reader
        pending = self._store.read(reader.consumer, reader.topic, reader.partition)
        if one.start is not None and (pending is None or pending.sequence <= one.start.sequence):
            return
        if pending is not None and (known := self._stopped.get(partition)) and known.sequence == pending.sequence:
            return
        self._start(partition, one)

    def _start(self, partition: int, one: _AssignedPartition) -> None:
        position = one.position if one.start is not None else None
        try:
            start = self._store.start(one.claim, one.log.facts(), reset=self._reset, position=position)
        except StartpointFailed as error:
            self._gate.leave(partition)
            self._stopped[partition], one.start = error, None
            raise
        except PartitionLost:
            self._drop(partition)
            raise
        self._stopped.pop(partition, None)
        one.start, one.position = start, start.offset
        one.committed, one.is_consumed = start.offset, start.origin is not Origin.STARTPOINT
        self._gate.start(partition, start.offset, start.until)

    def _fetch(self, partition: int, count: int) -> PartitionRecords:
        one = self._assigned[partition]
        assert one.start is not None, "only started ones are readable"
        records: list[Record] = []
        if count > 0:
            records, one.position = one.log.fetch(one.position, count)
            self._gate.advance(partition, one.position)
        return PartitionRecords(partition, one.start.sequence, records)

    def _drop(self, partition: int) -> None:
        self._gate.leave(partition)
        self._stopped.pop(partition, None)
        self._assigned.pop(partition).log.close()


def replayed_logs(
    recordings: ListRecordings,
    start: StartReplay,
    end_is_published: EndIsPublished,
    topic: str,
    partitions: frozenset[int] | None,
) -> dict[int, ReplayedLog]:
    """The topic's recordings, all or those of `partitions`. Raises ReplayRefused if one is not there."""
    found = {info.partition: info for info in recordings() if info.topic == topic}
    wanted = partitions if partitions is not None else frozenset(found)
    missing = sorted(wanted - found.keys()) if wanted else [0]
    if missing:
        raise ReplayRefused(ErrorCode.UNKNOWN_RECORDING, f"there is no recording {topic}-{missing[0]}")
    return {
        partition: ReplayedLog(recordings, start, end_is_published, found[partition]) for partition in sorted(wanted)
    }

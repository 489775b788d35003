"""LogConsumer: reads the partitions of one topic, starting where startpoints and checkpoints say.

    with LogConsumer.open(directory, "orders", "billing") as consumer:
        while ...:
            for records in consumer.poll():      at most so many records, from every partition that may be read
                handle(records)
            consumer.commit()                    the polled records are done

Each poll checks whether the store has changed (one stat) and applies a newer startpoint at once, without a restart; a
running consumer goes on while the store can't be reached. Records that were polled and not committed are delivered
again after a crash: at least once.
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Protocol, Self

from filtering.closing import ClosedAtExit
from pushrep.env import SYSTEM_CLOCK, Clock
from pushrep.log import LogReader, NotALog, OffsetOutOfRange, SegmentLog
from pushrep.log.directory_files import log_at, readable_logs
from pushrep.log.published import read_published
from pushrep.records import Record
from pushrep.startpoints.errors import PartitionLost, StartpointFailed, StoreClosed
from pushrep.startpoints.model import Claim, Startpoint
from pushrep.startpoints.resolve import BootstrapGate, LogFacts, Origin, Start
from pushrep.startpoints.store import NotNow, StartpointStore, StorePoll


class PartitionLog(Protocol):
    """One partition, readable from any offset. Methods raise the log's errors."""

    @property
    def log_id(self) -> str:
        """The log's own id, "" if it has none."""
        ...

    def bounds(self) -> tuple[int, int]:
        """Readable offsets [start, end), now."""
        ...

    def first_at(self, ms: int, /) -> int | None:
        """Offset of the first record at or after `ms` since 1970; None if there is none."""
        ...

    def fetch(self, position: int, count: int) -> tuple[list[Record], int]:
        """At most `count` present records from `position` on, and the next position. Never waits."""
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
        # Fewer than asked for: everything was read, also a hole that compaction left at the end.
        return records, records[-1].offset + 1 if len(records) == count else max(position, end)

    def close(self) -> None:
        self._reader.close()

    def _readable_end(self, position: int) -> int:
        start, end = self._reader.bounds()
        # Without a writer since the machine started, the end is known only by checkpoints, which lag: then wait.
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


STORE_NAME = "startpoints"
"""Where a directory of logs keeps its startpoints, if nobody says otherwise."""
POLL_RECORDS = 1000


class PartitionRecords(NamedTuple):
    """Records of one partition, in order. startpoint_epoch: the startpoint that this run started from, 0: none."""

    partition: int
    startpoint_epoch: int
    records: list[Record]


@dataclass(slots=True)
class _AssignedPartition:
    """One partition: its next position, and its committed one."""

    claim: Claim
    log: PartitionLog
    start: Start | None = None  # None: stopped by a failed startpoint
    position: int = 0
    committed: int = -1
    is_consumed: bool = True  # False: started from a startpoint without a commit since


class LogConsumer(ClosedAtExit):
    """Reads the partitions of one topic from their start offsets on. For one thread. Made by `open`."""

    def __init__(
        self,
        store: StartpointStore,
        assigned: dict[int, _AssignedPartition],
        default: Startpoint,
        *,
        reset: bool,
        clock: Clock,
    ) -> None:
        """Use `LogConsumer.open`."""
        self._store, self._assigned, self._default, self._reset = store, assigned, default, reset
        self._gate, self._poll = BootstrapGate(), StorePoll(store, clock)
        self._seen_bytes = -1  # unknown: the partitions have to start first
        self._stopped: dict[int, StartpointFailed] = {}
        self._closed = False

    @classmethod
    def open(  # noqa: PLR0913 - what a consumer is
        cls,
        directory: Path | str,
        topic: str,
        consumer: str,
        *,
        partitions: Iterable[int] | None = None,
        store: StartpointStore | None = None,
        default: Startpoint | None = None,
        reset: bool = False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> Self:
        """Claim these partitions (None: all) of `directory` for `consumer`; another holder loses them.

        With worker slots, all slots' partitions (log/directory_files.py).

        `store` is `<directory>/startpoints` if none is given. `default` (earliest) is for partitions that have neither
        a startpoint nor a checkpoint, with `reset` for all without a startpoint. Raises NotALog.
        """
        directory = Path(directory)
        chosen = sorted(set(partitions)) if partitions is not None else _partitions_of(directory, topic)
        store = store if store is not None else StartpointStore.open(directory / STORE_NAME)
        with ExitStack() as opened:
            logs = {}
            for partition in chosen:
                logs[partition] = LocalLog(log_at(directory, topic, partition))
                opened.callback(logs[partition].close)
            made = cls.over(logs, topic, consumer, store=store, default=default, reset=reset, clock=clock)
            opened.pop_all()
        return made

    @classmethod
    def over(  # noqa: PLR0913 - what a consumer is
        cls,
        logs: Mapping[int, PartitionLog],
        topic: str,
        consumer: str,
        *,
        store: StartpointStore,
        default: Startpoint | None = None,
        reset: bool = False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> Self:
        """As `open`, over logs wherever they lie; they are closed with the consumer."""
        assigned = {
            partition: _AssignedPartition(store.claim(consumer, topic, partition), log)
            for partition, log in logs.items()
        }
        return cls(store, assigned, default if default is not None else Startpoint.earliest(), reset=reset, clock=clock)

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
        PartitionLost when a startpoint is to be applied and another instance took the partition, OffsetOutOfRange when
        retention or a cut took what was to be read next.
        """
        self._check()
        self._follow_store()
        readable = [p for p, one in self._assigned.items() if one.start is not None and self._gate.may_read(p)]
        found = []
        left = max_records
        for n, partition in enumerate(readable):
            share = -(-left // (len(readable) - n))  # rounded up, so at least one record, and at most all that is left
            got = self._fetch(partition, share)
            left -= len(got.records)
            if got.records:
                found.append(got)
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
            raise StoreClosed(self._store.place)

    def _follow_store(self) -> None:
        if self._seen_bytes < 0:
            size_bytes = self._store.size_bytes()
            for partition, one in list(self._assigned.items()):
                self._take_up(partition, one)
            self._seen_bytes = size_bytes  # the size before reading, so that the next poll finds a change meanwhile
            return
        with suppress(NotNow):
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
            start = self._store.start(
                one.claim, facts_of(one.log), default=self._default, reset=self._reset, position=position
            )
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


def _partitions_of(directory: Path, topic: str) -> list[int]:
    found = [partition for name, partition in readable_logs(directory) if name == topic]
    if not found:
        raise NotALog(directory / f"{topic}-0", f"there is no log of topic {topic}")
    return found

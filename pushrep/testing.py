"""For the tests of a service: an Outbox that keeps its records in memory. No thread, no disk; it works on any system.

It is an Outbox, with the outbox's own checks, batches and receipts; only what stands behind them is a list:

    append ─▶ Outbox.append, its rules ─▶ _Partition: seals each append as a batch, and keeps the batch's records

tests/unit/test_fake_outbox.py holds both to the same tests. The fixture `pushrep_outbox` is in pytest_plugin.py.
"""

import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Self, cast

from filtering import StreamMetadata
from pushrep.env import SYSTEM_CLOCK, Clock
from pushrep.errors import BadArgument, checked_path, checked_timeout
from pushrep.kafka.destination import KafkaDestination
from pushrep.log import Durability, LogClosed, LogConfig, OffsetOutOfRange, SegmentLog
from pushrep.log.disk import DiskLevel, DiskStatus, Durations
from pushrep.log.recovery import Opening
from pushrep.log.scrub import ScrubStatus
from pushrep.outbox import Acks, BufferFull, LogStopped, NotEnoughReplicas, OutboxClosed, OutboxConfig
from pushrep.outbox.batch import Budget, ManyReceipt, PendingBatch, Receipt
from pushrep.outbox.columns import Columns, RecordRules
from pushrep.outbox.identity import OutboxIdentity, new_identity
from pushrep.outbox.outbox import Outbox
from pushrep.outbox.partition_appender import AppendCounts, PartitionAppender, Refusing, StoppedLog
from pushrep.outbox.positions import Pair, SourceOrder
from pushrep.outbox.settings import DEFAULT_CONFIG, OutboxSettings
from pushrep.outbox.status import Facts, OutboxStatus
from pushrep.records import Codec, Record, RecordBatch
from pushrep.settings import whole_number
from pushrep.values import MakesBytes, PartitionBy, RecordValues

_ORDERED = "the test ordered it"
Failure = Literal["full", "stopped", "not enough replicas"]


class FakeOutbox(Outbox):
    """An Outbox without a directory, for tests. Every receipt is done when `append` returns.

    Arguments, checks and errors are those of `Outbox.open`; `replicas`, `kafka` and `durability` change nothing: what
    was appended counts as replicated and shipped. `log` gives a reader its ends, `records` and `batches`. `status` is
    that of an outbox with which nothing is wrong, but for what `fail` ordered.
    """

    def __init__(  # noqa: PLR0913 - the arguments of Outbox.open
        self,
        directory: Path | str = "fake-outbox",
        topic: str = "orders",
        partitions: int = 4,
        producer: str = "tests",
        *,
        replicas: Sequence[str] = (),
        kafka: KafkaDestination | None = None,
        acks: Acks | None = None,
        durability: Durability = Durability.FLUSHED,
        carrier: str = "key",
        serializer: MakesBytes | None = None,
        key_serializer: MakesBytes | None = None,
        partition_by: PartitionBy = None,
        health: object = None,
        config: OutboxConfig = DEFAULT_CONFIG,
        filesystem: object = None,  # noqa: ARG002 - nothing is stored
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.directory = checked_path("directory", directory)
        self._settings = OutboxSettings(
            replicas=replicas, kafka=kafka, acks=acks, durability=durability, serializer=serializer,
            key_serializer=key_serializer, partition_by=partition_by, health=health, config=config,
        )  # fmt: skip
        self._settings.refuse_keys(carrier)
        self.identity = new_identity(
            producer=producer, topic=topic, partitions=partitions, carrier=carrier, replicas=replicas,
            min_insync_replicas=config.min_insync_replicas,
        )  # fmt: skip
        self.pid, self.owner_pid, self._ships = self.identity.pid, os.getpid(), kafka is not None
        self._clock, self._budget = clock, Budget(config.buffer_bytes, clock)
        self._refused, self._refused_lock = Counter[str](), threading.Lock()
        self._rules = RecordRules.of(carrier, config, clock)
        kafka_topic = topic if kafka is None else kafka.topic or topic
        self.values = RecordValues(
            serializer, key_serializer, partition_by, partitions=partitions, topic=kafka_topic,
        )  # fmt: skip
        self.values.warm()
        self._overhead = self._rules.overhead_bytes  # its partitions have no free bytes: no record is plain
        self._failing = _Failing(self.identity, config)
        logs_in_memory = [_Log(self.directory, topic, n, config.log_config) for n in range(partitions)]
        self._parts = [_Partition(one, self.identity, self._budget, self._failing, clock) for one in logs_in_memory]
        self._all_appenders = cast("list[PartitionAppender]", self._parts)
        self._appenders = dict(enumerate(self._all_appenders))
        logs = {one.partition: cast("SegmentLog", one.log) for one in self._parts}
        nothing: Any = SimpleNamespace(sink=None, values={})  # ships, and no setting is changed
        self.facts = Facts(
            self.directory, self.identity, self._settings, logs, None, self._budget, nothing, self._all_appenders,
            self._refused, dict, nothing, [], nothing,
        )  # fmt: skip

    @classmethod
    def open(cls, *given: Any, **named: Any) -> Self:
        """As `Outbox.open`, for code that is given the class."""
        return cls(*given, **named)

    @classmethod
    def open_slot(
        cls, directory: Path | str, topic: str, partitions: int, producer: str, slots: int = 8, **named: Any
    ) -> Self:
        """As `Outbox.open_slot`: the first slot."""
        del slots
        return cls(directory, topic, partitions, producer, **named)

    @classmethod
    def stand_by(  # noqa: PLR0913 - as Outbox.stand_by
        cls,
        directory: Path | str,
        topic: str,
        partitions: int | None,
        producer: str,
        *,
        on_state: object = None,
        cancel: object = None,
        carrier: str | None = None,
        **named: Any,
    ) -> Self:
        """As `Outbox.stand_by`: it leads at once."""
        del on_state, cancel
        of_keys = named.get("key_serializer") is not None or named.get("partition_by") == "key"
        word = carrier or ("header" if of_keys else "key")  # whatever `pushrep outbox create` was given
        return cls(directory, topic, partitions or 4, producer, carrier=word, **named)

    def records(self, partition: int) -> list[Record]:
        """What was appended to the partition, as readers of the real log get it; also once it is closed."""
        return list(self._part(partition).log.all)

    def fail(self, failure: Failure, *, partition: int | None = None, times: int | None = None) -> None:
        """From now on appends raise: "full" BufferFull, "stopped" LogStopped, "not enough replicas" NotEnoughReplicas.

        partition: only those to this one. times: only so many; None: until `recover`.
        """
        if failure not in {"full", "stopped", "not enough replicas"}:
            raise BadArgument("failure", f'{failure!r} is none of "full", "stopped", "not enough replicas"')
        if partition is not None:
            self._part(partition)
        if times is not None:
            whole_number("times", times, 1)
        self._failing.order(failure, partition, times)

    def _part(self, partition: int) -> "_Partition":
        if partition not in range(len(self._parts)):
            self._no_partition(partition)
        return self._parts[partition]

    def recover(self) -> None:
        """End what `fail` ordered."""
        self._failing.order(None, None, None)

    def status(self) -> OutboxStatus:
        """As `Outbox.status`: alone, on no disk."""
        self._parts[0].log.records(0)  # raises once it is closed
        return super().status()

    def lag(self) -> dict[str, Any]:
        """Nothing lags."""
        return {}

    def wait_shipped(self, timeout: float | None = None) -> None:
        """As of an outbox whose topic takes everything at once."""
        checked_timeout(timeout)
        if not self._ships:
            raise BadArgument("kafka", "the outbox was opened without a destination: Outbox.open(..., kafka=...)")
        self.flush(timeout)

    def flush(self, timeout: float | None = None) -> None:
        """Everything is where it goes already."""
        checked_timeout(timeout)
        self._appenders.values()  # raises once it is closed

    def close(self) -> None:
        """From now on appends raise OutboxClosed; `records` stays."""
        self._appenders = cast("Any", Refusing(lambda: OutboxClosed(self.directory)))
        for one in self._parts:
            one.log.is_closed = True


class _Failing:
    """What `fail` ordered."""

    def __init__(self, identity: OutboxIdentity, config: OutboxConfig) -> None:
        self._identity, self.config, self._lock = identity, config, threading.Lock()
        self._failure: Failure | None = None
        self._partition: int | None = None
        self._left: int | None = None

    def order(self, failure: Failure | None, partition: int | None, times: int | None) -> None:
        with self._lock:
            self._failure, self._partition, self._left = failure, partition, times

    def ordered(self, partition: int) -> Failure | None:
        """What an append to the partition would fail with."""
        return None if self._left == 0 or self._partition not in {None, partition} else self._failure

    def check(self, partition: int, size: int) -> None:
        """Raise the failure if one is ordered for an append to the partition."""
        with self._lock:
            failure = self.ordered(partition)
            if failure is None:
                return
            if self._left is not None:
                self._left -= 1
        topic, config = self._identity.topic, self.config
        if failure == "full":
            raise BufferFull(buffer_bytes=config.buffer_bytes, wanted_bytes=size, block_ms=config.block_ms)
        if failure == "stopped":
            raise LogStopped(topic, partition, _ORDERED)
        needed = max(2, self._identity.min_insync_replicas)
        raise NotEnoughReplicas(f"{topic}-{partition}", in_sync=1, needed=needed)


class _Log:
    """What readers and the status ask of a log. Everything in it is on disk, and nothing was ever wrong with it."""

    log_start_offset = cuts = quarantines = 0
    damaged_from = retention_held = None
    leader_epochs = SimpleNamespace(latest_epoch=-1)
    recovery = SimpleNamespace(opening=Opening.NORMAL, seconds=0.0, cut=None)
    scrub = SimpleNamespace(status=ScrubStatus())
    disk = SimpleNamespace(status=lambda _limits: DiskStatus("", 0, 1, DiskLevel.ROOM, 0), syncs=Durations())

    def __init__(self, directory: Path, topic: str, partition: int, config: LogConfig) -> None:
        self.topic, self.partition, self.path = topic, partition, directory.absolute() / f"{topic}-{partition}"
        self.config, self.is_closed = config, False
        self.all: list[Record] = []
        self._batches: list[RecordBatch] = []

    @property
    def log_end_offset(self) -> int:
        return len(self.all)

    flushed_offset = high_watermark = stable_offset = log_end_offset

    def records(self, start: int, end: int | None = None) -> Iterator[Record]:
        return iter(self.all[self._checked(start, 0) : self._checked(end, start)])

    def batches(self, start: int, end: int | None = None) -> Iterator[RecordBatch]:
        first, last = self._checked(start, 0), self._checked(end, start)
        return (one for one in self._batches if one.header.base_offset < last and first < one.header.next_offset)

    def moved_ms(self) -> None:
        """Nobody moves it."""

    def add(self, batch: RecordBatch) -> None:
        self._batches.append(batch)
        self.all += batch.records()

    def _checked(self, offset: int | None, least: int) -> int:
        """Of the end, if none is given."""
        if self.is_closed:
            raise LogClosed(self.path)
        if offset is None:
            return len(self.all)
        if not least <= offset <= len(self.all):
            raise OffsetOutOfRange(offset, 0, len(self.all))
        return offset


class _Partition:
    """What an Outbox, a batch and the status need of a PartitionAppender."""

    free_bytes = 0
    open = None

    def __init__(self, log: _Log, identity: OutboxIdentity, budget: Budget, failing: _Failing, clock: Clock) -> None:
        self.log, self.topic, self.partition, self.name = log, log.topic, log.partition, log.path.name
        self.owner_pid, self.lock, self.counts = os.getpid(), threading.Lock(), AppendCounts()
        self.opened_ms = clock.wall_ms()
        self._positions: dict[Pair, int] = {}
        self._order = SourceOrder(own_pid=identity.pid, partition=log.partition, partitions=identity.partitions)
        self._identity, self._budget, self._failing, self._clock = identity, budget, failing, clock

    @property
    def is_refusing(self) -> bool:
        return self._failing.ordered(self.partition) is not None

    @property
    def stopped(self) -> StoppedLog | None:
        if self._failing.ordered(self.partition) != "stopped":
            return None
        now_ms = self._clock.wall_ms()
        return StoppedLog(self.partition, now_ms, now_ms, _ORDERED)

    def waits_since_s(self) -> None:
        """Nothing waits."""

    def add_one(self, record: Columns) -> Receipt:
        return Receipt(self._written(record), 0)

    def add_many(self, columns: Columns) -> ManyReceipt:
        receipt = ManyReceipt([(self._written(columns), 0, len(columns.values))])
        self._budget.give(columns.size_bytes)
        return receipt

    def _written(self, columns: Columns) -> PendingBatch:
        self._failing.check(self.partition, columns.size_bytes)
        if isinstance(columns.metadata, StreamMetadata):
            self._order.accept(columns.metadata, len(columns.values))
        elif columns.metadata is not None:
            self._order.accept_all(columns.metadata)
        batch, base = PendingBatch(self, self._clock.wall_ms(), 0.0), self.log.log_end_offset
        batch.extend(columns, 0, len(columns.values))
        pid, carrier = self._identity.pid, self._identity.carrier
        sealed = batch.seal(base, pid=pid, partition=self.partition, carrier=carrier, codec=Codec.NONE)
        for pair, offset in batch.last_positions(base, pid, self.partition):
            self._positions[pair] = max(offset, self._positions.get(pair, -1))
        self.log.add(sealed)
        self.counts.records += len(columns.values)
        self.counts.size_bytes += len(sealed.data)
        self.counts.batches += 1
        batch.base_offset = base
        batch.drop_records()
        return batch

    def last_position(self, pid: int, partition: int) -> int | None:
        return self._positions.get((pid, partition))

    def pending(self) -> list[PendingBatch]:
        return []

    def latch_for(self, batch: PendingBatch) -> None:
        assert batch.decided, "it is decided before anybody has its receipt"

    def request_flush(self, batch: PendingBatch | None = None) -> None:
        """Nothing waits."""

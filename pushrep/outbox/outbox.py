"""Outbox: what a producer service embeds. It appends records to local logs, in order, and keeps them there.

    append ─▶ PartitionAppender (one per partition) ─▶ WriterThreads ─▶ SegmentLog ─▶ Receipt
                │ batch begun                ▲
                └──▶ LingerTimer, after linger_ms ┘          <directory>/outbox.json   who this outbox is
                                                        <directory>/<topic>-<n>   one log per partition

Every record carries 20 bytes of metadata as its key or a header, so that a reader can recognise a replay: the caller's
`metadata`, or this outbox's PID, the partition and the record's own log offset.
"""

import atexit
import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, cast

from filtering import StreamMetadata, tracing
from filtering.closing import FirstErrorRaised
from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK, Clock, Filesystem, refuse_in_forks
from pushrep.errors import BadArgument, ForkedProcess, PushrepError, checked_path, checked_timeout
from pushrep.kafka.destination import KafkaDestination
from pushrep.log import Durability, LogClosed, LogLocked, SegmentLog
from pushrep.log.directory_files import SLOTS_MAX, is_slot, slot_path
from pushrep.log.disk import SYNCS_AT_ONCE, disk_threads, release_disk_threads
from pushrep.outbox.batch import Budget, Receipt
from pushrep.outbox.columns import Columns, RecordRules, listed
from pushrep.outbox.errors import (
    BufferFull,
    CloseTimedOut,
    NoFreeSlot,
    OutboxClosed,
    RecordRefused,
)
from pushrep.outbox.identity import (
    FILE_NAME,
    OutboxIdentity,
    leap_epoch,
    new_identity,
    refuse_other_kinds,
)
from pushrep.outbox.member_changes import serve_control
from pushrep.outbox.opening import Opened, open_all
from pushrep.outbox.partition_appender import (
    BUFFERED_AT_ONCE,
    LINGER_TIMERS,
    LingerTimer,
    PartitionAppender,
    Refusing,
    Shared,
    decided_by,
    flush_appenders,
    pending_in,
    raise_unseen_failure,
)
from pushrep.outbox.partition_replicas import ReplicaLag
from pushrep.outbox.settings import (
    DEFAULT_CONFIG,
    Acks,
    OnDiverged,
    OutboxConfig,
    OutboxSettings,
)
from pushrep.outbox.slots import SlotShipper, take_back
from pushrep.outbox.status import Facts, OutboxStatus, WorkersStatus, status_of, workers_status
from pushrep.records.encoder import HeaderColumn
from pushrep.settings import whole_number
from pushrep.values import MakesBytes, PartitionBy, RecordValues

if TYPE_CHECKING:
    from pushrep.election.grants import Grant
    from pushrep.health import HealthSettings
    from pushrep.kafka.sink_state import DestinationLag
    from pushrep.outbox.standby import OnState

_LOG = logging.getLogger("pushrep.outbox")

_HINT = "close it, or use it as a context manager"
_NEVER_FREE = 1 << 62
_NOWHERE: Any = SimpleNamespace(lock=nullcontext(), free_bytes=0)  # of no partition: the general path finds one
MISSING: Any = object()
"""A value that was not given: None is a tombstone."""
_GRACE_S = 1.0  # enough for a writer to end its round, unless its disk hangs


class Outbox(FirstErrorRaised):
    """A durable, ordered outbox over a directory of logs; made by `Outbox.open`. Thread-safe; not usable in a fork."""

    def __init__(  # noqa: PLR0913 - what it stands on
        self,
        directory: Path,
        opened: Opened,
        settings: OutboxSettings,
        linger_timer: LingerTimer,
        *,
        filesystem: Filesystem,
        clock: Clock,
    ) -> None:
        identity, logs, replication = opened.identity, opened.logs, opened.replication
        self.directory, self.identity = directory, identity
        self.pid = identity.pid
        """The PID of records appended without metadata."""
        self._settings, self._clock, self._resources = settings, clock, ExitStack()
        self._budget = Budget(settings.config.buffer_bytes, clock)
        at_once = SYNCS_AT_ONCE if settings.durability is Durability.FLUSHED else BUFFERED_AT_ONCE
        self._threads = disk_threads(filesystem, directory, at_once)
        shared = Shared(identity, self.pid, settings, self._budget, clock, self._threads.submit, linger_timer.opened)
        replicas = {} if replication is None else replication.appenders
        self._all_appenders = [
            PartitionAppender(log, shared, store, replicas.get(log.partition)) for log, store in logs
        ]
        self._appenders: Mapping[int, PartitionAppender] = {one.partition: one for one in self._all_appenders}
        if opened.parking is not None and opened.shipping.parking is not None:
            log, store = opened.parking
            self._all_appenders.append(PartitionAppender(log, shared, store, replicas.get(log.partition)))
            opened.shipping.parking.append_entry = partial(self._append_parked, self._all_appenders[-1])
        self._rules = RecordRules.of(identity.carrier, settings.config, clock)
        destination = identity.topic if settings.kafka is None else settings.kafka.topic or identity.topic
        self.values = RecordValues(
            settings.serializer, settings.key_serializer, settings.partition_by,
            partitions=identity.partitions, topic=destination,
        )  # fmt: skip
        # With a serializer, or tracing, no record is one that the hot path takes: nothing of its size is ever free.
        is_plain = tracing.active is None and not self.values.serializes
        self._overhead = self._rules.overhead_bytes if is_plain else _NEVER_FREE
        self.owner_pid = os.getpid()
        logs_at = {log.partition: log for log, _ in logs}
        self._refused, self._refused_lock = Counter[str](), threading.Lock()
        self.facts = Facts(
            directory, identity, settings, logs_at, replication, self._budget, opened.shipping,
            self._all_appenders, self._refused, opened.certificates, opened.kept_settings, [], opened.relay_notes,
        )  # fmt: skip
        self._closing = threading.Lock()
        self._closed = True  # until everything runs
        if replication is not None:
            replication.on_identity = self._show_identity
            replication.watch(self._all_appenders)
        if (sink := opened.shipping.sink) is not None:
            sink.state.on_head_cut = partial(self._begin_pid_epoch, filesystem)
            if settings.config.on_diverged is OnDiverged.REFUSE:
                sink.on_diverged = self._refuse_appends
        refuse_in_forks(self)
        _close_if_forgotten(self)
        self._closed = False

    @classmethod
    def open(  # noqa: PLR0913 - the settings of an outbox, all by name
        cls,
        directory: Path | str,
        topic: str,
        partitions: int,
        producer: str,
        *,
        replicas: Sequence[str] = (),
        kafka: KafkaDestination | None = None,
        acks: Acks | None = None,
        durability: Durability = Durability.FLUSHED,
        carrier: str = "key",
        serializer: MakesBytes | None = None,
        key_serializer: MakesBytes | None = None,
        partition_by: PartitionBy = None,
        health: "HealthSettings | None" = None,
        config: OutboxConfig = DEFAULT_CONFIG,
        filesystem: Filesystem = REAL_FILESYSTEM,
        clock: Clock = SYSTEM_CLOCK,
    ) -> "Outbox":
        """Open the outbox in `directory`, or make it there. Close it, or use it as a context manager.

        directory: the outbox's directory, which holds nothing else.
        topic: the name of the logs, and of the Kafka topic unless `kafka` names another. Fixed when the outbox is made.
        partitions: the number of logs; records are in order within each. Fixed when the outbox is made.
        producer: the application's name, a part of the PID. Fixed when the outbox is made.
        replicas: "host:port" of each node (`pushrep replica serve`) that holds a copy. Fixed when they are first given;
            `pushrep replica add | remove | replace` changes them.
        kafka: the Kafka topic that all records are shipped to. If no broker answers within `open_timeout_s`, the outbox
            opens, and ships later.
        acks: which members must have a record before its receipt is done. ALL (the default with replicas): every
            in-sync member, and at least `min_insync_replicas` members, this one counted. LOCAL: this one alone.
        durability: where a record is once its receipt is done. FLUSHED: on disk; one fdatasync serves all waiting
            records. BUFFERED: in the page cache, which survives the end of this process, but no power cut.
        carrier: where the 20 bytes of metadata are stored: "key", or "header" (`stream-metadata`), which leaves the key
            to the application. Fixed when the outbox is made.
        serializer: makes the bytes of each value: any function, as `pushrep.values.to_json`, or confluent-kafka's,
            which gets a context with the Kafka topic, and whose schema is asked for here. None: values are bytes.
        key_serializer: the same for keys; wants carrier "header".
        partition_by: where a record goes that is appended without a partition. "key": where Kafka's own partitioner
            puts its key (murmur2), without a key in turn; wants carrier "header". Or a function of the value.
        health: the address of /livez, /readyz and /metrics, served while the outbox is open (docs/operating.md).
        config: limits, times and sizes.

        The data of `last_metadata` is stored beside the logs; only records after its last write are read again. Raises
        `BadArgument` (which names the argument), `OutboxDiffers`, `CorruptFile`, `NoOutbox`, `LogsMissing`,
        `LogLocked`, `NotALog`, and the errors of opening a log. With replicas also `DirectoryIsCopy`,
        `NotLeader`, `LogNotFit`, `NodeUnreachable` (a replica that is ahead of this log stopped answering while its
        records were fetched).
        """
        settings = OutboxSettings(
            replicas=replicas, kafka=kafka, acks=acks, durability=durability, serializer=serializer,
            key_serializer=key_serializer, partition_by=partition_by, health=health, config=config,
        )  # fmt: skip
        settings.refuse_keys(carrier)
        directory = checked_path("directory", directory)
        wanted = new_identity(
            producer=producer, topic=topic, partitions=partitions, carrier=carrier, replicas=replicas,
            min_insync_replicas=config.min_insync_replicas,
        )  # fmt: skip
        refuse_other_kinds(directory, filesystem, create=config.create)
        take_back(directory)
        with ExitStack() as resources:
            key = (config.linger_ms, id(clock))
            linger_timer = LINGER_TIMERS.acquire(key, lambda: LingerTimer(config.linger_ms, clock), keep=clock)
            resources.callback(LINGER_TIMERS.release, linger_timer)
            opened = open_all(resources, directory, wanted, settings, filesystem=filesystem, clock=clock)
            outbox = cls(directory, opened, settings, linger_timer, filesystem=filesystem, clock=clock)
            outbox._resources = resources.pop_all()  # from here on the outbox closes them; before, an error does
            try:
                opened.shipping.start(outbox._resources, settings)
                serve_control(outbox._resources, outbox.facts, filesystem, outbox.append_serialized)
                if health is not None:
                    from pushrep.health import HealthServer  # noqa: PLC0415 - brings an HTTP server

                    is_shared = is_slot(directory)
                    status = outbox._workers_status if is_shared else outbox.status
                    outbox._resources.callback(HealthServer(health, status, is_shared=is_shared).close)
                outbox.values.warm()  # last: what is in the log is shipped, whether a registry answers or not
            except BaseException:
                outbox.close()
                raise
            return outbox

    def _refuse_appends(self, refusal: Exception) -> None:
        """Records appended before are still written."""
        for appender in self._all_appenders:
            appender.refuse(lambda: refusal)

    def _begin_pid_epoch(self, filesystem: Filesystem, why: str) -> None:
        """Batches that are sealed from now on have another PID. With replicas only from the next opening on: the grant
        has the PID epoch.
        """
        try:
            identity = leap_epoch(filesystem, self.facts.logs[0].path.parent, self.identity, why)
        except OSError as error:
            _LOG.error("%s: another PID can't be written down: %s", self.directory, error)
            return
        if self.facts.replication is not None:
            _LOG.warning("%s has replicas, so its new PID begins with its next opening", self.directory)
            return
        self._show_identity(identity)
        for appender in self._all_appenders:
            appender.change_pid(identity.pid)

    def _show_identity(self, identity: OutboxIdentity) -> None:
        self.identity, self.pid = identity, identity.pid

    @classmethod
    def open_slot(  # noqa: PLR0913 - as `open`
        cls,
        directory: Path | str,
        topic: str,
        partitions: int,
        producer: str,
        slots: int = 8,
        *,
        replicas: Sequence[str] = (),
        kafka: KafkaDestination | None = None,
        acks: Acks | None = None,
        durability: Durability = Durability.FLUSHED,
        carrier: str = "key",
        serializer: MakesBytes | None = None,
        key_serializer: MakesBytes | None = None,
        partition_by: PartitionBy = None,
        health: "HealthSettings | None" = None,
        config: OutboxConfig = DEFAULT_CONFIG,
        filesystem: Filesystem = REAL_FILESYSTEM,
        clock: Clock = SYSTEM_CLOCK,
    ) -> "Outbox":
        """Open the first free one of `slots` outboxes below `directory`: for a program with many worker processes.

        Each worker calls it after its fork and has an outbox of its own, `directory/slot-<n>`, until it closes it or
        its process ends, however that ends: the system frees the slot's lock then. The next worker goes on with the
        slot's records, under the slot's PID, so readers filter what it sends again, and ships what is not shipped yet;
        with `kafka` the workers that are open do so for a slot that nobody has open, until somebody opens it.
        `health`: the same for all workers; whichever is asked answers for all of them.
        `slots`: more than there are workers at once; it may differ from start to start. The other arguments are those
        of `open`. Raises `NoFreeSlot`, and what `open` raises.
        """
        parent = checked_path("directory", directory)
        whole_number("slots", slots, 1, SLOTS_MAX)
        if (parent / FILE_NAME).exists():
            why = "is an outbox itself: name the directory above its slots, or use Outbox.open"
            raise BadArgument("directory", f"{parent} {why}")
        every = [slot_path(parent, slot) for slot in range(slots)]
        holders: list[int | None] = []
        settings: dict[str, Any] = {
            "replicas": replicas, "kafka": kafka, "acks": acks, "durability": durability, "carrier": carrier,
            "filesystem": filesystem, "clock": clock,
        }  # fmt: skip
        beside = replace(config, create=False, open_timeout_s=min(config.open_timeout_s, 1.0))
        # Used slots first, so that a dead worker's records are shipped soon.
        for path in sorted(every, key=lambda path: not path.exists()):
            try:
                own = cls.open(
                    path, topic, partitions, producer, serializer=serializer, key_serializer=key_serializer,
                    partition_by=partition_by, health=health, config=config, **settings,
                )  # fmt: skip
            except LogLocked as taken:
                holders.append(taken.pid)
                continue
            if kafka is not None:
                try:
                    shipper = SlotShipper(
                        own.facts,
                        kafka.topic or topic,
                        lambda slot: cls.open(slot, topic, partitions, producer, config=beside, **settings),
                    )
                except BaseException:  # no thread can be started, say
                    own.close()
                    raise
                own._resources.callback(shipper.close)  # noqa: SLF001 - its own class
            return own
        raise NoFreeSlot(parent, slots, holders)

    @classmethod
    def stand_by(  # noqa: PLR0913 - as `open`, and how it waits
        cls,
        directory: Path | str,
        topic: str,
        partitions: int | None,
        producer: str,
        *,
        kafka: KafkaDestination | None = None,
        durability: Durability = Durability.FLUSHED,
        carrier: str | None = None,
        serializer: MakesBytes | None = None,
        key_serializer: MakesBytes | None = None,
        partition_by: PartitionBy = None,
        health: "HealthSettings | None" = None,
        on_state: "OnState | None" = None,
        cancel: threading.Event | None = None,
        config: OutboxConfig = DEFAULT_CONFIG,
        filesystem: Filesystem = REAL_FILESYSTEM,
        clock: Clock = SYSTEM_CLOCK,
    ) -> "Outbox":
        """Wait until this instance of the service may lead the outbox, and return it open and leading.

        For a service that runs on each member of an outbox of three or more: one instance leads, the others stand by
        and take over by themselves. Once another leads, or this one gave the lead up, appends raise `NotLeader`, and
        `on_state` is called with `DEPOSED`: close the outbox, and stand by again. See docs/standby.md.

        directory: of this machine's node (`pushrep replica serve`), or `<data>/<outbox id>` in it. `pushrep outbox
            create` makes the outbox; until then every instance waits.
        partitions: the number that `pushrep outbox create` was given; None: whatever that was.
        carrier: that of `pushrep outbox create`; None: whatever that was.
        health: served while it waits, too: not ready.
        on_state: called with a `StandbyState` and why it is no better one, from any thread; it must not wait.
        cancel: once it is set, it waits no longer and raises `StandbyCancelled`.
        config: as in `open`, and the times of standing by. The grant names the members and `min_insync_replicas`.
        The other arguments are those of `open`, the same on every member. The replicas are the grant's, acks is ALL.

        Raises before it waits `BadArgument`; before it takes the lead `CantStandBy` for fewer than three members, a
        min_insync_replicas that is no majority, or worker slots (`open_slot`), and `OutboxDiffers`; and what `open`
        raises that waiting does not change.
        """
        from pushrep.outbox.standby import WaitingMember, refuse_standby  # noqa: PLC0415 - the wire

        home = checked_path("directory", directory)
        refuse_standby(home, config)
        settings = OutboxSettings(
            kafka=kafka, durability=durability, serializer=serializer, key_serializer=key_serializer,
            partition_by=partition_by, health=health, config=config,
        )  # fmt: skip
        settings.refuse_keys(carrier or "header")
        count, word = partitions if partitions is not None else 1, carrier if carrier is not None else "key"
        new_identity(producer=producer, topic=topic, partitions=count, carrier=word)  # refuses nonsense before it waits
        opened: list[Outbox] = []

        def open_outbox(path: Path, others: Sequence[str], granted: "Grant") -> tuple[Facts, Callable[[], None]]:
            outbox = cls.open(
                path, topic, granted.partitions, producer, replicas=others, kafka=kafka, durability=durability,
                carrier=granted.carrier, serializer=serializer, key_serializer=key_serializer,
                partition_by=partition_by, health=health, config=config, filesystem=filesystem, clock=clock,
            )  # fmt: skip
            opened.append(outbox)
            return outbox.facts, outbox.close

        WaitingMember(
            directory=home, topic=topic, partitions=partitions, carrier=carrier, settings=settings,
            filesystem=filesystem, clock=clock, cancel=cancel or threading.Event(),
            on_state=on_state or (lambda _state, _why: None), open_outbox=open_outbox,
        ).run()  # fmt: skip
        return opened[-1]

    def append(  # noqa: PLR0913, PLR0917 - a record's columns
        self,
        partition: int | None = None,
        value: Any = MISSING,
        key: Any = None,
        headers: Iterable[tuple[str, bytes | None]] = (),
        timestamp_ms: int | None = None,
        metadata: StreamMetadata | None = None,
        *,
        block: bool = True,
    ) -> Receipt:
        """Append one record, and return at once; the receipt gives its offset when it is safe.

        `partition`: None: where `partition_by` says. `value`, `key`: bytes or None, or what the serializers take.
        `timestamp_ms`: milliseconds since 1970 UTC; None: the time when its batch was begun, at most `linger_ms` ago.
        `metadata`: where the record lived upstream; its partition mod `partitions` must be `partition`, and the source
        offsets of a pair rise from open to close.
        `block`: False: raise `BufferFull` at once instead of waiting for `block_ms`.
        Raises `RecordRefused` (the argument is named, nothing was taken), `BufferFull`, `LogStopped`,
        `OutboxClosed`, `ForkedProcess`; `OutboxDiverged`, `DestinationAhead` once shipping has found that (see `open`);
        what a serializer raises.
        """
        try:
            try:
                appender = self._appenders[partition]  # type: ignore[index]  # None is no partition
            except (KeyError, TypeError):
                if partition is not None:
                    self._no_partition(partition)
                appender = _NOWHERE
            # The hot path: a plain record that fits into the open batch costs one lock and one list append. The second
            # path: such a record with a timestamp or metadata. Anything else takes the general path.
            if value.__class__ is bytes and key is None and not headers:
                size = len(value) + self._overhead
                if metadata is None and timestamp_ms is None:
                    with appender.lock:
                        if appender.free_bytes >= size:
                            appender.free_bytes -= size
                            batch = appender.open
                            values = batch.values  # type: ignore[union-attr]  # without a batch none are free
                            values.append(value)
                            return Receipt(batch, len(values) - 1)  # type: ignore[arg-type]
                else:
                    self._rules.check_position(timestamp_ms, metadata)
                    with appender.lock:
                        if appender.free_bytes >= size:
                            receipt = appender.add_within_free_bytes(value, timestamp_ms, metadata)
                            appender.free_bytes -= size
                            return receipt
            return self.serialized(partition, value, key, headers, timestamp_ms, metadata, block=block)()
        except PushrepError as error:
            self.count_refused(error)
            raise

    def append_many(  # noqa: PLR0913 - the records' columns
        self,
        partition: int,
        values: Sequence[Any],
        *,
        keys: Sequence[Any] | None = None,
        headers: Sequence[Iterable[tuple[str, bytes | None]]] | None = None,
        timestamps_ms: int | Sequence[int] | None = None,
        metadata: StreamMetadata | Sequence[StreamMetadata] | None = None,
        block: bool = True,
    ) -> Receipt:
        """Append records with consecutive offsets: the fast path. One receipt; its result is the first offset.

        All or none of them are appended. `keys`, `headers`, `timestamps_ms`: one per record, or None; one timestamp may
        serve all. `metadata`: the first record's position, the others taking the offsets after it, or one per record.
        Raises as `append` does; `RecordRefused` also if the records exceed `buffer_bytes` together, or there are none.
        """
        if self.values.serializes:
            values, keys = self.serialized_many(values, keys)
        return self.append_serialized_many(
            partition, values, keys=keys, headers=headers, timestamps_ms=timestamps_ms, metadata=metadata, block=block
        )

    def append_serialized_many(  # noqa: PLR0913 - as `append_many`
        self,
        partition: int,
        values: Sequence[bytes | None],
        *,
        keys: Sequence[bytes | None] | None = None,
        headers: Sequence[Iterable[tuple[str, bytes | None]]] | Sequence[HeaderColumn] | None = None,
        timestamps_ms: int | Sequence[int] | None = None,
        metadata: StreamMetadata | Sequence[StreamMetadata] | None = None,
        block: bool = True,
    ) -> Receipt:
        """As `append_many`, of bytes, whatever the serializers. headers: also a column a name."""
        try:
            try:
                appender = self._appenders[partition]
            except (KeyError, TypeError):
                self._no_partition(partition)
            columns = self._rules.many(values, keys, headers, timestamps_ms, metadata)
            size = columns.size_bytes
            if size > self._budget.limit:
                raise RecordRefused(
                    "values", f"{size} bytes exceed buffer_bytes={self._budget.limit}; append fewer at once"
                )
            deadline_ms: int | None = None
            while not self._budget.try_take(size, size):
                deadline_ms = self._wait_for_free_bytes(size, deadline_ms, block=block)
            try:
                with appender.lock:
                    return appender.add_many(columns)
            except BaseException:
                self._budget.give(size)
                raise
        except PushrepError as error:
            self.count_refused(error)
            raise

    def serialized(  # noqa: PLR0913, PLR0917 - a record's columns
        self,
        partition: int | None,
        value: Any,
        key: Any,
        headers: Iterable[tuple[str, bytes | None]],
        timestamp_ms: int | None,
        metadata: StreamMetadata | None,
        *,
        block: bool = False,
    ) -> Callable[[], Receipt]:
        """Serialize and check a record; what appends it, which may be tried again."""
        if value is MISSING:
            raise RecordRefused("value", "has to be given; None is a tombstone")
        data, key = self.values.bytes_of(value, key)
        record = self._rules.one(data, key, headers, timestamp_ms, metadata)
        if partition is None:
            partition = self.values.partition(value, None if record.keys is None else record.keys[0])
        try:
            appender = self._appenders[partition]  # type: ignore[index]  # None is no key
        except (KeyError, TypeError):
            self._no_partition(partition)
        return partial(self._append_record, appender, record, block=block)

    def serialized_many(
        self, values: Sequence[Any], keys: Sequence[Any] | None
    ) -> tuple[Sequence[Any], Sequence[Any] | None]:
        """The bytes of many records' values and keys."""
        try:
            return self.values.many(listed("values", values), None if keys is None else listed("keys", keys))
        except PushrepError as error:
            self.count_refused(error)
            raise

    def append_serialized(
        self,
        partition: int,
        value: bytes | None,
        key: bytes | None,
        headers: Iterable[tuple[str, bytes | None]],
        timestamp_ms: int | None,
    ) -> Receipt:
        """As `append`, of bytes, whatever the serializers."""
        record = self._rules.one(value, key, headers, timestamp_ms, None)
        return self._append_record(self._appenders[partition], record, block=True)

    def _append_record(self, appender: PartitionAppender, record: Columns, *, block: bool) -> Receipt:
        deadline_ms: int | None = None
        while True:
            with appender.lock:
                taken = appender.add_one(record)
            if taken is not None:
                return taken
            deadline_ms = self._wait_for_free_bytes(record.size_bytes, deadline_ms, block=block)

    def last_metadata(self, pid: int, partition: int) -> int | None:
        """The highest source offset of (pid, source partition) in the log, None if it has none. Resume at that offset +
        1.

        Kept beside the log, and raised when a batch is written. Failed and waiting records do not count. It knows every
        PID in the log, also this outbox's own ones of earlier epochs. Raises `LogStopped` if the log was cut.
        """
        appenders = self._appenders
        return appenders[partition % self.identity.partitions].last_position(pid, partition)

    def log(self, partition: int) -> SegmentLog:
        """The partition's log, for reading. Append through the outbox only: it writes the offsets into the keys."""
        try:
            return self._appenders[partition].log
        except (KeyError, TypeError):
            self._no_partition(partition)

    def lag(self) -> "dict[str, ReplicaLag | DestinationLag]":
        """The lag of each replica, by its address, and of the Kafka topic, as `kafka:<topic>`."""
        return {**({} if (led := self.facts.replication) is None else led.lag()), **self.facts.shipping.lag()}

    def wait_shipped(self, timeout: float | None = None) -> None:
        """Flush, and return when the Kafka topic has acknowledged everything that was appended before.

        Raises as `flush`; `ShippingTimeout`; and at once `ShippingStopped` or the error for a topic that can't be used.
        """
        checked_timeout(timeout)
        self.facts.shipping.wait(self.flush, timeout)

    def status(self) -> OutboxStatus:
        """What is wrong and how far everything is, as `pushrep status` shows it; its partitions one by one, too."""
        return status_of(self.facts)

    def _workers_status(self) -> WorkersStatus:
        return workers_status(self.status())

    def flush(self, timeout: float | None = None) -> None:
        """Return when everything appended before is on disk, whatever the durability.

        Raises `DeliveryFailed` for the first failure that no receipt was asked about, `ReceiptTimeout`.
        """
        checked_timeout(timeout)
        appenders = list(self._appenders.values())
        try:
            flush_appenders(appenders, timeout)
        except LogClosed:  # `close` was called meanwhile, and has flushed it
            raise OutboxClosed(self.directory) from None

    def close(self) -> None:
        """Seal, write and flush what was appended, wait up to `close_timeout_s`, and free the directory.

        What is not decided by then fails as "may still be delivered". Raises `DeliveryFailed` for a failure that no
        receipt was asked about, and `CloseTimedOut` if the disk did not answer. A second call does nothing.
        An outbox that is still open when the interpreter exits is closed then, with a warning.
        """
        if os.getpid() != self.owner_pid:
            raise self._forked()
        with self._closing:
            if self._closed:
                return
            self._closed = True
        _OPEN.discard(self)
        closed = OutboxClosed(self.directory)
        self._appenders = cast("Mapping[int, PartitionAppender]", Refusing(lambda: OutboxClosed(self.directory)))
        for appender in self._all_appenders:
            appender.refuse(lambda: OutboxClosed(self.directory))
        if self.facts.replication is not None:
            self.facts.replication.end_change()  # it holds the write locks
        deadline = monotonic() + self._settings.config.close_timeout_s
        decided_by(deadline, pending_in(self._all_appenders))
        self._hand_over(deadline)
        for appender in self._all_appenders:
            appender.end()
            appender.give_up(closed)
        deadline = max(deadline, monotonic() + _GRACE_S)
        is_still = all(one.is_idle_within(max(0.0, deadline - monotonic())) for one in self._all_appenders)
        release_disk_threads(self._threads)
        if not is_still:
            # A writer hangs in the disk, so closing its log would hang, too. The process keeps the directory's lock.
            if self.facts.replication is not None:
                self.facts.replication.close()
            raise CloseTimedOut(self.directory, self._settings.config.close_timeout_s)
        try:
            self._resources.close()
        finally:
            raise_unseen_failure(self._all_appenders)  # lost records matter more than a slow close

    def _hand_over(self, deadline: float) -> None:
        """Hand the lead over to a standby, if there is one: then nobody waits to find out that this one has gone."""
        replication = self.facts.replication
        if replication is None or not replication.has_standbys:
            return
        try:
            replication.transfer(None, max(0.0, deadline - monotonic()))
        except PushrepError as error:
            _LOG.info("%s: it ends without handing over: %s", self.directory, error)

    def pending_records(self) -> int:
        """How many records were appended and are not decided yet."""
        return sum(len(batch.values) for batch in pending_in(self._all_appenders))

    def disown(self) -> None:
        """In a fork of the owner: from now on every use raises `ForkedProcess`."""
        refusing: Any = Refusing(self._forked)
        self._appenders = self.facts = refusing

    def _forked(self) -> ForkedProcess:
        return ForkedProcess(f"the outbox in {self.directory}", owner_pid=self.owner_pid, pid=os.getpid())

    def _wait_for_free_bytes(self, size: int, deadline_ms: int | None, *, block: bool) -> int:
        """Back-pressure: wait until `size` bytes were free, and return the deadline; raise `BufferFull` after it."""
        block_ms = self._settings.config.block_ms if block else 0
        if deadline_ms is None:
            deadline_ms = self._clock.monotonic_ms() + block_ms
        for appender in self._all_appenders:
            appender.request_flush()  # a lingering batch holds bytes, too
        if not self._budget.wait_for(size, deadline_ms):
            raise BufferFull(buffer_bytes=self._budget.limit, wanted_bytes=size, block_ms=block_ms)
        return deadline_ms

    def _append_parked(
        self, appender: PartitionAppender, value: bytes | None, headers: Sequence[tuple[str, bytes | None]]
    ) -> int:
        """Append an entry of the parking log; wait until it is acknowledged."""
        rules = RecordRules(self.identity.carrier, appender.log.config.batch_limit_bytes)
        record = rules.one(value, None, headers, None, None)
        with appender.lock:
            receipt = appender.add_one(record)
        if receipt is None:
            raise BufferFull(buffer_bytes=self._budget.limit, wanted_bytes=record.size_bytes, block_ms=0)
        return receipt.result()

    def count_refused(self, error: PushrepError) -> None:
        """Count it among the refused appends that the status shows."""
        with self._refused_lock:
            self._refused[type(error).__name__] += 1

    def _no_partition(self, partition: object) -> NoReturn:
        raise RecordRefused(
            "partition",
            "has to be given, or partition_by= when the outbox is opened"
            if partition is None
            else f"{partition!r} is not one of the {self.identity.partitions}, counted from 0",
        ) from None


_OPEN: set[Outbox] = set()
"""If a program leaves an outbox open, its end closes it, within close_timeout_s: atexit does, in the main thread.
A child of multiprocessing ends by os._exit, without atexit: there a finalizer of that module does. Nothing does if the
process is killed, or calls os._exit itself.
"""
_child = 0  # the process of multiprocessing that ends by our finalizer


def _close_if_forgotten(outbox: Outbox) -> None:
    global _child  # noqa: PLW0603 - once a process
    _OPEN.add(outbox)
    util, process = (sys.modules.get(f"multiprocessing.{name}") for name in ("util", "process"))
    if util is None or process is None or process.parent_process() is None or _child == os.getpid():
        return
    _child = os.getpid()
    util.Finalize(None, _close_at_exit, exitpriority=0)


def _close_at_exit() -> None:
    for outbox in list(_OPEN):
        if outbox.owner_pid != os.getpid():
            continue
        records = outbox.pending_records()
        was_open = f"the outbox in {outbox.directory} was still open when the program ended"
        try:
            outbox.close()
        except Exception as error:  # noqa: BLE001 - the other outboxes are to be closed, too
            _LOG.error("%s, and %d records waited: %s; %s", was_open, records, error, _HINT)
        else:
            _LOG.warning("%s: closed now, with %d records that waited; %s", was_open, records, _HINT)


atexit.register(_close_at_exit)

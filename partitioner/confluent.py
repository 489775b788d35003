"""For confluent-kafka: a producer that owns its client, since librdkafka asks no Python code where a record goes.

    produce ─▶ queue (what is not acknowledged, in order) ─▶ librdkafka: idempotent, gapless, no timeout that drops, and
                                                              one request on its way to each broker, and of a partition
                                                              one record until the client has had one acknowledged
      a report says delivered ─▶ out of the queue
      a report says failed    ─▶ a new client; everything that is in the queue goes out again, from the first on
                                 what no retry solves (too large, not allowed) stops its partition until `retry`; the
                                 records of a batch that was refused are sent one by one first, to find the one

So the prefix condition holds: per (PID, source partition) each attempt reaches the log in order and without holes.
Why a new client: with `enable.gapless.guarantee` the old one ends at a failure rather than go past it.
Why one request: a broker that does not know a producer id takes any first sequence number. Of several requests it may
refuse the first for a moment (a new leader, too few replicas) and take the second. It does not know a new client, one
that was silent for `producer.id.expiration.ms`, and, after its own start, one whose records are older than that, since
it measures the silence by their timestamps. librdkafka can't send only the batches of such a moment one by one.
Why one record first: librdkafka sends the next batch before it ends at one that is refused for good; a broker that does
not know the client would take it.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self
from uuid import UUID

from filtering.extras import needed_by

with needed_by("partitioner.confluent"):
    import confluent_kafka  # noqa: F401 - the message says how to get it

from confluent_kafka import KafkaError, KafkaException, Message, Producer, TopicCollection
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType  # type: ignore[attr-defined]

from filtering import METADATA_HEADER, StreamMetadata
from filtering.consumers.confluent_client import (
    ask_brokers,
    fatal_errors,
    missing_right,
    named_setting,
    naming_rights,
    topic_settings,
)
from filtering.retry import Backoff
from partitioner.in_flight_queue import InFlightQueue
from partitioner.source_partition import (
    BadPartitionerSetting,
    NotDelivered,
    TopicUnfit,
    check_not_shrunk,
    check_partition_count,
    partition_for,
    topic_missing,
)

# Settings that hold the prefix condition. The gapless guarantee covers neither timeouts nor brokers that do not know
# the producer.
REQUIRED: Mapping[str, tuple[object, frozenset[object]]] = {
    "enable.idempotence": (True, frozenset({True, "true", "True"})),
    "acks": ("all", frozenset({"all", "-1", -1})),
    "enable.gapless.guarantee": (True, frozenset({True, "true", "True"})),
    "message.timeout.ms": (0, frozenset({0, "0"})),
    "max.in.flight.requests.per.connection": (1, frozenset({1, "1"})),
    "queuing.strategy": ("fifo", frozenset({"fifo"})),  # its default, which librdkafka warns of where it is set
    "delivery.report.only.error": (False, frozenset({False, "false", "False"})),
}
_ALIASES = {
    "request.required.acks": "acks",
    "delivery.timeout.ms": "message.timeout.ms",
    "max.in.flight": "max.in.flight.requests.per.connection",
}
_REFUSED = {
    "transactional.id": "not for this producer: an aborted transaction takes records back that were acknowledged",
    "on_delivery": "given with each record: produce(..., on_delivery=...)",
    "dr_cb": "given with each record: produce(..., on_delivery=...)",
    "dr_msg_cb": "given with each record: produce(..., on_delivery=...)",
    "partitioner": "not for this producer: it picks the partition itself",
    "partitioner_cb": "not for this producer: it picks the partition itself",
    "default.topic.config": "not for this producer: give its settings beside the others",
}
_LEAVE_OUT = ": else readers that filter replays lose records; leave it out"
_LOG = logging.getLogger(__name__)
Header = tuple[str, str | bytes | None]
OnDelivery = Callable[[StreamMetadata, Message], None]

# Sent again, these fail again: the record, the topic or the rights have to be corrected first.
_FINAL = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.INVALID_MSG,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.POLICY_VIOLATION,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001 - the client's own names of its local errors
        KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001
    }
)
# The broker refuses a batch for one of its records, or because all together are too large.
_OF_ONE_RECORD = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
    }
)
_LIMITS = {KafkaError.MSG_SIZE_TOO_LARGE: "max.message.bytes", KafkaError.RECORD_LIST_TOO_LARGE: "segment.bytes"}
_ALONE = {"batch.num.messages": 1}
_NOT_THERE = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC})  # noqa: SLF001
_MAX_BLOCK_MS = 60_000  # as long as Kafka's own producer waits for memory
_DRAIN_S = 5.0
_POLL_S = 0.05
_QUEUE_RECORDS = 100_000  # librdkafka's default of queue.buffering.max.messages
_SERVE_EVERY_S = 0.005
"""While records are produced without a pause, deliveries are served this often: a poll costs as much as a record."""
_BACKOFF = Backoff(first_s=0.05, longest_s=5.0)


def with_required_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The user's settings, and those that hold the prefix condition. Raises BadPartitionerSetting."""
    for name, value in config.items():
        if name in _REFUSED:
            raise BadPartitionerSetting(name, value, f"{_REFUSED[name]}{_LEAVE_OUT}")
        needed = REQUIRED.get(_ALIASES.get(name, name))
        if needed is not None and value not in needed[1]:
            raise BadPartitionerSetting(name, value, f"{needed[0]} in this producer{_LEAVE_OUT}")
    kept = {name: value for name, value in config.items() if name not in _ALIASES}
    required = {name: value for name, (value, _) in REQUIRED.items() if name != "queuing.strategy"}
    kept.pop("queuing.strategy", None)
    return {**kept, **required, "logger": _WithoutExpectedWarning(config.get("logger", _LOG))}


class _WithoutExpectedWarning:
    """The user's logger, or ours, for what librdkafka logs, except that a setting which we need is experimental."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def log(self, level: int, message: str, *values: object) -> None:
        """As a Logger's."""
        if not (values and values[0] == "CONFWARN" and "enable.gapless.guarantee" in str(values)):
            self._logger.log(level, message, *values)


class _Pending(NamedTuple):
    """A record in the queue, and what its client calls back when it is sent for the first time.

    One object for all of it: a hundred thousand of them may wait, and the garbage collector walks over each.
    """

    partition: int
    metadata: StreamMetadata
    value: bytes | None
    key: bytes | None
    headers: list[Header] | None
    timestamp_ms: int
    on_delivery: OnDelivery | None
    client: Producer
    reports: "deque[_Report]"

    def __call__(self, error: KafkaError | None, message: Message) -> None:
        self.reports.append((self.client, self, error, message))


_new = tuple.__new__
_Report = tuple[Producer, _Pending, KafkaError | None, Message]


class SourcePartitionProducer:
    """Sends records with their source position; a (PID, source partition) stays in one partition, in order, gapless.

    config: librdkafka's settings (`bootstrap.servers`, security, `linger.ms` ...); one that would break the prefix
    condition is refused by name. partition_count: how many partitions are used; without it the number at the start, for
    this object's life: keep `.partition_count` with the producer's state and pass it after a restart (raising it is a
    new PID epoch). carrier: where the 20 bytes travel, "key" or "header" (`stream-metadata`); with
    "header" a record may have a key of its own. Thread-safe; threads that must keep an order call one after another.

    Raises BadPartitionerSetting, TopicUnfit, KafkaException.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        topic: str,
        *,
        partition_count: int | None = None,
        carrier: Literal["key", "header"] = "key",
        max_block_ms: int = _MAX_BLOCK_MS,
    ) -> None:
        if carrier not in {"key", "header"}:
            raise BadPartitionerSetting("carrier", carrier, '"key" or "header"')
        self.topic, self._carrier, self._max_block_s = topic, carrier, max_block_ms / 1000
        self._config = with_required_settings(config)
        self._in_flight: InFlightQueue[_Pending] = InFlightQueue()
        self._reports: deque[_Report] = deque()
        self._delivered: deque[_Report] = deque()
        self._callback_error: Exception | None = None
        self._lock = threading.RLock()
        self._attempts = 0
        self._serve_at_s = 0.0
        self._renew_at_s: float | None = None
        self._suspects: set[StreamMetadata] = set()  # refused together
        self._known: set[int] = set()  # partitions for which the present client has had a record acknowledged
        self._waiting: dict[int, list[_Pending]] = {}  # by other partition: what follows its first record, under way
        self._alone = 0  # how many records the present client sends alone, and nothing else; 0: it is a usual one
        self._is_closed = False
        self._client = Producer(self._config)
        self._room = int(self._config.get("queue.buffering.max.messages", 0)) or _QUEUE_RECORDS
        self.partition_count = self._fixed_count(partition_count)
        """How many partitions are used: keep it with the producer's state."""

    @property
    def stopped(self) -> dict[int, Exception]:
        """The partitions whose first record can't be delivered, each with the reason."""
        with self._lock:
            return self._in_flight.stopped

    def __len__(self) -> int:
        """Records that are not acknowledged."""
        with self._lock:
            return len(self._in_flight)

    def produce(  # noqa: PLR0913 - a record has these parts
        self,
        metadata: StreamMetadata,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Iterable[Header] = (),
        timestamp_ms: int | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> None:
        """Take a record; it goes out behind all others of its partition. Waits while the client's queue is full.

        on_delivery(metadata, message) is called by `poll`, `flush` or a later `produce`, once it is in the log. What it
        raises loses no other callback, and comes out of the next `poll`, `flush` or `close`, never out of `produce`.
        Raises OffsetNotAbove, PartitionStopped, BadPartitionerSetting for a key beside the key carrier, NotDelivered
        after `max_block_ms`, and KafkaException for a record that the client does not take: then it was not taken.
        """
        if key is not None and self._carrier == "key":
            raise BadPartitionerSetting("key", key, 'the metadata\'s own; make the producer with carrier="header"')
        if timestamp_ms is None:
            timestamp_ms = time.time_ns() // 1_000_000
        packed, kept = metadata.pack(), None
        if headers:
            kept = [header for header in headers if header[0] != METADATA_HEADER]
        if self._carrier == "header":
            kept = [*(kept or ()), (METADATA_HEADER, packed)]
        else:
            key = packed
        partition = partition_for(metadata.partition, self.partition_count)
        # Without the class's own constructor: half the time.
        pending: _Pending = _new(
            _Pending,
            (partition, metadata, value, key, kept, timestamp_ms, on_delivery, self._client, self._reports),
        )
        if not self._try(pending):
            self._wait_for_room(pending)
        if time.monotonic() >= self._serve_at_s:
            self._poll(0)

    def poll(self, timeout_s: float = 0) -> int:
        """Serve deliveries, and send again what failed; how many were acknowledged. Never raises for a record.

        Raises what an `on_delivery` raised, the first one, once all were called; further ones are logged.
        """
        count = self._poll(timeout_s)
        self._raise_for_callback()
        return count

    def _poll(self, timeout_s: float) -> int:
        _serve(self._client, timeout_s if self._renew_at_s is None else min(timeout_s, _POLL_S))
        self._serve_at_s = time.monotonic() + _SERVE_EVERY_S
        with self._lock:
            done = self._process_reports()
            if self._alone:
                self._alone -= min(len(done), self._alone)
                if not self._alone:
                    self._renew_at_s = time.monotonic()
            if self._renew_at_s is not None and time.monotonic() >= self._renew_at_s and not self._is_closed:
                done += self._renew()
        self._delivered.extend(report for report in done if report[1].on_delivery is not None)
        self._call_back()
        return len(done)

    def _call_back(self) -> None:
        """Call every `on_delivery` that is due, whatever one of them raises; the first error waits to be raised."""
        while self._delivered:
            try:
                _, pending, _, message = self._delivered.popleft()
            except IndexError:  # another thread has called it
                return
            assert pending.on_delivery is not None, "only records with a callback wait here"
            try:
                pending.on_delivery(pending.metadata, message)
            except Exception as error:  # noqa: BLE001 - raised by the next call that may say so
                if self._callback_error is None:
                    self._callback_error = error
                else:
                    _LOG.exception("on_delivery of %s failed, after another that is raised", pending.metadata)

    def _raise_for_callback(self) -> None:
        error, self._callback_error = self._callback_error, None
        if error is not None:
            raise error

    def flush(self, timeout_s: float = 60) -> None:
        """Every record that was taken is in the log when this returns.

        Raises PartitionStopped as soon as only records of stopped partitions are left, NotDelivered after the time;
        when all are in the log, what an `on_delivery` raised, as `poll`.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._lock:
                left, stopped = len(self._in_flight), self._in_flight.stopped
                if left == 0:
                    break
                if stopped and not self._in_flight.outgoing():
                    raise self._in_flight.refusal(min(stopped))
            if time.monotonic() >= deadline_s:
                raise NotDelivered(left, timeout_s)
            self._poll(_POLL_S)
        self._call_back()
        self._raise_for_callback()

    def retry(self, partition: int) -> None:
        """Why its first record failed is corrected: send the partition's records again, from that one on."""
        with self._lock:
            if partition in self._in_flight.stopped:
                self._in_flight.resume(partition)
                self._renew_at_s = time.monotonic()  # a new client, so that they keep their order with others in flight

    def close(self, timeout_s: float = 60) -> None:
        """Flush, then drop the client. Raises as `flush`; it is closed in any case. A second call does nothing."""
        if self._is_closed:
            return
        try:
            self.flush(timeout_s)
        finally:
            with self._lock:
                self._is_closed = True
                self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        with self._lock:
            self._is_closed = True
            self._release()

    def _wait_for_room(self, pending: _Pending) -> None:
        deadline_s = time.monotonic() + self._max_block_s
        while True:
            self._poll(_POLL_S)
            if self._try(pending):
                return
            if time.monotonic() >= deadline_s:
                raise NotDelivered(len(self), self._max_block_s)

    def _try(self, pending: _Pending) -> bool:
        """False while the client's queue is full."""
        with self._lock:
            if self._is_closed:
                raise BadPartitionerSetting("producer", "closed", "open while records are produced")
            self._in_flight.check(pending.partition, pending.metadata)
            if self._renew_at_s is not None or self._alone or (self._waiting and len(self._in_flight) >= self._room):
                return False
            try:
                self._hand_over(pending)
            except BufferError:
                return False
            except KafkaException as error:
                if error.args[0].code() == KafkaError._FATAL:  # noqa: SLF001 - the client's own name
                    self._plan_renewal()
                    return False
                raise
            self._in_flight.enqueue(pending)
            return True

    def _hand_over(self, pending: _Pending) -> None:
        """To the client, or behind its partition's first record until that one is acknowledged."""
        if (waiting := self._waiting.get(pending.partition)) is not None:
            waiting.append(pending)
            return
        self._send(pending)
        if pending.partition not in self._known:
            self._waiting[pending.partition] = []

    def _hand_over_all(self, records: Iterable[_Pending]) -> None:
        try:
            for pending in records:
                self._hand_over(pending)
        except (BufferError, KafkaException):
            # The rest goes out with the next attempt, after what is in the log by then.
            self._plan_renewal()

    def _send(self, pending: _Pending) -> None:
        client = self._client
        partition, _, value, key, headers, timestamp_ms, _, first, reports = pending
        on_report: Any = pending if client is first else partial(_notify, reports, client, pending)
        if headers:
            client.produce(self.topic, value, key, partition, on_report, timestamp=timestamp_ms, headers=headers)
        else:  # an empty list of them costs as much as half a record
            client.produce(self.topic, value, key, partition, on_report, timestamp=timestamp_ms)

    def _process_reports(self) -> list[_Report]:
        """Apply the client's delivery reports to the queue; what got into the log."""
        done = []
        reports, acknowledge = self._reports, self._in_flight.acknowledge
        while reports:
            report = reports.popleft()
            client, pending, error, _ = report
            if error is None:
                is_first = pending.partition not in self._known
                if is_first and client is self._client:  # a thread may still serve the old one
                    self._known.add(pending.partition)
                    self._hand_over_all(self._waiting.pop(pending.partition, ()))
                if acknowledge(pending):
                    self._attempts = 0
                    done.append(report)
                continue
            if error.code() in _OF_ONE_RECORD and not self._alone:
                self._suspects.add(pending.metadata)
            elif error.code() in _FINAL:
                self._in_flight.fail(
                    pending, missing_right(error, "", self.topic, "WRITE") or self._why(error, pending)
                )
            if client is self._client:
                self._plan_renewal()
        return done

    def _why(self, error: KafkaError, pending: _Pending) -> KafkaException:
        """The error with the setting that says so, if one does."""
        said, setting = error.str(), _LIMITS.get(error.code())
        if error.code() == KafkaError.INVALID_TIMESTAMP:
            said += f": its timestamp is {pending.timestamp_ms} ms"
            when = "before" if pending.timestamp_ms < 1000 * time.time() else "after"
            setting = f"message.timestamp.{when}.max.ms"
        if setting is None:
            return KafkaException(error)
        said += f"; the topic's limit is {named_setting(_shared(self._config), self.topic, setting)}"
        return KafkaException(KafkaError(error.code(), said))

    def _plan_renewal(self) -> None:
        if self._renew_at_s is None:
            self._renew_at_s = time.monotonic() + _BACKOFF.pause_s(self._attempts)
            self._attempts += 1

    def _renew(self) -> list[_Report]:
        """A new client, and everything that is not acknowledged once more, from the first record on; after a refusal
        first, one by one, what was refused together and what is before it.
        """
        self._release()
        done = self._process_reports()  # what the old client delivered before it ended
        alone = self._in_flight.outgoing(self._suspects) if self._suspects else []
        self._alone, self._suspects = len(alone), set()
        self._client, self._renew_at_s = Producer({**self._config, **(_ALONE if self._alone else {})}), None
        self._known = set()
        self._hand_over_all(alone or self._in_flight.outgoing())
        return done

    def _release(self) -> None:
        """Nothing of the client is in flight any more, and all its reports are here."""
        self._waiting = {}
        self._client.purge()
        deadline_s = time.monotonic() + _DRAIN_S
        while len(self._client) and time.monotonic() < deadline_s:
            _serve(self._client, _POLL_S)

    def _fixed_count(self, wanted: int | None) -> int:
        check_partition_count(wanted)
        found = self._partitions()
        check_not_shrunk(wanted or 1, found)
        refuse_compaction(self._config, self.topic)
        return found if wanted is None else wanted

    def _partitions(self) -> int:
        def question(left_s: float) -> int:
            found = self._client.list_topics(self.topic, timeout=left_s).topics[self.topic]
            if found.error is not None or not found.partitions:
                raise KafkaException(found.error or KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
            return len(found.partitions)

        try:
            with naming_rights("", self.topic, "WRITE"):
                return ask_brokers(question)
        except KafkaException as error:
            if error.args[0].code() in _NOT_THERE:
                raise topic_missing(self.topic) from None
            raise


def _notify(
    reports: deque[_Report], client: Producer, pending: _Pending, error: KafkaError | None, message: Message
) -> None:
    reports.append((client, pending, error, message))


def _serve(client: Producer, timeout_s: float) -> None:
    """Let the client call back. A fatal error comes as an exception, once; what it did to each record is reported."""
    try:
        with fatal_errors():
            client.poll(timeout_s)
    except KafkaException as error:
        if not error.args[0].fatal():
            raise


def _shared(config: Mapping[str, Any]) -> dict[str, Any]:
    """What other clients than a producer take, too."""
    return {name: value for name, value in config.items() if name not in REQUIRED}


def refuse_compaction(config: Mapping[str, Any], topic: str) -> None:
    """Ask the broker for the topic's cleanup.policy. Raises TopicUnfit, MissingRight, KafkaException."""
    policy = topic_settings(_shared(config), topic)["cleanup.policy"]
    if "compact" in policy:
        raise TopicUnfit(
            f"topic {topic!r} has cleanup.policy={policy}: compaction keeps a replayed record and deletes its first "
            "copy, which readers then miss; set cleanup.policy=delete"
        )


_MASK = 2**64 - 1


class DestinationTopic(NamedTuple):
    """`incarnation`: cluster id / topic id; `retention_ms`: None where nothing is deleted by age."""

    incarnation: str
    partitions: int
    retention_ms: int | None


def topic_facts(config: Mapping[str, Any], topic: str) -> DestinationTopic:
    """Ask the brokers; config: librdkafka's settings for servers and security. Raises TopicUnfit, KafkaException."""
    admin = AdminClient(dict(config))  # held until it has answered
    resource = ConfigResource(ResourceType.TOPIC, topic)

    def question(left_s: float) -> tuple[Any, Any, Any]:
        cluster = admin.describe_cluster(request_timeout=left_s)
        described = admin.describe_topics(TopicCollection([topic]), request_timeout=left_s)[topic]
        settings = admin.describe_configs([resource], request_timeout=left_s)[resource]
        return cluster.result(left_s), described.result(left_s), settings.result(left_s)

    try:
        cluster, found, settings = ask_brokers(question)
    except KafkaException as error:
        if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            raise topic_missing(topic) from error
        raise
    high, low = found.topic_id.get_most_significant_bits(), found.topic_id.get_least_significant_bits()
    topic_id = UUID(int=(high & _MASK) << 64 | (low & _MASK))
    retention_ms = int(settings["retention.ms"].value)
    incarnation = f"{cluster.cluster_id}/{topic_id}"
    return DestinationTopic(incarnation, len(found.partitions), None if retention_ms < 0 else retention_ms)

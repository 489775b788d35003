"""confluent-kafka's clients: which failures are transient, the marks topic, and what a group's member asks brokers.

`KafkaError.retriable()` speaks of transactions only, so a table here says which failures are transient.

The marks topic holds marks that do not fit beside an offset, each version a record of its own in a compacted topic:

write: key = group/topic/partition/version, value = the marks' bytes ─▶ (partition, offset, key) goes into the commit
read:  the record at that very offset; its key must be the one        delete: a tombstone, once another is committed
"""

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, ConfigSource, ResourceType  # type: ignore[attr-defined]

from filtering.consumers.commits import Stored, pack_marks, unpack_marks
from filtering.consumers.group_member import CommittedOffset
from filtering.consumers.startpoints import ASK_WITHIN_S, Held, OwnershipCheck, PartitionFacts
from filtering.errors import BadFilterSetting, CorruptMarks, MissingRight
from filtering.marks import HighwaterMarks
from filtering.retry import TIMEOUT_S, Failure, ask, ask_in_background

_Answer = TypeVar("_Answer")
_LOG = logging.getLogger(__name__)
_FULL_QUEUE_S = 0.05
_SOON_S = 5.0
_SET_BY = {
    ConfigSource.DYNAMIC_TOPIC_CONFIG.value: "set for the topic",
    ConfigSource.DEFAULT_CONFIG.value: "the default",
}

_CONNECTION = (
    # Addresses and sockets.
    *("bootstrap.servers", "metadata.broker.list", "metadata.recovery.", "client.id", "client.dns.lookup"),
    *("broker.address.", "socket.", "connections.", "reconnect.", "api.version.", "broker.version."),
    # TLS and authentication.
    *("security.", "sasl.", "ssl.", "https.", "enable.ssl.", "enable.sasl.", "oauth_cb", "plugin.library.paths"),
    # Logging.
    *("log_level", "log.connection.close"),
)
"""Settings whose names begin so say how to reach brokers: librdkafka's, and the Python client's."""
_TRANSIENT = frozenset(
    {
        # The group's or the transaction's coordinator: not made yet, moving, loading.
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
        KafkaError.UNSTABLE_OFFSET_COMMIT,
        # The partition's leader, or the controller.
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.NOT_CONTROLLER,
        KafkaError.BROKER_NOT_AVAILABLE,
        KafkaError.REPLICA_NOT_AVAILABLE,
        KafkaError.PREFERRED_LEADER_NOT_AVAILABLE,
        KafkaError.LISTENER_NOT_FOUND,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.OFFSET_NOT_AVAILABLE,
        KafkaError.KAFKA_STORAGE_ERROR,
        # The connection, or the time of a request.
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.NETWORK_EXCEPTION,
        KafkaError.THROTTLING_QUOTA_EXCEEDED,
        KafkaError._TIMED_OUT,  # noqa: SLF001 - the client's own names of its local errors
        KafkaError._TRANSPORT,  # noqa: SLF001
        KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001
        KafkaError._WAIT_COORD,  # noqa: SLF001
        KafkaError._WAIT_CACHE,  # noqa: SLF001
        KafkaError._RETRY,  # noqa: SLF001
    }
)
_NOT_THERE = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.UNKNOWN_TOPIC_ID,
        KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001
        KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001
    }
)


REBALANCED = frozenset(
    {
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.STALE_MEMBER_EPOCH,
        KafkaError.FENCED_MEMBER_EPOCH,
        KafkaError._ASSIGNMENT_LOST,  # noqa: SLF001
    }
)
"""How a commit fails while partitions move between members, or once the group has removed this member."""


def missing_right(error: KafkaError, group: str, topic: str, on_topic: str = "READ") -> MissingRight | None:
    """The right that the brokers say is missing, if that is what they say. on_topic: what was done with the topic."""
    rights = {
        KafkaError.GROUP_AUTHORIZATION_FAILED: ("READ", "group", group),
        KafkaError.TOPIC_AUTHORIZATION_FAILED: (on_topic, "topic", topic),
        # An idempotent producer without WRITE on any topic.
        KafkaError.CLUSTER_AUTHORIZATION_FAILED: ("WRITE", "topic", topic),
    }
    found = rights.get(error.code())
    return None if found is None else MissingRight(*found, error)


@contextmanager
def naming_rights(group: str, topic: str, on_topic: str = "READ") -> Iterator[None]:
    """A KafkaException of a missing right becomes MissingRight inside of this block."""
    try:
        yield
    except KafkaException as error:
        missing = missing_right(error.args[0], group, topic, on_topic)
        if missing is None:
            raise
        raise missing from error


def connection_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What another client needs of a consumer's settings to reach the same brokers; secrets are among it."""
    return {name: value for name, value in config.items() if name.startswith(_CONNECTION)}


def failure_of(error: BaseException) -> Failure:
    """How `retry.ask` treats a KafkaException; a late future of an admin client counts as brokers that are late."""
    if isinstance(error, TimeoutError):
        return Failure.TRANSIENT
    if not isinstance(error, KafkaException):
        return Failure.PERMANENT
    return failure_of_code(error.args[0])


def failure_of_code(error: KafkaError) -> Failure:
    """The same for an error inside an answer, or an event."""
    if error.fatal() or error.txn_requires_abort():
        return Failure.PERMANENT
    if error.code() in _NOT_THERE:
        return Failure.NOT_THERE
    return Failure.TRANSIENT if error.retriable() or error.code() in _TRANSIENT else Failure.PERMANENT


def failure_of_transaction(error: BaseException) -> Failure:
    """The same for a step of a transaction, which may be called again only where the client says so."""
    again = isinstance(error, KafkaException) and error.args[0].retriable()
    return Failure.TRANSIENT if again else Failure.PERMANENT


@contextmanager
def fatal_errors() -> Iterator[None]:
    """The client turns a fatal error in a delivery callback into SystemError: raise the fatal error itself."""
    try:
        yield
    except SystemError as raised:
        if isinstance(raised.__cause__, KafkaException):
            raise raised.__cause__ from raised
        raise


def send(producer: Producer, topic: str, records: Iterable[tuple[str, bytes]], timeout_s: float) -> list[Message]:
    """Send records (key, value); they are on the brokers when this returns, in their order. Raises KafkaException."""
    reports: list[tuple[KafkaError | None, Message]] = []
    count = 0
    for key, value in records:
        while True:
            try:
                producer.produce(topic, value, key, on_delivery=lambda *report: reports.append(report))
                break
            except BufferError:  # the client's queue is full (100,000 messages, or 1 GB)
                producer.poll(_FULL_QUEUE_S)
            except KafkaException:  # at times it only reports that a fatal error came before: flush raises that one
                with fatal_errors():
                    producer.flush(timeout_s)
                raise
        count += 1
    with fatal_errors():
        producer.flush(timeout_s)
    for error, _ in reports:
        if error is not None:
            raise KafkaException(error)
    if len(reports) < count:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))  # noqa: SLF001 - its only name
    return [message for _, message in reports]


def ask_brokers(question: Callable[[float], _Answer], timeout_s: float = TIMEOUT_S) -> _Answer:
    """What a call answers, asked again while it fails for a moment. Raises KafkaException, TimeoutError: its last."""
    return ask(question, failure_of, timeout_s)


def ask_partitions(question: Callable[[float], list[TopicPartition] | None]) -> list[TopicPartition]:
    """The same, for 60 s, for a call that returns an error for each partition."""

    def answered(left_s: float) -> list[TopicPartition]:
        partitions = question(left_s) or []
        for one in partitions:
            if one.error is not None:
                raise KafkaException(one.error)
        return partitions

    return ask_brokers(answered)


def topic_settings(config: Mapping[str, Any], topic: str) -> dict[str, str]:
    """What a topic is set to, asked for 60 s. Raises MissingRight, KafkaException, TimeoutError."""
    return {name: str(entry.value) for name, entry in _described(config, topic, TIMEOUT_S).items()}


def named_setting(config: Mapping[str, Any], topic: str, name: str) -> str:
    """A topic's setting with its value and who set it, for a message; its name alone if it can't be read within 5 s."""
    try:
        return f"{name}={value_and_origin(_described(config, topic, _SOON_S)[name])}"
    except (KafkaException, MissingRight, TimeoutError, KeyError):
        return name


def value_and_origin(entry: Any) -> str:
    """A setting's value, and who set it."""
    return f"{entry.value} ({_SET_BY.get(entry.source, 'set for the brokers')})"


def _described(config: Mapping[str, Any], topic: str, within_s: float) -> Mapping[str, Any]:
    resource = ConfigResource(ResourceType.TOPIC, topic)
    admin = AdminClient(dict(config))  # held until it has answered
    with naming_rights("", topic, "DESCRIBE_CONFIGS"):
        described: Mapping[str, Any] = ask_brokers(
            lambda left_s: admin.describe_configs([resource], request_timeout=left_s)[resource].result(left_s), within_s
        )
    return described


def ask_bounds(client: Consumer, topic: str, partition: int, timeout_s: float = TIMEOUT_S) -> tuple[int, int]:
    """Where a partition begins and ends. Raises as `ask_brokers`."""

    def bounds(left_s: float) -> tuple[int, int]:
        found: tuple[int, int] | None = client.get_watermark_offsets(TopicPartition(topic, partition), left_s)
        if found is None:  # how this call says that its time is over
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))  # noqa: SLF001
        return found

    return ask_brokers(bounds, timeout_s)


_LATE = KafkaError(KafkaError._TIMED_OUT, "the marks topic does not answer")  # noqa: SLF001 - the client's own names
_NO_RECORD = {KafkaError._PARTITION_EOF, KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE}  # noqa: SLF001


class ConfluentMarksTopic:
    """config: the consumer's, of which connection and security are used. Raises BadFilterSetting, KafkaException."""

    def __init__(self, config: Mapping[str, Any], topic: str) -> None:
        shared = connection_of(config)
        self._topic = topic
        _refuse_uncompacted(shared, topic)
        self._settings = {**shared, "enable.idempotence": True, "acks": "all"}
        self._producer = Producer(self._settings)
        reader = {"group.id": "unused", "enable.auto.commit": False, "enable.partition.eof": True}
        self._reader = Consumer({**shared, **reader, "auto.offset.reset": "error"})

    def write(self, group: str, partition: tuple[str, int], marks: HighwaterMarks) -> Stored:
        """Store a version; it is on the brokers when this returns."""
        version = f"{group}/{partition[0]}/{partition[1]}/{uuid.uuid4().hex}"
        try:
            [message] = send(self._producer, self._topic, [(version, pack_marks(marks))], TIMEOUT_S)
        except KafkaException as error:
            if error.args[0].fatal():  # this client sends nothing more
                self._producer = Producer(self._settings)
            raise (missing_right(error.args[0], "", self._topic, "WRITE") or error) from error
        return Stored(int(message.partition() or 0), int(message.offset() or 0), version)

    def read(self, partition: tuple[str, int], stored: Stored) -> HighwaterMarks:
        """The marks of a version. Raises CorruptMarks."""
        self._reader.assign([TopicPartition(self._topic, stored.partition, stored.offset)])
        try:
            message = self._first()
        finally:
            self._reader.unassign()
        if message is None or message.key() != stored.version.encode() or not message.value():
            topic, number = partition
            why = f"its marks {stored.version!r} are not in topic {self._topic!r}: restore that topic"
            raise CorruptMarks(
                f"of the committed position of {topic}-{number}; or seek, which begins with empty marks", why
            )
        return unpack_marks(bytes(message.value() or b""))

    def _first(self) -> Message | None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            message = self._reader.poll(left_s)
            if message is None:
                break
            error = message.error()
            if error is None:
                return message
            if error.code() in _NO_RECORD:
                return None
            if error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
                continue  # the client looks for its group's coordinator, and no group is used here
            if failure_of_code(error) is not Failure.TRANSIENT:
                raise missing_right(error, "", self._topic) or KafkaException(error)
        raise KafkaException(_LATE)

    def delete(self, stored: Stored) -> None:
        """No commit names this version any more."""
        self._producer.produce(self._topic, key=stored.version, partition=stored.partition)
        self._producer.poll(0)

    def close(self) -> None:
        """Marks were confirmed when they were sent; a deletion that fails leaves a version that no commit names."""
        try:
            self._producer.flush(TIMEOUT_S)
        except KafkaException as error:  # raised here, it would hide the error that ended the caller's block
            _LOG.warning("marks topic %s: not all old versions were deleted: %s", self._topic, error)
        finally:
            self._reader.close()


def _refuse_uncompacted(config: Mapping[str, Any], topic: str) -> None:
    if (policy := topic_settings(config, topic)["cleanup.policy"]) != "compact":
        raise BadFilterSetting("marks_topic", topic, f"a topic with cleanup.policy=compact, this has {policy}")


class ConfluentMember:
    """A member of a group, as startpoints ask about it. For one thread at a time.

    config: the consumer's, of which connection and security are used.
    """

    def __init__(self, client: Consumer, config: Mapping[str, Any], group: str) -> None:
        self.client, self.group = client, group
        self._connection = connection_of(config)
        self._ownership = OwnershipCheck(self._ask)

    def facts_of(self, topic: str, partition: int, position: int | None) -> PartitionFacts:
        """A partition and how to look at its log; each look asks brokers for 60 s at most."""
        return PartitionFacts(
            topic, partition, partial(ask_bounds, self.client), self._first_at, position, self.is_held
        )

    def committed(self, partitions: Iterable[TopicPartition]) -> list[TopicPartition]:
        """What the group committed; asks for 60 s. Raises MissingRight, KafkaException."""
        plain = [TopicPartition(one.topic, one.partition) for one in partitions]
        with naming_rights(self.group, plain[0].topic if plain else ""):
            return ask_partitions(lambda left_s: self.client.committed(plain, left_s))

    def is_held(self, topic: str, partition: int) -> bool:
        """Whether the coordinator says that this member has the partition now.

        False while partitions are being given out, for one that was assigned without a group's help, and while no
        answer is there: a later call has the answer.
        """
        return self._ownership.is_held(self.client.memberid() or "", topic, partition)

    def _ask(self, member: str) -> "Future[Held]":
        """In a background thread: it makes a client, which first needs the token of its `oauth_cb`."""
        return ask_in_background(
            lambda: held_by(self._connection, self.group, member), f"pushrep who holds what in {self.group}"
        )

    def _first_at(self, topic: str, partition: int, timestamp_ms: int) -> int | None:
        asked = [TopicPartition(topic, partition, timestamp_ms)]
        [found] = ask_partitions(lambda left_s: self.client.offsets_for_times(asked, left_s))
        return found.offset if found.offset >= 0 else None


def held_by(connection: Mapping[str, Any], group: str, member: str) -> Held:
    """The partitions that the coordinator says the member has; empty without an answer in 5 s, or a token in 10 s."""
    try:
        admin = AdminClient({**connection, "log_level": 0})  # held until it has answered
        asked = admin.describe_consumer_groups([group], request_timeout=ASK_WITHIN_S)
        found = asked[group].result(ASK_WITHIN_S)
    except (KafkaException, TimeoutError):
        return frozenset()
    held = [one.assignment.topic_partitions for one in found.members if one.member_id == member]
    return frozenset((one.topic, one.partition) for partitions in held for one in partitions)


def committed_offset(committed: TopicPartition) -> CommittedOffset:
    """What the group committed of a partition, and what stands beside it.

    Others may write it without a NUL at its end. The client then reads on in its memory; ours is a text.
    """
    try:
        metadata: str | None = committed.metadata
    except UnicodeDecodeError:
        metadata = None
    return CommittedOffset(committed.offset if committed.offset >= 0 else None, metadata)


def is_too_early(error: BaseException) -> bool:
    """Whether a seek failed since the partition has only just come: the client can do it a little later."""
    return isinstance(error, KafkaException) and error.args[0].code() == KafkaError._STATE  # noqa: SLF001 - its only name

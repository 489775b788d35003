"""Which of confluent-kafka's failures pass. `KafkaError.retriable()` speaks of transactions only."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from filtering.consumers.asking import TIMEOUT_S, Failure, ask
from filtering.errors import MissingRight

_Answer = TypeVar("_Answer")

_CONNECTION = (
    # Where the brokers are, and how sockets get there.
    *("bootstrap.servers", "metadata.broker.list", "metadata.recovery.", "client.id", "client.dns.lookup"),
    *("broker.address.", "socket.", "connections.", "reconnect.", "api.version.", "broker.version."),
    # Who they are, and who asks.
    *("security.", "sasl.", "ssl.", "https.", "enable.ssl.", "enable.sasl.", "oauth_cb", "plugin.library.paths"),
    # What is said of it.
    *("log_level", "log.connection.close"),
)
"""How the names begin of librdkafka's settings, and the Python client's, that say how to reach brokers."""
_PASSES = frozenset(
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
        # The way there.
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
"""What a commit says while partitions move between members, or of a member that the group has given up."""


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
    """The judge of KafkaException for `asking.ask`; an admin client's future that is late counts as late brokers."""
    if isinstance(error, TimeoutError):
        return Failure.PASSES
    if not isinstance(error, KafkaException):
        return Failure.STAYS
    return failure_of_code(error.args[0])


def failure_of_code(error: KafkaError) -> Failure:
    """The same for an error inside an answer, or an event."""
    if error.fatal() or error.txn_requires_abort():
        return Failure.STAYS
    if error.code() in _NOT_THERE:
        return Failure.NOT_THERE
    return Failure.PASSES if error.retriable() or error.code() in _PASSES else Failure.STAYS


def failure_of_transaction(error: BaseException) -> Failure:
    """The same for a step of a transaction, which may be called again only where the client says so."""
    again = isinstance(error, KafkaException) and error.args[0].retriable()
    return Failure.PASSES if again else Failure.STAYS


def flush(producer: Producer, timeout_s: float) -> None:
    """The client's `flush`. Raises KafkaException for a fatal error, also where a delivery is reported behind it."""
    with fatal_errors():
        producer.flush(timeout_s)


@contextmanager
def fatal_errors() -> Iterator[None]:
    """A fatal error that the client raises into a delivery callback comes out as SystemError: here as itself."""
    try:
        yield
    except SystemError as raised:
        if isinstance(raised.__cause__, KafkaException):
            raise raised.__cause__ from raised
        raise


def ask_brokers(question: Callable[[float], _Answer], timeout_s: float = TIMEOUT_S) -> _Answer:
    """What a call answers, asked again while it fails for a moment. Raises KafkaException, TimeoutError: its last."""
    return ask(question, failure_of, timeout_s)


def ask_partitions(
    question: Callable[[float], list[TopicPartition] | None], timeout_s: float = TIMEOUT_S
) -> list[TopicPartition]:
    """The same for a call that tells of each partition whether it failed."""

    def answered(left_s: float) -> list[TopicPartition]:
        partitions = question(left_s) or []
        for one in partitions:
            if one.error is not None:
                raise KafkaException(one.error)
        return partitions

    return ask_brokers(answered, timeout_s)


def ask_bounds(client: Consumer, topic: str, partition: int, timeout_s: float = TIMEOUT_S) -> tuple[int, int]:
    """Where a partition begins and ends. Raises as `ask_brokers`."""

    def bounds(left_s: float) -> tuple[int, int]:
        found: tuple[int, int] | None = client.get_watermark_offsets(TopicPartition(topic, partition), left_s)
        if found is None:  # how this call says that its time is over
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))  # noqa: SLF001
        return found

    return ask_brokers(bounds, timeout_s)

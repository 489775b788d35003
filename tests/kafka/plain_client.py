"""A plain producer and consumer: what any user of Kafka would send and see, by librdkafka."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from time import monotonic, sleep
from typing import NamedTuple

from confluent_kafka import (
    TIMESTAMP_CREATE_TIME,
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from filtering.consumers.confluent_client import failure_of, failure_of_code
from filtering.retry import Failure

_QUIET = {"log_level": 0}
_TIMEOUT_S = 120
# A broker that was not heard of for two seconds has no place for a new partition, until it is heard of again.
_NO_PLACE_NOW = {KafkaError.INVALID_REPLICATION_FACTOR, KafkaError.INVALID_REPLICA_ASSIGNMENT}


class NotKnown(Exception):
    """A broker does not have a change yet: a topic, the leaders of its partitions, a setting."""


class Seen(NamedTuple):
    """A record as a consumer sees it. `is_create_time` is false where the broker stamped its own time."""

    offset: int
    timestamp_ms: int
    is_create_time: bool
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


def create_topic(servers: str, topic: str, partitions: int = 1, copies: int = -1, **settings: object) -> None:
    """Create a topic, and wait until all brokers know it, and until a just deleted one of this name is gone.

    copies: -1 for the brokers' default. settings: of the topic, `_` for `.`.
    """
    wanted = NewTopic(topic, partitions, copies, config=_dotted(settings))
    exists = KafkaError.TOPIC_ALREADY_EXISTS
    _changed(servers, lambda admin: admin.create_topics([wanted])[topic], exists, is_waited_for=True)
    wait_known(servers, topic, partitions)


def delete_topic(servers: str, topic: str) -> None:
    """Delete a topic whose name another test may use."""
    _changed(servers, lambda admin: admin.delete_topics([topic])[topic], KafkaError.UNKNOWN_TOPIC_OR_PART)


def add_partitions(servers: str, topic: str, partitions: int) -> None:
    """Add partitions, and wait until all brokers know them."""
    wanted = NewPartitions(topic, partitions)
    _changed(servers, lambda admin: admin.create_partitions([wanted])[topic], KafkaError.INVALID_PARTITIONS)
    wait_known(servers, topic, partitions)


def alter_topic(servers: str, topic: str, **settings: object) -> None:
    """Change settings of a topic, `_` for `.`, and wait until all brokers have them."""
    wanted = _dotted(settings)
    entries = [ConfigEntry(n, v, incremental_operation=AlterConfigOpType.SET) for n, v in wanted.items()]
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
    _changed(servers, lambda admin: admin.incremental_alter_configs([resource])[resource])

    def look(one: AdminClient) -> None:
        asked = ConfigResource(ResourceType.TOPIC, topic)
        found = one.describe_configs([asked])[asked].result(_TIMEOUT_S)
        if (known := {name: found[name].value for name in wanted}) != wanted:
            raise NotKnown(f"{topic} has {known}, not {wanted}")

    _every_broker(servers, look)


def wait_known(servers: str, topic: str, partitions: int) -> None:
    """Return when each of these brokers names a leader for every partition. Raises NotKnown, KafkaException."""

    def look(one: AdminClient) -> None:
        found = one.list_topics(topic, timeout=10).topics[topic]
        led = [
            partition for partition in found.partitions.values() if partition.error is None and partition.leader >= 0
        ]
        if found.error is not None or len(led) < partitions:
            raise NotKnown(f"{len(led)} of {partitions} leaders of {topic} are known: {found.error}")

    _every_broker(servers, look)


def wait_decided(servers: str, topic: str, partitions: int) -> None:
    """Return when no transaction in the topic is open: brokers answer a commit before its end is in each partition.

    Until then who reads what is committed ends before it. Raises NotKnown, KafkaException.
    """
    admin = AdminClient({"bootstrap.servers": servers, **_QUIET})
    asked = {TopicPartition(topic, partition): OffsetSpec.latest() for partition in range(partitions)}
    levels = (IsolationLevel.READ_UNCOMMITTED, IsolationLevel.READ_COMMITTED)

    def look() -> None:
        answers = [admin.list_offsets(asked, isolation_level=level) for level in levels]
        ends, decided = [[one.result(_TIMEOUT_S).offset for one in answer.values()] for answer in answers]
        if ends != decided:
            raise NotKnown(f"{topic} ends at {ends}, and is decided up to {decided}")

    _patiently(look)


def _every_broker(servers: str, look: Callable[[AdminClient], None]) -> None:
    for server in servers.split(","):
        # A client that is new knows one broker: it asks that one.
        _patiently(lambda server=server: look(AdminClient({"bootstrap.servers": server, **_QUIET})))


def _patiently(look: Callable[[], None]) -> None:
    again = retry_if_exception_type((NotKnown, KafkaException))
    Retrying(retry=again, stop=stop_after_delay(_TIMEOUT_S), wait=wait_fixed(0.05), reraise=True)(look)


def _dotted(settings: Mapping[str, object]) -> dict[str, str]:
    return {name.replace("_", "."): str(value) for name, value in settings.items()}


def _changed(
    servers: str, order: Callable[[AdminClient], Future[None]], done: int | None = None, *, is_waited_for: bool = False
) -> None:
    """Repeat a request until brokers have accepted it.

    done: the error code that means it is done already; it is right after a request without an answer. All other errors
    are raised, unless `is_waited_for` says that they pass.
    """
    admin = AdminClient({"bootstrap.servers": servers, **_QUIET})
    again = _NO_PLACE_NOW | ({done} if is_waited_for else set())
    deadline_s, is_doubtful = monotonic() + _TIMEOUT_S, False
    while True:
        try:
            return order(admin).result(_TIMEOUT_S)
        except (KafkaException, TimeoutError) as error:
            code = error.args[0].code() if isinstance(error, KafkaException) else None
            if is_doubtful and code == done:
                return None
            passes = failure_of(error) is not Failure.PERMANENT
            if monotonic() > deadline_s or not (passes or code in again):
                raise
            is_doubtful |= passes
        sleep(0.1)


def plain_producer(servers: str, **settings: object) -> Producer:
    """A producer that sends small batches, in order and once; `settings` are librdkafka's, `_` for `.`."""
    config = {"bootstrap.servers": servers, "batch.size": 4000, "linger.ms": 20, "acks": "all", **_QUIET}
    config["enable.idempotence"] = True  # without it a batch that is sent again goes behind those after it
    return Producer(config | {name.replace("_", "."): value for name, value in settings.items()})


def send(producer: Producer, topic: str, records: Iterable[tuple[bytes | None, bytes | None]], **each: object) -> None:
    """Send (key, value) pairs and wait until the broker has them; `each` goes to every `produce`."""
    for key, value in records:
        producer.produce(topic, key=key, value=value, **each)
    assert producer.flush(_TIMEOUT_S) == 0, "the broker took everything"


def consume(servers: str, topic: str, partition: int = 0) -> list[Seen]:
    """Everything in a partition, also of aborted transactions, checked against its CRC by the consumer."""
    return consume_all(servers, topic, [partition])[partition]


def consume_all(servers: str, topic: str, partitions: Sequence[int]) -> dict[int, list[Seen]]:
    """The same of several partitions, by one consumer."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "plain",
            "auto.offset.reset": "earliest",  # what retention has cut is not waited for
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,  # a partition's end is told when the broker has waited so long for more
            "isolation.level": "read_uncommitted",
            "check.crcs": True,
            **_QUIET,
        }
    )
    try:
        consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
        found: dict[int, list[Seen]] = {partition: [] for partition in partitions}
        for partition, seen in _to_the_ends(consumer, len(partitions)):
            found[partition].append(seen)
        return found
    finally:
        consumer.close()


def _to_the_ends(consumer: Consumer, left: int) -> Iterator[tuple[int, Seen]]:
    while left:
        message = consumer.poll(_TIMEOUT_S)
        assert message is not None, f"nothing came for {_TIMEOUT_S} s"
        if (error := message.error()) is not None:
            if failure_of_code(error) is Failure.TRANSIENT:
                continue  # an event: the client goes on by itself
            assert error.code() == KafkaError._PARTITION_EOF, error
            left -= 1
            continue
        kind, time = message.timestamp()
        headers = tuple(message.headers() or ())
        is_create_time = kind == TIMESTAMP_CREATE_TIME
        seen = Seen(message.offset(), time, is_create_time, message.key(), message.value(), headers)
        yield message.partition(), seen

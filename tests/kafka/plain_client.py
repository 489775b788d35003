"""A plain producer and consumer: what any user of Kafka would send and see, by librdkafka."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from confluent_kafka import TIMESTAMP_CREATE_TIME, Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourceType,
)
from tenacity import Retrying, retry_if_exception, retry_if_exception_type, stop_after_delay, wait_fixed

from filtering.consumers.asking import Failure
from filtering.consumers.confluent_asking import failure_of_code

_QUIET = {"log_level": 0}
_TIMEOUT_S = 60


class NotKnown(Exception):
    """A broker does not know yet what was changed: a topic, who leads its partitions, a setting."""


class Seen(NamedTuple):
    """A record as a consumer sees it. `is_create_time` is false where the broker stamped its own time."""

    offset: int
    timestamp_ms: int
    is_create_time: bool
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


def create_topic(servers: str, topic: str, partitions: int = 1, copies: int = -1, **settings: object) -> None:
    """Make a topic that every broker knows when this returns; one of this name that was just deleted is waited for.

    `copies` -1: as many as the brokers' default; `settings` are its own, `_` for `.`.
    """
    admin = AdminClient({"bootstrap.servers": servers, **_QUIET})
    wanted = NewTopic(topic, partitions, copies, config=_dotted(settings))
    again = Retrying(
        retry=retry_if_exception(_is_deleting), stop=stop_after_delay(_TIMEOUT_S), wait=wait_fixed(0.1), reraise=True
    )
    again(lambda: admin.create_topics([wanted])[topic].result(_TIMEOUT_S))
    wait_known(servers, topic, partitions)


def add_partitions(servers: str, topic: str, partitions: int) -> None:
    """More partitions, which every broker knows when this returns."""
    admin = AdminClient({"bootstrap.servers": servers, **_QUIET})
    admin.create_partitions([NewPartitions(topic, partitions)])[topic].result(_TIMEOUT_S)
    wait_known(servers, topic, partitions)


def alter_topic(servers: str, topic: str, **settings: object) -> None:
    """Settings of a topic, `_` for `.`, which every broker knows when this returns."""
    wanted = _dotted(settings)
    entries = [ConfigEntry(n, v, incremental_operation=AlterConfigOpType.SET) for n, v in wanted.items()]
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
    admin = AdminClient({"bootstrap.servers": servers, **_QUIET})
    admin.incremental_alter_configs([resource])[resource].result(_TIMEOUT_S)

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


def _every_broker(servers: str, look: Callable[[AdminClient], None]) -> None:
    for server in servers.split(","):
        again = Retrying(
            retry=retry_if_exception_type((NotKnown, KafkaException)),
            stop=stop_after_delay(_TIMEOUT_S),
            wait=wait_fixed(0.05),
            reraise=True,
        )
        # A client that is new knows one broker: it asks that one.
        again(lambda server=server: look(AdminClient({"bootstrap.servers": server, **_QUIET})))


def _dotted(settings: Mapping[str, object]) -> dict[str, str]:
    return {name.replace("_", "."): str(value) for name, value in settings.items()}


def _is_deleting(error: BaseException) -> bool:
    return isinstance(error, KafkaException) and error.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS


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
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "plain",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_uncommitted",
            "check.crcs": True,
            **_QUIET,
        }
    )
    try:
        consumer.assign([TopicPartition(topic, partition, 0)])
        return list(_to_the_end(consumer))
    finally:
        consumer.close()


def _to_the_end(consumer: Consumer) -> Iterator[Seen]:
    while True:
        message = consumer.poll(_TIMEOUT_S)
        assert message is not None, f"nothing came for {_TIMEOUT_S} s"
        if (error := message.error()) is not None:
            if failure_of_code(error) is Failure.PASSES:
                continue  # an event: the client goes on by itself
            assert error.code() == KafkaError._PARTITION_EOF, error
            return
        kind, time = message.timestamp()
        headers = tuple(message.headers() or ())
        is_create_time = kind == TIMESTAMP_CREATE_TIME
        yield Seen(message.offset(), time, is_create_time, message.key(), message.value(), headers)

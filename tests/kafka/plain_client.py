"""A plain producer and consumer: what any user of Kafka would send and see, by librdkafka."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from confluent_kafka import TIMESTAMP_CREATE_TIME, Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

_QUIET = {"log_level": 0}
_TIMEOUT_S = 30


class Seen(NamedTuple):
    """A record as a consumer sees it. `is_create_time` is false where the broker stamped its own time."""

    offset: int
    timestamp_ms: int
    is_create_time: bool
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


def create_topic(servers: str, topic: str, partitions: int = 1, copies: int = -1, **settings: object) -> None:
    """Make a topic; `copies` -1: as many as the brokers' default; `settings` are its own, `_` for `.`."""
    config = {name.replace("_", "."): str(value) for name, value in settings.items()}
    admin = AdminClient({"bootstrap.servers": servers, **_QUIET})
    admin.create_topics([NewTopic(topic, partitions, copies, config=config)])[topic].result(_TIMEOUT_S)


def plain_producer(servers: str, **settings: object) -> Producer:
    """A producer that sends small batches; `settings` are librdkafka's, `_` for `.`."""
    config = {"bootstrap.servers": servers, "batch.size": 4000, "linger.ms": 20, "acks": "all", **_QUIET}
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
            assert error.code() == KafkaError._PARTITION_EOF, error
            return
        kind, time = message.timestamp()
        headers = tuple(message.headers() or ())
        is_create_time = kind == TIMESTAMP_CREATE_TIME
        yield Seen(message.offset(), time, is_create_time, message.key(), message.value(), headers)

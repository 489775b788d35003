"""A plain producer and consumer: what any user of Kafka would send and see, by librdkafka."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from confluent_kafka import TIMESTAMP_CREATE_TIME, Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic
from tenacity import Retrying, retry_if_exception, retry_if_exception_type, stop_after_delay, wait_fixed

_QUIET = {"log_level": 0}
_TIMEOUT_S = 60


class NotKnown(Exception):
    """A broker does not know a new topic, or who leads its partitions."""


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
    config = {name.replace("_", "."): str(value) for name, value in settings.items()}
    admin = AdminClient({"bootstrap.servers": servers, **_QUIET})
    wanted = NewTopic(topic, partitions, copies, config=config)
    again = Retrying(
        retry=retry_if_exception(_is_deleting), stop=stop_after_delay(_TIMEOUT_S), wait=wait_fixed(0.1), reraise=True
    )
    again(lambda: admin.create_topics([wanted])[topic].result(_TIMEOUT_S))
    for server in servers.split(","):
        wait_known(server, topic, partitions)


def wait_known(server: str, topic: str, partitions: int) -> None:
    """Return when this broker names a leader for each partition. Raises NotKnown, KafkaException."""
    for attempt in Retrying(
        retry=retry_if_exception_type((NotKnown, KafkaException)),
        stop=stop_after_delay(_TIMEOUT_S),
        wait=wait_fixed(0.05),
        reraise=True,
    ):
        with attempt:
            # A client knows one broker when it is new: it asks that one.
            found = AdminClient({"bootstrap.servers": server, **_QUIET}).list_topics(topic, timeout=10).topics[topic]
            led = [one for one in found.partitions.values() if one.error is None and one.leader >= 0]
            if found.error is not None or len(led) < partitions:
                raise NotKnown(f"{server} knows {len(led)} of {partitions} leaders of {topic}: {found.error}")


def _is_deleting(error: BaseException) -> bool:
    return isinstance(error, KafkaException) and error.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS


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


def add_partitions(servers: str, topic: str, partitions: int) -> None:
    """Let a topic have so many, and wait until every broker says so."""
    admin = AdminClient({"bootstrap.servers": servers, **_QUIET})
    admin.create_partitions([NewPartitions(topic, partitions)])[topic].result(_TIMEOUT_S)
    for attempt in Retrying(stop=stop_after_delay(_TIMEOUT_S), wait=wait_fixed(0.05), reraise=True):
        with attempt:
            assert len(admin.list_topics(topic, timeout=_TIMEOUT_S).topics[topic].partitions) == partitions

"""Producers for services that keep their client, on a real broker: order and prefix hold, whatever fails.

The judge is the replay filter: what a plain consumer reads, filtered, is every record once and in order.
"""

import asyncio
import itertools
import time

import pytest
from aiokafka import AIOKafkaProducer

from filtering import METADATA_HEADER, ReplayFilter, StreamMetadata
from partitioner import NotDelivered, PartitionStopped, SourcePartitionPartitioner, TopicUnfit
from tests.kafka.plain_client import add_partitions, alter_topic, consume, create_topic

pytestmark = [pytest.mark.java, pytest.mark.slow]

PID, WAIT_S = 7, 120
_topics = (f"producer-{number}" for number in itertools.count())


@pytest.fixture
def topic(broker):
    name = next(_topics)
    create_topic(broker.bootstrap_servers, name, partitions=2)
    return name


def confluent(broker, topic, settings=None, **more):
    from partitioner.confluent import SourcePartitionProducer

    config = {"bootstrap.servers": broker.bootstrap_servers, "log_level": 0, "linger.ms": 5}
    return SourcePartitionProducer({**config, **(settings or {})}, topic, **more)


def filtered(broker, topic, partition, carrier="key"):
    """The source offsets that a filtering reader sees, by source partition; and the number of records in the topic."""
    rule, kept, raw = ReplayFilter(), {}, 0
    for record in consume(broker.bootstrap_servers, topic, partition):
        raw += 1
        packed = record.key if carrier == "key" else dict(record.headers)[METADATA_HEADER]
        if rule.admit(packed, partition):
            metadata = StreamMetadata.unpack(packed)
            kept.setdefault(metadata.partition, []).append(metadata.offset)
            assert record.value == b"%d" % metadata.offset
    return kept, raw


def produce(producer, offsets, sources=(0, 1, 2, 3)):
    for offset in offsets:
        for source in sources:
            producer.produce(StreamMetadata(PID, source, offset), b"%d" % offset)


def test_every_record_arrives_once_in_its_partition(broker, topic):
    delivered = []
    with confluent(broker, topic) as producer:
        assert producer.partition_count == 2
        for offset in range(500):
            for source in range(4):
                producer.produce(
                    StreamMetadata(PID, source, offset),
                    b"%d" % offset,
                    on_delivery=lambda metadata, message: delivered.append((metadata, message.offset())),
                )
        producer.flush()
        assert len(producer) == 0
    assert len(delivered) == 2000
    for partition in (0, 1):
        kept, raw = filtered(broker, topic, partition)
        assert kept == {partition: list(range(500)), partition + 2: list(range(500))}
        assert raw == 1000


def test_a_full_queue_is_waited_for_and_nothing_is_lost_or_told_twice(broker, topic):
    told = []
    with confluent(broker, topic, {"queue.buffering.max.messages": 20}) as producer:
        for offset in range(300):
            for source in range(4):
                metadata = StreamMetadata(PID, source, offset)
                producer.produce(metadata, b"%d" % offset, on_delivery=lambda metadata, _: told.append(metadata))
        producer.flush(WAIT_S)
    assert sorted(told) == [StreamMetadata(PID, source, offset) for source in range(4) for offset in range(300)]
    for partition in (0, 1):
        assert filtered(broker, topic, partition)[0] == {partition: list(range(300)), partition + 2: list(range(300))}


def test_who_only_produces_is_told_of_deliveries(broker, topic):
    told = []
    with confluent(broker, topic) as producer:
        deadline_s = time.monotonic() + WAIT_S
        for offset in itertools.count():
            producer.produce(StreamMetadata(PID, 0, offset), b"%d" % offset, on_delivery=lambda *one: told.append(one))
            if told:
                break
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        metadata, message = told[0]
        assert (metadata, message.offset(), message.key()) == (StreamMetadata(PID, 0, 0), 0, metadata.pack())
        producer.flush(WAIT_S)


def poll_until_it_raises(producer):
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        producer.poll(0.1)


def test_a_callback_that_raises_loses_no_other_and_comes_out_once_all_were_called(broker, topic, caplog):
    called = []

    def call(metadata, _message):
        called.append(metadata.offset)
        if metadata.offset % 25 == 3:
            raise ValueError(metadata.offset)

    with confluent(broker, topic) as producer:
        for offset in range(100):
            producer.produce(StreamMetadata(PID, 0, offset), b"%d" % offset, on_delivery=call)
        with pytest.raises(ValueError, match=r"^3$"):
            producer.flush(WAIT_S)
        assert called == list(range(100)), "each callback is called once, in order"
        assert [offset for offset in (28, 53, 78) if f"offset={offset}" in caplog.text] == [28, 53, 78]
        producer.flush(WAIT_S)  # the error was raised once
        producer.produce(StreamMetadata(PID, 0, 103), b"103", on_delivery=call)
        with pytest.raises(ValueError, match=r"^103$"):  # though `produce` itself may have called back already
            poll_until_it_raises(producer)
        for offset in range(104, 130):  # what `produce` itself serves is no failure of the record that it takes
            producer.produce(StreamMetadata(PID, 0, offset), b"%d" % offset, on_delivery=call)
            time.sleep(0.001)
        with pytest.raises(ValueError, match=r"^128$"):
            producer.close(WAIT_S)
    assert called == [*range(100), *range(103, 130)]


def test_the_header_carrier_leaves_the_key_to_the_business(broker, topic):
    with confluent(broker, topic, carrier="header") as producer:
        old = [("stream-metadata", b"of the hop before"), ("trace", b"1")]
        producer.produce(StreamMetadata(PID, 1, 0), b"0", key=b"customer", headers=old)
    [record] = consume(broker.bootstrap_servers, topic, 1)
    assert record.key == b"customer"
    assert record.headers == (("trace", b"1"), (METADATA_HEADER, StreamMetadata(PID, 1, 0).pack()))
    assert filtered(broker, topic, 1, carrier="header") == ({1: [0]}, 1)


def test_a_topic_that_grows_changes_nothing_and_one_that_shrank_is_another(broker, topic):
    with confluent(broker, topic) as producer:
        produce(producer, range(10))
        add_partitions(broker.bootstrap_servers, topic, 6)
        produce(producer, range(10, 20))
        producer.flush()
    with confluent(broker, topic, partition_count=producer.partition_count) as again:
        produce(again, range(20, 30))
    for partition in (0, 1):
        assert filtered(broker, topic, partition)[0] == {partition: list(range(30)), partition + 2: list(range(30))}
    assert all(consume(broker.bootstrap_servers, topic, partition) == [] for partition in range(2, 6))
    with pytest.raises(TopicUnfit, match="partition_count=7"):
        confluent(broker, topic, partition_count=7)


def test_topics_that_cannot_hold_the_promise_are_refused(broker):
    with pytest.raises(TopicUnfit, match="does not exist"):
        confluent(broker, "nobody-made-this")
    create_topic(broker.bootstrap_servers, name := next(_topics), cleanup_policy="compact")
    with pytest.raises(TopicUnfit, match="compact"):
        confluent(broker, name)


def test_a_record_that_the_topic_refuses_stops_its_partition_until_it_is_mended(broker):
    create_topic(broker.bootstrap_servers, name := next(_topics), partitions=2, max_message_bytes=2000)
    with confluent(broker, name, {"batch.num.messages": 1}) as producer:
        produce(producer, range(5))
        producer.produce(StreamMetadata(PID, 0, 5), bytes(3000))
        produce(producer, range(5, 8), sources=(1,))
        with pytest.raises(PartitionStopped) as stopped:
            producer.flush()
        assert (stopped.value.partition, stopped.value.metadata.offset) == (0, 5)
        with pytest.raises(PartitionStopped):
            producer.produce(StreamMetadata(PID, 0, 6), b"6")
        produce(producer, range(8, 10), sources=(1,))
        assert list(producer.stopped) == [0]
        alter_topic(broker.bootstrap_servers, name, max_message_bytes=9000)
        producer.retry(0)
        producer.produce(StreamMetadata(PID, 0, 6), b"6")
        producer.flush()
    offsets = [StreamMetadata.unpack(r.key).offset for r in consume(broker.bootstrap_servers, name) if r.key[11] == 0]
    assert sorted(set(offsets)) == list(range(7))
    assert offsets.index(5) < offsets.index(6), "nothing went past the record that failed"
    assert filtered(broker, name, 1)[0] == {1: list(range(10)), 3: list(range(5))}


def test_of_a_refused_batch_the_guilty_record_is_named(broker):
    """faults S5, B1: what is before it in its batch is in the log; another partition's records, refused together as one
    batch that is too large, go through.
    """
    create_topic(broker.bootstrap_servers, name := next(_topics), partitions=2, max_message_bytes=2000)
    ahead_ms = time.time_ns() // 1_000_000 + 7_200_000
    with confluent(broker, name, {"linger.ms": 200}) as producer:
        for n in range(20):
            producer.produce(StreamMetadata(PID, 0, n), b"%d" % n, timestamp_ms=ahead_ms if n == 11 else None)
            producer.produce(StreamMetadata(PID, 1, n), b"%d" % n, headers=[("h", bytes(150))])
        with pytest.raises(PartitionStopped, match=f"its timestamp is {ahead_ms} ms") as stopped:
            producer.flush()
        assert "message.timestamp.after.max.ms=3600000 (the default)" in str(stopped.value)
        assert (stopped.value.partition, stopped.value.metadata.offset) == (0, 11)
        assert filtered(broker, name, 0)[0] == {0: list(range(11))}
        assert filtered(broker, name, 1)[0] == {1: list(range(20))}
        alter_topic(broker.bootstrap_servers, name, message_timestamp_after_max_ms=9_000_000)
        producer.retry(0)
        producer.flush()
    assert filtered(broker, name, 0)[0] == {0: list(range(20))}


def test_a_broker_that_is_killed_loses_nothing(broker, topic):
    with confluent(broker, topic, {"socket.timeout.ms": 3000}) as producer:
        produce(producer, range(200))
        producer.flush()
        produce(producer, range(200, 400))
        broker.kill()
        produce(producer, range(400, 600))
        with pytest.raises(NotDelivered):
            producer.flush(0)
        broker.start()
        broker.wait_ready()
        produce(producer, range(600, 800))
        producer.flush(WAIT_S)
    for partition in (0, 1):
        assert filtered(broker, topic, partition)[0] == {partition: list(range(800)), partition + 2: list(range(800))}


def test_what_follows_a_first_batch_that_is_refused_does_not_come_before_it(broker, topic):
    """A broker takes any first sequence number of a client that it does not know: each new one's first batch counts."""
    alter_topic(broker.bootstrap_servers, topic, message_timestamp_after_max_ms=3_600_000)
    ahead_ms = int(1000 * time.time()) + 7_200_000
    with confluent(broker, topic, {"batch.num.messages": 2, "linger.ms": 50}) as producer:
        for n in range(6):
            producer.produce(StreamMetadata(PID, 0, n), b"%d" % n, timestamp_ms=None if n else ahead_ms)
        with pytest.raises(PartitionStopped):
            producer.flush(WAIT_S)
        alter_topic(broker.bootstrap_servers, topic, message_timestamp_after_max_ms=9_000_000)
        producer.retry(0)
        producer.flush(WAIT_S)
    assert filtered(broker, topic, 0) == ({0: list(range(6))}, 6)


@pytest.mark.filterwarnings("ignore:.*Use files:DeprecationWarning")  # by the client, at its import
def test_kafka_pythons_partitioner_places_by_the_source_partition(broker, topic):
    from kafka import KafkaProducer

    from partitioner.kafka_python import SourcePartitionPartitioner

    place = SourcePartitionPartitioner()
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap_servers, partitioner=place, acks="all")
    for offset in range(20):
        for source in range(4):
            producer.send(topic, key=StreamMetadata(PID, source, offset).pack(), value=b"%d" % offset)
    producer.flush(WAIT_S)
    producer.close()
    assert place.partition_counts == {topic: 2}
    for partition in (0, 1):
        assert filtered(broker, topic, partition)[0] == {partition: list(range(20)), partition + 2: list(range(20))}


def test_the_plugin_of_aiokafka_goes_on_using_as_many_partitions_as_it_met_first(broker, topic):
    """Contract, partitioner: "identity when n > s"; "n is pinned at first use, kept with the producer's state"."""

    async def story(place, offsets):
        settings = {"bootstrap_servers": broker.bootstrap_servers, "enable_idempotence": True, "partitioner": place}
        async with AIOKafkaProducer(**settings) as producer:
            for offset in offsets:
                for source in range(4):
                    await producer.send_and_wait(topic, b"%d" % offset, StreamMetadata(PID, source, offset).pack())

    asyncio.run(story(first := SourcePartitionPartitioner(), range(10)))
    add_partitions(broker.bootstrap_servers, topic, 6)
    asyncio.run(story(SourcePartitionPartitioner(partition_count=first.partition_count), range(10, 20)))
    for partition in (0, 1):
        assert filtered(broker, topic, partition)[0] == {partition: list(range(20)), partition + 2: list(range(20))}
    assert all(consume(broker.bootstrap_servers, topic, partition) == [] for partition in range(2, 6))

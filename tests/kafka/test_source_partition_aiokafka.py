"""aiokafka's producer and both clients' plugins on a real broker: what fails in the middle, and topics that grow.

The judge is the replay filter, as in test_source_partition_producer.py.
"""

import asyncio
import contextlib
import itertools
import time

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from filtering import METADATA_HEADER, StreamMetadata
from partitioner import (
    BadPartitionerSetting,
    NoSuchTopic,
    OffsetNotAbove,
    PartitionStopped,
    TopicCompacted,
    TopicShrunk,
)
from partitioner.aiokafka import SourcePartitionPartitioner
from tests.kafka.plain_client import add_partitions, alter_topic, consume, create_topic
from tests.kafka.test_source_partition_producer import PID, WAIT_S, aio, filtered

pytestmark = [pytest.mark.java, pytest.mark.slow]

_topics = (f"producer-aiokafka-{number}" for number in itertools.count())


@pytest.fixture
def topic(broker):
    create_topic(broker.bootstrap_servers, name := next(_topics), partitions=2)
    return name


async def send(producer, offsets, sources=(0, 1, 2, 3)):
    for offset in offsets:
        for source in sources:
            await producer.send(StreamMetadata(PID, source, offset), b"%d" % offset)


def test_a_topic_that_grows_changes_nothing_and_one_that_shrank_is_another(broker, topic):
    """Contract: "n is pinned at first use ...; partitions added later are not used"."""

    async def story():
        async with aio(broker, topic) as producer:
            await send(producer, range(10))
            await producer.flush()
            await asyncio.to_thread(add_partitions, broker.bootstrap_servers, topic, 6)
            await send(producer, range(10, 20))
        async with aio(broker, topic, partition_count=producer.partition_count) as again:
            await send(again, range(20, 30))
        with pytest.raises(TopicShrunk):
            await aio(broker, topic, partition_count=7).start()

    asyncio.run(story())
    for partition in (0, 1):
        assert filtered(broker, topic, partition)[0] == {partition: list(range(30)), partition + 2: list(range(30))}
    assert all(consume(broker.bootstrap_servers, topic, partition) == [] for partition in range(2, 6))


def test_a_record_that_the_topic_refuses_stops_its_partition_until_it_is_mended(broker):
    """Contract: "After a failed delivery it sends nothing more to that partition until the failed record is
    through".
    """
    create_topic(broker.bootstrap_servers, name := next(_topics), partitions=2, max_message_bytes=2000)

    async def story():
        async with aio(broker, name) as producer:
            await send(producer, range(5))
            await producer.flush()
            await producer.send(StreamMetadata(PID, 0, 5), bytes(3000))
            await send(producer, range(5, 8), sources=(1,))
            with pytest.raises(PartitionStopped) as stopped:
                await producer.flush()
            assert (stopped.value.partition, stopped.value.metadata.offset) == (0, 5)
            with pytest.raises(PartitionStopped):
                await producer.send(StreamMetadata(PID, 0, 6), b"6")
            await send(producer, range(8, 10), sources=(1,))
            assert list(producer.stopped) == [0]
            await asyncio.to_thread(alter_topic, broker.bootstrap_servers, name, max_message_bytes=9000)
            producer.retry(0)
            await producer.send(StreamMetadata(PID, 0, 6), b"6")
            await producer.flush()

    asyncio.run(story())
    offsets = [StreamMetadata.unpack(r.key).offset for r in consume(broker.bootstrap_servers, name) if r.key[11] == 0]
    assert sorted(set(offsets)) == list(range(7))
    assert offsets.index(5) < offsets.index(6), "nothing went past the record that failed"
    assert filtered(broker, name, 1)[0] == {1: list(range(10)), 3: list(range(5))}


async def refused_for_good(make):
    """Started again while the broker is only too slow for its patience."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(KafkaError):
            await make().start()


def test_what_cannot_hold_the_promise_is_refused(broker, topic):
    async def story():
        with pytest.raises(NoSuchTopic):
            await refused_for_good(lambda: aio(broker, "nobody-made-this", request_timeout_ms=500))
        create_topic(broker.bootstrap_servers, compacted := next(_topics), cleanup_policy="compact")
        with pytest.raises(TopicCompacted, match="compact"):
            await aio(broker, compacted).start()
        async with aio(broker, topic) as producer:
            await send(producer, [5], sources=(0,))
            with pytest.raises(OffsetNotAbove):
                await producer.send(StreamMetadata(PID, 0, 5), b"5")
            with pytest.raises(BadPartitionerSetting, match="carrier"):
                await producer.send(StreamMetadata(PID, 0, 6), b"6", key=b"customer")

    asyncio.run(story())
    assert filtered(broker, topic, 0)[0] == {0: [5]}


def test_the_header_carrier_leaves_the_key_to_the_business(broker, topic):
    async def story():
        async with aio(broker, topic, carrier="header") as producer:
            old = [(METADATA_HEADER, b"of the hop before"), ("trace", b"1")]
            await producer.send(StreamMetadata(PID, 1, 0), b"0", key=b"customer", headers=old)

    asyncio.run(story())
    [record] = consume(broker.bootstrap_servers, topic, 1)
    assert record.key == b"customer"
    assert record.headers == (("trace", b"1"), (METADATA_HEADER, StreamMetadata(PID, 1, 0).pack()))


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

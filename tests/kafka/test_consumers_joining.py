"""A growing group: members join one after the other while all read and commit; and the queries about positions.

The judge is independent: a record counts if it was yielded and then committed by the member that had its partition.
Each record has to count once, and in order, in any rebalance.
"""

import asyncio
import itertools
import threading
from collections import defaultdict
from contextlib import suppress

import pytest

from filtering import StreamMetadata
from filtering.consumers import CommitFailed, PositionUnknown
from tests.kafka.plain_client import create_topic, plain_producer
from tests.kafka.test_filtering_consumers import SESSION_MS, WAIT_S, consumer, fill, turns, until

pytestmark = [pytest.mark.java, pytest.mark.slow]

MEMBERS, PARTITIONS, PID = 5, 10, 7
_names = (f"joining-{number}" for number in itertools.count())
PROTOCOLS = {
    "eager": {},
    "cooperative": {"partition.assignment.strategy": "cooperative-sticky"},
    "consumer protocol": {"group.protocol": "consumer"},
}


class Counted:
    """The records that one member yielded; and of all members, those that were committed afterwards."""

    def __init__(self, everywhere):
        self._everywhere, self._open = everywhere, defaultdict(list)

    def yielded(self, partition, key):
        metadata = StreamMetadata.unpack(key)
        assert metadata.partition == partition
        self._open[partition].append(metadata.offset)

    def committed(self):
        for partition, offsets in self._open.items():
            self._everywhere[partition].extend(offsets)
        self._open.clear()

    def gone(self, partitions):
        for one in partitions:
            self._open.pop(one.partition, None)


class Source:
    """Records for all partitions, some of them twice, as a producer that begins again sends them."""

    def __init__(self, broker, topic):
        self._producer, self._topic, self.count = plain_producer(broker.bootstrap_servers), topic, 0

    def send(self):
        for partition in range(PARTITIONS):
            for offset in {max(0, self.count - 3), self.count}:
                key = StreamMetadata(PID, partition, offset).pack()
                self._producer.produce(self._topic, key=key, value=b"", partition=partition)
        self.count += 1
        self._producer.poll(0.05)

    def flush(self):
        assert self._producer.flush(WAIT_S) == 0


def has_all(everywhere, count):
    return sum(map(len, list(everywhere.values()))) >= count * PARTITIONS


def judged(everywhere, count):
    assert everywhere == {partition: list(range(count)) for partition in range(PARTITIONS)}


@pytest.mark.parametrize(
    ("protocol", "asynchronous"),
    [
        ("eager", False),
        ("cooperative", False),
        pytest.param("consumer protocol", False, marks=pytest.mark.long),
        ("consumer protocol", True),
    ],
)
def test_five_members_join_one_after_the_other_and_each_record_counts_once(broker, protocol, asynchronous):
    create_topic(broker.bootstrap_servers, topic := next(_names), partitions=PARTITIONS)
    source, everywhere = Source(broker, topic), defaultdict(list)
    stopping, joined, failures = threading.Event(), [threading.Event() for _ in range(MEMBERS)], []

    def member(number):
        mine = Counted(everywhere)

        def revoked(one, partitions):
            with suppress(CommitFailed):
                one.commit()
                mine.committed()
            mine.gone(partitions)

        def read(reader):
            for message in reader.consume(100, 0.1):
                if message.error() is None:
                    mine.yielded(message.partition(), message.key())
            if asynchronous:
                # What is read while it is under way would count too early.
                with suppress(CommitFailed):
                    outcomes = []
                    if reader.commit_async(outcomes.append):
                        reader.commit()
                        assert [isinstance(one, CommitFailed | None) for one in outcomes] == [True]
                        mine.committed()
            else:
                with suppress(CommitFailed):
                    reader.commit()
                    mine.committed()

        try:
            with consumer(broker, topic, settings=PROTOCOLS[protocol]) as reader:
                reader.subscribe(
                    [topic],
                    on_assign=lambda _, partitions: partitions and joined[number].set(),
                    on_revoke=revoked,
                    on_lost=lambda _, partitions: mine.gone(partitions),
                )
                while not stopping.is_set():
                    read(reader)
        except BaseException as error:  # noqa: BLE001 - the test says it
            failures.append((number, error))

    threads = [threading.Thread(target=member, args=(number,)) for number in range(MEMBERS)]
    try:
        for thread, has_joined in zip(threads, joined, strict=True):
            thread.start()
            for _ in turns():
                source.send()
                if has_joined.is_set() or failures:
                    break
        source.flush()
        for _ in turns():
            if has_all(everywhere, source.count) or failures or stopping.wait(0.05):
                break
    finally:
        stopping.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join(WAIT_S)
    assert failures == []
    assert all(one.is_set() for one in joined)
    judged(everywhere, source.count)


def test_five_members_of_aiokafka_join_one_after_the_other_and_each_record_counts_once(broker):
    from filtering.consumers.aiokafka import ReplayFilteredConsumer

    create_topic(broker.bootstrap_servers, topic := next(_names), partitions=PARTITIONS)
    source, everywhere = Source(broker, topic), defaultdict(list)

    async def member(has_joined, stopping):
        mine = Counted(everywhere)

        async def revoked(one, partitions):
            with suppress(CommitFailed):
                await one.commit()
                mine.committed()
            mine.gone(partitions)

        async def assigned(_, partitions):
            if partitions:
                has_joined.set()

        async with ReplayFilteredConsumer(
            topic, group_id=topic, bootstrap_servers=broker.bootstrap_servers, auto_offset_reset="earliest",
            heartbeat_interval_ms=300, session_timeout_ms=SESSION_MS, on_assign=assigned, on_revoke=revoked,
        ) as reader:  # fmt: skip
            while not stopping.is_set():
                for partition, records in (await reader.getmany(timeout_ms=100)).items():
                    for record in records:
                        mine.yielded(partition.partition, record.key)
                with suppress(CommitFailed):
                    await reader.commit()
                    mine.committed()

    async def story():
        stopping, members = asyncio.Event(), []
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
            for _ in range(MEMBERS):
                has_joined = asyncio.Event()
                members.append(group.create_task(member(has_joined, stopping)))
                while not has_joined.is_set():
                    source.send()
                    await asyncio.sleep(0.05)
            source.flush()
            while not has_all(everywhere, source.count):  # noqa: ASYNC110 - other tasks fill it
                await asyncio.sleep(0.05)
            stopping.set()

    asyncio.run(story())
    judged(everywhere, source.count)


def test_an_asynchronous_commit_stores_what_was_yielded_before_it(broker):
    from confluent_kafka import TopicPartition

    create_topic(broker.bootstrap_servers, topic := next(_names), partitions=1)
    fill(broker, topic, 0, [*range(20), *range(10)])
    outcomes, place = [], TopicPartition(topic, 0)
    with consumer(broker, topic) as reader:
        reader.subscribe([topic])
        until(reader, 20)
        assert reader.committed([place])[0].offset < 0
        assert reader.commit_async(outcomes.append)
        fill(broker, topic, 0, range(15, 25))
        until(reader, 5)
        for _ in turns():
            assert reader.consume(10, 0.1) == []
            if outcomes:
                break
        stored = reader.committed([place])[0].offset
        assert (outcomes, 20 <= stored <= 30, reader.position([place])[0].offset) == ([None], True, 40)
        assert reader.commit_async(outcomes.append)
    assert outcomes == [None, None], "closing waits for what is under way"
    with consumer(broker, topic) as again:
        again.subscribe([topic])
        fill(broker, topic, 0, range(20, 27))
        assert until(again, 2) == {0: [25, 26]}


def test_paused_partitions_are_not_read_until_they_are_resumed(broker):
    from confluent_kafka import TopicPartition

    create_topic(broker.bootstrap_servers, topic := next(_names), partitions=2)
    first, second = TopicPartition(topic, 0), TopicPartition(topic, 1)
    for partition in (0, 1):
        fill(broker, topic, partition, range(10))
    with consumer(broker, topic) as reader:
        reader.subscribe([topic])
        until(reader, 20)
        reader.pause([first])
        for partition in (0, 1):
            fill(broker, topic, partition, range(5, 20))
        assert until(reader, 10) == {1: list(range(10, 20))}
        assert [one.offset for one in reader.position([first, second])] == [10, 25]
        reader.commit()
        assert [one.offset for one in reader.committed([first, second])] == [10, 25]
        reader.resume([first])
        assert until(reader, 10) == {0: list(range(10, 20))}
        with pytest.raises(PositionUnknown):
            reader.pause([TopicPartition(topic, 7)])


def test_paused_partitions_of_aiokafka_are_not_read_until_they_are_resumed(broker):
    from aiokafka import TopicPartition

    from filtering.consumers.aiokafka import ReplayFilteredConsumer

    create_topic(broker.bootstrap_servers, topic := next(_names), partitions=2)
    first, second = TopicPartition(topic, 0), TopicPartition(topic, 1)
    for partition in (0, 1):
        fill(broker, topic, partition, range(10))

    async def read(reader, count):
        found = defaultdict(list)
        while sum(map(len, found.values())) < count:
            for place, records in (await reader.getmany(timeout_ms=100)).items():
                found[place.partition] += [StreamMetadata.unpack(record.key).offset for record in records]
        return found

    async def story():
        async with (
            asyncio.timeout(WAIT_S),
            ReplayFilteredConsumer(
                topic, group_id=topic, bootstrap_servers=broker.bootstrap_servers, auto_offset_reset="earliest",
                session_timeout_ms=SESSION_MS,
            ) as reader,
        ):  # fmt: skip
            await read(reader, 20)
            assert await reader.committed(first) is None
            reader.pause(first)
            for partition in (0, 1):
                fill(broker, topic, partition, range(5, 20))
            assert await read(reader, 10) == {1: list(range(10, 20))}
            assert (reader.position(first), reader.position(second)) == (10, 25)
            committing = asyncio.create_task(reader.commit())
            reader.resume(first)
            assert await read(reader, 10) == {0: list(range(10, 20))}
            await committing
            assert await reader.committed(second) == 25
            with pytest.raises(PositionUnknown):
                reader.pause(TopicPartition(topic, 7))

    asyncio.run(story())

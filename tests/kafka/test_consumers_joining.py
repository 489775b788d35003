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
from filtering.consumers import CommitFailed
from tests.kafka.plain_client import create_topic, plain_producer
from tests.kafka.test_filtering_consumers import SESSION_MS, WAIT_S, consumer, turns

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


@pytest.mark.parametrize("protocol", ["eager", "cooperative", "consumer protocol"])
def test_five_members_join_one_after_the_other_and_each_record_counts_once(broker, protocol):
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

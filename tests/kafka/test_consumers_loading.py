"""Partitions whose position or marks can't be loaded when they are assigned, on a real broker: the consumer reports
them, does not read them, and tries again.
"""

import asyncio
import itertools

import pytest

from filtering import BadFilterSetting, CorruptMarks
from tests.kafka.plain_client import create_topic
from tests.kafka.test_filtering_consumers import SESSION_MS, WAIT_S, consumer, fill, until

pytestmark = [pytest.mark.java, pytest.mark.slow]

_names = (f"loading-{number}" for number in itertools.count())


@pytest.fixture
def topic(broker):
    create_topic(broker.bootstrap_servers, name := next(_names), partitions=2)
    return name


class Unanswered:
    """Startpoints whose store is away for a while."""

    look_every_s = 30.0
    is_away = True

    def version(self):
        return 0

    def moved(self, consumer, facts, running_sequence):
        return None

    def pending(self, consumer, facts, committed_sequence):
        if self.is_away:
            raise OSError("the store is away")

    def consumed(self, consumer, topic, partition, sequence):
        raise AssertionError("there are none")


def read_on(reader):
    while not reader.consume(100, 0.2):
        pass


def refuses(reader, error, count):
    """So many reads in a row raise it."""
    for _ in range(count):
        with pytest.raises(error):
            read_on(reader)


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
def test_a_read_after_one_that_failed_loads_the_partitions_again(broker, topic, strategy):
    """Contract: "Loaded on assignment": no rebalance is needed for the next try, and no record comes without marks."""
    settings = {"partition.assignment.strategy": strategy}
    fill(broker, topic, 0, range(30))
    with consumer(broker, topic, settings=settings) as reader:
        reader.subscribe([topic])
        until(reader, 30)
        reader.commit()
    fill(broker, topic, 0, [*range(20, 40)])
    fill(broker, topic, 1, [*range(5), *range(10)])
    store, calls = Unanswered(), []
    with consumer(broker, topic, settings=settings, startpoints=store) as reader:
        reader.subscribe(
            [topic],
            on_assign=lambda _, partitions: calls.append(("assigned", len(partitions))),
            on_revoke=lambda _, partitions: calls.append(("revoked", len(partitions))),
        )
        refuses(reader, OSError, 3)
        reader.commit()
        assert calls == []
        store.is_away = False
        assert until(reader, 20) == {0: list(range(30, 40)), 1: list(range(10))}
        assert sum(count for what, count in calls if what == "assigned") == 2
        assert ("revoked", 2) not in calls
        reader.commit()
    with consumer(broker, topic, settings=settings) as again:
        again.subscribe([topic])
        fill(broker, topic, 0, range(35, 42))
        assert until(again, 2) == {0: [40, 41]}


def test_a_read_of_aiokafka_after_one_that_failed_loads_the_partitions_again(broker, topic):
    """Contract: "Loaded on assignment", as above."""
    from filtering.consumers.aiokafka import ReplayFilteredConsumer

    settings = {"group_id": topic, "bootstrap_servers": broker.bootstrap_servers, "auto_offset_reset": "earliest"}
    settings["session_timeout_ms"] = SESSION_MS
    store, failures, calls = Unanswered(), [], []

    async def assigned(_, partitions):
        calls.append(len(partitions))

    async def read(count, **more):
        found = {}
        async with asyncio.timeout(WAIT_S), ReplayFilteredConsumer(topic, **settings, **more) as reader:
            while sum(map(len, found.values())) < count:
                try:
                    records = await reader.getmany(timeout_ms=100)
                except OSError as error:
                    failures.append(error)
                    store.is_away = len(failures) < 3
                    continue
                for place, own in records.items():
                    found.setdefault(place.partition, []).extend(int(one.value) for one in own)
            await reader.commit()
        return found

    fill(broker, topic, 0, range(30))
    assert asyncio.run(read(30)) == {0: list(range(30))}
    fill(broker, topic, 0, range(20, 40))
    fill(broker, topic, 1, [*range(5), *range(10)])
    assert asyncio.run(read(20, startpoints=store, on_assign=assigned)) == {0: list(range(30, 40)), 1: list(range(10))}
    assert (len(failures), sum(calls)) == (3, 2)


def test_a_ttl_shorter_than_the_topic_keeps_records_is_refused(broker, topic):
    """Contract: a ttl "shorter than the topic's `retention.ms` is refused unless forced"."""
    for told in ({}, {"retention_ms": -1}, {"retention_ms": 3_600_001}):
        with pytest.raises(BadFilterSetting, match="ttl_s"):
            consumer(broker, topic, ttl_s=3600, **told)
    fill(broker, topic, 0, range(10))
    for taken in ({"ttl_s": 3600, "retention_ms": 3_600_000}, {"ttl_s": 1, "retention_ms": 0}):
        with consumer(broker, topic, **taken) as reader:
            reader.subscribe([topic])
            assert until(reader, 10) == {0: list(range(10))}


def test_a_position_that_can_t_be_read_is_left_by_a_seek(broker, topic, caplog):
    """As CorruptMarks says: "or seek, which begins with empty marks"."""
    from confluent_kafka import Consumer, TopicPartition

    fill(broker, topic, 0, range(10))
    settings = {"bootstrap.servers": broker.bootstrap_servers, "group.id": topic, "log_level": 0}
    plain = Consumer(settings)
    plain.commit(offsets=[TopicPartition(topic, 0, 5, '{"pushrep": 9}')], asynchronous=False)
    plain.close()
    with consumer(broker, topic) as reader:
        reader.subscribe([topic])
        refuses(reader, CorruptMarks, 2)
        reader.seek(TopicPartition(topic, 0, 7))
        assert "begins with empty marks" in caplog.text
        assert until(reader, 3) == {0: [7, 8, 9]}
        reader.commit()
    with consumer(broker, topic) as again:
        again.subscribe([topic])
        fill(broker, topic, 0, range(8, 12))
        assert until(again, 2) == {0: [10, 11]}

"""Cases of all stores in a compacted topic: a topic that was deleted and made again, tombstones that compaction
removed.
"""

import itertools
from contextlib import closing

import pytest
from confluent_kafka.admin import AdminClient
from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

from pushrep.kafka import KafkaDestination
from pushrep.kafka.errors import TopicReplaced
from pushrep.kafka.startpoints import open_store
from pushrep.kafka.store_topic import CommittedRecords, KeyedReading, KeyedTopic
from pushrep.kafka.topic import look_at_topic
from pushrep.startpoints import CorruptStore, Startpoint
from tests.kafka.plain_client import create_topic

pytestmark = [pytest.mark.java, pytest.mark.slow]
FORMAT = {"name": "pushrep.test", "version": 1}
_names = (f"topic-stores-{number}" for number in itertools.count())


@pytest.fixture
def destination(broker):
    create_topic(broker.bootstrap_servers, name := next(_names), cleanup_policy="compact")
    return KafkaDestination(bootstrap_servers=broker.bootstrap_servers, topic=name)


@pytest.fixture
def opened(destination):
    """The same map again each time, as another process has it."""
    maps = []

    def open_():
        maps.append(KeyedTopic.open(destination, **FORMAT))
        return maps[-1]

    yield open_
    for one in maps:
        one.close()


def make_anew(destination):
    """Delete the topic and make it again; every broker knows that when this returns."""
    before = look_at_topic(destination, destination.topic).topic_id
    admin = AdminClient({"bootstrap.servers": destination.bootstrap_servers, "log_level": 0})
    admin.delete_topics([destination.topic])[destination.topic].result(60)
    create_topic(destination.bootstrap_servers, destination.topic, cleanup_policy="compact")
    still = Retrying(retry=retry_if_result(lambda now: now == before), stop=stop_after_delay(60), wait=wait_fixed(0.1))
    still(lambda: look_at_topic(destination, destination.topic).topic_id)


@pytest.mark.parametrize("count", [1, 2, 9], ids=["shorter", "as long", "longer"])
def test_a_topic_that_was_made_anew_is_noticed_wherever_its_end_is(destination, opened, count):
    """The former content is not part of the new topic, and the same offsets are other records."""
    old = opened()
    for number in range(2):
        old.look()
        old.change([(f"old-{number}", b"x")])
    make_anew(destination)
    new = opened()
    for number in range(count):
        new.look()
        new.change([(f"new-{number}", b"y")])
    for use in (old.look, lambda: old.change([("old-3", b"x")])):
        with pytest.raises(TopicReplaced, match=destination.topic):
            use()
    assert new.look() > 0
    assert sorted(new.offsets()) == [f"new-{number}" for number in range(count)]


def test_a_store_of_startpoints_whose_topic_was_made_anew_says_so(destination):
    with open_store(destination) as old:
        for _ in range(2):
            old.write("billing", "orders", 0, Startpoint.earliest(), "go")
        make_anew(destination)
        with open_store(destination) as new:
            sequences = [new.write("billing", "orders", 0, Startpoint.latest(), "there") for _ in range(3)]
            for use in (old.history, lambda: old.write("billing", "orders", 0, Startpoint.earliest(), "go")):
                with pytest.raises(CorruptStore, match=r"deleted and made again.*restart this program"):
                    use()
            assert [fact.sequence for fact in new.history()] == sequences


class Compacted:
    """Committed records of which compaction has taken some: those at these offsets come no more."""

    def __init__(self, records):
        self._records, self.gone = records, set()

    def __getattr__(self, name):
        return getattr(self._records, name)

    @property
    def position(self):
        return self._records.position

    @position.setter
    def position(self, value):
        self._records.position = value

    def new(self, at_least=0):
        return (message for message in self._records.new(at_least) if message.offset() not in self.gone)


@pytest.fixture
def away(destination):
    """A reader that was there once, as of a clock, beside what compaction takes from it."""
    facts, clock = look_at_topic(destination, destination.topic), [0.0]
    records = Compacted(CommittedRecords(destination, facts, lambda: 30))
    format_ = {"format": FORMAT["name"], "version": FORMAT["version"]}
    with closing(KeyedReading(records, facts, format_, now_s=lambda: clock[0])) as reading:
        yield reading, records, clock, facts.delete_retention_ms / 1000


@pytest.mark.parametrize("is_long", [True, False])
def test_who_was_away_for_longer_than_tombstones_are_kept_reads_anew(opened, away, is_long):
    """delete.retention.ms: until then who comes again sees the tombstone; after that there is nothing to see."""
    reading, records, clock, kept_s = away
    writer = opened()
    writer.look()
    writer.change([("gone", b"x"), ("stays", b"y")])
    reading.to_the_end()
    assert set(reading.offsets) == {"gone", "stays"}
    deleted = reading.offsets["gone"]
    tombstone = writer.change([("gone", None)])
    writer.change([("new", b"z")])
    if is_long:
        records.gone = {deleted, tombstone}
    clock[0] += kept_s + 1 if is_long else kept_s - 1
    reading.to_the_end()
    assert reading.offsets == writer.offsets()
    assert set(reading.offsets) == {"stays", "new"}
    assert reading.values({reading.offsets["stays"]: "stays"}) == {"stays": b"y"}
    clock[0] += 10 * kept_s
    before = reading.last_offset
    reading.to_the_end()
    assert reading.last_offset == before, "nothing is new, so nothing can be missed"

"""The store in a compacted topic, on a real broker: what the one in a directory is shown to do, and what is its own."""

import itertools

import pytest

from pushrep.kafka import KafkaDestination
from pushrep.startpoints import Startpoint, StoreUnavailable
from pushrep.testing import SimulatedClock
from tests.kafka.plain_client import consume, create_topic

pytestmark = [pytest.mark.java, pytest.mark.slow]
_names = (f"startpoints-{number}" for number in itertools.count())


def opened(broker, topic, clock=None):
    from pushrep.kafka.startpoints import open_store

    destination = KafkaDestination(bootstrap_servers=broker.bootstrap_servers, topic=topic)
    return open_store(destination, clock=clock or SimulatedClock())


@pytest.fixture
def topic(broker):
    create_topic(broker.bootstrap_servers, name := next(_names), cleanup_policy="compact")
    return name


@pytest.fixture
def clock():
    return SimulatedClock()


@pytest.fixture
def store(broker, topic, clock):
    with opened(broker, topic, clock) as store:
        yield store


def test_the_sequence_is_the_offset_and_in_each_key(broker, topic, store):
    """sequence = the record's offset, the key includes it."""
    first = store.write("billing", "orders", 0, Startpoint.earliest(), "go")
    second = store.write("billing", "orders", 0, Startpoint.latest(), "no, there")
    store.cancel(first, "over")
    keys = {seen.offset: seen.key.decode() for seen in consume(broker.bootstrap_servers, topic)}
    assert (keys[first], keys[second]) == (f"written/{first}", f"written/{second}")
    assert f"cancelled/{first}" in keys.values()
    assert first < second


@pytest.mark.parametrize("settings", [{"cleanup_policy": "delete"}, {"cleanup_policy": "compact", "partitions": 2}])
def test_a_topic_that_would_forget_is_refused_by_name(broker, settings):
    create_topic(broker.bootstrap_servers, name := next(_names), **settings)
    with pytest.raises(StoreUnavailable, match=r"cleanup\.policy=compact|1 partition"):
        opened(broker, name)
    with pytest.raises(StoreUnavailable, match="no such topic"):
        opened(broker, "startpoints-none")

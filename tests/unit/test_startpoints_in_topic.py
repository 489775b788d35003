"""The store in a compacted topic, beside simulated brokers: what the one in a directory does, and what is its own.

tests/kafka has the same beside Kafka's own brokers.
"""

import threading

import pytest

from pushrep.errors import CorruptFile
from pushrep.kafka import KafkaDestination
from pushrep.kafka.answers import Code
from pushrep.kafka.startpoints import FORMAT, open_store
from pushrep.startpoints import LogFacts, Startpoint, StoreUnavailable, store_at
from tests.kafka.test_startpoints_topic import of_any_store
from tests.support.simulated_disk import SimulatedClock
from tests.unit.simulated_brokers import END, LOST, PRODUCE, UNSENT, SimulatedBrokers

LOG = LogFacts(start=10, end=100, first_at=lambda ms: None, log_id="a")


@pytest.fixture
def brokers():
    with SimulatedBrokers(topic="startpoints") as made:
        made.produce_version, made.configs = 8, {"cleanup.policy": "compact"}
        yield made


@pytest.fixture
def clock():
    return SimulatedClock()


def opened(brokers, clock=None):
    destination = KafkaDestination(
        bootstrap_servers=brokers.servers, topic=brokers.name, retry_backoff_ms=1, retry_backoff_max_ms=5
    )
    return open_store(destination, clock=clock or SimulatedClock())


@pytest.fixture
def store(brokers, clock):
    with opened(brokers, clock) as made:
        yield made


# Those with parameters are of the rules alone, which both stores share.
globals().update({name: test for name, test in of_any_store() if not hasattr(test, "pytestmark")})


def test_the_sequence_is_the_offset_and_in_each_key(brokers, store):
    first = store.write("billing", "orders", 0, Startpoint.earliest(), "go")
    second = store.write("billing", "orders", 0, Startpoint.latest(), "no, there")
    store.cancel(first, "over")
    claim = store.claim("billing", "orders", 0)
    assert store.start(claim, LOG).sequence == second
    keys = {record.offset: record.key.decode() for record in brokers.topic[0].records()}
    assert (keys[first], keys[second]) == (f"written/{first}", f"written/{second}")
    assert next(iter(keys.values())) == "format"
    assert {f"cancelled/{first}", f"applied/{second}/billing/orders/0/"} <= set(keys.values())


def test_writers_that_take_turns_see_each_other(brokers):
    with opened(brokers) as one, opened(brokers) as other:
        written = [
            store.write("billing", "orders", 0, Startpoint.specific(20 + number), "go")
            for number, store in enumerate([one, other, one, other])
        ]
        assert written == sorted(set(written))
        assert [fact.sequence for fact in one.history()] == [fact.sequence for fact in other.history()] == written


@pytest.mark.parametrize(
    ("configs", "partitions", "told"),
    [
        ({"cleanup.policy": "delete"}, 1, r"cleanup\.policy=delete would delete startpoints"),
        ({"cleanup.policy": "compact"}, 2, "it has 2 partitions.*use a topic with 1 partition"),
    ],
)
def test_a_topic_that_would_forget_is_refused_by_name(brokers, configs, partitions, told):
    brokers.configs = configs
    brokers.topic *= partitions
    with pytest.raises(StoreUnavailable, match=told):
        opened(brokers)


def test_a_topic_that_is_not_there_is_told(brokers, monkeypatch):
    monkeypatch.setattr("filtering.retry.NEW_S", 0.01, raising=False)
    brokers.is_missing = True
    with pytest.raises(StoreUnavailable, match=r"no such topic.*1 partition and cleanup\.policy=compact"):
        opened(brokers)


@pytest.mark.parametrize(
    ("key", "fault"),
    [(PRODUCE, LOST), (PRODUCE, UNSENT), (PRODUCE, Code.REQUEST_TIMED_OUT), (END, LOST), (END, UNSENT)],
)
def test_a_change_whose_answer_is_late_is_there_once(brokers, store, key, fault):
    first = store.write("billing", "orders", 0, Startpoint.specific(20), "go")
    brokers.faults[key].append(fault)
    second = store.write("billing", "orders", 0, Startpoint.specific(30), "go")
    assert [fact.sequence for fact in store.history()] == [first, second]
    with opened(brokers) as other:
        assert [fact.startpoint.value for fact in other.history()] == [20, 30]


def test_a_right_that_is_missing_is_named_and_nothing_is_written(brokers, store):
    store.write("billing", "orders", 0, Startpoint.specific(20), "go")
    one = brokers.topic[0]
    one.refuses, one.refuses_with = lambda _record: "no", Code.TOPIC_AUTHORIZATION_FAILED
    with pytest.raises(StoreUnavailable, match="startpoints"):
        store.write("billing", "orders", 0, Startpoint.specific(30), "go")
    one.refuses = lambda _record: None
    assert len(store.history()) == 1
    store.write("billing", "orders", 0, Startpoint.specific(40), "go")
    assert [fact.startpoint.value for fact in store.history()] == [20, 40]


@pytest.mark.parametrize("value", [b'{"event": "written"}', b"[" * 100_000, b'{"event": 1e999}', b"\xff", b"[]", None])
def test_records_of_others_are_refused_by_name(brokers, store, value):
    store.write("billing", "orders", 0, Startpoint.specific(20), "go")
    brokers.topic[0].write(value, keys=[b"written/7"])
    for _ in range(2):
        with pytest.raises(CorruptFile, match="use another topic"):
            store.read("billing", "orders", 0)
    with pytest.raises(CorruptFile, match="use another topic"):
        store.write("billing", "orders", 0, Startpoint.specific(20), "go")


def test_a_topic_of_another_program_or_version_is_refused_by_name(brokers, store):
    brokers.topic[0].write(b'{"format": "pushrep.startpoints", "version": 2}', keys=[b"format"])
    with pytest.raises(CorruptFile, match=str(FORMAT["version"])):
        store.history()
    brokers.renew()
    brokers.topic[0].write(b"{}", keys=[b"written/0"])
    with opened(brokers) as other, pytest.raises(CorruptFile, match="first record has to hold the format"):
        other.history()


def test_a_topic_that_was_made_anew_ends_the_store(brokers, store):
    store.write("billing", "orders", 0, Startpoint.specific(20), "go")
    brokers.renew()
    for use in (store.history, lambda: store.write("billing", "orders", 0, Startpoint.earliest(), "go")):
        with pytest.raises(CorruptFile, match=r"deleted and made again.*restart this program"):
            use()


def test_brokers_that_are_away_are_told_in_time(brokers):
    destination = KafkaDestination(bootstrap_servers=brokers.servers, topic=brokers.name, request_timeout_ms=2_000)
    with open_store(destination, clock=SimulatedClock()) as store:
        assert store.history() == []
        brokers.down = {1}
        brokers.disconnect()
        with pytest.raises(StoreUnavailable, match="kafka:startpoints"):
            store.history()
        brokers.down = set()


def test_one_change_at_a_time(brokers, store):
    """Threads of one process share a store; each change is there."""

    def write(offset):
        store.write("billing", "orders", 0, Startpoint.specific(offset), "go")

    threads = [threading.Thread(target=write, args=(offset,)) for offset in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(fact.startpoint.value for fact in store.history()) == [0, 1, 2]


def test_the_place_of_a_store_names_it(brokers):
    with store_at("kafka:startpoints", {"bootstrap.servers": brokers.servers}) as store:
        assert store.place == "kafka:startpoints"
        assert store.write("billing", "orders", 0, Startpoint.earliest(), "go") < store.size_bytes()

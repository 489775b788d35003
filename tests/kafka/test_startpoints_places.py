"""A store in a topic wherever one in a directory will do: the source, a plain consumer."""

import itertools
import os
import signal
import time
from contextlib import contextmanager

import pytest
from tenacity import Retrying, stop_after_delay, wait_fixed

pytest.importorskip("pyspark")

from confluent_kafka.admin import AdminClient

from filtering.consumers.startpoints import PartitionFacts
from pushrep import ReplayClient
from pushrep.log import SegmentLog
from pushrep.startpoints import Consumed, GroupStartpoints, Startpoint, StorePlace, store_at
from spark_jobs.sources.options import BadOption
from tests.integration.replay.conftest import World
from tests.integration.replay.test_network_leases import Kept, abandoned
from tests.kafka.plain_client import create_topic
from tests.spark.test_source_startpoints import COUNT, Engine

pytestmark = [pytest.mark.java, pytest.mark.slow]

_names = (f"places-{number}" for number in itertools.count())


@pytest.fixture
def place(broker):
    """A store in a separate topic."""
    create_topic(broker.bootstrap_servers, name := next(_names), cleanup_policy="compact")
    return StorePlace.parse(f"kafka:{name}", {"bootstrap.servers": broker.bootstrap_servers})


@pytest.fixture
def store(place):
    with place.open() as store:
        yield store


@pytest.fixture
def logs(tmp_path):
    for partition in range(2):
        with SegmentLog.open(tmp_path / "logs" / f"orders-{partition}") as log:
            log.append([b"x"] * COUNT)
    return tmp_path / "logs"


def test_a_stream_follows_a_store_in_a_topic(place, store, logs):
    """Moved live, consumed after progress, the same after a restart; nothing is made beside the logs."""
    engine = Engine(
        logs,
        **{"startpoints": f"kafka:{place.name}", "startpoints.bootstrap.servers": place.settings["bootstrap.servers"]},
    )
    assert len(engine.drain()) == 2 * COUNT
    sequence = store.write("billing", "orders", 1, Startpoint.relative(records=-3), "the last three")
    assert engine.drain() == [(1, offset, sequence) for offset in range(COUNT - 3, COUNT)]
    engine.plan()
    assert [fact.sequence for fact in store.history() if isinstance(fact, Consumed)] == [sequence]
    engine.reader.stop()
    engine.restart()
    assert engine.drain() == []
    engine.reader.stop()
    assert not (logs / "startpoints").exists()


def test_a_plain_consumer_keeps_its_checkpoints_in_a_topic(store, logs):
    number = store.write("audit", "orders", 0, Startpoint.specific(COUNT - 2), "the last two")
    with ReplayClient(logs) as client:
        for expected in ([COUNT - 2, COUNT - 1], []):
            with client.subscribe("orders", consumer="audit", startpoints=store, partitions=[0]) as consumer:
                found = []
                while batches := consumer.poll():
                    found += [record.offset for batch in batches for record in batch.records]
                consumer.commit()
            assert found == expected
    assert [fact.sequence for fact in store.history() if isinstance(fact, Consumed)] == [number]


@pytest.fixture
def silent(broker):
    """A block in which the broker takes connections and requests, and answers none."""

    @contextmanager
    def stopped():
        [pid] = broker.pids
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    yield stopped
    for attempt in Retrying(stop=stop_after_delay(120), wait=wait_fixed(0.2), reraise=True):
        with attempt:  # each time by a client of its own: one that met it while it was coming back may not find it
            assert list(AdminClient({"bootstrap.servers": broker.bootstrap_servers}).list_topics(timeout=5).brokers)


@pytest.fixture
def patient(place):
    """The same place with a timeout of ten minutes as the default."""
    return {**place.settings, "request.timeout.ms": "600000"}


@pytest.mark.timeout(400)
def test_silent_brokers_of_the_store_hold_no_running_reader(place, patient, logs, silent, monkeypatch):
    """A stream, a group and a plain consumer; each is moved when the brokers answer again."""
    options = {f"startpoints.{name}": value for name, value in patient.items()}
    engine = Engine(logs, startpoints=f"kafka:{place.name}", **options)
    facts = PartitionFacts("orders", 1, lambda *_: (0, COUNT + 1), lambda *_: None, COUNT)
    with store_at(f"kafka:{place.name}", patient) as store, ReplayClient(logs) as client:
        group = GroupStartpoints(store)
        assert len(engine.drain()) == 2 * COUNT
        assert group.pending("report", facts, 0) is None
        with client.subscribe("orders", consumer="audit", startpoints=store) as consumer:
            assert read_all(consumer) == {0: list(range(COUNT)), 1: list(range(COUNT))}
            version = group.version()
            sequence = store.write(None, "orders", 1, Startpoint.specific(COUNT - 2), "the last two, for every one")
            seen = group.version()
            assert seen > version
            with silent(), monkeypatch.context() as patched:
                patched.setattr("pushrep.startpoints.store.LOOK_WITHIN_S", 0.3)
                patched.setattr("pushrep.startpoints.store.ASK_WITHIN_S", 0.6)
                with SegmentLog.open(logs / "orders-0") as log:
                    log.append([b"x"])
                assert engine.drain() == [(0, COUNT, 0)]
                assert "new startpoints wait" in engine.reader.reportLatestOffset()["startpoints"]
                assert read_all(consumer) == {0: [COUNT]}
                assert group.moved("report", facts, 0) is None
                assert group.version() == seen
            moved = {
                "stream": lambda: engine.drain() == [(1, COUNT - 2, sequence), (1, COUNT - 1, sequence)],
                "group": lambda: group.version() > seen and group.moved("report", facts, 0).offset == COUNT - 2,
                "plain": lambda: read_all(consumer) == {1: [COUNT - 2, COUNT - 1]},
            }
            deadline_s = time.monotonic() + 120
            while moved and time.monotonic() < deadline_s:
                moved = {who: has for who, has in moved.items() if not has()}
                time.sleep(0.02)
            assert moved == {}
    engine.reader.stop()


@pytest.mark.timeout(180)
def test_silent_brokers_stop_a_stream_that_starts_by_the_name_of_its_setting(place, logs, silent):
    options = {"startpoints.bootstrap.servers": place.settings["bootstrap.servers"]}
    engine = Engine(logs, startpoints=f"kafka:{place.name}", **options, **{"startpoints.request.timeout.ms": "300"})
    with silent(), pytest.raises(BadOption, match=r"option startpoints='kafka:places.*has to answer"):
        engine.batch()
    engine.reader.stop()


def read_all(consumer):
    found = {}
    while batches := consumer.poll():
        for batch in batches:
            found.setdefault(batch.partition, []).extend(record.offset for record in batch.records)
    return found


def test_a_consumer_by_a_store_in_a_topic_is_told_by_a_node_when_its_lease_is_broken(tmp_path, store):
    """lease_max_s is of the log that is read, wherever positions are kept."""
    with (world := World(tmp_path)).opened:
        kept = Kept(world)
        with kept.client.subscribe("orders", consumer="audit", startpoints=store) as consumer:
            abandoned(kept, store, consumer)


def test_a_topic_that_is_not_there_is_told_by_its_place(broker):
    from pushrep.startpoints import StoreUnavailable

    with pytest.raises(StoreUnavailable, match=r"kafka:places-none .*no such topic"):
        store_at("kafka:places-none", {"bootstrap.servers": broker.bootstrap_servers})

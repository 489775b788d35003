"""A store in a topic wherever one in a directory will do: the source, apply-checkpoint, a plain consumer."""

import itertools
import json

import pytest

pytest.importorskip("pyspark")

from pushrep import ReplayClient
from pushrep.log import SegmentLog
from pushrep.startpoints import Consumed, Startpoint, StorePlace, store_at
from tests.kafka.plain_client import create_topic
from tests.spark.test_source_startpoints import COUNT, Engine
from tests.unit.test_checkpoint_apply import KAFKA, carried_and_reset, make, offsets, run

pytestmark = [pytest.mark.java, pytest.mark.slow]

_names = (f"places-{number}" for number in itertools.count())


@pytest.fixture
def place(broker):
    """A store in a topic of its own."""
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


def test_apply_checkpoint_takes_startpoints_from_a_topic(tmp_path, place, store):
    cp = make(tmp_path / "cp", KAFKA)
    store.write("billing", "orders", 1, Startpoint.specific(5), "wrong rates")
    named = ["--consumer", "billing", "--store", f"kafka:{place.name}"]
    assert "--bootstrap-servers" in run(cp, *named).output
    assert run(cp, *named, "--bootstrap-servers", place.settings["bootstrap.servers"]).exit_code == 0
    assert json.loads(offsets(cp, 3)) == {"orders": {"0": 180, "1": 5}}
    assert [type(fact).__name__ for fact in store.history()] == ["Written", "Applied", "Consumed"]
    assert not (tmp_path / "cp-startpoints").exists()


def test_rule_9_apply_checkpoint_moves_marks_in_a_topic(tmp_path, broker):
    from pushrep.kafka import KafkaDestination
    from spark_jobs.topic_marks import TopicMarks

    create_topic(broker.bootstrap_servers, name := next(_names), cleanup_policy="compact")
    destination = KafkaDestination(bootstrap_servers=broker.bootstrap_servers, topic=name)
    with TopicMarks(destination) as marks:
        named = ["--marks", f"kafka:{name}", "--bootstrap-servers", broker.bootstrap_servers]
        carried_and_reset(tmp_path / "cp", marks, *named)


def test_a_topic_that_is_not_there_is_told_by_its_place(broker):
    from pushrep.startpoints import StoreUnavailable

    with pytest.raises(StoreUnavailable, match=r"kafka:places-none .*no such topic"):
        store_at("kafka:places-none", {"bootstrap.servers": broker.bootstrap_servers})

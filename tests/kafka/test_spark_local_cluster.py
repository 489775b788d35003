"""Spark on a local cluster: the same results as with a local master, while executors are killed by kill -9.

The long form has two executors; the short form has one with two cores, which is replaced. They are separate processes,
so the driver shares nothing with them by accident. The gate of the driver program makes sure that a kill hits a task:
tasks wait there until enough of them were killed.
"""

import contextlib
import json
import os
import signal
import threading
import time
import uuid

import pytest

from filtering import StreamMetadata
from pushrep import Outbox
from spark_jobs import FileMarks
from tests.kafka.cluster import missing
from tests.kafka.mixed_topics import MixedTopic, brute_force
from tests.kafka.plain_client import add_partitions, create_topic
from tests.kafka.spark_driver import SparkDriver, missing_jars, table
from tests.spark.replay.conftest import Model, Row

pytestmark = [pytest.mark.java, pytest.mark.spark, pytest.mark.slow]

DEADLINE_S = 240


@pytest.fixture(scope="module")
def driver(tool_or_skip, tmp_path_factory, torture):
    pytest.importorskip("pyspark")
    tool_or_skip(missing() or missing_jars())
    master = "local-cluster[2,1,1024]" if torture.is_long else "local-cluster[1,2,1024]"
    with SparkDriver(tmp_path_factory.mktemp("cluster"), master, answer_s=900) as driver:
        yield driver


@pytest.fixture
def gate(tmp_path):
    (path := tmp_path / "gate").mkdir()
    return path


def kill_waiting(driver, gate, kills):
    """kill -9 executors in which a task waits at the gate, so many; then the gate opens. Who was killed."""
    killed = []
    deadline_s = time.monotonic() + DEADLINE_S
    while len(killed) < kills and time.monotonic() < deadline_s:
        for waiting in gate.glob("waits*"):
            parents = set(json.loads(waiting.read_text()))
            waiting.unlink()
            for pid in parents & driver.executors():
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
            if len(killed) == kills:
                break
        time.sleep(0.02)
    (gate / "open").touch()
    return killed


def options_of(servers, topic):
    return {
        "kafka.bootstrap.servers": servers,
        "kafka.isolation.level": "read_committed",
        "subscribe": topic,
        "startingOffsets": "earliest",
    }


@pytest.mark.timeout(900)
@pytest.mark.parametrize("form", ["batches", "operator"])
def test_killed_executors_change_nothing_of_a_topic_s_rows(driver, broker, gate, tmp_path, form, torture):
    """The same results as with a local master; a task that runs again, and state that is loaded again, give the same
    rows.
    """
    if not torture.is_long:
        pytest.skip("the test over a log is the short form")
    servers = broker.bootstrap_servers
    create_topic(servers, name := f"cluster-{uuid.uuid4().hex[:8]}", partitions=3)
    MixedTopic(servers, name, 3, torture.random("cluster", form)).write(torture.count(150, 4000))
    driver.start(place=tmp_path, form=form, gate=gate, options=options_of(servers, name) | {"minPartitions": "4"})
    killed = kill_waiting(driver, gate, 2)
    driver.finish(place=tmp_path)
    assert len(set(killed)) == 2, "both kills met an executor at work"
    assert table(tmp_path) == brute_force(servers, {name: 3}).kept


@pytest.mark.timeout(900)
def test_killed_executors_change_nothing_of_a_log_s_rows(driver, gate, tmp_path, torture):
    """The same over our own source, whose tasks read the log's files."""
    rows = []
    for first in (0, 60, 100):  # each time the producer comes back from a position that lagged
        with Outbox.open(tmp_path / "log", topic="orders", partitions=2, producer="p") as box:
            for partition in range(2):
                at = len([row for row in rows if row.partition == partition])
                metadata = [StreamMetadata(5, partition, first + n) for n in range(90)]
                box.append_many(partition, [b"%d" % n for n in range(90)], metadata=metadata[0]).result(120)
                rows += [
                    Row("orders", partition, at + n, one, None, ("orders", partition, at + n))
                    for n, one in enumerate(metadata)
                ]
    source = {"path": str(tmp_path / "log"), "topic": "orders"}
    driver.start(place=tmp_path, source="pushrep", gate=gate, options=source)
    kills = torture.count(1, 3)
    killed = kill_waiting(driver, gate, kills)
    driver.finish(place=tmp_path)
    assert len(set(killed)) == kills, "each kill met an executor at work"
    assert table(tmp_path) == Model().kept(rows)


def run_through_kills(driver, rng, place, **query):
    """Run the query to its end, and kill an executor in every other batch. Its id, and the batches that were hit.

    The kill comes when a drawn part of the time is over that the batch before took: however slow the machine is, most
    kills fall into their batch, and none falls into the one that runs again.
    """
    ended, hit = threading.Event(), []

    def kills():
        planned_s = {}
        while not ended.wait(0.02):
            batch = max((int(file.name) for file in (place / "checkpoint" / "offsets").glob("[0-9]*")), default=-1)
            if batch < 0 or batch in planned_s:
                continue
            planned_s[batch] = time.monotonic()
            if batch % 2 == 0 or batch - 1 not in planned_s:
                continue
            if ended.wait(rng.uniform(0.1, 0.9) * (planned_s[batch] - planned_s[batch - 1])):
                break
            if not (place / "checkpoint" / "commits" / str(batch)).exists():
                for pid in rng.sample(sorted(found := driver.executors()), min(1, len(found))):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                        hit.append(batch)

    killer = threading.Thread(target=kills)
    killer.start()
    try:
        query_id = driver.run(place=place, **query)
    finally:
        ended.set()
        killer.join()
    return query_id, hit


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("form", ["batches", "operator"])
def test_a_million_records_through_kills_splits_and_new_partitions(driver, broker, tmp_path, form, torture):
    if not torture.is_long:
        pytest.skip("the kills at the gate above are the short form")
    rng, servers = torture.random("million", form), broker.bootstrap_servers
    create_topic(servers, name := f"million-{uuid.uuid4().hex[:8]}", partitions=3)
    topic, hit = MixedTopic(servers, name, 3, rng), []
    limits = {"minPartitions": "6", "maxRecordsPerPartition": "20000", "maxOffsetsPerTrigger": "100000"}
    options = options_of(servers, name) | limits
    for part, records in enumerate((500_000, 500_000, 1_000)):  # the last ones meet the marks of all others
        if part == 1:
            add_partitions(servers, name, 5)
            topic.grow(5)
        topic.rewind()
        topic.write(records, stretch=3000)
        query_id, more = run_through_kills(driver, rng, tmp_path, form=form, options=options)
        hit += more
    judged = brute_force(servers, {name: 5})
    assert hit, "a kill met a batch"
    assert judged.dropped > 10_000, "many replays"
    assert table(tmp_path) == judged.kept
    if form == "batches":
        store = FileMarks(tmp_path / "marks")
        marks = store.read(query_id, max(store.batches(query_id))).marks
        found = {(name, *pair): entry.offset for own in marks.values() for pair, entry in own.items()}
        assert found == judged.marks

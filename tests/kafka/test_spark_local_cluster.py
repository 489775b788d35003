"""Spark on local-cluster[2,1,1024]: the same results as local, executors killed on the way by kill -9.

Executors are processes of their own, so nothing is shared with the driver by accident. The gate of the driver program
makes sure that a kill meets a task: tasks wait there until enough of them have died.
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
from tests.kafka.cluster import missing
from tests.kafka.mixed_topics import MixedTopic, brute_force
from tests.kafka.plain_client import create_topic
from tests.kafka.spark_driver import OrderFailed, SparkDriver, missing_jars, table
from tests.spark.replay.conftest import Model, Row

pytestmark = [pytest.mark.java, pytest.mark.spark, pytest.mark.slow]

DEADLINE_S = 240


@pytest.fixture(scope="module")
def driver(tool_or_skip, tmp_path_factory):
    pytest.importorskip("pyspark")
    tool_or_skip(missing() or missing_jars())
    with SparkDriver(tmp_path_factory.mktemp("cluster"), "local-cluster[2,1,1024]") as driver:
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


def topic_of(servers, rng, records):
    create_topic(servers, name := f"cluster-{uuid.uuid4().hex[:8]}", partitions=3)
    MixedTopic(servers, name, 3, rng).write(records)
    options = {
        "kafka.bootstrap.servers": servers,
        "kafka.isolation.level": "read_committed",
        "subscribe": name,
        "startingOffsets": "earliest",
    }
    return options, brute_force(servers, {name: 3}).kept


@pytest.mark.timeout(900)
@pytest.mark.parametrize("form", ["batches", "operator"])
def test_killed_executors_change_nothing_of_a_topic_s_rows(driver, broker, gate, tmp_path, form, torture):
    """The same results as local; a task that runs again, and state that is loaded anew, give the same rows."""
    if not torture.is_long:
        pytest.skip("the test over a log is the short form")
    options, expected = topic_of(broker.bootstrap_servers, torture.random("cluster", form), torture.count(150, 4000))
    driver.start(place=tmp_path, form=form, gate=gate, options=options | {"minPartitions": "4"})
    killed = kill_waiting(driver, gate, 2)
    driver.finish(place=tmp_path)
    assert len(set(killed)) == 2, "both kills met an executor at work"
    assert table(tmp_path) == expected


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


@pytest.mark.timeout(1800)
def test_kills_at_random_moments_of_many_batches(driver, broker, tmp_path, torture):
    """Any executor, at any moment, for as long as the query runs; one that gave up is started again."""
    if not torture.is_long:
        pytest.skip("the kills at the gate above are the short form")
    rng = torture.random("moments")
    options, expected = topic_of(broker.bootstrap_servers, rng, 6000)
    ended, killed = threading.Event(), []

    def kills():
        while not ended.wait(rng.uniform(2, 8)):
            for pid in rng.sample(sorted(found := driver.executors()), min(1, len(found))):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)

    killer = threading.Thread(target=kills)
    killer.start()
    try:
        for _ in range(10):
            with contextlib.suppress(OrderFailed):
                driver.run(place=tmp_path, options=options | {"minPartitions": "6", "maxOffsetsPerTrigger": "300"})
                break
    finally:
        ended.set()
        killer.join()
    driver.run(place=tmp_path, options=options)
    assert killed
    assert table(tmp_path) == expected

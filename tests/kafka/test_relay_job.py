"""The relay job on a real broker: topic with replays ─▶ Spark ─▶ second topic ─▶ plain consumer and replay filter.

Contract "Spark", relay: inside foreachBatch, by (topic, partition) and in offset order, one task per source partition
through SourcePartitionProducer; a batch that runs again sends again, and readers filter.
"""

import json
import os
import shutil
import signal
import sys
import uuid
from functools import partial
from threading import Thread

import pytest

from filtering import METADATA_HEADER, StreamMetadata, producer_id
from pushrep import Outbox
from tests.integration.test_health import get, ready
from tests.kafka.plain_client import add_partitions, consume, create_topic, plain_producer
from tests.kafka.spark_process import connector
from tests.kafka.topic_reader import read_filtered
from tests.ports import reserve
from tests.spark_programs import SparkPrograms, kill_session, said

pytestmark = [pytest.mark.java, pytest.mark.spark, pytest.mark.slow]

RECORDS, SOURCES, PID = 900, 3, 7


@pytest.fixture
def jars(tool_or_skip):
    pytest.importorskip("pyspark")
    jars, why = connector()
    tool_or_skip(why)
    return jars


@pytest.fixture
def topics(broker):
    """A source of three partitions, in which every third stretch stands twice; a destination of two."""
    tag = uuid.uuid4().hex[:8]
    source, destination = f"relay-in-{tag}", f"relay-out-{tag}"
    create_topic(broker.bootstrap_servers, source, partitions=SOURCES, retention_ms=-1)  # the records are old
    create_topic(broker.bootstrap_servers, destination, partitions=2, retention_ms=-1)
    producer = plain_producer(broker.bootstrap_servers)
    for start in range(0, RECORDS, 100):
        for again in range(1 + (start % 300 == 0)):
            for partition in range(SOURCES):
                for n in range(max(0, start - 40 * again), start + 100):
                    producer.produce(
                        source,
                        key=StreamMetadata(PID, partition, n).pack(),
                        value=b"%d" % n,
                        partition=partition,
                        timestamp=1_700_000_000_000 + n,
                        headers=[("n", b"%d" % n)],
                    )
    assert producer.flush(60) == 0
    return source, destination


@pytest.fixture
def relay(broker, topics, tmp_path):
    """The job's arguments, from one topic to the other."""
    source, destination = topics
    return [
        *("--source", "kafka", "--topic", source, "--to-topic", destination, "--application", "billing"),
        *("--source-option", f"kafka.bootstrap.servers={broker.bootstrap_servers}", "--to-option", "log_level=0"),
        *("--checkpoint", str(tmp_path / "checkpoint"), "--max-records-per-trigger", "1500", "--json", "-"),
    ]


def until_in_the_middle(lines, said):
    """Read events until a batch is done; others are still to come. The next one then runs."""
    seen = []
    for line in lines:
        event = json.loads(line)
        seen.append(event)
        assert event["event"] != "failed", f"{seen} {said()}"
        if event["event"] == "batch" and event["kept"]:
            return
    raise AssertionError(f"{seen} {said()}")


def relayed_pid(broker, tmp_path, source):
    pin = json.loads((tmp_path / "checkpoint-relay" / "epoch-0.json").read_text())
    assert (pin["partition_count"], pin["application"], pin["carrier"]) == (2, "billing", "key")
    incarnation = pin["sources"][f"{source}-0"]
    return producer_id(application="billing", stream=source, source=incarnation, destination=pin["destination"])


def test_every_record_once_in_order_also_when_the_jvm_is_killed(
    broker, topics, relay, jars, spark_driver, tmp_path, torture
):
    """Contract "Spark", relay: each record once behind a filter, order per source partition, over a kill -9.

    A process that is killed is for the long form, and for the demo through Kafka; in the short one a signal ends it.
    """
    source, destination = topics
    with reserve() as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
        served = partial(is_served, f"http://{address}", source)
        if torture.is_long:
            own = ("--conf", f"spark.jars={jars}", "--conf", "spark.driver.host=127.0.0.1", "--health", address)
            with SparkPrograms(tmp_path) as programs:
                first = programs.start([sys.executable, "-m", "spark_jobs.jobs.relay", *relay, *own])
                until_in_the_middle(first.stdout, partial(said, first))
                served()
                kill_session(first)
        else:
            ended_by_a_signal(spark_driver, [*relay, "--trigger", "100ms", "--health", address], tmp_path, served)
    as_if_killed_a_moment_earlier(tmp_path)
    before = sum(len(consume(broker.bootstrap_servers, destination, partition)) for partition in range(2))
    assert before > 0, "killed after the first batch, most often within the second"
    # n is pinned at the first use: partitions that come later are not used.
    add_partitions(broker.bootstrap_servers, destination, 5)
    code, told = spark_driver.job(name="relay", arguments=relay)
    assert code == 0, told
    events = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
    left = sum(len(consume(broker.bootstrap_servers, source, partition)) for partition in range(SOURCES))
    assert (sum(event.get("rows", 0) for event in events), events[-1]["event"]) == (left, "stopped")

    pid = relayed_pid(broker, tmp_path, source)
    found = read_filtered(broker.bootstrap_servers, destination, 5)
    assert set(found.visible) == {(pid, partition) for partition in range(SOURCES)}, "one PID, of this hop"
    for partition in range(SOURCES):
        seen = found.of(pid, partition)
        assert [int(record.value) for record in seen] == list(range(RECORDS))
        assert [record.timestamp_ms for record in seen] == [1_700_000_000_000 + n for n in range(RECORDS)]
        assert all(record.headers == (("n", record.value),) for record in seen)
        offsets = [StreamMetadata.unpack(record.key).offset for record in seen]
        own = {record.offset: record.value for record in consume(broker.bootstrap_servers, source, partition)}
        assert [own[offset] for offset in offsets] == [record.value for record in seen], "the record's own topic offset"
    assert found.copies >= before, "what the killed job had sent was sent again"
    assert all(consume(broker.bootstrap_servers, destination, partition) == [] for partition in range(2, 5))


def is_served(url, source):
    assert ready(url)[:2] == (200, [])
    assert f'kept_records_total{{name="relay {source}",source=' in get(f"{url}/metrics")[1].decode()


def ended_by_a_signal(spark_driver, arguments, place, served):
    """Run the job in the present driver, and end it by a signal; the driver continues."""
    events = place / "events"
    os.mkfifo(events)
    told = []
    job = Thread(
        target=lambda: told.append(spark_driver.job(name="relay", arguments=[*arguments, "--json", str(events)]))
    )
    job.start()
    with events.open() as lines:
        until_in_the_middle(lines, lambda: told)
        served()
        os.kill(spark_driver.pid, signal.SIGTERM)
        last = [json.loads(line) for line in lines][-1]
    job.join()
    assert (told[0][0], last["event"]) == (0, "stopped"), told


def as_if_killed_a_moment_earlier(place):
    """Batch 0 is in the topic; that it was done is not written down, neither as marks nor as a commit."""
    shutil.rmtree(place / "checkpoint-marks")
    for log, kept in (("offsets", "0"), ("commits", None)):
        for path in (place / "checkpoint" / log).glob("*"):
            if path.name != kept:
                path.unlink()


def test_a_log_is_relayed_with_its_own_offsets_and_keys_stay_beside_the_header(broker, spark_driver, tmp_path):
    """Contract "Spark", relay: topic or log to topic; the header carrier leaves the key to the business."""
    create_topic(broker.bootstrap_servers, destination := f"relay-log-{uuid.uuid4().hex[:8]}", partitions=2)
    for first in (0, 20):  # the producer came back from a position that lagged
        with Outbox.open(tmp_path / "log", topic="orders", partitions=2, producer="p", carrier="header") as box:
            for partition in range(2):
                values = [b"%d" % n for n in range(first, first + 40)]
                metadata = StreamMetadata(PID, partition, first)
                box.append_many(partition, values, keys=values, metadata=metadata)
    code, told = spark_driver.job(
        name="relay",
        arguments=[
            *("--path", str(tmp_path / "log"), "--topic", "orders", "--carrier", "header", "--application", "billing"),
            *("--to-servers", broker.bootstrap_servers, "--to-topic", destination, "--to-option", "log_level=0"),
            *("--checkpoint", str(tmp_path / "checkpoint")),
        ],
    )
    assert code == 0, told
    found = read_filtered(broker.bootstrap_servers, destination, 2, carrier="header")
    assert found.copies == 0, "one run sends once"
    assert sorted(partition for _, partition in found.visible) == [0, 1]
    for (_, partition), seen in found.visible.items():
        assert [record.key for record in seen] == [record.value for record in seen] == [b"%d" % n for n in range(60)]
        metadata = [StreamMetadata.unpack(dict(record.headers)[METADATA_HEADER]) for record in seen]
        assert [m.offset for m in metadata] == [*range(40), *range(60, 80)], "its place in the log, replays left out"
        assert {m.partition for m in metadata} == {partition}

"""A log's sealed batches in a real topic: each record visible once, in order, whatever is killed or changed.

Each test has another topic on a shared broker. The records appended, in the topic and in the log are compared one by
one.
"""

import asyncio
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial
from threading import Event, Semaphore

import pytest
from confluent_kafka.admin import AdminClient

from filtering import StreamMetadata
from pushrep.cli.main import run
from pushrep.env import REAL_FILESYSTEM
from pushrep.kafka import (
    DestinationAhead,
    DestinationRefused,
    KafkaDestination,
    ShippingStopped,
    ShippingTimeout,
    TopicMissing,
)
from pushrep.kafka.cluster import Cluster
from pushrep.kafka.progress import read_progress
from pushrep.kafka.requests import ProduceBatches, answers_of
from pushrep.kafka.resume import whole_batches
from pushrep.kafka.source import SealedReader, ShippedPartition
from pushrep.kafka.topic import look_at_topic
from pushrep.log import Durability, LogConfig, SegmentLog, StillNeeded
from pushrep.outbox import DeliveryFailed, LogStopped, Outbox, OutboxConfig, begin_pid_epoch, slot_directories
from pushrep.records import Codec, encode_batch
from pushrep.status.metrics import StatusCollector
from tests.integration.outboxes import wait_until
from tests.kafka.cluster import free_ports
from tests.kafka.coordinator_client import with_cluster
from tests.kafka.dump_tool import dump_segments
from tests.kafka.plain_client import add_partitions, alter_topic, consume, create_topic
from tests.kafka.topic_reader import read_filtered, same
from tests.support.outbox_arguments import outbox_arguments
from tests.unit.gated_disk import LosingDisk

pytestmark = [pytest.mark.java, pytest.mark.slow]
WAIT_S = 120


@pytest.fixture
def topic(broker, request):
    """A topic's name that no other test has; the test makes the topic."""
    return "".join(c if c.isalnum() else "-" for c in request.node.name.removeprefix("test_"))[:100]


@pytest.fixture
def opened(broker, topic, tmp_path):
    """Open the test's outbox with its topic as destination."""

    def open_outbox(partitions=2, *, destination=None, **settings):
        if destination is None:
            destination = KafkaDestination(bootstrap_servers=broker.bootstrap_servers, retry_backoff_ms=20)
        defaults = {"open_timeout_s": WAIT_S, "durability": Durability.BUFFERED, "log_config": LogConfig(flush_ms=10)}
        return Outbox.open(
            tmp_path / "outbox", topic, partitions, "test", **outbox_arguments(kafka=destination, **defaults | settings)
        )

    return open_outbox


def logs_of(outbox):
    return {n: list(outbox.log(n).records(0)) for n in range(outbox.identity.partitions)}


def assert_all_visible_once(broker, topic, logs, pid, partitions, carrier="key"):
    """Every record of these logs is in the topic, once behind the filter, in order; the number of raw copies."""
    found = read_filtered(broker.bootstrap_servers, topic, partitions, carrier)
    for partition, records in logs.items():
        assert same(found.of(pid, partition), records), f"partition {partition}"
    assert set(found.visible) <= {(pid, partition) for partition in logs}, "and nothing else"
    return found.copies


def test_sealed_batches_are_what_every_consumer_reads(broker, topic, opened, tmp_path):
    """Contract: "the sealed batches as they are", with every codec; judged by a consumer and by Kafka's dump tool."""
    create_topic(broker.bootstrap_servers, topic, 2, retention_ms=-1)
    for codec in Codec:
        with opened(3, log_config=LogConfig(codec=codec, flush_ms=10), carrier="header") as outbox:
            for n in range(20):
                for partition in range(3):
                    outbox.append_many(
                        partition,
                        [b"%d" % k * (k % 9) for k in range(n, n + 7)],
                        keys=[b"business %d" % k if k % 3 else None for k in range(7)],
                        headers=[[("h", b"%d" % k), ("null", None)] for k in range(7)],
                        timestamps_ms=[1_700_000_000_000 + k for k in range(7)],
                    )
            outbox.wait_shipped(WAIT_S)
            assert outbox.lag()[f"kafka:{topic}"] == (0, 0, None, (), None)
            logs, pid = logs_of(outbox), outbox.pid
    assert assert_all_visible_once(broker, topic, logs, pid, 2, "header") == 0
    # Of a segment that is being written the index has room ahead, which the tool takes for damage.
    name = f"{topic}-0"
    (tmp_path / name).mkdir()
    for file in (broker.log_directory() / name).glob("*.log"):
        shutil.copy(file, tmp_path / name)
    (dump,) = dump_segments(tmp_path / name)
    assert not dump.objections
    assert all(batch["isvalid"] for batch in dump.batches)
    assert {batch["compresscodec"] for batch in dump.batches} == {codec.name.lower() for codec in Codec}


def test_a_restart_goes_on_where_the_checkpoint_says(broker, topic, opened, tmp_path):
    """Contract: "Progress per destination ... is checkpointed beside the log each second and at close"."""
    create_topic(broker.bootstrap_servers, topic, 2)
    for _ in range(3):
        with opened(3) as outbox:
            for partition in range(3):
                outbox.append_many(partition, [b"v"] * 50)
            outbox.wait_shipped(WAIT_S)
            logs, pid = logs_of(outbox), outbox.pid
    assert assert_all_visible_once(broker, topic, logs, pid, 2) == 0
    progress = read_progress(REAL_FILESYSTEM, tmp_path / "outbox")[topic]
    assert {p: at.acknowledged for p, at in progress.partitions.items()} == {0: 150, 1: 150, 2: 150}
    assert [epoch.partitions for epoch in progress.epochs] == [2]


@pytest.mark.parametrize("carrier", ["key", "header"])
def test_a_restart_finds_in_the_topic_what_no_checkpoint_tells(broker, topic, opened, tmp_path, carrier):
    """Contract: "A restart reads the topic from there to its end and matches its own records in log order"."""
    opened = partial(opened, carrier=carrier)
    create_topic(broker.bootstrap_servers, topic, 2)
    file = tmp_path / "outbox" / "destinations.json"
    with opened(3) as outbox:
        for partition in range(3):
            outbox.append_many(partition, [b"before"] * 30)
        outbox.wait_shipped(WAIT_S)
    older = file.read_bytes()
    with opened(3) as outbox:
        for partition in range(3):
            outbox.append_many(partition, [b"behind the checkpoint"] * 30)
        outbox.wait_shipped(WAIT_S)
    file.write_bytes(older)
    with opened(3) as outbox:
        outbox.append_many(1, [b"new"])
        outbox.wait_shipped(WAIT_S)
        logs, pid = logs_of(outbox), outbox.pid
    assert assert_all_visible_once(broker, topic, logs, pid, 2, carrier) == 0


def test_without_any_checkpoint_the_topic_is_read_from_its_start_and_no_copy_is_made(broker, topic, opened, tmp_path):
    """identity T1: "Without a known destination offset a partition is read from its start, not only its tail"."""
    create_topic(broker.bootstrap_servers, topic)
    for n in range(2):
        with opened(1, batch_bytes=2000) as outbox:
            for k in range(30):
                outbox.append_many(0, [b"%d" % k] * (100 if n == 0 else 1))
            outbox.wait_shipped(WAIT_S)
            logs, pid = logs_of(outbox), outbox.pid
        if n == 0:
            (tmp_path / "outbox" / "destinations.json").unlink()
    assert assert_all_visible_once(broker, topic, logs, pid, 1) == 0


def test_records_of_upstream_sources_are_known_by_their_own_metadata(broker, topic, opened, tmp_path):
    """A relay's records carry where they lived upstream; a restart finds them in the topic by that."""
    create_topic(broker.bootstrap_servers, topic, 2)
    file = tmp_path / "outbox" / "destinations.json"
    older = None
    for first in (0, 100, 200):
        with opened(2) as outbox:
            for at in range(first, first + 100):
                outbox.append(at % 2, b"%d" % at, metadata=StreamMetadata(4711, at % 2, at))
            outbox.wait_shipped(WAIT_S)
            logs = logs_of(outbox)
        older = older or file.read_bytes()
        file.write_bytes(older)
    found = read_filtered(broker.bootstrap_servers, topic, 2)
    assert found.copies == 0
    assert all(same(found.of(4711, partition), logs[partition]) for partition in range(2))


SERVICE = """
import sys
from pushrep import Durability, LogConfig, Outbox, OutboxConfig
from pushrep.kafka import KafkaDestination
directory, topic, servers = sys.argv[1:]
destination = KafkaDestination(bootstrap_servers=servers)
with Outbox.open(
    directory, topic, 3, "test", kafka=destination, durability=Durability.BUFFERED,
    config=OutboxConfig(
        linger_ms=1, open_timeout_s=60, log_config=LogConfig(batch_bytes=2000, flush_ms=10),
    ),
) as outbox:
    print("open", flush=True)
    while True:
        for partition in range(3):
            outbox.append_many(partition, [b"x" * 100] * 30)
        outbox.flush()
        print(outbox.lag()[f"kafka:{topic}"].records, flush=True)
"""


def test_kill_9_of_the_outbox_process(broker, topic, opened, tmp_path, torture):
    """Every record visible once, none missing, order kept; raw copies are what the filter is for."""
    create_topic(broker.bootstrap_servers, topic, 2)
    rng = torture.random(topic)
    for _ in range(torture.count(3, 30)):
        command = [sys.executable, "-c", SERVICE, str(tmp_path / "outbox"), topic, broker.bootstrap_servers]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as service:
            try:
                lines = [service.stdout.readline() for _ in range(rng.randrange(2, 60))]
                assert all(lines), service.stderr.read()
            finally:
                service.kill()
        assert service.returncode == -signal.SIGKILL
    with opened(3) as outbox:
        outbox.wait_shipped(WAIT_S)
        logs, pid = logs_of(outbox), outbox.pid
    assert min(len(records) for records in logs.values()) > 0
    copies = assert_all_visible_once(broker, topic, logs, pid, 2)
    sys.stdout.write(f"{sum(map(len, logs.values()))} records, {copies} raw copies\n")


def test_shipping_goes_on_when_a_stopped_log_was_opened_again(broker, topic, opened, tmp_path):
    create_topic(broker.bootstrap_servers, topic, 1, retention_ms=-1)
    disk = LosingDisk()
    config = LogConfig(flush_ms=10, preallocate_bytes=0)
    with opened(1, filesystem=disk, durability=Durability.FLUSHED, log_config=config) as outbox:
        outbox.append(0, b"before").result(WAIT_S)
        outbox.wait_shipped(WAIT_S)
        disk.fails = True
        with pytest.raises(DeliveryFailed):
            outbox.append(0, b"lost").result(WAIT_S)
        disk.fails = False

        def offset():
            try:
                return outbox.append(0, b"after").result(WAIT_S)
            except LogStopped:
                return None

        wait_until(lambda: offset() == 1, "its log is opened again by itself")
        outbox.wait_shipped(WAIT_S)
        assert outbox.lag()[f"kafka:{topic}"].trouble is None
        logs, pid = logs_of(outbox), outbox.pid
    assert assert_all_visible_once(broker, topic, logs, pid, 1) == 0, "and nothing was sent twice"


@pytest.mark.parametrize("where", [(SealedReader, "read"), (ShippedPartition, "prove")], ids=["read", "matched"])
def test_a_moment_without_descriptors_stops_no_partition(broker, topic, opened, monkeypatch, where):
    """faults B6: a shortage while a log is read, or held against the topic, is waited for, and is no stop."""
    create_topic(broker.bootstrap_servers, topic, 1)
    with opened(1) as outbox:
        outbox.append(0, b"before")
        outbox.wait_shipped(WAIT_S)
    is_short, method = Event(), getattr(*where)
    tried = Semaphore(0)

    def read(*arguments):
        if is_short.is_set():
            tried.release()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return method(*arguments)

    is_short.set()
    with monkeypatch.context() as patched:
        patched.setattr(*where, read)
        with opened(1) as outbox:
            outbox.append(0, b"behind").result()
            for _ in range(3):
                assert tried.acquire(timeout=WAIT_S)
            assert outbox.lag()[f"kafka:{topic}"].stopped == ()
            with pytest.raises(ShippingTimeout):
                outbox.wait_shipped(0)
            is_short.clear()
            outbox.wait_shipped(WAIT_S)
            logs, pid = logs_of(outbox), outbox.pid
    assert assert_all_visible_once(broker, topic, logs, pid, 1) == 0


def test_a_broker_that_is_killed_and_comes_back(broker, topic, opened, tmp_path, torture):
    """Contract: broker restarts; the batches that were in flight are sent again under their own sequence numbers."""
    create_topic(broker.bootstrap_servers, topic, 2)
    destination = KafkaDestination(bootstrap_servers=broker.bootstrap_servers)
    with opened(3, batch_bytes=2000) as outbox:
        for kill in [broker.kill, *[broker.shut_down, broker.kill] * torture.count(0, 5)]:
            other = Outbox.open(
                tmp_path / "other", topic, 1, "other", kafka=destination, config=OutboxConfig(open_timeout_s=WAIT_S)
            )
            for n in range(30):
                for partition in range(3):
                    outbox.append_many(partition, [b"%d" % n] * 50)
            kill()
            outbox.append(0, b"while it is away")
            outbox.flush()  # so that the wait below is for the topic alone
            with pytest.raises(ShippingTimeout):
                outbox.wait_shipped(0.2)
            other.close()
            assert not other.facts.shipping.sink._thread.is_alive(), "closing waits for no broker"
            broker.start()
            broker.wait_ready()
            outbox.wait_shipped(WAIT_S)
        logs, pid = logs_of(outbox), outbox.pid
    assert_all_visible_once(broker, topic, logs, pid, 2)


def test_an_outbox_opens_and_appends_while_kafka_is_away(broker, topic, opened):
    create_topic(broker.bootstrap_servers, topic)
    (port,) = free_ports(1)
    nowhere = KafkaDestination(bootstrap_servers=f"127.0.0.1:{port}", request_timeout_ms=500)
    with opened(1, destination=nowhere, open_timeout_s=0.1) as outbox:
        outbox.append(0, b"kept")
        outbox.flush()
        with pytest.raises(ShippingTimeout) as caught:
            outbox.wait_shipped(0.1)
        assert caught.value.records == 1
        assert outbox.lag()[f"kafka:{topic}"].records == 1

        def samples():
            return {
                one.name: one.value for family in StatusCollector(outbox.status).collect() for one in family.samples
            }

        assert samples()["pushrep_destination_lag_records"] == 1
        assert samples()["pushrep_destination_partition_lag_records"] == 1
        assert samples()["pushrep_destination_lag_bytes"] > 0
        wait_until(lambda: samples()["pushrep_destination_in_trouble"] == 1, "the first attempt has failed")
    with opened(1) as outbox:
        outbox.wait_shipped(WAIT_S)
        logs, pid = logs_of(outbox), outbox.pid
        assert samples()["pushrep_destination_shipped_records_total"] == 1
        assert samples()["pushrep_destination_shipped_bytes_total"] > 0
        assert samples()["pushrep_destination_partition_lag_records"] == 0
        assert samples()["pushrep_destination_request_duration_seconds_count"] == 1
        assert samples()["pushrep_destination_connections_total"] >= 1
        assert samples()["pushrep_destination_trouble_seconds"] == 0
    assert_all_visible_once(broker, topic, logs, pid, 1)


def test_topics_that_would_lose_records_are_refused_by_name(broker, topic, opened, tmp_path):
    """Contract, replay filtering: "refuse compaction, a too small max.message.bytes, and a retention.ms shorter than
    the age of the oldest unsent record ..., each by name"; by faults B2 the newest of its partition, which stops alone.
    """
    with pytest.raises(TopicMissing, match=topic):
        opened(1)
    create_topic(broker.bootstrap_servers, topic, cleanup_policy="compact,delete")
    with pytest.raises(DestinationRefused) as caught:
        opened(1)
    assert caught.value.setting == "cleanup.policy"
    alter_topic(broker.bootstrap_servers, topic, cleanup_policy="delete", max_message_bytes=100_000)
    with pytest.raises(DestinationRefused) as caught:
        opened(1)
    assert caught.value.setting == "max.message.bytes"
    with Outbox.open(tmp_path / "outbox", topic, 1, "test") as outbox:
        outbox.append(0, b"old", timestamp_ms=1_000_000_000_000)
    with opened(1, batch_bytes=100_000) as outbox, pytest.raises(ShippingStopped, match=r"retention\.ms=604800000"):
        outbox.wait_shipped(WAIT_S)
    alter_topic(broker.bootstrap_servers, topic, retention_ms=-1)
    with opened(1, batch_bytes=100_000) as outbox:
        outbox.wait_shipped(WAIT_S)
        assert same(read_filtered(broker.bootstrap_servers, topic, 1).of(outbox.pid, 0), logs_of(outbox)[0])


def test_a_batch_above_the_topics_limit_is_sent_in_parts(broker, topic, opened):
    """Contract: "A batch above the topic's max.message.bytes is split at record borders"."""
    create_topic(broker.bootstrap_servers, topic, max_message_bytes=20_000)
    with opened(1, batch_bytes=20_000, open_timeout_s=0) as outbox:
        outbox.append_many(0, [b"small"] * 3)
        outbox.wait_shipped(WAIT_S)
        alter_topic(broker.bootstrap_servers, topic, max_message_bytes=5_000)  # unseen: the broker says so
        outbox.append_many(0, [b"%d" % n * 100 for n in range(150)])
        outbox.append(0, b"behind")
        outbox.wait_shipped(WAIT_S)
        logs, pid = logs_of(outbox), outbox.pid
    assert_all_visible_once(broker, topic, logs, pid, 1)


def test_a_single_record_above_it_stops_its_partition_until_it_is_skipped(broker, topic, opened):
    """Contract: "a single record above it stops its partition and names its offset, until `pushrep outbox skip`"."""
    create_topic(broker.bootstrap_servers, topic, max_message_bytes=5_000)
    with opened(2, batch_bytes=5_000) as outbox:
        outbox.append_many(0, [b"before", bytes(6_000), b"behind"])
        with pytest.raises(ShippingStopped, match="pushrep outbox skip 1 ") as caught:
            outbox.wait_shipped(WAIT_S)
        assert (caught.value.partition, caught.value.offset) == (0, 1)
        assert outbox.lag()[f"kafka:{topic}"].stopped[0].offset == 1
        outbox.append(1, b"the other partition goes on")
        outbox.flush()
        outbox.facts.shipping.sink.state.wait({1: 1}, WAIT_S, None)
        assert run(["outbox", "skip", "1", "--directory", str(outbox.directory), "--reason", "a test"]) == 0
        assert outbox.lag()[f"kafka:{topic}"].stopped == (), "at once"
        outbox.wait_shipped(WAIT_S)
        logs, pid = logs_of(outbox), outbox.pid
    del logs[0][1]
    assert_all_visible_once(broker, topic, logs, pid, 1)


def test_a_topic_made_again_is_shipped_to_from_the_logs_start(broker, topic, opened):
    """Contract: "a re-created topic voids that destination's checkpoint, shipping begins at the log's start"."""
    create_topic(broker.bootstrap_servers, topic, 2)
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, "log_level": 0})
    with opened(2) as outbox:
        outbox.append_many(0, [b"one"] * 100)
        outbox.append_many(1, [b"one"] * 100)
        outbox.wait_shipped(WAIT_S)
        admin.delete_topics([topic])[topic].result(WAIT_S)
        create_topic(broker.bootstrap_servers, topic, 2)
        outbox.append_many(0, [b"two"] * 100)
        outbox.wait_shipped(WAIT_S)
        outbox.append_many(1, [b"three"] * 10)
        outbox.wait_shipped(WAIT_S)
        logs, pid = logs_of(outbox), outbox.pid
    assert_all_visible_once(broker, topic, logs, pid, 2)


def test_a_grown_topic_is_used_as_before(broker, topic, opened):
    """Contract: "n is fixed at first use: more partitions change nothing"."""
    create_topic(broker.bootstrap_servers, topic, 2)
    with opened(4) as outbox:
        outbox.append_many(3, [b"one"] * 10)
        outbox.wait_shipped(WAIT_S)
    add_partitions(broker.bootstrap_servers, topic, 4)
    with opened(4) as outbox:
        outbox.append_many(3, [b"two"] * 10)
        outbox.wait_shipped(WAIT_S)
        logs, pid = logs_of(outbox), outbox.pid
    assert consume(broker.bootstrap_servers, topic, 3) == []
    assert_all_visible_once(broker, topic, logs, pid, 2)


def produced_by_another(broker, topic, fields):
    """Send one batch under another producer's id, as a broken client would; returns the code of the answer."""

    destination = KafkaDestination(bootstrap_servers=broker.bootstrap_servers)
    topic_id = look_at_topic(destination, topic).topic_id

    async def send():
        cluster = Cluster(destination, topic)
        try:
            await cluster.refresh()
            connection = await cluster.connection(cluster.leaders[0])
            batch = encode_batch([b"foreign"], timestamps_ms=1_790_000_000_000).with_producer(*fields)
            return answers_of(await connection.send(ProduceBatches(topic, topic_id, {0: batch}, 10_000)))[0][0]
        finally:
            await cluster.close()

    return asyncio.run(send())


@pytest.mark.parametrize("fence", ["preferred", "off"])
@pytest.mark.parametrize("how", ["sequence", "epoch"])
def test_a_broker_that_lost_our_place_gets_a_new_producer_id_from_the_topics_end(broker, topic, opened, how, fence):
    """Contract: "UNKNOWN_PRODUCER_ID/OUT_OF_ORDER ...: new id only when nothing is in flight and the end is known"."""
    create_topic(broker.bootstrap_servers, topic)
    destination = KafkaDestination(bootstrap_servers=broker.bootstrap_servers, retry_backoff_ms=20, fence=fence)
    with opened(2, destination=destination) as outbox:
        outbox.append_many(0, [b"one"] * 10)
        outbox.append_many(1, [b"one"] * 10)
        outbox.wait_shipped(WAIT_S)

        def producer():
            """Of the newest batch in the topic."""
            data = with_cluster(broker.bootstrap_servers, topic, lambda cluster: cluster.fetch(0, 0))
            newest = [batch.header for batch in whole_batches(data) if not batch.header.is_control][-1]
            return newest.producer_id, newest.producer_epoch

        before = number, epoch = producer()
        fields = (number, epoch, 20) if how == "sequence" else (number, epoch + 1, 0)
        assert produced_by_another(broker, topic, fields).error_code == 0
        for n in range(20):
            outbox.append_many(n % 2, [b"two"] * 10)
        outbox.wait_shipped(WAIT_S)
        assert producer() != before
        logs, pid = logs_of(outbox), outbox.pid
    found = [seen for seen in consume(broker.bootstrap_servers, topic) if seen.value != b"foreign"]
    for partition, records in logs.items():
        own = [seen for seen in found if StreamMetadata.unpack(seen.key).partition == partition]
        assert same(own, records), "and no raw copy either"
    assert pid


def test_a_log_that_went_back_is_refused_until_a_new_pid_epoch_begins(broker, topic, opened, tmp_path):
    """Contract: "A destination whose tail lies above LEO ... is refused (DestinationAhead)"."""
    create_topic(broker.bootstrap_servers, topic)
    with opened(1) as outbox:
        outbox.append_many(0, [b"kept"] * 10)
        outbox.wait_shipped(WAIT_S)
        kept, old_pid = logs_of(outbox)[0], outbox.pid
    shutil.copytree(tmp_path / "outbox", tmp_path / "backup")
    with opened(1) as outbox:
        outbox.append_many(0, [b"lost"] * 10)
        outbox.wait_shipped(WAIT_S)
    shutil.rmtree(tmp_path / "outbox")
    shutil.move(tmp_path / "backup", tmp_path / "outbox")
    with pytest.raises(DestinationAhead) as caught:
        opened(1, copy_check=False)
    assert (caught.value.partition, caught.value.shipped_offset, caught.value.log_end_offset) == (0, 10, 10)
    begin_pid_epoch(tmp_path / "outbox")
    with opened(1, copy_check=False) as outbox:
        outbox.append_many(0, [b"new"] * 5)
        outbox.wait_shipped(WAIT_S)
        new, pid = logs_of(outbox)[0][10:], outbox.pid
    found = read_filtered(broker.bootstrap_servers, topic, 1)
    assert same(found.of(old_pid, 0)[:10], kept)
    assert same(found.of(pid, 0), new)


def test_retention_keeps_what_the_topic_has_not_acknowledged(broker, topic, opened, tmp_path):
    """Contract: "retention respects what the destination has not acknowledged"."""
    create_topic(broker.bootstrap_servers, topic)
    small = LogConfig(segment_bytes=2_000, batch_bytes=1_000, batch_bytes_max=2_000, flush_ms=10)
    with opened(1, log_config=small) as outbox:
        outbox.append_many(0, [bytes(400)] * 20)
        outbox.wait_shipped(WAIT_S)
        assert outbox.log(0).purge(20) > 0
    with Outbox.open(tmp_path / "outbox", topic, 1, "test", config=OutboxConfig(log_config=small)) as outbox:
        outbox.append_many(0, [bytes(400)] * 20)
        outbox.flush()
        with pytest.raises(StillNeeded, match=f"kafka:{topic}"):
            outbox.log(0).purge(40)


def test_ship_delivers_what_a_dead_service_left(broker, topic, opened, tmp_path, capsys):
    """Contract: "`pushrep ship DIRECTORY` delivers what a dead service left"."""
    create_topic(broker.bootstrap_servers, topic, 2)
    with Outbox.open(tmp_path / "outbox", topic, 3, "test", carrier="header") as outbox:
        for partition in range(3):
            outbox.append_many(partition, [b"left"] * 100, keys=[b"k"] * 100)
        outbox.flush()
        logs, pid = logs_of(outbox), outbox.pid
    (tmp_path / "client.properties").write_text("# a comment\nsecurity.protocol=PLAINTEXT\nclient.id = operator\n")
    config = ["--config", str(tmp_path / "client.properties")]
    command = ["ship", str(tmp_path / "outbox"), "--bootstrap-servers", broker.bootstrap_servers, *config]
    assert run([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) | {"seconds": 0} == {
        "topic": topic, "shipped": 300, "log_end_offsets": [100, 100, 100], "seconds": 0,
    }  # fmt: skip
    assert run(command) == 0
    assert "0 records shipped" in capsys.readouterr().out
    assert assert_all_visible_once(broker, topic, logs, pid, 2, "header") == 0


WORKER = """
import os, signal, sys
from pushrep import KafkaDestination, Outbox, OutboxConfig
directory, topic, servers, number = sys.argv[1:]
kafka = KafkaDestination(bootstrap_servers=servers)
outbox = Outbox.open_slot(directory, topic, 2, "shop", kafka=kafka, config=OutboxConfig(open_timeout_s=120))
outbox.append_many(0, [b"%s, shipped" % number.encode()] * 20)
outbox.wait_shipped(120)
print(outbox.directory.name, flush=True)
sys.stdin.readline()
for partition in range(2):
    outbox.append_many(partition, [b"%s, perhaps" % number.encode()] * 100).result(120)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_dead_workers_left_in_their_slots_is_shipped_once(broker, topic, tmp_path, capsys):
    """Killed behind an acknowledged append that the topic has, or not; an open slot is left to its worker."""
    create_topic(broker.bootstrap_servers, topic, 2)
    home = tmp_path / "workers"
    command = [sys.executable, "-c", WORKER, str(home), topic, broker.bootstrap_servers]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with ExitStack() as started:
        workers = [started.enter_context(subprocess.Popen([*command, str(n)], **pipes)) for n in range(2)]
        slots = {worker.stdout.readline().strip() for worker in workers}
        assert slots == {"slot-0", "slot-1"}, "at once, so each has one of its own"
        for worker in workers:
            worker.communicate("go on\n", WAIT_S)
            assert worker.returncode == -signal.SIGKILL
    ship = ["ship", str(home), "--bootstrap-servers", broker.bootstrap_servers]
    with Outbox.open(home / "slot-1", topic, 2, "shop"):
        assert run([*ship, "--json"]) == 0
        printed = capsys.readouterr()
        assert [json.loads(line)["slot"] for line in printed.out.splitlines()] == ["slot-0"]
        assert "slot-1: skipped, process" in printed.err
    assert run(ship) == 0
    assert "slot-0: 0 records shipped" in capsys.readouterr().out
    found = read_filtered(broker.bootstrap_servers, topic, 2)
    kept = {}
    for slot in slot_directories(home):
        for partition in range(2):
            with SegmentLog.open_reader(slot / f"{topic}-{partition}") as log:
                records = list(log.records(0))
            kept[StreamMetadata.unpack(records[0].key).pid, partition] = records
    assert len(kept) == 4, "a PID for each slot"
    assert {place: len(records) for place, records in kept.items()} == {
        (pid, partition): 120 - 20 * partition for pid, partition in kept
    }, "what was acknowledged is there"
    assert found.visible.keys() == kept.keys()
    for (pid, partition), records in kept.items():
        assert same(found.of(pid, partition), records)


def test_seven_days_of_what_the_topic_has_are_kept_and_nothing_goes_that_it_has_not(broker, topic, opened, tmp_path):
    """The default retention, for records older than that: none is removed before the topic has acknowledged it, with
    kills, too.
    """
    create_topic(broker.bootstrap_servers, topic, retention_ms=-1)  # the records are older than its default
    old_ms = int(time.time() * 1000) - 8 * 86_400_000
    small = LogConfig(segment_bytes=2_000, batch_bytes=1_000, batch_bytes_max=2_000, flush_ms=10)
    away = KafkaDestination(bootstrap_servers=f"127.0.0.1:{free_ports(1)[0]}", request_timeout_ms=500)

    def passes(log):
        while log.apply_retention():
            pass
        return log.log_start_offset

    def append(outbox, value, timestamp_ms):
        outbox.append_many(0, [value + bytes(400)] * 20, timestamps_ms=timestamp_ms)
        outbox.flush()

    with opened(1, log_config=small) as outbox:
        append(outbox, b"shipped", old_ms)
        outbox.wait_shipped(WAIT_S)
    with opened(1, log_config=small, destination=away, open_timeout_s=0.1) as outbox:
        append(outbox, b"not yet", old_ms)
        assert 0 < passes(outbox.log(0)) <= 20, "of what the topic has, whole segments; nothing else"
        (lag,) = outbox.lag().values()
        assert lag.records == 20
    with Outbox.open(tmp_path / "outbox", topic, 1, "test", config=OutboxConfig(log_config=small)) as outbox:
        assert passes(outbox.log(0)) <= 20, "nor where the destination is not named"
        pid, left = outbox.pid, list(outbox.log(0).records(20))
    with opened(1, log_config=small) as outbox:
        append(outbox, b"new", int(time.time() * 1000))
        outbox.wait_shipped(WAIT_S)
        assert 20 < passes(outbox.log(0)) <= 40, "the topic has them: they are older than 7 days"
        left += outbox.log(0).records(40)
        assert [record.offset for record in left] == list(range(20, 60)), "what is younger stays"
    found = read_filtered(broker.bootstrap_servers, topic, 1).of(pid, 0)
    assert same(found[20:], left), "and the topic has each of them once"


def test_ship_says_which_record_stops_it_and_skip_lets_it_go_on(broker, topic, opened, tmp_path, capsys):
    """Contract: "a single record above it stops its partition and names its offset, until `pushrep outbox skip`"."""
    create_topic(broker.bootstrap_servers, topic, max_message_bytes=5_000)
    with Outbox.open(tmp_path / "outbox", topic, 1, "test") as outbox:
        outbox.append_many(0, [b"before", bytes(6_000), b"behind"])
        outbox.flush()
        logs, pid = logs_of(outbox), outbox.pid
    ship = ["ship", str(tmp_path / "outbox"), "--bootstrap-servers", broker.bootstrap_servers]
    assert run(ship) == 1
    assert "pushrep outbox skip 1 " in capsys.readouterr().err
    where = ["--directory", str(tmp_path / "outbox")]
    assert run(["outbox", "skip", "0", *where, "--reason", "it is shipped already"]) == 1
    assert "from 1 to 2" in capsys.readouterr().err
    assert run(["outbox", "skip", "1", *where, "--reason", "too large"]) == 0
    assert run(ship) == 0
    with Outbox.open(tmp_path / "outbox", topic, 1, "test") as outbox:
        outbox.append_many(0, [bytes(6_000), b"last"]).result(WAIT_S)
        logs = logs_of(outbox)
    assert run([*ship, "--on-refused", "park"]) == 1
    assert "parked. See pushrep outbox parked list" in capsys.readouterr().err
    del logs[0][3], logs[0][1]
    assert_all_visible_once(broker, topic, logs, pid, 1)
    skip, _ = read_progress(REAL_FILESYSTEM, tmp_path / "outbox")[topic].skipped
    assert (skip.partition, skip.offset, skip.reason) == (0, 1, "too large")


def test_repartition_uses_a_grown_topic_under_a_new_pid_epoch(broker, topic, opened, tmp_path):
    """Contract: "Each PID epoch keeps its own n, so unshipped batches of the old one go by the old n"."""
    create_topic(broker.bootstrap_servers, topic, 2)
    with opened(4) as outbox:
        outbox.append_many(3, [b"one"] * 10)
        outbox.wait_shipped(WAIT_S)
        old_pid = outbox.pid
    with Outbox.open(tmp_path / "outbox", topic, 4, "test") as outbox:
        outbox.append_many(3, [b"not shipped when the topic grew"] * 10)
        outbox.flush()
    add_partitions(broker.bootstrap_servers, topic, 4)
    assert run(["outbox", "repartition", str(tmp_path / "outbox")]) == 0
    with opened(4) as outbox:
        assert outbox.pid != old_pid
        outbox.append_many(3, [b"two"] * 10)
        outbox.wait_shipped(WAIT_S)
        records, pid = logs_of(outbox)[3], outbox.pid
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, "log_level": 0})
    for is_again in (False, True):
        old, new = consume(broker.bootstrap_servers, topic, 1), consume(broker.bootstrap_servers, topic, 3)
        assert same(old, records[:20]), f"made again: {is_again}"
        assert same(new, records[20:]), f"made again: {is_again}"
        assert {StreamMetadata.unpack(seen.key).pid for seen in new} == {pid}
        if not is_again:
            admin.delete_topics([topic])[topic].result(WAIT_S)
            create_topic(broker.bootstrap_servers, topic, 4)
            with opened(4) as outbox:  # from the logs' start, each PID epoch by its own number again
                outbox.wait_shipped(WAIT_S)


def test_a_dropped_destination_keeps_nothing(broker, topic, opened, tmp_path):
    create_topic(broker.bootstrap_servers, topic)
    small = LogConfig(segment_bytes=2_000, batch_bytes=1_000, batch_bytes_max=2_000, flush_ms=10)
    with opened(1, log_config=small) as outbox:
        outbox.append_many(0, [bytes(400)] * 20)
        outbox.wait_shipped(WAIT_S)
        assert run(["outbox", "skip", "all", "--directory", str(outbox.directory), "--topic", topic]) == 1, (
            "a service has it open"
        )
    drop = ["outbox", "skip", "all", "--directory", str(tmp_path / "outbox"), "--topic"]
    assert run([*drop, "another"]) == 1
    assert run([*drop, topic]) == 0
    with Outbox.open(tmp_path / "outbox", topic, 1, "test", config=OutboxConfig(log_config=small)) as outbox:
        outbox.append_many(0, [bytes(400)] * 20)
        outbox.flush()
        assert outbox.log(0).purge(40) > 20

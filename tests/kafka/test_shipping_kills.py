"""Three real brokers, an outbox process and a Spark job, killed at random: every record visible once, in order.

    service: appends, acknowledged by its own disk ─▶ ships ─▶ topic of 3 partitions ─▶ Spark's apply job ─▶ table
       ▲ kill -9                                      on 3 brokers ▲                        ▲ kill -9, with its JVM
                                                                   kill -9 or SIGTERM: a leader, the controller

`make torture` does it for minutes; the short form has no Spark.
Below: a partition of one copy whose broker is dead.
"""

import contextlib
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack

import pyarrow.dataset
import pytest

from partitioner import NotDelivered
from pushrep.kafka import KafkaDestination
from pushrep.log import Durability, LogConfig
from pushrep.outbox import Outbox
from tests.integration.outboxes import wait_until
from tests.kafka.plain_client import create_topic
from tests.kafka.spark_process import SparkJob, connector
from tests.kafka.test_source_partition_producer import confluent, filtered, produce
from tests.kafka.topic_reader import read_filtered, same
from tests.support.outbox_arguments import outbox_arguments

pytestmark = [pytest.mark.java, pytest.mark.spark, pytest.mark.slow]
PARTITIONS, WAIT_S, JOB_S = 5, 180, 300

SERVICE = """
import sys
from pushrep import Durability, LogConfig, Outbox, OutboxConfig
from pushrep.kafka import KafkaDestination
directory, topic, servers = sys.argv[1:]
destination = KafkaDestination(bootstrap_servers=servers, request_timeout_ms=5000)
with Outbox.open(
    directory, topic, 5, "test", kafka=destination, durability=Durability.BUFFERED,
    config=OutboxConfig(
        linger_ms=1, open_timeout_s=0.1, log_config=LogConfig(batch_bytes=4000, flush_ms=10),
    ),
) as outbox:
    numbers = [outbox.log(partition).log_end_offset for partition in range(5)]
    while True:
        for partition in range(5):
            outbox.append_many(partition, [b"%d %d" % (partition, numbers[partition] + n) for n in range(20)])
            numbers[partition] += 20
        outbox.flush()
        print(outbox.lag()[f"kafka:{topic}"].records, flush=True)
        if sys.stdin.read(1) != ".":
            break
"""


class Service:
    """The outbox in a separate process; each step appends to all partitions."""

    def __init__(self, *arguments):
        self._arguments = arguments
        self._start()

    def _start(self):
        command = [sys.executable, "-c", SERVICE, *map(str, self._arguments)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def step(self):
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()[-3000:]
        self.process.stdin.write(".")
        self.process.stdin.flush()

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
        with contextlib.suppress(BrokenPipeError):  # a step that it did not read any more
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.stderr.close()
        assert self.process.wait() == -signal.SIGKILL

    def restart(self):
        self.kill()
        self._start()
        self.step()


class Reader:
    """The apply job on the topic, with a batch each second. It may end by itself while brokers are away; then it is
    started again, as a supervisor would.
    """

    def __init__(self, place, cluster, topic, jars):
        self._place = place
        self._arguments = (
            *("--source", "kafka", "--topic", topic, "--conf", f"spark.jars={jars}"),
            *("--source-option", f"kafka.bootstrap.servers={cluster.bootstrap_servers}"),
            *("--sink", str(place / "table"), "--value-format", "string", "--checkpoint", str(place / "checkpoint")),
        )
        self.ended, self._is_killed = 0, False
        self._start("--trigger", "1s")

    def _start(self, *arguments):
        self.job, self._is_killed = SparkJob(self._place, "apply", *self._arguments, *arguments), False

    @property
    def batches(self):
        """Batches that were done, over all runs."""
        return sum(event["event"] == "batch" for event in self.job.events)

    def keep_running(self):
        """Start the job again if it was killed, or ended by itself."""
        if not self.job.is_running:
            self.ended += not self._is_killed
            self._start("--trigger", "1s")

    def until(self, batches, meanwhile):
        """Return when so many are done, whatever it takes; `meanwhile` gives it something to read."""
        deadline_s = time.monotonic() + JOB_S
        while self.batches < batches:
            assert time.monotonic() < deadline_s, f"{self.batches} of {batches} batches: {self.job.events[-1:]}"
            self.keep_running()
            meanwhile()
            time.sleep(0.05)

    def kill(self):
        self.job.kill()
        self._is_killed = True

    def finish(self):
        """Read what is left, and the table as (topic partition, topic offset, value), in the topic's order."""
        self.kill()
        self._start()
        assert self.job.wait(JOB_S) == 0, self.job.told
        rows = pyarrow.dataset.dataset(self._place / "table", partitioning="hive").to_table().to_pylist()
        return sorted((row["partition"], row["offset"], row["value"]) for row in rows)


def controller_of(cluster):
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
    return admin.list_topics(timeout=30).controller_id


def a_broker_dies(cluster, service, kills, rng):
    """One of three goes and comes back; the service appends before, meanwhile and behind it."""
    for _ in range(rng.randrange(5, 40)):
        service.step()
    is_first = not any(kills.values())
    is_controller = is_first or rng.random() < 0.3
    node = controller_of(cluster) if is_controller else rng.choice(list(cluster.nodes))
    how = rng.choice([cluster.kill, cluster.kill, cluster.shut_down])
    how(node)
    kills[f"brokers by {how.__name__}"] += 1
    kills["of them the controller"] += is_controller
    for _ in range(rng.randrange(5, 40)):
        service.step()
    return node


@pytest.mark.timeout(1800)  # of the long form
def test_kills_of_brokers_of_the_outbox_process_and_of_spark(three_brokers, tmp_path, torture, tool_or_skip):
    """Shown on real brokers: "every appended record visible once after filtering, none missing, order ... kept".

    Without Spark in the short form: the demo through Kafka (test_demo_kafka.py) kills a broker that two jobs read from,
    and both jobs.
    """
    cluster, topic = three_brokers, f"kills-{torture.seed}"
    rng, kills = torture.random("kills"), Counter()
    create_topic(cluster.bootstrap_servers, topic, 3)
    ends_s = time.monotonic() + torture.count(0, 300)
    with ExitStack() as stack:
        service = Service(tmp_path / "outbox", topic, cluster.bootstrap_servers)
        stack.callback(service.kill)
        reader = None
        if torture.is_long:
            jars, why = connector()
            tool_or_skip(why)
            reader = Reader(tmp_path / "spark", cluster, topic, jars)
            stack.callback(reader.kill)
        while not kills or time.monotonic() < ends_s:
            is_first = not kills
            if reader:
                reader.keep_running()
            node = a_broker_dies(cluster, service, kills, rng)
            if is_first or rng.random() < 0.5:
                service.restart()
                kills["outbox"] += 1
            if reader and (is_first or rng.random() < 0.4):
                reader.until(reader.batches + 1, service.step)  # it has something to lose
                reader.kill()
                kills["spark"] += 1
            cluster.start(node)
            cluster.wait_ready()
            for _ in range(rng.randrange(5, 20)):
                service.step()
        service.kill()
        logs, pid = shipped(tmp_path / "outbox", cluster, topic)
        rows = reader and reader.finish()
    found = read_filtered(cluster.bootstrap_servers, topic, 3)
    for partition, records in enumerate(logs):
        assert records
        assert same(found.of(pid, partition), records), f"partition {partition}"
    assert len(found.visible) == PARTITIONS
    told = ", ".join(f"{count} {what}" for what, count in kills.items())
    sys.stdout.write(f"killed: {told}; {sum(map(len, logs))} records, {found.copies} raw copies in the topic\n")
    if reader:
        for partition, records in enumerate(logs):
            applied = [value for _, _, value in rows if value.startswith(f"{partition} ")]
            assert applied == [record.value.decode() for record in records], f"partition {partition} in the table"
        assert len(rows) == sum(map(len, logs)), "and nothing else"
        sys.stdout.write(f"{reader.batches} batches of Spark, which ended {reader.ended} times by itself\n")


def shipped(directory, cluster, topic):
    """Everything that the logs hold, once the topic has it; and their PID."""
    destination = KafkaDestination(bootstrap_servers=cluster.bootstrap_servers)
    settings = {"durability": Durability.BUFFERED, "log_config": LogConfig(flush_ms=10)}
    with Outbox.open(directory, topic, PARTITIONS, "test", **outbox_arguments(kafka=destination, **settings)) as opened:
        opened.wait_shipped(WAIT_S)
        return [list(opened.log(n).records(0)) for n in range(PARTITIONS)], opened.pid


def test_with_the_leader_unknown_past_every_timeout_there_is_no_hole(three_brokers):
    """A topic with one replica whose broker is dead."""
    create_topic(three_brokers.bootstrap_servers, "leaderless", copies=1)
    story(three_brokers, "leaderless", leader_of(three_brokers, "leaderless"))
    assert filtered(three_brokers, "leaderless", 0)[0] == {0: list(range(150))}


def leader_of(cluster, topic):
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
    found = {}

    def is_known():  # a broker that has just started again may not know the topic yet
        found.update(admin.list_topics(topic, timeout=30).topics[topic].partitions)
        return 0 in found and found[0].leader >= 0

    wait_until(is_known, f"{topic} has a leader")
    return found[0].leader


def story(cluster, topic, leader):
    with confluent(cluster, topic) as producer:
        produce(producer, range(50), sources=(0,))
        producer.flush()
        cluster.kill(leader)
        produce(producer, range(50, 100), sources=(0,))
        with pytest.raises(NotDelivered):
            producer.flush(3)
        produce(producer, range(100, 150), sources=(0,))
        cluster.start(leader)
        cluster.wait_ready()
        producer.flush(WAIT_S)

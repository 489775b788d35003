"""Three real brokers and an outbox process, killed at random: every record visible once, in order, none lost.

    service: appends, acknowledged by its own disk ─▶ ships ─▶ topic of 3 partitions on 3 brokers
       ▲ kill -9                                        ▲ kill -9 of a leader, a follower, the controller

`make torture` does it for minutes.
"""

import contextlib
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from pushrep.kafka import KafkaDestination
from pushrep.log import Durability, LogConfig
from pushrep.outbox import Outbox
from tests.kafka.plain_client import create_topic
from tests.kafka.topic_reader import read_filtered, same

pytestmark = [pytest.mark.java, pytest.mark.slow]
PARTITIONS, WAIT_S = 5, 180

SERVICE = """
import sys
from pushrep import Durability, LogConfig, Outbox
from pushrep.kafka import KafkaDestination
directory, topic, servers = sys.argv[1:]
destination = KafkaDestination(bootstrap_servers=servers, request_timeout_ms=5000)
with Outbox.open(directory, topic, 5, "test", kafka=destination, batch_bytes=4000, linger_ms=1, open_timeout_s=0.1,
                 durability=Durability.BUFFERED, log_config=LogConfig(flush_ms=10)) as outbox:
    n = 0
    while True:
        for partition in range(5):
            outbox.append_many(partition, [b"x" * 100] * 20)
        outbox.flush()
        print(outbox.lag()[f"kafka:{topic}"].records, flush=True)
        if sys.stdin.read(1) != ".":
            break
"""


class Service:
    """The outbox in a process of its own; a step appends to every partition."""

    def __init__(self, *arguments):
        command = [sys.executable, "-c", SERVICE, *map(str, arguments)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def step(self):
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()[-3000:]
        self.process.stdin.write(".")
        self.process.stdin.flush()

    def kill(self):
        self.process.kill()
        with contextlib.suppress(BrokenPipeError):  # a step that it did not read any more
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.stderr.close()
        assert self.process.wait() == -signal.SIGKILL


def controller_of(cluster):
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
    return admin.list_topics(timeout=30).controller_id


def test_kills_of_brokers_and_of_the_outbox_process(three_brokers, tmp_path, torture):
    """Shown on real brokers: "every appended record visible once after filtering, none missing, order ... kept"."""
    cluster, topic = three_brokers, f"kills-{torture.seed}"
    rng = torture.random("kills")
    create_topic(cluster.bootstrap_servers, topic, 3)
    outbox, kills = tmp_path / "outbox", 0
    arguments = (outbox, topic, cluster.bootstrap_servers)
    ends_s = time.monotonic() + torture.count(0, 300)
    with ExitStack() as stack:
        service = Service(*arguments)
        stack.callback(lambda: service.process.poll() is None and service.kill())
        while kills < torture.count(1, 2) or time.monotonic() < ends_s:
            for _ in range(rng.randrange(5, 40)):
                service.step()
            node = controller_of(cluster) if kills == 0 or rng.random() < 0.3 else rng.choice(list(cluster.nodes))
            rng.choice([cluster.kill, cluster.kill, cluster.shut_down])(node)
            for _ in range(rng.randrange(5, 40)):
                service.step()
            if kills == 0 or rng.random() < 0.5:
                service.kill()
                service = Service(*arguments)
                service.step()
            cluster.start(node)
            cluster.wait_ready()
            kills += 1
        service.kill()
    destination = KafkaDestination(bootstrap_servers=cluster.bootstrap_servers)
    config = LogConfig(flush_ms=10)
    with Outbox.open(
        outbox, topic, PARTITIONS, "test", kafka=destination, durability=Durability.BUFFERED, log_config=config
    ) as opened:
        opened.wait_shipped(WAIT_S)
        logs, pid = [list(opened.log(n).records(0)) for n in range(PARTITIONS)], opened.pid
    found = read_filtered(cluster.bootstrap_servers, topic, 3)
    for partition, records in enumerate(logs):
        assert records
        assert same(found.of(pid, partition), records), f"partition {partition}"
    assert len(found.visible) == PARTITIONS
    sys.stdout.write(f"{kills} kills, {sum(map(len, logs))} records, {found.copies} raw copies\n")

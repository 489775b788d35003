"""An audit of minutes: three real brokers and a service under faults of both sides, with `on_refused="park"`.

    service (killed, stopped, opened anew) ─▶ topic of four partitions, each of three copies, or each of one
       in between: records that are late, ahead of the broker, too large; settings of the topic change
    audit:  what was acknowledged ═ what an independent reader finds in the topic + what is parked, each once, in order

No partition may be behind for longer than its own cause lasts and 20 s more: from the moment at which all is well again
that is measured, for each partition by itself. Of one copy, a dead broker leaves partitions without a leader; the
others have to be shipped meanwhile, also by a service that is opened in that time.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from filtering import StreamMetadata
from tests.kafka.plain_client import alter_topic, consume_all, wait_known
from tests.programs import PUSHREP

pytestmark = [pytest.mark.java, pytest.mark.slow, pytest.mark.long]
PARTITIONS = 4
PLACED = {3: [[1, 2, 3], [2, 3, 1], [3, 1, 2], [1, 3, 2]], 1: [[1], [2], [3], [3]]}
"""By the number of copies, the brokers of each partition."""
BEHIND_S = 20
MINUTES = float(os.environ.get("PUSHREP_AUDIT_MINUTES", "10"))

SERVICE = """
import json, os, sys, time
from pushrep import Durability, LogConfig, Outbox, OutboxConfig
from pushrep.kafka import KafkaDestination
directory, topic, servers = sys.argv[1:]
destination = KafkaDestination(bootstrap_servers=servers, request_timeout_ms=5000, on_refused="park")
config = OutboxConfig(linger_ms=1, open_timeout_s=0.1, log_config=LogConfig(flush_ms=10))
with Outbox.open(
    directory, topic, 4, "audit", kafka=destination, durability=Durability.BUFFERED, config=config
) as outbox:
    state = outbox.facts.shipping.sink.state
    for line in sys.stdin:
        futures = []
        for partition, size, age_ms in json.loads(line):
            at_ms = time.time_ns() // 1_000_000 - age_ms
            futures.append((partition, outbox.append(partition, os.urandom(size), timestamp_ms=at_ms)))
        outbox.flush()
        given = [(partition, future.result()) for partition, future in futures]
        behind = {
            str(n): outbox.log(n).log_end_offset - state.sources[n].acknowledged for n in range(4)
        }
        lag = outbox.lag()[f"kafka:{topic}"]
        print(json.dumps({
            "pid": outbox.pid, "given": given, "behind": behind, "trouble": lag.trouble,
            "stopped": [(one.partition, one.reason) for one in lag.stopped],
        }), flush=True)
"""


class Service:
    """The service's process, what it acknowledged, and how far each partition was behind at its last answer."""

    def __init__(self, *arguments):
        self._command = [sys.executable, "-c", SERVICE, *map(str, arguments)]
        self.acknowledged, self.behind, self.told = {}, {}, {}
        self.start()

    def start(self):
        self.process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def append(self, records):
        """[(partition, size, age in ms)] → nothing; what was acknowledged is noted."""
        self.process.stdin.write(json.dumps(records) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the service ended with {self.process.wait()}"
        self.told = json.loads(line)
        for partition, offset in self.told["given"]:
            self.acknowledged.setdefault(partition, set()).add(offset)
        self.behind = {int(n): count for n, count in self.told["behind"].items()}

    def end(self, how):
        self.process.send_signal(how)
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def close(self):
        """A clean end: its standard input ends."""
        self.process.stdin.close()
        assert self.process.wait() == 0
        self.process.stdout.close()


def records(rng, counts):
    """What the service appends in one step: plain ones, and now and then one that the topic may refuse."""
    batch = [(partition, 100, 0) for partition in range(PARTITIONS) for _ in range(rng.randrange(1, 15))]
    if rng.random() < 0.005:
        size, age_ms, kind = rng.choice(
            [(100, 8 * 86_400_000, "late"), (100, -2 * 3_600_000, "ahead"), (200_000, 0, "large")]
        )
        batch.insert(rng.randrange(len(batch)), (rng.randrange(PARTITIONS), size, age_ms))
        counts[f"records that were {kind}"] += 1
    return batch


def appending(service, rng, counts, seconds):
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        service.append(records(rng, counts))
        time.sleep(0.05)


def wait_led(servers, topic, copies, partitions):
    """Until each partition has a leader and takes writes, and so does what keeps transactions: brokers that answer may
    still elect for seconds, and a partition without a leader is a cause of its own.
    """
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    for _ in range(1200):
        topics = admin.list_topics(timeout=30).topics
        found = [topics[topic].partitions[number] for number in partitions]
        if len(partitions) == PARTITIONS:
            found += topics["__transaction_state"].partitions.values()
        if all(one.leader >= 0 and len(one.isrs) >= min(2, copies) for one in found):
            return
        time.sleep(0.1)
    raise AssertionError("partitions without a leader for two minutes, though all brokers run")


def all_shipped(cluster, service, topic, copies, counts, partitions):
    """From a moment at which all is well on: the seconds until each partition was not behind once."""
    wait_led(cluster.bootstrap_servers, topic, copies, partitions)
    began_s, took_s = time.monotonic(), {}
    while len(took_s) < len(partitions):
        service.append([])
        for partition in partitions:
            if not service.behind[partition]:
                took_s.setdefault(partition, time.monotonic() - began_s)
        if time.monotonic() - began_s > 120:
            raise AssertionError(f"behind for two minutes when all is well: {service.told}")
        time.sleep(0.1)
    counts["longest behind, ms"] = max(counts["longest behind, ms"], round(max(took_s.values()) * 1000))
    assert max(took_s.values()) < BEHIND_S, f"behind for {took_s} s with nothing wrong; {counts}"


def a_fault(cluster, service, topic, copies, rng, counts):
    """One fault, some seconds of appends in it, and its end. Returns when all is well again."""
    servers = cluster.bootstrap_servers
    kind = rng.choice(["kill broker", "stop broker", "pause broker", "two brokers", "kill service", "deploy", "topic"])
    counts[kind] += 1
    node, seconds = rng.choice(list(cluster.nodes)), rng.uniform(1, 15)
    if kind in {"kill broker", "stop broker"}:
        (cluster.kill if kind == "kill broker" else cluster.shut_down)(node)
        appending(service, rng, counts, seconds)
        if rng.random() < 0.5:  # a deploy while a partition may have no leader
            service.end(signal.SIGKILL)
            service.start()
            appending(service, rng, counts, 2)
            counts["deploys in a fault"] += 1
        if copies == 1:
            led = [number for number, [alone] in enumerate(PLACED[1]) if alone != node]
            all_shipped(cluster, service, topic, copies, counts, led)
        cluster.start(node)
        cluster.wait_ready()
    elif kind == "two brokers":
        others = rng.sample(list(cluster.nodes), 2)
        for one in others:
            cluster.kill(one)
        appending(service, rng, counts, seconds)
        for one in others:
            cluster.start(one)
        cluster.wait_ready()
    elif kind == "pause broker":
        pid = cluster.pids[node - 1]
        os.kill(pid, signal.SIGSTOP)
        try:
            appending(service, rng, counts, seconds * 2)
        finally:
            os.kill(pid, signal.SIGCONT)
        cluster.wait_ready()
    elif kind in {"kill service", "deploy"}:
        appending(service, rng, counts, 2)
        service.end(signal.SIGKILL) if kind == "kill service" else service.close()
        service.start()
        service.append([])
    else:
        alter_topic(servers, topic, max_message_bytes=rng.choice([20_000, 1_048_588]))
        alter_topic(servers, topic, compression_type=rng.choice(["producer", "uncompressed", "zstd"]))
        alter_topic(servers, topic, min_insync_replicas=rng.choice([1, min(2, copies)]))
        appending(service, rng, counts, seconds)
        alter_topic(servers, topic, max_message_bytes=1_048_588)  # a start with small ones is refused, as a setting


def parked(directory):
    command = [PUSHREP, "outbox", "parked", "list", "--directory", str(directory), "--json"]
    found = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    return [(one["partition"], one["offset"]) for one in json.loads(found)["parked"]]


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("copies", PLACED)
def test_faults_of_both_sides_lose_and_double_nothing_and_end_with_their_cause(
    three_brokers, tmp_path, torture, copies
):
    cluster, topic = three_brokers, f"audit-{copies}-{torture.seed}"
    rng, counts = torture.random("audit"), Counter()
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
    admin.create_topics([NewTopic(topic, PARTITIONS, replica_assignment=PLACED[copies])])[topic].result()
    wait_known(cluster.bootstrap_servers, topic, PARTITIONS)
    ends_s = time.monotonic() + MINUTES * 60
    with ExitStack() as stack:
        service = Service(tmp_path / "outbox", topic, cluster.bootstrap_servers)
        stack.callback(lambda: service.process.poll() is None and service.end(signal.SIGKILL))
        while time.monotonic() < ends_s:
            appending(service, rng, counts, 3)
            a_fault(cluster, service, topic, copies, rng, counts)
            all_shipped(cluster, service, topic, copies, counts, range(PARTITIONS))
        pid = service.told["pid"]
        service.close()
    given_up = parked(tmp_path / "outbox")
    seen, copies = {}, 0
    for partition, found in consume_all(cluster.bootstrap_servers, topic, range(PARTITIONS)).items():
        newest = -1
        for one in found:
            metadata = StreamMetadata.unpack(one.key)
            assert (metadata.pid, metadata.partition) == (pid, partition)
            if metadata.offset <= newest:
                copies += 1
                continue
            newest = metadata.offset
            seen.setdefault(partition, []).append(metadata.offset)
    counts["acknowledged"] = sum(map(len, service.acknowledged.values()))
    counts["parked"], counts["copies"] = len(given_up), copies
    sys.stderr.write(f"{dict(counts)}\n")
    assert len(given_up) == len(set(given_up)), "each once"
    for partition, offsets in service.acknowledged.items():
        aside = {offset for number, offset in given_up if number == partition}
        assert not aside & set(seen[partition]), "parked or shipped, not both"
        missing = offsets - aside - set(seen[partition])
        assert not missing, f"{len(missing)} acknowledged records of partition {partition} are nowhere: {min(missing)}"

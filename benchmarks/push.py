"""G7, G9: records to one replica, a process of its own that checks every CRC and writes, beside confluent-kafka to one
real broker. Both in the page cache (D0), both until the last record is acknowledged.

Ours: values are encoded into batches of 256 KiB, appended to the local log and pushed from memory; the replica appends
them to its own. The peer: `produce()` of the same values, linger 5 ms, batches of 1 MB, acks=1, one partition. A
latency is that of one record of 100 B alone, from its append (`produce`) to its acknowledgement.
"""

import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from benchmarks.harness import AtMost, compare, random_values, scratch, spread
from pushrep.log import Durability, SegmentLog
from pushrep.push.leading import Leading
from pushrep.push.settings import PushSettings, Replica
from pushrep.push.sockets import Address
from pushrep.records import RecordBatch, encode_batch
from pushrep.replication.grants import Grant, Member
from tests.kafka.cluster import KafkaCluster, missing

ROUND_BYTES = 64_000_000
BATCH_BYTES = 256 << 10
ONE_BY_ONE = 1000
WAIT_S = 60.0
GOALS = {1024: {"produce()": 1.0}, 100: {"produce()": 4.0}}


def run(rounds: int) -> dict[str, Any]:
    """Throughput at 1 KiB and at 100 B, and the latency of one record alone."""
    results: dict[str, Any] = {}
    with scratch("push") as root, _led(root) as led:
        why = missing()
        if why is None:
            with KafkaCluster(root / "kafka") as cluster:
                topic = _topic(cluster)
                for size in (1024, 100):
                    results |= _throughput(led, size, rounds, _produce(cluster, topic))
                results |= _latency(led, rounds, _produce_one(cluster, topic))
        else:
            for size in (1024, 100):
                results |= _throughput(led, size, rounds, None)
            results |= _latency(led, rounds, None)
            for result in results.values():
                result["notes"] = [f"no peer: {why}"]
    return results


class Led:
    """A leader with one replica."""

    def __init__(self, leading: Leading, log: SegmentLog) -> None:
        self.leading, self.log = leading, log

    def append(self, values: list[bytes]) -> None:
        """Encode, append, push."""
        batch: RecordBatch = encode_batch(values, timestamps_ms=1)
        result = self.log.append(batch, durability=Durability.BUFFERED)
        self.leading.on_append(0, result.base_offset, [batch])

    def wait(self) -> None:
        """Until all of it is acknowledged."""
        done = threading.Event()
        self.leading.when_replicated(0, self.log.log_end_offset, lambda _: done.set())
        if not done.wait(WAIT_S):
            raise TimeoutError("the replica did not acknowledge")


@contextmanager
def _led(root: Path) -> Iterator[Led]:
    command = [sys.executable, "-m", "pushrep.cli.main", "replica", "serve", str(root / "replica")]
    process = subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0", "--allow", "any"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        address = Address.parse(process.stdout.readline().split()[2].rstrip(","))
        grant = Grant(
            outbox_id=uuid4(),
            epoch=256,
            leader=0,
            members=(Member(0), Member(1)),
            min_insync_replicas=2,
            members_epoch=256,
            pid_epoch=0,
            topic_id=UUID(int=1),
            topic="orders",
            partitions=1,
            carrier="key",
        )
        with SegmentLog.open(root / "leader" / "orders-0", has_replicas=True) as log:
            leading = Leading(
                grant.outbox_id,
                grant,
                {0: log},
                [Replica(1, address)],
                durability=Durability.BUFFERED,
                settings=PushSettings(),
            )
            leading.start()
            yield Led(leading, log)
            leading.close()
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def _throughput(led: Led, size: int, rounds: int, peer: Callable[[list[bytes]], None] | None) -> dict[str, Any]:
    values = random_values(ROUND_BYTES // size, size)
    per_batch = BATCH_BYTES // size

    def ours() -> float:
        for start in range(0, len(values), per_batch):
            led.append(values[start : start + per_batch])
        led.wait()
        return len(values)

    def theirs() -> float:
        assert peer is not None
        peer(values)
        return len(values)

    sides = {"push": ours} | ({"produce()": theirs} if peer is not None else {})
    result = compare(sides, rounds=rounds, unit="records/s", goals=GOALS[size])
    return {f"G7: to one replica, {size} B records, D0": result}


def _latency(led: Led, rounds: int, peer: Callable[[bytes], None] | None) -> dict[str, Any]:
    values = random_values(ONE_BY_ONE, 100)

    def ours(value: bytes) -> None:
        led.append([value])
        led.wait()

    sides = {"push": ours} | ({"produce() + flush()": peer} if peer is not None else {})
    p50: dict[str, list[float]] = {name: [] for name in sides}
    p99: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, side in sides.items():
            times = []
            for value in values:
                began = time.perf_counter()
                side(value)
                times.append(1000 * (time.perf_counter() - began))
            if number:  # the first round warms up
                cuts = statistics.quantiles(times, n=100)
                p50[name].append(cuts[49])
                p99[name].append(cuts[98])
    result: dict[str, Any] = {"unit": "ms, p50", "rounds": rounds, "ours": "push", "ratios": {}}
    result["rates"] = {name: spread(values) for name, values in p50.items()}
    for name, theirs in p50.items():
        if name != "push":
            ratios = [mine / other for mine, other in zip(p50["push"], theirs, strict=True)]
            result["ratios"][name] = spread(ratios) | AtMost(1.0).cells()
    shown = ", ".join(f"{name} {statistics.median(values):.2f} ms" for name, values in p99.items())
    result["notes"] = [f"p99: {shown}"]
    return {"G9: one record alone until it is acknowledged": result}


def _topic(cluster: KafkaCluster) -> str:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    for created in admin.create_topics([NewTopic("push", num_partitions=1, replication_factor=1)]).values():
        created.result()
    return "push"


def _produce(cluster: KafkaCluster, topic: str) -> Callable[[list[bytes]], None]:
    producer = Producer(
        {
            "bootstrap.servers": cluster.bootstrap_servers,
            "linger.ms": 5,
            "batch.size": 1_000_000,
            "acks": 1,
            "queue.buffering.max.messages": 2_000_000,
            "queue.buffering.max.kbytes": 1 << 20,
        }
    )

    def produce(values: list[bytes]) -> None:
        for value in values:
            while True:
                try:
                    producer.produce(topic, value, partition=0)
                    break
                except BufferError:
                    producer.poll(0.01)
        producer.flush()

    return produce


def _produce_one(cluster: KafkaCluster, topic: str) -> Callable[[bytes], None]:
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "linger.ms": 0, "acks": 1})

    def produce(value: bytes) -> None:
        producer.produce(topic, value, partition=0)
        producer.flush()

    return produce

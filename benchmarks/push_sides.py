"""Both sides of the benchmarks of push replication: nodes as processes, brokers as processes, and what they use.

Brokers run here as they run in production, with both of Java's compilers and its default collector; a test's run with
less, to start sooner.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self
from uuid import UUID, uuid4

from confluent_kafka import Producer

from pushrep.election.grants import Grant, Member
from pushrep.env import SYSTEM_CLOCK
from pushrep.log import Durability, SegmentLog
from pushrep.records import encode_batch
from pushrep.replicate.leading import Leading
from pushrep.replicate.settings import PushSettings, Replica
from pushrep.replicate.sockets import Address
from tests.kafka.cluster import KafkaCluster
from tests.kafka.plain_client import create_topic

BROKER_JVM = ("-XX:+UseG1GC",)
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_MIB = 1 << 20
_WAIT_S = 60.0


class Node(NamedTuple):
    """A `pushrep replica serve`."""

    pid: int
    address: Address


@contextmanager
def nodes(root: Path, count: int, *, within: Sequence[str] = (), host: str = "127.0.0.1") -> Iterator[list[Node]]:
    """So many replicas, below `root`. `within`: a command that runs theirs, in another network namespace say."""
    command = [*within, sys.executable, "-m", "pushrep.cli.main", "replica", "serve"]
    more = () if host == "127.0.0.1" else ("--plain",)
    processes = []
    try:
        found = []
        for number in range(1, count + 1):
            told = [str(root / f"replica-{number}"), "--listen", f"{host}:0", "--allow", "any", *more]
            process = subprocess.Popen([*command, *told], stdout=subprocess.PIPE, text=True)
            processes.append(process)
            assert process.stdout is not None, "it was asked for"
            found.append(Node(process.pid, Address.parse(process.stdout.readline().split()[2].rstrip(","))))
        yield found
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
            assert process.stdout is not None, "it was asked for"
            process.stdout.close()


class Led:
    """A leader of one partition, without an outbox around it."""

    def __init__(self, leading: Leading, log: SegmentLog) -> None:
        self.leading, self.log = leading, log

    def append(self, values: list[bytes]) -> None:
        """Encode, append, push."""
        batch = encode_batch(values, timestamps_ms=1)
        result = self.log.append(batch, durability=Durability.BUFFERED)
        self.leading.partitions[0].on_append(result.base_offset, [batch], SYSTEM_CLOCK.monotonic_ms())

    def wait(self) -> None:
        """Until all of it is acknowledged."""
        done = threading.Event()
        self.leading.partitions[0].when_replicated(self.log.log_end_offset, lambda _: done.set())
        if not done.wait(_WAIT_S):
            raise TimeoutError("the replicas did not acknowledge")


@contextmanager
def led(directory: Path, replicas: Sequence[Address], settings: PushSettings | None = None) -> Iterator[Led]:
    """A leader in `directory` whose every replica is needed."""
    members = len(replicas) + 1
    grant = Grant(
        outbox_id=uuid4(),
        epoch=256,
        leader=0,
        members=tuple(Member(index) for index in range(members)),
        min_insync_replicas=members,
        members_epoch=256,
        pid_epoch=0,
        topic_id=UUID(int=1),
        topic="orders",
        partitions=1,
        carrier="key",
    )
    with SegmentLog.open(directory / "orders-0", has_replicas=True) as log:
        leading = Leading(
            grant.outbox_id,
            grant,
            {0: log},
            [Replica(index, address) for index, address in enumerate(replicas, start=1)],
            durability=Durability.BUFFERED,
            settings=settings or PushSettings(),
        )
        leading.start()
        try:
            yield Led(leading, log)
        finally:
            leading.close()


def brokers(root: Path, count: int) -> KafkaCluster:
    """A cluster whose replicated topics want all of its brokers but one."""
    return KafkaCluster(root / "kafka", nodes=count, jvm=BROKER_JVM)


def topic(cluster: KafkaCluster, name: str, partitions: int, config: Mapping[str, str] | None = None) -> str:
    """Make a topic that every broker has a copy of; its name."""
    create_topic(cluster.bootstrap_servers, name, partitions, len(cluster.nodes), **(config or {}))
    return name


def producer(cluster: KafkaCluster, *, acks: int | str, linger_ms: int) -> Producer:
    """The peer's client, tuned for large batches."""
    return Producer(
        {
            "bootstrap.servers": cluster.bootstrap_servers,
            "linger.ms": linger_ms,
            "batch.size": 1_000_000,
            "acks": acks,
            "queue.buffering.max.messages": 2_000_000,
            "queue.buffering.max.kbytes": 1 << 20,
        }
    )


def produce(client: Producer, name: str, value: bytes, partition: int, **more: Any) -> None:
    """`produce()`, waiting where its queue is full."""
    while True:
        try:
            client.produce(name, value, partition=partition, **more)
        except BufferError:
            client.poll(0.01)
        else:
            return


class Usage:
    """Processor time and memory of some processes, by what they are called."""

    def __init__(self, pids: Mapping[str, Sequence[int]]) -> None:
        self._pids = pids
        self._before: dict[str, float] = {}
        self.processor_s: dict[str, float] = dict.fromkeys(pids, 0.0)

    def __enter__(self) -> Self:
        self._before = {name: sum(map(processor_s, pids)) for name, pids in self._pids.items()}
        return self

    def __exit__(self, *_: object) -> None:
        for name, pids in self._pids.items():
            self.processor_s[name] += sum(map(processor_s, pids)) - self._before[name]

    def told(self, work: float, unit: str) -> str:
        """Processor seconds for each million of `work`, and resident memory, for people."""
        parts = []
        for name, pids in self._pids.items():
            resident = sum(map(resident_bytes, pids)) / _MIB
            parts.append(f"{name} {self.processor_s[name] / work * 1e6:.2f} s, {resident:.0f} MiB")
        return f"processor time a million {unit}, resident memory: {'; '.join(parts)}"


def processor_s(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def resident_bytes(pid: int) -> int:
    """What of a process is in memory now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

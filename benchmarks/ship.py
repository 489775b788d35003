"""G11: a log's sealed batches into a Kafka topic, beside an idempotent `produce()` loop over the same records.

Ours: a log of one partition, sealed by an `Outbox` before anything is timed, then shipped from its first offset until
the topic acknowledged its last. The peer: the same values in memory under keys of the same 20 bytes, `produce()` with
enable.idempotence, five requests in flight, until all are delivered. acks=all, one broker and three, one partition;
both are connected before the clock starts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from confluent_kafka import Producer

from benchmarks.harness import compare, random_values, scratch
from benchmarks.push_sides import brokers, produce, topic
from pushrep.kafka import KafkaDestination
from pushrep.kafka.resume import Origin
from pushrep.kafka.shipper import Shipped, Shipper
from pushrep.kafka.source import ShippedLog
from pushrep.log import SegmentLog
from pushrep.outbox import Outbox
from pushrep.seams import REAL_FILESYSTEM, SYSTEM_CLOCK
from tests.kafka.cluster import KafkaCluster, missing

ROUND_BYTES = {1024: 300_000_000, 100: 150_000_000}
GOALS = {(1, 100): 3.0, (1, 1024): 2.0, (3, 100): 2.4, (3, 1024): 1.8}
BATCH_BYTES = 980_000  # as the peer's, and below max.message.bytes: a broker takes one request of a client at a time
WAIT_S = 120.0
_KEY = bytes(20)
_NUMBERS = count(1)


class Held:
    """A log that shows nothing to ship until `released`."""

    def __init__(self, log: SegmentLog) -> None:
        self._log = log
        self.released = False

    @property
    def stable_offset(self) -> int:
        return self._log.stable_offset if self.released else 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)


def run(rounds: int) -> dict[str, Any]:
    """Every row, by title."""
    if why := missing():
        raise SystemExit(f"G11 needs real brokers: {why}")
    results: dict[str, Any] = {}
    for nodes in (1, 3):
        with scratch(f"ship-{nodes}") as root, brokers(root, nodes) as cluster:
            for size, round_bytes in ROUND_BYTES.items():
                values = random_values(round_bytes // size, size)
                with sealed(root / f"outbox-{size}", values) as outbox:
                    told = f"G11: {'1 KiB' if size > 100 else '100 B'}, {nodes} broker{'s' * (nodes > 1)}"
                    results[told] = one(root, cluster, outbox, values, rounds=rounds, goal=GOALS[nodes, size])
    return results


@contextmanager
def sealed(directory: Path, values: list[bytes]) -> Iterator[Outbox]:
    """An outbox whose log holds them."""
    with Outbox.open(directory, "orders", 1, "bench", batch_bytes=BATCH_BYTES, buffer_bytes=1 << 29) as outbox:
        for at in range(0, len(values), 100_000):
            outbox.append_many(0, values[at : at + 100_000])
        outbox.flush()
        yield outbox


def one(
    root: Path, cluster: KafkaCluster, outbox: Outbox, values: list[bytes], *, rounds: int, goal: float
) -> dict[str, Any]:
    """One comparison; each round has a topic of its own, and whoever ships to it is ready before."""
    ready = [shipper(root, cluster, outbox) for _ in range(rounds + 1)]
    client = Producer(
        {
            "bootstrap.servers": cluster.bootstrap_servers,
            "enable.idempotence": True,
            "acks": "all",
            "linger.ms": 5,
            "batch.size": 1_000_000,
            "max.in.flight.requests.per.connection": 5,
            "queue.buffering.max.messages": 5_000_000,
            "queue.buffering.max.kbytes": 1 << 20,
        }
    )
    made = [topic(cluster, f"produce-{next(_NUMBERS)}", 1) for _ in range(rounds + 1)]
    client.list_topics(made[0])
    sides = {
        "sealed batches": partial(_ship, ready, len(values)),
        "idempotent produce()": partial(_produce, client, made, values),
    }
    return compare(sides, rounds=rounds, goals={"idempotent produce()": goal})


def shipper(root: Path, cluster: KafkaCluster, outbox: Outbox) -> tuple[Shipper, Held]:
    """One that is connected, and waits."""
    name = f"ship-{next(_NUMBERS)}"
    (root / name).mkdir()
    log = Held(outbox.log(0))
    logs: list[ShippedLog] = [log]  # type: ignore[list-item] # it gives on what it does not change
    shipped = Shipped(
        directory=root / name,
        topic=topic(cluster, name, 1),
        logs=logs,
        origin=Origin(carrier="key", pids={0: outbox.pid}, pid_epoch=0),
        batch_bytes=BATCH_BYTES,
        filesystem=REAL_FILESYSTEM,
        clock=SYSTEM_CLOCK,
    )
    made = Shipper(shipped, KafkaDestination(bootstrap_servers=cluster.bootstrap_servers))
    made.start(WAIT_S)
    return made, log


def _ship(ready: list[tuple[Shipper, Held]], records: int) -> float:
    made, log = ready.pop()
    log.released = True
    made.wait({0: records}, None, None)
    made.close()
    return records


def _produce(client: Producer, topics: list[str], values: list[bytes]) -> float:
    name = topics.pop()
    for value in values:
        produce(client, name, value, 0, key=_KEY)
    if client.flush(WAIT_S):
        raise TimeoutError("the brokers did not take everything")
    return len(values)

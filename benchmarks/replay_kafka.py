"""G15 beside Kafka's consumer: records read again, and how soon a subscriber has what was appended just now.

Records: one partition of 128 MiB in the page cache, read from its first record to its last. Ours: a replay of the
directory, and of a node (a process of its own) over loopback; every batch's CRC is checked. The peer: confluent-kafka
`consume()` of 20,000 at a time from one real broker, fetches of 16 MiB and a queue that is never full, CRCs unchecked
as librdkafka does by default; what it has fetched already when it is assigned is nothing.

Following: a record of 100 B every millisecond, from `append` (an Outbox that pushes to the node; its linger is the
default, 5 ms) and from `produce()` (linger 0, acks=1) to the subscriber in another thread. Kafka's consumer asks for
one byte, so the broker answers at once.
"""

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition

from benchmarks.harness import AtMost, compare, random_values, scratch, spread
from benchmarks.push_sides import brokers, nodes, produce, producer, topic
from pushrep.outbox import Outbox
from pushrep.replay import TO_END, ReplayClient, ReplayRequest
from tests.kafka.cluster import KafkaCluster, missing

LOG_BYTES = 128 << 20
AT_ONCE = 20_000
RECORDS_GOAL = 1.3
FOLLOWED, WARM = 500, 200
EVERY_S = 0.001
WAIT_S = 60.0
_NAMES = {100: "small", 1024: "large"}


def run(rounds: int) -> dict[str, Any]:
    """Every row, by title."""
    if why := missing():
        raise SystemExit(f"G15 beside Kafka needs a real broker: {why}")
    results: dict[str, Any] = {}
    with scratch("replay-kafka") as root, nodes(root, 1) as (node,), brokers(root, 1) as cluster:
        where = str(node.address)
        for size, name in _NAMES.items():
            values = random_values(LOG_BYTES // size, size)
            with (
                opened(root / name, name, where) as outbox,
                ReplayClient(root / name) as near,
                ReplayClient(where) as far,
            ):
                fill(outbox, values)
                load(cluster, name, values)
                results[f"G15: as records, {size} B"] = as_records(cluster, name, len(values), near, far, rounds=rounds)
        with opened(root / "follow", "follow", where) as outbox, ReplayClient(where) as far:
            results["append to subscriber, a record a millisecond"] = following(cluster, outbox, far, rounds)
    return results


@contextmanager
def opened(directory: Path, name: str, replica: str) -> Iterator[Outbox]:
    """An outbox of one partition, pushed to the node."""
    with Outbox.open(directory, topic=name, partitions=1, producer="bench", replicas=[replica]) as outbox:
        yield outbox


def fill(outbox: Outbox, values: list[bytes]) -> None:
    """All of them, here and at the node, flushed."""
    for at in range(0, len(values), 50_000):
        outbox.append_many(0, values[at : at + 50_000])
    outbox.flush()
    while any(lag.records for lag in outbox.lag().values()):
        time.sleep(0.05)
    time.sleep(2)  # the node flushes in the background, and a stable replay ends where that is


def load(cluster: KafkaCluster, name: str, values: list[bytes]) -> None:
    """The same in a topic."""
    topic(cluster, name, 1)
    client = producer(cluster, acks=1, linger_ms=50)
    for value in values:
        produce(client, name, value, 0)
    if client.flush(WAIT_S):
        raise TimeoutError("the broker did not take everything")


def consumer(cluster: KafkaCluster, **more: Any) -> Consumer:
    """The peer's, tuned: large fetches, a queue that does not fill up."""
    return Consumer(
        {
            "bootstrap.servers": cluster.bootstrap_servers,
            "group.id": "bench",
            "enable.auto.commit": False,
            "fetch.max.bytes": 64 << 20,
            "max.partition.fetch.bytes": 16 << 20,
            "queued.min.messages": 2_000_000,
            "queued.max.messages.kbytes": 1 << 20,
            **more,
        }
    )


def as_records(
    cluster: KafkaCluster, name: str, count: int, near: ReplayClient, far: ReplayClient, *, rounds: int
) -> dict[str, Any]:
    """One comparison; every side reads all of the log once."""
    client = consumer(cluster)

    def consume() -> float:
        client.assign([TopicPartition(name, 0, 0)])
        got = 0
        while got < count:
            got += len(client.consume(min(AT_ONCE, count - got), timeout=WAIT_S))  # it waits until it has as many
        client.unassign()
        return got

    def replay(of: ReplayClient) -> float:
        got = sum(1 for _ in of.replay(ReplayRequest(f"{name}-0", length=TO_END)))
        assert got == count, f"{got} of {count} records"
        return got

    try:
        sides = {"replay of a directory": lambda: replay(near), "replay of a node": lambda: replay(far)}
        return compare({**sides, "consume()": consume}, rounds=rounds, goals={"consume()": RECORDS_GOAL})
    finally:
        client.close()


def following(cluster: KafkaCluster, outbox: Outbox, far: ReplayClient, rounds: int) -> dict[str, Any]:
    """p50 of the rounds, the sides in turn; p99 beside."""
    name = topic(cluster, "follow", 1)
    sends = producer(cluster, acks=1, linger_ms=0)
    reads = consumer(cluster, **{"fetch.min.bytes": 1, "fetch.wait.max.ms": 500, "socket.nagle.disable": True})
    reads.assign([TopicPartition(name, 0, 0)])
    sides = {"replay of a node": lambda: ours(outbox, far), "Kafka's consumer": lambda: theirs(sends, reads, name)}
    p50: dict[str, list[float]] = {side: [] for side in sides}
    p99: dict[str, list[float]] = {side: [] for side in sides}
    try:
        for number in range(rounds + 1):
            for side, follow in sides.items():
                cuts = statistics.quantiles(follow(), n=100)
                if number:  # the first round warms up
                    p50[side].append(cuts[49])
                    p99[side].append(cuts[98])
    finally:
        reads.close()
    mine, peer = sides
    ratios = {}
    for told, values in (("p50", p50), ("p99", p99)):
        ratios[told] = spread([a / b for a, b in zip(values[mine], values[peer], strict=True)])
    shown = ", ".join(f"{side} {statistics.median(values):.2f} ms" for side, values in p99.items())
    return {
        "unit": "ms, p50",
        "rounds": rounds,
        "ours": mine,
        "rates": {side: spread(values) for side, values in p50.items()},
        "ratios": {peer: ratios["p50"] | AtMost(1.0).cells()},
        "notes": [f"p99: {shown}; ours ÷ it {ratios['p99']['median']:.2f}"],
    }


def ours(outbox: Outbox, far: ReplayClient) -> list[float]:
    """Milliseconds from `append` to the subscriber, of each record."""
    first = far.tip_of("follow-0", "written")
    with far.replay(ReplayRequest("follow-0", position=first, length=WARM + FOLLOWED, bound="written")) as replay:
        return paced(
            lambda value: outbox.append(0, value), lambda heard: heard.extend(time.perf_counter() for _ in replay)
        )


def theirs(sends: Producer, reads: Consumer, name: str) -> list[float]:
    """The same from `produce()` to `poll()`."""

    def send(value: bytes) -> None:
        sends.produce(name, value, partition=0)
        sends.poll(0)

    def listen(heard: list[float]) -> None:
        while len(heard) < WARM + FOLLOWED:
            if reads.poll(WAIT_S) is not None:
                heard.append(time.perf_counter())

    return paced(send, listen)


def paced(send: Callable[[bytes], object], listen: Callable[[list[float]], None]) -> list[float]:
    """Send so many records, one every millisecond, while somebody listens; milliseconds of each but the first ones."""
    values = random_values(WARM + FOLLOWED, 100)
    sent: list[float] = []
    heard: list[float] = []
    listener = threading.Thread(target=listen, args=(heard,))
    listener.start()
    due = time.perf_counter() + 0.1
    for value in values:
        time.sleep(max(0.0, due - time.perf_counter()))
        due += EVERY_S
        sent.append(time.perf_counter())
        send(value)
    listener.join(WAIT_S)
    assert all(a <= b for a, b in pairwise(heard)), "in order"
    return [(there - here) * 1000 for here, there in zip(sent[WARM:], heard[WARM:], strict=True)]

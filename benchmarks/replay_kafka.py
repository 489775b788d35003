"""G15 beside Kafka's consumer: records read again, and how soon a subscriber has what was appended just now.

Records: one partition of 128 MiB in the page cache, read from its first record to its last. Ours: a replay of the
directory, and of a node (a process of its own) over loopback; every batch's CRC is checked. The peer: confluent-kafka
`consume()` of 20,000 at a time from one real broker, fetches of 16 MiB and a queue that is never full, CRCs unchecked
as librdkafka does by default; what it has fetched already when it is assigned is nothing.

Following: a record of 100 B every millisecond, from `append` and from `produce()` to a subscriber in a process of its
own, as subscribers are. Neither lingers. Kafka's producer has acks=1 and its one broker writes to the page cache, so an
outbox without flushes and with acks=LOCAL beside it, whose node gives what is written; what one more way and the disk
cost stands in the other rows: below the high watermark, and "stable" of an outbox as it is by default (5 ms linger, on
disk at both ends). Kafka's consumer asks for one byte, so the broker answers at once. A directory is followed beside
its writer, without a server.
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from confluent_kafka import Consumer, TopicPartition

from benchmarks.harness import AtMost, compare, random_values, scratch, spread
from benchmarks.push_sides import brokers, nodes, produce, producer, topic
from pushrep.log import Durability
from pushrep.outbox import Acks, Outbox
from pushrep.replay import TO_END, ReplayClient, ReplayRequest
from tests.kafka.cluster import KafkaCluster, missing
from tests.support.outbox_arguments import outbox_arguments

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
        with followed(root, where) as sides:
            results["append to subscriber, a record a millisecond"] = following(cluster, sides, rounds)
    return results


@contextmanager
def opened(directory: Path, name: str, replica: str, **more: Any) -> Iterator[Outbox]:
    """An outbox of one partition, pushed to the node."""
    with Outbox.open(
        directory, **outbox_arguments(topic=name, partitions=1, producer="bench", replicas=[replica], **more)
    ) as outbox:
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


class Side(NamedTuple):
    """What appends, who hears in a process of its own - hears(pipe, *told) - and how it is told where to begin."""

    send: Callable[[bytes], object]
    hears: Callable[..., None]
    told: Callable[[], tuple[Any, ...]]


@contextmanager
def followed(root: Path, node: str) -> Iterator[dict[str, Side]]:
    """Our sides, the one beside Kafka first."""
    quick: dict[str, Any] = {"linger_ms": 0, "durability": Durability.BUFFERED}
    wanted: dict[str, tuple[str, str, dict[str, Any]]] = {
        "node, written": (node, "written", {**quick, "acks": Acks.LOCAL}),
        "directory, written": (str(root / "follow-1"), "written", {**quick, "acks": Acks.LOCAL}),
        "node, high watermark": (node, "high_watermark", quick),
        "node, stable, by default": (node, "stable", {}),
        "directory, stable, by default": (str(root / "follow-4"), "stable", {}),
    }
    with ExitStack() as stack:
        sides = {}
        for number, (side, (where, bound, settings)) in enumerate(wanted.items()):
            name = f"follow-{number}"
            outbox = stack.enter_context(opened(root / name, name, node, **settings))
            client = stack.enter_context(ReplayClient(where))
            sides[side] = ours(outbox, client, where, name, bound)
        yield sides


def ours(outbox: Outbox, client: ReplayClient, where: str, name: str, bound: str) -> Side:
    """A replay of that log."""

    def told() -> tuple[Any, ...]:
        outbox.append(0, b"first")
        outbox.flush()
        while any(lag.records for lag in outbox.lag().values()):
            time.sleep(0.05)
        first = outbox.log(0).log_end_offset
        while client.tip_of(f"{name}-0", bound) < first:
            time.sleep(0.05)
        return where, f"{name}-0", first, bound

    return Side(lambda value: outbox.append(0, value), hear_ours, told)


def hear_ours(pipe: Any, where: str, recording: str, first: int, bound: str) -> None:
    """When each record came, through the pipe; "ready" before the first."""
    request = ReplayRequest(recording, position=first, length=WARM + FOLLOWED, bound=bound)
    with ReplayClient(where) as client, client.replay(request) as replay:
        pipe.send("ready")
        pipe.send([time.perf_counter() for _ in replay])


def theirs(cluster: KafkaCluster, name: str) -> Side:
    """Kafka's clients."""
    sends = producer(cluster, acks=1, linger_ms=0)

    def send(value: bytes) -> None:
        sends.produce(name, value, partition=0)
        sends.poll(0)

    def told() -> tuple[Any, ...]:
        if sends.flush(WAIT_S):
            raise TimeoutError("the broker did not take everything")
        return cluster.bootstrap_servers, name

    return Side(send, hear_theirs, told)


def hear_theirs(pipe: Any, bootstrap_servers: str, name: str) -> None:
    """The same of Kafka's consumer."""
    reads = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "bench",
            "enable.auto.commit": False,
            "fetch.min.bytes": 1,
            "fetch.wait.max.ms": 500,
            "socket.nagle.disable": True,
        }
    )
    try:
        _, end = reads.get_watermark_offsets(TopicPartition(name, 0), timeout=WAIT_S)
        reads.assign([TopicPartition(name, 0, end)])
        reads.poll(1)  # it has asked for the next one
        pipe.send("ready")
        heard: list[float] = []
        while len(heard) < WARM + FOLLOWED:
            if reads.poll(WAIT_S) is not None:
                heard.append(time.perf_counter())
        pipe.send(heard)
    finally:
        reads.close()


def following(cluster: KafkaCluster, sides: dict[str, Side], rounds: int) -> dict[str, Any]:
    """p50 of the rounds, the sides in turn; p99 beside."""
    peer = "Kafka's consumer"
    sides = {**sides, peer: theirs(cluster, topic(cluster, "follow", 1))}
    p50: dict[str, list[float]] = {side: [] for side in sides}
    p99: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds + 1):
        for name, side in sides.items():
            cuts = statistics.quantiles(paced(side), n=100)
            if number:  # the first round warms up
                p50[name].append(cuts[49])
                p99[name].append(cuts[98])
    for side in sides.values():
        side.told()  # nothing is left on its way
    mine = next(iter(sides))
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
        "notes": [f"p99: {shown}; {mine} ÷ {peer} {ratios['p99']['median']:.2f}"],
    }


def paced(side: Side) -> list[float]:
    """Send so many records, one every millisecond, while somebody listens; milliseconds of each but the first ones."""
    values = random_values(WARM + FOLLOWED, 100)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    listener = context.Process(target=side.hears, args=(there, *side.told()))
    listener.start()
    assert here.recv() == "ready"
    sent: list[float] = []
    due = time.perf_counter() + 0.1
    for value in values:
        time.sleep(max(0.0, due - time.perf_counter()))
        due += EVERY_S
        sent.append(time.perf_counter())
        side.send(value)
    heard = here.recv()
    listener.join(WAIT_S)
    assert all(a <= b for a, b in pairwise(heard)), "in order"
    return [(there - here) * 1000 for here, there in zip(sent[WARM:], heard[WARM:], strict=True)]

"""G8: acknowledged by a majority of three, beside a three-broker Kafka with acks=all and min.insync.replicas=2.

Ours: an `Outbox` with acks=ALL, two replicas as processes, two of three members needed. The peer: `produce()`, three
copies of each partition. Both in the page cache (D0), then both with a sync everywhere before a record counts: FLUSHED
beside flush.messages=1. Everything on one machine, one partition and sixteen.

A rate counts until the last record of a round is acknowledged. A latency at an offered load is that of every
millisecond's last record from when it was due, so that who falls behind can't hide it; one outstanding is that of a
record alone, from `append` (`produce`) to its answer, and neither side lingers.
"""

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from confluent_kafka import Producer

from benchmarks.harness import AtMost, compare, random_values, scratch, spread
from benchmarks.push_sides import Node, Usage, brokers, nodes, produce, producer, topic
from pushrep.log import Durability
from pushrep.outbox import Acks, Outbox, OutboxConfig
from tests.kafka.cluster import KafkaCluster, missing

ROUND_BYTES = {1024: 64_000_000, 100: 40_000_000}
SINGLE_RECORDS = 200_000
LIST_BYTES = 1_000_000
ALONE = 500
OFFERED_S = 3.0
TICK_S = 0.001
WAIT_S = 60.0
PERCENTS = (50, 99, 99.9)
_NUMBERS = count(1)

Send = Callable[[list[bytes], int, Callable[[], None]], None]
"""Append these to a partition; call back once the last of them is acknowledged."""


class Peers(NamedTuple):
    """An outbox and a producer that promise the same, and whose processes they are."""

    outbox: Outbox
    client: Producer
    topic: str
    partitions: int


def run(rounds: int) -> dict[str, Any]:
    """Every row, by title."""
    if why := missing():
        raise SystemExit(f"G8 compares with Kafka: {why}")
    results: dict[str, Any] = {}
    with scratch("push-all") as root, ExitStack() as stack:
        cluster = stack.enter_context(brokers(root, 3))
        replicas = stack.enter_context(nodes(root, 2))
        pids = {
            "service": [os.getpid()],
            "replicas": [node.pid for node in replicas],
            "brokers": cluster.pids,
        }
        opened = partial(peers, root, replicas, cluster)
        for durability in (Durability.BUFFERED, Durability.FLUSHED):
            for partitions in (1, 16):
                with opened(partitions, durability, linger_ms=5) as both:
                    results |= throughput(both, durability, rounds, pids)
                    most = results[title("100 B, append_many", both, durability)]["rates"]["produce()"]["median"]
                if durability is Durability.BUFFERED:
                    for rate, told in ((1000.0, "1,000 msg/s"), (most / 2, "half of Kafka's most")):
                        with opened(partitions, durability, linger_ms=1) as both:
                            results |= offered(both, rate, told, rounds)
                with opened(partitions, durability, linger_ms=0) as both:
                    results |= alone(both, durability, rounds)
    return results


@contextmanager
def peers(
    root: Path, replicas: list[Node], cluster: KafkaCluster, partitions: int, durability: Durability, *, linger_ms: int
) -> Iterator[Peers]:
    """Both sides, opened anew."""
    name = f"push-{next(_NUMBERS)}"
    config = {"flush.messages": "1"} if durability is Durability.FLUSHED else {}
    with Outbox.open(
        root / name,
        "orders",
        partitions,
        name,
        replicas=[str(node.address) for node in replicas],
        acks=Acks.ALL,
        durability=durability,
        config=OutboxConfig(min_insync_replicas=2, linger_ms=linger_ms),
    ) as outbox:
        made = topic(cluster, name, partitions, config)
        yield Peers(outbox, producer(cluster, acks="all", linger_ms=linger_ms), made, partitions)


def title(what: str, both: Peers, durability: Durability) -> str:
    """A row's name."""
    many = f"{both.partitions} partitions" if both.partitions > 1 else "1 partition"
    synced = ", synced everywhere" if durability is Durability.FLUSHED else ""
    return f"G8: {what}, {many}{synced}"


def throughput(both: Peers, durability: Durability, rounds: int, pids: dict[str, list[int]]) -> dict[str, Any]:
    """1 KiB and 100 B by lists, 100 B one by one."""
    buffered = durability is Durability.BUFFERED
    results = {}
    for size, goal in ((1024, 1.5), (100, 2.0)):
        values = random_values(ROUND_BYTES[size] // size, size)
        told = title(f"{'1 KiB' if size > 100 else '100 B'}, append_many", both, durability)
        goals = {"produce()": goal if buffered else 1.5}
        ours = partial(_append_lists, both, values)
        results[told] = measured(both, ours, values, rounds=rounds, goals=goals, pids=pids)
    if buffered:
        values = random_values(SINGLE_RECORDS, 100)
        told = title("100 B, append", both, durability)
        ours = partial(_append_singly, both, values)
        results[told] = measured(both, ours, values, rounds=rounds, goals={"produce()": 1.0}, pids=pids)
    return results


def measured(
    both: Peers,
    ours: Callable[[], float],
    values: list[bytes],
    *,
    rounds: int,
    goals: dict[str, float],
    pids: dict[str, list[int]],
) -> dict[str, Any]:
    """One comparison, with what each side's processes used for it."""
    names = {"pushrep": ("service", "replicas"), "produce()": ("service", "brokers")}
    usage = {side: Usage({name: pids[name] for name in used}) for side, used in names.items()}

    def counted(side: str, work: Callable[[], float]) -> Callable[[], float]:
        def counted_side() -> float:
            with usage[side]:
                return work()

        return counted_side

    sides = {
        "pushrep": counted("pushrep", ours),
        "produce()": counted("produce()", lambda: _produce_all(both, values)),
    }
    result = compare(sides, rounds=rounds, goals=goals)
    records = len(values) * (rounds + 1)
    result["notes"] = [f"{side}: {used.told(records, 'records')}" for side, used in usage.items()]
    return result


def offered(both: Peers, rate: float, told: str, rounds: int) -> dict[str, Any]:
    """Latency while so many records a second are wanted, 100 B each."""
    sides: dict[str, Send] = {"pushrep": _sender(both), "produce()": _producing(both)}
    values = random_values(max(1, round(rate * TICK_S)), 100)
    taken: dict[str, list[list[float]]] = {side: [] for side in sides}
    for number in range(rounds + 1):
        for side, send in sides.items():
            times = _pace(values, both.partitions, send, lambda: both.client.poll(0))
            if number:  # the first round warms up
                taken[side].append(times)
    shown = f"p99 at {told}" + (f" ({rate:,.0f})" if rate > 1000 else "")
    return {title(shown, both, Durability.BUFFERED): _latency(taken, 99, AtMost(0.5))}


def alone(both: Peers, durability: Durability, rounds: int) -> dict[str, Any]:
    """Latency of one record after another."""
    values = random_values(ALONE, 100)

    def ours(value: bytes) -> None:
        both.outbox.append(0, value).result(WAIT_S)

    def theirs(value: bytes) -> None:
        both.client.produce(both.topic, value, partition=0)
        both.client.flush()

    taken: dict[str, list[list[float]]] = {"pushrep": [], "produce() + flush()": []}
    for number in range(rounds + 1):
        for found, work in zip(taken.values(), (ours, theirs), strict=True):
            times = []
            for value in values:
                began = time.perf_counter()
                work(value)
                times.append(1000 * (time.perf_counter() - began))
            if number:
                found.append(times)
    return {
        title(f"one outstanding, p{percent}", both, durability): _latency(taken, percent, AtMost(0.5))
        for percent in (50, 99)
    }


def _append_lists(both: Peers, values: list[bytes]) -> float:
    per_list = LIST_BYTES // len(values[0])
    receipts = [
        both.outbox.append_many(number % both.partitions, values[start : start + per_list])
        for number, start in enumerate(range(0, len(values), per_list))
    ]
    for receipt in receipts[-both.partitions :]:
        receipt.result(WAIT_S)
    return len(values)


def _append_singly(both: Peers, values: list[bytes]) -> float:
    append, partitions = both.outbox.append, both.partitions
    last = [append(number % partitions, value) for number, value in enumerate(values)][-partitions:]
    for receipt in last:
        receipt.result(WAIT_S)
    return len(values)


def _produce_all(both: Peers, values: list[bytes]) -> float:
    client, name, partitions = both.client, both.topic, both.partitions
    for number, value in enumerate(values):
        produce(client, name, value, number % partitions)
    if client.flush(WAIT_S):
        raise TimeoutError("the brokers did not acknowledge")
    return len(values)


def _sender(both: Peers) -> Send:
    receipts: SimpleQueue[Any] = SimpleQueue()

    def collect() -> None:
        while (item := receipts.get()) is not None:
            receipt, done = item
            receipt.result(WAIT_S)
            done()

    threading.Thread(target=collect, daemon=True).start()

    def send(values: list[bytes], partition: int, done: Callable[[], None]) -> None:
        if len(values) == 1:
            receipts.put((both.outbox.append(partition, values[0]), done))
        else:
            receipts.put((both.outbox.append_many(partition, values), done))

    return send


def _producing(both: Peers) -> Send:
    def send(values: list[bytes], partition: int, done: Callable[[], None]) -> None:
        for value in values[:-1]:
            produce(both.client, both.topic, value, partition)
        produce(both.client, both.topic, values[-1], partition, on_delivery=lambda *_: done())

    return send


def _pace(values: list[bytes], partitions: int, send: Send, serve: Callable[[], object]) -> list[float]:
    """Send the values every millisecond; milliseconds from when each was due to its acknowledgement."""
    taken: list[float] = []
    ticks = round(OFFERED_S / TICK_S)
    began = time.perf_counter()
    for number in range(ticks):
        due = began + number * TICK_S
        while (left := due - time.perf_counter()) > 0:
            serve()
            time.sleep(min(left, TICK_S / 4))
        send(values, number % partitions, lambda due=due: taken.append(1000 * (time.perf_counter() - due)))  # type: ignore[misc]
    deadline = time.perf_counter() + WAIT_S
    while len(taken) < ticks:
        serve()
        time.sleep(TICK_S)
        if time.perf_counter() > deadline:
            raise TimeoutError(f"{ticks - len(taken)} of {ticks} were not acknowledged")
    return taken


def _latency(taken: dict[str, list[list[float]]], percent: int, goal: AtMost) -> dict[str, Any]:
    """A row of the harness: `percent` of each round, ours over theirs; the others in a note."""
    ours, theirs = taken
    rates = {side: [_percentile(times, percent) for times in rounds] for side, rounds in taken.items()}
    pairs = [mine / other for mine, other in zip(rates[ours], rates[theirs], strict=True)]
    notes = []
    for side, rounds in taken.items():
        everything = [time for times in rounds for time in times]
        shown = ", ".join(f"p{p} {_percentile(everything, p):.2f}" for p in PERCENTS)
        notes.append(f"{side}, all rounds: {shown} ms")
    return {
        "unit": f"ms, p{percent}",
        "rounds": len(taken[ours]),
        "ours": ours,
        "rates": {side: spread(values) for side, values in rates.items()},
        "ratios": {theirs: spread(pairs) | goal.cells()},
        "notes": notes,
    }


def _percentile(times: list[float], percent: float) -> float:
    return statistics.quantiles(times, n=1000)[round(10 * percent) - 1]

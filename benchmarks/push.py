"""G7, G9: records to one replica, a process of its own that checks every CRC and writes, beside confluent-kafka to one
real broker. Both in the page cache (D0), both until the last record is acknowledged.

Ours: values are encoded into batches of 256 KiB, appended to the local log and pushed from memory; the replica appends
them to its own. The peer: `produce()` of the same values, linger 5 ms, batches of 1 MB, acks=1, one partition. A
latency is that of one record of 100 B alone, from its append (`produce`) to its acknowledgement.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.harness import AtMost, compare, random_values, scratch, spread
from benchmarks.push_sides import Led, brokers, led, nodes, produce, producer, topic
from tests.kafka.cluster import KafkaCluster, missing

ROUND_BYTES = 64_000_000
BATCH_BYTES = 256 << 10
ONE_BY_ONE = 1000
GOALS = {1024: {"produce()": 1.0}, 100: {"produce()": 4.0}}


def run(rounds: int) -> dict[str, Any]:
    """Throughput at 1 KiB and at 100 B, and the latency of one record alone."""
    results: dict[str, Any] = {}
    with scratch("push") as root, nodes(root, 1) as (node,), led(root / "leader", [node.address]) as leader:
        why = missing()
        if why is None:
            with brokers(root, 1) as cluster:
                name = topic(cluster, "push", 1)
                for size in (1024, 100):
                    results |= _throughput(leader, size, rounds, _produce(cluster, name))
                results |= _latency(leader, rounds, _produce_one(cluster, name))
        else:
            for size in (1024, 100):
                results |= _throughput(leader, size, rounds, None)
            results |= _latency(leader, rounds, None)
            for result in results.values():
                result["notes"] = [f"no peer: {why}"]
    return results


def _throughput(leader: Led, size: int, rounds: int, peer: Callable[[list[bytes]], None] | None) -> dict[str, Any]:
    values = random_values(ROUND_BYTES // size, size)
    per_batch = BATCH_BYTES // size

    def ours() -> float:
        for start in range(0, len(values), per_batch):
            leader.append(values[start : start + per_batch])
        leader.wait()
        return len(values)

    def theirs() -> float:
        assert peer is not None
        peer(values)
        return len(values)

    sides = {"push": ours} | ({"produce()": theirs} if peer is not None else {})
    result = compare(sides, rounds=rounds, unit="records/s", goals=GOALS[size])
    return {f"G7: to one replica, {size} B records, D0": result}


def _latency(leader: Led, rounds: int, peer: Callable[[bytes], None] | None) -> dict[str, Any]:
    values = random_values(ONE_BY_ONE, 100)

    def ours(value: bytes) -> None:
        leader.append([value])
        leader.wait()

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


def _produce(cluster: KafkaCluster, name: str) -> Callable[[list[bytes]], None]:
    client = producer(cluster, acks=1, linger_ms=5)

    def side(values: list[bytes]) -> None:
        for value in values:
            produce(client, name, value, 0)
        client.flush()

    return side


def _produce_one(cluster: KafkaCluster, name: str) -> Callable[[bytes], None]:
    client = producer(cluster, acks=1, linger_ms=0)

    def side(value: bytes) -> None:
        client.produce(name, value, partition=0)
        client.flush()

    return side

"""Consumers that yield each record once, beside the bare clients: what the filter costs of a client's own speed.

One real broker, one topic of four partitions, 100-byte values under keys of 20 bytes: runs of 500 records of 16 pairs,
every tenth sent again. Every side reads the topic from its start to its end by batches of up to 10,000, with the same
tuned settings, in a consumer of its own that is assigned before; the clock runs from its first batch to its last.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from statistics import median
from typing import Any, NamedTuple

from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as AioTopicPartition
from confluent_kafka import Consumer, Producer, TopicPartition

from benchmarks.filter_batch import keys_of, rows
from benchmarks.harness import random_values, scratch, spread
from benchmarks.push_sides import brokers, produce, topic
from filtering.consumers import aiokafka as aiokafka_door
from filtering.consumers import confluent as confluent_door
from tests.kafka.cluster import KafkaCluster, missing

PARTITIONS = 4
VALUE_BYTES = 100
BATCH = 10_000
RECORDS = {"confluent-kafka, by batch": 2_000_000, "aiokafka, by batch": 400_000}
"""What a round reads of the topic: about as long with either client."""
GOAL = 0.8
_WAIT_S = 30.0
_TUNED = {
    "auto.offset.reset": "earliest",
    "enable.auto.commit": False,
    "queued.min.messages": 1_000_000,
    "queued.max.messages.kbytes": 1 << 20,
    "fetch.message.max.bytes": 8 << 20,
    "check.crcs": False,
}
_TUNED_AIO = {"auto_offset_reset": "earliest", "max_partition_fetch_bytes": 8 << 20, "check_crcs": False}
_groups = (f"bench-{number}" for number in count())


class Reading(NamedTuple):
    """Records that the client handed over behind its first batch, the seconds for them, and those of the processor
    that the reading thread took.
    """

    records: int
    seconds: float
    thread_s: float


def run(rounds: int) -> dict[str, Any]:
    """Both clients, each with and without the filter."""
    if why := missing():
        raise SystemExit(f"the consumers need a real broker: {why}")
    logging.getLogger("filtering").setLevel(logging.ERROR)  # it names each run of replays, as it has to
    with scratch("consumers") as root, brokers(root, 1) as cluster:
        name = topic(cluster, "orders", PARTITIONS)
        per_partition = fill(cluster, name)
        confluent = {
            "filtering.consumers.confluent": lambda: filtered(cluster, name),
            "consume()": lambda: bare(cluster, name),
        }
        aio: dict[str, Callable[[], Reading]] = {
            "filtering.consumers.aiokafka": lambda: asyncio.run(filtered_aio(cluster, name)),
            "getmany()": lambda: asyncio.run(bare_aio(cluster, name)),
        }
        notes = [f"{sum(per_partition):,} records in the topic"]
        return {
            "confluent-kafka, by batch": compared(confluent, rounds, notes),
            "aiokafka, by batch": compared(aio, rounds, notes),
        }


def compared(sides: dict[str, Callable[[], Reading]], rounds: int, notes: list[str]) -> dict[str, Any]:
    """The first side is ours; A B A B after one warm-up of both."""
    (ours, mine), (peer, theirs) = sides.items()
    rates: dict[str, list[float]] = {ours: [], peer: []}
    thread_ns: dict[str, list[float]] = {ours: [], peer: []}
    for number in range(rounds + 1):
        for side, read in ((ours, mine), (peer, theirs)):
            done = read()
            if number:
                rates[side].append(done.records / done.seconds)
                thread_ns[side].append(done.thread_s / done.records * 1e9)
    ratios = [a / b for a, b in zip(rates[ours], rates[peer], strict=True)]
    told = ", ".join(f"{side} {median(found):,.0f} ns" for side, found in thread_ns.items())
    return {
        "unit": "records/s",
        "rounds": rounds,
        "ours": ours,
        "rates": {side: spread(found) for side, found in rates.items()},
        "ratios": {peer: spread(ratios) | {"goal": GOAL}},
        "notes": [*notes, f"processor time of the reading thread a record: {told}"],
    }


def fill(cluster: KafkaCluster, name: str) -> list[int]:
    """The topic's records; how many lie in each partition."""
    client = Producer(
        {
            "bootstrap.servers": cluster.bootstrap_servers, "linger.ms": 20, "batch.size": 480_000,
            "queue.buffering.max.messages": 5_000_000, "queue.buffering.max.kbytes": 1 << 20,
        }
    )  # fmt: skip
    keys = keys_of(rows())[: max(RECORDS.values())]
    values = random_values(10_000, VALUE_BYTES)
    filled = [0] * PARTITIONS
    for number, key in enumerate(keys):
        partition = key[11] % PARTITIONS
        produce(client, name, values[number % len(values)], partition, key=key)
        filled[partition] += 1
    if client.flush(120):
        raise TimeoutError("the broker did not take everything")
    return filled


def timed(batches: Iterator[int], wanted: int) -> Reading:
    """Batches of that many records each, as they come, until `wanted` came."""
    next(batches)
    began, thread_began, records = time.perf_counter(), time.thread_time(), 0
    for records_now in batches:
        records += records_now
        if records >= wanted:
            break
    return Reading(records, time.perf_counter() - began, time.thread_time() - thread_began)


def bare(cluster: KafkaCluster, name: str) -> Reading:
    client = Consumer({"bootstrap.servers": cluster.bootstrap_servers, "group.id": next(_groups), **_TUNED})
    try:
        client.assign([TopicPartition(name, partition, 0) for partition in range(PARTITIONS)])
        return timed((len(client.consume(BATCH, _WAIT_S)) for _ in count()), wanted("confluent-kafka, by batch"))
    finally:
        client.close()


def filtered(cluster: KafkaCluster, name: str) -> Reading:
    settings = {"bootstrap.servers": cluster.bootstrap_servers, "group.id": next(_groups), **_TUNED}
    with confluent_door.ReplayFilteredConsumer(settings) as consumer:
        consumer.assign([TopicPartition(name, partition) for partition in range(PARTITIONS)])
        return timed(handed_over(consumer, name), wanted("confluent-kafka, by batch"))


def handed_over(consumer: confluent_door.ReplayFilteredConsumer, name: str) -> Iterator[int]:
    """Records that came from the client, by batch: those that were dropped were read, too."""
    before = 0
    while True:
        kept = len(consumer.consume(BATCH, _WAIT_S))
        dropped = consumer.counts[name].dropped
        yield kept + dropped - before
        before = dropped


def wanted(title: str) -> int:
    """What a round reads behind its first batch, with room for that."""
    return RECORDS[title] - 4 * BATCH


async def bare_aio(cluster: KafkaCluster, name: str) -> Reading:
    client = AIOKafkaConsumer(bootstrap_servers=cluster.bootstrap_servers, enable_auto_commit=False, **_TUNED_AIO)
    await client.start()
    try:
        client.assign([AioTopicPartition(name, partition) for partition in range(PARTITIONS)])

        async def batch() -> int:
            found = await client.getmany(timeout_ms=int(_WAIT_S * 1000), max_records=BATCH)
            return sum(map(len, found.values()))

        return await timed_aio(batch)
    finally:
        await client.stop()


async def filtered_aio(cluster: KafkaCluster, name: str) -> Reading:
    settings: dict[str, Any] = {"bootstrap_servers": cluster.bootstrap_servers, **_TUNED_AIO}
    async with aiokafka_door.ReplayFilteredConsumer(name, group_id=next(_groups), **settings) as consumer:
        before = 0

        async def batch() -> int:
            nonlocal before
            found = await consumer.getmany(timeout_ms=int(_WAIT_S * 1000), max_records=BATCH)
            dropped = consumer.counts[name].dropped
            read = sum(map(len, found.values())) + dropped - before
            before = dropped
            return read

        return await timed_aio(batch)


async def timed_aio(batch: Callable[[], Awaitable[int]]) -> Reading:
    """As `timed`."""
    await batch()
    began, thread_began, records = time.perf_counter(), time.thread_time(), 0
    while records < wanted("aiokafka, by batch"):
        records += await batch()
    return Reading(records, time.perf_counter() - began, time.thread_time() - thread_began)

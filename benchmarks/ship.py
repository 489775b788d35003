"""G11: a log's sealed batches into a Kafka topic, beside an idempotent `produce()` loop over the same records.

Ours: a log of one partition, sealed by an `Outbox` before anything is timed, then shipped from its first offset until
the topic acknowledged its last. The peer: the same values in memory under keys of the same 20 bytes, `produce()` with
enable.idempotence, batches of 1 MB, five requests in flight, until all are delivered. acks=all, one broker and three,
one partition of a topic that both know, to which both are connected before the clock starts.

The third side is what these brokers can take at all: the same batches as requests that were made before, from memory.
Beside the rates stands what each side takes of the processor, its own part and the brokers', which does not hang on
what else the machine does.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, cast

from confluent_kafka import Producer

from benchmarks.harness import Timed, compare, random_values, scratch
from benchmarks.push_sides import brokers, processor_s, produce, topic
from benchmarks.ready_made import ReadyMade
from pushrep.env import REAL_FILESYSTEM, SYSTEM_CLOCK
from pushrep.kafka import KafkaDestination
from pushrep.kafka.resume import RecordOrigin
from pushrep.kafka.sink import KafkaSink, SinkConfig
from pushrep.log import LogConfig, SegmentLog
from pushrep.outbox import Outbox, OutboxConfig
from pushrep.records import RecordBatch
from tests.kafka.cluster import KafkaCluster, missing

ROUND_BYTES = {1024: 300_000_000, 100: 150_000_000}
GOALS = {(1, 100): 3.0, (1, 1024): 2.0, (3, 100): 2.4, (3, 1024): 1.8}
BATCH_BYTES = 980_000  # as the peer's, and below max.message.bytes: a broker takes one request of a client at a time
WAIT_S = 120.0
OURS, PEER, BARE = "sealed batches", "idempotent produce()", "ready-made from memory"
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
    with Outbox.open(
        directory,
        "orders",
        1,
        "bench",
        config=OutboxConfig(log_config=LogConfig(batch_bytes=BATCH_BYTES), buffer_bytes=1 << 29),
    ) as outbox:
        for at in range(0, len(values), 100_000):
            outbox.append_many(0, values[at : at + 100_000])
        outbox.flush()
        yield outbox


def one(
    root: Path, cluster: KafkaCluster, outbox: Outbox, values: list[bytes], *, rounds: int, goal: float
) -> dict[str, Any]:
    """One comparison; each round has a topic of its own."""
    batches = list(outbox.log(0).batches(0))
    taken = Taken(cluster)
    with producer(cluster) as client:
        sides = {
            OURS: taken.by(OURS, partial(shipping, root, cluster, outbox, len(values))),
            PEER: taken.by(PEER, partial(producing, client, cluster, values)),
            BARE: taken.by(BARE, partial(ready_made, cluster, batches)),
        }
        result = compare(sides, rounds=rounds, goals={PEER: goal})
    result["notes"] = [taken.told(rounds * len(values))]
    return result


Work = Callable[[], int]
"""What is timed; how many records it brought into the topic."""


class Taken:
    """Processor time of each side's rounds but the first: this process's, and the brokers'."""

    def __init__(self, cluster: KafkaCluster) -> None:
        self._pids = cluster.pids
        self._taken: dict[str, list[tuple[float, float]]] = {}

    def by(self, side: str, prepared: Callable[[], AbstractContextManager[Work]]) -> Callable[[], Timed]:
        """The work, watched; what comes before and behind it is not."""

        def watched() -> Timed:
            with prepared() as work:
                own_s, brokers_s, began = process_time(), sum(map(processor_s, self._pids)), perf_counter()
                done = work()
                seconds = perf_counter() - began
                now = (process_time() - own_s, sum(map(processor_s, self._pids)) - brokers_s)
            self._taken.setdefault(side, []).append(now)
            return Timed(done, seconds)

        return watched

    def told(self, records: int) -> str:
        """For people."""
        parts = []
        for side, rounds in self._taken.items():
            own_s, brokers_s = (sum(times) / records * 1e6 for times in zip(*rounds[1:], strict=True))
            parts.append(f"{side} {own_s:.2f}, the brokers {brokers_s:.2f}")
        return f"processor time, microseconds a record: {'; '.join(parts)}"


@contextmanager
def shipping(root: Path, cluster: KafkaCluster, outbox: Outbox, records: int) -> Iterator[Work]:
    """A shipper that is connected, and waits."""
    name = f"ship-{next(_NUMBERS)}"
    (root / name).mkdir()
    log = Held(outbox.log(0))
    shipped = SinkConfig(
        directory=root / name,
        outbox_id=name,
        topic=topic(cluster, name, 1),
        logs=[cast("SegmentLog", log)],
        origin=RecordOrigin(carrier="key", pids={0: outbox.pid}, pid_epoch=0),
        batch_bytes=BATCH_BYTES,
        filesystem=REAL_FILESYSTEM,
        clock=SYSTEM_CLOCK,
    )
    shipper = KafkaSink(shipped, KafkaDestination(bootstrap_servers=cluster.bootstrap_servers))
    shipper.start(WAIT_S)

    def work() -> int:
        log.released = True
        shipper.state.wait({0: records}, None, None)
        return records

    try:
        yield work
    finally:
        shipper.close()


@contextmanager
def producer(cluster: KafkaCluster) -> Iterator[Producer]:
    """The peer, tuned; none of its callbacks is used."""
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
            "socket.send.buffer.bytes": 4 << 20,
            "log_level": 0,
        }
    )
    yield client
    client.flush(WAIT_S)


@contextmanager
def producing(client: Producer, cluster: KafkaCluster, values: list[bytes]) -> Iterator[Work]:
    """It has its producer id and a connection to the topic's leader: a first record went there."""
    name, send = topic(cluster, f"produce-{next(_NUMBERS)}", 1), client.produce
    produce(client, name, b"first", 0, key=_KEY)
    _flush(client)

    def work() -> int:
        for value in values:
            try:
                send(name, value, _KEY, 0)
            except BufferError:
                produce(client, name, value, 0, key=_KEY)
        _flush(client)
        return len(values)

    yield work


def _flush(client: Producer) -> None:
    if client.flush(WAIT_S):
        raise TimeoutError("the brokers did not take everything")


@contextmanager
def ready_made(cluster: KafkaCluster, batches: list[RecordBatch]) -> Iterator[Work]:
    """Requests that wait in memory, and a connection."""
    yield ReadyMade(cluster, topic(cluster, f"bare-{next(_NUMBERS)}", 1), batches).send

"""Topics full of replays from many hands, and the rule by brute force over what a plain consumer reads of them.

Hands: our keys; keys made byte by byte from SQE's published layout; business keys, null keys and keys that are almost
metadata; all three plainly, in transactions that commit and in ones that abort.
"""

import random
import uuid
from collections.abc import Sequence
from types import SimpleNamespace
from typing import NamedTuple

from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

from filtering import METADATA_HEADER, StreamMetadata
from filtering.consumers.confluent_client import failure_of_code
from filtering.retry import Failure
from tests.kafka.plain_client import wait_decided
from tests.spark.replay.conftest import NO_METADATA, Model

SQE_PID = -7334467018974291969
"""SQE's own for topology test-topo, stream test-stream, brokers' path brokerspath."""
PIDS = (5, 2**62, SQE_PID)
_TIMEOUT_S = 120


class Place(NamedTuple):
    """The place of a record."""

    topic: str
    partition: int
    offset: int


def sqe_key(pid: int, partition: int, offset: int) -> bytes:
    """Published layout: Java's putLong(pid), putInt(partition), putLong(offset), one byte after the other."""
    places = [(pid, 8), (partition, 4), (offset, 8)]
    return bytes(number >> 8 * byte & 0xFF for number, size in places for byte in reversed(range(size)))


class MixedTopic:
    """Produces the records of one topic; another call continues where the last one stopped."""

    def __init__(self, servers: str, topic: str, partitions: int, rng: random.Random, carrier: str = "key") -> None:
        self.topic, self._rng, self._carrier = topic, rng, carrier
        self._homes = {(pid, n): rng.randrange(partitions) for pid in PIDS for n in range(2)}
        self._positions = dict.fromkeys(self._homes, 0)
        self._partitions, self._count = partitions, 0
        self._settings = {"bootstrap.servers": servers, "log_level": 0, "linger.ms": 5}
        self._connect()

    def write(self, records: int, stretch: int = 30) -> None:
        """So many more, in stretches; about one of four is in a transaction that aborts. All is decided at the end."""
        while records > 0:
            size = min(records, self._rng.randint(5, stretch))
            records -= size
            hand = self._rng.choice(["plain", "commit", "plain", "abort"])
            producer = self._plain if hand == "plain" else self._transactional
            if hand != "plain":
                producer.begin_transaction()
            before = dict(self._positions)
            for _ in range(size):
                self._one(producer)
            assert producer.flush(_TIMEOUT_S) == 0, "the broker took everything"
            if hand == "commit":
                producer.commit_transaction(_TIMEOUT_S)
            if hand == "abort":
                producer.abort_transaction(_TIMEOUT_S)
                self._positions = before
        wait_decided(self._settings["bootstrap.servers"], self.topic, self._partitions)

    def rewind(self) -> None:
        """All producers come back from positions that lag."""
        self._positions = {pair: max(0, position - 5) for pair, position in self._positions.items()}

    def grow(self, partitions: int) -> None:
        """The topic has more partitions now: new pairs live in them, the old ones stay where they are."""
        for partition in range(self._partitions, partitions):
            pair = (PIDS[partition % len(PIDS)], 100 + partition)
            self._homes[pair], self._positions[pair] = partition, 0
        self._partitions = partitions
        self._connect()  # clients learn of partitions some minutes later

    def _connect(self) -> None:
        self._plain = Producer(self._settings)
        self._transactional = Producer({**self._settings, "transactional.id": f"mixed-{uuid.uuid4().hex}"})
        self._transactional.init_transactions(_TIMEOUT_S)

    def _one(self, producer: Producer) -> None:
        rng = self._rng
        pair = rng.choice(list(self._homes))
        chance = rng.random()
        if chance < 0.1:
            self._positions[pair] = max(0, self._positions[pair] - rng.randint(1, 12))
        elif chance < 0.14:
            self._positions[pair] += rng.randint(1, 4)
        partition, key = self._homes[pair], None
        if chance > 0.92:
            partition, key = rng.randrange(self._partitions), rng.choice(NO_METADATA)
        else:
            numbers = (*pair, self._positions[pair])
            key = sqe_key(*numbers) if pair[0] == SQE_PID else StreamMetadata(*numbers).pack()
            self._positions[pair] += 1
        headers = None
        if self._carrier == "header":
            older = (METADATA_HEADER, StreamMetadata(1, 2, 3).pack())
            headers = [("trace", b"t"), older, *([] if key is None else [(METADATA_HEADER, key)]), ("n", None)]
            if key is None:
                headers.remove(older)
            key = rng.choice([b"business", None])
        self._count += 1
        value = b"%d" % self._count
        producer.produce(self.topic, key=key, value=value, headers=headers, partition=partition)
        producer.poll(0)


class Judged(NamedTuple):
    """The judge's result: the committed records that the rule keeps, how many it drops, and the final marks."""

    kept: set[Place]
    dropped: int
    marks: dict[tuple[str, int, int], int]
    """By topic, PID and source partition."""


def brute_force(
    servers: str,
    partitions: dict[str, int],
    carrier: str = "key",
    window: int = 0,
    only_pids: Sequence[int] | None = None,
) -> Judged:
    """The rule over what a plain consumer reads."""
    model = Model(window, None if only_pids is None else frozenset(only_pids))
    places = [Place(topic, n, 0) for topic, count in partitions.items() for n in range(count)]
    rows = [
        SimpleNamespace(topic=at.topic, partition=at.partition, offset=at.offset, metadata=_parsed(key), id=at)
        for at, key in _read(servers, places, carrier)
    ]
    kept = model.kept(rows)
    return Judged(kept, len(rows) - len(kept), model.highest)


def _parsed(key: bytes | None) -> SimpleNamespace | None:
    """Parsed by the published layout, without our code: 20 bytes, partition and offset not negative."""
    if key is None or len(key) != 20:
        return None
    pid, partition, offset = (int.from_bytes(part, signed=True) for part in (key[:8], key[8:12], key[12:]))
    return SimpleNamespace(pid=pid, partition=partition, offset=offset) if min(partition, offset) >= 0 else None


def _read(servers: str, places: Sequence[Place], carrier: str) -> list[tuple[Place, bytes | None]]:
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "brute-force",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
            "fetch.wait.max.ms": 20,
            "log_level": 0,
        }
    )
    found: list[tuple[Place, bytes | None]] = []
    try:
        consumer.assign([TopicPartition(*place) for place in places])
        ended = 0
        while ended < len(places):
            message = consumer.poll(_TIMEOUT_S)
            assert message is not None, f"nothing came for {_TIMEOUT_S} s"
            if (error := message.error()) is not None:
                if failure_of_code(error) is Failure.TRANSIENT:
                    continue  # an event: the client goes on by itself
                assert error.code() == KafkaError._PARTITION_EOF, error
                ended += 1
                continue
            key = message.key()
            if carrier == "header":
                named = [value for name, value in message.headers() or () if name == METADATA_HEADER]
                key = named[-1] if named else None
            found.append((Place(message.topic(), message.partition(), message.offset()), key))
    finally:
        consumer.close()
    return found

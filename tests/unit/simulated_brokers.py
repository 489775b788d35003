"""Kafka brokers in this process, over loopback: what a shipper asks of them, and faults at the moment of one's choice.

    with SimulatedBrokers(nodes=2, partitions=3) as brokers:
        brokers.facts(destination, topic)        stands for `look_at_topic`
        brokers.faults[PRODUCE] += [45, LOST]    the next answers: an error code, or a connection that is closed
        brokers.topic[0].records()               what a consumer would read

Of Kafka's rules these hold: a partition is at its leader alone; a batch is checked, and taken once and in order by its
producer's sequence numbers, of which the last five batches are known; an epoch below the producer's is refused; the end
of a transaction is a marker in each partition that it lists, and with version 2 raises the epoch. A consumer group has
one member, the last that joined. tests/kafka runs the same against Kafka's own brokers.
"""

import asyncio
import struct
import threading
import uuid
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from typing import Self

from aiokafka.protocol import admin, commit, coordination, fetch, group, metadata, offset, produce, transaction
from aiokafka.protocol.types import (
    Array,
    Boolean,
    CompactArray,
    CompactBytes,
    CompactString,
    Int16,
    Int32,
    Int64,
    Schema,
    String,
    TaggedFields,
)

from pushrep.kafka.answers import Code
from pushrep.kafka.errors import KafkaUnreachable, TopicMissing
from pushrep.kafka.topic import TopicFacts
from pushrep.records import BatchHeader, CorruptRecordBatch, Record, RecordBatch, encode_batch
from pushrep.records import header as layout

PRODUCE, FETCH, OFFSETS, METADATA, FIND, VERSIONS, INIT, ADD, END, CONFIGS = 0, 1, 2, 3, 10, 18, 22, 24, 26, 32
COMMIT, COMMITTED, JOIN, HEARTBEAT, LEAVE, SYNC, DESCRIBE = 8, 9, 11, 12, 13, 14, 15
LOST, UNSENT, SILENT = "done, and not answered", "not done, and not answered", "done; the connection stays silent"

_S, _C, _T = String("utf-8"), CompactString("utf-8"), ("tags", TaggedFields)


class _Id:
    @classmethod
    def decode(cls, data: BytesIO) -> uuid.UUID:
        return uuid.UUID(bytes=data.read(16))

    @classmethod
    def encode(cls, value: uuid.UUID) -> bytes:
        return value.bytes


_ERRORS = CompactArray(("batch_index", Int32), ("message", _C), _T)
_PRODUCER = Schema(("throttle", Int32), ("error", Int16), ("id", Int64), ("epoch", Int16), _T)
# By key and version: the request, and its answer. Those of the compact form have a header with tags.
_COMPACT = {
    (PRODUCE, 13): (
        Schema(
            ("transactional_id", _C), ("acks", Int16), ("timeout", Int32),
            ("topics", CompactArray(
                ("id", _Id), ("partitions", CompactArray(("index", Int32), ("records", CompactBytes), _T)), _T,
            )), _T,
        ),
        Schema(
            ("topics", CompactArray(
                ("id", _Id),
                ("partitions", CompactArray(
                    ("index", Int32), ("error", Int16), ("offset", Int64), ("time", Int64), ("start", Int64),
                    ("errors", _ERRORS), ("message", _C), _T,
                )), _T,
            )),
            ("throttle", Int32), _T,
        ),
    ),
    (METADATA, 12): (
        Schema(
            ("topics", CompactArray(("id", _Id), ("name", _C), _T)), ("creates", Boolean), ("rights", Boolean), _T,
        ),
        Schema(
            ("throttle", Int32),
            ("brokers", CompactArray(("node", Int32), ("host", _C), ("port", Int32), ("rack", _C), _T)),
            ("cluster", _C), ("controller", Int32),
            ("topics", CompactArray(
                ("error", Int16), ("name", _C), ("id", _Id), ("internal", Boolean),
                ("partitions", CompactArray(
                    ("error", Int16), ("index", Int32), ("leader", Int32), ("epoch", Int32),
                    ("replicas", CompactArray(Int32)), ("isr", CompactArray(Int32)),
                    ("offline", CompactArray(Int32)), _T,
                )),
                ("rights", Int32), _T,
            )), _T,
        ),
    ),
    (INIT, 3): (Schema(("name", _C), ("timeout", Int32), ("id", Int64), ("epoch", Int16), _T), _PRODUCER),
    (END, 5): (Schema(("name", _C), ("id", Int64), ("epoch", Int16), ("commit", Boolean), _T), _PRODUCER),
}  # fmt: skip
_PLAIN = {
    (kind.API_KEY, kind.API_VERSION): (kind.SCHEMA, kind.RESPONSE_TYPE.SCHEMA)
    for kind in (
        produce.ProduceRequest_v8, fetch.FetchRequest_v4, offset.OffsetRequest_v2, metadata.MetadataRequest_v5,
        coordination.FindCoordinatorRequest_v1, transaction.InitProducerIdRequest_v0,
        transaction.AddPartitionsToTxnRequest_v0, transaction.EndTxnRequest_v0, admin.DescribeConfigsRequest_v1,
        commit.OffsetCommitRequest_v2, commit.OffsetFetchRequest_v2, group.JoinGroupRequest_v2,
        group.HeartbeatRequest_v1, group.LeaveGroupRequest_v1, group.SyncGroupRequest_v1,
        admin.DescribeGroupsRequest_v0,
    )
}  # fmt: skip
_PLAIN[END, 1] = _PLAIN[END, 0]
_SPOKEN = {
    PRODUCE: (8, 13), FETCH: (4, 4), OFFSETS: (2, 2), METADATA: (5, 12), FIND: (1, 1), VERSIONS: (0, 3), INIT: (0, 3),
    ADD: (0, 0), END: (0, 5), CONFIGS: (1, 1), COMMIT: (2, 2), COMMITTED: (2, 2), JOIN: (2, 2), HEARTBEAT: (1, 1),
    LEAVE: (1, 1), SYNC: (1, 1), DESCRIBE: (0, 0),
}  # fmt: skip
_WRITTEN_MS = 1_790_000_000_000
_VERSION_0 = Schema(("error", Int16), ("versions", Array(("key", Int16), ("least", Int16), ("most", Int16))))


@dataclass
class _Producer:
    epoch: int
    known: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=5))
    """Base and last sequence number of its last batches, and where they begin."""


class SimulatedPartition:
    """A partition of the topic. leader: None: it has none. refuses: why a record is refused; None: it is taken."""

    def __init__(self) -> None:
        self.leader: int | None = 1
        self.start = self.end = 0
        self.batches: list[bytes] = []
        self.producers: dict[int, _Producer] = {}
        self.undecided: dict[int, int] = {}
        """By producer id: where its open transaction begins."""
        self.aborted: list[tuple[int, int]] = []
        self.refuses: Callable[[Record], str | None] = lambda _record: None
        self.refuses_with = Code.INVALID_RECORD
        self.size_max = 1 << 20
        self.takes_markers = True

    def append(  # noqa: PLR0911 - a refusal each
        self, data: bytes
    ) -> tuple[int, int, list[tuple[int, str, dict[int, bytes]]], str | None]:
        """A producer's batch: error code, base offset, refused records, and words."""
        try:
            batch = RecordBatch.check(data)
        except CorruptRecordBatch as error:
            return Code.CORRUPT_MESSAGE, -1, [], str(error)
        if len(data) > self.size_max:
            return Code.MESSAGE_TOO_LARGE, -1, [], f"{len(data)} bytes are more than {self.size_max}"
        refused = [(n, why, {}) for n, one in enumerate(batch.records()) if (why := self.refuses(one)) is not None]
        if refused:
            return self.refuses_with, -1, refused, None
        header = batch.header
        sequence = header.base_sequence, header.base_sequence + header.last_offset_delta
        if (known := self.producers.get(header.producer_id)) is not None:
            if header.producer_epoch < known.epoch:
                return Code.INVALID_PRODUCER_EPOCH, -1, [], None
            if header.producer_epoch > known.epoch:
                known.epoch, known.known = header.producer_epoch, deque(maxlen=5)
            for base, last, at in known.known:
                if (base, last) == sequence:
                    return Code.NONE, at, [], None
            if sequence[0] != (known.known[-1][1] + 1 if known.known else 0):
                return Code.OUT_OF_ORDER_SEQUENCE_NUMBER, -1, [], None
        known = self.producers.setdefault(header.producer_id, _Producer(header.producer_epoch))
        known.known.append((*sequence, self.end))
        if header.is_transactional:
            self.undecided.setdefault(header.producer_id, self.end)
        return Code.NONE, self._put(bytearray(data)), [], None

    def write(self, *values: bytes, **fields: object) -> int:
        """Records of another program."""
        return self._put(bytearray(encode_batch(list(values), timestamps_ms=_WRITTEN_MS, **fields).data))

    @property
    def decided(self) -> int:
        """Kafka's last stable offset."""
        return min([self.end, *self.undecided.values()])

    def mark(self, producer_id: int, epoch: int, *, commits: bool = False) -> None:
        """The end of a transaction: from now on older epochs of this producer are refused."""
        if (first := self.undecided.pop(producer_id, None)) is not None and not commits:
            self.aborted.append((producer_id, first))
        kind = bytes([0, 0, 0, commits])
        marker = encode_batch([b"end"], keys=[kind], timestamps_ms=1).with_producer(producer_id, epoch, -1)
        marker[layout.CRC_COVERS_FROM + 1] |= layout.CONTROL_BIT
        layout.write_crc(marker, layout.crc32c(marker, layout.CRC_COVERS_FROM))
        if producer_id not in self.producers or self.producers[producer_id].epoch < epoch:
            self.producers[producer_id] = _Producer(epoch)
        self._put(marker)

    def _put(self, data: bytearray) -> int:
        at = self.end
        layout.stamp(data, at, 0)
        self.batches.append(bytes(data))
        self.end = BatchHeader.parse(data).next_offset
        return at

    def cut(self, end: int) -> None:
        """What an unclean election does: everything from the batch that holds offset `end` on is gone."""
        self.batches = [one for one in self.batches if BatchHeader.parse(one).next_offset <= end]
        self.end = BatchHeader.parse(self.batches[-1]).next_offset if self.batches else self.start

    def retain(self, start: int) -> None:
        """What retention does: the batches below `start` are gone."""
        self.batches = [one for one in self.batches if BatchHeader.parse(one).next_offset > start]
        self.start = start

    def read(self, at: int, size_max: int, end: int) -> bytes | None:
        """As a fetch: at least one batch, none behind `end`; None: the offset is not there."""
        if not self.start <= at <= self.end:
            return None
        found = b""
        for one in self.batches:
            header = BatchHeader.parse(one)
            if header.next_offset > at and header.base_offset < end:
                found += one if len(found) + len(one) <= size_max or not found else b""
                if len(found) >= size_max:
                    break
        return found

    def records(self) -> list[Record]:
        """What a consumer reads."""
        batches = [RecordBatch.check(one) for one in self.batches]
        return [record for one in batches if not one.header.is_control for record in one.records()]


@dataclass
class _Transaction:
    producer_id: int
    epoch: int = -1
    listed: list[int] = field(default_factory=list)
    raised_by: tuple[int, int] | None = None
    """The last call that raised the epoch, and from which one: its repetition gets the same answer."""

    def raise_epoch(self, call: int) -> None:
        self.raised_by, self.epoch, self.listed = (call, self.epoch), self.epoch + 1, []


@dataclass
class _Group:
    generation: int = 0
    member: str = ""
    assignment: bytes = b""
    committed: dict[tuple[str, int], tuple[int, str]] = field(default_factory=dict)
    """By topic and partition: the offset, and what stands beside it."""


class SimulatedBrokers:
    """Nodes 1 to `nodes`, of which the first is the coordinator, and one topic. A context manager.

    more: further topics, of one partition each.
    """

    def __init__(self, nodes: int = 1, partitions: int = 1, topic: str = "orders", more: tuple[str, ...] = ()) -> None:
        self.name, self.topic_id, self.cluster_id = topic, uuid.uuid4(), "a cluster"
        self.topic = [SimulatedPartition() for _ in range(partitions)]
        self.more = {name: [SimulatedPartition()] for name in more}
        self.groups: dict[str, _Group] = defaultdict(_Group)
        self.metadata_size_max = 4096
        self.settings: dict[str, object] = {}
        """Of the topic, as TopicFacts names them."""
        self.configs: dict[str, str] = {}
        """The same by their own names."""
        self.transaction_version = 2
        self.produce_version = 13
        self.faults: dict[int, deque[int | str]] = defaultdict(deque)
        """By request: what becomes of the next ones."""
        self.asked: list[int] = []
        """The requests that came, by their keys."""
        self.is_missing = False
        self.throttle_ms = 0
        """How long a producer is to send nothing after each answer."""
        self.down: set[int] = set()
        """Nodes that close each connection at once."""
        self.newest_producer_id = 1000
        self._transactions: dict[str, _Transaction] = {}
        self._nodes, self._ports = range(1, nodes + 1), {}
        self._ready, self._loop = threading.Event(), asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)
        self._open: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    @property
    def servers(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self._ports.values())

    def facts(self, _destination: object, topic: str) -> TopicFacts:
        """As `look_at_topic`. Raises TopicMissing, KafkaUnreachable."""
        if self.is_missing or topic != self.name:
            raise TopicMissing(topic)
        if self.down >= set(self._nodes):
            raise KafkaUnreachable("no broker answers")
        given = {
            "cleanup_policy": "delete", "max_message_bytes": 1 << 20, "retention_ms": -1, "has_append_time": False,
            "producer_id_expiration_ms": 86_400_000,
        }  # fmt: skip
        return TopicFacts(
            topic=topic, topic_id=self.topic_id, partitions=len(self.topic), cluster_id=self.cluster_id,
            **given | self.settings,
        )  # fmt: skip

    def renew(self) -> None:
        """The topic is deleted and made again."""
        self.topic_id, self.topic = uuid.uuid4(), [SimulatedPartition() for _ in self.topic]

    def producer(self, name: str) -> tuple[int, int]:
        """The producer id and epoch of a transactional id."""
        found = self._transactions[name]
        return found.producer_id, found.epoch

    @property
    def names(self) -> list[str]:
        """The transactional ids that were ever used."""
        return list(self._transactions)

    def forget(self) -> None:
        """The coordinator forgets its transactional ids."""
        self._transactions.clear()

    def take_over(self) -> None:
        """Another instance begins under each transactional id, and fences the one that ships."""
        for held in self._transactions.values():
            held.epoch, held.raised_by = held.epoch + 1, None
            for one in self.topic:
                one.mark(held.producer_id, held.epoch)

    def disconnect(self) -> None:
        """Every connection breaks; on return nothing that was sent over them is still read."""
        asyncio.run_coroutine_threadsafe(self._disconnect(), self._loop).result(60)

    async def _disconnect(self) -> None:
        open_now = dict(self._open)
        for writer in open_now:
            writer.transport.abort()
        await asyncio.gather(*open_now.values())

    # -- the server ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._over = asyncio.Event()
        servers = []
        for node in self._nodes:
            server = await asyncio.start_server(partial(self._accept, node), "127.0.0.1", 0)
            self._ports[node] = server.sockets[0].getsockname()[1]
            servers.append(server)
        self._ready.set()
        await self._over.wait()
        # A connection that is accepted while its server closes, or whose task never began, leaves a socket open.
        while accepting := asyncio.all_tasks() - {asyncio.current_task()} - set(self._open.values()):
            await asyncio.wait(accepting)
        for server in servers:
            server.close()
        open_now = list(self._open.items())
        for writer, task in open_now:
            writer.transport.abort()
            task.cancel()
        await asyncio.gather(*(task for _, task in open_now), return_exceptions=True)
        await asyncio.sleep(0)  # aborted transports let go of their sockets

    def _accept(self, node: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # At once, and not by a task that may be cancelled before it begins: who is known here is closed.
        self._open[writer] = asyncio.create_task(self._connected(node, reader, writer))

    async def _connected(self, node: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_silent = False
        try:
            while node not in self.down:
                (size,) = struct.unpack(">i", await reader.readexactly(4))
                frame = BytesIO(await reader.readexactly(size))
                key, version, number, _ = (one.decode(frame) for one in (Int16, Int16, Int32, _S))
                self.asked.append(key)
                fault = self.faults[key].popleft() if self.faults[key] else None
                if fault == UNSENT:
                    break
                answer = await self._answer(node, key, version, frame, fault if isinstance(fault, int) else None)
                is_silent = is_silent or fault == SILENT
                if fault == LOST:
                    break
                if not is_silent:
                    answer = struct.pack(">i", number) + answer
                    writer.write(struct.pack(">i", len(answer)) + answer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()

    async def _answer(self, node: int, key: int, version: int, frame: BytesIO, code: int | None) -> bytes:
        if key == VERSIONS:
            return self._versions(version, code)
        is_compact = (key, version) in _COMPACT
        asked, answered = _COMPACT[key, version] if is_compact else _PLAIN[key, version]
        if is_compact:
            TaggedFields.decode(frame)
        request = asked.decode(frame)
        fields = await _CALLS[key](self, node, request, code)
        if key == PRODUCE and not is_compact:
            topics = [
                (name, [(*one[:5], [two[:2] for two in one[5]], one[6]) for one in found])
                for name, found, _ in fields[0]
            ]
            fields = topics, fields[1]
        elif not is_compact and key in {INIT, END}:
            fields = fields[: len(answered.fields)]
        return (bytes(1) if is_compact else b"") + answered.encode(fields)

    def _versions(self, version: int, code: int | None) -> bytes:
        spoken = _SPOKEN | {PRODUCE: (8, self.produce_version)}
        listed = [(key, least, most) for key, (least, most) in spoken.items()]
        if version == 0:
            return _VERSION_0.encode((code or 0, listed))
        compact = CompactArray(("key", Int16), ("least", Int16), ("most", Int16), _T)
        level = CompactArray(("name", _C), ("most", Int16), ("least", Int16), _T)
        features = level.encode([("transaction.version", self.transaction_version, 0, {})])
        tags = bytes([1, 2, len(features)]) + features
        return Int16.encode(code or 0) + compact.encode([(*one, {}) for one in listed]) + Int32.encode(0) + tags

    # -- the calls: they get the fields of a request and the code of a fault, and return the fields of the answer ------

    async def on_metadata(self, _node: int, request: tuple, code: int | None) -> tuple:
        if is_compact := len(request) > 3:
            request = ([name for _, name, _ in request[0] or ()],)
        brokers = [(node, "127.0.0.1", port, None) for node, port in self._ports.items() if node not in self.down]
        topics = []
        for name in request[0] or ():
            if (found := self._named(name)) is None:
                topics.append((Code.UNKNOWN_TOPIC_OR_PARTITION, name, False, []))
                continue
            parts = [
                (Code.NONE if one.leader else Code.LEADER_NOT_AVAILABLE, n, one.leader or -1, [1], [1], [])
                for n, one in enumerate(found)
            ]
            topics.append((code or Code.NONE, name, False, parts))
        if not is_compact:
            return 0, brokers, self.cluster_id, 1, topics
        brokers = [(*one, {}) for one in brokers]
        topics = [
            (error, name, self._id(name), internal, [(*one[:3], 0, *one[3:], {}) for one in parts], -(1 << 31), {})
            for error, name, internal, parts in topics
        ]
        return 0, brokers, self.cluster_id, 1, topics, {}

    def _named(self, name: object) -> list[SimulatedPartition] | None:
        if name in {self.name, self.topic_id}:
            return None if self.is_missing else self.topic
        return self.more.get(str(name))

    def _id(self, name: str) -> uuid.UUID:
        return self.topic_id if name == self.name else uuid.uuid5(self.topic_id, name)

    def _at(self, node: int, one: SimulatedPartition, code: int | None) -> int:
        if code is not None:
            return code
        return Code.NONE if one.leader == node else Code.NOT_LEADER_OR_FOLLOWER

    async def on_produce(self, node: int, request: tuple, code: int | None) -> tuple:
        found = []
        for one in request[3]:
            name, partitions = one[:2]
            answers = []
            for index, data, *_ in partitions:
                answer = (Code.UNKNOWN_TOPIC_ID, -1, [], None)
                if (topic := self.topic if name == self.topic_id else self._named(name)) is not None:
                    answer = (self._at(node, topic[index], code), -1, [], None)
                if topic is not None and answer[0] == Code.NONE:
                    answer = topic[index].append(bytes(data))
                error, at, errors, words = answer
                answers.append((index, error, at, -1, 0, errors, words, {}))
            found.append((name, answers, {}))
        return found, self.throttle_ms, {}

    async def on_fetch(self, node: int, request: tuple, code: int | None) -> tuple:
        found = []
        for name, partitions in request[5]:
            answers = []
            for index, at, size_max in partitions:
                one = (self._named(name) or self.topic)[index]
                error, data = self._at(node, one, code), b""
                end = one.decided if request[4] else one.end
                if error == Code.NONE and (data := one.read(at, size_max, end)) is None:
                    error = Code.OFFSET_OUT_OF_RANGE
                answers.append((index, error, one.end, one.decided, one.aborted if request[4] else [], data or b""))
            found.append((name, answers))
        if not any(answer[5] or answer[1] for _, answers in found for answer in answers):
            await asyncio.sleep(min(request[1], 5) / 1000)
        return 0, found

    async def on_offsets(self, node: int, request: tuple, code: int | None) -> tuple:
        found = []
        for name, partitions in request[2]:
            answers = []
            for index, which in partitions:
                one = (self._named(name) or self.topic)[index]
                end = one.decided if request[1] else one.end
                at = {-1: end, -2: one.start}.get(which, one.start if which <= _WRITTEN_MS else -1)
                answers.append((index, self._at(node, one, code), -1, at))
            found.append((name, answers))
        return 0, found

    async def on_find(self, _node: int, _request: tuple, code: int | None) -> tuple:
        return 0, code or Code.NONE, None, 1, "127.0.0.1", self._ports[1]

    async def on_init(self, _node: int, request: tuple, code: int | None) -> tuple:
        name, _, *named = request
        if code is not None:
            return 0, code, -1, -1, {}
        if name is None:
            self.newest_producer_id += 1
            return 0, Code.NONE, self.newest_producer_id, 0, {}
        held = self._transactions.get(name)
        if held is None:
            self.newest_producer_id += 1
            held = self._transactions[name] = _Transaction(self.newest_producer_id)
        elif named and named[0] == held.producer_id and held.raised_by == (INIT, named[1]):
            return 0, Code.NONE, held.producer_id, held.epoch, {}
        elif named and named[0] >= 0 and tuple(named[:2]) != (held.producer_id, held.epoch):
            return 0, Code.PRODUCER_FENCED, -1, -1, {}
        held.raise_epoch(INIT)
        for one in self.topic:
            if held.producer_id in one.undecided:
                one.mark(held.producer_id, held.epoch)
        return 0, Code.NONE, held.producer_id, held.epoch, {}

    def _held(self, name: str, producer_id: int, epoch: int, code: int | None) -> tuple[int, _Transaction | None]:
        held = self._transactions.get(name)
        if code is not None:
            return code, None
        if held is None or held.producer_id != producer_id:
            return Code.INVALID_PRODUCER_ID_MAPPING, None
        return (Code.NONE, held) if held.epoch == epoch else (Code.PRODUCER_FENCED, None)

    async def on_add(self, _node: int, request: tuple, code: int | None) -> tuple:
        error, held = self._held(*request[:3], code)
        [(topic, partitions)] = request[3]
        if held is not None:
            held.listed = sorted({*held.listed, *partitions})
        return 0, [(topic, [(one, error) for one in partitions])]

    async def on_end(self, _node: int, request: tuple, code: int | None) -> tuple:
        name, producer_id, epoch = request[:3]
        held, raises = self._transactions.get(name), len(request) > 4
        if code is None and held is not None and held.raised_by == (END, epoch):
            return 0, Code.NONE, held.producer_id, held.epoch, {}
        error, held = self._held(name, producer_id, epoch, code)
        if held is None:
            return 0, error, -1, -1, {}
        listed = held.listed
        if raises:
            held.raise_epoch(END)
        for one in (self.topic[number] for number in listed):
            if one.takes_markers and one.leader is not None:
                one.mark(held.producer_id, held.epoch, commits=request[3])
        return 0, Code.NONE, held.producer_id, held.epoch, {}

    async def on_configs(self, _node: int, request: tuple, code: int | None) -> tuple:
        given = {
            "cleanup.policy": "delete", "max.message.bytes": str(self.topic[0].size_max), "retention.ms": "-1",
            "message.timestamp.type": "CreateTime", **self.configs,
        }  # fmt: skip
        entries = [(name, value, False, 1, False, []) for name, value in given.items()]
        return 0, [(code or Code.NONE, None, kind, name, entries if kind == 2 else []) for kind, name, _ in request[0]]

    async def on_join(self, _node: int, request: tuple, code: int | None) -> tuple:
        name, _, _, member, _, [(protocol, metadata), *_] = request
        if code is not None:
            return 0, code, -1, "", "", member, []
        held = self.groups[name]
        held.generation, held.member = held.generation + 1, member or f"member-{uuid.uuid4()}"
        return 0, Code.NONE, held.generation, protocol, held.member, held.member, [(held.member, metadata)]

    async def on_sync(self, _node: int, request: tuple, code: int | None) -> tuple:
        name, _, member, given = request
        held = self.groups[name]
        if code is None:
            held.assignment = bytes(dict(given).get(member, b""))
        return 0, code or _member_or_not(held, member), held.assignment if code is None else b""

    async def on_heartbeat(self, _node: int, request: tuple, code: int | None) -> tuple:
        return 0, code or _member_or_not(self.groups[request[0]], request[2])

    async def on_leave(self, _node: int, request: tuple, code: int | None) -> tuple:
        self.groups[request[0]].member = ""
        return 0, code or Code.NONE

    async def on_commit(self, _node: int, request: tuple, code: int | None) -> tuple:
        name, generation, member, _, topics = request
        held, found = self.groups[name], []
        error = code or (_member_or_not(held, member) if generation >= 0 else Code.NONE)
        for topic, partitions in topics:
            answers = []
            for number, at, beside in partitions:
                is_large = len(beside or "") > self.metadata_size_max
                answers.append((number, error or (_METADATA_TOO_LARGE if is_large else Code.NONE)))
                if not answers[-1][1]:
                    held.committed[topic, number] = at, beside
            found.append((topic, answers))
        return (found,)

    async def on_committed(self, _node: int, request: tuple, code: int | None) -> tuple:
        if code is not None and code != Code.TOPIC_AUTHORIZATION_FAILED:
            return [], code
        held = self.groups[request[0]].committed
        return [
            (topic, [(one, *held.get((topic, one), (-1, "")), code or Code.NONE) for one in partitions])
            for topic, partitions in request[1] or ()
        ], Code.NONE

    async def on_describe(self, _node: int, request: tuple, code: int | None) -> tuple:
        found = []
        for name in request[0]:
            held = self.groups[name]
            members = [(held.member, "a client", "a host", b"", held.assignment)] if held.member else []
            found.append((code or Code.NONE, name, "Stable", "consumer", "range", members))
        return (found,)


_METADATA_TOO_LARGE, _UNKNOWN_MEMBER = 12, 25


def _member_or_not(held: _Group, member: str) -> int:
    return Code.NONE if member == held.member else _UNKNOWN_MEMBER


_CALLS = {
    PRODUCE: SimulatedBrokers.on_produce, FETCH: SimulatedBrokers.on_fetch, OFFSETS: SimulatedBrokers.on_offsets,
    METADATA: SimulatedBrokers.on_metadata, FIND: SimulatedBrokers.on_find, INIT: SimulatedBrokers.on_init,
    ADD: SimulatedBrokers.on_add, END: SimulatedBrokers.on_end, CONFIGS: SimulatedBrokers.on_configs,
    COMMIT: SimulatedBrokers.on_commit, COMMITTED: SimulatedBrokers.on_committed, JOIN: SimulatedBrokers.on_join,
    HEARTBEAT: SimulatedBrokers.on_heartbeat, LEAVE: SimulatedBrokers.on_leave, SYNC: SimulatedBrokers.on_sync,
    DESCRIBE: SimulatedBrokers.on_describe,
}  # fmt: skip

"""The brokers of a Kafka cluster, for shipping: the leader of each partition, and one connection to each broker.

Connections, their security and the protocol's structures are aiokafka's. Its client refreshes metadata with a request
that makes brokers create a deleted topic again; so metadata is requested here, when an answer calls for it. Everything
runs in one event loop.

A connection is aiokafka's, except that it gives a large request to the socket in pieces.

    aiokafka    batch ─ copy ─▶ request ─ copy ─▶ behind its header ─ copy ─▶ behind its size ─▶ socket
    here        size, header, fields ─▶ socket, batch from where it lies ─▶ socket, the rest ─▶ socket

aiokafka's own send joins the parts of a request three times, each time into memory that is new from the system.
Bytes that the socket does not take at once wait in asyncio's buffer for the loop's next turn, and so does the broker.
So where the system allows it, the socket's buffer is large enough for everything in flight.
"""

import asyncio
import random
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from time import monotonic
from typing import Any, NamedTuple, TypeVar

from aiokafka.abc import AbstractTokenProvider
from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.errors import KafkaConnectionError, KafkaError
from aiokafka.protocol.coordination import FindCoordinatorRequest
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.offset import OffsetRequest
from aiokafka.protocol.transaction import InitProducerIdRequest
from aiokafka.util import wait_for

from filtering import MissingRight
from pushrep.kafka.answers import Code
from pushrep.kafka.destination import KafkaDestination, Token
from pushrep.kafka.errors import AnotherCluster, KafkaUnreachable, TopicMissing
from pushrep.records.header import Buffer

_T = TypeVar("_T")
_SIZE = struct.Struct(">i")
_LARGE_BYTES = 16 << 10  # below, a copy is cheaper than a call of the system
_SEND_BUFFER_BYTES = 4 << 20


class Connection(AIOKafkaConnection):  # type: ignore[misc] # aiokafka has no types
    """See the file's map."""

    async def connect(self) -> Any:
        """As aiokafka's."""
        reader, writer = await super().connect()
        if _is_granted(_SEND_BUFFER_BYTES):
            opened = writer.get_extra_info("socket")
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        return reader, writer

    def send_in_parts(self, request: Any) -> Awaitable[Any]:
        """As `send`; a request whose structure has `parts()` goes out by them. Raises as `send`."""
        if self._writer is None:
            raise KafkaConnectionError(f"No connection to broker at {self.host}:{self.port}")
        struct_ = request.prepare(self._versions)
        if not hasattr(struct_, "parts"):
            return self.send(request)  # type: ignore[no-any-return] # as above
        correlation_id = self._next_correlation_id()
        header = struct_.build_request_header(correlation_id=correlation_id, client_id=self._client_id).encode()
        parts = struct_.parts()
        size = len(header) + sum(map(len, parts))
        for piece in _joined([_SIZE.pack(size), header, *parts]):
            self._writer.write(piece)
        answer = self._loop.create_future()
        self._requests.append((correlation_id, struct_, answer))
        return wait_for(answer, self._request_timeout)  # type: ignore[no-any-return] # as above


def _joined(parts: list[Buffer]) -> list[Buffer]:
    """Joins neighbouring small parts; large ones stay as they are."""
    pieces: list[Buffer] = []
    small: list[Buffer] = []
    for part in parts:
        if len(part) < _LARGE_BYTES:
            small.append(part)
            continue
        pieces += [b"".join(small), part]
        small = []
    return [*pieces, b"".join(small)] if small else pieces


@cache
def _is_granted(size_bytes: int) -> bool:
    """Whether the system lets a socket have so large a send buffer (Linux: net.core.wmem_max).

    Tried on a spare socket: a socket that gets less than it asked for does not grow by itself any more.
    """
    with socket.socket() as asked:
        asked.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size_bytes)
        return asked.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) >= size_bytes


_EARLIEST, _LATEST = -2, -1
_READ_UNCOMMITTED = 0
_TRANSACTIONS = 1
_FETCH_BYTES = 4 << 20
_FETCH_WAIT_MS = 500
_CLOSE_S = 1.0
_SILENT_S = 1.0
_NEXT_BROKER_S = 1.0  # one that hangs keeps another one unasked for so long
TAKES_NO_CONNECTION, DOES_NOT_ANSWER = "takes no connection", "does not answer"
UNREACHABLE = (OSError, KafkaError, asyncio.TimeoutError, KafkaUnreachable)
"""What is raised when a broker does not answer, not in Kafka's language, or with an error that may pass."""


def broker_refused(what: str, error_code: int) -> KafkaUnreachable:
    """A broker answered with an error that may pass."""
    return KafkaUnreachable(Code.name_of(error_code), what, error_code)


def right_missing(operation: str, resource: str, name: str, error_code: int) -> KafkaUnreachable:
    """As `MissingRight` names it."""
    return KafkaUnreachable(str(MissingRight(operation, resource, name, Code.name_of(error_code))), "Kafka refuses")


def _note_or_raise(failed: dict[int, KafkaUnreachable] | None, partition: int, error: KafkaUnreachable) -> None:
    if failed is None:
        raise error
    failed[partition] = error


@dataclass(slots=True)
class KnownBrokers:
    """What is known of a cluster, across the sessions of a process. cluster_id: held against each connection; None: not
    known yet. addresses: of brokers that were seen alive, by their ids.
    """

    cluster_id: str | None = None
    addresses: dict[int, tuple[str, int]] = field(default_factory=dict)


class PartitionBounds(NamedTuple):
    """Offsets of a Kafka partition that can be read: [start, end)."""

    start: int
    end: int


@dataclass(slots=True)
class _Silence:
    """Of a broker. since_s: the last answer, or the first request without one. waiting: requests now."""

    since_s: float
    what: str = ""
    waiting: int = 0


class Cluster:
    """See the file's map. leaders: by Kafka partition its broker, if known; partitions: how many there are.

    Brokers that were seen alive are asked before `bootstrap_servers`, of which none may be left. Those of another
    cluster (addresses are used again) are sent nothing.
    """

    def __init__(self, destination: KafkaDestination, topic: str, known: KnownBrokers | None = None) -> None:
        self._destination, self._topic = destination, topic
        self._known = known or KnownBrokers()
        self._ssl_context: ssl.SSLContext | None = None
        self._addresses = self._known.addresses
        self._alive: list[tuple[str, int]] = []
        self._connections: dict[int, Connection] = {}
        self._connecting: dict[int, asyncio.Task[Connection]] = {}
        self._left: list[asyncio.Future[None]] = []
        self._silences: dict[int, _Silence] = {}
        self.leaders: dict[int, int] = {}
        self.partitions = 0

    @contextmanager
    def awaiting(self, node: int, what: str) -> Iterator[None]:
        """The block waits for an answer of this broker. what: what a broker that takes long is said to do."""
        silence = self._silences.setdefault(node, _Silence(monotonic()))
        silence.waiting, silence.what = silence.waiting + 1, what
        try:
            yield
        except TimeoutError:
            silence.waiting -= 1
            raise
        except asyncio.CancelledError:  # another one answered: that says nothing of this one
            silence.waiting -= 1
            if not silence.waiting:
                self._silences.pop(node, None)
            raise
        except BaseException:
            self._ended(node, silence)
            raise
        self._ended(node, silence)

    def _ended(self, node: int, silence: _Silence) -> None:
        silence.waiting, silence.since_s = silence.waiting - 1, monotonic()
        if not silence.waiting:
            self._silences.pop(node, None)

    def silent(self, least_s: float) -> dict[int, tuple[str, float]]:
        """By broker that leads a partition or is waited for: what it has done for so long, and how many seconds."""
        now_s, found = monotonic(), {}
        for node, one in self._silences.items():
            if now_s - one.since_s >= least_s and (one.waiting or node in self.leaders.values()):
                host, port = self._addresses.get(node, ("", ""))
                found[node] = f"broker {node} at {host}:{port} {one.what}", now_s - one.since_s
        return found

    @property
    def destination(self) -> KafkaDestination:
        """The destination by the brokers of the last metadata, or, before it, by all that are known."""
        known = self._alive or list(self._addresses.values())
        servers = [f"{f'[{host}]' if ':' in host else host}:{port}" for host, port in known]
        if not self._alive:
            servers.append(self._destination.bootstrap_servers)
        return replace(self._destination, bootstrap_servers=",".join(servers))

    async def refresh(self) -> None:
        """Ask the brokers who leads which partition. Raises KafkaUnreachable, TopicMissing, AnotherCluster."""
        request = MetadataRequest([self._topic], allow_auto_topic_creation=False)
        response = await self._ask_any(request)
        found = {broker[0]: (broker[1], broker[2]) for broker in response.brokers}
        self._addresses.update(found)
        self._alive = list(found.values())
        for error_code, topic, _, partitions in response.topics:
            if topic != self._topic:
                continue
            if error_code == Code.UNKNOWN_TOPIC_OR_PARTITION:
                raise TopicMissing(topic)
            if error_code:
                raise broker_refused(f"metadata of topic {topic}", error_code)
            self.partitions = len(partitions)
            self.leaders = {one[1]: one[2] for one in partitions if one[2] >= 0}

    async def connection(self, node: int) -> Connection:
        """The one connection to a broker. Raises what UNREACHABLE names."""
        found = self._connections.get(node)
        if found is not None and found.connected():
            return found
        task = self._connecting.get(node)
        if task is None:
            if node not in self._addresses:
                raise KafkaUnreachable(f"broker {node} is not known any more")
            task = self._connecting[node] = asyncio.ensure_future(self._connect(*self._addresses[node]))
            task.add_done_callback(partial(self._on_connected, node))
        try:
            with self.awaiting(node, TAKES_NO_CONNECTION):
                connection = await asyncio.shield(task)
        except AnotherCluster as error:
            self._addresses.pop(node, None)
            raise KafkaUnreachable(f"broker {node} at {error.servers} is of cluster {error.found} now") from error
        return connection

    def _on_connected(self, node: int, task: "asyncio.Task[Connection]") -> None:
        """Keep the connection, though its caller may have been cancelled: the next caller takes it."""
        self._connecting.pop(node, None)
        if not task.cancelled() and task.exception() is None:
            self._connections[node] = task.result()

    def connection_of(self, partition: int) -> Connection | None:
        """The open connection to the leader of a partition; None if there is none."""
        found = self._connections.get(self.leaders.get(partition, -1))
        return found if found is not None and found.connected() else None

    def drop(self, node: int) -> None:
        """Close the connection: a late answer would be taken for the answer to a later request."""
        found = self._connections.pop(node, None)
        if found is not None:
            self._leave(found)

    async def init_producer_id(self) -> tuple[int, int]:
        """A new producer id and its epoch. Raises KafkaUnreachable."""
        response = await self._ask_any(InitProducerIdRequest(None, -1))
        if response.error_code == Code.CLUSTER_AUTHORIZATION_FAILED:  # the right to write to any topic is enough
            raise right_missing("WRITE", "topic", self._topic, response.error_code)
        if response.error_code:
            raise broker_refused("a producer id", response.error_code)
        return response.producer_id, response.producer_epoch

    async def bounds(self, partition: int) -> PartitionBounds:
        """The readable range of a partition now. Raises what UNREACHABLE names."""
        start = (await self._offsets([partition], _EARLIEST))[partition]
        return PartitionBounds(start, (await self.ends([partition]))[partition])

    async def ends(
        self, partitions: Iterable[int], failed: dict[int, KafkaUnreachable] | None = None
    ) -> dict[int, int]:
        """The end offsets of many partitions; one request a broker. Raises as `bounds`.

        failed: gets the error of a partition that has one, and keeps no other from being answered.
        """
        return await self._offsets(partitions, _LATEST, failed)

    async def _offsets(
        self, partitions: Iterable[int], which: int, failed: dict[int, KafkaUnreachable] | None = None
    ) -> dict[int, int]:
        async def ask(node: int, of_node: Iterable[int]) -> dict[int, int]:
            asked = [(partition, which) for partition in of_node]
            response = await self.ask(node, OffsetRequest(-1, _READ_UNCOMMITTED, [(self._topic, asked)]))
            found = {}
            for partition, error_code, _, offset in response.topics[0][1]:
                if error_code:
                    refused = broker_refused(f"the end of {self._topic}-{partition}", error_code)
                    _note_or_raise(failed, partition, refused)
                else:
                    found[partition] = int(offset)
            return found

        return await self._of_brokers(ask, partitions)

    async def fetch(self, partition: int, offset: int, size_bytes: int = _FETCH_BYTES) -> bytes:
        """Batches from the one that holds `offset` on, the last one perhaps cut off. Raises as `bounds`."""
        return (await self.fetch_many({partition: offset}, size_bytes))[partition]

    async def fetch_many(
        self,
        offsets: Mapping[int, int],
        size_bytes: int = _FETCH_BYTES,
        *,
        wait_ms: int = _FETCH_WAIT_MS,
        failed: dict[int, KafkaUnreachable] | None = None,
    ) -> dict[int, bytes]:
        """The same for many partitions, by their offsets; one request a broker.

        At least one partition gets data if any of them has some. wait_ms: for how long brokers wait for data. failed:
        as for `ends`. Raises as `bounds`.
        """

        async def ask(node: int, of_node: Iterable[int]) -> dict[int, bytes]:
            asked = [(partition, offsets[partition], size_bytes) for partition in of_node]
            request = FetchRequest(wait_ms, 1, size_bytes, _READ_UNCOMMITTED, [(self._topic, asked)])
            found = {}
            for one in (await self.ask(node, request)).topics[0][1]:
                if one[1] == Code.TOPIC_AUTHORIZATION_FAILED:
                    raise right_missing("READ", "topic", self._topic, one[1])
                if one[1]:
                    what = f"reading {self._topic}-{one[0]} from offset {offsets[one[0]]}"
                    _note_or_raise(failed, one[0], broker_refused(what, one[1]))
                else:
                    found[one[0]] = bytes(one[-1] or b"")
            return found

        return await self._of_brokers(ask, offsets)

    async def find_coordinator(self, transactional_id: str) -> int:
        """The transaction coordinator of this transactional id. Raises KafkaUnreachable."""
        response = await self._ask_any(FindCoordinatorRequest(transactional_id, _TRANSACTIONS))
        if response.error_code:
            raise broker_refused(f"the coordinator of transactional id {transactional_id}", response.error_code)
        self._addresses[response.coordinator_id] = (response.host, response.port)
        return int(response.coordinator_id)

    async def has_topic(self, topic: str) -> bool:
        """Whether the brokers know the topic; also True without the right to see it. Raises as `refresh`."""
        response = await self._ask_any(MetadataRequest([topic], allow_auto_topic_creation=False))
        return all(one[0] != Code.UNKNOWN_TOPIC_OR_PARTITION for one in response.topics if one[1] == topic)

    async def ask(self, node: int, request: Any) -> Any:
        """A broker's answer. Raises what UNREACHABLE names."""
        connection = await self.connection(node)
        try:
            with self.awaiting(node, DOES_NOT_ANSWER):
                return await connection.send(request)
        except TimeoutError:
            self.drop(node)
            raise

    async def close(self) -> None:
        """Close every connection, and wait a moment for that."""
        for task in (connecting := list(self._connecting.values())):
            task.cancel()
        await asyncio.gather(*connecting, return_exceptions=True)  # one may be connected already: then it is kept
        for node in list(self._connections):
            self.drop(node)
        if self._left:
            await asyncio.wait(self._left, timeout=_CLOSE_S)

    def _leave(self, connection: Connection) -> None:
        closed: asyncio.Future[None] = connection.close(reason=CloseReason.SHUTDOWN)
        self._left = [*(one for one in self._left if not one.done()), closed]

    async def _of_brokers(
        self, ask: Callable[[int, Iterable[int]], Awaitable[dict[int, _T]]], partitions: Iterable[int]
    ) -> dict[int, _T]:
        by_leader: dict[int, list[int]] = {}
        for partition in partitions:
            if (node := self.leaders.get(partition)) is None:
                raise broker_refused(f"{self._topic}-{partition}", Code.LEADER_NOT_AVAILABLE)
            by_leader.setdefault(node, []).append(partition)
        answers = await asyncio.gather(*(ask(node, some) for node, some in by_leader.items()))
        return {partition: found for answer in answers for partition, found in answer.items()}

    async def _ask_any(self, request: Any) -> Any:
        """The first answer. Brokers are asked one after the other, the next one also while another hangs."""
        failures: list[BaseException] = []
        asking: set[asyncio.Task[Any]] = set()
        waiting = list(self._asks(request))
        try:
            while waiting or asking:
                if waiting:
                    asking.add(asyncio.ensure_future(waiting.pop(0)()))
                done, asking = await asyncio.wait(
                    asking, timeout=_NEXT_BROKER_S if waiting else None, return_when=asyncio.FIRST_COMPLETED
                )
                for one in done:
                    error = one.exception()
                    if not isinstance(error, (*UNREACHABLE, AnotherCluster)):
                        return one.result()
                    failures.append(error)
        finally:
            for one in asking:
                one.cancel()
        unreachable = KafkaUnreachable(repr(failures[-1]) if failures else "no broker is known")
        raise next((one for one in failures if isinstance(one, AnotherCluster)), unreachable)

    def _asks(self, request: Any) -> Iterator[Callable[[], Awaitable[Any]]]:
        """The known brokers, those that keep others waiting last; then the addresses that the destination names."""

        async def ask_known(node: int) -> Any:
            try:
                return await self.ask(node, request)
            except UNREACHABLE:
                self.drop(node)
                raise

        async def ask_at(host: str, port: int) -> Any:
            connection = await self._connect(host, port)
            try:
                return await connection.send(request)
            finally:
                self._leave(connection)

        nodes = list(self._addresses)
        random.shuffle(nodes)
        for node in sorted(nodes, key=self.silent(_SILENT_S).__contains__):
            yield partial(ask_known, node)
        servers = self._destination.bootstrap_servers.split(",")
        random.shuffle(servers)
        for server in servers:
            host, _, port = server.strip().rpartition(":")
            yield partial(ask_at, host.strip("[]"), int(port))

    async def _connect(self, host: str, port: int) -> Connection:
        destination = self._destination
        self._ssl_context = self._ssl_context or destination.ssl_context()
        made = Connection(
            host,
            port,
            client_id=destination.client_id,
            request_timeout_ms=destination.request_timeout_ms + _FETCH_WAIT_MS,
            ssl_context=self._ssl_context,
            security_protocol=destination.security_protocol,
            sasl_mechanism=destination.sasl_mechanism,
            sasl_plain_username=destination.sasl_username,
            sasl_plain_password=destination.sasl_password,
            sasl_oauth_token_provider=None if (token := destination.sasl_oauth_token) is None else _Tokens(token),
        )
        try:
            await made.connect()
            await self._check_cluster(made)
        except BaseException:
            if made.connected():
                self._leave(made)
            raise
        return made

    async def _check_cluster(self, made: Connection) -> None:
        if (expected := self._known.cluster_id) is None:
            return
        answer = await made.send(MetadataRequest([], allow_auto_topic_creation=False))
        found = getattr(answer, "cluster_id", None)  # versions from 2 on have it
        if found not in {None, expected}:
            raise AnotherCluster(self._topic, f"{made.host}:{made.port}", expected=expected, found=str(found))


class _Tokens(AbstractTokenProvider):  # type: ignore[misc] # aiokafka has no types
    def __init__(self, token: Token) -> None:
        self._token = token

    async def token(self) -> str:
        text, _ = await asyncio.get_running_loop().run_in_executor(None, self._token)
        return text

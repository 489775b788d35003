"""A connection to a node for replays: TCP, optional TLS, ApiVersions; and the requests.

NodeConnection.ask      a request and its answer: waits              (StartReplay, DescribeRecordings, Truncate ...)
NodeConnection.receive  received messages: never waits         (ReplayData, ReplayEnd)
"""

import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from pushrep.env import REAL_NETWORK, Network
from pushrep.env.network import HostPort
from pushrep.errors import BadArgument, PushrepError
from pushrep.replay.plan import FOLLOW, RATE_MAX, AtTime, ReplayRefused, ReplayRequest
from pushrep.replay.slices import Buffers
from pushrep.wire.connection import CallAnswer, ClientConnection, PeerEvent
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.frames import SPARE_BYTES, ProtocolError
from pushrep.wire.push_messages import ApiVersionsRequest
from pushrep.wire.replay_messages import LengthKind, PositionKind, StartReplayRequest, StartReplayResponse
from pushrep.wire.values import Part, Response, Struct

S = TypeVar("S", bound=Struct)
R = TypeVar("R", bound=Response)
_PORT_MAX = 65_535
_MEMORY = Buffers(SPARE_BYTES)
"""Shared by all connections, because waiting ones need no buffers."""
_READS_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAccess:
    """How to connect to a node. Times in ms.

    tls: a context with this process's certificate, for a node with TLS. reconnect: a replay whose connection breaks
    goes on from its position; it tries to reconnect for up to `reconnect_for_ms`. silence_max_ms: a connection without
    any message, not even a heartbeat, for so long counts as broken. credit_bytes: how much may be in flight to one
    replay.
    """

    tls: ssl.SSLContext | None = None
    connect_timeout_ms: int = 5_000
    request_timeout_ms: int = 30_000
    reconnect: bool = True
    reconnect_for_ms: int = 300_000
    backoff_min_ms: int = 50
    backoff_max_ms: int = 2_000
    silence_max_ms: int = 15_000
    credit_bytes: int = 4 << 20
    network: Network = REAL_NETWORK

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if name.endswith(("_ms", "_bytes")) and getattr(self, name) < 1:
                raise BadArgument(name, f"{getattr(self, name)} is below 1")


class NodeUnreachable(PushrepError):
    """The node at `address` can't be reached: `why`. A change that was requested may have been made."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(f"the node at {address} can't be reached: {why}")
        self.address, self.why = address, why


def parse_address(text: str) -> HostPort | None:
    """`host:port` or `[v6]:port`; None if it is neither."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or "/" in host or not port.isdigit() or int(port) > _PORT_MAX:
        return None
    return host.removeprefix("[").removesuffix("]"), int(port)


def address_text(address: HostPort) -> str:
    """The address as text."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class NodeConnection:
    """One connection. Not thread-safe. Everything raises NodeUnreachable, after which it can't be used."""

    def __init__(self, address: HostPort, settings: NodeAccess) -> None:
        self.address, self._settings = address, settings
        self.protocol = ClientConnection(memory=_MEMORY.acquire_kept)
        self._early: list[CallAnswer | PeerEvent] = []  # events received before an answer
        self.socket: Any = None
        try:
            self.socket = settings.network.connect(address, settings.connect_timeout_ms / 1000)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if settings.tls is not None:
                self.socket = settings.tls.wrap_socket(self.socket, server_hostname=address[0])
            self._exchange(ApiVersionsRequest())
            self.socket.settimeout(settings.request_timeout_ms / 1000)
        except ssl.SSLCertVerificationError as error:
            self.close()
            raise NodeUnreachable(
                address_text(address), f"its certificate is refused: {error.verify_message}"
            ) from error
        except (OSError, ProtocolError) as error:
            self.close()
            raise NodeUnreachable(address_text(address), str(error) or type(error).__name__) from error
        except BaseException:
            self.close()
            raise

    def ask(self, request: Struct, answer: type[S]) -> tuple[int, S]:
        """Send `request`; returns its correlation id and answer. Events that come first are kept for `receive`."""
        try:
            correlation_id, found = self._exchange(request)
        except (OSError, ProtocolError) as error:
            raise self._gone(error) from error
        if not isinstance(found, answer):
            raise NodeUnreachable(address_text(self.address), f"it answered with {type(found).__name__}")
        return correlation_id, found

    def send_event(self, correlation_id: int, event: Struct) -> None:
        """Send an event of ours."""
        try:
            self.socket.settimeout(self._settings.request_timeout_ms / 1000)
            self._send(self.protocol.event_parts(correlation_id, event))
        except (OSError, ProtocolError) as error:
            raise self._gone(error) from error
        finally:
            with suppress(OSError):
                self.socket.settimeout(0)

    def receive(self) -> list[CallAnswer | PeerEvent]:
        """The received messages, perhaps none. The socket must not block (`settimeout(0)`)."""
        if self._early:
            early, self._early = self._early, []
            return early
        try:
            for _ in range(_READS_MAX):
                count = self.socket.recv_into(self.protocol.get_buffer())
                if count == 0:
                    raise ConnectionError("the node closed the connection")
                if found := self.protocol.buffer_updated(count):
                    return found
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return []
        except (OSError, ProtocolError) as error:
            raise self._gone(error) from error
        return []

    def event_of(self, correlation_id: int, timeout_s: float) -> Struct:
        """Wait for the next event of that call."""
        try:
            self.socket.settimeout(timeout_s)
            while True:
                while self._early:
                    found = self._early.pop(0)
                    if isinstance(found, PeerEvent) and found.correlation_id == correlation_id:
                        return found.message
                self._early = self._received()
        except (OSError, ProtocolError) as error:
            raise self._gone(error) from error

    def close(self) -> None:
        """Close the connection."""
        if self.socket is not None:
            with suppress(OSError):
                self.socket.close()

    def _exchange(self, request: Struct) -> tuple[int, Struct]:
        correlation_id, parts = self.protocol.ask(request)
        self._send(parts)
        answer = None
        while answer is None:
            for found in self._received():
                if isinstance(found, CallAnswer) and found.correlation_id == correlation_id:
                    answer = found.message
                else:
                    self._early.append(found)
        return correlation_id, answer

    def _received(self) -> list[CallAnswer | PeerEvent]:
        count = self.socket.recv_into(self.protocol.get_buffer())
        if count == 0:
            raise ConnectionError("the node closed the connection")
        return self.protocol.buffer_updated(count)

    def _send(self, parts: list[Part]) -> None:
        for part in parts:
            view = memoryview(part)  # type: ignore[arg-type]  # nothing that is asked here has a file's records
            while view:
                view = view[self.socket.send(view) :]

    def _gone(self, error: Exception) -> NodeUnreachable:
        return NodeUnreachable(address_text(self.address), str(error) or type(error).__name__)


def request_to_wire(recording_id: int, request: ReplayRequest) -> StartReplayRequest:
    """The request as a message. Raises BadArgument for numbers out of range, ReplayRefused for a rate."""
    rate = request.max_bytes_per_s
    if rate is not None and not 1 <= rate <= RATE_MAX:  # 0 is "no limit" to the node
        raise ReplayRefused(ErrorCode.INVALID_REQUEST, f"max_bytes_per_s {rate} is no rate: give 1 or more, or None")
    position, length = request.position, request.length
    kind, at = PositionKind.OFFSET, position
    if position is None:
        kind, at = PositionKind.LOG_START, 0
    elif isinstance(position, AtTime):
        kind, at = PositionKind.TIMESTAMP_MS, position.timestamp_ms
    length_kind = LengthKind.RECORDS
    if not isinstance(length, int):
        length_kind = LengthKind.FOLLOW if length is FOLLOW else LengthKind.TO_END
    assert isinstance(at, int), "every kind of position has its number"
    return StartReplayRequest(
        recording_id=recording_id,
        position_kind=kind,
        position=at,
        length_kind=length_kind,
        length=length if isinstance(length, int) else 0,
        bound=request.bound,
        max_bytes_per_s=rate or 0,
        epoch_before=-1 if request.epoch_before is None else request.epoch_before,
    )


def accepted(response: R) -> R:
    """Return the answer; raises ReplayRefused for its error code, with the range that it names."""
    if response.error_code is ErrorCode.NONE:
        return response
    start = end = None
    if isinstance(response, StartReplayResponse):
        start = response.log_start_offset if response.log_start_offset >= 0 else None
        end = response.end_offset if response.end_offset >= 0 else None
    raise ReplayRefused(response.error_code, response.why, start=start, end=end)


def started(connection: NodeConnection, asked: StartReplayRequest) -> StartReplayResponse:
    """Request a session. Raises ReplayRefused, NodeUnreachable."""
    return accepted(connection.ask(asked, StartReplayResponse)[1])

"""A connection to a node for replays: TCP, optional TLS, ApiVersions; and the requests.

NodeConnection.ask      a request and its answer: waits              (StartReplay, DescribeRecordings, Truncate ...)
NodeConnection.receive  received messages: never waits         (ReplayData, ReplayEnd)
"""

import ssl
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from filtering.closing import ClosedAtExit
from pushrep.env import REAL_NETWORK, Network
from pushrep.env.network import Address, tune
from pushrep.errors import PushrepError
from pushrep.replay.plan import FOLLOW, RATE_MAX, AtTime, ReplayRefused, ReplayRequest
from pushrep.replay.slices import Buffers
from pushrep.settings import Between, check
from pushrep.wire.connection import CallAnswer, ClientConnection, PeerEvent
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.frames import SPARE_BYTES, FrameLimits, ProtocolError
from pushrep.wire.push_messages import ApiVersionsRequest
from pushrep.wire.replay_messages import LengthKind, PositionKind, StartReplayRequest, StartReplayResponse
from pushrep.wire.values import Part, Response, Struct

S = TypeVar("S", bound=Struct)
R = TypeVar("R", bound=Response)
_LIMITS = FrameLimits(header_bytes_max=(1 << 24) - 1)  # for peers that we chose to ask: the largest header possible
_MEMORY = Buffers(SPARE_BYTES)
"""Shared by all connections, because waiting ones need no buffers."""
_READS_MAX = 64
_FromOne = Annotated[int, Between(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAccess:
    """How to connect to a node. Times in ms.

    tls: a context with this process's certificate, for a node with TLS. reconnect: a replay whose connection breaks
    goes on from its position; it tries to reconnect for up to `reconnect_for_ms`. silence_max_ms: a connection without
    any message, not even a heartbeat, for so long counts as broken. credit_bytes: how much may be in flight to one
    replay.
    """

    tls: ssl.SSLContext | None = None
    connect_timeout_ms: _FromOne = 5_000
    request_timeout_ms: _FromOne = 30_000
    reconnect: bool = True
    reconnect_for_ms: _FromOne = 300_000
    backoff_min_ms: _FromOne = 50
    backoff_max_ms: _FromOne = 2_000
    silence_max_ms: _FromOne = 15_000
    credit_bytes: _FromOne = 4 << 20
    network: Network = REAL_NETWORK

    def __post_init__(self) -> None:
        check(self)


class NodeUnreachable(PushrepError):
    """No node answers at `address` as it should: start it, or look at `why`. A change that was requested may have been
    made.
    """

    def __init__(self, address: str, why: str) -> None:
        super().__init__(f"{address}: {why}")
        self.address, self.why = address, why


class NodeConnection(ClosedAtExit):
    """One connection; a context manager. Not thread-safe. Everything raises NodeUnreachable, after which it can't be
    used.
    """

    def __init__(self, address: Address, settings: NodeAccess) -> None:
        self.address, self._settings = address, settings
        self.protocol = ClientConnection(_LIMITS, memory=_MEMORY.acquire_kept)
        self.correlation_id = -1
        """Of the last request."""
        self._early: list[CallAnswer | PeerEvent] = []  # events received before an answer
        self.socket: Any = None
        try:
            self.socket = settings.network.connect(address, settings.connect_timeout_ms / 1000)
            tune(self.socket)
            if settings.tls is not None:
                self.socket = settings.tls.wrap_socket(self.socket, server_hostname=address.host)
            self._exchange(ApiVersionsRequest())
            self.socket.settimeout(settings.request_timeout_ms / 1000)
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError | ProtocolError | UnicodeError):  # UnicodeError: no valid host name
                raise
            why = _why(error, is_connected=self.socket is not None, has_tls=settings.tls is not None)
            raise NodeUnreachable(str(address), why) from error

    def ask(self, request: Struct, answer: type[S]) -> S:
        """The answer to `request`, which is an `answer`. Events that come first are kept for `receive`."""
        try:
            found = self._exchange(request)
        except (OSError, ProtocolError) as error:
            raise self._gone(error) from error
        if not isinstance(found, answer):
            raise NodeUnreachable(str(self.address), f"it answered with {type(found).__name__}")
        return found

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

    def _exchange(self, request: Struct) -> Struct:
        self.correlation_id, parts = self.protocol.ask(request)
        self._send(parts)
        answer = None
        while answer is None:
            for found in self._received():
                if isinstance(found, CallAnswer) and found.correlation_id == self.correlation_id:
                    answer = found.message
                else:
                    self._early.append(found)
        return answer

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
        return NodeUnreachable(str(self.address), str(error) or type(error).__name__)


def _why(error: Exception, *, is_connected: bool, has_tls: bool) -> str:
    """Why there is no connection; a certificate error in plain words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    reason = getattr(error, "reason", None)
    if isinstance(reason, str) and "_ALERT_" in reason:
        said = reason.partition("_ALERT_")[2].replace("_", " ").lower()
        return f"it refuses our certificate: {said}" if "ca" in said.split() or "cert" in said else f"TLS: {said}"
    is_hung_up = isinstance(error, ConnectionError | ssl.SSLEOFError) and not isinstance(error, ConnectionRefusedError)
    if is_connected and is_hung_up and has_tls:
        return "it hung up during or right behind the TLS handshake: it refuses our certificate, or wants no TLS"
    if is_connected and is_hung_up:
        return f"it hung up on the first bytes, perhaps it wants TLS: {error}"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {str(reason or error).replace('_', ' ').lower()}; perhaps it does not speak TLS"
    return str(error) or type(error).__name__


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
    start = end = segment = None
    if isinstance(response, StartReplayResponse):
        start, end, segment = (
            one if one >= 0 else None for one in (response.log_start_offset, response.end_offset, response.segment)
        )
    raise ReplayRefused(response.error_code, response.why, start=start, end=end, segment=segment)


def started(connection: NodeConnection, asked: StartReplayRequest) -> StartReplayResponse:
    """Request a session. Raises ReplayRefused, NodeUnreachable."""
    return accepted(connection.ask(asked, StartReplayResponse))

"""The client's side of a connection: numbers requests, tracks those in flight, and accepts only answers to them.

    ask(message) -> (correlation id, parts)     parts go to the network, in order
    feed(data)   -> [CallAnswer | PeerEvent, ...]       answers in any order, each with the request that it belongs to

The first request is ApiVersions; no other is possible before its answer. Events have the correlation id of their call,
and come between its answer and its last event (calls.py).
"""

from typing import NamedTuple, TypeAlias

from pushrep.errors import BadArgument
from pushrep.wire.calls import (
    CALL_OF_EVENT,
    CALLS_WITH_EVENTS,
    EVENTS_OF_CLIENTS,
    LAST_EVENTS,
    PLACE_OF,
    ApiKey,
    Frame,
    encode,
    open_frame,
    refuse_other_versions,
)
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.errors import ProtocolError
from pushrep.wire.frames import FrameKind, FrameLimits, FrameReader, Memory, OpenedFrame, Prefix
from pushrep.wire.push_messages import ApiVersionsResponse
from pushrep.wire.values import Part, Struct

CORRELATION_IDS = 1 << 32


class PendingRequest(NamedTuple):
    """A request that waits for its answer."""

    correlation_id: int
    request: Struct
    api_key: ApiKey


class CallAnswer(NamedTuple):
    """An answer and its request."""

    correlation_id: int
    request: Struct
    message: Struct


class PeerEvent(NamedTuple):
    """An event of the peer; `correlation_id` is that of the call that it belongs to."""

    correlation_id: int
    message: Struct


Parts: TypeAlias = list[Part]


class ClientConnection:
    """The client's side of one connection. Not thread-safe. After a ProtocolError the connection has to be closed.

    memory: for large bodies, in views; without it each body gets its own.
    """

    def __init__(
        self,
        *,
        limits: FrameLimits | None = None,
        in_flight_max: int = 1024,
        memory: Memory | None = None,
    ) -> None:
        if in_flight_max < 1:
            raise BadArgument("in_flight_max", f"{in_flight_max} is below 1")
        self._in_flight_max = in_flight_max
        self._reader: FrameReader[CallAnswer | PeerEvent] = FrameReader(self._open, limits or FrameLimits(), memory)
        self._pending: dict[int, PendingRequest] = {}
        self._open_calls: dict[int, PendingRequest] = {}
        self._next_id = 0
        self.is_ready = False
        """Whether ApiVersions was answered, with our versions of all calls."""

    @property
    def in_flight(self) -> tuple[PendingRequest, ...]:
        """Requests without an answer, oldest first; if the connection breaks, each may or may not have been done."""
        return tuple(self._pending.values())

    @property
    def failure(self) -> ProtocolError | None:
        """The peer's protocol error, if there was one."""
        return self._reader.failure

    def ask(self, request: Struct) -> tuple[int, Parts]:
        """The request's parts to send, and its correlation id.

        Raises BadArgument for an event, before ApiVersions was answered, and with `in_flight_max` requests in flight.
        """
        key, kind = PLACE_OF[type(request)]
        if kind is not FrameKind.REQUEST:
            raise BadArgument("request", f"{type(request).__name__} is no request")
        if len(self._pending) >= self._in_flight_max:
            raise BadArgument("request", f"{self._in_flight_max} are in flight already: wait for an answer")
        if not self.is_ready and key is not ApiKey.API_VERSIONS:
            raise BadArgument("request", "ApiVersions is asked first, and nothing else before its answer")
        correlation_id = self._free_id()
        parts = encode(request, correlation_id)
        self._pending[correlation_id] = PendingRequest(correlation_id, request, key)
        return correlation_id, parts

    def event_parts(self, correlation_id: int, event: Struct) -> Parts:
        """The parts of an event of ours (Credit) for the call `correlation_id`. Raises BadArgument if that is over."""
        key, _ = PLACE_OF[type(event)]
        if key not in EVENTS_OF_CLIENTS:
            raise BadArgument("event", f"{type(event).__name__} is no event of a client")
        call = self._open_calls.get(correlation_id)
        if call is None or CALL_OF_EVENT[key] is not call.api_key:
            raise BadArgument("correlation_id", f"no call {correlation_id} is open")
        return encode(event, correlation_id)

    def feed(self, data: bytes) -> list[CallAnswer | PeerEvent]:
        """What `data` completes; see FrameReader.feed. Raises ProtocolError."""
        return self._reader.feed(data)

    def get_buffer(self) -> memoryview:
        """The buffer for the network's next bytes."""
        return self._reader.get_buffer()

    def buffer_updated(self, count: int) -> list[CallAnswer | PeerEvent]:
        """What the `count` bytes written there complete. Raises ProtocolError."""
        return self._reader.buffer_updated(count)

    def _free_id(self) -> int:
        correlation_id = self._next_id
        while correlation_id in self._pending or correlation_id in self._open_calls:
            correlation_id = (correlation_id + 1) % CORRELATION_IDS
        self._next_id = (correlation_id + 1) % CORRELATION_IDS
        return correlation_id

    def _open(self, prefix: Prefix, header: bytes) -> OpenedFrame[CallAnswer | PeerEvent]:
        """Refuse a frame that answers no request, before any of its records is stored."""
        correlation_id = prefix.correlation_id
        if prefix.kind == FrameKind.REQUEST:
            raise ProtocolError(f"answer to {correlation_id}: a server does not ask")
        if prefix.kind == FrameKind.EVENT:
            call = self._open_calls.get(correlation_id)
            known = call is not None and CALL_OF_EVENT.get(prefix.api_key) is call.api_key  # type: ignore[call-overload]
            if call is None or not known:
                raise ProtocolError(f"answer to {correlation_id}: no call waits for events of api key {prefix.api_key}")
        else:
            asked = self._pending.get(correlation_id)
            if asked is None:
                raise ProtocolError(
                    f"answer to {correlation_id}: nothing was asked under that number, or it was answered before"
                )
            if prefix.api_key != asked.api_key:
                raise ProtocolError(f"answer to {correlation_id}: api key {prefix.api_key}, asked was {asked.api_key}")
        body_bytes, finish = open_frame(prefix, header)
        return OpenedFrame(body_bytes, lambda body: self._on_frame(finish(body)))

    def _on_frame(self, frame: Frame) -> CallAnswer | PeerEvent:
        correlation_id, message = frame.correlation_id, frame.message
        if frame.kind is FrameKind.EVENT:
            if frame.api_key in LAST_EVENTS:
                self._open_calls.pop(correlation_id, None)
            return PeerEvent(correlation_id, message)
        asked = self._pending.pop(correlation_id)
        if asked.api_key in CALLS_WITH_EVENTS and getattr(message, "error_code", ErrorCode.NONE) is ErrorCode.NONE:
            self._open_calls[correlation_id] = asked
        if isinstance(message, ApiVersionsResponse):
            refuse_other_versions(message)
            self.is_ready = True
        return CallAnswer(correlation_id, asked.request, message)

"""The two ends of a connection: the client numbers requests, the server answers each once, with its number.

    ClientConnection   ask(message)                -> (correlation id, parts)      parts go to the network, in order
                       feed, buffer_updated        -> [CallAnswer | PeerEvent, ...]     answers in any order
    ServerConnection   feed, buffer_updated        -> [Call | ClientEvent, ...]    requests, and a subscriber's events
                       answer(call, response)      -> parts                        in any order
                       event(call, event)          -> parts    after the answer: ReplayData, ReplayEnd, DeleteDone

The first request is ApiVersions; no other is possible before its answer. Events have the correlation id of their call,
and come between its answer and its last event (calls.py). A client with more than UNANSWERED_MAX unanswered calls is
refused.
"""

from collections.abc import Callable
from typing import NamedTuple

from pushrep.errors import BadArgument
from pushrep.wire.calls import (
    CALL_OF_EVENT,
    CALLS_WITH_EVENTS,
    EVENTS_OF_CLIENTS,
    LAST_EVENTS,
    PLACE_OF,
    VERSIONS,
    ApiKey,
    Frame,
    encode,
    open_frame,
    refuse_other_versions,
    versions_answer,
)
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.frames import FrameKind, FrameLimits, FrameReader, Memory, OpenedFrame, Prefix, ProtocolError
from pushrep.wire.push_messages import ApiVersionsRequest, ApiVersionsResponse
from pushrep.wire.values import Part, Struct

CORRELATION_IDS = 1 << 32
UNANSWERED_MAX = 4096


class CallAnswer(NamedTuple):
    """The answer to the request of that number."""

    correlation_id: int
    message: Struct


class PeerEvent(NamedTuple):
    """An event of the peer; `correlation_id` is that of the call that it belongs to."""

    correlation_id: int
    message: Struct


class ClientConnection(FrameReader[CallAnswer | PeerEvent]):
    """The client's side of one connection. Not thread-safe. After a ProtocolError the connection has to be closed."""

    def __init__(self, limits: FrameLimits | None = None, memory: Memory | None = None) -> None:
        super().__init__(self._open, limits or FrameLimits(), memory)
        self._pending: dict[int, ApiKey] = {}
        self._open_calls: dict[int, ApiKey] = {}
        self._next_id = 0
        self.is_ready = False
        """Whether ApiVersions was answered, with our versions of all calls."""

    def ask(self, request: Struct) -> tuple[int, list[Part]]:
        """The request's parts to send, and its correlation id.

        Raises BadArgument for an event, and before ApiVersions was answered.
        """
        key, kind = PLACE_OF[type(request)]
        if kind is not FrameKind.REQUEST:
            raise BadArgument("request", f"{type(request).__name__} is no request")
        if not self.is_ready and key is not ApiKey.API_VERSIONS:
            raise BadArgument("request", "ApiVersions is asked first, and nothing else before its answer")
        correlation_id = self._free_id()
        parts = encode(request, correlation_id)
        self._pending[correlation_id] = key
        return correlation_id, parts

    def event_parts(self, correlation_id: int, event: Struct) -> list[Part]:
        """The parts of an event of ours (Credit) for the call `correlation_id`. Raises BadArgument if that is over."""
        key, _ = PLACE_OF[type(event)]
        if key not in EVENTS_OF_CLIENTS:
            raise BadArgument("event", f"{type(event).__name__} is no event of a client")
        if self._open_calls.get(correlation_id) is not CALL_OF_EVENT[key]:
            raise BadArgument("correlation_id", f"no call {correlation_id} is open")
        return encode(event, correlation_id)

    def _free_id(self) -> int:
        correlation_id = self._next_id
        while correlation_id in self._pending or correlation_id in self._open_calls:
            correlation_id = (correlation_id + 1) % CORRELATION_IDS
        self._next_id = (correlation_id + 1) % CORRELATION_IDS
        return correlation_id

    def _open(self, prefix: Prefix, header: bytes) -> OpenedFrame[CallAnswer | PeerEvent]:
        """Refuse a frame that answers no request, before any of its records is stored."""
        correlation_id, why = prefix.correlation_id, ""
        asked = self._pending.get(correlation_id)
        if prefix.kind == FrameKind.REQUEST:
            why = "a server does not ask"
        elif prefix.kind == FrameKind.EVENT:
            call = CALL_OF_EVENT.get(prefix.api_key)  # type: ignore[call-overload]
            if call is None or self._open_calls.get(correlation_id) is not call:
                why = f"no call waits for events of api key {prefix.api_key}"
        elif asked is None:
            why = "nothing was asked under that number, or it was answered before"
        elif prefix.api_key != asked:
            why = f"api key {prefix.api_key}, asked was {asked}"
        if why:
            raise ProtocolError(f"answer to {correlation_id}: {why}")
        body_bytes, finish = open_frame(prefix, header)
        return OpenedFrame(body_bytes, lambda body: self._on_frame(finish(body)))

    def _on_frame(self, frame: Frame) -> CallAnswer | PeerEvent:
        key, kind, correlation_id, message = frame
        if kind is FrameKind.EVENT:
            if key in LAST_EVENTS:
                self._open_calls.pop(correlation_id, None)
            return PeerEvent(correlation_id, message)
        del self._pending[correlation_id]
        if key in CALLS_WITH_EVENTS and getattr(message, "error_code", ErrorCode.NONE) is ErrorCode.NONE:
            self._open_calls[correlation_id] = key
        if isinstance(message, ApiVersionsResponse):
            refuse_other_versions(message)
            self.is_ready = True
        return CallAnswer(correlation_id, message)


class Call(NamedTuple):
    """A request to be answered. `is_version_known` is False for ApiVersions in a version of the future only."""

    correlation_id: int
    api_key: ApiKey
    request: Struct
    is_version_known: bool = True


class ClientEvent(NamedTuple):
    """An event from the client, for the call `correlation_id`, which may have ended."""

    correlation_id: int
    message: Struct


class ServerConnection(FrameReader[Call | ClientEvent]):
    """The server's side of one connection. Not thread-safe. After a ProtocolError the connection has to be closed."""

    def __init__(
        self,
        limits: FrameLimits | None = None,
        memory: Memory | None = None,
        hold: Callable[[Prefix], object] | None = None,
    ) -> None:
        super().__init__(self._open, limits or FrameLimits(), memory, hold)
        self._unanswered: set[int] = set()
        self._streams: set[int] = set()

    def answer(self, call: Call, response: Struct) -> list[Part]:
        """The parts of the answer. Raises BadArgument for another call's response or a second one."""
        if PLACE_OF[type(response)] != (call.api_key, FrameKind.RESPONSE):
            raise BadArgument("response", f"{type(response).__name__} does not answer {call.api_key.name}")
        if call.correlation_id not in self._unanswered:
            raise BadArgument("call", f"{call.correlation_id} was answered already")
        parts = encode(response, call.correlation_id)
        self._unanswered.discard(call.correlation_id)
        if call.api_key in CALLS_WITH_EVENTS and getattr(response, "error_code", ErrorCode.NONE) is ErrorCode.NONE:
            self._streams.add(call.correlation_id)
        return parts

    def answer_versions(self, call: Call) -> list[Part]:
        """The answer to ApiVersions."""
        code = ErrorCode.NONE if call.is_version_known else ErrorCode.UNSUPPORTED_VERSION
        return self.answer(call, versions_answer(code))

    def event(self, call: Call, event: Struct) -> list[Part]:
        """The parts of an event of an answered call. Raises BadArgument before the answer and after the end."""
        key, _ = PLACE_OF[type(event)]
        if CALL_OF_EVENT.get(key) is not call.api_key or key in EVENTS_OF_CLIENTS:
            raise BadArgument("event", f"{type(event).__name__} does not belong to {call.api_key.name}")
        if call.correlation_id not in self._streams:
            raise BadArgument("call", f"{call.correlation_id} is not answered yet, or over")
        parts = encode(event, call.correlation_id)
        if key in LAST_EVENTS:
            self._streams.discard(call.correlation_id)
        return parts

    def _open(self, prefix: Prefix, header: bytes) -> OpenedFrame[Call | ClientEvent]:
        correlation_id = prefix.correlation_id
        if prefix.kind == FrameKind.EVENT:
            if prefix.api_key not in EVENTS_OF_CLIENTS:
                raise ProtocolError(f"{prefix.place}: no event of a client")
        elif prefix.kind != FrameKind.REQUEST:
            raise ProtocolError(f"{prefix.place}: a client does not answer")
        elif correlation_id in self._unanswered or correlation_id in self._streams:
            raise ProtocolError(f"correlation id {correlation_id} is in use")
        elif len(self._unanswered) >= UNANSWERED_MAX:
            raise ProtocolError(f"{UNANSWERED_MAX} requests are unanswered, and more come")
        is_future = prefix.version > VERSIONS[ApiKey.API_VERSIONS]
        if prefix.api_key == ApiKey.API_VERSIONS and is_future and prefix.body_bytes == 0:
            # Its fields are unknown here, and not needed for the answer (KIP-511).
            call = Call(correlation_id, ApiKey.API_VERSIONS, ApiVersionsRequest(), is_version_known=False)
            return OpenedFrame(0, lambda _body: self._begun(call))
        body_bytes, finish = open_frame(prefix, header)
        return OpenedFrame(body_bytes, lambda body: self._on_frame(finish(body)))

    def _on_frame(self, frame: Frame) -> Call | ClientEvent:
        if frame.kind is FrameKind.EVENT:
            return ClientEvent(frame.correlation_id, frame.message)
        return self._begun(Call(frame.correlation_id, frame.api_key, frame.message))

    def _begun(self, call: Call) -> Call:
        self._unanswered.add(call.correlation_id)
        return call

"""The server's side of a connection: takes requests; each is answered once, with its correlation id.

    feed(data)             -> [Call | ClientEvent, ...]      requests, and a subscriber's events
    answer(call, response) -> parts                          in any order
    event(call, event)     -> parts                          after the answer: ReplayData, ReplayEnd, DeleteDone

A server holds the records of unanswered calls (`open_calls`), so its caller stops reading at a limit of its own. A peer
that has more than `calls_max` unanswered calls is refused.
"""

from typing import NamedTuple, TypeAlias

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
    refusal,
    versions_answer,
)
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.errors import ProtocolError
from pushrep.wire.frames import FrameKind, FrameLimits, FrameReader, OpenedFrame, Prefix, SpareBuffers
from pushrep.wire.push_messages import ApiVersionsRequest
from pushrep.wire.values import Part, Struct


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


Parts: TypeAlias = list[Part]


class ServerConnection:
    """The server's side of one connection. Not thread-safe. After a ProtocolError the connection has to be closed."""

    def __init__(
        self,
        *,
        limits: FrameLimits | None = None,
        calls_max: int = 4096,
        spares: SpareBuffers | None = None,
    ) -> None:
        if calls_max < 1:
            raise BadArgument("calls_max", f"{calls_max} is below 1")
        self._calls_max = calls_max
        self._reader: FrameReader[Call | ClientEvent] = FrameReader(self._open, limits or FrameLimits(), spares)
        self._unanswered: set[int] = set()
        self._streams: set[int] = set()

    @property
    def open_calls(self) -> int:
        """The number of requests without an answer."""
        return len(self._unanswered)

    @property
    def failure(self) -> ProtocolError | None:
        """The peer's protocol error, if there was one."""
        return self._reader.failure

    def feed(self, data: bytes) -> list[Call | ClientEvent]:
        """What `data` completes; see FrameReader.feed. Raises ProtocolError."""
        return self._reader.feed(data)

    def get_buffer(self) -> memoryview:
        """The buffer for the network's next bytes."""
        return self._reader.get_buffer()

    def buffer_updated(self, count: int) -> list[Call | ClientEvent]:
        """What the `count` bytes written there complete. Raises ProtocolError."""
        return self._reader.buffer_updated(count)

    def done(self) -> None:
        """The records of the requests so far are not used any more; see FrameReader."""
        self._reader.done()

    def answer(self, call: Call, response: Struct) -> Parts:
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

    def answer_versions(self, call: Call) -> Parts:
        """The answer to ApiVersions."""
        code = ErrorCode.NONE if call.is_version_known else ErrorCode.UNSUPPORTED_VERSION
        return self.answer(call, versions_answer(code))

    def event(self, call: Call, event: Struct) -> Parts:
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

    def refuse(self, call: Call, code: ErrorCode) -> Parts:
        """An answer with an error code and nothing else."""
        return self.answer(call, refusal(call.api_key, code))

    def _open(self, prefix: Prefix, header: bytes) -> OpenedFrame[Call | ClientEvent]:
        if prefix.kind == FrameKind.EVENT:
            if prefix.api_key not in EVENTS_OF_CLIENTS:
                raise ProtocolError(f"{prefix.place}: no event of a client")
        elif prefix.kind != FrameKind.REQUEST:
            raise ProtocolError(f"{prefix.place}: a client does not answer")
        elif prefix.correlation_id in self._unanswered or prefix.correlation_id in self._streams:
            raise ProtocolError(f"correlation id {prefix.correlation_id} is in use")
        elif len(self._unanswered) >= self._calls_max:
            raise ProtocolError(f"{self._calls_max} requests are unanswered (calls_max), and more come")
        is_future = prefix.version > VERSIONS[ApiKey.API_VERSIONS]
        if prefix.api_key == ApiKey.API_VERSIONS and is_future and prefix.body_bytes == 0:
            return OpenedFrame(0, lambda _body: self._take_future_versions(prefix.correlation_id))
        body_bytes, finish = open_frame(prefix, header)
        return OpenedFrame(body_bytes, lambda body: self._on_frame(finish(body)))

    def _on_frame(self, frame: Frame) -> Call | ClientEvent:
        if frame.kind is FrameKind.EVENT:
            return ClientEvent(frame.correlation_id, frame.message)
        self._unanswered.add(frame.correlation_id)
        return Call(frame.correlation_id, frame.api_key, frame.message)

    def _take_future_versions(self, correlation_id: int) -> Call:
        # Its fields are unknown here, and not needed for the answer (KIP-511).
        self._unanswered.add(correlation_id)
        return Call(correlation_id, ApiKey.API_VERSIONS, ApiVersionsRequest(), is_version_known=False)

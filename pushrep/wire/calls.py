"""The calls and their messages: to the parts of a frame and back.

    CALLS                                                       key: its request and response, or its event
    VERSIONS                                                    key: its version
    encode(message, correlation_id) -> [head, *record batches]  for sendmsg; FileSlices for sendfile
    open_frame(prefix, header) -> OpenedFrame(body_bytes, finish)    what FrameReader asks for

A key is never given a second meaning. Credit, ReplayData, ReplayEnd and DeleteDone are events, with keys of their own.

Each call is spoken in one version, which stands in every frame. The client sends ApiVersions first and compares
the answer with its own table (`refuse_other_versions`). A server that gets an unknown version of ApiVersions answers
in version 0 with UNSUPPORTED_VERSION and its table (Kafka's KIP-511); an unknown version of any other call closes the
connection. Whoever changes the fields of a message raises the version of its call.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, partial
from io import BytesIO
from types import MappingProxyType
from typing import Any, NamedTuple

from fastavro import parse_schema, schemaless_reader

from pushrep.errors import BadArgument
from pushrep.wire import push_messages as push
from pushrep.wire import replay_messages as replay
from pushrep.wire.codec import (
    BodyCursor,
    HeaderReader,
    Schema,
    Writer,
    parts_of,
    read_schemas,
    reader_of,
    writer_of,
)
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.frames import FrameKind, OpenedFrame, Prefix, ProtocolError, frame_head
from pushrep.wire.push_messages import ApiVersion, ApiVersionsResponse
from pushrep.wire.values import Part, Response, Struct, size_of


class ApiKey(IntEnum):
    """The numbers of the calls."""

    API_VERSIONS = 0
    DESCRIBE_LOG = 1
    APPEND_RECORDS = 2
    END_OFFSET_FOR_EPOCH = 3
    GRANT = 4
    FETCH_RECORDS = 5
    LIST_LOGS = 6
    BEAT = 7
    DESCRIBE_DAMAGE = 8
    REPAIR_RECORDS = 9
    DESCRIBE_NODE = 10
    START_REPLAY = 20
    ATTACH = 21
    CREDIT = 22
    REPLAY_DATA = 23
    REPLAY_END = 24
    STOP_REPLAY = 25
    DESCRIBE_RECORDINGS = 26
    EXTEND = 27
    TRUNCATE = 28
    PURGE = 29
    DELETE = 30
    DELETE_DONE = 31


VERSIONS: Mapping[ApiKey, int] = MappingProxyType(dict.fromkeys(ApiKey, 0))
"""The version of each call. An event has the version of its call."""


def _call(request: type[Struct], response: type[Struct]) -> Mapping[FrameKind, type[Struct]]:
    return {FrameKind.REQUEST: request, FrameKind.RESPONSE: response}


def _event(event: type[Struct]) -> Mapping[FrameKind, type[Struct]]:
    return {FrameKind.EVENT: event}


CALLS: Mapping[ApiKey, Mapping[FrameKind, type[Struct]]] = MappingProxyType(
    {
        ApiKey.API_VERSIONS: _call(push.ApiVersionsRequest, push.ApiVersionsResponse),
        ApiKey.DESCRIBE_LOG: _call(push.DescribeLogRequest, push.DescribeLogResponse),
        ApiKey.APPEND_RECORDS: _call(push.AppendRecordsRequest, push.AppendRecordsResponse),
        ApiKey.END_OFFSET_FOR_EPOCH: _call(push.EndOffsetForEpochRequest, push.EndOffsetForEpochResponse),
        ApiKey.GRANT: _call(push.GrantRequest, push.GrantResponse),
        ApiKey.FETCH_RECORDS: _call(push.FetchRecordsRequest, push.FetchRecordsResponse),
        ApiKey.LIST_LOGS: _call(push.ListLogsRequest, push.ListLogsResponse),
        ApiKey.BEAT: _call(push.BeatRequest, push.BeatResponse),
        ApiKey.DESCRIBE_DAMAGE: _call(push.DescribeDamageRequest, push.DescribeDamageResponse),
        ApiKey.REPAIR_RECORDS: _call(push.RepairRecordsRequest, push.RepairRecordsResponse),
        ApiKey.DESCRIBE_NODE: _call(push.DescribeNodeRequest, push.DescribeNodeResponse),
        ApiKey.START_REPLAY: _call(replay.StartReplayRequest, replay.StartReplayResponse),
        ApiKey.ATTACH: _call(replay.AttachRequest, replay.AttachResponse),
        ApiKey.CREDIT: _event(replay.Credit),
        ApiKey.REPLAY_DATA: _event(replay.ReplayData),
        ApiKey.REPLAY_END: _event(replay.ReplayEnd),
        ApiKey.STOP_REPLAY: _call(replay.StopReplayRequest, replay.StopReplayResponse),
        ApiKey.DESCRIBE_RECORDINGS: _call(replay.DescribeRecordingsRequest, replay.DescribeRecordingsResponse),
        ApiKey.EXTEND: _call(replay.ExtendRequest, replay.ExtendResponse),
        ApiKey.TRUNCATE: _call(replay.TruncateRequest, replay.TruncateResponse),
        ApiKey.PURGE: _call(replay.PurgeRequest, replay.PurgeResponse),
        ApiKey.DELETE: _call(replay.DeleteRequest, replay.DeleteResponse),
        ApiKey.DELETE_DONE: _event(replay.DeleteDone),
    }
)
"""Every key and its classes, by kind of frame."""
assert CALLS.keys() == set(ApiKey), "every key has its classes"

REQUESTS = frozenset(key for key, call in CALLS.items() if FrameKind.REQUEST in call)
"""The keys of what a client asks."""


def refusal(key: ApiKey, code: ErrorCode, why: str = "") -> Struct:
    """The answer to a refused call; `why` is left out if the answer has no field for it."""
    response = CALLS[key][FrameKind.RESPONSE]
    if issubclass(response, Response):
        return response(error_code=code, error_message=why)
    return response(error_code=code)  # type: ignore[call-arg]  # every response has one


CALL_OF_EVENT: Mapping[ApiKey, ApiKey] = MappingProxyType(
    {
        ApiKey.CREDIT: ApiKey.ATTACH,
        ApiKey.REPLAY_DATA: ApiKey.ATTACH,
        ApiKey.REPLAY_END: ApiKey.ATTACH,
        ApiKey.DELETE_DONE: ApiKey.DELETE,
    }
)
"""The call that an event belongs to: it follows its answer, under its correlation id."""
assert CALL_OF_EVENT.keys() == {key for key, call in CALLS.items() if FrameKind.EVENT in call}, (
    "every event has its call"
)

CALLS_WITH_EVENTS = frozenset(CALL_OF_EVENT.values())
"""Calls whose answer, if it has no error, may be followed by events."""

LAST_EVENTS = frozenset({ApiKey.REPLAY_END, ApiKey.DELETE_DONE})
"""After one of these no other event follows."""

EVENTS_OF_CLIENTS = frozenset({ApiKey.CREDIT})
"""The only events that a client sends."""

PLACE_OF: Mapping[type[Struct], tuple[ApiKey, FrameKind]] = MappingProxyType(
    {struct: (key, kind) for key, call in CALLS.items() for kind, struct in call.items()}
)
"""Where a class stands in the table."""


_BODY_BYTES_MAX = 1 << 30  # with the largest header the frame's size still fits


class Frame(NamedTuple):
    """A decoded frame: the call that it belongs to, and its message."""

    api_key: ApiKey
    kind: FrameKind
    correlation_id: int
    message: Struct


@dataclass(frozen=True, kw_only=True)
class MessageCodec:
    """How one message is written and read. Both are made at their first use, because most programs never send most
    messages.
    """

    api_key: ApiKey
    kind: FrameKind
    struct: Any
    schema: Schema

    @cached_property
    def write(self) -> Writer:
        """The header of a message."""
        return writer_of(self.schema, self.struct)

    @cached_property
    def parts(self) -> Callable[[Any], Sequence[Part]] | None:
        """The pieces of its record batches."""
        return parts_of(self.struct)

    @cached_property
    def reader(self) -> HeaderReader:
        """What fastavro read, as a message."""
        return reader_of(self.struct)


_SCHEMAS = read_schemas()
_CODECS: Mapping[tuple[int, int], MessageCodec] = {
    (key, kind): MessageCodec(api_key=key, kind=kind, struct=struct, schema=parse_schema(_SCHEMAS[struct.__name__]))
    for struct, (key, kind) in PLACE_OF.items()
}


def encode(message: Struct, correlation_id: int) -> list[Part]:
    """A frame in parts, with the batches unchanged. Raises BadArgument for a message that can't be sent."""
    place = PLACE_OF[type(message)]
    codec = _CODECS[place]
    try:
        header = codec.write(message)
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise BadArgument(type(message).__name__, f"a value does not fit its schema: {error}") from error
    parts = codec.parts(message) if codec.parts is not None else ()
    body_bytes = size_of(parts)
    if body_bytes >= _BODY_BYTES_MAX:
        raise BadArgument(type(message).__name__, f"{body_bytes} bytes of records exceed a frame")
    return [frame_head(place, VERSIONS[place[0]], correlation_id, header, body_bytes), *parts]


def open_frame(prefix: Prefix, header: bytes) -> OpenedFrame[Frame]:
    """Decode a header; its batches may follow later. Raises ProtocolError."""
    codec = _CODECS.get((prefix.api_key, prefix.kind))
    if codec is None or prefix.version != VERSIONS[codec.api_key]:
        raise ProtocolError(f"{prefix.place}: {_why_unknown(prefix)}")
    source = BytesIO(header)
    try:
        datum: Any = schemaless_reader(source, codec.schema, None)
        body_bytes = codec.reader.body_bytes(datum) if codec.reader.body_bytes is not None else 0
    except Exception as error:  # another library's decoder on hostile bytes may raise anything
        raise ProtocolError(f"{codec.struct.__name__}: {type(error).__name__}: {str(error)[:200]}") from error
    if source.tell() != len(header):
        raise ProtocolError(f"{codec.struct.__name__}: {len(header) - source.tell()} bytes follow its last field")
    if body_bytes != prefix.body_bytes:
        raise ProtocolError(
            f"{codec.struct.__name__}: {body_bytes} bytes of records, the frame has {prefix.body_bytes}"
        )
    return OpenedFrame(body_bytes, partial(_finish, prefix.correlation_id, codec, datum))


def _why_unknown(prefix: Prefix) -> str:
    if prefix.api_key not in ApiKey._value2member_map_:
        return "no such call"
    key = ApiKey(prefix.api_key)
    if (key, prefix.kind) not in _CODECS:
        return f"{key.name} has no frames of that kind"
    return f"{key.name} is spoken in version {VERSIONS[key]}"


def _finish(correlation_id: int, codec: MessageCodec, datum: Any, body: memoryview) -> Frame:
    try:
        message = codec.reader.message(datum, BodyCursor(body))
    except ValueError as error:  # BadArgument, BadGrant, or no member of an enum
        raise ProtocolError(f"{codec.struct.__name__}: {error}") from error
    return Frame(codec.api_key, codec.kind, correlation_id, message)


def versions_answer(error_code: ErrorCode = ErrorCode.NONE) -> ApiVersionsResponse:
    """A server's answer to ApiVersions."""
    return ApiVersionsResponse(
        error_code=error_code,
        api_versions=tuple(ApiVersion(api_key=key, min_version=one, max_version=one) for key, one in VERSIONS.items()),
    )


def refuse_other_versions(theirs: ApiVersionsResponse) -> None:
    """Raises ProtocolError, by name, for a call that the server does not speak in our version."""
    ranges = {one.api_key: (one.min_version, one.max_version) for one in theirs.api_versions}
    for key, version in VERSIONS.items():
        oldest, newest = ranges.get(key, (0, -1))
        if not oldest <= version <= newest:
            spoken = f"versions {oldest} to {newest}" if key in ranges else "no version"
            raise ProtocolError(
                f"{key.name}: we speak version {version}, the peer {spoken}: install the same pushrep on both sides"
            )

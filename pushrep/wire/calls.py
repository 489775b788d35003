"""The calls, and every message in every version: to the parts of a frame and back.

    CALLS                                                                    key: its request and response, or its event
    encode(message, version, correlation_id) -> [head, *record batches]      for sendmsg; FileSlices for sendfile
    open(prefix, header) -> OpenedFrame(body_bytes, finish)                  what FrameReader asks for
    versions_answer, AgreedVersions                                          which version of each call both sides speak

A key is never given a second meaning. Credit, ReplayData, ReplayEnd and DeleteDone are events, with keys of their own.

A message is written by the schema of the version that is sent. When one is read, fastavro resolves an older version
into the newest schema, so that callers have one class per message. Record batches are passed through.

The client sends ApiVersions in its newest version. A server that does not know that version answers in version 0 with
UNSUPPORTED_VERSION and its own versions; the client asks again in a common one (Kafka's KIP-511).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from io import BytesIO
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import UUID

from fastavro import parse_schema, schemaless_reader

from pushrep.errors import BadArgument
from pushrep.wire import push_messages as push
from pushrep.wire import replay_messages as replay
from pushrep.wire.codec import (
    BodyCursor,
    HeaderReader,
    Schema,
    Versions,
    Writer,
    check_schemas,
    missing_fields,
    parts_of,
    read_schemas,
    reader_of,
    released_schemas,
    writer_of,
)
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.errors import MalformedMessage, NoCommonVersion, NotInVersion, SchemaMismatch, UnknownCall
from pushrep.wire.frames import FrameKind, OpenedFrame, Prefix, frame_head
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
"""The call that an event belongs to: it follows its answer, under its correlation id and in its version."""
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


class VersionRange(NamedTuple):
    """Both ends are in."""

    oldest: int
    newest: int


class Frame(NamedTuple):
    """A decoded frame: the call that it belongs to, and its message."""

    api_key: ApiKey
    version: int
    kind: FrameKind
    correlation_id: int
    message: Struct


class LostField(NamedTuple):
    """A field that an older version lacks, and its default, which may be left out."""

    path: tuple[str, ...]
    default: Any


@dataclass(frozen=True, kw_only=True)
class Spoken:
    """One message in one version. newest: the schema to read into, None if it is the version's own. Writers and readers
    are made at their first use, because most programs never send most messages.
    """

    api_key: ApiKey
    kind: FrameKind
    struct: Any
    schema: Schema
    newest: Schema | None
    lost_fields: tuple[LostField, ...]

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


class Vocabulary:
    """All messages in all versions of `schemas`, by class name. Raises SchemaMismatch if classes and files disagree."""

    def __init__(self, schemas: Mapping[str, Versions]) -> None:
        self._spoken: dict[tuple[int, int, int], Spoken] = {}
        self.versions: Mapping[ApiKey, VersionRange] = {key: self._learn(key, schemas) for key in ApiKey}
        if unknown := schemas.keys() - {struct.__name__ for struct in PLACE_OF}:
            raise SchemaMismatch(f"schemas of no message: {sorted(unknown)}")
        for event, call in CALL_OF_EVENT.items():
            if self.versions[event] != self.versions[call]:
                raise SchemaMismatch(f"{event.name} has other versions than {call.name}, whose events it is one of")

    def _learn(self, key: ApiKey, schemas: Mapping[str, Versions]) -> VersionRange:
        ranges = set()
        for kind, struct in CALLS[key].items():
            versions = schemas.get(struct.__name__)
            if not versions:
                raise SchemaMismatch(f"no schema of {struct.__name__}")
            check_schemas(struct, versions)
            newest = max(versions)
            newest_schema = parse_schema(versions[newest])
            for version, schema in versions.items():
                self._spoken[key, kind, version] = Spoken(
                    api_key=key,
                    kind=kind,
                    struct=struct,
                    schema=newest_schema if version == newest else parse_schema(schema),
                    newest=None if version == newest else newest_schema,
                    lost_fields=tuple(_lost_fields(versions[newest], schema)),
                )
            ranges.add(VersionRange(min(versions), newest))
        if len(ranges) != 1:
            raise SchemaMismatch(
                f"{key.name}: request and response have other versions than each other: {sorted(ranges)}"
            )
        return ranges.pop()

    def encode(self, message: Struct, version: int, correlation_id: int) -> list[Part]:
        """A frame in parts, with the batches unchanged. Raises NotInVersion; BadArgument for a message that can't be
        sent.
        """
        place = PLACE_OF[type(message)]
        spoken = self._spoken.get((*place, version))
        if spoken is None:
            raise BadArgument("version", f"{version} of {place[0].name} is not spoken here")
        if spoken.lost_fields:
            _refuse_lost_fields(spoken, version, message)
        try:
            header = spoken.write(message)
        except (TypeError, ValueError, AttributeError, IndexError) as error:
            raise BadArgument(type(message).__name__, f"a value does not fit its schema: {error}") from error
        parts = spoken.parts(message) if spoken.parts is not None else ()
        body_bytes = size_of(parts)
        if body_bytes >= _BODY_BYTES_MAX:
            raise BadArgument(type(message).__name__, f"{body_bytes} bytes of records exceed a frame")
        return [frame_head(place, version, correlation_id, header, body_bytes), *parts]

    def open(self, prefix: Prefix, header: bytes) -> OpenedFrame[Frame]:
        """Decode a header; its batches may follow later. Raises UnknownCall, MalformedMessage."""
        spoken = self._spoken.get((prefix.api_key, prefix.kind, prefix.version))
        if spoken is None:
            raise self._unknown(prefix)
        source = BytesIO(header)
        try:
            datum: Any = schemaless_reader(source, spoken.schema, spoken.newest)
            body_bytes = spoken.reader.body_bytes(datum) if spoken.reader.body_bytes is not None else 0
        except Exception as error:  # another library's decoder on hostile bytes may raise anything
            raise MalformedMessage(spoken.struct.__name__, f"{type(error).__name__}: {str(error)[:200]}") from error
        if source.tell() != len(header):
            raise MalformedMessage(spoken.struct.__name__, f"{len(header) - source.tell()} bytes follow its last field")
        if body_bytes != prefix.body_bytes:
            why = f"it speaks of {body_bytes} bytes of records, the frame has {prefix.body_bytes}"
            raise MalformedMessage(spoken.struct.__name__, why)
        return OpenedFrame(body_bytes, _finisher(prefix, spoken, datum))

    def _unknown(self, prefix: Prefix) -> UnknownCall:
        key, version, kind = prefix.api_key, prefix.version, prefix.kind
        if key not in ApiKey._value2member_map_:
            return UnknownCall(key, version, kind, "no such call")
        spoken = self.versions[ApiKey(key)]
        if (key, kind, spoken.newest) not in self._spoken:
            return UnknownCall(key, version, kind, f"{ApiKey(key).name} has no frames of that kind")
        return UnknownCall(key, version, kind, f"versions {spoken.oldest} to {spoken.newest} are spoken")


def _finisher(prefix: Prefix, spoken: Spoken, datum: Any) -> Callable[[memoryview], Frame]:
    def finish(body: memoryview) -> Frame:
        try:
            message = spoken.reader.message(datum, BodyCursor(body))
        except ValueError as error:  # BadArgument, or no member of an enum
            raise MalformedMessage(spoken.struct.__name__, str(error)) from error
        return Frame(spoken.api_key, prefix.version, spoken.kind, prefix.correlation_id, message)

    return finish


def _lost_fields(newest: Schema, schema: Schema) -> Iterator[LostField]:
    for path, field in missing_fields(newest, schema):
        if not field.get("ignorable", False):
            yield LostField(path, _value_of_default(field["type"], field["default"]))


def _value_of_default(schema: Schema, default: Any) -> Any:
    """A schema's default as a message has it: JSON has no bytes."""
    if isinstance(default, str) and schema != "string":
        return UUID(bytes=default.encode("latin-1"))
    return default


def _refuse_lost_fields(spoken: Spoken, version: int, message: Struct) -> None:
    for path, default in spoken.lost_fields:
        if any(value not in {default, None} for value in _at(message, path)):
            raise NotInVersion(spoken.struct.__name__, version, ".".join(path))


def _at(value: Any, path: tuple[str, ...]) -> Iterator[Any]:
    """Every value at a path, through arrays."""
    if isinstance(value, tuple) and path:
        for item in value:
            yield from _at(item, path)
    elif path:
        yield from _at(getattr(value, path[0]), path[1:])
    else:
        yield value


def versions_answer(vocabulary: Vocabulary, error_code: ErrorCode = ErrorCode.NONE) -> ApiVersionsResponse:
    """A server's answer to ApiVersions."""
    spoken = (
        ApiVersion(api_key=key, min_version=versions.oldest, max_version=versions.newest)
        for key, versions in vocabulary.versions.items()
    )
    return ApiVersionsResponse(error_code=error_code, api_versions=tuple(spoken))


class AgreedVersions:
    """The newest common version of each call."""

    def __init__(self, ours: Mapping[ApiKey, VersionRange], theirs: ApiVersionsResponse) -> None:
        self._ours = ours
        self._theirs = {
            entry.api_key: VersionRange(entry.min_version, entry.max_version) for entry in theirs.api_versions
        }

    def version_of(self, key: ApiKey) -> int:
        """Raises NoCommonVersion if there is none: the peer is too old, too new, or does not know the call."""
        ours, theirs = self._ours[key], self._theirs.get(key)
        if theirs is None or max(ours.oldest, theirs.oldest) > min(ours.newest, theirs.newest):
            raise NoCommonVersion(key.name, ours, theirs)
        return min(ours.newest, theirs.newest)

    def speaks(self, key: ApiKey) -> bool:
        """Whether there is one."""
        try:
            self.version_of(key)
        except NoCommonVersion:
            return False
        return True


VOCABULARY = Vocabulary(read_schemas(released_schemas()))
"""What this version of pushrep speaks: checked when this module is loaded."""

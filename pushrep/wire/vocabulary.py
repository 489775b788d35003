"""Every message in every version: to the parts of a frame, and from a frame's header to a message.

    encode(message, version, correlation_id) -> [head, *record batches]      for sendmsg; FileSlices for sendfile
    open(prefix, header) -> OpenedFrame(body_bytes, finish)                  what FrameReader asks for

A version's own schema writes; when reading, fastavro resolves what an older version wrote into the newest schema, so
that callers know one class per message. The batches are not touched in either direction.
"""

from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from typing import Any, NamedTuple

from fastavro import parse_schema, schemaless_reader, schemaless_writer

from pushrep.errors import BadArgument
from pushrep.wire.calls import CALL_OF_EVENT, CALLS, PLACE_OF, ApiKey
from pushrep.wire.errors import MalformedMessage, NotInVersion, SchemaMismatch, UnknownCall
from pushrep.wire.fast_path import FAST_SERIALIZERS
from pushrep.wire.fast_path_writers import FAST_WRITERS, HeaderWriter
from pushrep.wire.frames import FrameKind, OpenedFrame, Prefix, frame_head
from pushrep.wire.schema_files import (
    Schema,
    Versions,
    check_schemas,
    missing_fields,
    read_schemas,
    released_schemas,
)
from pushrep.wire.structs import Bodies, BodyCursor, StructSerializer, serializer_of
from pushrep.wire.values import Part, Struct, size_of

_BODY_BYTES_MAX = 1 << 30  # with the largest header it is still a size


class VersionRange(NamedTuple):
    """Both ends are in."""

    oldest: int
    newest: int


class Frame(NamedTuple):
    """A decoded frame: who it belongs to and what it says."""

    api_key: ApiKey
    version: int
    kind: FrameKind
    correlation_id: int
    message: Struct


class Loss(NamedTuple):
    """A field that an older version has no place for, and the value at which nothing is lost."""

    path: tuple[str, ...]
    default: Any


class Spoken(NamedTuple):
    """One message in one version. `reader`: the newest schema, None where it is the writer's own."""

    api_key: ApiKey
    kind: FrameKind
    struct: type[Struct]
    writer: Schema
    reader: Schema | None
    serializer: StructSerializer
    losses: tuple[Loss, ...]
    write: HeaderWriter | None = None


class Vocabulary:
    """Speaks every version of `schemas`, by class name. Raises SchemaMismatch if classes and files disagree."""

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
            serializer = FAST_SERIALIZERS[struct] if struct in FAST_SERIALIZERS else _table_serializer(struct)
            reader = parse_schema(versions[newest])
            for version, schema in versions.items():
                is_newest = version == newest
                writer = reader if is_newest else parse_schema(schema)
                losses = tuple(_losses(versions[newest], schema))
                self._spoken[key, kind, version] = Spoken(
                    key,
                    kind,
                    struct,
                    writer,
                    None if is_newest else reader,
                    serializer,
                    losses,
                    FAST_WRITERS.get(struct) if is_newest else None,
                )
            ranges.add(VersionRange(min(versions), newest))
        if len(ranges) != 1:
            raise SchemaMismatch(
                f"{key.name}: request and response have other versions than each other: {sorted(ranges)}"
            )
        return ranges.pop()

    def encode(self, message: Struct, version: int, correlation_id: int) -> list[Part]:
        """A frame in parts, the batches as they were given. Raises NotInVersion; BadArgument for what can't be sent."""
        place = PLACE_OF[type(message)]
        spoken = self._spoken.get((*place, version))
        if spoken is None:
            raise BadArgument("version", f"{version} of {place[0].name} is not spoken here")
        bodies: Bodies = []
        header = spoken.write(message, bodies) if spoken.write is not None else None
        if header is None:
            header = _written(spoken, version, message, bodies)
        parts = [part for records in bodies for part in records]
        body_bytes = size_of(parts)
        if body_bytes >= _BODY_BYTES_MAX:
            raise BadArgument(type(message).__name__, f"{body_bytes} bytes of records exceed a frame")
        return [frame_head(place, version, correlation_id, header, body_bytes), *parts]

    def open(self, prefix: Prefix, header: bytes) -> OpenedFrame[Frame]:
        """Decode a header; the batches may come later. Raises UnknownCall, MalformedMessage."""
        spoken = self._spoken.get((prefix.api_key, prefix.kind, prefix.version))
        if spoken is None:
            raise self._unknown(prefix)
        source = BytesIO(header)
        try:
            datum: Any = schemaless_reader(source, spoken.writer, spoken.reader)
            body_bytes = spoken.serializer.body_bytes(datum)
        except Exception as error:  # a foreign decoder on hostile bytes: whatever it raises, they are bad
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


def _written(spoken: Spoken, version: int, message: Struct, bodies: Bodies) -> bytes:
    """A header by fastavro."""
    bodies.clear()
    datum = spoken.serializer.to_datum(message, bodies)
    if spoken.losses:
        _refuse_loss(spoken, version, datum)
    target = BytesIO()
    try:
        schemaless_writer(target, spoken.writer, datum)
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise BadArgument(type(message).__name__, f"a value does not fit its schema: {error}") from error
    return target.getvalue()


def _table_serializer(struct: Any) -> StructSerializer:
    return serializer_of(struct)


def _finisher(prefix: Prefix, spoken: Spoken, datum: Any) -> Callable[[memoryview], Frame]:
    def finish(body: memoryview) -> Frame:
        try:
            message = spoken.serializer.from_datum(datum, BodyCursor(body))
        except BadArgument as error:
            raise MalformedMessage(spoken.struct.__name__, str(error)) from error
        return Frame(spoken.api_key, prefix.version, spoken.kind, prefix.correlation_id, message)

    return finish


def _losses(newest: Schema, schema: Schema) -> Iterator[Loss]:
    for path, field in missing_fields(newest, schema):
        if not field.get("ignorable", False):
            default = field["default"]
            is_fixed = isinstance(default, str) and field["type"] != "string"  # JSON has no bytes
            yield Loss(path, default.encode("latin-1") if is_fixed else default)


def _refuse_loss(spoken: Spoken, version: int, datum: Any) -> None:
    for path, default in spoken.losses:
        if any(value != default for value in _at(datum, path)):
            raise NotInVersion(spoken.struct.__name__, version, ".".join(path))


def _at(datum: Any, path: tuple[str, ...]) -> Iterator[Any]:
    """Every value at a path, through arrays."""
    if isinstance(datum, list):
        for item in datum:
            yield from _at(item, path)
    elif path:
        yield from _at(datum[path[0]], path[1:])
    else:
        yield datum


VOCABULARY = Vocabulary(read_schemas(released_schemas()))
"""What this version of pushrep speaks: checked when this module is loaded."""

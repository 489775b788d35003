"""A message's header in Avro, derived from its class and schema: fields are listed nowhere else.

    writer_of(schema, struct)(message) -> bytes
    parts_of(struct)(message) -> [Part, ...]       the record batches, in the schema's order, which is the wire's
    reader_of(struct).message(datum, body)         datum: what fastavro read; it is used up

Avro writes a record as its fields one after another, a number as a zigzag varint (as Kafka does), a string as its
length and its bytes, an array as a count, the items and a zero, a fixed as its bytes. fastavro would take twice as long
to write, because it needs a dictionary of each message (docs/internals/benchmark-notes.md); tests compare our bytes
with its. fastavro reads.

The schemas are files, `schemas/<class>.avsc`, one for each message. Each describes its class exactly, which a test
checks (tests/unit/test_wire_schemas.py).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import cache, lru_cache
from importlib.resources import files
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias, get_args, get_origin
from uuid import UUID

from pushrep.records.varint import VARINTS
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.values import Column, Part, Records, Struct, columns_of, optional_of, size_of

Schema: TypeAlias = Any  # Avro's JSON: a name, or an object

RECORDS_FIELD = "records"
RECORDS_SIZE_FIELD = "records_bytes"
"""The field of the header in place of the class's records: their size."""


def read_schemas() -> dict[str, Schema]:
    """{class name: schema} of every message."""
    folder = files("pushrep.wire") / "schemas"
    return {file.name.removesuffix(".avsc"): json.loads(file.read_text(encoding="utf-8")) for file in folder.iterdir()}


Writer: TypeAlias = Callable[[Any], bytes]
Datum: TypeAlias = dict[str, Any]

_PARTITIONS_REMEMBERED = 1 << 14
_END = b"\x00"  # of an array
_FLAGS = (b"\x00", b"\x01")
_NO_UUID = UUID(int=0)


def writer_of(schema: Schema, struct: type[Any]) -> Writer:
    """Messages of `struct` as bytes of `schema`. It raises TypeError, ValueError, AttributeError or IndexError for what
    does not fit.
    """
    return _compiled(schema, struct, {})


def _compiled(schema: Schema, hint: Any, named: dict[str, Schema]) -> Writer:
    """The fields written out, as in the methods that dataclasses make: a loop over them takes twice as long."""
    scope: dict[str, Any] = {"varints": VARINTS, "flags": _FLAGS, "string": _string_bytes, "join": b"".join}
    scope |= {"no_uuid": _NO_UUID, "records_size": lambda records: VARINTS[size_of(records)] if records else VARINTS[0]}
    named[schema["name"]] = schema
    known = columns_of(hint)
    columns = []
    for field in schema["fields"]:
        if field["name"] == RECORDS_SIZE_FIELD:
            columns.append(f"records_size(value.{RECORDS_FIELD})")
        else:
            column = known[field["name"]]
            columns.append(_expression(field["type"], _value_of(column, scope), column.hint, scope, named))
    write: Writer = eval(f"lambda value: join(({''.join(f'{one}, ' for one in columns)}))", scope)  # noqa: S307 - names of our own fields
    # A partition stands in every request.
    return lru_cache(_PARTITIONS_REMEMBERED)(write) if hint is TopicIdPartition else write


def _value_of(column: Column, scope: dict[str, Any]) -> str:
    """The expression of a column's value."""
    if column.part is None:
        return f"value.{column.field}"
    said = {name: "" if one.hint is str else -1 for name, one in columns_of(column.part).items()}
    scope[f"no_{column.field}"] = SimpleNamespace(**said)
    return f"(value.{column.field} or no_{column.field}).{column.inner}"


def _expression(schema: Schema, value: str, hint: Any, scope: dict[str, Any], named: dict[str, Schema]) -> str:
    schema = _named(schema, named)
    match schema["type"] if isinstance(schema, dict) else schema:
        case "int" | "long":
            return f"varints[{value}]"
        case "boolean":
            return f"flags[{value}]"
        case "string":
            return f"string({value})"
        case "fixed":
            named[schema["name"]] = schema
            return f"{value}.bytes" if hint is UUID else f"({value} or no_uuid).bytes"
        case "array":
            one = _compiled(_named(schema["items"], named), get_args(hint)[0], named)
            write = lambda items: b"".join((VARINTS[len(items)], *map(one, items), _END)) if items else _END  # noqa: E731 - as those that are made of text
        case _:
            write = _compiled(schema, hint, named)
    scope[writer := f"write_{len(scope)}"] = write
    return f"{writer}({value})"


def _named(schema: Schema, named: Mapping[str, Schema]) -> Schema:
    return named.get(schema, schema) if isinstance(schema, str) else schema


def _string_bytes(text: str) -> bytes:
    data = text.encode()
    return VARINTS[len(data)] + data


def parts_of(struct: type[Any]) -> Callable[[Any], Sequence[Part]] | None:
    """Gathers the pieces of a message's record batches; None for a class that has none."""
    for name, column in columns_of(struct).items():
        if name == RECORDS_FIELD:
            return attrgetter(name)
        item = get_args(column.hint)[0] if get_origin(column.hint) is tuple else None
        parts = parts_of(item) if isinstance(item, type) and issubclass(item, Struct) else None
        if parts is not None:
            return lambda message: [part for one in getattr(message, name) for part in parts(one)]
    return None


class BodyCursor:
    """The record bytes of one frame, handed out from the front."""

    __slots__ = ("_at", "_view")

    def __init__(self, view: memoryview) -> None:
        self._view, self._at = view, 0

    def read(self, size_bytes: int) -> Records:
        """The next bytes, in one piece; no piece for none."""
        if size_bytes == 0:
            return ()
        self._at += size_bytes
        return (self._view[self._at - size_bytes : self._at],)


class HeaderReader(NamedTuple):
    """How a class, or a field, is made. `body_bytes(datum)`: how many bytes its records take, before they come."""

    message: Callable[[Any, BodyCursor], Any]
    body_bytes: Callable[[Any], int] | None = None


@cache
def reader_of(struct: type[Any]) -> HeaderReader:
    """The reader of a class, made of its fields. `message` raises ValueError for a value out of its range."""
    if struct is TopicIdPartition:
        return HeaderReader(lambda datum, _body: _partition_of(datum["topic_id"], datum["topic"], datum["partition"]))
    scope: dict[str, Any] = {"struct": struct}
    columns: list[str] = []
    spread: dict[tuple[str, type[Any]], dict[str, str]] = {}
    body_bytes: Callable[[Datum], int] | None = None
    for name, column in columns_of(struct).items():
        if column.part is not None:
            spread.setdefault((column.field, column.part), {})[column.inner] = name
        elif name == RECORDS_FIELD:
            columns.append(f"{name}=body.read(datum['{RECORDS_SIZE_FIELD}'])")
            body_bytes = _records_bytes
        elif (reader := _field_reader(column.hint)) is None:
            columns.append(f"{name}=datum['{name}']")
        else:
            columns.append(f"{name}=read_{name}(datum['{name}'], body)")
            scope[f"read_{name}"] = reader.message
            if reader.body_bytes is not None:
                body_bytes = _body_bytes_of(name, reader.body_bytes)
    for (field, part), names in spread.items():
        columns.append(f"{field}=read_{field}(datum)")
        scope[f"read_{field}"] = _part_reader(part, names)
    return HeaderReader(eval(f"lambda datum, body: struct({', '.join(columns)})", scope), body_bytes)  # noqa: S307 - as above


def _part_reader(part: type[Any], names: Mapping[str, str]) -> Callable[[Datum], Any]:
    first = next(iter(names.values()))
    return lambda datum: None if datum[first] == -1 else part(**{inner: datum[name] for inner, name in names.items()})


def _body_bytes_of(name: str, size: Callable[[Any], int]) -> Callable[[Datum], int]:
    return lambda datum: size(datum[name])


def _field_reader(hint: Any) -> HeaderReader | None:
    """How a field is made of fastavro's value; None if it is that value."""
    if get_origin(hint) is tuple:
        return _array_reader(_field_reader(get_args(hint)[0]) or HeaderReader(lambda datum, _body: datum))
    if hint is UUID:
        return HeaderReader(_uuid_of)
    if optional_of(hint) is UUID:
        return HeaderReader(lambda datum, body: found if (found := _uuid_of(datum, body)).int else None)
    if issubclass(hint, IntEnum):
        members = {int(member): member for member in hint}
        return HeaderReader(lambda number, _body: members[number] if number in members else hint(number))
    return reader_of(hint) if issubclass(hint, Struct | TopicIdPartition) else None


def _array_reader(item: HeaderReader) -> HeaderReader:
    read, size = item.message, item.body_bytes

    def message(datum: Any, body: BodyCursor) -> Any:
        return tuple([read(entry, body) for entry in datum])

    return HeaderReader(message, None if size is None else lambda datum: sum(map(size, datum)))


@lru_cache(_PARTITIONS_REMEMBERED)
def _partition_of(topic_id: bytes, topic: str, partition: int) -> TopicIdPartition:
    """A partition, cached, because it is in every request. Raises BadArgument."""
    return TopicIdPartition(UUID(bytes=topic_id), topic, partition)


def _uuid_of(datum: Any, _body: BodyCursor) -> UUID:
    return UUID(bytes=datum)


def _records_bytes(datum: Datum) -> int:
    size_bytes: int = datum[RECORDS_SIZE_FIELD]
    if size_bytes < 0:
        raise ValueError(f"{RECORDS_SIZE_FIELD} is {size_bytes}")
    return size_bytes

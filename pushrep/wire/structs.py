"""Classes to the dictionaries that fastavro writes, and back. The record batches are gathered beside them.

    to_datum(message, bodies)     bodies: every `records` in the schema's order, which is the order on the wire
    from_datum(datum, body)       body: a cursor over the bytes behind the header

One converter a field, made once from the class's type hints. The two messages of the hot path have serializers of their
own (fast_path.py), which the tests hold against these.
"""

from collections.abc import Callable
from dataclasses import fields
from enum import IntEnum
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeAlias, get_args, get_origin, get_type_hints
from uuid import UUID

from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.schema_files import RECORDS_FIELD, RECORDS_SIZE_FIELD
from pushrep.wire.values import Records, Struct, size_of

Datum: TypeAlias = dict[str, Any]
Bodies: TypeAlias = list[Records]

_PARTITIONS_REMEMBERED = 1 << 14


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


class StructSerializer(NamedTuple):
    """How a class travels. `body_bytes(datum)`: what its records and those of its parts need, before they are there."""

    to_datum: Callable[[Any, Bodies], Any]
    from_datum: Callable[[Any, BodyCursor], Any]
    body_bytes: Callable[[Any], int]


def no_body(_datum: Any) -> int:
    """Of what has no records."""
    return 0


@lru_cache(_PARTITIONS_REMEMBERED)
def partition_of(topic_id: bytes, topic: str, partition: int) -> TopicIdPartition:
    """The same object for the same partition: it stands in every request. Raises BadArgument."""
    return TopicIdPartition(UUID(bytes=topic_id), topic, partition)


def partition_datum(tp: TopicIdPartition) -> Datum:
    """A partition as fastavro writes it."""
    return {"topic_id": tp.topic_id.bytes, "topic": tp.topic, "partition": tp.partition}


_PARTITION_SERIALIZER = StructSerializer(
    lambda tp, _bodies: partition_datum(tp),
    lambda datum, _body: partition_of(datum["topic_id"], datum["topic"], datum["partition"]),
    no_body,
)


@cache
def serializer_of(struct: type[Any]) -> StructSerializer:
    """The serializer of a class, made of its fields."""
    if struct is TopicIdPartition:
        return _PARTITION_SERIALIZER
    hints = get_type_hints(struct)
    steps = [(field.name, _field_serializer(field.name, hints[field.name])) for field in fields(struct)]
    steps_of_names = [
        (name, RECORDS_SIZE_FIELD if name == RECORDS_FIELD else name, serializer) for name, serializer in steps
    ]
    sized = [
        (avro, serializer.body_bytes) for _, avro, serializer in steps_of_names if serializer.body_bytes is not no_body
    ]

    def to_datum(value: Struct, bodies: Bodies) -> Datum:
        return {avro: serializer.to_datum(getattr(value, name), bodies) for name, avro, serializer in steps_of_names}

    def from_datum(datum: Datum, body: BodyCursor) -> Any:
        return struct(**{name: serializer.from_datum(datum[avro], body) for name, avro, serializer in steps_of_names})

    def body_bytes(datum: Datum) -> int:
        return sum(size(datum[avro]) for avro, size in sized)

    return StructSerializer(to_datum, from_datum, body_bytes if sized else no_body)


def _field_serializer(name: str, hint: Any) -> StructSerializer:
    if name == RECORDS_FIELD:
        return _RECORDS_SERIALIZER
    if get_origin(hint) is tuple:
        return _array_serializer(_field_serializer("", get_args(hint)[0]))
    if hint is UUID:
        return _UUID_SERIALIZER
    if issubclass(hint, IntEnum):
        return StructSerializer(_int_to_datum, lambda number, _body: hint(number), no_body)
    if issubclass(hint, Struct | TopicIdPartition):
        return serializer_of(hint)
    return _PLAIN_SERIALIZER


def _array_serializer(item: StructSerializer) -> StructSerializer:
    def body_bytes(datum: Any) -> int:
        return sum(map(item.body_bytes, datum))

    return StructSerializer(
        lambda values, bodies: [item.to_datum(value, bodies) for value in values],
        lambda datum, body: tuple(item.from_datum(entry, body) for entry in datum),
        no_body if item.body_bytes is no_body else body_bytes,
    )


def _records_to_datum(records: Records, bodies: Bodies) -> Any:
    bodies.append(records)
    return size_of(records)


def _int_to_datum(value: Any, _bodies: Bodies) -> Any:
    return int(value)


def _records_bytes(size_bytes: Any) -> int:
    if size_bytes < 0:
        raise ValueError(f"{RECORDS_SIZE_FIELD} is {size_bytes}")
    return int(size_bytes)


_RECORDS_SERIALIZER = StructSerializer(_records_to_datum, lambda size, body: body.read(size), _records_bytes)


def _uuid_of(datum: Any, _body: BodyCursor) -> UUID:
    # A schema's default of a fixed field is text, a code point a byte, and fastavro hands it on as it stands there.
    return UUID(bytes=datum.encode("latin-1") if isinstance(datum, str) else datum)


_UUID_SERIALIZER = StructSerializer(lambda value, _bodies: value.bytes, _uuid_of, no_body)
_PLAIN_SERIALIZER = StructSerializer(lambda value, _bodies: value, lambda datum, _body: datum, no_body)

"""What services have as events → the bytes of a record, and its partition: for an outbox and for a table of rows.

    to_json
    bytes                            themselves
    pydantic's models                their model_dump_json()
    msgspec's structs                msgspec.json.encode
    dataclasses, dicts, lists, text  JSON; times as ISO 8601, Decimal and UUID as text, an Enum as its value

Neither pydantic nor msgspec is imported here: an event of theirs brings its module along.

A Serializer is what stands between a `serializer=` and the records. A registry's schema is asked for when it is warmed,
in the thread that opens; the first value of each type is not serialized in an event loop.
"""

import datetime as dt
import decimal
import enum
import itertools
import json
import logging
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Annotated, Any, Literal

from filtering.murmur import default_partition
from filtering.serializers import ask_registry, asks_registry, is_asynchronous, with_context, writes_headers
from pushrep.errors import BadArgument, PushrepError
from pushrep.settings import OneOf, whole_number

_LOG = logging.getLogger("pushrep.outbox")

MakesBytes = Callable[[Any], bytes | None]
"""A serializer."""
PartitionBy = Annotated[str | Callable[[Any], int] | None, OneOf(("key",))]


def to_json(event: Any) -> bytes:
    """The event's bytes. Raises TypeError for what has none."""
    if isinstance(event, bytes | bytearray | memoryview):
        return bytes(event)
    if (encoded := _by_its_library(event)) is not None:
        return encoded
    return json.dumps(event, default=_plain, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def _by_its_library(event: Any) -> bytes | None:
    if (dump := getattr(event, "model_dump_json", None)) is not None:
        return str(dump()).encode()
    if (msgspec := sys.modules.get("msgspec")) is not None and isinstance(event, msgspec.Struct):
        encoded: bytes = msgspec.json.encode(event)
        return encoded
    return None


def _plain(value: Any) -> Any:
    if (encoded := _by_its_library(value)) is not None:
        return json.loads(encoded)
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: getattr(value, one.name) for one in fields(value)}
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | uuid.UUID):
        return str(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, set | frozenset | tuple):
        return sorted(value) if isinstance(value, set | frozenset) else list(value)
    raise TypeError(f"{type(value).__name__} has no JSON: give a serializer= that knows it")


class NotWarm(PushrepError):
    """A serializer that asks a schema registry was not warmed: the first call would wait in the caller's transaction.

    Call `warm()` of the topic when the service starts.
    """

    def __init__(self, topic: str) -> None:
        super().__init__(
            f"the serializer of topic {topic} asks a schema registry, which must not happen in a transaction: call its "
            "warm() when the service starts"
        )
        self.topic = topic


def refuse_serializer(argument: str, given: object) -> None:
    """Raise BadArgument for one that no outbox can call: it is asynchronous, or writes headers."""
    if is_asynchronous(given):
        name = getattr(given, "__name__", type(given).__name__)
        why = f"{name} is asynchronous, and no event loop waits for it; of confluent-kafka's give the one without Async"
        raise BadArgument(argument, why)
    if writes_headers(given):
        why = "it writes schema ids into headers, which are the caller's: leave its schema.id.serializer out"
        raise BadArgument(argument, why)


class Serializer:
    """What is called for the values, or the keys, of one topic. None stays None.

    argument: which setting it is. topic: in Kafka. Raises BadArgument as `refuse_serializer`.
    """

    def __init__(self, argument: str, given: MakesBytes, topic: str, field: Literal["key", "value"]) -> None:
        refuse_serializer(argument, given)
        self.is_warm = not asks_registry(given)
        """Whether no registry has to be asked for its schema."""
        self.argument, self._call = argument, with_context(given, topic, field)
        self._ask = partial(ask_registry, given, topic, field)
        self._types: set[type] = set()

    def __call__(self, value: Any) -> bytes | None:
        """The bytes. Raises what the serializer raises, BadArgument if it gives anything else."""
        if value is None:
            return None
        data = self._call(value)
        if data is not None and not isinstance(data, bytes | bytearray | memoryview):
            raise BadArgument(self.argument, f"it gave {type(data).__name__} for a {type(value).__name__}, not bytes")
        self._types.add(type(value))
        return data if data is None else bytes(data)

    def has_seen(self, value: Any) -> bool:
        """Whether one of this type was serialized before: the first one may take long."""
        return value is None or type(value) in self._types

    def warm(self) -> None:
        """Ask the registry for the schema, if there is one. It may wait. Raises what the serializer raises."""
        if not self.is_warm:
            self._ask()
            self.is_warm = True


class Partitioner:
    """An event's partition: what `partition_by` says, a function of the event, or "key": where Kafka's own partitioner
    puts its key. Events without a key take turns.
    """

    def __init__(self, partitions: int, partition_by: str | Callable[[Any], int]) -> None:
        self._partitions, self._of_event = partitions, partition_by if callable(partition_by) else None
        self._turn = itertools.count()

    def __call__(self, event: Any, key: bytes | None) -> int:
        """Raises BadArgument for a number that is no partition."""
        if self._of_event is not None:
            return whole_number("partition", self._of_event(event), 0, self._partitions - 1)
        return next(self._turn) % self._partitions if key is None else default_partition(key, self._partitions)


class RecordValues:
    """What an outbox's settings make of a caller's records, before they are checked; without any they pass as they
    are. Thread-safe if the serializers are.
    """

    def __init__(
        self,
        serializer: MakesBytes | None,
        key_serializer: MakesBytes | None,
        partition_by: PartitionBy,
        *,
        partitions: int,
        topic: str,
    ) -> None:
        """Topic: in Kafka."""
        self._value = None if serializer is None else Serializer("serializer", serializer, topic, "value")
        self._key = None if key_serializer is None else Serializer("key_serializer", key_serializer, topic, "key")
        self._partitioner = None if partition_by is None else Partitioner(partitions, partition_by)
        self.serializes = serializer is not None or key_serializer is not None

    def bytes_of(self, value: Any, key: Any) -> tuple[Any, Any]:
        """The value's and the key's bytes."""
        return value if self._value is None else self._value(value), key if self._key is None else self._key(key)

    def partition(self, value: Any, key: bytes | None) -> int | None:
        """Where `partition_by` puts the record. value: as the caller gave it."""
        return None if self._partitioner is None else self._partitioner(value, key)

    def many(self, values: Sequence[Any], keys: Sequence[Any] | None) -> tuple[Sequence[Any], Sequence[Any] | None]:
        """The values' and the keys' bytes."""
        if self._value is not None:
            values = [self._value(one) for one in values]
        if self._key is not None and keys is not None:
            keys = [self._key(one) for one in keys]
        return values, keys

    def has_seen(self, values: Sequence[Any], keys: Sequence[Any]) -> bool:
        """Whether none of them is the first of its type to be serialized, which may take long: a registry is asked."""
        sides = ((self._value, values), (self._key, keys))
        return all(made is None or all(map(made.has_seen, given)) for made, given in sides)

    def warm(self) -> None:
        """Ask for the schemas. What does not answer is asked again when it is needed."""
        for made in filter(None, (self._value, self._key)):
            try:
                made.warm()
            except Exception as error:  # noqa: BLE001 - a registry's client raises what its transport does
                _LOG.warning("%s: the schema registry was not reached, or refused, at open: %s", made.argument, error)

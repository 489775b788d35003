"""What an outbox's serializer=, key_serializer= and partition_by= make of a caller's records, before they are checked.
A record without any of them passes as it is.
"""

import logging
from collections.abc import Sequence
from typing import Any

from pushrep.outbox.settings import OutboxSettings
from pushrep.values import Partitioner, Serializer

_LOG = logging.getLogger("pushrep.outbox")


class RecordValues:
    """Thread-safe if the serializers are. topic: the Kafka topic, as serializers of a registry want it."""

    def __init__(self, settings: OutboxSettings, partitions: int, topic: str) -> None:
        given, given_key, by = settings.serializer, settings.key_serializer, settings.partition_by
        self._value = None if given is None else Serializer("serializer", given, topic, "value")
        self._key = None if given_key is None else Serializer("key_serializer", given_key, topic, "key")
        self._partitioner = None if by is None else Partitioner(partitions, by)
        self.serializes, self.places = given is not None or given_key is not None, by is not None

    def one(self, value: Any, key: Any) -> tuple[Any, Any]:
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
                _LOG.warning("%s: the schema registry was not reached at open: %s", made.argument, error)

"""`deserializer=` of a consumer: what becomes of the values of records, for both clients."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from filtering.errors import BadFilterSetting
from filtering.serializers import asks_registry, is_asynchronous, with_context


class Deserialized(NamedTuple):
    """A record's value, or why there is none."""

    value: Any
    error: Exception | None


class Deserializer:
    """given: any function of the bytes, or one of confluent-kafka's, which gets a context with the record's topic.

    None, a tombstone's value, stays None. Raises BadFilterSetting.
    """

    def __init__(self, given: Callable[..., Any]) -> None:
        if not callable(given) or inspect.iscoroutinefunction(given) or is_asynchronous(given):
            raise BadFilterSetting("deserializer", given, "a function of a value's bytes, not an asynchronous one")
        self.asks_registry = asks_registry(given)
        """Whether it may wait for a registry, at the first record of each schema."""
        self._given, self._by_topic = given, dict[str, Callable[[Any], Any]]()

    def read(self, values: Iterable[tuple[str, bytes | None]]) -> list[Deserialized]:
        """Of each topic and value."""
        return [self._one(topic, data) for topic, data in values]

    def _one(self, topic: str, data: bytes | None) -> Deserialized:
        if data is None:
            return Deserialized(None, None)
        if (read := self._by_topic.get(topic)) is None:
            read = self._by_topic[topic] = with_context(self._given, topic, "value")
        try:
            return Deserialized(read(data), None)
        except Exception as error:  # noqa: BLE001 - anything that its author raises; it reaches the caller
            return Deserialized(None, error)

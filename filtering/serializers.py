"""Serializers and deserializers that users give: any function of one argument, and those of confluent-kafka.

    yours                serializer(value) -> bytes             deserializer(data) -> value
    confluent-kafka's    the same, and a SerializationContext: the Kafka topic, and whether it is a key or a value

The second kind is known by its class, which its user has imported: nothing of confluent-kafka is imported here, and
nothing of a registry is known.
"""

import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from filtering.errors import BadFilterSetting

_REGISTRY = "confluent_kafka.schema_registry"


def with_context(
    given: Callable[..., Any], topic: str, field: Literal["key", "value"], headers: Any = None
) -> Callable[[Any], Any]:
    """The function of one argument that calls it."""
    client = sys.modules.get("confluent_kafka.serialization")
    if client is None or not isinstance(given, client.Serializer | client.Deserializer):
        return given
    context = client.SerializationContext(topic, field, headers)
    return lambda value: given(value, context)


def asks_registry(given: object) -> bool:
    """Whether it is one of confluent-kafka's that asks a Schema Registry, at the first use of each schema."""
    return any(one.__module__.startswith(_REGISTRY) for one in type(given).__mro__)


def writes_headers(given: object) -> bool:
    """Whether it is one of confluent-kafka's that was set to write its schema's id into a header of the record."""
    return getattr(getattr(given, "_schema_id_serializer", None), "__name__", "") == "header_schema_id_serializer"


def is_asynchronous(given: object) -> bool:
    """Whether it answers with an awaitable: an `async def`, or one of confluent-kafka's."""
    if inspect.iscoroutinefunction(given):
        return True
    return any(one.__module__.startswith(f"{_REGISTRY}._async") for one in type(given).__mro__)


def ask_registry(given: Any, topic: str, field: Literal["key", "value"]) -> None:
    """Have one that `asks_registry` register, or look up, its schema before there is a value. Raises what it raises if
    the registry does not answer or refuses.

    It asks before it looks at the value. So the value is one that nothing fits, and what is raised for that is passed
    over; of Protobuf it is the empty message.
    """
    message = getattr(given, "_msg_class", None)
    try:
        with_context(given, topic, field)(object() if message is None else message())
    except Exception as error:
        if any(_is_of_registry(one) for one in type(error).__mro__):
            raise


def _is_of_registry(kind: type) -> bool:
    """Whether it is a class of errors of the registry or of the way to it, not of a value."""
    ours = {"SchemaRegistryError", "OAuthTokenError"}
    return kind is OSError or kind.__name__ in ours or kind.__module__.startswith(("httpx", "requests"))


class Deserialized(NamedTuple):
    """A record's value, or why there is none."""

    value: Any
    error: Exception | None


class Deserializer:
    """given: any function of the bytes, or one of confluent-kafka's, which gets a context with the record's topic.

    None, a tombstone's value, stays None. Raises BadFilterSetting.
    """

    def __init__(self, given: Callable[..., Any]) -> None:
        if not callable(given) or is_asynchronous(given):
            raise BadFilterSetting("deserializer", given, "a function of a value's bytes, not an asynchronous one")
        self.asks_registry = asks_registry(given)
        """Whether it may wait for a registry, at the first record of each schema."""
        self._given = given

    def read(self, values: Iterable[tuple[str, bytes | None, Any]]) -> list[Deserialized]:
        """Of each record's topic, value and headers, a list or dict, which may hold the schema's id."""
        return [self._one(topic, data, headers) for topic, data, headers in values]

    def _one(self, topic: str, data: bytes | None, headers: Any) -> Deserialized:
        if data is None:
            return Deserialized(None, None)
        try:
            return Deserialized(with_context(self._given, topic, "value", headers)(data), None)
        except Exception as error:  # noqa: BLE001 - anything that its author raises; it reaches the caller
            return Deserialized(None, error)

"""Reads the topic's settings with librdkafka's admin client, and refuses those that lose records.

cleanup.policy      compact: it keeps a replay and deletes the first copy                      refused
max.message.bytes   below batch_bytes: each batch would have to be encoded again               refused
retention.ms        below the age of the newest unsent record of a partition: retention, which
                    looks at a segment's newest timestamp, would delete it on arrival          its partition stops
"""

import base64
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from time import monotonic
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import UUID

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import (  # type: ignore[attr-defined] # it does not list what it gives on
    AdminClient,
    ConfigResource,
    ResourceType,
)

from filtering.consumers.confluent_client import failure_of, missing_right, value_and_origin
from filtering.retry import Failure, ask
from pushrep.kafka.destination import KafkaDestination
from pushrep.kafka.errors import DestinationRefused, KafkaUnreachable, TopicMissing

_LOG = logging.getLogger("pushrep.kafka")

_POLL_S = 0.01
_NEXT_BROKER_S = 2.0  # one that hangs keeps another one unasked for so long
_EXPIRATION, _EXPIRATION_MS = "producer.id.expiration.ms", 86_400_000  # the broker's default
_TRANSACTIONS_EXPIRATION, _TRANSACTIONS_EXPIRATION_MS = "transactional.id.expiration.ms", 604_800_000  # as above
_MISSING = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}  # noqa: SLF001


class TopicFacts(NamedTuple):
    """The present settings of a topic.

    retention_ms: -1: unlimited. producer_id_expiration_ms: brokers forget a producer id that wrote nothing for so long.
    transactional_id_expiration_ms: coordinators forget a transactional id without requests for so long. set_by: by
    setting, its value and who set it.
    """

    topic: str
    topic_id: UUID
    partitions: int
    cleanup_policy: str
    max_message_bytes: int
    retention_ms: int
    has_append_time: bool
    producer_id_expiration_ms: int
    transactional_id_expiration_ms: int = _TRANSACTIONS_EXPIRATION_MS
    cluster_id: str | None = None
    set_by: Mapping[str, str] = MappingProxyType({})

    def check(self, *, batch_bytes: int) -> None:
        """Raise DestinationRefused, which names the setting, if the settings would lose records.

        batch_bytes: the size of the outbox's batches; 0: it makes none.
        """
        if "compact" in self.cleanup_policy:
            raise self._refused(
                "cleanup.policy",
                self.cleanup_policy,
                "compaction keeps a record's replay and deletes its first copy, which readers need: set "
                "cleanup.policy=delete",
            )
        if self.max_message_bytes < batch_bytes:
            raise self._refused(
                "max.message.bytes",
                self.max_message_bytes,
                f"every batch of batch_bytes={batch_bytes} would have to be split: raise it, or lower batch_bytes",
            )

    def named(self, setting: str) -> str:
        """The setting with its value and who set it, for a message; empty if the topic has no such setting."""
        return f"{setting}={self.set_by[setting]}" if setting in self.set_by else ""

    def _refused(self, setting: str, value: object, why: str) -> DestinationRefused:
        return DestinationRefused(self.topic, setting, value, why)


def look_at_topic(destination: KafkaDestination, topic: str) -> TopicFacts:
    """Ask the brokers; waits for them up to `request_timeout_ms`, and 3 s for a topic that not every broker knows yet.

    Raises TopicMissing, KafkaUnreachable.
    """
    return ask(
        lambda _: _facts_of(destination, topic),
        lambda error: Failure.NOT_THERE if isinstance(error, TopicMissing) else Failure.PERMANENT,
    )


def _facts_of(destination: KafkaDestination, topic: str) -> TopicFacts:
    timeout_s = destination.request_timeout_ms / 1000
    admin = _Admin(destination)
    try:
        doing = "DESCRIBE"
        description = admin.result_of(admin.client.describe_topics(TopicCollection([topic]))[topic])
        cluster_id = admin.result_of(admin.client.describe_cluster()).cluster_id
        doing = "DESCRIBE_CONFIGS"
        settings = admin.settings_of(ConfigResource(ResourceType.TOPIC, topic))
        expirations_ms = _expirations_ms(admin, _leaders_of(topic, description.partitions))
    except KafkaException as error:
        if error.args[0].code() in _MISSING:
            raise TopicMissing(topic) from error
        raise kafka_failure(error.args[0], topic, doing, admin.why) from error
    except TimeoutError as error:
        raise KafkaUnreachable(admin.why or f"no answer within {timeout_s} s") from error
    return TopicFacts(
        topic=topic,
        topic_id=uuid_of(description.topic_id),
        partitions=len(description.partitions),
        cleanup_policy=settings["cleanup.policy"].value,
        max_message_bytes=int(settings["max.message.bytes"].value),
        retention_ms=int(settings["retention.ms"].value),
        has_append_time=settings["message.timestamp.type"].value == "LogAppendTime",
        producer_id_expiration_ms=expirations_ms[0],
        transactional_id_expiration_ms=expirations_ms[1],
        cluster_id=cluster_id,
        set_by={name: value_and_origin(one) for name, one in settings.items()},
    )


def kafka_failure(error: KafkaError, topic: str, on_topic: str, said: str | None = None) -> KafkaUnreachable:
    """The exception for a failed call: a missing right, or else that Kafka can't be reached.

    on_topic: the operation that the call needs on `topic`. said: a better text than the error's, if there is one.
    """
    missing = missing_right(error, "", topic, on_topic)
    return KafkaUnreachable(said or error.str()) if missing is None else KafkaUnreachable(str(missing), "Kafka refuses")


class _Admin:
    """An admin client. why: its last connection error, for example a refused password; None without one.

    Raises KafkaUnreachable.
    """

    def __init__(self, destination: KafkaDestination) -> None:
        self.why: str | None = None
        self._timeout_s = destination.request_timeout_ms / 1000
        settings = {**destination.librdkafka_settings(), "log_level": 0, "error_cb": self._on_error}
        try:
            self.client = AdminClient(settings)
        except KafkaException as error:  # a certificate can't be read, perhaps while it is being replaced
            raise KafkaUnreachable(error.args[0].str()) from error

    def settings_of(self, resource: Any, within_s: float | None = None) -> Mapping[str, Any]:
        """The settings of a topic or broker. Raises as `result_of`."""
        found: Mapping[str, Any] = self.result_of(self.client.describe_configs([resource])[resource], within_s)
        return found

    def result_of(self, future: "Future[Any]", within_s: float | None = None) -> Any:
        """Wait for the result; poll the client for error callbacks and tokens. Raises KafkaException, TimeoutError."""
        deadline_s = monotonic() + (within_s or self._timeout_s)
        while not future.done() and monotonic() < deadline_s:
            self.client.poll(_POLL_S)
        return future.result(0)

    def _on_error(self, error: KafkaError) -> None:
        if error.code() != KafkaError._ALL_BROKERS_DOWN or self.why is None:  # noqa: SLF001 - its only name
            self.why = error.str()


def _leaders_of(topic: str, partitions: Sequence[Any]) -> list[str]:
    leaders = [str(one.leader.id) for one in partitions if one.leader is not None and one.leader.id >= 0]
    if not leaders:
        raise KafkaUnreachable(f"no partition of topic {topic} has a leader now")
    return list(dict.fromkeys(leaders))


def _expirations_ms(admin: _Admin, brokers: Sequence[str]) -> tuple[int, int]:
    """The producer.id.expiration.ms and transactional.id.expiration.ms of the first of these brokers that answers;
    Kafka's defaults if this user may not read them. Raises KafkaException, TimeoutError.

    If no broker answers, the defaults must not be used: the real time may be shorter, and a batch that is sent after it
    could leave a gap.
    """
    for broker in brokers:
        try:
            settings = admin.settings_of(
                ConfigResource(ResourceType.BROKER, broker), None if broker == brokers[-1] else _NEXT_BROKER_S
            )
            break
        except (KafkaException, TimeoutError) as error:
            if failure_of(error) is not Failure.TRANSIENT:
                _LOG.info("%s can't be read, its default is used: %s", _EXPIRATION, error)
                settings = {}
                break
            if broker == brokers[-1]:
                raise

    def number(name: str, default: int) -> int:
        entry = settings.get(name)
        return default if entry is None or entry.value is None else int(entry.value)

    return number(_EXPIRATION, _EXPIRATION_MS), number(_TRANSACTIONS_EXPIRATION, _TRANSACTIONS_EXPIRATION_MS)


def uuid_of(topic_id: Any) -> UUID:
    """The UUID of a topic id, which Kafka writes as unpadded URL-safe base64."""
    return UUID(bytes=base64.urlsafe_b64decode(str(topic_id) + "=="))

"""What the topic is, and whether its settings let every record through: asked of the brokers by librdkafka's admin.

cleanup.policy      compact keeps a replay and deletes the first copy           refused
max.message.bytes   below batch_bytes every batch would be encoded again        refused
retention.ms        shorter than the oldest unsent record is old: it would be
deleted on arrival, since retention looks at record times   refused
"""

import base64
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from time import monotonic
from typing import Any, NamedTuple
from uuid import UUID

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import (  # type: ignore[attr-defined] # it does not list what it gives on
    AdminClient,
    ConfigResource,
    ResourceType,
)

from filtering.consumers.confluent_client import failure_of, missing_right
from filtering.retry import Failure
from pushrep.kafka.destination import KafkaDestination
from pushrep.kafka.errors import DestinationRefused, KafkaRightMissing, KafkaUnreachable, TopicMissing

_LOG = logging.getLogger("pushrep.kafka")

_POLL_S = 0.01
_EXPIRATION, _EXPIRATION_MS = "producer.id.expiration.ms", 86_400_000  # the broker's default
_TRANSACTIONS_EXPIRATION, _TRANSACTIONS_EXPIRATION_MS = "transactional.id.expiration.ms", 604_800_000  # as above
_MISSING = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}  # noqa: SLF001


class TopicFacts(NamedTuple):
    """A topic as it is now.

    retention_ms: -1 is for ever. producer_id_expiration_ms: after such a silence brokers forget a producer.
    delete_retention_ms: so long a compacted topic keeps a tombstone.
    transactional_id_expiration_ms: after such a silence coordinators forget a transactional id.
    """

    topic: str
    topic_id: UUID
    partitions: int
    cleanup_policy: str
    max_message_bytes: int
    retention_ms: int
    has_append_time: bool
    producer_id_expiration_ms: int
    delete_retention_ms: int = 86_400_000
    transactional_id_expiration_ms: int = _TRANSACTIONS_EXPIRATION_MS

    def check(self, *, batch_bytes: int, oldest_unsent_age_ms: int | None) -> None:
        """Raise DestinationRefused, naming the setting. batch_bytes: of the batches that the outbox makes, 0: none."""
        if "compact" in self.cleanup_policy:
            raise self._refused(
                "cleanup.policy",
                self.cleanup_policy,
                "compaction keeps a record's replay and deletes its first copy, which readers wait for: take delete",
            )
        if self.max_message_bytes < batch_bytes:
            raise self._refused(
                "max.message.bytes",
                self.max_message_bytes,
                f"every batch of batch_bytes={batch_bytes} would be taken apart: raise it, or lower batch_bytes",
            )
        age_ms = oldest_unsent_age_ms
        if age_ms is not None and 0 <= self.retention_ms < age_ms and not self.has_append_time:
            raise self._refused(
                "retention.ms",
                self.retention_ms,
                f"the oldest record that is not sent yet is {age_ms} ms old by its own time, and would be deleted "
                "before it is read: raise it (-1: for ever)",
            )

    def _refused(self, setting: str, value: object, why: str) -> DestinationRefused:
        return DestinationRefused(self.topic, setting, value, why)


def look_at_topic(destination: KafkaDestination, topic: str) -> TopicFacts:
    """Ask the brokers; waits for them up to `request_timeout_ms`. Raises TopicMissing, KafkaUnreachable."""
    timeout_s = destination.request_timeout_ms / 1000
    admin = _Admin(destination)
    try:
        doing = "DESCRIBE"
        description = admin.result_of(admin.client.describe_topics(TopicCollection([topic]))[topic])
        doing = "DESCRIBE_CONFIGS"
        settings = admin.settings_of(ConfigResource(ResourceType.TOPIC, topic))
        expirations_ms = _expirations_ms(admin, _leader_of(topic, description.partitions))
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
        delete_retention_ms=int(settings["delete.retention.ms"].value),
        transactional_id_expiration_ms=expirations_ms[1],
    )


def kafka_failure(error: KafkaError, topic: str, on_topic: str, said: str | None = None) -> KafkaUnreachable:
    """What to raise for a failed call: the right that is missing, else that Kafka can't be reached.

    on_topic: the operation that the call needs on `topic`. said: what is known better than the error says.
    """
    missing = missing_right(error, "", topic, on_topic)
    return KafkaUnreachable(said or error.str()) if missing is None else KafkaRightMissing(str(missing))


class _Admin:
    """An admin client. `why`: what it said last about its connections, a refused password say; None: nothing.

    Raises KafkaUnreachable.
    """

    def __init__(self, destination: KafkaDestination) -> None:
        self.why: str | None = None
        self._timeout_s = destination.request_timeout_ms / 1000
        settings = {**destination.librdkafka_settings(), "log_level": 0, "error_cb": self._on_error}
        try:
            self.client = AdminClient(settings)
        except KafkaException as error:  # a certificate can't be read: it may be replaced at this moment
            raise KafkaUnreachable(error.args[0].str()) from error

    def settings_of(self, resource: Any) -> Mapping[str, Any]:
        """A topic's or broker's. Raises as `result_of`."""
        found: Mapping[str, Any] = self.result_of(self.client.describe_configs([resource])[resource])
        return found

    def result_of(self, future: "Future[Any]") -> Any:
        """The answer; meanwhile error callbacks are called, and tokens fetched. Raises KafkaException, TimeoutError."""
        deadline_s = monotonic() + self._timeout_s
        while not future.done() and monotonic() < deadline_s:
            self.client.poll(_POLL_S)
        return future.result(0)

    def _on_error(self, error: KafkaError) -> None:
        if error.code() != KafkaError._ALL_BROKERS_DOWN or self.why is None:  # noqa: SLF001 - its only name
            self.why = error.str()


def _leader_of(topic: str, partitions: Sequence[Any]) -> str:
    """A broker that leads one of the topic's partitions. Raises KafkaUnreachable while none does."""
    for one in partitions:
        if one.leader is not None and one.leader.id >= 0:
            return str(one.leader.id)
    raise KafkaUnreachable(f"no partition of topic {topic} has a leader now")


def _expirations_ms(admin: _Admin, broker: str) -> tuple[int, int]:
    """After which silence the broker forgets a producer id, and a transactional id; its defaults where this user may
    not ask. Raises KafkaException, TimeoutError.

    A broker that only doesn't answer now may forget producers sooner: by the default, batches would go out that leave
    a hole.
    """
    try:
        settings = admin.settings_of(ConfigResource(ResourceType.BROKER, broker))
    except (KafkaException, TimeoutError) as error:
        if failure_of(error) is Failure.TRANSIENT:
            raise
        _LOG.info("%s can't be asked for, so its default is taken: %s", _EXPIRATION, error)
        settings = {}
    producer_ids_ms = _number(settings, _EXPIRATION, _EXPIRATION_MS)
    return producer_ids_ms, _number(settings, _TRANSACTIONS_EXPIRATION, _TRANSACTIONS_EXPIRATION_MS)


def _number(settings: Mapping[str, Any], name: str, default: int) -> int:
    try:
        return int(settings[name].value)
    except (KeyError, TypeError, ValueError):
        return default


def uuid_of(topic_id: Any) -> UUID:
    """Kafka writes a topic's id as unpadded URL-safe base64."""
    return UUID(bytes=base64.urlsafe_b64decode(str(topic_id) + "=="))

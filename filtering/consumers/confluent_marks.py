"""The marks topic: marks that do not fit beside an offset, each version a record of its own in a compacted topic.

write: key = group/topic/partition/version, value = the marks' bytes ─▶ (partition, offset, key) goes into the commit
read:  the record at that very offset; its key must be the one        delete: a tombstone, once another is committed
"""

import logging
import time
import uuid
from collections.abc import Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType  # type: ignore[attr-defined]

from filtering.consumers.asking import Failure
from filtering.consumers.confluent_asking import (
    ask_brokers,
    connection_of,
    failure_of_code,
    flush,
    missing_right,
    naming_rights,
)
from filtering.consumers.errors import MarksLost
from filtering.consumers.positions import Stored, pack_marks, unpack_marks
from filtering.errors import BadFilterSetting
from filtering.marks import HighwaterMarks

_LOG = logging.getLogger(__name__)
_TIMEOUT_S = 30.0

_LATE = KafkaError(KafkaError._TIMED_OUT, "the marks topic does not answer")  # noqa: SLF001 - the client's own names
_BEYOND = {KafkaError._PARTITION_EOF, KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE}  # noqa: SLF001


class ConfluentMarksTopic:
    """config: the consumer's, of which connection and security are used. Raises BadFilterSetting, KafkaException."""

    def __init__(self, config: Mapping[str, Any], topic: str) -> None:
        shared = connection_of(config)
        self._topic = topic
        _refuse_uncompacted(shared, topic)
        self._settings = {**shared, "enable.idempotence": True, "acks": "all"}
        self._producer = Producer(self._settings)
        reader = {"group.id": "unused", "enable.auto.commit": False, "enable.partition.eof": True}
        self._reader = Consumer({**shared, **reader, "auto.offset.reset": "error"})

    def write(self, group: str, partition: tuple[str, int], marks: HighwaterMarks) -> Stored:
        """Store a version; it is on the brokers when this returns."""
        version = f"{group}/{partition[0]}/{partition[1]}/{uuid.uuid4().hex}"
        message = self._send(version, pack_marks(marks))
        return Stored(int(message.partition() or 0), int(message.offset() or 0), version)

    def read(self, partition: tuple[str, int], stored: Stored) -> HighwaterMarks:
        """The marks of a version. Raises MarksLost, CorruptPosition."""
        self._reader.assign([TopicPartition(self._topic, stored.partition, stored.offset)])
        try:
            message = self._first()
        finally:
            self._reader.unassign()
        if message is None or message.key() != stored.version.encode() or not message.value():
            raise MarksLost(*partition, self._topic, stored.version)
        return unpack_marks(bytes(message.value() or b""))

    def _first(self) -> Message | None:
        """The first record from there on, None if there is none. Raises KafkaException."""
        deadline_s = time.monotonic() + _TIMEOUT_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            message = self._reader.poll(left_s)
            if message is None:
                break
            error = message.error()
            if error is None:
                return message
            if error.code() in _BEYOND:
                return None
            if error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
                continue  # the client looks for its group's coordinator, and no group is used here
            if failure_of_code(error) is not Failure.PASSES:
                raise missing_right(error, "", self._topic) or KafkaException(error)
        raise KafkaException(_LATE)

    def delete(self, stored: Stored) -> None:
        """No commit names this version any more."""
        self._producer.produce(self._topic, key=stored.version, partition=stored.partition)
        self._producer.poll(0)

    def close(self) -> None:
        """Marks were confirmed when they were sent; a deletion that fails leaves a version that no commit names."""
        try:
            self._producer.flush(_TIMEOUT_S)
        except KafkaException as error:  # raised, it would hide what ended the caller's block
            _LOG.warning("marks topic %s: not all old versions were deleted: %s", self._topic, error)
        finally:
            self._reader.close()

    def _send(self, key: str, value: bytes) -> Message:
        reports: list[tuple[KafkaError | None, Message]] = []
        try:
            try:
                self._producer.produce(self._topic, value, key, on_delivery=lambda *report: reports.append(report))
            except KafkaException:  # at times it says only that a fatal error came before: which one, a flush tells
                flush(self._producer, _TIMEOUT_S)
                raise
            flush(self._producer, _TIMEOUT_S)
        except KafkaException as fatal:  # this client sends nothing more
            self._producer = Producer(self._settings)
            raise (missing_right(fatal.args[0], "", self._topic, "WRITE") or fatal) from fatal
        for error, message in reports:
            if error is not None:
                raise missing_right(error, "", self._topic, "WRITE") or KafkaException(error)
            return message
        raise KafkaException(_LATE)


def _refuse_uncompacted(config: Mapping[str, Any], topic: str) -> None:
    resource = ConfigResource(ResourceType.TOPIC, topic)
    admin = AdminClient(dict(config))  # held until it has answered
    with naming_rights("", topic, "DESCRIBE_CONFIGS"):
        described = ask_brokers(
            lambda left_s: admin.describe_configs([resource], request_timeout=left_s)[resource].result(left_s)
        )
    if (policy := described["cleanup.policy"].value) != "compact":
        raise BadFilterSetting("marks_topic", topic, f"a topic with cleanup.policy=compact, this has {policy}")

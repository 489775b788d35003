"""Produce requests that name the topic by its id (version 13), which aiokafka 0.14 does not speak; else by its name.

A topic that was deleted and made again between two requests is another one of the same name: it would take a batch out
of the middle of the log, and readers would drop everything that is shipped to it afterwards. By id the broker refuses
it (UNKNOWN_TOPIC_ID). Brokers before 4.1 know version 7 at most here, and the name has to do.

    transactionalId | acks i16 | timeoutMs i32 | [ topicId 16 | [ index i32 | records | tags ] | tags ] | tags
    [ topicId 16 | [ index i32 | errorCode i16 | baseOffset i64 | appendTimeMs i64 | logStartOffset i64 | [ errors ]
      | message | tags ] | tags ] | throttleMs i32 | tags          strings, arrays and records in the compact form

Source: Kafka's ProduceRequest.json and ProduceResponse.json; KIP-516.
"""

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any
from uuid import UUID

from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.produce import ProduceRequest_v7
from aiokafka.protocol.types import (
    CompactArray,
    CompactBytes,
    CompactString,
    Int16,
    Int32,
    Int64,
    Schema,
    TaggedFields,
    UnsignedVarInt32,
)

from pushrep.kafka.answers import BrokerAnswer
from pushrep.records.model import Buffer

_ALL_IN_SYNC = -1
_NONE = _NO_TAGS = bytes(1)


class _Uuid:
    @classmethod
    def encode(cls, value: UUID) -> bytes:
        return value.bytes

    @classmethod
    def decode(cls, data: BytesIO) -> UUID:
        return UUID(bytes=data.read(16))

    @classmethod
    def repr(cls, value: UUID) -> str:
        return str(value)


class _ProduceResponse13(Response):  # type: ignore[misc] # aiokafka has no types
    API_KEY = 0
    API_VERSION = 13
    SCHEMA = Schema(
        (
            "topics",
            CompactArray(
                ("topic", _Uuid),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("error_code", Int16),
                        ("offset", Int64),
                        ("timestamp", Int64),
                        ("log_start_offset", Int64),
                        (
                            "record_errors",
                            CompactArray(
                                ("batch_index", Int32), ("message", CompactString("utf-8")), ("tags", TaggedFields)
                            ),
                        ),
                        ("error_message", CompactString("utf-8")),
                        ("tags", TaggedFields),
                    ),
                ),
                ("tags", TaggedFields),
            ),
        ),
        ("throttle_time_ms", Int32),
        ("tags", TaggedFields),
    )


class _ProduceRequest13(RequestStruct):  # type: ignore[misc] # as above
    API_KEY = 0
    API_VERSION = 13
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _ProduceResponse13
    SCHEMA = Schema(
        ("transactional_id", CompactString("utf-8")),
        ("required_acks", Int16),
        ("timeout", Int32),
        (
            "topics",
            CompactArray(
                ("topic", _Uuid),
                (
                    "partitions",
                    CompactArray(("partition", Int32), ("messages", CompactBytes), ("tags", TaggedFields)),
                ),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )

    def encode(self) -> bytes:
        """The same bytes as by the schema, which would copy every batch once for each level that it lies in."""
        return b"".join(self.parts())

    def parts(self) -> list[Buffer]:
        """The same in pieces, so that no batch is copied at all."""
        parts = [_NONE, Int16.encode(self.required_acks), Int32.encode(self.timeout), _count(self.topics)]
        for topic_id, partitions, _ in self.topics:
            parts += [topic_id.bytes, _count(partitions)]
            for index, records, _ in partitions:
                parts += [Int32.encode(index), _count(records), records, _NO_TAGS]
            parts.append(_NO_TAGS)
        return [*parts, _NO_TAGS]


def _count(items: Sequence[Any]) -> bytes:
    """Of an array, or a string of bytes, in the compact form: 0 is null, 1 is none."""
    return bytes(UnsignedVarInt32.encode(len(items) + 1))


class ProduceBatches(Request[ProduceRequest_v7 | _ProduceRequest13]):  # type: ignore[misc] # as above
    """One batch for each of some partitions of a topic; acknowledged by all replicas that are in sync."""

    API_KEY = 0

    def __init__(self, topic: str, topic_id: UUID, batches: Mapping[int, Buffer], timeout_ms: int) -> None:
        self._topic, self._topic_id, self._batches, self._timeout_ms = topic, topic_id, batches, timeout_ms

    def build(self, request_struct_class: Any) -> Any:
        """For aiokafka, in the highest version that both sides know."""
        if request_struct_class is _ProduceRequest13:
            partitions: list[Any] = [(index, data, {}) for index, data in self._batches.items()]
            topics: list[Any] = [(self._topic_id, partitions, {})]
            return _ProduceRequest13(None, _ALL_IN_SYNC, self._timeout_ms, topics, {})
        batches = [(index, bytes(data)) for index, data in self._batches.items()]
        return ProduceRequest_v7(None, _ALL_IN_SYNC, self._timeout_ms, [(self._topic, batches)])


def answers_of(response: Any) -> tuple[dict[int, BrokerAnswer], int]:
    """Kafka partition to its answer, and for how many ms the broker wants to be left alone."""
    found: dict[int, BrokerAnswer] = {}
    for topic in response.topics:
        for one in topic[1]:
            message = (one[6] or "") if len(one) > 6 else ""
            found[one[0]] = BrokerAnswer(one[1], one[2], message)
    return found, response.throttle_time_ms

"""Requests to brokers in the versions that aiokafka 0.14 does not speak: Produce, and those of transactions.

Produce 13 names the topic by its id, earlier versions by its name.
If a topic is deleted and made again between two requests, the new one would take a batch out of the middle of the log,
and readers would drop everything shipped later. With the id the broker refuses (UNKNOWN_TOPIC_ID). Brokers before 4.1
know version 8 at most here, and get the name. From 8 on an answer names the records that were refused (KIP-467).

    transactionalId | acks i16 | timeoutMs i32 | [ topicId 16 | [ index i32 | records | tags ] | tags ] | tags
    [ topicId 16 | [ index i32 | errorCode i16 | baseOffset i64 | appendTimeMs i64 | logStartOffset i64 | [ errors ]
      | message | tags ] | tags ] | throttleMs i32 | tags          strings, arrays and records in the compact form

To a transaction coordinator:

    FindCoordinator     0, 1     aiokafka's
    InitProducerId      3        names the producer id and epoch that the caller has (KIP-360); -1, -1: none
    AddPartitionsToTxn  0        aiokafka's
    EndTxn              0, 5     5 answers with the producer id and epoch to go on with (KIP-890); 0: aiokafka's
    ApiVersions         3        which transaction version the cluster has agreed on: a tagged field of the answer

Source: Kafka's ProduceRequest.json, InitProducerIdRequest.json, EndTxnRequest.json, ApiVersionsResponse.json and their
counterparts; KIP-516.
"""

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any
from uuid import UUID

from aiokafka.errors import IncompatibleBrokerVersion
from aiokafka.protocol.api import Request, RequestStruct, Response, ResponseHeader_v0
from aiokafka.protocol.produce import ProduceRequest_v8
from aiokafka.protocol.types import (
    Boolean,
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
from pushrep.records.header import Buffer

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


def _response(api_key: int, version: int, schema: Schema) -> Any:
    return type("Response", (Response,), {"API_KEY": api_key, "API_VERSION": version, "SCHEMA": schema})


def _request(api_key: int, version: int, schema: Schema, answer: Schema, **more: Any) -> Any:
    """The structure of a request, which knows that of its answer."""
    fields = {"API_KEY": api_key, "API_VERSION": version, "FLEXIBLE_VERSION": True, "SCHEMA": schema}
    return type("Request", (RequestStruct,), {**fields, "RESPONSE_TYPE": _response(api_key, version, answer), **more})


_ProduceResponse13 = _response(
    0,
    13,
    Schema(
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
    ),
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
        """The same bytes as by the schema, which would copy every batch once for each level of nesting."""
        return b"".join(self.parts())

    def parts(self) -> list[Buffer]:
        """The same in pieces, without copying a batch."""
        parts = [_NONE, Int16.encode(self.required_acks), Int32.encode(self.timeout), _count(self.topics)]
        for topic_id, partitions, _ in self.topics:
            parts += [topic_id.bytes, _count(partitions)]
            for index, records, _ in partitions:
                parts += [Int32.encode(index), _count(records), records, _NO_TAGS]
            parts.append(_NO_TAGS)
        return [*parts, _NO_TAGS]


def _count(items: Sequence[Any]) -> bytes:
    """The length of a compact array or of compact bytes: 0 is null, 1 is empty."""
    return bytes(UnsignedVarInt32.encode(len(items) + 1))


class ProduceBatches(Request[ProduceRequest_v8 | _ProduceRequest13]):  # type: ignore[misc] # as above
    """A Produce request with one batch for each of some partitions of a topic; acks=all."""

    API_KEY = 0

    def __init__(self, topic: str, topic_id: UUID, batches: Mapping[int, Buffer], timeout_ms: int) -> None:
        self._topic, self._topic_id, self._batches, self._timeout_ms = topic, topic_id, batches, timeout_ms

    def build(self, request_struct_class: Any) -> Any:
        """Called by aiokafka: the request in the highest version that both sides know."""
        if request_struct_class is _ProduceRequest13:
            partitions: list[Any] = [(index, data, {}) for index, data in self._batches.items()]
            topics: list[Any] = [(self._topic_id, partitions, {})]
            return _ProduceRequest13(None, _ALL_IN_SYNC, self._timeout_ms, topics, {})
        batches = [(index, bytes(data)) for index, data in self._batches.items()]
        return ProduceRequest_v8(None, _ALL_IN_SYNC, self._timeout_ms, [(self._topic, batches)])


def answers_of(response: Any) -> tuple[dict[int, BrokerAnswer], int]:
    """The answers by Kafka partition, and the throttle time in ms."""
    found: dict[int, BrokerAnswer] = {}
    for topic in response.topics:
        for one in topic[1]:
            refused = tuple((index, words or "") for index, words, *_ in one[5] or ())
            found[one[0]] = BrokerAnswer(one[1], one[2], one[6] or "", refused)
    return found, response.throttle_time_ms


_NAME, _SOFTWARE_VERSION = "pushrep", "1"
_FINALIZED_FEATURES_TAG = 2
_TRANSACTION_VERSION = "transaction.version"


_PRODUCER_ID_AND_EPOCH = Schema(
    ("throttle_time_ms", Int32),
    ("error_code", Int16),
    ("producer_id", Int64),
    ("producer_epoch", Int16),
    ("tags", TaggedFields),
)


INIT_PRODUCER_ID = _request(
    22,
    3,
    Schema(
        ("transactional_id", CompactString("utf-8")),
        ("transaction_timeout_ms", Int32),
        ("producer_id", Int64),
        ("producer_epoch", Int16),
        ("tags", TaggedFields),
    ),
    _PRODUCER_ID_AND_EPOCH,
)
"""Asks for the next epoch of a transactional id; of the caller: its present producer id and epoch."""
END_TXN_AND_BUMP_EPOCH = _request(
    26,
    5,
    Schema(
        ("transactional_id", CompactString("utf-8")),
        ("producer_id", Int64),
        ("producer_epoch", Int16),
        ("transaction_result", Boolean),
        ("tags", TaggedFields),
    ),
    _PRODUCER_ID_AND_EPOCH,
)
"""Ends a transaction under transaction version 2: the answer has the producer id and epoch to go on with."""
_API_VERSIONS = _request(
    18,
    3,
    Schema(
        ("client_software_name", CompactString("utf-8")),
        ("client_software_version", CompactString("utf-8")),
        ("tags", TaggedFields),
    ),
    Schema(
        ("error_code", Int16),
        (
            "api_versions",
            CompactArray(("api_key", Int16), ("min_version", Int16), ("max_version", Int16), ("tags", TaggedFields)),
        ),
        ("throttle_time_ms", Int32),
        ("tags", TaggedFields),
    ),
    # Always of the first version: the client does not know the broker's versions yet.
    parse_response_header=lambda _, read_buffer: ResponseHeader_v0.decode(read_buffer),
)


class Ask:
    """A request of one structure, by its fields without the tags."""

    def __init__(self, structure: Any, *fields: object) -> None:
        self._structure, self._fields = structure, fields

    def prepare(self, versions: Mapping[int, tuple[int, int]]) -> Any:
        """Called by aiokafka. Raises IncompatibleBrokerVersion."""
        least, most = versions.get(self._structure.API_KEY, (0, -1))
        if not least <= self._structure.API_VERSION <= most:
            raise IncompatibleBrokerVersion(f"api key {self._structure.API_KEY}, version {self._structure.API_VERSION}")
        return self._structure(*self._fields, {})


ASK_FEATURES = Ask(_API_VERSIONS, _NAME, _SOFTWARE_VERSION)
"""Asks for the features that the brokers of a cluster have agreed on."""
_FINALIZED_FEATURES = CompactArray(
    ("name", CompactString("utf-8")), ("max_version", Int16), ("min_version", Int16), ("tags", TaggedFields)
)


def transaction_version_of(response: Any) -> int:
    """The transaction version in the answer to ASK_FEATURES; 0 without one."""
    found = response.tags.get(_FINALIZED_FEATURES_TAG)
    features = [] if found is None else _FINALIZED_FEATURES.decode(BytesIO(found)) or []
    return max((level for name, level, *_ in features if name == _TRANSACTION_VERSION), default=0)

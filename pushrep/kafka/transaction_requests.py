"""Requests to a transaction coordinator in the versions that aiokafka 0.14 does not speak.

    FindCoordinator     0, 1     aiokafka's
    InitProducerId      3, 4     names the producer id and epoch that the caller has (KIP-360); -1, -1: none
    AddPartitionsToTxn  0        aiokafka's
    EndTxn              0, 5     5 answers with the producer id and epoch to go on with (KIP-890); 0: aiokafka's
    ApiVersions         3        which transaction version the cluster has agreed on: a tagged field of the answer

Source: Kafka's InitProducerIdRequest.json, EndTxnRequest.json, ApiVersionsResponse.json and their counterparts.
"""

from io import BytesIO
from typing import Any

from aiokafka.protocol.api import Request, RequestStruct, Response, ResponseHeader_v0
from aiokafka.protocol.transaction import EndTxnRequest_v0
from aiokafka.protocol.types import (
    Boolean,
    CompactArray,
    CompactString,
    Int16,
    Int32,
    Int64,
    Schema,
    TaggedFields,
)

_NAME, _SOFTWARE_VERSION = "pushrep", "1"
_FINALIZED_FEATURES_TAG = 2
_TRANSACTION_VERSION = "transaction.version"


class _InitProducerIdResponse3(Response):  # type: ignore[misc] # aiokafka has no types
    API_KEY = 22
    API_VERSION = 3
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        ("producer_id", Int64),
        ("producer_epoch", Int16),
        ("tags", TaggedFields),
    )


class _InitProducerIdRequest3(RequestStruct):  # type: ignore[misc] # as above
    API_KEY = 22
    API_VERSION = 3
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _InitProducerIdResponse3
    SCHEMA = Schema(
        ("transactional_id", CompactString("utf-8")),
        ("transaction_timeout_ms", Int32),
        ("producer_id", Int64),
        ("producer_epoch", Int16),
        ("tags", TaggedFields),
    )


class _InitProducerIdResponse4(_InitProducerIdResponse3):
    API_VERSION = 4


class _InitProducerIdRequest4(_InitProducerIdRequest3):
    API_VERSION = 4
    RESPONSE_TYPE = _InitProducerIdResponse4


class InitProducerId(Request[_InitProducerIdRequest3 | _InitProducerIdRequest4]):  # type: ignore[misc] # as above
    """The producer id of a transactional id, under its next epoch. producer_id, producer_epoch: what the caller has."""

    API_KEY = 22

    def __init__(self, transactional_id: str, timeout_ms: int, producer_id: int, producer_epoch: int) -> None:
        no_tags: dict[int, bytes] = {}
        self._fields = (transactional_id, timeout_ms, producer_id, producer_epoch, no_tags)

    def build(self, request_struct_class: Any) -> Any:
        """For aiokafka."""
        return request_struct_class(*self._fields)


class _EndTxnResponse5(Response):  # type: ignore[misc] # as above
    API_KEY = 26
    API_VERSION = 5
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        ("producer_id", Int64),
        ("producer_epoch", Int16),
        ("tags", TaggedFields),
    )


class _EndTxnRequest5(RequestStruct):  # type: ignore[misc] # as above
    API_KEY = 26
    API_VERSION = 5
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _EndTxnResponse5
    SCHEMA = Schema(
        ("transactional_id", CompactString("utf-8")),
        ("producer_id", Int64),
        ("producer_epoch", Int16),
        ("transaction_result", Boolean),
        ("tags", TaggedFields),
    )


class AbortTxn(Request[EndTxnRequest_v0]):  # type: ignore[misc] # as above
    """End a transaction without its records. Its answer names no producer id: the one that it had goes on."""

    API_KEY = 26

    def __init__(self, transactional_id: str, producer_id: int, producer_epoch: int) -> None:
        self._fields = (transactional_id, producer_id, producer_epoch, False)

    def build(self, request_struct_class: Any) -> Any:
        """For aiokafka."""
        return request_struct_class(*self._fields)


class AbortTxnAndRaise(Request[_EndTxnRequest5]):  # type: ignore[misc] # as above
    """The same under transaction version 2: its answer names the producer id and epoch to go on with."""

    API_KEY = 26

    def __init__(self, transactional_id: str, producer_id: int, producer_epoch: int) -> None:
        no_tags: dict[int, bytes] = {}
        self._fields = (transactional_id, producer_id, producer_epoch, False, no_tags)

    def build(self, request_struct_class: Any) -> Any:
        """For aiokafka."""
        return request_struct_class(*self._fields)


class _ApiVersionsResponse3(Response):  # type: ignore[misc] # as above
    API_KEY = 18
    API_VERSION = 3
    SCHEMA = Schema(
        ("error_code", Int16),
        (
            "api_versions",
            CompactArray(("api_key", Int16), ("min_version", Int16), ("max_version", Int16), ("tags", TaggedFields)),
        ),
        ("throttle_time_ms", Int32),
        ("tags", TaggedFields),
    )


class _ApiVersionsRequest3(RequestStruct):  # type: ignore[misc] # as above
    API_KEY = 18
    API_VERSION = 3
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _ApiVersionsResponse3
    SCHEMA = Schema(
        ("client_software_name", CompactString("utf-8")),
        ("client_software_version", CompactString("utf-8")),
        ("tags", TaggedFields),
    )

    def parse_response_header(self, read_buffer: BytesIO | bytes) -> Any:
        """Of the first version, always: who asks does not know yet what the broker speaks."""
        return ResponseHeader_v0.decode(read_buffer)


class AskFeatures(Request[_ApiVersionsRequest3]):  # type: ignore[misc] # as above
    """What the brokers of a cluster have agreed on."""

    API_KEY = 18

    def build(self, request_struct_class: Any) -> Any:
        """For aiokafka."""
        return request_struct_class(_NAME, _SOFTWARE_VERSION, {})


_FINALIZED_FEATURES = CompactArray(
    ("name", CompactString("utf-8")), ("max_version", Int16), ("min_version", Int16), ("tags", TaggedFields)
)


def transaction_version_of(response: Any) -> int:
    """Of the answer to AskFeatures; 0 where the cluster names none."""
    found = response.tags.get(_FINALIZED_FEATURES_TAG)
    features = [] if found is None else _FINALIZED_FEATURES.decode(BytesIO(found)) or []
    return max((level for name, level, *_ in features if name == _TRANSACTION_VERSION), default=0)

"""AppendRecords and its answer by hand: they stand in every push, the others once a connection.

The same dictionaries and objects as `structs.serializer_of` makes, without its calls per field
(benchmarks/protocol.py).
"""

from typing import Any

from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.push_messages import (
    AppendRecordsPartition,
    AppendRecordsRequest,
    AppendRecordsResponse,
    WireAppendRecordsResult,
    WireGrant,
)
from pushrep.wire.structs import (
    Bodies,
    BodyCursor,
    Datum,
    StructSerializer,
    no_body,
    partition_datum,
    partition_of,
    serializer_of,
)
from pushrep.wire.values import Struct, size_of

_CODES = {int(code): code for code in ErrorCode}
_GRANT = serializer_of(WireGrant)


def _request_to_datum(request: AppendRecordsRequest, bodies: Bodies) -> Datum:
    partitions = []
    for part in request.partitions:
        records = part.records
        bodies.append(records)
        partitions.append(
            {
                "tp": partition_datum(part.tp),
                "leader_epoch": part.leader_epoch,
                "replica_epoch": part.replica_epoch,
                "session_id": part.session_id,
                "append_offset": part.append_offset,
                "previous_epoch": part.previous_epoch,
                "epoch_start_offset": part.epoch_start_offset,
                "high_watermark": part.high_watermark,
                "log_start_offset": part.log_start_offset,
                "flush_wanted": part.flush_wanted,
                "restart": part.restart,
                "end_session_reason": part.end_session_reason,
                "cleaned_offset": part.cleaned_offset,
                "generation": part.generation,
                "records_bytes": size_of(records) if records else 0,
            }
        )
    return {"partitions": partitions}


def _request_from_datum(datum: Datum, body: BodyCursor) -> AppendRecordsRequest:
    partitions = []
    for part in datum["partitions"]:
        tp = part["tp"]
        part["tp"] = partition_of(tp["topic_id"], tp["topic"], tp["partition"])
        part["records"] = body.read(part.pop("records_bytes"))
        partitions.append(AppendRecordsPartition(**part))
    return AppendRecordsRequest(partitions=tuple(partitions))


def _request_body_bytes(datum: Any) -> int:
    size = 0
    for part in datum["partitions"]:
        records_bytes = part["records_bytes"]
        if records_bytes < 0:
            raise ValueError(f"records_bytes is {records_bytes}")
        size += records_bytes
    return size


def _response_to_datum(response: AppendRecordsResponse, bodies: Bodies) -> Datum:
    return {
        "error_code": int(response.error_code),
        "results": [
            {
                "error_code": int(result.error_code),
                "log_end_offset": result.log_end_offset,
                "log_start_offset": result.log_start_offset,
                "flushed_offset": result.flushed_offset,
                "grant_epoch": result.grant_epoch,
                "grant_leader": result.grant_leader,
                "epoch": result.epoch,
                "epoch_end_offset": result.epoch_end_offset,
                "generation": result.generation,
            }
            for result in response.results
        ],
        "grants": [_GRANT.to_datum(grant, bodies) for grant in response.grants],
    }


def _response_from_datum(datum: Datum, body: BodyCursor) -> AppendRecordsResponse:
    results = []
    for result in datum["results"]:
        result["error_code"] = _CODES.get(result["error_code"], ErrorCode.UNKNOWN_SERVER_ERROR)
        results.append(WireAppendRecordsResult(**result))
    return AppendRecordsResponse(
        error_code=_CODES.get(datum["error_code"], ErrorCode.UNKNOWN_SERVER_ERROR),
        results=tuple(results),
        grants=tuple(_GRANT.from_datum(grant, body) for grant in datum["grants"]),
    )


FAST_SERIALIZERS: dict[type[Struct], StructSerializer] = {
    AppendRecordsRequest: StructSerializer(_request_to_datum, _request_from_datum, _request_body_bytes),
    AppendRecordsResponse: StructSerializer(_response_to_datum, _response_from_datum, no_body),
}

"""Which calls there are: a key, the request and its answer, and the events that belong to it.

A key is never given a second meaning. Credit, ReplayData, ReplayEnd and DeleteDone are events, with keys of their own.
"""

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType

from pushrep.wire import push_messages as push
from pushrep.wire import replay_messages as replay
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.frames import FrameKind
from pushrep.wire.values import Response, Struct


class ApiKey(IntEnum):
    """The numbers of the calls."""

    API_VERSIONS = 0
    DESCRIBE_LOG = 1
    APPEND_RECORDS = 2
    END_OFFSET_FOR_EPOCH = 3
    GRANT = 4
    FETCH_RECORDS = 5
    LIST_LOGS = 6
    BEAT = 7
    DESCRIBE_DAMAGE = 8
    REPAIR_RECORDS = 9
    DESCRIBE_NODE = 10
    START_REPLAY = 20
    ATTACH = 21
    CREDIT = 22
    REPLAY_DATA = 23
    REPLAY_END = 24
    STOP_REPLAY = 25
    DESCRIBE_RECORDINGS = 26
    EXTEND = 27
    TRUNCATE = 28
    PURGE = 29
    DELETE = 30
    DELETE_DONE = 31


def _call(request: type[Struct], response: type[Struct]) -> Mapping[FrameKind, type[Struct]]:
    return {FrameKind.REQUEST: request, FrameKind.RESPONSE: response}


def _event(event: type[Struct]) -> Mapping[FrameKind, type[Struct]]:
    return {FrameKind.EVENT: event}


CALLS: Mapping[ApiKey, Mapping[FrameKind, type[Struct]]] = MappingProxyType(
    {
        ApiKey.API_VERSIONS: _call(push.ApiVersionsRequest, push.ApiVersionsResponse),
        ApiKey.DESCRIBE_LOG: _call(push.DescribeLogRequest, push.DescribeLogResponse),
        ApiKey.APPEND_RECORDS: _call(push.AppendRecordsRequest, push.AppendRecordsResponse),
        ApiKey.END_OFFSET_FOR_EPOCH: _call(push.EndOffsetForEpochRequest, push.EndOffsetForEpochResponse),
        ApiKey.GRANT: _call(push.GrantRequest, push.GrantResponse),
        ApiKey.FETCH_RECORDS: _call(push.FetchRecordsRequest, push.FetchRecordsResponse),
        ApiKey.LIST_LOGS: _call(push.ListLogsRequest, push.ListLogsResponse),
        ApiKey.BEAT: _call(push.BeatRequest, push.BeatResponse),
        ApiKey.DESCRIBE_DAMAGE: _call(push.DescribeDamageRequest, push.DescribeDamageResponse),
        ApiKey.REPAIR_RECORDS: _call(push.RepairRecordsRequest, push.RepairRecordsResponse),
        ApiKey.DESCRIBE_NODE: _call(push.DescribeNodeRequest, push.DescribeNodeResponse),
        ApiKey.START_REPLAY: _call(replay.StartReplayRequest, replay.StartReplayResponse),
        ApiKey.ATTACH: _call(replay.AttachRequest, replay.AttachResponse),
        ApiKey.CREDIT: _event(replay.Credit),
        ApiKey.REPLAY_DATA: _event(replay.ReplayData),
        ApiKey.REPLAY_END: _event(replay.ReplayEnd),
        ApiKey.STOP_REPLAY: _call(replay.StopReplayRequest, replay.StopReplayResponse),
        ApiKey.DESCRIBE_RECORDINGS: _call(replay.DescribeRecordingsRequest, replay.DescribeRecordingsResponse),
        ApiKey.EXTEND: _call(replay.ExtendRequest, replay.ExtendResponse),
        ApiKey.TRUNCATE: _call(replay.TruncateRequest, replay.TruncateResponse),
        ApiKey.PURGE: _call(replay.PurgeRequest, replay.PurgeResponse),
        ApiKey.DELETE: _call(replay.DeleteRequest, replay.DeleteResponse),
        ApiKey.DELETE_DONE: _event(replay.DeleteDone),
    }
)
"""Every key and its classes, by kind of frame."""
assert CALLS.keys() == set(ApiKey), "every key has its classes"


def refusal(key: ApiKey, code: ErrorCode, why: str = "") -> Struct:
    """The answer to a call that is refused; `why` is left out where the answer has no place for it."""
    response = CALLS[key][FrameKind.RESPONSE]
    if issubclass(response, Response):
        return response(error_code=code, error_message=why)
    return response(error_code=code)  # type: ignore[call-arg]  # every response has one


CALL_OF_EVENT: Mapping[ApiKey, ApiKey] = MappingProxyType(
    {
        ApiKey.CREDIT: ApiKey.ATTACH,
        ApiKey.REPLAY_DATA: ApiKey.ATTACH,
        ApiKey.REPLAY_END: ApiKey.ATTACH,
        ApiKey.DELETE_DONE: ApiKey.DELETE,
    }
)
"""The call that an event belongs to: it follows its answer, under its correlation id and in its version."""
assert CALL_OF_EVENT.keys() == {key for key, call in CALLS.items() if FrameKind.EVENT in call}, (
    "every event has its call"
)

CALLS_WITH_EVENTS = frozenset(CALL_OF_EVENT.values())
"""After their answer, if it says no error, events may follow."""

HOLES_SINCE = 1
"""From this version of APPEND_RECORDS, FETCH_RECORDS and ATTACH on, what Kafka's cleaner took is announced."""

LAST_EVENTS = frozenset({ApiKey.REPLAY_END, ApiKey.DELETE_DONE})
"""After one of these no other event follows."""

EVENTS_OF_CLIENTS = frozenset({ApiKey.CREDIT})
"""The only events that a client sends."""

PLACE_OF: Mapping[type[Struct], tuple[ApiKey, FrameKind]] = MappingProxyType(
    {struct: (key, kind) for key, call in CALLS.items() for kind, struct in call.items()}
)
"""Where a class stands in the table."""

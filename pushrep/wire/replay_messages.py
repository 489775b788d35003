"""The calls of record and replay, newest version of each; their bytes stand in schemas/ and docs/internals/formats/.

    StartReplay          make a session                          Attach     be its subscriber, with credit
    Credit        →      more bytes may come (an event, no answer)
    ReplayData    ←      whole batches, or none: a heartbeat     ReplayEnd ← the end, once
    StopReplay           end one session, or all of a recording
    DescribeRecordings   the catalogue
    Extend Truncate Purge Delete                                 DeleteDone ← the files are gone

An event is a frame without an answer. It has the correlation id of its call: Credit, ReplayData and ReplayEnd that of
their Attach, DeleteDone that of its Delete.
"""

from dataclasses import dataclass
from enum import IntEnum
from uuid import UUID

from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.values import (
    Counter,
    CounterOrNone,
    Epoch,
    EpochOrNone,
    Long,
    Offset,
    OffsetOrNone,
    Records,
    Response,
    Struct,
    TimeMs,
)


class PositionKind(IntEnum):
    """The kind of `StartReplayRequest.position`."""

    LOG_START = 0
    OFFSET = 1
    TIMESTAMP_MS = 2


class LengthKind(IntEnum):
    """How far a replay goes; RECORDS: `StartReplayRequest.length` of them, exactly."""

    FOLLOW = 0
    TO_END = 1
    RECORDS = 2


class RecordingState(IntEnum):
    """DELETED is set before the files are removed; INVALID: they can't be read."""

    VALID = 0
    INVALID = 1
    DELETED = 2


class ReplayEndReason(IntEnum):
    """Why a session ended. ERROR: see `ReplayEnd.error_code`."""

    LIMIT_REACHED = 0
    STOPPED = 1
    SUBSCRIBER_GONE = 2
    RECORDING_DELETED = 3
    TRUNCATED = 4
    LEASE_BROKEN = 5
    ERROR = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class StartReplayRequest(Struct):
    """`bound`: stable, high_watermark, flushed, written, or a counter's name. `max_bytes_per_s`: 0 is no limit.

    `epoch_before`: for a resuming reader, the epoch of the record before its position, -1 if it is unknown.
    """

    recording_id: Counter
    position_kind: PositionKind = PositionKind.LOG_START
    position: Long = 0
    length_kind: LengthKind = LengthKind.FOLLOW
    length: Counter = 0
    bound: str = "stable"
    max_bytes_per_s: Counter = 0
    epoch_before: EpochOrNone = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class StartReplayResponse(Response):
    """A refusal of a position has the range: [`log_start_offset`, `end_offset`]; for damage there, its segment. All 64
    bits of the id are needed.
    """

    session_id: Long = 0
    start_offset: OffsetOrNone = -1
    log_start_offset: OffsetOrNone = -1
    end_offset: OffsetOrNone = -1
    segment: OffsetOrNone = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachRequest(Struct):
    """Subscribe to the session; `credit_bytes` is the first credit."""

    session_id: Long
    credit_bytes: Counter


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachResponse(Response):
    """Without an error, ReplayData follows under the same correlation id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit(Struct):
    """Adds `bytes` to the session's credit. A subscriber pauses by sending none."""

    session_id: Long
    bytes: Counter


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayData(Struct):
    """Whole batches; the reader checks the CRCs, and drops records below `start_offset` and from `end_offset` on.

    `tip_offset`: the end of readable records when this was sent. Without records it is a heartbeat.
    """

    session_id: Long
    start_offset: Offset
    end_offset: Offset
    tip_offset: Offset
    records: Records = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayEnd(Struct):
    """The session ended at `offset`. `segment`: base offset of the segment with the error, -1 without one."""

    session_id: Long
    reason: ReplayEndReason
    offset: Offset
    error_code: ErrorCode = ErrorCode.NONE
    error_message: str = ""
    leader_epoch: EpochOrNone = -1
    segment: OffsetOrNone = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class StopReplayRequest(Struct):
    """Ends all sessions of `recording_id`, or if that is -1 the session `session_id`."""

    session_id: Long = 0
    recording_id: CounterOrNone = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class StopReplayResponse(Struct):
    """How many sessions it ended; 0 is fine."""

    error_code: ErrorCode = ErrorCode.NONE
    stopped: Counter = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeRecordingsRequest(Struct):
    """At most `limit` recordings with an id of `from_recording_id` or above; `topic` empty: of every topic."""

    from_recording_id: Counter = 0
    limit: Counter = 1000
    topic: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording(Struct):
    """One entry of the catalogue. `stop_offset`: -1 while it is written. `damaged_from`: -1 without known damage.
    `invalid`: why it is INVALID. `origin`: the recording of another node that it is a copy of.
    """

    recording_id: Counter
    outbox_id: UUID
    tp: TopicIdPartition
    start_offset: Offset
    stop_offset: OffsetOrNone
    tip_offset: Offset
    created_ms: TimeMs
    state: RecordingState
    damaged_from: OffsetOrNone = -1
    invalid: str = ""
    origin: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeRecordingsResponse(Response):
    """By ascending id. `has_more`: ask again from the last id + 1."""

    recordings: tuple[Recording, ...] = ()
    has_more: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendRequest(Struct):
    """Let a stopped recording go on at its end, under a higher epoch."""

    recording_id: Counter
    leader_epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendResponse(Response):
    """Where it goes on."""

    end_offset: OffsetOrNone = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncateRequest(Struct):
    """Cut at `offset`; sessions above it end first. `keep`: set aside what is cut, else it is erased."""

    recording_id: Counter
    offset: Offset
    keep: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncateResponse(Response):
    """The end after the cut."""

    end_offset: OffsetOrNone = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgeRequest(Struct):
    """Remove whole segments below `before_offset`."""

    recording_id: Counter
    before_offset: Offset


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgeResponse(Response):
    """Where the recording begins now."""

    log_start_offset: OffsetOrNone = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteRequest(Struct):
    """`force`: although replays run. `outbox_gone`: although a grant lists this node, if the leader is not heard."""

    recording_id: Counter
    force: bool = False
    outbox_gone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteResponse(Response):
    """Without an error it is marked DELETED, and DeleteDone follows under the same correlation id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteDone(Struct):
    """The files were removed, or why not."""

    recording_id: Counter
    error_code: ErrorCode = ErrorCode.NONE
    error_message: str = ""
    freed_bytes: Counter = 0

"""The calls between a leader and its replicas; bytes: schemas/ and docs/internals/formats/.

    ApiVersions        what do you speak?
    DescribeLog        where do your logs end, and who leads? may create them
    AppendRecords      record batches and watermarks of many partitions
    EndOffsetForEpoch  where did an epoch end in your log? (to find where two logs parted)
    Grant              this member leads from now on
    FetchRecords       whole batches from your log, for a new leader and for repair
    ListLogs           which logs do you keep?
    Beat               this leader is alive, or leads no more
    DescribeDamage     which sealed segments has your scrub found damaged?
    RepairRecords      whole batches for one of them, from where you asked; what do you want next?
    DescribeNode       what are you doing, and what is wrong with you?

All fields of answers except the error have defaults, so that a refusal is `AppendRecordsResponse(error_code=...)`. An
error of the whole request is in the answer, one of a partition is beside that partition.
"""

from dataclasses import dataclass
from typing import TypeAlias
from uuid import UUID

from pushrep.election.epochs import LogEnds
from pushrep.election.grants import Grant
from pushrep.election.messages import AppendRecordsPartition
from pushrep.records.leader_epochs import LeaderEpochs
from pushrep.topic_id_partition import TopicIdPartition
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.values import (
    Count,
    Counter,
    CounterOrNone,
    Epoch,
    EpochOrNone,
    MemberIndex,
    MemberIndexOrNone,
    Offset,
    OffsetOrNone,
    Records,
    Response,
    Struct,
)

NO_OUTBOX = UUID(int=0)
Tps: TypeAlias = tuple[TopicIdPartition, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiVersionsRequest(Struct):
    """The first request of a connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiVersion(Struct):
    """One call and the versions that are spoken of it, both ends in."""

    api_key: Count
    min_version: Count
    max_version: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiVersionsResponse(Struct):
    """All calls and their versions. With UNSUPPORTED_VERSION it is in version 0, which any caller can read."""

    error_code: ErrorCode = ErrorCode.NONE
    api_versions: tuple[ApiVersion, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochStart(Struct):
    """A leader epoch and its first offset in a log."""

    epoch: Epoch
    start_offset: Offset


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeLogRequest(Struct):
    """`partitions` empty: all of the outbox. `member`: the sender's index, -1 for one that only looks. The answer has
    as many of the first ones, in this order, as fit into a frame: ask again for the rest.
    `generation`, here and in the other calls: the newest that the sender knows.
    """

    outbox_id: UUID
    member: MemberIndexOrNone = -1
    create: bool = False
    partitions: Tps = ()
    generation: Counter = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogDescription(Struct):
    """One log of a member. `damaged_from`: first damaged offset, -1 for a whole log.

    Members are compared by (`granted_epoch`, `granted_end_offset`), the newest granted epoch in the log and its end;
    records from `ungranted_from` on were appended without a grant, -1 if there are none.
    """

    tp: TopicIdPartition
    error_code: ErrorCode = ErrorCode.NONE
    log_end_offset: Offset = 0
    log_start_offset: Offset = 0
    high_watermark: Offset = 0
    flushed_offset: Offset = 0
    leader_epochs: tuple[EpochStart, ...] = ()
    granted_epoch: EpochOrNone = -1
    granted_end_offset: OffsetOrNone = -1
    ungranted_from: OffsetOrNone = -1
    damaged_from: OffsetOrNone = -1

    def log_ends(self) -> LogEnds:
        """The log's ends and epochs for the rules. Raises ValueError for an invalid list of epochs."""
        epochs = LeaderEpochs(tuple((entry.epoch, entry.start_offset) for entry in self.leader_epochs))
        return LogEnds(self.log_start_offset, self.log_end_offset, epochs)


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeLogResponse(Response):
    """What a member says of itself: its index (-1 without a grant), the newest grant, the highest epoch it has seen.

    `error_message` without an error: why the disk took nothing of one of these logs the last time.
    `replica_epoch` goes into every AppendRecords to it, until it restarts. `directory_id`: of what it keeps, if it has
    one. `is_unfilled`: it had no grant when it stored its first, and has not been given everything since.
    `contact_age_ms`: how long ago the leader by that grant was in contact, by the node's monotonic clock, no longer
    than the node runs; -1 if that leader said that it leads no more, or is this very member.
    """

    replica_epoch: Counter = 0
    member: MemberIndexOrNone = -1
    highest_epoch: EpochOrNone = -1
    grants: tuple[Grant, ...] = ()
    logs: tuple[LogDescription, ...] = ()
    directory_id: UUID | None = None
    is_unfilled: bool = False
    generation: Counter = 0
    contact_age_ms: CounterOrNone = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendRecordsRequest(Struct):
    """Record batches of many partitions for one replica. A partition stands in it once."""

    partitions: tuple[AppendRecordsPartition, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendRecordsResult(Struct):
    """One partition's answer, at the request's place. `grant_epoch`, `grant_leader`: of the newest grant; -1: none.

    `generation`: of that grant, 0 without one. With LOG_DIVERGED, `epoch` is the replica's largest at or below
    `previous_epoch`, `epoch_end_offset` its end; -1 and -1 say that the log waits for an operator.
    """

    error_code: ErrorCode = ErrorCode.NONE
    log_end_offset: Offset = 0
    log_start_offset: Offset = 0
    flushed_offset: Offset = 0
    grant_epoch: EpochOrNone = -1
    grant_leader: MemberIndexOrNone = -1
    epoch: EpochOrNone = -1
    epoch_end_offset: OffsetOrNone = -1
    generation: Counter = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendRecordsResponse(Struct):
    """A result for each partition, in the request's order; `grants`: those that the sender may not know."""

    error_code: ErrorCode = ErrorCode.NONE
    results: tuple[AppendRecordsResult, ...] = ()
    grants: tuple[Grant, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochQuestion(Struct):
    """Where does `epoch` end in your log? `leader_epoch` is the asker's own."""

    tp: TopicIdPartition
    leader_epoch: EpochOrNone
    epoch: EpochOrNone


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOffsetForEpochRequest(Struct):
    """Kafka's OffsetForLeaderEpoch, asked by the leader of its replica."""

    partitions: tuple[EpochQuestion, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WireEpochEnd(Struct):
    """The largest epoch at or below the one asked for, and where it ends; -1 and -1 where nothing is known.

    Not the rules' EpochEnd (election/epochs.py): one question of many may be refused, so an answer has an error, and
    two ends that are compared must not have one.
    """

    error_code: ErrorCode = ErrorCode.NONE
    epoch: EpochOrNone = -1
    end_offset: OffsetOrNone = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOffsetForEpochResponse(Struct):
    """An answer for each question, in the request's order."""

    error_code: ErrorCode = ErrorCode.NONE
    results: tuple[WireEpochEnd, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantRequest(Struct):
    """Store this grant, on disk before you answer, and describe `partitions`. `sender`: the index of the one that asks.

    An outbox of many partitions asks for the rest by DescribeLog: a header has its limit. `member`: the index that the
    node is addressed as; one that is another live member already answers MEMBER_TWICE. `is_first`:
    nothing was ever acknowledged by its members, so one without a grant has lost nothing.
    """

    grant: Grant
    sender: MemberIndex
    member: MemberIndex
    partitions: Tps = ()
    is_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantResponse(Response):
    """As DescribeLogResponse; `grants` holds the newest here, which is the request's own if there is no error."""

    member: MemberIndexOrNone = -1
    highest_epoch: EpochOrNone = -1
    grants: tuple[Grant, ...] = ()
    logs: tuple[LogDescription, ...] = ()
    directory_id: UUID | None = None
    is_unfilled: bool = False
    generation: Counter = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRecordsRequest(Struct):
    """Whole batches from `offset` on, at least one if there is one, else at most `max_bytes`."""

    tp: TopicIdPartition
    grant_epoch: EpochOrNone
    offset: Offset
    max_bytes: Count
    generation: Counter = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRecordsResponse(Response):
    """The batches up to the log's end, also above the watermark; none at the end."""

    log_end_offset: Offset = 0
    log_start_offset: Offset = 0
    high_watermark: Offset = 0
    grants: tuple[Grant, ...] = ()
    generation: Counter = 0
    records: Records = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ListLogsRequest(Struct):
    """`outbox_id` zero: of every outbox."""

    outbox_id: UUID = NO_OUTBOX


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedLog(Struct):
    """A node's log. `error_code` says why it is offline."""

    outbox_id: UUID
    tp: TopicIdPartition
    error_code: ErrorCode = ErrorCode.NONE
    log_end_offset: Offset = 0
    log_start_offset: Offset = 0
    high_watermark: Offset = 0
    leader_epoch: EpochOrNone = -1
    size_bytes: Counter = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ListLogsResponse(Response):
    """Every log, by outbox, topic and partition."""

    logs: tuple[ListedLog, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BeatRequest(Struct):
    """A heartbeat, once a second on each connection of a leader. `is_last`: it leads no more, and `successor` is the
    member that it hands the lead over to, -1: none.
    """

    outbox_id: UUID
    leader: MemberIndex
    leader_epoch: Epoch
    is_last: bool = False
    generation: Counter = 0
    successor: MemberIndexOrNone = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class BeatResponse(Response):
    """FENCED_LEADER_EPOCH where a newer grant is kept; `grant_epoch`, `grant_leader`: of the newest one, -1: none.
    `stands_by`: a service stands by there that could lead now.
    """

    grant_epoch: EpochOrNone = -1
    grant_leader: MemberIndexOrNone = -1
    generation: Counter = 0
    stands_by: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeDamageRequest(Struct):
    """Asks for the damage of all logs of an outbox that are in use."""

    outbox_id: UUID


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedSegment(Struct):
    """A sealed segment of [base_offset, end_offset) whose batches are not whole, or not the sealed ones, from `offset`
    on.
    """

    tp: TopicIdPartition
    base_offset: Offset
    offset: Offset
    end_offset: Offset
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeDamageResponse(Response):
    """The known damaged segments, by log and base offset; as many of the first ones as fit into a frame."""

    segments: tuple[DamagedSegment, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairRecordsRequest(Struct):
    """For the damaged segment that begins at `base_offset`: whole batches from the last wanted offset on; none in the
    first request. Only the leader by the newest grant may send it.
    """

    outbox_id: UUID
    tp: TopicIdPartition
    grant_epoch: EpochOrNone
    base_offset: Offset
    generation: Counter = 0
    records: Records = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairRecordsResponse(Response):
    """`wanted_offset`: from where batches are needed next; -1: the segment is repaired."""

    wanted_offset: OffsetOrNone = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeNodeRequest(Struct):
    """Asks for the node's status, for an operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeNodeResponse(Response):
    """`status`: the JSON object that the node answers on its control socket, without `logs`: ListLogs answers them. The
    first thousand items of each list, or fewer. Fields are added to it, and never renamed.
    """

    status: str = ""

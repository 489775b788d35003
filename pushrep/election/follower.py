"""What a replica does with an AppendRecords: checks in order, then a row of a table, chosen by comparing the logs.

    checks      generation · offline? member? epoch (own above: fenced; own below: taken) · replica epoch, session
                bytes · offsets
    finding     where the request's records are relative to the log, and whether the records before them are the same
    row         the answer, what is cut, what is appended: FOLLOWER_RULES, one row for each finding
    effects     what the caller does, in this order, each on disk before the next where its name promises it

       own log      1 1 1 3 3 3               request at 3, previous epoch 1, records of epoch 4
                          ^ 3: the epoch before it is the same, the batch there is of another epoch: cut, append
       verified     1 1 1 4 4                 up to the request's end the logs are equal

Above the verified offset the log may hold an older leader's records, so neither the high watermark nor the leader's
count goes there. Once an epoch's start is verified, the epoch is in the log's list (BeginEpoch) even without a record:
else a candidate with an older, longer log would count as ahead (Raft's figure 8).

Where a request's records lie against a replica's log (`find`):

                                          own log      [log start ............ LEO)
append offset > LEO                       a gap        |                          |      ^
epoch before it is another                diverged     |          x ^             |
the same before, from there on equal      (resend)     |            ^ = = = = = = |+ + + +
the same before, another batch there      differs      |            ^ = = ≠       |

Each effect ends before the next begins; "durably" means on disk by then, whatever the durability of records.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum, auto
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from pushrep.election.epochs import NO_EPOCH, LogEnds, Unfenced, without_unfenced
from pushrep.election.grants import EPOCH_JUMP_MAX, Grant, are_rivals, owner_of
from pushrep.election.messages import NOT_ENDED, AppendRecordsPartition, Batch, PushSessionEndReason
from pushrep.records.leader_epochs import LeaderEpochs
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.push_messages import AppendRecordsResult


class RequestFinding(Enum):
    """The results of the comparison: exactly one for every request that passed the checks."""

    __hash__ = object.__hash__  # Enum's own hashes the name in Python, at every look-up

    FITS = auto()
    """At or below LEO; the logs are the same before it, and from there on as far as this log goes."""
    DIVERGED_BEFORE = auto()
    """Another epoch before the append offset."""
    OTHER_EPOCH = auto()
    """A batch of another epoch at or after the append offset, not below the high watermark."""
    OTHER_EPOCH_BELOW_WATERMARK = auto()
    OTHER_BYTES = auto()
    """The same epoch, another batch: one epoch had two leaders, or a disk lied. It must not happen."""
    GAP = auto()
    """Above LEO."""
    BELOW_START = auto()
    """Below the log's own start, where nothing can be compared."""
    RESTART = auto()
    """Nothing in common, and the leader's log begins at the append offset."""
    RESTART_BELOW_WATERMARK = auto()


class CutAt(Enum):
    """What is cut from the log before the append."""

    NOTHING = auto()
    AT_DIFFERENCE = auto()
    """From the first batch that differs on; checkpoints first, then the log, then fsync."""
    ALL = auto()
    """The log is moved aside as `.stale` and begins anew at the append offset."""


class FindingRule(NamedTuple):
    """A row. accepts: records and watermarks are accepted. is_offline: from now on the log waits for an operator."""

    error: ErrorCode
    accepts: bool = False
    cut: CutAt = CutAt.NOTHING
    is_offline: bool = False


FOLLOWER_RULES: Mapping[RequestFinding, FindingRule] = MappingProxyType(
    {
        RequestFinding.FITS: FindingRule(ErrorCode.NONE, accepts=True),
        RequestFinding.DIVERGED_BEFORE: FindingRule(ErrorCode.LOG_DIVERGED),
        RequestFinding.OTHER_EPOCH: FindingRule(ErrorCode.NONE, accepts=True, cut=CutAt.AT_DIFFERENCE),
        RequestFinding.OTHER_EPOCH_BELOW_WATERMARK: FindingRule(ErrorCode.LOG_DIVERGED, is_offline=True),
        RequestFinding.OTHER_BYTES: FindingRule(ErrorCode.LOG_DIVERGED, is_offline=True),
        RequestFinding.GAP: FindingRule(ErrorCode.OFFSET_OUT_OF_RANGE),
        RequestFinding.BELOW_START: FindingRule(ErrorCode.OFFSET_OUT_OF_RANGE),
        RequestFinding.RESTART: FindingRule(ErrorCode.NONE, accepts=True, cut=CutAt.ALL),
        RequestFinding.RESTART_BELOW_WATERMARK: FindingRule(ErrorCode.LOG_DIVERGED, is_offline=True),
    }
)
assert FOLLOWER_RULES.keys() == set(RequestFinding), "every finding has a row"


class Found(NamedTuple):
    """at: the first offset that differs, if the finding has one."""

    finding: RequestFinding
    at: int = -1


def find(
    log: LogEnds,
    high_watermark: int,
    request: AppendRecordsPartition,
    batch_at: Callable[[int], bytes | memoryview | None],
) -> Found:
    """Compare the request with the log. `batch_at` is called only for batches that the request overlaps."""
    place = _before(log, request)
    if place is None:
        return _from_there_on(log, high_watermark, request, batch_at)
    # BELOW_START: this log starts higher than the leader knows, because its start rose since.
    if request.restart and place is not RequestFinding.BELOW_START:
        # The leader's log has nothing before the append offset to compare, so the batch there decides: an epoch has one
        # history. Moving a log aside that continues like the leader's would lose what it has acknowledged.
        at = request.append_offset
        if at < log.log_end_offset and log.leader_epochs.epoch_of(at) == request.epoch_at_append_offset:
            return _from_there_on(log, high_watermark, request, batch_at)
        is_above = request.append_offset >= high_watermark
        return Found(RequestFinding.RESTART if is_above else RequestFinding.RESTART_BELOW_WATERMARK)
    return Found(place)


def _before(log: LogEnds, request: AppendRecordsPartition) -> RequestFinding | None:
    """The finding before the append offset; None if the logs are the same before it."""
    offset = request.append_offset
    if offset > log.log_end_offset:
        return RequestFinding.GAP
    if offset < log.log_start_offset:
        return RequestFinding.BELOW_START
    # At its own start a log has nothing to compare. Records before it were below a high watermark, which every later
    # leader holds, so they can't differ.
    if offset > log.log_start_offset and log.epoch_before(offset) != request.previous_epoch:
        return RequestFinding.DIVERGED_BEFORE
    return None


def _from_there_on(
    log: LogEnds,
    high_watermark: int,
    request: AppendRecordsPartition,
    batch_at: Callable[[int], bytes | memoryview | None],
) -> Found:
    """The finding from the append offset on: the first difference between the request's batches and the log."""
    for batch in request.batches:
        if batch.base_offset >= log.log_end_offset:
            return Found(RequestFinding.FITS)
        if log.leader_epochs.epoch_of(batch.base_offset) not in {batch.leader_epoch, NO_EPOCH}:
            return _other_epoch(batch.base_offset, high_watermark)
        if batch_at(batch.base_offset) != batch.data:
            return Found(RequestFinding.OTHER_BYTES, batch.base_offset)
    end = request.end_offset
    # The epoch's leader wrote everything from the epoch's start on, so a rest of another epoch is not part of its log.
    is_rest_foreign = end < log.log_end_offset and log.leader_epochs.epoch_of(end) != request.leader_epoch
    if end >= request.epoch_start_offset and is_rest_foreign:
        return _other_epoch(end, high_watermark)
    return Found(RequestFinding.FITS)


def _other_epoch(offset: int, high_watermark: int) -> Found:
    if offset >= high_watermark:
        return Found(RequestFinding.OTHER_EPOCH, offset)
    return Found(RequestFinding.OTHER_EPOCH_BELOW_WATERMARK, offset)


class ReplicaSession(NamedTuple):
    """The newest push session that a replica has seen. is_over: its leader ended it."""

    leader_epoch: int
    session_id: int
    is_over: bool = False


NO_SESSION = ReplicaSession(-1, -1)


class StoreEpoch(NamedTuple):
    """Durably: refuse older leaders from now on. Also for a candidate's own epoch."""

    leader_epoch: int


class StoreGrant(NamedTuple):
    """Durably: the newest grant is this one."""

    grant: Grant


class OpenSession(NamedTuple):
    """The newest push session is this one."""

    session: ReplicaSession


class SetUnfencedAside(NamedTuple):
    """Durably: cut the records appended without a grant into `.cut`, and report them; the log is `log` then."""

    log: LogEnds


class Truncate(NamedTuple):
    """Durably: lower the checkpoints, then cut the log at `offset`.

    An epoch that starts at `offset` stays in the list of epochs.
    """

    offset: int


class SetAside(NamedTuple):
    """Durably: move the log aside as `.stale`, and begin an empty one whose start and watermark are `offset`.

    leader_epoch: the first epoch in the new log's list, from `offset` on: everything below existed when that epoch
    began. Without the entry the log would seem to be behind every other log after a crash.
    """

    offset: int
    leader_epoch: int


class Append(NamedTuple):
    """Append these batches unchanged."""

    batches: tuple[Batch, ...]


class BeginEpoch(NamedTuple):
    """Durably: add the epoch to the log's list, whether or not it has a record yet."""

    leader_epoch: int
    start_offset: int


class Flush(NamedTuple):
    """Bring everything appended to disk."""


class SetHighWatermark(NamedTuple):
    """Set the high watermark, checkpointed later; it only rises, except by a cut or a log moved aside."""

    high_watermark: int


class SetLogStart(NamedTuple):
    """Records below may be removed."""

    log_start_offset: int


class CloseSession(NamedTuple):
    """The leader ended its session: accept nothing more of it."""

    reason: PushSessionEndReason


class GoOffline(NamedTuple):
    """Take the log offline until an operator acts; the node's other logs go on."""

    finding: RequestFinding


class Answer(NamedTuple):
    """Answer the request; the last effect."""

    result: AppendRecordsResult


FollowerEffect: TypeAlias = (
    StoreEpoch
    | OpenSession
    | SetUnfencedAside
    | SetAside
    | Truncate
    | Append
    | BeginEpoch
    | Flush
    | SetHighWatermark
    | SetLogStart
    | CloseSession
    | GoOffline
    | Answer
)


BatchAt: TypeAlias = Callable[[int], bytes | memoryview | None]
"""The bytes of the batch that begins at an offset of the log; None where no batch begins."""


class ReplicaState(NamedTuple):
    """The state of one log for the rules.

    leader_epoch: the newest one accepted, without this member's own unfenced ones. replica_epoch: of this run of the
    node. unfenced: records that this member appended without a grant as leader. is_offline: the log waits for an
    operator.
    """

    log: LogEnds
    flushed_offset: int
    high_watermark: int
    leader_epoch: int
    replica_epoch: int
    grant: Grant | None = None
    session: ReplicaSession = NO_SESSION
    unfenced: Unfenced | None = None
    is_offline: bool = False

    @property
    def newest_epoch(self) -> int:
        """The newest epoch known here: older ones are refused."""
        return max(self.leader_epoch, self.grant.epoch if self.grant else -1)

    @property
    def generation(self) -> int:
        """The log's generation, which is the stored grant's: logs of an older one were moved aside."""
        return self.grant.generation if self.grant else 0


RequestCheck: TypeAlias = tuple[ErrorCode, Callable[[ReplicaState, AppendRecordsPartition], bool]]
"""A reason to refuse a request before its records are read: the answer, and whether it holds."""
LEADER_CHECKS: tuple[RequestCheck, ...] = (
    (
        ErrorCode.NOT_A_MEMBER,
        lambda state, request: state.grant is not None and owner_of(request.leader_epoch) not in state.grant.indexes,
    ),
    (ErrorCode.FENCED_LEADER_EPOCH, lambda state, request: request.leader_epoch < state.newest_epoch),
    (
        ErrorCode.IMPOSSIBLE_EPOCH,  # without a grant a jump can't be measured
        lambda state, request: state.grant is not None and request.leader_epoch - state.newest_epoch > EPOCH_JUMP_MAX,
    ),
    (ErrorCode.LOG_OFFLINE, lambda state, _: state.is_offline),
)
"""The checks of identity. After these a newer leader epoch is accepted, durably, whatever the rest of the request."""

SESSION_CHECKS: tuple[RequestCheck, ...] = (
    (ErrorCode.STALE_SESSION, lambda state, request: request.replica_epoch != state.replica_epoch),
    (ErrorCode.STALE_SESSION, lambda state, request: _is_stale(state.session, request)),
    (ErrorCode.CORRUPT_MESSAGE, lambda _, request: not request.is_whole),
    (
        ErrorCode.CORRUPT_MESSAGE,
        lambda _, request: not all(0 <= batch.leader_epoch <= request.leader_epoch for batch in request.batches),
    ),
    # No CRC covers a base offset or an epoch, so one that does not follow means a damaged header.
    (ErrorCode.CORRUPT_MESSAGE, lambda _, request: not request.joins),
    (
        ErrorCode.INVALID_REQUEST,  # a log that begins anew without records needs its epoch's start
        lambda _, request: (
            request.restart and not request.batches and request.append_offset < request.epoch_start_offset
        ),
    ),
)
"""The checks of the content. After these the comparison with the log decides."""


def _is_stale(newest: ReplicaSession, request: AppendRecordsPartition) -> bool:
    asked = (request.leader_epoch, request.session_id)
    return asked < newest[:2] or (asked == newest[:2] and newest.is_over)


def follow(
    state: ReplicaState | None, request: AppendRecordsPartition, batch_at: BatchAt
) -> tuple[FollowerEffect, ...]:
    """The effects of a request, in order; the last one is the Answer. state None: there is no such log.

    The caller carries them out one by one, durably where they say so; if one fails (disk), it stops and answers
    `storage_error`. The effects of the request before have to be done before this is called.
    """
    if state is None:
        return (Answer(AppendRecordsResult(error_code=ErrorCode.UNKNOWN_TOPIC_ID)),)
    if request.generation != state.generation:
        return (Answer(_result(state, _of_another_generation(state.generation, request.generation))),)
    error = _first_refusal(LEADER_CHECKS, state, request)
    if error is not None:
        return (Answer(_result(state, error)),)
    effects: list[FollowerEffect] = []
    if request.leader_epoch > state.leader_epoch:
        effects.append(StoreEpoch(request.leader_epoch))
    error = _first_refusal(SESSION_CHECKS, state, request)
    if error is not None:
        return (*effects, Answer(_result(state, error)))
    if (request.leader_epoch, request.session_id) > state.session[:2]:
        effects.append(OpenSession(ReplicaSession(request.leader_epoch, request.session_id)))
    log = without_unfenced(state.log, state.unfenced)
    if state.unfenced is not None:  # another has the next grant: only then is this log pushed to
        effects.append(SetUnfencedAside(log))
    found = find(log, state.high_watermark, request, batch_at)
    return (*effects, *_by_the_table(state, log, request, found))


def storage_error(state: ReplicaState) -> AppendRecordsResult:
    """The answer of a replica whose disk failed during its effects; `state`: what it holds now."""
    return _result(state, ErrorCode.KAFKA_STORAGE_ERROR)


def _first_refusal(
    checks: tuple[RequestCheck, ...], state: ReplicaState, request: AppendRecordsPartition
) -> ErrorCode | None:
    for error, refuses in checks:  # a generator would cost as much as the seven checks
        if refuses(state, request):
            return error
    return None


def _of_another_generation(kept: int, asked: int) -> ErrorCode:
    if are_rivals(kept, asked):
        return ErrorCode.INCONSISTENT_OUTBOX
    # A leader of a higher generation has to show its grant first: with it the log is moved aside.
    return ErrorCode.FENCED_LEADER_EPOCH if asked < kept else ErrorCode.STALE_SESSION


def _by_the_table(
    state: ReplicaState, log: LogEnds, request: AppendRecordsPartition, found: Found
) -> list[FollowerEffect]:
    rule = FOLLOWER_RULES[found.finding]
    if rule.is_offline:
        return [GoOffline(found.finding), Answer(_result(state, rule.error, log=log))]
    if not rule.accepts:
        answer = _result(state, rule.error, log=log)
        if found.finding is RequestFinding.DIVERGED_BEFORE:
            epoch, end_offset = log.end_at_or_below(request.previous_epoch)
            answer = replace(answer, epoch=epoch, epoch_end_offset=end_offset)
        return [Answer(answer)]
    return _accept(state, log, request, found, rule.cut)


def _accept(
    state: ReplicaState, log: LogEnds, request: AppendRecordsPartition, found: Found, cut: CutAt
) -> list[FollowerEffect]:
    """Truncate, append, begin the epoch, flush, HWM, LSO, answer: in this order."""
    effects: list[FollowerEffect] = []
    high_watermark, log_start = state.high_watermark, log.log_start_offset
    flushed = min(state.flushed_offset, log.log_end_offset)  # lower if unfenced records were cut
    if cut is CutAt.ALL:
        aside = SetAside(request.append_offset, request.epoch_at_append_offset)
        effects.append(aside)
        log = LogEnds(aside.offset, aside.offset, LeaderEpochs().assigned(aside.leader_epoch, aside.offset))
        log_start = high_watermark = flushed = request.append_offset
    elif cut is CutAt.AT_DIFFERENCE:
        effects.append(Truncate(found.at))
        log = log.cut(found.at)
        flushed = min(flushed, found.at)
    if new := tuple(batch for batch in request.batches if batch.base_offset >= log.log_end_offset):
        effects.append(Append(new))
        epochs = log.leader_epochs
        for batch in new:
            epochs = epochs.assigned(batch.leader_epoch, batch.base_offset)
        log = LogEnds(log.log_start_offset, new[-1].next_offset, epochs)
    verified = request.end_offset
    if verified >= request.epoch_start_offset and log.leader_epochs.latest_epoch < request.leader_epoch:
        effects.append(BeginEpoch(request.leader_epoch, request.epoch_start_offset))
    if request.flush_wanted and flushed < log.log_end_offset:
        effects.append(Flush())
        flushed = log.log_end_offset
    watermark = max(high_watermark, log_start, min(request.high_watermark, verified))
    if watermark > state.high_watermark:
        effects.append(SetHighWatermark(watermark))
    start = max(log_start, min(request.log_start_offset, watermark))
    if start > log_start:
        effects.append(SetLogStart(start))
        log = log._replace(log_start_offset=start)
    if request.end_session_reason != NOT_ENDED:
        effects.append(CloseSession(PushSessionEndReason(request.end_session_reason)))
    effects.append(Answer(_result(state, ErrorCode.NONE, log=log, flushed=flushed)))
    return effects


def _result(
    state: ReplicaState, error: ErrorCode, *, log: LogEnds | None = None, flushed: int | None = None
) -> AppendRecordsResult:
    log = log or state.log
    return AppendRecordsResult(
        error_code=error,
        log_end_offset=log.log_end_offset,
        log_start_offset=log.log_start_offset,
        flushed_offset=min(log.log_end_offset, state.flushed_offset if flushed is None else flushed),
        grant_epoch=state.grant.epoch if state.grant else -1,
        grant_leader=state.grant.leader if state.grant else -1,
        generation=state.generation,
    )

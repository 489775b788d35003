"""What a replica does with an AppendRecords: checks in order, then one row of a table by what it finds.

    checks      generation · offline? member? epoch (own above: fenced; own below: taken) · replica epoch, session
                bytes · offsets
    finding     where the request's records lie against the log, and whether what is before them is the same
    row         the answer, what is cut, what is appended: FOLLOWER_RULES, one row for each finding
    effects     what the caller does, in this order, each on disk before the next where its name promises it

       own log      1 1 1 3 3 3               request at 3, previous epoch 1, records of epoch 4
                          ^ 3: the epoch before it is the same, the batch there is of another epoch: cut, append
       verified     1 1 1 4 4                 up to the request's end the logs are equal

Above what is verified the log may hold anything that an older leader left, so the high watermark never goes there, and
neither does what the leader counts. Once an epoch's start is verified, the epoch is in the log (BeginEpoch) even if no
record of it is: else a candidate with an older, longer log would pass for the one ahead (Raft's figure 8).
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from pushrep.election.effects import (
    NO_SESSION,
    Answer,
    Append,
    BeginEpoch,
    CloseSession,
    Flush,
    FollowerEffect,
    GoOffline,
    OpenSession,
    ReplicaSession,
    SetAside,
    SetHighWatermark,
    SetLogStart,
    SetUngrantedAside,
    TakeEpoch,
    Truncate,
)
from pushrep.election.epochs import LogEnds, Unfenced, without_unfenced
from pushrep.election.findings import FOLLOWER_RULES, CutAt, Found, RequestFinding, find
from pushrep.election.grants import EPOCH_JUMP_MAX, Grant, are_rivals, owner_of
from pushrep.election.messages import AppendRecords, AppendRecordsResult
from pushrep.election.outcome import Outcome
from pushrep.push_session_end_reason import NOT_ENDED, PushSessionEndReason
from pushrep.records.leader_epochs import LeaderEpochs

BatchAt: TypeAlias = Callable[[int], bytes | memoryview | None]
"""The bytes of the batch that begins at an offset of the log; None where no batch begins."""


class ReplicaState(NamedTuple):
    """Everything about one log that the rules look at.

    leader_epoch: the newest one taken, unfenced ones of its own not counted. replica_epoch: of this run of the node.
    unfenced: what this member appended without a grant when it was the leader, if anything.
    is_offline: the log waits for an operator.
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
        """Of everything older nothing is accepted."""
        return max(self.leader_epoch, self.grant.epoch if self.grant else -1)

    @property
    def generation(self) -> int:
        """Of the log, once the grant is kept: what an older one held was set aside."""
        return self.grant.generation if self.grant else 0


class RequestCheck(NamedTuple):
    """One reason to refuse a request before its records are looked at."""

    error: Outcome
    refuses: Callable[[ReplicaState, AppendRecords], bool]


LEADER_CHECKS: tuple[RequestCheck, ...] = (
    RequestCheck(
        Outcome.NOT_A_MEMBER,
        lambda state, request: state.grant is not None and owner_of(request.leader_epoch) not in state.grant.indexes,
    ),
    RequestCheck(Outcome.FENCED_LEADER_EPOCH, lambda state, request: request.leader_epoch < state.newest_epoch),
    RequestCheck(
        Outcome.IMPOSSIBLE_EPOCH,  # a log without a grant has nothing to measure a jump by
        lambda state, request: state.grant is not None and request.leader_epoch - state.newest_epoch > EPOCH_JUMP_MAX,
    ),
    RequestCheck(Outcome.LOG_OFFLINE, lambda state, _: state.is_offline),
)
"""Who speaks. After these a newer leader epoch is taken, durably, whatever the rest of the request is."""

SESSION_CHECKS: tuple[RequestCheck, ...] = (
    RequestCheck(Outcome.STALE_SESSION, lambda state, request: request.replica_epoch != state.replica_epoch),
    RequestCheck(Outcome.STALE_SESSION, lambda state, request: _is_stale(state.session, request)),
    RequestCheck(Outcome.CORRUPT_MESSAGE, lambda _, request: not request.is_whole),
    RequestCheck(
        Outcome.CORRUPT_MESSAGE,
        lambda _, request: any(batch.leader_epoch > request.leader_epoch for batch in request.batches),
    ),
    # No CRC covers a base offset or an epoch: another one than must follow is a damaged header.
    RequestCheck(Outcome.CORRUPT_MESSAGE, lambda _, request: not request.joins),
    RequestCheck(Outcome.INVALID_REQUEST, lambda _, request: _begins_without_its_epoch(request)),
)
"""What it says. After these the records' place in the log decides."""


def _is_stale(newest: ReplicaSession, request: AppendRecords) -> bool:
    asked = (request.leader_epoch, request.session_id)
    return asked < newest[:2] or (asked == newest[:2] and newest.is_over)


def _begins_without_its_epoch(request: AppendRecords) -> bool:
    """A log begins anew with its epoch."""
    return request.restart and not request.batches and request.append_offset < request.epoch_start_offset


def follow(state: ReplicaState | None, request: AppendRecords, batch_at: BatchAt) -> tuple[FollowerEffect, ...]:
    """What a replica does with `request`, in order; the last effect is its Answer. None: it keeps no such log.

    The caller carries the effects out one by one, durably where they say so; if one fails (disk), it stops there and
    answers `storage_error`. Nothing of `request` may be judged before the effects of the one before are carried out.
    """
    if state is None:
        return (Answer(AppendRecordsResult(Outcome.UNKNOWN_TOPIC_ID)),)
    if request.generation != state.generation:
        return (Answer(_result(state, _of_another_generation(state.generation, request.generation))),)
    error = _first_refusal(LEADER_CHECKS, state, request)
    if error is not None:
        return (Answer(_result(state, error)),)
    effects: list[FollowerEffect] = []
    if request.leader_epoch > state.leader_epoch:
        effects.append(TakeEpoch(request.leader_epoch))
    error = _first_refusal(SESSION_CHECKS, state, request)
    if error is not None:
        return (*effects, Answer(_result(state, error)))
    if (request.leader_epoch, request.session_id) > state.session[:2]:
        effects.append(OpenSession(ReplicaSession(request.leader_epoch, request.session_id)))
    log = without_unfenced(state.log, state.unfenced)
    if state.unfenced is not None:  # its next grant is for another: only then does anybody push to it
        effects.append(SetUngrantedAside(log))
    found = find(log, state.high_watermark, request, batch_at)
    return (*effects, *_by_the_table(state, log, request, found))


def storage_error(state: ReplicaState) -> AppendRecordsResult:
    """The answer of a replica whose disk failed in the middle of its effects: it holds what `state` says now."""
    return _result(state, Outcome.KAFKA_STORAGE_ERROR)


def _first_refusal(checks: tuple[RequestCheck, ...], state: ReplicaState, request: AppendRecords) -> Outcome | None:
    for check in checks:  # seven for every request: a generator would take as long as they do
        if check.refuses(state, request):
            return check.error
    return None


def _of_another_generation(kept: int, asked: int) -> Outcome:
    if are_rivals(kept, asked):
        return Outcome.INCONSISTENT_OUTBOX
    # Who leads by a higher one has to show its grant first: only with that the log is set aside.
    return Outcome.FENCED_LEADER_EPOCH if asked < kept else Outcome.STALE_SESSION


def _by_the_table(state: ReplicaState, log: LogEnds, request: AppendRecords, found: Found) -> list[FollowerEffect]:
    rule = FOLLOWER_RULES[found.finding]
    if rule.is_offline:
        return [GoOffline(found.finding), Answer(_result(state, rule.error, log=log))]
    if not rule.accepts:
        answer = _result(state, rule.error, log=log)
        if found.finding is RequestFinding.DIVERGED_BEFORE:
            epoch, end_offset = log.end_at_or_below(request.previous_epoch)
            answer = answer._replace(epoch=epoch, epoch_end_offset=end_offset)
        return [Answer(answer)]
    return _accept(state, log, request, found, rule.cut)


def _accept(
    state: ReplicaState, log: LogEnds, request: AppendRecords, found: Found, cut: CutAt
) -> list[FollowerEffect]:
    """Truncate, append, begin the epoch, flush, HWM, LSO, answer: in this order."""
    effects: list[FollowerEffect] = []
    high_watermark, log_start = state.high_watermark, log.log_start_offset
    flushed = min(state.flushed_offset, log.log_end_offset)  # lower if something unfenced went
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
        effects.append(Append(new, request.cleaned_offset))
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
    effects.append(Answer(_result(state, Outcome.NONE, log=log, flushed=flushed)))
    return effects


def _result(
    state: ReplicaState, error: Outcome, *, log: LogEnds | None = None, flushed: int | None = None
) -> AppendRecordsResult:
    log = log or state.log
    return AppendRecordsResult(
        error=error,
        log_end_offset=log.log_end_offset,
        log_start_offset=log.log_start_offset,
        flushed_offset=min(log.log_end_offset, state.flushed_offset if flushed is None else flushed),
        grant_epoch=state.grant.epoch if state.grant else -1,
        grant_leader=state.grant.leader if state.grant else -1,
        generation=state.generation,
    )

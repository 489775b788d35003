"""A push session on the leader's side: its states, the effect of each answer, and the replica's progress.

                   start_push          first success
        (no session) ──▶ STARTING ───────────────────▶ PUSHING ◀─┐
                          │    │ corrupt                 │  │    │ success
                          │    └────────▶ REREADING ◀────┘  │    │
                          │                 │   └───────────┼────┘
                          └──────┬──────────┴───────────────┘
                                 ▼ a final error, a newer session, stop_push
                               ENDED final

STARTING: the transition records are being sent, from the end of the common part to the leader's end. REREADING: the
replica refused a request as corrupt; the same records are read from the log and sent once more.

    log       |......... acknowledged | in flight | not sent yet ..... LEO
                                      ^ oldest    ^ next_offset

An answer verifies at most its own request: min(replica's LEO, the request's end). Above that a replica may hold an
older leader's records.
"""

from collections import deque
from collections.abc import Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import NamedTuple

from pushrep.election.epochs import EpochEnd, LogEnds, common_end, step_back
from pushrep.election.messages import PushSessionEndReason
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.push_messages import AppendRecordsResult


class SessionState(Enum):
    """Where a push session is."""

    __hash__ = object.__hash__  # Enum's own is Python: it hashes the name, for every look into a table

    STARTING = auto()
    PUSHING = auto()
    REREADING = auto()
    ENDED = auto()


MAY_BECOME: Mapping[SessionState, frozenset[SessionState]] = MappingProxyType(
    {
        SessionState.STARTING: frozenset({SessionState.PUSHING, SessionState.REREADING, SessionState.ENDED}),
        SessionState.PUSHING: frozenset({SessionState.REREADING, SessionState.ENDED}),
        SessionState.REREADING: frozenset({SessionState.PUSHING, SessionState.ENDED}),
        SessionState.ENDED: frozenset(),
    }
)
assert MAY_BECOME.keys() == set(SessionState), "every state has a row"


class Step(Enum):
    """What the leader does after an answer."""

    ADVANCE = auto()
    """Count the acknowledged records."""
    STEP_BACK = auto()
    """Go back in the epoch history and ask again."""
    GO_TO_END = auto()
    """Go on from the replica's log end offset, reading the log."""
    REREAD = auto()
    """Read the same records from the log and send them once more."""
    RESEND = auto()
    """Send the same bytes in the same order, after a pause."""
    CONTEST = auto()
    """Find out who leads."""
    END = auto()
    IGNORE = auto()


class Reaction(NamedTuple):
    """A step, and the reason if it ends the session. `is_alarm`: an operator has to know."""

    step: Step
    reason: PushSessionEndReason | None = None
    is_alarm: bool = False


_R = PushSessionEndReason
_FINAL = Reaction(Step.END, _R.NON_RETRIABLE_ERROR)
_COMMON: Mapping[ErrorCode, Reaction] = dict.fromkeys(ErrorCode, _FINAL) | {
    ErrorCode.NONE: Reaction(Step.ADVANCE),
    ErrorCode.OFFSET_OUT_OF_RANGE: Reaction(Step.GO_TO_END),
    ErrorCode.LOG_DIVERGED: Reaction(Step.STEP_BACK),
    ErrorCode.CORRUPT_MESSAGE: Reaction(Step.REREAD),
    ErrorCode.FENCED_LEADER_EPOCH: Reaction(Step.CONTEST, _R.STALE_REPLICA_EPOCH),
    ErrorCode.STALE_SESSION: Reaction(Step.END, _R.STALE_REPLICA_EPOCH),
    ErrorCode.REQUEST_TIMED_OUT: Reaction(Step.RESEND),
    ErrorCode.NODE_STOPPING: Reaction(Step.RESEND),
    ErrorCode.LOG_OFFLINE: Reaction(Step.END, _R.LOG_DIVERGED, is_alarm=True),
}
REACTIONS: Mapping[tuple[SessionState, ErrorCode], Reaction] = MappingProxyType(
    {(state, outcome): reaction for state in SessionState for outcome, reaction in _COMMON.items()}
    # The log's own records are refused: no further try.
    | {(SessionState.REREADING, ErrorCode.CORRUPT_MESSAGE): _FINAL}
    | {(SessionState.ENDED, outcome): Reaction(Step.IGNORE) for outcome in ErrorCode}
)
assert REACTIONS.keys() == {(state, outcome) for state in SessionState for outcome in ErrorCode}, "every pair has a row"
NEEDS_SOMEBODY: frozenset[ErrorCode] = frozenset(
    {outcome for outcome, reaction in _COMMON.items() if reaction is _FINAL or reaction.is_alarm}
    | {ErrorCode.CORRUPT_MESSAGE}
) - {ErrorCode.KAFKA_STORAGE_ERROR}
"""Refusals that the next session would get again until an operator acts. A full disk is none: it is looked at again."""
OPERATOR_NEEDED = Reaction(Step.END, _R.LOG_DIVERGED, is_alarm=True)
"""LOG_DIVERGED without an epoch: the replica will not go on by itself."""

BEGINS_ANEW: frozenset[PushSessionEndReason] = frozenset(PushSessionEndReason) - {
    _R.NEW_LEADER_EPOCH,
    _R.REPLICA_REMOVED,
    _R.PARTITION_DELETED,
    _R.PUSH_DISABLED,
    _R.SHUTDOWN,
}
"""After these reasons the outbox starts another session, with backoff."""


class SessionId(NamedTuple):
    """Newer identifiers win, in this order. The first request with a higher triple opens the session at the replica."""

    leader_epoch: int
    replica_epoch: int
    session_id: int


class InFlight(NamedTuple):
    """A request without an answer: its sequence number, and its records [append_offset, end_offset)."""

    sequence: int
    append_offset: int
    end_offset: int
    restart: bool


class ReplicaProgress:
    """One replica in one push session. Not thread-safe: the partition's lock is the caller's."""

    __slots__ = (
        "_in_flight",
        "_sequence",
        "acknowledged",
        "described",
        "flushed",
        "id",
        "is_live",
        "next_offset",
        "reason",
        "replica",
        "restart",
        "state",
    )

    def __init__(self, replica: int, session: SessionId, ours: LogEnds, theirs: LogEnds) -> None:
        self.replica, self.id = replica, session
        self.state = SessionState.STARTING
        self.is_live = True
        self.reason: PushSessionEndReason | None = None
        self.acknowledged: int | None = None
        """The replica holds everything below, by this session's answers; None before the first."""
        self.flushed: int | None = None
        self.restart = False
        self.next_offset = self.described = common_end(ours, theirs)
        """Below it the two logs have the same epochs, by the replica's description."""
        self._in_flight: deque[InFlight] = deque()
        self._sequence = 0
        self._aim(ours, self.next_offset)

    @property
    def in_flight(self) -> tuple[InFlight, ...]:
        """Requests without an answer, oldest first."""
        return tuple(self._in_flight)

    def sent(self, append_offset: int, end_offset: int) -> InFlight:
        """Note that the records [append_offset, end_offset) go to the wire; none if the two are equal.

        append_offset: next_offset, or the base of the batch that holds it, for a replica can end where no batch of
        ours does.
        """
        assert append_offset <= self.next_offset, (
            f"[{append_offset}, ...) would leave out what is at {self.next_offset}"
        )
        self._sequence += 1
        request = InFlight(self._sequence, append_offset, end_offset, self.restart)
        self._in_flight.append(request)
        self.next_offset, self.restart = end_offset, False
        return request

    def on_answer(self, sequence: int, result: AppendRecordsResult, ours: LogEnds) -> Reaction:
        """Handle an answer. Returns the step; IGNORE if its request was given up."""
        request = next((sent for sent in self._in_flight if sent.sequence == sequence), None)
        if request is None:
            return Reaction(Step.IGNORE)
        reaction = REACTIONS[self.state, result.error_code]
        if reaction.step is Step.STEP_BACK and result.epoch_end_offset < 0:
            reaction = OPERATOR_NEEDED
        if reaction.step is Step.ADVANCE:
            self._in_flight.remove(request)
            self._advance(request, result)
        elif reaction.step is Step.STEP_BACK:
            # Each time at least one record further back; at the log's start begin anew.
            self._aim(ours, step_back(ours, EpochEnd(result.epoch, result.epoch_end_offset)))
        elif reaction.step is Step.GO_TO_END:
            self._aim(ours, min(result.log_end_offset, ours.log_end_offset))
        elif reaction.step is Step.REREAD:
            self._become(SessionState.REREADING)
            self.resend(ours)
        elif reaction.step is Step.RESEND:
            self.resend(ours)
        elif reaction.reason is not None:
            self.end(reaction.reason)
        return reaction

    def resend(self, ours: LogEnds) -> None:
        """Send everything in flight again, in order: the connection was lost, or the replica asked to retry."""
        if self._in_flight:
            oldest = self._in_flight[0]
            self.next_offset, self.restart = oldest.append_offset, oldest.restart
            self._in_flight.clear()
        self.on_log_start(ours)

    def on_log_start(self, ours: LogEnds) -> None:
        """Records were removed here; a replica that needed some of them begins anew at the new log start."""
        if self.next_offset < ours.log_start_offset:
            self._aim(ours, ours.log_start_offset)

    def end(self, reason: PushSessionEndReason) -> bool:
        """End the session; False if it was over already."""
        if not self.is_live:
            return False
        self._become(SessionState.ENDED)
        self.reason = reason
        self._in_flight.clear()
        return True

    def verified(self, *, flushed_only: bool) -> int | None:
        """The offset up to which this session has verified the replica's records; None before the first success."""
        return self.flushed if flushed_only else self.acknowledged

    def _advance(self, request: InFlight, result: AppendRecordsResult) -> None:
        if self.state is not SessionState.PUSHING:
            self._become(SessionState.PUSHING)
        self.acknowledged = max(self.acknowledged or 0, min(result.log_end_offset, request.end_offset))
        self.flushed = max(self.flushed or 0, min(result.flushed_offset, request.end_offset))

    def _aim(self, ours: LogEnds, offset: int) -> None:
        """Go on at `offset`, giving up requests in flight. At the log's start there is nothing to compare, so begin
        anew.
        """
        self._in_flight.clear()
        self.next_offset = max(offset, ours.log_start_offset)
        self.restart = offset <= ours.log_start_offset > 0

    def _become(self, state: SessionState) -> None:
        assert state in MAY_BECOME[self.state], f"{self.state} may not become {state}"
        self.state, self.is_live = state, state is not SessionState.ENDED

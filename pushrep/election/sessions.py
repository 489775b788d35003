"""A push session as its leader sees it: states, and what each answer does to it. A table, with every pair in it.

                   start_push          first success
        (no session) ──▶ STARTING ───────────────────▶ PUSHING ◀─┐
                          │    │ corrupt                 │  │    │ success
                          │    └────────▶ REREADING ◀────┘  │    │
                          │                 │   └───────────┼────┘
                          └──────┬──────────┴───────────────┘
                                 ▼ a final error, a newer session, stop_push
                               ENDED     nothing changes it any more

STARTING: the transition records are on their way, from what the replica has in common to the leader's end.
REREADING: the replica called a request corrupt; the same records were read from the log again and sent once more.
"""

from collections.abc import Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import NamedTuple

from pushrep.election.outcome import Outcome
from pushrep.push_session_end_reason import PushSessionEndReason


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
    """What the leader does about an answer."""

    ADVANCE = auto()
    """Count what it acknowledges."""
    STEP_BACK = auto()
    """Go back in the epoch history and ask again."""
    GO_TO_END = auto()
    """Go on from the replica's log end offset, out of the log."""
    REREAD = auto()
    """Read the same records from the log and send them once more."""
    RESEND = auto()
    """The same bytes in the same order, after a pause."""
    RESIGN = auto()
    """Lead no longer."""
    END = auto()
    IGNORE = auto()


class Reaction(NamedTuple):
    """A step, and the reason if it ends the session. `is_alarm`: a person has to hear of it."""

    step: Step
    reason: PushSessionEndReason | None = None
    is_alarm: bool = False


_R = PushSessionEndReason
_FINAL = Reaction(Step.END, _R.NON_RETRIABLE_ERROR)
_COMMON: Mapping[Outcome, Reaction] = {
    Outcome.NONE: Reaction(Step.ADVANCE),
    Outcome.OFFSET_OUT_OF_RANGE: Reaction(Step.GO_TO_END),
    Outcome.LOG_DIVERGED: Reaction(Step.STEP_BACK),
    Outcome.CORRUPT_MESSAGE: Reaction(Step.REREAD),
    Outcome.FENCED_LEADER_EPOCH: Reaction(Step.RESIGN, _R.NEW_LEADER_EPOCH),
    Outcome.STALE_SESSION: Reaction(Step.END, _R.STALE_REPLICA_EPOCH),
    Outcome.REQUEST_TIMED_OUT: Reaction(Step.RESEND),
    Outcome.NODE_STOPPING: Reaction(Step.RESEND),
    Outcome.KAFKA_STORAGE_ERROR: _FINAL,
    Outcome.INVALID_REQUEST: _FINAL,
    Outcome.UNKNOWN_TOPIC_ID: _FINAL,
    Outcome.INCONSISTENT_TOPIC_ID: _FINAL,
    Outcome.NOT_A_MEMBER: _FINAL,
    Outcome.IMPOSSIBLE_EPOCH: _FINAL,
    Outcome.INCONSISTENT_OUTBOX: _FINAL,
    Outcome.LOG_OFFLINE: Reaction(Step.END, _R.LOG_DIVERGED, is_alarm=True),
    Outcome.UNKNOWN_SERVER_ERROR: _FINAL,
}
REACTIONS: Mapping[tuple[SessionState, Outcome], Reaction] = MappingProxyType(
    {(state, outcome): reaction for state in SessionState for outcome, reaction in _COMMON.items()}
    | {
        (SessionState.REREADING, Outcome.CORRUPT_MESSAGE): _FINAL
    }  # what the log itself holds is refused: once is enough
    | {(SessionState.ENDED, outcome): Reaction(Step.IGNORE) for outcome in Outcome}
)
assert REACTIONS.keys() == {(state, outcome) for state in SessionState for outcome in Outcome}, "every pair has a row"
NEEDS_SOMEBODY: frozenset[Outcome] = frozenset(
    {outcome for outcome, reaction in _COMMON.items() if reaction is _FINAL or reaction.is_alarm}
    | {Outcome.CORRUPT_MESSAGE}
) - {Outcome.KAFKA_STORAGE_ERROR}
"""Refusals that another session meets, too, until somebody does something. Of a disk the next look tells more."""
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

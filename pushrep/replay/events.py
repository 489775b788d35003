"""The events, effects and states of a replay session: values only. The session is session.py.

shell ── SegmentOpened, Turn, BlockRead, BlockSent ... ──▶ ReplaySession ──▶ ReadBlock, SendBlock, SendEnd ... ── shell

The states are a table, no flags. Drawn in docs/replay.md.

INIT ──▶ REPLAY ──▶ INACTIVE ──▶ DONE       in INACTIVE the subscriber gets the reason, once;
  └─────────────────────────────────▲       DONE follows at once where there is none (any more)

                    INIT              REPLAY       INACTIVE
SegmentOpened       . REPLAY DONE     !            .           .  stays as it is
OpenFailed          DONE              !            .           ! can't happen: AssertionError
SubscriberAttached  . REPLAY          !            .           others: what may come of it
Credited            .                 .            .
Turn                . DONE INACTIVE   . INACTIVE   . DONE      INIT: no subscriber came in time
BlockRead           !                 .            .           INACTIVE: the subscriber did not take the end in time
ReadFailed          !                 INACTIVE     .
BlockSent           !                 .            .
Stop                DONE INACTIVE     INACTIVE     .           INIT: DONE if no subscriber has attached
SubscriberGone      DONE              DONE         DONE
Deleted             DONE INACTIVE     INACTIVE     .
Truncated           . DONE INACTIVE   . INACTIVE   .           "." if nothing above the cut was reached
LeaseLost           DONE INACTIVE     INACTIVE     .
EndSent             !                 !            DONE
DONE ignores every event: results of unfinished effects may still arrive.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias, get_args

from pushrep.log.published import LogOffsets
from pushrep.replay.plan import Span
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.replay_messages import ReplayEndReason


class ReplayState(Enum):
    """The states of a session."""

    __hash__ = object.__hash__  # Enum's own is a Python function, and every event looks the table up

    INIT = auto()
    REPLAY = auto()
    INACTIVE = auto()
    DONE = auto()


# ---- events


@dataclass(frozen=True, slots=True)
class SegmentOpened:
    """The lease is held, and the batch at the position is whole and in its place.

    leader_epoch: of that batch; epoch_by_log: by the log's list of epochs (None: unknown, or the same); epoch_before:
    of the record before the position (None: it is not there). A position at the tip has no batch.
    """

    leader_epoch: int | None = None
    epoch_by_log: int | None = None
    epoch_before: int | None = None


@dataclass(frozen=True, slots=True)
class OpenFailed:
    """The position can't be read."""

    code: ErrorCode
    why: str
    segment: int | None = None


@dataclass(frozen=True, slots=True)
class SubscriberAttached:
    """The subscriber is there."""

    credit_bytes: int


@dataclass(frozen=True, slots=True)
class Credited:
    """The subscriber accepts so many bytes more."""

    credit_bytes: int


@dataclass(frozen=True, slots=True)
class Turn:
    """It is this session's turn. counter: the value of its bounding counter; None without one, or if it closed.

    facts: of a log that ends below the position, Truncated is to be told instead: where it was cut, its end does not
    say. is_live: whether a writer has the log open; False only if that was looked up.
    """

    facts: LogOffsets
    counter: int | None = None
    is_live: bool = True


@dataclass(frozen=True, slots=True)
class BlockRead:
    """The result of ReadBlock: batches in order, of which the first holds its position; none if nothing was there."""

    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """ReadBlock failed. segment: its base offset."""

    code: ErrorCode
    why: str
    segment: int | None = None


@dataclass(frozen=True, slots=True)
class BlockSent:
    """All of the last SendBlock has left."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Stopped by the subscriber, by stop_all, or because the node stops."""


@dataclass(frozen=True, slots=True)
class SubscriberGone:
    """The subscriber has disconnected."""


@dataclass(frozen=True, slots=True)
class Deleted:
    """The recording was marked DELETED."""


@dataclass(frozen=True, slots=True)
class Truncated:
    """The log was cut at `offset`; `leader_epoch` goes on from there, -1 if unknown."""

    offset: int
    leader_epoch: int = -1


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """The lease was broken: the next records may be gone."""

    why: str


@dataclass(frozen=True, slots=True)
class EndSent:
    """SendEnd has left."""


Event: TypeAlias = (
    SegmentOpened | OpenFailed | SubscriberAttached | Credited | Turn | BlockRead | ReadFailed | BlockSent | Stop
    | SubscriberGone | Deleted | Truncated | LeaseLost | EndSent
)  # fmt: skip
EVENTS: tuple[type[Event], ...] = get_args(Event)

_INIT, _REPLAY, _INACTIVE, _DONE = ReplayState
_STAYS: frozenset[ReplayState] = frozenset()
_MAY_END = frozenset({_DONE, _INACTIVE})

Cell: TypeAlias = frozenset[ReplayState] | None
"""The other states that an event may lead to; None if it can't happen."""

NEXT: Mapping[ReplayState, Mapping[type[Event], Cell]] = {
    _INIT: {
        SegmentOpened: frozenset({_REPLAY, _DONE}),
        OpenFailed: frozenset({_DONE}),
        SubscriberAttached: frozenset({_REPLAY}),
        Credited: _STAYS,
        Turn: _MAY_END,
        BlockRead: None,
        ReadFailed: None,
        BlockSent: None,
        Stop: _MAY_END,
        SubscriberGone: frozenset({_DONE}),
        Deleted: _MAY_END,
        Truncated: _MAY_END,
        LeaseLost: _MAY_END,
        EndSent: None,
    },
    _REPLAY: {
        **dict.fromkeys((SegmentOpened, OpenFailed, SubscriberAttached, EndSent)),
        **dict.fromkeys((Credited, BlockRead, BlockSent), _STAYS),
        **dict.fromkeys((Turn, ReadFailed, Stop, Deleted, Truncated, LeaseLost), frozenset({_INACTIVE})),
        SubscriberGone: frozenset({_DONE}),
    },
    _INACTIVE: dict.fromkeys(EVENTS, _STAYS) | dict.fromkeys((Turn, SubscriberGone, EndSent), frozenset({_DONE})),
    _DONE: dict.fromkeys(EVENTS, _STAYS),
}
assert NEXT.keys() == set(ReplayState)
assert all(row.keys() == set(EVENTS) for row in NEXT.values())


def impossible(state: ReplayState, event: type[Event]) -> AssertionError:
    """A bug in the code around a session, never a fault of its subscriber: the event can't happen in this state."""
    return AssertionError(f"a replay session in {state.name} can't meet {event.__name__}: the code around it is wrong")


# ---- effects


@dataclass(frozen=True, slots=True)
class Started:
    """Answer the request with the session's id."""

    position: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer the request with this error code."""

    code: ErrorCode
    why: str
    segment: int | None = None


@dataclass(frozen=True, slots=True)
class ReadBlock:
    """Read whole batches from `position` on, below `limit`, about `max_bytes`, at least one; then BlockRead."""

    position: int
    limit: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class SendBlock:
    """Send the first `spans` of the batches read, which the reader cuts to [start, end); then BlockSent."""

    start: int
    end: int
    spans: int
    size_bytes: int
    tip: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Send a heartbeat with the session's position and tip."""

    position: int
    tip: int


@dataclass(frozen=True, slots=True)
class RenewLease:
    """Renew the lease: records below `offset` are not needed any more."""

    offset: int


@dataclass(frozen=True, slots=True)
class ReleaseLease:
    """Release the lease: nothing is read any more."""


@dataclass(frozen=True, slots=True)
class SendEnd:
    """Send the end, once; then EndSent. cut_offset, leader_epoch: for TRUNCATED."""

    reason: ReplayEndReason
    offset: int
    code: ErrorCode = ErrorCode.NONE
    why: str = ""
    segment: int | None = None
    cut_offset: int | None = None
    leader_epoch: int = -1


@dataclass(frozen=True, slots=True)
class Forget:
    """The session is DONE: its slot is free."""


Effect: TypeAlias = (
    Started | Refuse | ReadBlock | SendBlock | Heartbeat | RenewLease | ReleaseLease | SendEnd | Forget
)  # fmt: skip

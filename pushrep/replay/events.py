"""The events, effects and states of a replay session: values only. The session is session.py.

shell ── SegmentOpened, Turn, BlockRead, BlockSent ... ──▶ ReplaySession ──▶ ReadBlock, SendBlock, SendEnd ... ── shell

The states are a table, no flags. Drawn in docs/replay.md.

INIT ──▶ REPLAY ──▶ INACTIVE ──▶ DONE       in INACTIVE the subscriber gets the reason, once;
  └─────────────────────────────────▲       DONE follows at once where there is none (any more)

                 INIT              REPLAY      INACTIVE
OPENED           . REPLAY DONE     !           .              .  stays as it is
OPEN_FAILED      DONE              !           .              ! can't happen: AssertionError
ATTACHED         . REPLAY          !           .              others: what may come of it
CREDITED         .                 .           .
TURN             . DONE INACTIVE   . INACTIVE  . DONE         INIT: no subscriber came in time
BLOCK_READ       !                 .           .              INACTIVE: the subscriber did not take the end in time
READ_FAILED      !                 INACTIVE    .
SENT             !                 .           .
STOP             DONE INACTIVE     INACTIVE    .              INIT: DONE if no subscriber has attached
SUBSCRIBER_GONE  DONE              DONE        DONE
DELETED          DONE INACTIVE     INACTIVE    .
TRUNCATED        . DONE INACTIVE   . INACTIVE  .              "." if nothing above the cut was reached
LEASE_BROKEN     DONE INACTIVE     INACTIVE    .
END_SENT         !                 !           DONE
DONE ignores every event: results of unfinished effects may still arrive.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar, TypeAlias

from pushrep.replay.plan import LogSnapshot, Span
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.replay_messages import ReplayEndReason


class ReplayState(Enum):
    """The states of a session."""

    __hash__ = object.__hash__  # Enum's own is a Python function, and every event looks the table up

    INIT = auto()
    REPLAY = auto()
    INACTIVE = auto()
    DONE = auto()


class EventKind(Enum):
    """The kinds of events."""

    __hash__ = object.__hash__

    OPENED = auto()
    OPEN_FAILED = auto()
    ATTACHED = auto()
    CREDITED = auto()
    TURN = auto()
    BLOCK_READ = auto()
    READ_FAILED = auto()
    SENT = auto()
    STOP = auto()
    SUBSCRIBER_GONE = auto()
    DELETED = auto()
    TRUNCATED = auto()
    LEASE_BROKEN = auto()
    END_SENT = auto()


def impossible(state: ReplayState, event: EventKind) -> AssertionError:
    """A bug in the code around a session, never a fault of its subscriber: the event can't happen in this state."""
    return AssertionError(f"a replay session in {state.name} can't meet {event.name}: the code around it is wrong")


_INIT, _REPLAY, _INACTIVE, _DONE = ReplayState
_E = EventKind
_STAYS: frozenset[ReplayState] = frozenset()
_IMPOSSIBLE = None

Cell = frozenset[ReplayState] | None
"""The other states that an event may lead to; None if it can't happen."""

NEXT: Mapping[ReplayState, Mapping[EventKind, Cell]] = {
    _INIT: {
        _E.OPENED: frozenset({_REPLAY, _DONE}),
        _E.OPEN_FAILED: frozenset({_DONE}),
        _E.ATTACHED: frozenset({_REPLAY}),
        _E.CREDITED: _STAYS,
        _E.TURN: frozenset({_DONE, _INACTIVE}),
        _E.BLOCK_READ: _IMPOSSIBLE,
        _E.READ_FAILED: _IMPOSSIBLE,
        _E.SENT: _IMPOSSIBLE,
        _E.STOP: frozenset({_DONE, _INACTIVE}),
        _E.SUBSCRIBER_GONE: frozenset({_DONE}),
        _E.DELETED: frozenset({_DONE, _INACTIVE}),
        _E.TRUNCATED: frozenset({_DONE, _INACTIVE}),
        _E.LEASE_BROKEN: frozenset({_DONE, _INACTIVE}),
        _E.END_SENT: _IMPOSSIBLE,
    },
    _REPLAY: {
        _E.OPENED: _IMPOSSIBLE,
        _E.OPEN_FAILED: _IMPOSSIBLE,
        _E.ATTACHED: _IMPOSSIBLE,
        _E.CREDITED: _STAYS,
        _E.TURN: frozenset({_INACTIVE}),
        _E.BLOCK_READ: _STAYS,
        _E.READ_FAILED: frozenset({_INACTIVE}),
        _E.SENT: _STAYS,
        _E.STOP: frozenset({_INACTIVE}),
        _E.SUBSCRIBER_GONE: frozenset({_DONE}),
        _E.DELETED: frozenset({_INACTIVE}),
        _E.TRUNCATED: frozenset({_INACTIVE}),
        _E.LEASE_BROKEN: frozenset({_INACTIVE}),
        _E.END_SENT: _IMPOSSIBLE,
    },
    _INACTIVE: {
        **dict.fromkeys(EventKind, _STAYS),
        _E.TURN: frozenset({_DONE}),
        _E.SUBSCRIBER_GONE: frozenset({_DONE}),
        _E.END_SENT: frozenset({_DONE}),
    },
    _DONE: dict.fromkeys(EventKind, _STAYS),
}
assert NEXT.keys() == set(ReplayState)
assert all(row.keys() == set(EventKind) for row in NEXT.values())


# ---- events


@dataclass(frozen=True, slots=True)
class SegmentOpened:
    """The lease is held, and the batch at the position is whole and in its place.

    leader_epoch: of that batch; epoch_by_log: by the log's list of epochs (None: unknown, or the same); epoch_before:
    of the record before the position (None: it is not there). A position at the tip has no batch.
    """

    kind: ClassVar[EventKind] = EventKind.OPENED
    leader_epoch: int | None = None
    epoch_by_log: int | None = None
    epoch_before: int | None = None


@dataclass(frozen=True, slots=True)
class OpenFailed:
    """The position can't be read."""

    kind: ClassVar[EventKind] = EventKind.OPEN_FAILED
    code: ErrorCode
    why: str


@dataclass(frozen=True, slots=True)
class SubscriberAttached:
    """The subscriber is there."""

    kind: ClassVar[EventKind] = EventKind.ATTACHED
    credit_bytes: int


@dataclass(frozen=True, slots=True)
class Credited:
    """The subscriber accepts so many bytes more."""

    kind: ClassVar[EventKind] = EventKind.CREDITED
    credit_bytes: int


@dataclass(frozen=True, slots=True)
class Turn:
    """It is this session's turn. counter: the value of its bounding counter; None without one, or if it closed."""

    kind: ClassVar[EventKind] = EventKind.TURN
    facts: LogSnapshot
    counter: int | None = None


@dataclass(frozen=True, slots=True)
class BlockRead:
    """The result of ReadBlock: batches in order, of which the first holds its position; none if nothing was there."""

    kind: ClassVar[EventKind] = EventKind.BLOCK_READ
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """ReadBlock failed. segment: its base offset."""

    kind: ClassVar[EventKind] = EventKind.READ_FAILED
    code: ErrorCode
    why: str
    segment: int | None = None


@dataclass(frozen=True, slots=True)
class BlockSent:
    """All of the last SendBlock has left."""

    kind: ClassVar[EventKind] = EventKind.SENT


@dataclass(frozen=True, slots=True)
class Stop:
    """Stopped by the subscriber, by stop_all, or because the node stops."""

    kind: ClassVar[EventKind] = EventKind.STOP


@dataclass(frozen=True, slots=True)
class SubscriberGone:
    """The subscriber has disconnected."""

    kind: ClassVar[EventKind] = EventKind.SUBSCRIBER_GONE


@dataclass(frozen=True, slots=True)
class Deleted:
    """The recording was marked DELETED."""

    kind: ClassVar[EventKind] = EventKind.DELETED


@dataclass(frozen=True, slots=True)
class Truncated:
    """The log was cut at `offset`; `leader_epoch` goes on from there, -1 if unknown."""

    kind: ClassVar[EventKind] = EventKind.TRUNCATED
    offset: int
    leader_epoch: int = -1


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """The lease was broken: the next records may be gone."""

    kind: ClassVar[EventKind] = EventKind.LEASE_BROKEN
    why: str


@dataclass(frozen=True, slots=True)
class EndSent:
    """SendEnd has left."""

    kind: ClassVar[EventKind] = EventKind.END_SENT


Event: TypeAlias = (
    SegmentOpened | OpenFailed | SubscriberAttached | Credited | Turn | BlockRead | ReadFailed | BlockSent | Stop
    | SubscriberGone | Deleted | Truncated | LeaseLost | EndSent
)  # fmt: skip

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

"""The life of a replay session: a table, no flags. Drawn in docs/replay.md.

INIT ──▶ REPLAY ──▶ INACTIVE ──▶ DONE       in INACTIVE the subscriber is told why, once;
  └─────────────────────────────────▲       DONE follows at once where there is none (any more)

                 INIT              REPLAY      INACTIVE
OPENED           . REPLAY DONE     !           .              .  stays as it is
OPEN_FAILED      DONE              !           .              !  the shell can't have seen that: ImpossibleEvent
ATTACHED         . REPLAY          !           .              others: what may come of it
CREDITED         .                 .           .
TURN             . DONE INACTIVE   . INACTIVE  . DONE         INIT: no subscriber came in time
BLOCK_READ       !                 .           .              INACTIVE: the subscriber did not take the end in time
READ_FAILED      !                 INACTIVE    .
SENT             !                 .           .
STOP             DONE INACTIVE     INACTIVE    .              INIT: DONE if nobody has attached who could be told
SUBSCRIBER_GONE  DONE              DONE        DONE
DELETED          DONE INACTIVE     INACTIVE    .
TRUNCATED        . DONE INACTIVE   . INACTIVE  .              "." if nothing above the cut was reached
LEASE_BROKEN     DONE INACTIVE     INACTIVE    .
END_SENT         !                 !           DONE
DONE: everything stays; what is still under way when a session ends arrives there.
"""

from collections.abc import Mapping
from enum import Enum, auto

from pushrep.errors import PushrepError


class ReplayState(Enum):
    """Where a session stands."""

    __hash__ = object.__hash__  # Enum's own is a function in Python, and the table is looked up at every event

    INIT = auto()
    REPLAY = auto()
    INACTIVE = auto()
    DONE = auto()


class EventKind(Enum):
    """What can happen to it."""

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


class ImpossibleEvent(PushrepError):
    """A fault of the shell around a session, never of its subscriber: the session can't have come to this."""

    def __init__(self, state: ReplayState, event: EventKind) -> None:
        super().__init__(f"a replay session in {state.name} can't meet {event.name}: the code around it is wrong")
        self.state, self.event = state, event


_INIT, _REPLAY, _INACTIVE, _DONE = ReplayState
_E = EventKind
_STAYS: frozenset[ReplayState] = frozenset()
_IMPOSSIBLE = None

Cell = frozenset[ReplayState] | None
"""The states besides its own that an event may lead to; None if it can't happen."""

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

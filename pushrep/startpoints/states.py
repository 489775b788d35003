"""The life of a startpoint, kept per reader: a table, no flags. Drawn in docs/startpoints.md.

                APPLY     CONSUME    FAIL      EXPIRE    CANCEL
    PENDING     APPLIED   CONSUMED   FAILED    EXPIRED   CANCELLED     consumed at once: read with remove=True
    APPLIED     -         CONSUMED   FAILED    -         CANCELLED     "-" stays as it is: the first event wins, so
    FAILED      -         -          -         -         CANCELLED     two writers that race leave one answer
    CONSUMED, EXPIRED, CANCELLED     final

A failed one is not over: it stops its partition's start until it is cancelled or a newer one is written.
"""

from collections.abc import Mapping
from enum import StrEnum


class State(StrEnum):
    """Where a startpoint stands for one reader."""

    PENDING = "pending"
    APPLIED = "applied"
    CONSUMED = "consumed"
    EXPIRED = "expired"
    FAILED = "failed"
    CANCELLED = "cancelled"


class StartpointEvent(StrEnum):
    """What can happen to it."""

    APPLY = "applied"
    CONSUME = "consumed"
    FAIL = "failed"
    EXPIRE = "expired"
    CANCEL = "cancelled"


_FINAL: Mapping[StartpointEvent, State | None] = dict.fromkeys(StartpointEvent)

NEXT: Mapping[State, Mapping[StartpointEvent, State | None]] = {
    State.PENDING: {
        StartpointEvent.APPLY: State.APPLIED,
        StartpointEvent.CONSUME: State.CONSUMED,
        StartpointEvent.FAIL: State.FAILED,
        StartpointEvent.EXPIRE: State.EXPIRED,
        StartpointEvent.CANCEL: State.CANCELLED,
    },
    State.APPLIED: {
        StartpointEvent.APPLY: None,
        StartpointEvent.CONSUME: State.CONSUMED,
        StartpointEvent.FAIL: State.FAILED,
        StartpointEvent.EXPIRE: None,
        StartpointEvent.CANCEL: State.CANCELLED,
    },
    State.FAILED: {
        StartpointEvent.APPLY: None,
        StartpointEvent.CONSUME: None,
        StartpointEvent.FAIL: None,
        StartpointEvent.EXPIRE: None,
        StartpointEvent.CANCEL: State.CANCELLED,
    },
    State.CONSUMED: _FINAL,
    State.EXPIRED: _FINAL,
    State.CANCELLED: _FINAL,
}
assert NEXT.keys() == set(State)
assert all(row.keys() == set(StartpointEvent) for row in NEXT.values())

OVER = frozenset({State.CONSUMED, State.EXPIRED, State.CANCELLED})
"""What a search for the pending one passes by."""

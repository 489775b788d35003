"""What goes into a replay session and what it wants done: values only. The session is session.py.

shell ── SegmentOpened, Turn, BlockRead, BlockSent ... ──▶ ReplaySession ──▶ ReadBlock, SendBlock, SendEnd ... ── shell
"""

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from pushrep.replay.limits import Span
from pushrep.replay.model import LogSnapshot
from pushrep.replay.states import EventKind
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.replay_messages import ReplayEndReason

# ---- events


@dataclass(frozen=True, slots=True)
class SegmentOpened:
    """The lease is held and the segment could be read: the batch that holds the position is whole and in its place.

    `leader_epoch` is that batch's, `epoch_by_log` what the log's list of epochs says (None: it says nothing),
    `epoch_before` that of the record before the position (None: it is not there). A position at the tip has no batch.
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
    """It takes so many bytes more."""

    kind: ClassVar[EventKind] = EventKind.CREDITED
    credit_bytes: int


@dataclass(frozen=True, slots=True)
class Turn:
    """It is this session's turn. `counter`: value of the counter that bounds it, None if there is none or it closed."""

    kind: ClassVar[EventKind] = EventKind.TURN
    facts: LogSnapshot
    counter: int | None = None


@dataclass(frozen=True, slots=True)
class BlockRead:
    """The answer to ReadBlock: batches in order, the first one holds its position or, above a hole, follows it.

    `read_to`: without spans there is nothing from its position up to this offset, a hole; None: up to its limit.
    """

    kind: ClassVar[EventKind] = EventKind.BLOCK_READ
    spans: tuple[Span, ...]
    read_to: int | None = None


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """The other answer to ReadBlock. `segment`: base offset."""

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
    """By the subscriber, by stop_all, or because the node stops."""

    kind: ClassVar[EventKind] = EventKind.STOP


@dataclass(frozen=True, slots=True)
class SubscriberGone:
    """There is nobody to tell any more."""

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
    """What the session was to read next may be gone."""

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
    """Answer OK with the session's id."""

    position: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer with this code: there is no session."""

    code: ErrorCode
    why: str


@dataclass(frozen=True, slots=True)
class ReadBlock:
    """Read whole batches from `position` on, below `limit`, about `max_bytes` of them, one at least; then BlockRead.

    `want_offsets`: a batch with holes has to tell its records' offsets.
    """

    position: int
    limit: int
    max_bytes: int
    want_offsets: bool


@dataclass(frozen=True, slots=True)
class SendBlock:
    """Send the first `spans` of what was read, to be cut to [start, end) by who gets it; then BlockSent."""

    start: int
    end: int
    spans: int
    size_bytes: int
    tip: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Tell that all is well at `position`, and how far one could read."""

    position: int
    tip: int


@dataclass(frozen=True, slots=True)
class RenewLease:
    """What lies below `offset` is not needed any more."""

    offset: int


@dataclass(frozen=True, slots=True)
class ReleaseLease:
    """Nothing is read any more."""


@dataclass(frozen=True, slots=True)
class SendEnd:
    """The last word, once; then EndSent. `cut_offset` and `leader_epoch` belong to TRUNCATED."""

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

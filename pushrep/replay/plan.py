"""From a replay request and a log's offsets to a plan or a refusal; then which batches may be sent. Pure.

    position   None       offset         AtTime(ms)                       where to begin: log start without one
    length     FOLLOW     TO_END         n records                        how far to go
    bound      stable     high_watermark flushed    written    a counter  how far it may read

`plan_replay` is the only place where replays are refused:

    checked in this order code
    not allowed                                                  UNAUTHORISED
    bad bound or rate                                            INVALID_REQUEST
    no such recording; it can't be read; it is deleted           UNKNOWN_RECORDING
    too many sessions                                            MAX_REPLAYS
    position below start or above the tip                        INVALID_POSITION   with the range
    n = 0                                                        (accepted: it ends at once)
    TO_END of a recording that holds nothing                     EMPTY_RECORDING
    position = end of a stopped recording, unless FOLLOW         INVALID_POSITION   with the range
    TO_END with nothing to replay                                EMPTY_RECORDING

The tip that a position is compared with is the end that its bound allows to read. Under a counter it is the stable
offset, because the counter may rise later; for a resumed session it is the log end.

`clip` decides how much of the batches read may be sent now:

    request     [ position ........................................ end )    TO_END, or the nth record
    bound       ................ stable | high watermark | flushed | written | counter
    recorded    ......................................... what the log holds
                 limit = min of the three, read again at every turn

A batch that crosses `end` is sent and cut on delivery. A batch that crosses the bound waits until that has passed it.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Final, NamedTuple, Self, TypeAlias
from uuid import UUID

from pushrep.errors import BadArgument, PushrepError
from pushrep.log.directory_files import shown_name
from pushrep.log.published import LogOffsets
from pushrep.records import BatchHeader, RecordBatch
from pushrep.settings import Between, check
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.replay_messages import RecordingState


class ReplayRefused(PushrepError):
    """No session was made, or a recording was not extended, truncated, purged or deleted: `code` says why, and nothing
    was changed. A refused position comes with the valid range [`start`, `end`], damage there with its `segment`.
    """

    def __init__(
        self,
        code: ErrorCode,
        why: str,
        *,
        start: int | None = None,
        end: int | None = None,
        segment: int | None = None,
    ) -> None:
        super().__init__(f"{why or code.meaning} ({code.name})")
        self.code, self.why, self.start, self.end, self.segment = code, why, start, end, segment


class Length(Enum):
    """The length of a replay without a number of records."""

    FOLLOW = "follow"
    TO_END = "to_end"


FOLLOW: Final = Length.FOLLOW
"""All records, then new ones as they come."""
TO_END: Final = Length.TO_END
"""Up to the end at the time of the request."""


MAX_TIMESTAMP: Final = -3
"""In the place of a time: the largest one of all records, as in Kafka's ListOffsets."""


@dataclass(frozen=True, slots=True)
class AtTime:
    """The position of the first record at or after `timestamp_ms` (ms since 1970 UTC), in offset order; the end if
    there is none. MAX_TIMESTAMP: of the first record with the largest time.
    """

    timestamp_ms: int

    def __post_init__(self) -> None:
        if self.timestamp_ms < 0 and self.timestamp_ms != MAX_TIMESTAMP:
            raise BadArgument("timestamp_ms", f"{self.timestamp_ms} is before 1970")


Position: TypeAlias = int | AtTime | None


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """What to replay. recording: its id, or `<topic>-<partition>`. Raises BadArgument for invalid values.

    `length` n: at most n records, exactly. `bound`: stable, high_watermark, flushed, written, or a counter's name.
    `epoch_before`: of a resumed replay, the leader epoch of the record before `position`; another one is TRUNCATED.
    """

    recording: int | str
    position: Position = None
    length: Length | int = FOLLOW
    bound: str = "stable"
    max_bytes_per_s: int | None = None
    epoch_before: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.position, bool) or not isinstance(self.position, int | AtTime | None):
            raise BadArgument("position", f"give an offset, AtTime(ms) or None, not {self.position!r}")
        if isinstance(self.position, int) and self.position < 0:
            raise BadArgument("position", f"{self.position} is no offset")
        if isinstance(self.length, bool) or not isinstance(self.length, int | Length):
            raise BadArgument("length", f"give FOLLOW, TO_END or a number of records, not {self.length!r}")
        if isinstance(self.length, int) and self.length < 0:
            raise BadArgument("length", f"{self.length} records can't be replayed")


_IDENTITIES_FULL = 4
_FromOne = Annotated[int, Between(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """Limits of sessions. Times in ms. max_sessions: of one identity; four times as many in sum. block_bytes: how much
    a session reads in its turn. Raises BadArgument.
    """

    max_sessions: _FromOne = 20
    connect_timeout_ms: _FromOne = 5_000
    liveness_timeout_ms: _FromOne = 10_000
    heartbeat_ms: _FromOne = 3_000
    block_bytes: _FromOne = 1 << 20

    def __post_init__(self) -> None:
        check(self)

    @property
    def sessions_in_sum(self) -> int:
        """How many sessions run at once, of all identities."""
        return self.max_sessions * _IDENTITIES_FULL


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingInfo:
    """A recording at one moment. recording_id: None without a catalogue. is_live: it has a writer.

    Offsets [start_offset, end_offset) were written; those below `stable_offset` are never cut off. A log that is
    INVALID can't be opened, or lacks its first file, as `invalid` says. A node shows no offset above the stable one
    while the log is live. damaged_from: the first offset that was on disk and can't be read; None: no damage is known.
    origin: the recording of another node that it is a copy of. outbox_id: None if it is unknown. partition: with worker
    slots, a number among all slots (pushrep.log.directory_files).
    """

    recording_id: int | None
    topic: str
    partition: int
    log_id: UUID | None
    start_offset: int
    stable_offset: int
    end_offset: int
    is_live: bool
    state: RecordingState
    outbox_id: UUID | None = None
    damaged_from: int | None = None
    invalid: str = ""
    origin: str = ""

    @property
    def name(self) -> str:
        """`<topic>-<partition>`, as a request may name it; in a worker slot `slot-<m>/<topic>-<n>`."""
        return shown_name(self.topic, self.partition)


LOG_BOUNDS = ("stable", "high_watermark", "flushed", "written")


class Tip(NamedTuple):
    """recorded: the end of the records for this bound; bound: the end of what may be sent; is_frozen: neither will
    rise.
    """

    recorded: int
    bound: int
    is_frozen: bool = False


def tip_of(facts: LogOffsets, bound: str, counter: int | None, last_counter: int = 0) -> Tip:
    """The tip under a log's own bound, or under a counter's (counter None: it is closed and stays at `last_counter`).

    A counter is also limited by the stable offset, because it is a program's progress, not what is on disk.
    """
    if bound in LOG_BOUNDS:
        offset = facts.end if bound == "written" else min(facts.end, int(getattr(facts, bound)))
        return Tip(offset, offset)
    value = last_counter if counter is None else counter
    return Tip(facts.stable, min(facts.stable, value), is_frozen=counter is None)


class Span(NamedTuple):
    """The numbers of one whole batch: offsets [base_offset, next_offset), a record each. records: 0 in a control batch,
    whose records are no data.
    """

    base_offset: int
    next_offset: int
    size_bytes: int
    records: int

    @classmethod
    def of(cls, header: BatchHeader) -> Self:
        """Those of a batch with this header."""
        records = 0 if header.is_control else header.record_count
        return cls(header.base_offset, header.next_offset, header.size_bytes, records)

    def count_in(self, start: int, end: int) -> int:
        """How many records of data have an offset in [start, end)."""
        return max(0, min(end, self.next_offset) - max(start, self.base_offset)) if self.records else 0


class ReplayedBlock(NamedTuple):
    """Whole batches, to be cut to [start, end)."""

    batches: list[RecordBatch]
    start: int
    end: int


@dataclass(slots=True)
class Clip:
    """The part of a block to send: its first `spans`, cut to [start, end), with so many records and bytes.

    held_until: the next batch crosses the bound; nothing can be sent before that reaches this offset.
    """

    start: int
    end: int
    spans: int = 0
    records: int = 0
    size_bytes: int = 0
    held_until: int | None = None


def clip(  # noqa: PLR0913 - one number a rule
    spans: Sequence[Span], *, position: int, end: int | None, left: int | None, bound: int, budget_bytes: int
) -> Clip:
    """How much of `spans`, read from `position` on, is sent now; at least one batch if any may be.

    end: of the request, None without one. left: how many records may still be sent, None if they aren't counted.
    """
    stop = bound if end is None else min(end, bound)
    if left is None and spans and position <= spans[0].base_offset and spans[-1].next_offset <= stop:
        # The common case: all may be sent whole, so send as many as fit, at least one.
        count, size_bytes = len(spans), sum([span.size_bytes for span in spans])
        while size_bytes > budget_bytes and count > 1:
            count -= 1
            size_bytes -= spans[count].size_bytes
        records = sum([span.records for span in spans[:count]])
        return Clip(position, spans[count - 1].next_offset, count, records, size_bytes)
    taken = Clip(position, position)
    for span in spans:
        if span.base_offset >= stop:
            break
        if span.next_offset > bound:
            taken.held_until = span.next_offset
            break
        if taken.spans and taken.size_bytes + span.size_bytes > budget_bytes:
            break
        until = span.next_offset if end is None else min(span.next_offset, end)
        count = span.count_in(taken.end, until)
        taken.spans += 1
        taken.size_bytes += span.size_bytes
        if left is not None and count >= left - taken.records:
            taken.end = max(taken.end, span.base_offset) + left - taken.records
            taken.records = left
            break
        taken.records += count
        taken.end = until
    return taken


RATE_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """An accepted request: from `position` on, below `end` and at most `records` records, each None without a limit.

    recording: as the request named it. max_bytes_per_s: None without a limit.
    """

    recording: int | str
    position: int
    end: int | None = None
    records: int | None = None
    bound: str = "stable"
    max_bytes_per_s: int | None = None
    epoch_before: int | None = None


class Node(NamedTuple):
    """The other facts for a request. is_live: whether a writer has the log open. counters: names that may bound a
    replay.
    """

    is_live: bool = True
    active_sessions: int = 0
    max_sessions: int = 20
    counters: Collection[str] = ()
    is_allowed: bool = True


def plan_replay(
    request: ReplayRequest, facts: LogOffsets | None, first_at: Callable[[int], int | None], node: Node
) -> ReplayPlan:
    """The plan of a session. facts: None if there is no such recording, or it can't be read.

    first_at(ms): offset of the first readable record at or after that time, or MAX_TIMESTAMP's. Raises ReplayRefused.
    """
    _check_request(request, node)
    if facts is None:
        raise ReplayRefused(ErrorCode.UNKNOWN_RECORDING, f"there is no recording {request.recording}")
    if node.active_sessions >= node.max_sessions:
        why = f"{node.active_sessions} replays run, more are not allowed: stop one, or ask again later"
        raise ReplayRefused(ErrorCode.MAX_REPLAYS, why)
    end = max(facts.start, tip_of(facts, request.bound, None if request.bound in LOG_BOUNDS else 0).recorded)
    position = _resolved(request, facts.start, end, first_at)
    # A resumed session may be above it: after a restart the watermark may be lower, and will rise.
    last = end if request.epoch_before is None else max(end, facts.end)
    if not facts.start <= position <= last:
        raise _outside(f"position {position} is outside of the recording", facts.start, end)
    _check_there_is_something(request, facts.start, position, end, is_live=node.is_live)
    return ReplayPlan(
        recording=request.recording,
        position=position,
        end=end if request.length is TO_END else None,
        records=request.length if isinstance(request.length, int) else None,
        bound=request.bound,
        max_bytes_per_s=request.max_bytes_per_s,
        epoch_before=request.epoch_before,
    )


def _check_request(request: ReplayRequest, node: Node) -> None:
    if not node.is_allowed:
        raise ReplayRefused(ErrorCode.UNAUTHORISED, f"recording {request.recording} may not be replayed by you")
    if request.bound not in LOG_BOUNDS and request.bound not in node.counters:
        known = ", ".join([*LOG_BOUNDS, *sorted(node.counters)])
        raise ReplayRefused(ErrorCode.INVALID_REQUEST, f"bound {request.bound!r} is none of {known}")
    rate = request.max_bytes_per_s
    if rate is not None and not 1 <= rate <= RATE_MAX:
        raise ReplayRefused(ErrorCode.INVALID_REQUEST, f"max_bytes_per_s {rate} is no rate: give 1 or more, or None")


def _resolved(request: ReplayRequest, start: int, end: int, first_at: Callable[[int], int | None]) -> int:
    position = request.position
    if position is None:
        return start
    if not isinstance(position, AtTime):
        return position
    found = first_at(position.timestamp_ms)
    return end if found is None else max(start, min(found, end))


def _check_there_is_something(request: ReplayRequest, start: int, position: int, end: int, *, is_live: bool) -> None:
    if request.length == 0 or position < end:
        return
    if request.length is TO_END and start == end:
        raise ReplayRefused(ErrorCode.EMPTY_RECORDING, f"recording {request.recording} holds no records")
    if not is_live and request.length is not FOLLOW:
        what = f"position {position} is the end of a stopped recording, where only FOLLOW may begin"
        raise _outside(what, start, end)
    if request.length is TO_END:
        raise ReplayRefused(ErrorCode.EMPTY_RECORDING, f"there is nothing to replay from offset {position} on yet")


def _outside(what: str, start: int, end: int) -> ReplayRefused:
    why = f"{what}: it holds the offsets [{start}, {end})"
    return ReplayRefused(ErrorCode.INVALID_POSITION, why, start=start, end=end)

"""A request and a recording in, a plan or a refusal out: the one place where replays are refused. Pure.

    asked in this order                                          code
    not allowed                                                  UNAUTHORISED
    bad bound or rate                                            INVALID_REQUEST
    no such recording; it can't be read; it is deleted           UNKNOWN_RECORDING
    too many sessions                                            MAX_REPLAYS
    position below start or above the tip                        INVALID_POSITION   with the range
    n = 0                                                        (accepted: it ends at once)
    TO_END of a recording that holds nothing                     EMPTY_RECORDING
    position = end of a stopped recording, unless FOLLOW         INVALID_POSITION   with the range
    TO_END with nothing to replay                                EMPTY_RECORDING

The tip of a position is what its bound lets out. Under a counter it is the stable offset: the counter may come later;
for who resumes it is the log end.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from pushrep.replay.errors import ReplayRefused
from pushrep.replay.limits import LOG_BOUNDS, TO_END, AtTime, LogSnapshot, ReplayRequest, tip_of
from pushrep.wire.error_codes import ErrorCode

RATE_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """A request that will do: from `position` on, below `end` and at most `records` records, each None without a limit.

    `recording`: as it was named. `max_bytes_per_s` None is no limit.
    """

    recording: int | str
    position: int
    end: int | None = None
    records: int | None = None
    bound: str = "stable"
    max_bytes_per_s: int | None = None
    epoch_before: int | None = None

    @property
    def follows(self) -> bool:
        """Goes on at the tip for ever."""
        return self.end is None and self.records is None


class Node(NamedTuple):
    """What a request is judged by besides the recording. `counters`: names that may bound a replay."""

    active_sessions: int = 0
    max_sessions: int = 20
    counters: Collection[str] = ()
    is_allowed: bool = True


def plan_replay(
    request: ReplayRequest, facts: LogSnapshot | None, first_at: Callable[[int], int | None], node: Node
) -> ReplayPlan:
    """What the session does. `facts` None: there is no such recording, or it can't be read.

    `first_at(ms)`: offset of the first readable record at or after that time. Raises ReplayRefused.
    """
    _check_request(request, node)
    if facts is None:
        raise ReplayRefused(ErrorCode.UNKNOWN_RECORDING, f"there is no recording {request.recording}")
    if node.active_sessions >= node.max_sessions:
        why = f"{node.active_sessions} replays run, more are not allowed: stop one, or ask again later"
        raise ReplayRefused(ErrorCode.MAX_REPLAYS, why)
    end = max(facts.start, tip_of(facts, request.bound, None if request.bound in LOG_BOUNDS else 0).recorded)
    position = _resolved(request, facts.start, end, first_at)
    # Who resumes has been there: the watermark may be lower after a restart, and is waited for.
    last = end if request.epoch_before is None else max(end, facts.written)
    if not facts.start <= position <= last:
        raise _outside(f"position {position} is outside of the recording", facts.start, end)
    _check_there_is_something(request, facts, position, end)
    return ReplayPlan(
        recording=request.recording,
        position=position,
        end=end if request.length is TO_END else None,
        records=request.length if isinstance(request.length, int) else None,
        bound=request.bound,
        max_bytes_per_s=request.max_bytes_per_s,
        epoch_before=request.epoch_before,
    )


def needs_liveness(request: ReplayRequest, facts: LogSnapshot) -> bool:
    """Whether it decides anything that somebody writes the log: not for who begins below its end."""
    end = max(facts.start, tip_of(facts, request.bound, None if request.bound in LOG_BOUNDS else 0).recorded)
    position = facts.start if request.position is None else request.position
    return isinstance(position, AtTime) or position >= end


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


def _check_there_is_something(request: ReplayRequest, facts: LogSnapshot, position: int, end: int) -> None:
    if request.length == 0 or position < end:
        return
    if request.length is TO_END and facts.start == end:
        raise ReplayRefused(ErrorCode.EMPTY_RECORDING, f"recording {request.recording} holds no records")
    if not facts.is_live and not _follows(request):
        what = f"position {position} is the end of a stopped recording, where only FOLLOW may begin"
        raise _outside(what, facts.start, end)
    if request.length is TO_END:
        raise ReplayRefused(ErrorCode.EMPTY_RECORDING, f"there is nothing to replay from offset {position} on yet")


def _follows(request: ReplayRequest) -> bool:
    return not isinstance(request.length, int) and request.length is not TO_END


def _outside(what: str, start: int, end: int) -> ReplayRefused:
    why = f"{what}: it holds the offsets [{start}, {end}]"
    return ReplayRefused(ErrorCode.INVALID_POSITION, why, start=start, end=end)

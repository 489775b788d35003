"""What a refusal is to a replay that comes again after its connection broke: how it ended meanwhile, or a wait. Pure.

the node is full, stops, was slow              wait
its new session was given up before it came    wait                this machine stood still between start and attach
TRUNCATED; its position is above the end       TRUNCATED           what was given is not in the log any more
its position is below the start                ERROR               retention took what comes next
the recording is unknown                       RECORDING_DELETED
it stands at the end: n records                LIMIT_REACHED       the log was stopped
                      TO_END, all of it given  LIMIT_REACHED
                      TO_END, more was there   wait                the watermark of a node that restarted is late
anything else                                  ERROR
"""

from pushrep.protocol.error_codes import ErrorCode
from pushrep.protocol.replay_messages import ReplayEndReason
from pushrep.replay import events as e
from pushrep.replay.errors import ReplayRefused

_LATER = frozenset(
    {ErrorCode.MAX_REPLAYS, ErrorCode.NODE_STOPPING, ErrorCode.REQUEST_TIMED_OUT, ErrorCode.UNKNOWN_REPLAY}
)


def end_of_refused(refused: ReplayRefused, at: int, left: int | None, until: int | None) -> e.SendEnd | None:
    """The end of a replay that stands at offset `at`; None: ask again later.

    left: records of n that are still to come. until: the end that TO_END had when it was asked first.
    """
    code, start, end = refused.code, refused.start, refused.end
    is_shorter = code is ErrorCode.INVALID_POSITION and end is not None and at > end
    if code in _LATER:
        return None
    if code is ErrorCode.TRUNCATED or is_shorter:
        cut = at if end is None else min(at, end)
        return e.SendEnd(ReplayEndReason.TRUNCATED, at, ErrorCode.TRUNCATED, refused.why, cut_offset=cut)
    if code is ErrorCode.INVALID_POSITION and start is not None and at < start:
        why = f"retention took what lies below offset {start}"
        return e.SendEnd(ReplayEndReason.ERROR, at, ErrorCode.OFFSET_OUT_OF_RANGE, why)
    if code is ErrorCode.UNKNOWN_RECORDING:
        why = "the recording was deleted"
        return e.SendEnd(ReplayEndReason.RECORDING_DELETED, at, ErrorCode.RECORDING_DELETED, why)
    if is_at_end(refused, at) and (left is not None or until is not None):
        has_all = until is None or at >= until
        return e.SendEnd(ReplayEndReason.LIMIT_REACHED, at) if has_all else None
    return e.SendEnd(ReplayEndReason.ERROR, at, code, refused.why)


def is_at_end(refused: ReplayRefused, at: int) -> bool:
    """Whether it is refused because nothing is left to replay from `at` on."""
    if refused.code is ErrorCode.EMPTY_RECORDING:
        return True
    start, end = refused.start, refused.end
    is_inside = start is not None and end is not None and start <= at <= end
    return refused.code is ErrorCode.INVALID_POSITION and is_inside

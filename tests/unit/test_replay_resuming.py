"""What a resuming replay does after each refusal: one test for each row of the table."""

import pytest

from pushrep.replay.plan import ReplayRefused
from pushrep.replay.remote import end_of_refused
from pushrep.wire.error_codes import ErrorCode
from pushrep.wire.replay_messages import ReplayEndReason

OUTSIDE = {"start": 10, "end": 60}
TABLE = {
    "the node is full": (ErrorCode.MAX_REPLAYS, {}, 50, None, None, None),
    "its new session was given up": (ErrorCode.UNKNOWN_REPLAY, {}, 50, None, None, None),
    "the node stops": (ErrorCode.NODE_STOPPING, {}, 50, None, None, None),
    "the log was cut": (ErrorCode.TRUNCATED, {"start": 0, "end": 40}, 50, None, None, ReplayEndReason.TRUNCATED),
    "the log is shorter": (ErrorCode.INVALID_POSITION, OUTSIDE, 70, None, None, ReplayEndReason.TRUNCATED),
    "retention took it": (ErrorCode.INVALID_POSITION, OUTSIDE, 9, None, None, ReplayEndReason.ERROR),
    "deleted": (ErrorCode.UNKNOWN_RECORDING, {}, 50, None, None, ReplayEndReason.RECORDING_DELETED),
    "n at the end of a stop": (ErrorCode.INVALID_POSITION, OUTSIDE, 60, 3, None, ReplayEndReason.LIMIT_REACHED),
    "to the end, all given": (ErrorCode.EMPTY_RECORDING, {}, 60, None, 60, ReplayEndReason.LIMIT_REACHED),
    "to the end, more was there": (ErrorCode.EMPTY_RECORDING, {}, 60, None, 80, None),
    "to the end of a stop, more was there": (ErrorCode.INVALID_POSITION, OUTSIDE, 60, None, 80, None),
    "not allowed any more": (ErrorCode.UNAUTHORISED, {}, 50, None, None, ReplayEndReason.ERROR),
}


@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE.keys())
def test_a_refusal_of_who_comes_again_is_its_end_or_a_wait(row):
    code, span, at, left, until, reason = row
    end = end_of_refused(ReplayRefused(code, "so", **span), at, left, until)
    assert (end.reason if end is not None else None) is reason
    if reason is ReplayEndReason.TRUNCATED:
        assert end.cut_offset == min(at, span["end"])

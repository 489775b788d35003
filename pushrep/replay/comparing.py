"""Two copies of a log, compared batch by batch, each as its own reader gives it: bytes, not records.

here   | batch | batch | batch | ...          the batches that lie whole in what both hold and never take back
there  | batch | batch | batch | ...          by the same offsets: equal, or the first that is not
"""

from itertools import zip_longest
from typing import NamedTuple
from uuid import UUID

from pushrep.replay.client import ReplayClient
from pushrep.replay.errors import NodeUnreachable, ReplayFailed, ReplayRefused
from pushrep.replay.model import TO_END, RecordingInfo, ReplayRequest
from pushrep.wire.error_codes import ErrorCode


class Comparison(NamedTuple):
    """What was found. Offsets [start, end) were compared; `differs_at`: where the first batch begins that differs."""

    start: int
    end: int
    batches: int
    size_bytes: int
    differs_at: int | None = None

    @property
    def is_same(self) -> bool:
        """Nothing that both hold differs."""
        return self.differs_at is None


def compare_copies(here: ReplayClient, there: ReplayClient, name: str) -> Comparison:
    """Compare the log `name` of a directory with the copy that a node, or another directory, has of it.

    The copy is known by the log's id. Raises ReplayRefused (UNKNOWN_RECORDING) where there is none, and as a replay.
    """
    ours = _found(here, name, None)
    theirs = _found(there, name, ours.log_id)
    start = max(ours.start_offset, theirs.start_offset)
    end = min(ours.stable_offset, theirs.stable_offset)
    if start >= end:
        return Comparison(start, max(start, end), 0, 0)
    request = ReplayRequest(name, start, TO_END)
    identity = theirs.recording_id if theirs.recording_id is not None else name
    batches = size = 0
    with here.replay(request) as mine, there.replay(ReplayRequest(identity, start, TO_END)) as other:
        for a, b in zip_longest(mine.batches(), other.batches()):
            if any(one is not None and one.batch.header.next_offset > end for one in (a, b)):
                break  # it crosses what both hold
            if a is None or b is None or bytes(a.batch.data) != bytes(b.batch.data):
                at = min(one.batch.header.base_offset for one in (a, b) if one is not None)
                return Comparison(start, at, batches, size, max(at, start))
            batches, size = batches + 1, size + len(a.batch.data)
    return Comparison(start, end, batches, size)


def why_not_held(there: ReplayClient, name: str, log_id: UUID | None, start: int, end: int) -> str | None:
    """Read [start, end) of a copy of the log: why it does not give all of it; None if it does."""
    try:
        theirs = _found(there, name, log_id)
        if not theirs.start_offset <= start <= end <= theirs.stable_offset:
            return f"it gives [{theirs.start_offset}, {theirs.stable_offset})"
        identity = theirs.recording_id if theirs.recording_id is not None else name
        with there.replay(ReplayRequest(identity, start, TO_END)) as replay:
            for one in replay.batches():
                if one.batch.header.next_offset >= end:
                    return None
    except (ReplayRefused, ReplayFailed, NodeUnreachable) as error:
        return str(error)
    return None if start == end else "it ends early"


def _found(client: ReplayClient, name: str, log_id: UUID | None) -> RecordingInfo:
    for one in client.recordings():
        if one.name == name and log_id in {None, one.log_id}:
            return one
    raise ReplayRefused(ErrorCode.UNKNOWN_RECORDING, f"{client.where} has no copy of {name}")

"""Where a request's records lie against a replica's log, and the table of what is done there.

                                          own log      [log start ............ LEO)
append offset > LEO                       a gap        |                          |      ^
epoch before it is another                diverged     |          x ^             |
the same before, from there on equal      (resend)     |            ^ = = = = = = |+ + + +
the same before, another batch there      differs      |            ^ = = ≠       |
"""

from collections.abc import Callable, Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import NamedTuple

from pushrep.election.epochs import NO_EPOCH, LogEnds
from pushrep.election.messages import AppendRecords
from pushrep.election.outcome import Outcome


class RequestFinding(Enum):
    """Exactly one of these holds for every request that passed the checks."""

    __hash__ = object.__hash__  # Enum's own is Python: it hashes the name, for every look into a table

    FITS = auto()
    """At or below LEO, the same before it, and all that the log has there is the same."""
    DIVERGED_BEFORE = auto()
    """Another epoch before the append offset."""
    OTHER_EPOCH = auto()
    """A batch of another epoch at or behind the append offset, not below the high watermark."""
    OTHER_EPOCH_BELOW_WATERMARK = auto()
    OTHER_BYTES = auto()
    """The same epoch, another batch: one epoch had two leaders, or a disk lied. It must not happen."""
    GAP = auto()
    """Above LEO."""
    BELOW_START = auto()
    """Below the log's own start, where nothing can be compared."""
    RESTART = auto()
    """Nothing to go on from, and the leader's log begins at the append offset."""
    RESTART_BELOW_WATERMARK = auto()


class CutAt(Enum):
    """What of the log goes before anything is appended."""

    NOTHING = auto()
    AT_DIFFERENCE = auto()
    """From the first batch that differs on; checkpoints first, then the log, then fsync."""
    ALL = auto()
    """The log is set aside as `.stale` and begins anew at the append offset."""


class FindingRule(NamedTuple):
    """A row. `accepts`: records and watermarks are taken. `is_offline`: from now on the log waits for an operator."""

    error: Outcome
    accepts: bool = False
    cut: CutAt = CutAt.NOTHING
    is_offline: bool = False


FOLLOWER_RULES: Mapping[RequestFinding, FindingRule] = MappingProxyType(
    {
        RequestFinding.FITS: FindingRule(Outcome.NONE, accepts=True),
        RequestFinding.DIVERGED_BEFORE: FindingRule(Outcome.LOG_DIVERGED),
        RequestFinding.OTHER_EPOCH: FindingRule(Outcome.NONE, accepts=True, cut=CutAt.AT_DIFFERENCE),
        RequestFinding.OTHER_EPOCH_BELOW_WATERMARK: FindingRule(Outcome.LOG_DIVERGED, is_offline=True),
        RequestFinding.OTHER_BYTES: FindingRule(Outcome.LOG_DIVERGED, is_offline=True),
        RequestFinding.GAP: FindingRule(Outcome.OFFSET_OUT_OF_RANGE),
        RequestFinding.BELOW_START: FindingRule(Outcome.OFFSET_OUT_OF_RANGE),
        RequestFinding.RESTART: FindingRule(Outcome.NONE, accepts=True, cut=CutAt.ALL),
        RequestFinding.RESTART_BELOW_WATERMARK: FindingRule(Outcome.LOG_DIVERGED, is_offline=True),
    }
)
assert FOLLOWER_RULES.keys() == set(RequestFinding), "every finding has a row"


class Found(NamedTuple):
    """`at`: the first offset that differs, where the finding says that one does."""

    finding: RequestFinding
    at: int = -1


def find(
    log: LogEnds,
    high_watermark: int,
    request: AppendRecords,
    batch_at: Callable[[int], bytes | memoryview | None],
) -> Found:
    """The one finding that holds. `batch_at` is asked only for batches that the request overlaps."""
    place = _before(log, request)
    if place is None:
        return _from_there_on(log, high_watermark, request, batch_at)
    if (
        request.restart and place is not RequestFinding.BELOW_START
    ):  # its log starts higher: it moved on since it was asked
        # The leader's log has nothing before the append offset to compare. The batch there will do: an epoch has one
        # history. To set a log aside that goes on like the leader's would take back what it acknowledged.
        at = request.append_offset
        if at < log.log_end_offset and log.leader_epochs.epoch_of(at) == request.epoch_at_append_offset:
            return _from_there_on(log, high_watermark, request, batch_at)
        is_above = request.append_offset >= high_watermark
        return Found(RequestFinding.RESTART if is_above else RequestFinding.RESTART_BELOW_WATERMARK)
    return Found(place)


def _before(log: LogEnds, request: AppendRecords) -> RequestFinding | None:
    """What is wrong with the place itself; None if the logs are the same before it."""
    offset = request.append_offset
    if offset > log.log_end_offset:
        return RequestFinding.GAP
    if offset < log.log_start_offset:
        return RequestFinding.BELOW_START
    # At its own start a log holds nothing to compare. What was before it lay below a high watermark, which every later
    # leader holds: nothing can differ there.
    if offset > log.log_start_offset and log.epoch_before(offset) != request.previous_epoch:
        return RequestFinding.DIVERGED_BEFORE
    return None


def _from_there_on(
    log: LogEnds,
    high_watermark: int,
    request: AppendRecords,
    batch_at: Callable[[int], bytes | memoryview | None],
) -> Found:
    """The first difference between the request's batches and the log, and between the log's rest and the epoch."""
    for batch in request.batches:
        if batch.base_offset >= log.log_end_offset:
            return Found(RequestFinding.FITS)
        if log.leader_epochs.epoch_of(batch.base_offset) not in {batch.leader_epoch, NO_EPOCH}:
            return _other_epoch(batch.base_offset, high_watermark)
        if batch_at(batch.base_offset) != batch.data:
            return Found(RequestFinding.OTHER_BYTES, batch.base_offset)
    end = request.end_offset
    # At and above its start the epoch's leader wrote everything: a rest of another epoch can't be part of its log.
    is_rest_foreign = end < log.log_end_offset and log.leader_epochs.epoch_of(end) != request.leader_epoch
    if end >= request.epoch_start_offset and is_rest_foreign:
        return _other_epoch(end, high_watermark)
    return Found(RequestFinding.FITS)


def _other_epoch(offset: int, high_watermark: int) -> Found:
    if offset >= high_watermark:
        return Found(RequestFinding.OTHER_EPOCH, offset)
    return Found(RequestFinding.OTHER_EPOCH_BELOW_WATERMARK, offset)

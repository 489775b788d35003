"""Where the scan of an opening log begins: a decision over facts, taken without touching a file.

    bases            0          1000        2000        3000 (newest)
    recovery point                      ^ 1870
    normal           ........... trusted .............. | end of the newest
    abnormal         .. trusted .| 1000: from the batch that holds 1870 on ...................|

    listed in the marker  size as listed   -> the scan begins
    no                    -                   abnormal, at the recovery point
    yes                   no                  abnormal, at the recovery point: written to since
    yes                   yes                 normal, at the recovery point in the newest segment, or some segments
                                              earlier where `verify_last_segments` says so

Abnormal walks back to the first segment whose base is not above the recovery point and whose first batch is whole;
none: the first segment. Source: RocketMQ's recoverNormally and recoverAbnormally, by offsets instead of clocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from pushrep.log.directory_files import CleanLog


class Opening(Enum):
    """How the log was left."""

    NORMAL = "normal"
    """Closed clean: the marker lists it, and it is as listed."""
    ABNORMAL = "abnormal"
    """Its process or the machine stopped: everything from the recovery point on has to prove itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryFacts:
    """What is known before any batch is read.

    bases: base offsets of the segments, ascending. newest_bytes: size of the newest segment's file.
    recovery_point: as checkpointed, None if there is none. clean: the log's line of the marker.
    """

    bases: Sequence[int]
    newest_bytes: int
    recovery_point: int | None
    clean: CleanLog | None
    verify_last_segments: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """Scan `bases[first:]`; in the first of them from the batch that holds `start_offset` on.

    recovery_point: below it a bad batch is damage, from it on a torn tail.
    """

    opening: Opening
    reason: str
    first: int
    start_offset: int
    recovery_point: int


def recovery_plan(facts: RecoveryFacts, first_batch_is_whole: Callable[[int], bool]) -> RecoveryPlan:
    """The plan for a log with at least one segment.

    `first_batch_is_whole(base)` tells whether the segment begins with a whole batch in its range; it is asked of as
    few segments as possible, newest first.
    """
    lowest = facts.bases[0]
    recovery_point = lowest if facts.recovery_point is None else max(lowest, facts.recovery_point)
    if facts.clean is not None and facts.clean.last_segment_bytes == facts.newest_bytes:
        return _normal(facts, facts.clean)
    changed = facts.clean is not None
    reason = "it changed after it was closed" if changed else "it was not closed"
    first = len(facts.bases) - 1
    while first > 0 and (facts.bases[first] > recovery_point or not first_batch_is_whole(facts.bases[first])):
        first -= 1
    return RecoveryPlan(
        opening=Opening.ABNORMAL,
        reason=reason,
        first=first,
        start_offset=max(facts.bases[first], recovery_point),
        recovery_point=recovery_point,
    )


def _normal(facts: RecoveryFacts, clean: CleanLog) -> RecoveryPlan:
    newest = len(facts.bases) - 1
    first = max(0, newest + 1 - facts.verify_last_segments) if facts.verify_last_segments else newest
    start_offset = facts.bases[first] if facts.verify_last_segments else max(facts.bases[newest], clean.end_offset)
    return RecoveryPlan(
        opening=Opening.NORMAL,
        reason="closed clean",
        first=first,
        start_offset=start_offset,
        recovery_point=clean.end_offset,  # the marker is written only when all below is on disk
    )

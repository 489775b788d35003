"""Which old segments may go: a decision over facts, taken without touching a file.

    bases      0        1000       2000       3000 (active)
               |--------|----------|----------|-----....
    kept from       ^ 700 log start       ^ floor 2600: min(stable offset, what holders, leases and derived stores need)
    may go     .......  ...................                  oldest first, up to the first that has to stay

    ends above the floor                                          stays, and with it all behind it
    ends at or below the log start                                goes: nobody may read it any more
    its newest record is older than retention_ms                  goes
    the log without it still has retention_bytes                  goes
    none of these, or a rule is off (None)                        stays, and with it all behind it

A record without a time (-1), or with one in the future, is not old. Source: Kafka's UnifiedLog.deleteOldSegments.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SealedSegment:
    """A segment that is written to no more: it holds the offsets [base_offset, end_offset)."""

    base_offset: int
    end_offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """What a log keeps, at one moment.

    floor: first offset that somebody still needs. log_bytes: the whole log, the active segment too.
    """

    log_start_offset: int
    floor: int
    log_bytes: int
    now_ms: int
    retention_ms: int | None = None
    retention_bytes: int | None = None


def deletable(
    sealed: Sequence[SealedSegment], keeping: Keeping, newest_ms: Callable[[SealedSegment], int]
) -> Iterator[SealedSegment]:
    """Sealed segments, oldest first, that nobody needs and no rule keeps. Decides; deletes nothing.

    `newest_ms` tells the newest timestamp of a segment; it is asked only of those that time alone could free.
    """
    left_bytes = keeping.log_bytes
    for segment in sealed:
        if segment.end_offset > keeping.floor:
            return
        left_bytes -= segment.size_bytes
        if not (
            segment.end_offset <= keeping.log_start_offset
            or (keeping.retention_bytes is not None and left_bytes >= keeping.retention_bytes)
            or (keeping.retention_ms is not None and _is_older(newest_ms(segment), keeping))
        ):
            return
        yield segment


def _is_older(newest_ms: int, keeping: Keeping) -> bool:
    assert keeping.retention_ms is not None
    return 0 <= newest_ms < keeping.now_ms - keeping.retention_ms


def purgeable(
    sealed: Sequence[SealedSegment],
    floor: int,
    newest_ms: Callable[[SealedSegment], int],
    *,
    before_offset: int | None = None,
    before_ms: int | None = None,
) -> Iterator[SealedSegment]:
    """Sealed segments, oldest first, that an operator wants gone and nobody needs. Decides; deletes nothing.

    A segment goes if it ends at or below `before_offset`, or if its newest record is older than `before_ms`. The first
    one that has to stay keeps all behind it.
    """
    for segment in sealed:
        is_old = before_offset is not None and segment.end_offset <= before_offset
        if not is_old and before_ms is not None:
            is_old = 0 <= newest_ms(segment) < before_ms
        if not is_old or segment.end_offset > floor:
            return
        yield segment

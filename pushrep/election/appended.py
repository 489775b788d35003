"""When the records that a replica has not acknowledged were appended: how old its lag is.

A mark (base offset, time) per append, thinned to one in MARK_EVERY_MS, so that a log of a million appends a second
keeps 600 for half a minute; an age is too high by at most that. Ages that are too old to tell members apart are for
people: they are too high by at most an eighth, which 100 marks hold for weeks.
"""

from bisect import bisect_right
from collections import deque

MARK_EVERY_MS = 50
_COARSE_PER_AGE = 8


class AppendTimes:
    """Offsets and times ascend. Not thread-safe."""

    __slots__ = ("_marks",)

    def __init__(self, log_end_offset: int, now_ms: int) -> None:
        # What an older leader left counts as appended now: how long it waited before is nobody's fault here.
        self._marks: deque[tuple[int, int]] = deque([(0, now_ms)] if log_end_offset else [])

    def on_append(self, base_offset: int, now_ms: int) -> None:
        """A record at `base_offset` was appended."""
        if not self._marks or now_ms - self._marks[-1][1] >= MARK_EVERY_MS:
            self._marks.append((base_offset, now_ms))

    def time_of(self, offset: int) -> int | None:
        """When the record at `offset` was appended, at most MARK_EVERY_MS early; None if nothing was."""
        at = bisect_right(self._marks, offset, key=lambda mark: mark[0])
        return self._marks[max(0, at - 1)][1] if self._marks else None

    def forget(self, offset: int, before_ms: int) -> None:
        """Nobody lacks records below `offset`; what is older than `before_ms` need not be told exactly any more."""
        marks = self._marks
        while len(marks) > 1 and marks[1][0] <= offset:
            marks.popleft()
        old = bisect_right(marks, before_ms, key=lambda mark: mark[1])
        if old <= _COARSE_PER_AGE:
            return
        kept = [marks[0]]
        for at in range(1, old - 1):
            if (marks[at + 1][1] - kept[-1][1]) * _COARSE_PER_AGE > before_ms - marks[at + 1][1]:
                kept.append(marks[at])
        self._marks = deque([*kept, *list(marks)[old - 1 :]])

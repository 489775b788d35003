"""A set of offsets of one log partition as rising half-open ranges: a million neighbours are one pair of numbers."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator


class OffsetRanges:
    """Offsets; made empty or from ranges [start, end) in any order, which may touch or overlap."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in sorted(ranges):
            if start < end:
                self.add(start, end)

    def add(self, start: int, end: int) -> None:
        """Put in [start, end). Neighbours that come in their order cost nothing; others the ranges behind them."""
        assert start < end, "not a range"
        first = bisect_right(self._ends, start - 1)  # the first that touches it or lies behind it
        last = bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def __contains__(self, offset: object) -> bool:
        return isinstance(offset, int) and self.end_of(offset) != offset

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """The ranges, rising; none touches the next."""
        return iter(list(zip(self._starts, self._ends, strict=True)))

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OffsetRanges) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment] # it can be added to

    def end_of(self, offset: int) -> int:
        """The first offset from this one on that is not in the set."""
        at = bisect_right(self._starts, offset) - 1
        return self._ends[at] if at >= 0 and offset < self._ends[at] else offset

    def meets(self, start: int, end: int) -> bool:
        """Whether any offset of [start, end) is in the set."""
        at = bisect_right(self._ends, start)
        return start < end and at < len(self._starts) and self._starts[at] < end

    def missing(self, start: int, end: int) -> "OffsetRanges":
        """What of [start, end) is not in the set."""
        found = OffsetRanges()
        for one_start, one_end in self:
            if start < min(one_start, end):
                found.add(start, min(one_start, end))
            start = max(start, one_end)
        if start < end:
            found.add(start, end)
        return found

    @property
    def count(self) -> int:
        """How many offsets there are."""
        return sum(self._ends) - sum(self._starts)

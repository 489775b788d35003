"""How many log bytes lie between two offsets, and where to cut a range into pieces of about so many bytes. Pure.

Walking every batch header of a large log would read half of it. So the density (bytes per record) is looked up at a
few record batches and taken to hold around each of them:

    start ----p0----|----p1----|----p2----|----p3---- end      sections of equal record counts, a probe in each one

Sizes are estimates; the cuts lie at record batches, so that no batch is decoded by two tasks.
"""

from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

SECTIONS = 8


class BatchSpan(NamedTuple):
    """Where one record batch lies: offsets [base, end), and its size in the log."""

    base: int
    end: int
    size_bytes: int

    @property
    def density(self) -> float:
        """Log bytes per offset."""
        return self.size_bytes / max(1, self.end - self.base)


Probe: TypeAlias = Callable[[int], BatchSpan]
"""The record batch that holds an offset."""


class ByteRuler:
    """Measures [start, end) of one partition in log bytes; `probe` is asked at most SECTIONS + 1 times at birth.

    A range that the first batch's density makes much smaller than `enough_bytes` is not looked at any closer.
    """

    def __init__(self, start: int, end: int, probe: Probe, enough_bytes: int) -> None:
        assert start < end, f"nothing to measure in [{start}, {end})"
        self._probe = probe
        count = end - start
        first = probe(start)
        sections = 1 if first.end >= end or first.density * count < enough_bytes / 2 else min(SECTIONS, count)
        self._edges = [start + count * section // sections for section in range(sections + 1)]
        middles = [(low + high) // 2 for low, high in pairwise(self._edges)]
        self._densities = [first.density] if sections == 1 else [probe(middle).density for middle in middles]
        spans = [high - low for low, high in pairwise(self._edges)]
        sizes = (density * span for density, span in zip(self._densities, spans, strict=True))
        self._sizes = list(accumulate(sizes, initial=0.0))

    @property
    def size_bytes(self) -> float:
        """About how many bytes the whole range takes."""
        return self._sizes[-1]

    def offset_at(self, size_bytes: float) -> int:
        """The offset about `size_bytes` behind the start, no further than the end."""
        section = min(bisect_right(self._sizes, size_bytes), len(self._densities)) - 1
        within = (size_bytes - self._sizes[section]) / self._densities[section]
        return min(self._edges[section] + int(within), self._edges[-1])

    def cut(self, piece_bytes: float) -> list[tuple[int, int]]:
        """The range as contiguous pieces of about `piece_bytes` each, cut where a record batch begins."""
        start, end = self._edges[0], self._edges[-1]
        count = max(1, round(self.size_bytes / piece_bytes))
        inner = (self._probe(self.offset_at(self.size_bytes * piece / count)).base for piece in range(1, count))
        edges = [start, *sorted({edge for edge in inner if start < edge < end}), end]
        return list(pairwise(edges))

    def end_within(self, size_bytes: float) -> int:
        """How far about `size_bytes` reach: the end of the last record batch in them, one batch at least."""
        start, end = self._edges[0], self._edges[-1]
        if self.size_bytes <= size_bytes:
            return end
        last = self._probe(min(self.offset_at(size_bytes), end - 1))
        return min(end, last.base if last.base > start else last.end)

"""Position, length and bound in numbers: which part of which batch may go out now. Pure.

    request     [ position ........................................ end )    TO_END, or the nth record
    bound       ................ stable | high watermark | flushed | written | counter
    recorded    ......................................... what the log holds of it
                 limit = min of the three, read again at every turn

A batch that crosses `end` goes out and is cut on delivery. A batch that crosses the bound waits until it has passed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pushrep.replay.model import LogSnapshot

LOG_BOUNDS = ("stable", "high_watermark", "flushed", "written")


class Tip(NamedTuple):
    """`recorded`: what there is for this bound; `bound`: how much of it may go out; `is_frozen`: it won't grow."""

    recorded: int
    bound: int
    is_frozen: bool = False


def tip_of(facts: LogSnapshot, bound: str, counter: int | None, last_counter: int = 0) -> Tip:
    """The tip under a log's own bound, or under a counter's (`counter` None: closed, it stays at `last_counter`).

    What a counter lets through is below the stable offset, too: it is somebody's progress, not the disk's.
    """
    if bound in LOG_BOUNDS:
        offset = min(facts.written, int(getattr(facts, bound)))
        return Tip(offset, offset)
    value = last_counter if counter is None else counter
    return Tip(facts.stable, min(facts.stable, value), is_frozen=counter is None)


class Span(NamedTuple):
    """One whole batch as the arithmetic sees it: offsets [base_offset, next_offset).

    `records` counts data, none in a control batch. `offsets` are theirs, if compaction left holes and someone counts.
    """

    base_offset: int
    next_offset: int
    size_bytes: int
    records: int
    offsets: tuple[int, ...] | None = None

    @property
    def is_dense(self) -> bool:
        """Every offset has its record."""
        return self.records == self.next_offset - self.base_offset

    def count_in(self, start: int, end: int) -> int:
        """Records with an offset in [start, end). `offsets` has to be there unless the batch is dense or empty."""
        start, end = max(start, self.base_offset), min(end, self.next_offset)
        if self.is_dense:
            return max(0, end - start)
        if start <= self.base_offset and end >= self.next_offset:
            return self.records
        return sum(start <= offset < end for offset in self._known())

    def end_of(self, start: int, nth: int) -> int:
        """The offset behind the `nth` record (from 1) at or above `start`; there are as many."""
        if self.is_dense:
            return max(start, self.base_offset) + nth
        return [offset for offset in self._known() if offset >= start][nth - 1] + 1

    def _known(self) -> tuple[int, ...]:
        if self.offsets is None and self.records:
            raise ValueError(f"the batch at {self.base_offset} has holes: its offsets are needed")
        return self.offsets or ()


@dataclass(slots=True)
class Clip:
    """The first `spans` of a block go out, cut to [start, end): `records` of them, `size_bytes` on the way.

    `records` is exact if they are counted; else a batch with holes counts whole, even if it is cut.

    `held_until`: the next batch crosses the bound; there is nothing to do before it reaches this offset.
    """

    start: int
    end: int
    spans: int = 0
    records: int = 0
    size_bytes: int = 0
    held_until: int | None = None


def clip(  # noqa: PLR0913 - one number a rule
    spans: Sequence[Span], *, position: int, end: int | None, left: int | None, bound: int, budget_bytes: int
) -> Clip:
    """What of `spans`, which were read from `position` on, goes out now; at least one batch if any may.

    end: the request's, None without one. left: records that may still go, None if they aren't counted.
    """
    stop = bound if end is None else min(end, bound)
    if left is None and spans and position <= spans[0].base_offset and spans[-1].next_offset <= stop:
        size_bytes = sum([span.size_bytes for span in spans])
        if size_bytes <= budget_bytes:  # as a rule: no part of any of them is to be looked at
            records = sum([span.records for span in spans])
            return Clip(position, spans[-1].next_offset, len(spans), records, size_bytes)
    taken = Clip(position, position)
    for span in spans:
        if span.base_offset >= stop:
            taken.end = stop  # a hole up to there
            break
        if span.next_offset > bound:
            taken.held_until = span.next_offset
            break
        if taken.spans and taken.size_bytes + span.size_bytes > budget_bytes:
            break
        until = span.next_offset if end is None else min(span.next_offset, end)
        count = span.count_in(taken.end, until) if left is not None or span.is_dense else span.records
        taken.spans += 1
        taken.size_bytes += span.size_bytes
        if left is not None and count >= left - taken.records:
            taken.end = span.end_of(taken.end, left - taken.records)
            taken.records = left
            break
        taken.records += count
        taken.end = until
    if not spans:
        taken.end = max(position, stop)  # the last batches were compacted away
    return taken

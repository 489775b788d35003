"""The plan of a batch: with which marks each slice must begin, and the marks after it. Pure: knows no Spark.

    slices: the rows of one (topic, partition) inside one Spark partition, log offsets [start, end)
                 slice 1          slice 2          slice 3         of one log partition, by log offset
    marks N-1 ──▶ max ── merge ──▶ max ── merge ──▶ max ──merge──▶ marks N
              └─▶ starts 1    └─▶ starts 2     └─▶ starts 3

Running maximum is associative, so each slice can be filtered alone once its starting marks are known; marks N are
known before anything is written. Slices of one log partition that overlap tell of a shuffle: then no slice has an
order of its own, and the rows must be sorted first. And where the runs (runs.py) tell which stretches of the log are
replays, no row is left to decide.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from filtering.marks import HighwaterMarks
from spark_jobs.batch_marks import LogRange, MarksKey, SentBack
from spark_jobs.errors import FrameChanged
from spark_jobs.filter_settings import FilterRule, looks_unlikely
from spark_jobs.mark_epochs import Epoch, EpochsMixed, by_epoch, carried
from spark_jobs.runs import Runs, Stretch, decide, hold_each_row_once


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows of one log partition in one Spark partition; `marks` are what a filter knows that saw only them.

    `ascends`: False if they were seen out of log order. `runs`: the keyed ones, None where nobody counted them;
    `unkeyed_runs`: all others as those of one pair. The epochs are those of mark_epochs.py. `borrowed`: found in
    another frame of the same rows, which may lie in other Spark partitions there: good for runs, ranges and marks, not
    to begin a second pass with.
    """

    topic: str
    partition: int
    start: int
    end: int
    rows: int
    unkeyed: int
    marks: HighwaterMarks
    ascends: bool = True
    runs: Runs | None = field(default=None, compare=False)
    unkeyed_runs: Runs | None = field(default=None, compare=False)
    startpoint_epoch: int = 0
    marks_epoch: int = 0
    borrowed: bool = False


@dataclass(frozen=True, slots=True)
class SliceStart:
    """With which marks to begin the slice of `rows` rows at log offsets [start, end)."""

    topic: str
    partition: int
    start: int
    end: int
    rows: int
    marks: HighwaterMarks


@dataclass(frozen=True, slots=True)
class BatchVerdict:
    """Which rows drop: by topic, stretches of the log; all others pass. Counts as BatchCounts has them."""

    dropped: tuple[tuple[str, Stretch], ...] = ()
    dropped_rows: int = 0
    jumped: int = 0


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What the first pass found: how to filter each slice, and the marks after the batch.

    `must_sort`: the slices tell nothing about order, `starts` are those of whole log partitions, sorted.
    `all_dropped`: (topic, pid, source partition) of the pairs of which no row will pass. `unlikely_pairs`: those that
    look like keys that are metadata by chance. `verdict`: not None where
    the runs decide it all.
    """

    starts: tuple[SliceStart, ...]
    must_sort: bool
    marks: Mapping[MarksKey, HighwaterMarks]
    ranges: tuple[LogRange, ...]
    rows: int
    unkeyed: int
    pairs: int
    all_dropped: tuple[tuple[str, int, int], ...]
    verdict: BatchVerdict | None = None
    unlikely_pairs: int = 0


def plan_batch(
    slices: Iterable[Slice], before: Mapping[MarksKey, HighwaterMarks], *, rule: FilterRule, now_ms: int, sort: bool
) -> BatchPlan:
    """Give each slice its starting marks, and the batch its marks. `before` are those after the batch before.

    `now_ms` becomes the last advance of every pair that rises. Raises PairSplit for a pair in two log partitions,
    EpochsMixed for a partition in two startpoint epochs.
    """
    in_order = sorted(slices, key=lambda s: (s.topic, s.partition, s.start))
    must_sort = sort or _is_shuffled(in_order)
    marks = {key: old.with_window(rule.window) for key, old in before.items()}
    starts: list[SliceStart] = []
    dropped: list[tuple[str, int, int]] = []
    pairs = unlikely_pairs = 0
    verdict: BatchVerdict | None = BatchVerdict()
    for topic in dict.fromkeys(s.topic for s in in_order):
        own = [s for s in in_order if s.topic == topic]
        epochs, seen = epochs_of(own), merged_marks(s.marks for s in own)
        old = carried(marks, topic, epochs, seen)
        new = old.merge(_advanced_at(seen, now_ms))
        others = {key: kept for key, kept in marks.items() if key.topic != topic}
        marks = others | by_epoch(new, marks, topic, epochs)
        pairs += len(seen)
        unlikely_pairs += int(looks_unlikely(seen).sum()) if rule.may_be_chance else 0
        verdict = None if verdict is None else _with_topic(verdict, topic, own, old)
        dropped.extend((topic, pid, partition) for pid, partition in _unchanged(seen, old, new))
        starts.extend(_whole_partitions(own, old) if must_sort else _slice_starts(own, old))
    if verdict is not None and not rule.counts_gaps:
        verdict = replace(verdict, jumped=0)
    if rule.ttl_s is not None:
        marks = {key: m.without_expired(now_ms=now_ms, ttl_s=rule.ttl_s) for key, m in marks.items()}
    return BatchPlan(
        tuple(starts),
        must_sort,
        {key: m for key, m in marks.items() if len(m)},
        _ranges(in_order),
        sum(s.rows for s in in_order),
        sum(s.unkeyed for s in in_order),
        pairs,
        tuple(dropped),
        verdict,
        unlikely_pairs,
    )


def _with_topic(verdict: BatchVerdict, topic: str, own: list[Slice], old: HighwaterMarks) -> BatchVerdict | None:
    """The verdict with one more topic; None where this topic's runs don't decide, or nobody looked for them."""
    runs = [s.runs for s in own if s.runs is not None]
    found = decide(Runs.concatenated(runs), old) if len(runs) == len(own) else None
    unkeyed = [s.unkeyed_runs for s in own if s.unkeyed_runs is not None]
    if found is None or not hold_each_row_once(Runs.concatenated(unkeyed)):
        return None
    dropped = tuple((topic, stretch) for stretch in found.dropped)
    rows = verdict.dropped_rows + found.dropped_rows
    return BatchVerdict(verdict.dropped + dropped, rows, verdict.jumped + found.jumped)


def ranges_of(slices: Iterable[Slice]) -> tuple[LogRange, ...]:
    """The log ranges that the slices cover, one a log partition, ascending."""
    return _ranges(sorted(slices, key=lambda s: (s.topic, s.partition, s.start)))


def _ranges(in_order: list[Slice]) -> tuple[LogRange, ...]:
    bounds: dict[tuple[str, int], LogRange] = {}
    for s in in_order:
        known = bounds.get((s.topic, s.partition), LogRange(s.topic, s.partition, s.start, s.end, s.startpoint_epoch))
        bounds[s.topic, s.partition] = known._replace(start=min(known.start, s.start), end=max(known.end, s.end))
    return tuple(bounds.values())


def _is_shuffled(in_order: list[Slice]) -> bool:
    same = ((a, b) for a, b in pairwise(in_order) if (a.topic, a.partition) == (b.topic, b.partition))
    return not all(s.ascends for s in in_order) or any(b.start < a.end for a, b in same)


def _slice_starts(own: list[Slice], old: HighwaterMarks) -> Iterator[SliceStart]:
    """Each slice begins with the old marks and what the slices of its log partition before it saw."""
    for partition in dict.fromkeys(s.partition for s in own):
        of_partition = [s for s in own if s.partition == partition]
        running = _restricted(old, merged_marks(s.marks for s in of_partition))
        for s in of_partition:
            yield SliceStart(s.topic, s.partition, s.start, s.end, s.rows, _restricted(running, s.marks))
            running = running.merge(s.marks)


def _whole_partitions(own: list[Slice], old: HighwaterMarks) -> Iterator[SliceStart]:
    for range_ in _ranges(own):
        of_partition = [s for s in own if s.partition == range_.partition]
        marks = _restricted(old, merged_marks(s.marks for s in of_partition))
        yield SliceStart(*range_[:4], sum(s.rows for s in of_partition), marks)


def merged_marks(parts: Iterable[HighwaterMarks]) -> HighwaterMarks:
    """All of them as one."""
    merged = HighwaterMarks()
    for part in _pairwise_merged(list(parts)):
        merged = merged.merge(part)
    return merged


def _pairwise_merged(parts: list[HighwaterMarks]) -> list[HighwaterMarks]:
    """As a tree, so that many slices with many pairs cost n log n, not n squared."""
    while len(parts) > 1:
        odd = parts[-1:] if len(parts) % 2 else []
        parts = [a.merge(b) for a, b in zip(parts[::2], parts[1::2], strict=False)] + odd
    return parts


def _restricted(marks: HighwaterMarks, to: HighwaterMarks) -> HighwaterMarks:
    """Only the pairs that `to` has: what an executor needs of the marks of a whole topic."""
    columns = to.to_columns()
    found = marks.find(columns.pids, columns.partitions)
    keep = np.zeros(len(marks), np.bool_)
    keep[found[found >= 0]] = True
    return marks.without_rows(np.flatnonzero(~keep))


def _advanced_at(seen: HighwaterMarks, now_ms: int) -> HighwaterMarks:
    columns = seen.to_columns()
    return HighwaterMarks.from_columns(
        columns.pids,
        columns.partitions,
        columns.offsets,
        columns.destination_partitions,
        advanced_ms=now_ms,
        bitmaps=columns.bitmaps if columns.window else None,
        window=columns.window,
    )


def _unchanged(seen: HighwaterMarks, old: HighwaterMarks, new: HighwaterMarks) -> Iterator[tuple[int, int]]:
    """The pairs that came and whose mark and bits stayed: not one of their rows was new."""
    columns, before, after = seen.to_columns(), old.to_columns(), new.to_columns()
    rows_old, rows_new = (m.find(columns.pids, columns.partitions) for m in (old, new))
    known = np.flatnonzero(rows_old >= 0)
    same: npt.NDArray[Any] = before.offsets[rows_old[known]] == after.offsets[rows_new[known]]
    if before.window:
        same &= (before.bitmaps[rows_old[known]] == after.bitmaps[rows_new[known]]).all(axis=1)
    for row in known[same]:
        yield int(columns.pids[row]), int(columns.partitions[row])


def in_epochs(slices: Iterable[Slice], sent_back: Iterable[SentBack]) -> list[Slice]:
    """The slices, with the epochs of partitions that were sent back in the checkpoint. Raises EpochsMixed."""
    numbers = {(one.topic, one.partition): one.number for one in sent_back}
    found = []
    for one in slices:
        number = numbers.get((one.topic, one.partition), 0)
        if 0 < one.startpoint_epoch <= number:
            raise EpochsMixed(one.topic, one.partition, (one.startpoint_epoch, number))
        is_sent = number and not one.startpoint_epoch
        found.append(replace(one, startpoint_epoch=number, marks_epoch=number) if is_sent else one)
    return found


def epochs_of(own: Iterable[Slice]) -> dict[int, Epoch]:
    """The epoch of each log partition of one topic. Raises EpochsMixed."""
    epochs: dict[int, Epoch] = {}
    for one in own:
        epoch = Epoch(one.startpoint_epoch, one.marks_epoch)
        if epochs.setdefault(one.partition, epoch) != epoch:
            raise EpochsMixed(one.topic, one.partition, (epochs[one.partition].startpoint, epoch.startpoint))
    return epochs


def check_unchanged(first: Iterable[Slice], again: Iterable[Slice]) -> None:
    """Two first passes over one frame must have found the same rows. Raises FrameChanged."""
    expected, found = _by_partition(first), _by_partition(again)
    for where in sorted(expected.keys() | found.keys()):
        one, other = expected.get(where), found.get(where)
        if one != other:
            start, end, *_ = one or other or (0, 0)
            raise FrameChanged(where[1], start, end, one[2] if one else 0, other[2] if other else 0)


def _by_partition(slices: Iterable[Slice]) -> dict[tuple[str, int], tuple[int, int, int, int]]:
    """(topic, partition) → first log offset, the one behind the last, rows, rows without metadata."""
    found: dict[tuple[str, int], tuple[int, int, int, int]] = {}
    for s in slices:
        start, end, rows, unkeyed = found.get((s.topic, s.partition), (s.start, s.end, 0, 0))
        found[s.topic, s.partition] = min(start, s.start), max(end, s.end), rows + s.rows, unkeyed + s.unkeyed
    return found

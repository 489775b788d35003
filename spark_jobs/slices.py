"""The plan of a batch: with which marks each slice must begin, and the marks after it. Pure: knows no Spark.

    slices: the rows of one (topic, partition) inside one Spark partition, log offsets [start, end)
                 slice 1          slice 2          slice 3         of one log partition, by log offset
    marks N-1 ──▶ max ── merge ──▶ max ── merge ──▶ max ──merge──▶ marks N
              └─▶ starts 1    └─▶ starts 2     └─▶ starts 3

Running maximum is associative, so each slice can be filtered alone once its starting marks are known; marks N are
known before anything is written. If slices of one log partition overlap, a shuffle ran before the filter: then no
slice has an order of its own, and the rows must be sorted first.

Often no row has to be decided, because runs decide the batch. A run is rows of one pair whose source and log offsets
keep one distance. Its bounds describe it: with one distance, source offsets rise with log offsets. No row stands in a
run twice; the first pass makes sure of that.

    log offset      10  11  12  13  14  15      pair A has two runs: 10 to 12 at distance -10, 15 at -12
    pair A           0   1   2           3
    pair B                       7   8

If the runs of a pair, sorted by log offset, do not overlap, the maximum of all rows before each run is known, and the
rule decides ranges of a run at once, in whatever physical order the rows lie:

    maximum before   below the run's lowest   inside it                       at its highest or above
    of the run       all rows are kept        rows up to the maximum drop     all rows drop

Anything else (runs that overlap, holes where a run is cut) proves nothing: the rows are decided one by one. A row that
stands in two runs makes them overlap.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from filtering.marks import HighwaterMarks
from spark_jobs.batch_marks import LogRange, MarksKey, SentBack
from spark_jobs.errors import FrameChanged
from spark_jobs.filter_settings import FilterRule, looks_unlikely
from spark_jobs.mark_epochs import Epoch, EpochsMixed, by_epoch, carried

Numbers = npt.NDArray[np.int64]


class Runs(NamedTuple):
    """n runs as columns: pair, first and last log offset, first and last source offset, number of rows."""

    pids: Numbers
    partitions: Numbers
    starts: Numbers
    lasts: Numbers
    lows: Numbers
    highs: Numbers
    rows: Numbers

    @classmethod
    def concatenated(cls, parts: Sequence[Self]) -> Self:
        """The runs of all parts."""
        none = cls(*[np.empty(0, np.int64)] * len(cls._fields))
        return cls(*(np.concatenate(columns) for columns in zip(none, *parts, strict=True)))

    def some(self, rows: Numbers) -> Self:
        """The runs at these indexes."""
        return self._replace(**{name: column[rows] for name, column in zip(self._fields, self, strict=True)})


class Stretch(NamedTuple):
    """Log offsets [start, end) whose records of one pair are replays."""

    pid: int
    partition: int
    start: int
    end: int


class RunsVerdict(NamedTuple):
    """What becomes of every row of the runs: those in `dropped` go, all others stay.

    `dropped_rows`: how many go. `jumped`: source offsets that the marks pass over.
    """

    dropped: tuple[Stretch, ...]
    dropped_rows: int
    jumped: int


def decide(runs: Runs, marks: HighwaterMarks) -> RunsVerdict | None:
    """The rule over whole runs, beginning with `marks`; None where their bounds alone don't decide."""
    if not len(runs.rows):
        return RunsVerdict((), 0, 0)
    in_order, first = _by_pair(runs)
    if not _one_behind_another(in_order, first):
        return None
    spans = in_order.lasts - in_order.starts + 1
    known = _marks_of(in_order.pids[first], in_order.partitions[first], marks)
    before = _highest_before(in_order.highs, first, known)
    # How many offsets from the run's start are replays. Computed in this order, no sum exceeds 64 bits.
    replayed = np.where(before < in_order.lows, 0, np.minimum(before - in_order.lows, spans - 1) + 1)
    kept = np.where(replayed == spans, 0, in_order.rows - replayed)
    if ((replayed > 0) & (replayed < spans) & (in_order.rows < spans)).any():
        return None  # cut inside a run with holes: how many of its rows stay is not known
    ends = np.append(np.flatnonzero(first)[1:], len(first)) - 1
    final = np.maximum(before[ends], in_order.highs[ends])
    begins = np.where(known < 0, in_order.lows[first] - 1, known)
    kept_rows, rows = int(kept.sum()), int(in_order.rows.sum())
    stretches = tuple(_stretches(in_order, first, replayed, spans))
    return RunsVerdict(stretches, rows - kept_rows, int((final - begins).sum()) - kept_rows)


def hold_each_row_once(runs: Runs) -> bool:
    """Whether no row is in two of the runs: the runs of each pair do not overlap."""
    return _one_behind_another(*_by_pair(runs))


def _by_pair(runs: Runs) -> tuple[Runs, npt.NDArray[np.bool_]]:
    """The runs pair by pair in log order, and which are the first of their pair."""
    order = np.lexsort((runs.starts, runs.partitions, runs.pids))
    in_order = Runs(*(column[order] for column in runs))
    first = np.ones(len(order), np.bool_)
    first[1:] = (np.diff(in_order.pids) != 0) | (np.diff(in_order.partitions) != 0)
    return in_order, first


def _one_behind_another(in_order: Runs, first: npt.NDArray[np.bool_]) -> bool:
    behind = first.copy()
    behind[1:] |= in_order.starts[1:] > in_order.lasts[:-1]
    # A run can't have more rows than offsets.
    return bool(behind.all() and (in_order.rows <= in_order.lasts - in_order.starts + 1).all())


def _highest_before(highs: Numbers, first: npt.NDArray[np.bool_], known: Numbers) -> Numbers:
    """Before each run, the highest source offset of its pair: the mark, and the runs in front of it.

    A running maximum that restarts at each pair. It is taken over ranks: adding a pair's number to the offsets
    themselves could exceed 64 bits.
    """
    pair = np.cumsum(first) - 1
    candidates = np.empty(len(highs), np.int64)
    candidates[1:] = highs[:-1]
    candidates[first] = known
    values, ranks = np.unique(candidates, return_inverse=True)
    floor = pair * len(values)
    found: Numbers = values[np.maximum.accumulate(floor + ranks) - floor]
    return found


def _stretches(runs: Runs, first: npt.NDArray[np.bool_], replayed: Numbers, spans: Numbers) -> list[Stretch]:
    """What drops. Neighbouring stretches of one pair become one, since no other row of the pair lies between."""
    stretches: list[Stretch] = []
    whole_before = -2  # index of the last run of which all rows dropped
    for i in np.flatnonzero(replayed).tolist():
        pid, partition, start = int(runs.pids[i]), int(runs.partitions[i]), int(runs.starts[i])
        end = start + int(replayed[i])
        joins = bool(stretches) and not first[i] and whole_before == i - 1
        if joins:
            stretches[-1] = stretches[-1]._replace(end=end)
        else:
            stretches.append(Stretch(pid, partition, start, end))
        whole_before = i if replayed[i] == spans[i] else -2
    return stretches


def _marks_of(pids: Numbers, partitions: Numbers, marks: HighwaterMarks) -> Numbers:
    """The marks of these pairs, -1 for those without."""
    found = marks.find(pids, partitions)
    offsets = marks.to_columns().offsets
    return np.where(found >= 0, offsets[found] if len(offsets) else -1, -1)


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows of one log partition in one Spark partition; `marks` are what a filter knows that saw only them.

    `ascends`: False if they were seen out of log order. `runs`: those of rows with metadata, None where they were not
    looked for; `unkeyed_runs`: those of all other rows, as if these were one pair. The epochs are those of
    mark_epochs.py. `of_pruned_frame`: found in another frame of the same rows, where they may lie in other Spark
    partitions: its runs, ranges and marks hold, but a second pass can't begin with it.
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
    of_pruned_frame: bool = False


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
    """Which rows drop: stretches of the log (Stretch), by topic; all others pass. Counts: see BatchCounts."""

    dropped: tuple[tuple[str, Stretch], ...] = ()
    dropped_rows: int = 0
    jumped: int = 0


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What the first pass found: how to filter each slice, and the marks after the batch.

    `must_sort`: the slices tell nothing about order, `starts` are those of whole log partitions, sorted.
    `all_dropped`: (topic, pid, source partition) of the pairs of which no row will pass. `unlikely_pairs`: how many
    pairs look like business keys that are metadata by chance. `verdict`: not None if the runs decide every row.
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
    """All marks merged."""
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
    """The pairs of the batch whose mark and bits did not change: none of their rows was new."""
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

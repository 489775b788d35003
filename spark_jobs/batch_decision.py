"""Decides before a batch's rows are read which of them drop, and the marks after the batch. No Spark.

    log partition 0 of the batch: bounds, counts, seen, runs ─▶ decide ──────┬─▶ stretches of the log that drop
    log partition 1: ...                                         ▲           └─▶ or None: the rows decide one by one
    marks N-1 of each topic ──▶ the marks of its partitions ─────┘
                            └─▶ merged with what was seen ──▶ marks N

Marks N are known before anything is written. The plan names rows by their log offsets, so the rows may be in another
order when they are read again.

A run is a set of rows of one pair with the same distance between source and log offset. Runs can decide a batch without
its rows.

    log offset      10  11  12  13  14  15      A has two runs: 10 to 12 at distance -10, 15 at -12. The bounds of a run
    pair A           0   1   2           3      are enough: with one distance, source offsets rise with log offsets.
    pair B                       7   8          filtered_frame.py makes sure that no row is in a run twice

If the runs of a pair, sorted by log offset, do not overlap, then the highest source offset before each run is known,
and the rule decides a whole run, in any physical order of the rows:

    maximum before   below the run's lowest   inside the run                 at the run's highest or above
    the run          all rows are kept        rows up to the maximum drop    all rows drop

The result is stretches: ranges of log offsets in which all rows drop, of all pairs. So no row of another pair may be
inside a stretch: its run must have no holes, or no other run may be inside its bounds. In all other cases (runs that
overlap, a maximum inside a run with holes) the rows decide one by one. A row in two runs makes these overlap.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from filtering.marks import UNKNOWN, HighwaterMarks
from filtering.rule import group_pairs, highest_before
from spark_jobs.batch_marks import LogRange, MarksKey
from spark_jobs.errors import FrameChanged
from spark_jobs.filter_settings import FilterRule, looks_unlikely
from spark_jobs.mark_epochs import Epoch, EpochsMixed, by_epoch, carried

Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

NO_PAIR = -1
"""The source partition of the pair that represents all rows of a log partition which the rule does not check."""

HOLE_MAX = 1024
"""Stretches are joined over fewer missing offsets than this, so that no stretch is much longer than its rows."""

_WORD_BITS = 64
BITMAP_WORDS = 16
BITMAP_OFFSETS = BITMAP_WORDS * _WORD_BITS
"""The number of log offsets in one bitmap."""


class Runs(NamedTuple):
    """The runs of one log partition as columns: pair, first and last log offset, first and last source offset, rows."""

    pids: Numbers
    partitions: Numbers
    starts: Numbers
    lasts: Numbers
    lows: Numbers
    highs: Numbers
    rows: Numbers

    def some(self, rows: Numbers) -> "Runs":
        """The runs at these indexes."""
        return Runs(*(column[rows] for column in self))


class Stretches(NamedTuple):
    """Ranges [start, end) of log offsets of one log partition, as columns. They ascend and do not overlap."""

    starts: Numbers
    ends: Numbers


class RunsVerdict(NamedTuple):
    """Which rows of the runs drop, as log offsets, and how many. All others pass.

    jumped: how many source offsets are missing between the rows of the pairs.
    """

    dropped: Stretches
    dropped_rows: int
    jumped: int


class Bitmaps(NamedTuple):
    """Log offsets of one log partition: bit b of word w of bitmap n is offset n · BITMAP_OFFSETS + 64 w + b.

    Numbers ascend and are unique; `words` is int64 of shape (n, BITMAP_WORDS).
    """

    numbers: Numbers
    words: Numbers

    @classmethod
    def of(cls, stretches: Stretches) -> "Bitmaps":
        """The log offsets of the stretches as bitmaps."""
        starts, ends = stretches
        firsts = starts // BITMAP_OFFSETS
        counts = (ends - 1) // BITMAP_OFFSETS - firsts + 1
        which = np.repeat(np.arange(len(starts)), counts)
        numbers = firsts[which] + np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        words = numbers[:, None] * BITMAP_OFFSETS + np.arange(BITMAP_WORDS) * _WORD_BITS
        low, high = (np.clip(edge[which][:, None] - words, 0, _WORD_BITS) for edge in (starts, ends))
        return cls(numbers, _ones(high) & ~_ones(low)).merged()

    def merged(self) -> "Bitmaps":
        """The bitmaps sorted, with those of the same number joined."""
        order = np.argsort(self.numbers, kind="stable")
        numbers, starts = np.unique(self.numbers[order], return_index=True)
        return Bitmaps(numbers, np.bitwise_or.reduceat(self.words[order], starts) if len(starts) else self.words)


def _ones(count: Numbers) -> Numbers:
    """Words whose lowest `count` bits are 1. count: 0 to 64."""
    below = np.left_shift(np.uint64(1), np.minimum(count, _WORD_BITS - 1).astype(np.uint64)) - np.uint64(1)
    return np.where(count == _WORD_BITS, np.int64(-1), below.view(np.int64))


class RowsVerdict(NamedTuple):
    """The decision of a log partition's rows one by one: which drop, and counts."""

    dropped: Bitmaps
    dropped_rows: int
    late: int
    jumped: int


@dataclass(frozen=True, slots=True)
class PartitionRows:
    """The rows of one log partition in a batch: log offsets [start, end), the number of rows, and of rows without
    metadata (unkeyed).

    marks: of the batch's pairs, after these rows. If the rows decided, they include the marks before the batch; if the
        runs decide, they do not.
    runs: all rows as runs; None if the first pass read rows.
    verdict: None unless the rows were decided one by one.
    The epochs are those of mark_epochs.py.
    """

    topic: str
    partition: int
    start: int
    end: int
    rows: int
    unkeyed: int
    marks: HighwaterMarks
    startpoint_epoch: int = 0
    marks_epoch: int = 0
    runs: Runs | None = field(default=None, compare=False)
    verdict: RowsVerdict | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Which rows drop, and the marks after the batch.

    stretches, bitmaps: log offsets that drop, by (topic, partition); all other rows pass. all_dropped: (topic, pid,
    source partition) of the pairs without a row that passes. unlikely_pairs: how many pairs come from keys that are
    probably metadata by chance. by_runs: the batch has rows, and their runs decided.
    """

    marks: Mapping[MarksKey, HighwaterMarks]
    ranges: tuple[LogRange, ...]
    rows: int
    unkeyed: int
    pairs: int
    all_dropped: tuple[tuple[str, int, int], ...]
    unlikely_pairs: int
    stretches: Mapping[tuple[str, int], Stretches]
    bitmaps: Mapping[tuple[str, int], Bitmaps]
    dropped_rows: int
    late: int
    jumped: int
    by_runs: bool


def plan_batch(
    found: Iterable[PartitionRows], before: Mapping[MarksKey, HighwaterMarks], *, rule: FilterRule, now_ms: int
) -> BatchPlan | None:
    """The plan of a batch; None if its rows have to decide one by one.

    before: the marks after the previous batch. now_ms: the time of the last advance of each pair whose mark rises.
    Raises PairSplit for a pair in two log partitions, EpochsMixed for a partition in two startpoint epochs.
    """
    in_order = sorted(found, key=lambda one: (one.topic, one.partition))
    marks = {key: old.with_window(rule.window) for key, old in before.items()}
    stretches: dict[tuple[str, int], Stretches] = {}
    bitmaps: dict[tuple[str, int], Bitmaps] = {}
    all_dropped: list[tuple[str, int, int]] = []
    pairs = unlikely_pairs = dropped_rows = late = jumped = 0
    for topic in dict.fromkeys(one.topic for one in in_order):
        own = [one for one in in_order if one.topic == topic]
        epochs, seen = epochs_of(own), merged_marks(one.marks for one in own)
        old = carried(marks, topic, epochs, seen)
        new = old.merge(_advanced_at(seen, old, now_ms))
        others = {key: kept for key, kept in marks.items() if key.topic != topic}
        marks = others | by_epoch(new, marks, topic, epochs)
        pairs += len(seen)
        unlikely_pairs += int(looks_unlikely(seen).sum()) if rule.may_be_chance else 0
        all_dropped.extend((topic, pid, partition) for pid, partition in _unchanged(seen, old, new))
        for one in own:
            if one.verdict is not None:
                bitmaps[topic, one.partition] = one.verdict.dropped
                late += one.verdict.late
                verdict: Any = one.verdict
            else:
                verdict = None if one.runs is None else decide(one.runs, old)
                if verdict is None:
                    return None
                stretches[topic, one.partition] = verdict.dropped
            dropped_rows, jumped = dropped_rows + verdict.dropped_rows, jumped + verdict.jumped
    if rule.ttl_s is not None:
        marks = {key: m.without_expired(now_ms=now_ms, ttl_s=rule.ttl_s) for key, m in marks.items()}
    return BatchPlan(
        {key: m for key, m in marks.items() if len(m)},
        ranges_of(in_order),
        sum(one.rows for one in in_order),
        sum(one.unkeyed for one in in_order),
        pairs,
        tuple(all_dropped),
        unlikely_pairs,
        {where: found for where, found in stretches.items() if len(found.starts)},
        {where: found for where, found in bitmaps.items() if len(found.numbers)},
        dropped_rows,
        late,
        jumped if rule.counts_gaps else 0,
        bool(in_order) and all(one.verdict is None for one in in_order),
    )


def ranges_of(found: Iterable[PartitionRows]) -> tuple[LogRange, ...]:
    """The log ranges of the batch, one for each log partition, sorted."""
    return tuple(sorted(LogRange(one.topic, one.partition, one.start, one.end, one.startpoint_epoch) for one in found))


def merged_marks(parts: Iterable[HighwaterMarks]) -> HighwaterMarks:
    """All marks merged, as a tree: n pairs in many parts cost n log n, not n squared."""
    merged = list(parts) or [HighwaterMarks()]
    while len(merged) > 1:
        odd = merged[-1:] if len(merged) % 2 else []
        merged = [a.merge(b) for a, b in zip(merged[::2], merged[1::2], strict=False)] + odd
    return merged[0]


def marks_of_pairs(marks: HighwaterMarks, pids: Numbers, partitions: Numbers) -> HighwaterMarks:
    """The marks of these pairs alone."""
    found = marks.find(pids, partitions)
    keep = np.zeros(len(marks), np.bool_)
    keep[found[found >= 0]] = True
    return marks.without_rows(np.flatnonzero(~keep))


def starting_marks(
    before: Mapping[MarksKey, HighwaterMarks], topic: str, partition: int, epoch: Epoch
) -> HighwaterMarks:
    """The marks before the rows of one log partition in this epoch: of pairs that are in this partition, or may be.

    They are the marks that `carried` gives for these pairs. The marks of pairs in other partitions are left out; a pair
    in two partitions is detected when the partitions are merged.
    """
    parts = []
    for key, marks in before.items():
        if key.topic == topic and key.startpoint_epoch >= epoch.marks:
            here = np.isin(marks.to_columns().destination_partitions, [partition, UNKNOWN])
            parts.append(marks.without_rows(np.flatnonzero(~here)))
    return merged_marks(parts)


def decide(runs: Runs, marks: HighwaterMarks) -> RunsVerdict | None:
    """Apply the rule to whole runs, with the marks before them; None if their bounds do not decide."""
    if not len(runs.rows):
        return RunsVerdict(Stretches(runs.starts, runs.starts), 0, 0)
    by_start = runs.some(np.argsort(runs.starts, kind="stable"))
    groups = group_pairs(by_start.pids, by_start.partitions)
    in_order = Runs(*map(groups.together, by_start))
    firsts, ends = groups.starts, groups.starts + groups.sizes - 1
    behind = in_order.starts[1:] > in_order.lasts[:-1]
    behind[firsts[1:] - 1] = True  # the next pair's first run
    spans = in_order.lasts - in_order.starts + 1
    if not behind.all() or (in_order.rows > spans).any():  # runs overlap, or one has more rows than offsets
        return None
    known = _marks_of(groups.pids, groups.partitions, marks)
    before = highest_before(in_order.highs, groups, known)
    # How many offsets from the run's start on are replays. In this order no intermediate sum exceeds 64 bits.
    replayed = np.where(before < in_order.lows, 0, np.minimum(before - in_order.lows, spans - 1) + 1)
    if ((replayed > 0) & (replayed < spans) & (in_order.rows < spans)).any():
        return None  # the maximum is inside a run with holes: how many of its rows drop is unknown
    dropped = _stretches(in_order, replayed)
    if dropped is None:
        return None
    kept = np.where(replayed == spans, 0, in_order.rows - replayed)
    rose = np.maximum(before[ends], in_order.highs[ends]) - np.where(known < 0, in_order.lows[firsts] - 1, known)
    jumped = sum(rose[groups.partitions != NO_PAIR].tolist()) - int(kept[in_order.partitions != NO_PAIR].sum())
    return RunsVerdict(dropped, int(in_order.rows.sum()) - int(kept.sum()), jumped)


def _stretches(runs: Runs, replayed: Numbers) -> Stretches | None:
    """The stretches that drop, of all pairs; None if rows that pass may be inside one."""
    order = np.argsort(runs.starts, kind="stable")
    runs, replayed = runs.some(order), replayed[order]
    spans = runs.lasts - runs.starts + 1
    furthest = np.maximum.accumulate(runs.lasts)
    is_crossed = np.zeros(len(order), np.bool_)
    is_crossed[1:] = furthest[:-1] >= runs.starts[1:]
    is_crossed[:-1] |= runs.lasts[:-1] >= runs.starts[1:]
    gone = np.flatnonzero(replayed)
    if (is_crossed[gone] & (runs.rows[gone] < spans[gone])).any():
        return None
    starts, ends = runs.starts[gone], runs.starts[gone] + replayed[gone]
    # Join with the next stretch if no row is between the two: it is the next run of the log, and no earlier run ends
    # after it begins.
    holes = starts[1:] - ends[:-1]
    next_one = (np.diff(gone) == 1) & (ends[:-1] - 1 == furthest[gone[:-1]]) & (holes >= 0) & (holes < HOLE_MAX)
    joins = np.append(False, next_one | (holes == 0))[: len(gone)]
    lasts = np.append(np.flatnonzero(~joins)[1:], len(gone)) - 1
    return Stretches(starts[~joins], ends[lasts[lasts >= 0]])


def _marks_of(pids: Numbers, partitions: Numbers, marks: HighwaterMarks) -> Numbers:
    """The marks of these pairs as offsets; -1 for a pair without a mark."""
    found = marks.find(pids, partitions)
    offsets = marks.to_columns().offsets
    return np.where(found >= 0, offsets[found] if len(offsets) else -1, -1)


def _advanced_at(seen: HighwaterMarks, old: HighwaterMarks, now_ms: int) -> HighwaterMarks:
    """The marks `seen`, with `now_ms` as the time of the last advance of pairs that rise above the old marks."""
    columns, before = seen.to_columns(), old.to_columns().offsets
    rows = old.find(columns.pids, columns.partitions)
    rose = (rows < 0) | (columns.offsets > before[rows] if len(before) else True)
    return HighwaterMarks.from_columns(
        columns.pids,
        columns.partitions,
        columns.offsets,
        columns.destination_partitions,
        advanced_ms=np.where(rose, now_ms, UNKNOWN),
        bitmaps=columns.bitmaps if columns.window else None,
        window=columns.window,
    )


def _unchanged(seen: HighwaterMarks, old: HighwaterMarks, new: HighwaterMarks) -> Iterator[tuple[int, int]]:
    """The pairs of the batch whose mark and bitmap did not change: all of their rows are replays."""
    columns, before, after = seen.to_columns(), old.to_columns(), new.to_columns()
    rows_old, rows_new = (m.find(columns.pids, columns.partitions) for m in (old, new))
    known = np.flatnonzero(rows_old >= 0)
    same: npt.NDArray[Any] = before.offsets[rows_old[known]] == after.offsets[rows_new[known]]
    if before.window:
        same &= (before.bitmaps[rows_old[known]] == after.bitmaps[rows_new[known]]).all(axis=1)
    for row in known[same]:
        yield int(columns.pids[row]), int(columns.partitions[row])


def epochs_of(own: Iterable[PartitionRows]) -> dict[int, Epoch]:
    """The epoch of each log partition of one topic. Raises EpochsMixed."""
    epochs: dict[int, Epoch] = {}
    for one in own:
        epoch = Epoch(one.startpoint_epoch, one.marks_epoch)
        if epochs.setdefault(one.partition, epoch) != epoch:
            raise EpochsMixed(one.topic, one.partition, (epochs[one.partition].startpoint, epoch.startpoint))
    return epochs


def check_unchanged(first: Iterable[PartitionRows], again: Iterable[PartitionRows]) -> None:
    """Raise FrameChanged if two first passes over one frame have not found the same rows."""
    expected, found = ({(one.topic, one.partition): one for one in parts} for parts in (first, again))
    for where in sorted(expected.keys() | found.keys()):
        one, other = expected.get(where), found.get(where)
        if one is None or other is None or _counted(one) != _counted(other):
            known = one or other
            assert known is not None, "it is a key of one of them"
            raise FrameChanged(where[1], known.start, known.end, one.rows if one else 0, other.rows if other else 0)


def _counted(one: PartitionRows) -> tuple[int, int, int, int]:
    return one.start, one.end, one.rows, one.unkeyed

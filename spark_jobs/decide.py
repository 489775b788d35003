"""Decides before a batch's rows are read which of them drop, and the marks after the batch. No Spark.

    what the first pass found of each log partition: bounds, counts, marks, runs ─┐
    marks N-1 ────────────────────────────────────────────────────────────────────┴▶ decide ─┬▶ marks N, ranges, counts
                                                                                             └▶ log offsets that drop
                                                            or None: the rows decide one by one (row_decision.py)

Marks N are known before anything is written. The verdict names rows by their log offsets, so the rows may be in
another order when they are read again.

A run is a set of rows of one pair with the same distance between source and log offset. Runs can decide a batch without
its rows.

    log offset      10  11  12  13  14  15      A has two runs: 10 to 12 at distance -10, 15 at -12. The bounds of a run
    pair A           0   1   2           3      are enough: with one distance, source offsets rise with log offsets.
    pair B                       7   8          frame.py makes sure that no row is in a run twice

If the runs of a pair, sorted by log offset, do not overlap, then the highest source offset before each run is known,
and the rule decides a whole run, in any physical order of the rows:

    maximum before   below the run's lowest   inside the run                 at the run's highest or above
    the run          all rows are kept        rows up to the maximum drop    all rows drop

The result is stretches: ranges of log offsets in which all rows drop, of all pairs. So no row of another pair may be
inside a stretch: its run must have no holes, or no other run may be inside its bounds. In all other cases (runs that
overlap, a maximum inside a run with holes) the rows decide one by one. A row in two runs makes these overlap.

Startpoints: which marks a partition has after a startpoint moved it.

    marks after batch 7    (orders, 0): pairs of partitions 0 and 1
    batch 8                partition 1 comes in epoch 5: startpoint 5 moved it
      it inherits          (orders, 0): those of partition 0    (orders, 5): those of partition 1, as they were
      it resets marks      (orders, 0): those of partition 0    (orders, 5): what partition 1 holds from here on
      a table is replaced  (orders, 0): those of partition 0    (orders, 5): those of partition 1, as they were where it
                                                                             reads again (replacing.py)

A pair lives in one partition of the destination, so a partition's marks move as a whole, and no pair is under two
epochs. The column startpoint_epoch names the startpoint that a row's run started from. Of the startpoints before it,
marks_epoch names the newest that reset marks: so a reset is not missed if no row came between two startpoints.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from filtering.errors import shown_partition
from filtering.marks import UNKNOWN, HighwaterMarks
from filtering.replay_filter import FilterCounts
from filtering.rule import group_pairs, highest_before
from spark_jobs.batch_marks import LogRange, MarksKey
from spark_jobs.columns import FilterRule
from spark_jobs.errors import FrameChanged, FrameUnusable

Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

EPOCH_COLUMNS = ("startpoint_epoch", "marks_epoch")

NO_PAIR = -1
"""The source partition of the pair that represents all rows of a log partition which the rule does not check."""

HOLE_MAX = 1024
"""Stretches are joined over fewer missing offsets than this, so that no stretch is much longer than its rows."""

_NAMED_IN_LOG = 10
PARTITIONS_LIKELY = 1 << 20
OFFSETS_LIKELY = 1 << 53
"""No source has numbers as high; of random keys that parse, all but one in two million have one of them."""

_WORD_BITS = 64
BITMAP_WORDS = 16
BITMAP_OFFSETS = BITMAP_WORDS * _WORD_BITS
"""The number of log offsets in one bitmap."""


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """What became of a batch's rows. rows = kept + dropped + unkeyed; late rows are among the dropped.

    `unkeyed` passed untouched: no metadata, or a PID outside of `only_pids`. `jumped`: source offsets that marks
    passed over, 0 as long as nothing is missing. `all_dropped`: (topic, pid, source partition) of pairs of which no row
    passed. `skipped`: the batch had been stored before, the handler was not called; kept and dropped are 0.
    `unlikely_pairs` name a source partition or offset that no source has, as business keys of 20 bytes do
    that are metadata by chance.
    """

    batch_id: int
    rows: int
    unkeyed: int
    pairs: int
    kept: int = 0
    dropped: int = 0
    late: int = 0
    jumped: int = 0
    all_dropped: tuple[tuple[str, int, int], ...] = ()
    skipped: bool = False
    unlikely_pairs: int = 0

    def added_to(self, before: FilterCounts | None) -> FilterCounts:
        """The sums of the batches before, with this one: what `pushrep.status.JobStatus` shows."""
        if self.skipped and before is not None:
            return before
        return FilterCounts(
            kept=self.kept,
            dropped=self.dropped,
            unkeyed=0 if self.skipped else self.unkeyed,
            other_pids=0,
            late=self.late,
            pairs=self.pairs,
            jumped=self.jumped,
        ).added_to(before)


def warn_of(log: logging.Logger, what: str, counts: BatchCounts) -> None:
    """Warn of pairs of which every row was dropped, and of business keys that are taken for metadata.

    what: whose counts they are.
    """
    if counts.all_dropped:
        log.warning(
            "%s: every row of %d (topic, pid, source partition) was dropped: %s%s; a part of the source that is "
            "read again looks like this, and so does a re-used PID, or a source that began again at offset 0",
            what,
            len(counts.all_dropped),
            list(counts.all_dropped[:_NAMED_IN_LOG]),
            " and more" if len(counts.all_dropped) > _NAMED_IN_LOG else "",
        )
    if counts.unlikely_pairs:
        log.warning(
            "%s: %d of %d (pid, source partition) name a source partition from %d or an offset from %d on, which no "
            "source has: business keys of 20 bytes look like this, and one that comes again, or out of order, is "
            "dropped. Name your producers (only_pids, --only-pid), or carry the metadata in a header",
            what,
            counts.unlikely_pairs,
            counts.pairs,
            PARTITIONS_LIKELY,
            OFFSETS_LIKELY,
        )


class Epoch(NamedTuple):
    """The startpoint that a partition's run began with, and the newest one up to it that reset marks; 0: none."""

    startpoint: int = 0
    marks: int = 0


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


class PartitionVerdict(NamedTuple):
    """Which rows of a log partition drop, as log offsets; all others pass. Counts of rows: dropped, late among them.

    jumped: how many source offsets are missing between the rows of the pairs.
    """

    dropped: Stretches | Bitmaps
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
    The epochs are as Epoch says.
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
    verdict: PartitionVerdict | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class BatchVerdict:
    """Which rows of a batch drop, the marks after it, and its counts (of batch number 0).

    dropped: log offsets, by (topic, partition); all other rows pass. by_runs: the batch has rows, and their runs
    decided.
    """

    marks: Mapping[MarksKey, HighwaterMarks]
    counts: BatchCounts
    dropped: Mapping[tuple[str, int], Stretches | Bitmaps]
    by_runs: bool


def decide(
    found: Iterable[PartitionRows], before: Mapping[MarksKey, HighwaterMarks], *, rule: FilterRule, now_ms: int
) -> BatchVerdict | None:
    """The verdict on a batch; None if its rows have to decide one by one.

    before: the marks after the previous batch. now_ms: the time of the last advance of each pair whose mark rises.
    Raises PairSplit for a pair in two log partitions, FrameUnusable for a partition in two startpoint epochs.
    """
    in_order = sorted(found, key=lambda one: (one.topic, one.partition))
    marks = {key: old.with_window(rule.window) for key, old in before.items()}
    verdicts: dict[tuple[str, int], PartitionVerdict] = {}
    all_dropped: list[tuple[str, int, int]] = []
    pairs = unlikely_pairs = 0
    for topic, rows_of_topic in groupby(in_order, key=lambda one: one.topic):
        own = list(rows_of_topic)
        epochs, seen = epochs_of(own), merged_marks(one.marks for one in own)
        old = carried(marks, topic, epochs, seen)
        risen, unchanged = _advanced_at(seen, old, now_ms)
        others = {key: kept for key, kept in marks.items() if key.topic != topic}
        marks = others | by_epoch(old.merge(risen), marks, topic, epochs)
        for one in own:
            verdict = one.verdict or (one.runs and verdict_of_runs(one.runs, old))
            if verdict is None:
                return None
            verdicts[topic, one.partition] = verdict
        pairs += len(seen)
        unlikely_pairs += int(looks_unlikely(seen).sum()) if rule.may_be_chance else 0
        all_dropped.extend((topic, *pair) for pair in unchanged)
    if rule.ttl_s is not None:
        marks = {key: m.without_expired(now_ms=now_ms, ttl_s=rule.ttl_s) for key, m in marks.items()}
    rows, unkeyed = sum(one.rows for one in in_order), sum(one.unkeyed for one in in_order)
    dropped, late, jumped = (sum(column) for column in zip((0, 0, 0), *(v[1:] for v in verdicts.values()), strict=True))
    counts = BatchCounts(
        0,
        rows,
        unkeyed,
        pairs,
        kept=rows - unkeyed - dropped,
        dropped=dropped,
        late=late,
        jumped=jumped if rule.counts_gaps else 0,
        all_dropped=tuple(all_dropped),
        unlikely_pairs=unlikely_pairs,
    )
    return BatchVerdict(
        {key: m for key, m in marks.items() if len(m)},
        counts,
        {where: verdict.dropped for where, verdict in verdicts.items() if len(verdict.dropped[0])},
        bool(in_order) and all(one.verdict is None for one in in_order),
    )


def looks_unlikely(marks: HighwaterMarks) -> Mask:
    """Which pairs no real source can have: their keys probably are metadata by chance."""
    columns = marks.to_columns()
    return (columns.partitions >= PARTITIONS_LIKELY) | (columns.offsets >= OFFSETS_LIKELY)


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


def verdict_of_runs(runs: Runs, marks: HighwaterMarks) -> PartitionVerdict | None:
    """Apply the rule to the runs of a log partition, with the marks before them; None if their bounds do not decide."""
    if not len(runs.rows):
        return PartitionVerdict(Stretches(runs.starts, runs.starts), 0, 0, 0)
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
    return PartitionVerdict(dropped, int(in_order.rows.sum()) - int(kept.sum()), 0, jumped)


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


def _advanced_at(
    seen: HighwaterMarks, old: HighwaterMarks, now_ms: int
) -> tuple[HighwaterMarks, list[tuple[int, int]]]:
    """The marks `seen`, with `now_ms` as the time of the last advance of pairs that rise above the old marks.

    Also the pairs whose mark and window did not change: all of their rows are replays.
    """
    columns, before = seen.to_columns(), old.to_columns()
    rows = old.find(columns.pids, columns.partitions)
    rose = rows < 0
    known = np.flatnonzero(~rose)
    rose[known] = columns.offsets[known] > before.offsets[rows[known]]
    unchanged = known[~rose[known]]
    if before.window:
        same = columns.bitmaps[unchanged] == before.bitmaps[rows[unchanged]]
        unchanged = unchanged[same.all(axis=1)]
    risen = HighwaterMarks.from_columns(
        columns.pids,
        columns.partitions,
        columns.offsets,
        columns.destination_partitions,
        advanced_ms=np.where(rose, now_ms, UNKNOWN),
        bitmaps=columns.bitmaps if columns.window else None,
        window=columns.window,
    )
    pairs = zip(columns.pids[unchanged].tolist(), columns.partitions[unchanged].tolist(), strict=True)
    return risen, list(pairs)


def epochs_of(own: Iterable[PartitionRows]) -> dict[int, Epoch]:
    """The epoch of each log partition of one topic. Raises FrameUnusable."""
    epochs: dict[int, Epoch] = {}
    for one in own:
        epoch = Epoch(one.startpoint_epoch, one.marks_epoch)
        if epochs.setdefault(one.partition, epoch) != epoch:
            raise epochs_mixed(one.topic, one.partition, (epochs[one.partition].startpoint, epoch.startpoint))
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


def epochs_mixed(topic: str | None, partition: int, epochs: Iterable[int]) -> FrameUnusable:
    """The refusal of a log partition that came in two startpoint epochs at once."""
    found = ", ".join(map(str, sorted(set(epochs))))
    where = f"partition {shown_partition(partition)} of {topic if topic is not None else 'the topic'}"
    return FrameUnusable(
        f"{where} came in the startpoint epochs {found} at once; a batch of the source has one. "
        "Filter the frame once for each, in ascending order, or drop the columns startpoint_epoch and marks_epoch"
    )


def carried(
    before: Mapping[MarksKey, HighwaterMarks], topic: str, epochs: Mapping[int, Epoch], seen: HighwaterMarks
) -> HighwaterMarks:
    """The marks with which a topic's partitions continue, of all epochs, without those that a startpoint has reset.

    `seen`: the pairs of the batch. Raises PairSplit.
    """
    going_on = HighwaterMarks()
    for key in sorted(key for key in before if key.topic == topic):
        marks = before[key]
        begun_anew = [partition for partition, epoch in epochs.items() if key.startpoint_epoch < epoch.marks]
        if begun_anew:
            marks = marks.without_rows(np.flatnonzero(np.isin(_destinations(marks, seen), begun_anew)))
        going_on = going_on.merge(marks)
    return going_on


def taken_back(
    before: Mapping[MarksKey, HighwaterMarks],
    topic: str,
    epochs: Mapping[int, Epoch],
    seen: HighwaterMarks,
    as_of: Callable[[int, HighwaterMarks], HighwaterMarks],
) -> Mapping[MarksKey, HighwaterMarks]:
    """All marks; of the topic's partitions whose marks `carried` would forget, those that `as_of` makes of them.

    They are under each partition's epoch. `before` itself if nothing would be forgotten. seen: the pairs of the batch.
    """
    old: dict[int, HighwaterMarks] = {}
    for key in (key for key in before if key.topic == topic):
        for partition, epoch in epochs.items():
            if key.startpoint_epoch < epoch.marks:
                elsewhere = np.flatnonzero(_destinations(before[key], seen) != partition)
                old[partition] = old.get(partition, HighwaterMarks()).merge(before[key].without_rows(elsewhere))
    found = dict(before)
    forgotten = {partition: marks for partition, marks in old.items() if len(marks)}
    for partition, marks in forgotten.items():
        columns = marks.to_columns()
        for key in [key for key in found if key.topic == topic]:
            rows = found[key].find(columns.pids, columns.partitions)
            found[key] = found[key].without_rows(rows[rows >= 0])
        now = MarksKey(topic, epochs[partition].startpoint)
        found[now] = found.get(now, HighwaterMarks()).merge(as_of(partition, marks))
    return {key: marks for key, marks in found.items() if len(marks)} if forgotten else before


def lowered(marks: HighwaterMarks, lowest: HighwaterMarks) -> HighwaterMarks:
    """The marks as they were before the filter kept the rows that the table holds. Without a window.

    lowest: the lowest source offset of each pair among the table's rows that are to be read again.

    The rows that the filter kept of a pair ascend, so before them the mark was below the lowest. The mark of a pair
    without such rows does not change.
    """
    columns, held = marks.with_window(0).to_columns(), lowest.to_columns()
    rows = marks.find(held.pids, held.partitions)
    offsets = columns.offsets.copy()
    offsets[rows[rows >= 0]] = np.minimum(offsets[rows[rows >= 0]], held.offsets[rows >= 0] - 1)
    known = offsets >= 0
    return HighwaterMarks.from_columns(
        columns.pids[known],
        columns.partitions[known],
        offsets[known],
        columns.destination_partitions[known],
        advanced_ms=columns.advanced_ms[known],
    )


def by_epoch(
    after: HighwaterMarks, before: Mapping[MarksKey, HighwaterMarks], topic: str, epochs: Mapping[int, Epoch]
) -> dict[MarksKey, HighwaterMarks]:
    """The topic's marks after the batch, each under the epoch of its partition."""
    own = {key: marks for key, marks in before.items() if key.topic == topic}
    now = {epoch.startpoint for epoch in epochs.values()}
    if len(now) == 1 and {key.startpoint_epoch for key in own} <= now:
        return {MarksKey(topic, now.pop()): after}
    found: dict[MarksKey, HighwaterMarks] = {}
    here = np.isin(after.to_columns().destination_partitions, list(epochs))
    for key, marks in own.items():  # of partitions that this batch has nothing of
        columns = marks.to_columns()
        rows = after.find(columns.pids, columns.partitions)
        elsewhere = (rows >= 0) & ~here[rows] if len(here) else np.zeros(len(rows), np.bool_)
        found[key] = marks.without_rows(np.flatnonzero(~elsewhere))
    for startpoint in sorted(now):
        partitions = [partition for partition, epoch in epochs.items() if epoch.startpoint == startpoint]
        theirs = np.isin(after.to_columns().destination_partitions, partitions)
        key = MarksKey(topic, startpoint)
        found[key] = found.get(key, HighwaterMarks()).merge(after.without_rows(np.flatnonzero(~theirs)))
    return found


def _destinations(marks: HighwaterMarks, seen: HighwaterMarks) -> Numbers:
    """Each pair's destination partition; if its mark has none, the one in which the batch has the pair."""
    columns, destinations = marks.to_columns(), seen.to_columns().destination_partitions
    rows = seen.find(columns.pids, columns.partitions)
    here = (
        np.where(rows >= 0, destinations[rows], UNKNOWN) if len(destinations) else np.full(len(rows), UNKNOWN, np.int64)
    )
    known: Numbers = np.where(columns.destination_partitions == UNKNOWN, here, columns.destination_partitions)
    return known

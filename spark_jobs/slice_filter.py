"""What runs in Spark's Python workers: the rule over Arrow columns, slice by slice.

A worker's batches hold rows of one or more log partitions, each in log order. Rows are cut by (topic, partition), and
by the slice in which their log offset lies; each slice has a ReplayFilter of its own over its starting marks.

A decision is one number a row, so that the JVM can filter by it and count:

    bit 0       1: the row passes
    bits 1-2    what the rest counts: 0 nothing, 1 late rows, 2 offsets jumped over
    bits 3-62   that count, for the whole Arrow batch; late rows ride on its first row, jumped offsets on its second

(in a batch of one row only one of the two can be above 0: a late row is dropped and jumps over nothing).
"""

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from filtering.marks import HighwaterMarks
from filtering.replay_filter import ReplayFilter
from spark_jobs.errors import FrameChanged, LogOrderBroken, LogRowTwice, SparkJobError
from spark_jobs.filter_settings import FilterRule
from spark_jobs.mark_epochs import Epoch, EpochsMixed
from spark_jobs.slices import SliceStart

PASSES, LATE, JUMPED, KIND_MASK, COUNT_SHIFT = 1, 2, 4, 6, 3
_COUNT_MAX = 2**59

Numbers = npt.NDArray[np.int64]


def decider(starts: Iterable[SliceStart], rule: FilterRule, *, by_topic: bool) -> Callable[[Any], Any]:
    """A function for an iterator Arrow UDF over (key, partition, offset[, topic]) that yields decisions.

    `by_topic`: the frame has more than one topic, and the UDF gets it as its fourth column.
    """
    plan = tuple(starts)

    def decide(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:  # type: ignore[type-arg] # read by Spark
        slices = SliceFilters(plan, rule)
        for key, partition, offset, *topic in batches:
            yield pa.array(slices.decide(key, topic[0] if by_topic else None, partition, offset), pa.int64())
        # Not reached if the consumer stopped early: then the rows that it read are right.
        slices.check_whole()

    return decide


class SliceFilters:
    """The filters of the slices that one worker meets."""

    def __init__(self, starts: tuple[SliceStart, ...], rule: FilterRule) -> None:
        quiet_filter()
        self._only_topic = starts[0].topic if starts else None
        self._slices: dict[tuple[str | None, int], list[SliceStart]] = {}
        for start in starts:
            self._slices.setdefault((start.topic, start.partition), []).append(start)
        self._rule = rule
        self._opened: dict[_SliceName, _OpenSlice] = {}
        self._last: dict[tuple[str | None, int], int] = {}

    def decide(self, key: Any, topic: Any, partition: Any, offset: Any) -> Numbers:
        """One decision a row (the file's map), for Arrow columns of one length."""
        partitions = np.asarray(partition).astype(np.int64)
        offsets = np.asarray(offset).astype(np.int64)
        decisions = np.zeros(len(offsets), np.int64)
        late = jumped = 0
        for where, rows in log_partitions(topic, partitions):
            name = (self._only_topic if topic is None else where[0], where[1])
            own = offsets if rows is None else offsets[rows]
            self._last[name] = check_ascending(name, own, self._last.get(name, -1))
            for slice_, low, high in self._cut(name, own):
                before = slice_.filter.counts
                passes = slice_.filter.admit_batch(_rows_of(key, rows, low, high), name[1])
                after = slice_.filter.counts
                late, jumped = late + after.late - before.late, jumped + after.jumped - before.jumped
                slice_.rows += high - low
                decisions[slice(low, high) if rows is None else rows[low:high]] = passes
        if late:
            decisions[0] |= LATE | late << COUNT_SHIFT
        if jumped and self._rule.counts_gaps:
            decisions[min(1, len(decisions) - 1)] |= JUMPED | min(jumped, _COUNT_MAX) << COUNT_SHIFT
        return decisions

    def check_whole(self) -> None:
        """Every slice of which rows came must be complete. Raises FrameChanged."""
        for opened in self._opened.values():
            start = opened.start
            if opened.rows != start.rows:
                raise FrameChanged(start.partition, start.start, start.end, start.rows, opened.rows)

    def _cut(self, name: tuple[str | None, int], offsets: Numbers) -> "Iterator[tuple[_OpenSlice, int, int]]":
        """Ascending log offsets → (slice, first row, row behind the last)."""
        slices = self._slices.get(name, [])
        low = 0
        while low < len(offsets):
            at = bisect_right(slices, int(offsets[low]), key=lambda s: s.start) - 1
            if at < 0 or offsets[low] >= slices[at].end:
                raise FrameChanged(name[1], int(offsets[low]), int(offsets[low]) + 1, 0, 1)
            high = int(np.searchsorted(offsets, slices[at].end))
            yield self._open(name, slices[at]), low, high
            low = high

    def _open(self, name: tuple[str | None, int], start: "SliceStart") -> "_OpenSlice":
        opened = self._opened.get((*name, start.start))
        if opened is None:
            opened = self._opened[*name, start.start] = _OpenSlice(start, self._rule.new_filter(start.marks))
        return opened


_SliceName = tuple[str | None, int, int]  # topic, partition, first log offset


@dataclass(slots=True)
class _OpenSlice:
    start: "SliceStart"
    filter: ReplayFilter
    rows: int = 0


def scan_batches(batches: Iterable[pa.RecordBatch], rule: FilterRule) -> Iterator[pa.RecordBatch]:
    """One Spark partition's rows (key, topic, partition, offset[, epochs]) → a row a slice, with its marks.

    For mapInArrow. Raises EpochsMixed.
    """
    quiet_filter()
    epochs: dict[tuple[str | None, int], Epoch] = {}
    filters: dict[tuple[str | None, int], ReplayFilter] = {}
    bounds: dict[tuple[str | None, int], list[int]] = {}  # first, last, lowest, highest offset; rows out of order
    for batch in batches:
        key, topic, partition, offset, *epoch_columns = batch.columns
        if batch.num_rows == 0:
            continue
        check_places(topic, partition, offset)
        offsets = np.asarray(offset).astype(np.int64)
        for where, rows in log_partitions(topic, np.asarray(partition).astype(np.int64)):
            own = offsets if rows is None else offsets[rows]
            epoch = only_epoch(where, epoch_columns, rows)
            if epochs.setdefault(where, epoch) != epoch:
                raise EpochsMixed(*where, (epochs[where].startpoint, epoch.startpoint))
            filter_ = filters.setdefault(where, rule.new_filter(HighwaterMarks()))
            filter_.admit_batch(_rows_of(key, rows, 0, len(own)), where[1])
            _widen(bounds.setdefault(where, [int(own.min()), -1, 0, 1, -1]), own)
    for where, filter_ in filters.items():
        start, last, rows_seen, ascends, _ = bounds[where]
        counts = filter_.counts
        yield pa.RecordBatch.from_pylist(
            [
                {
                    "topic": where[0],
                    "partition": where[1],
                    "startpoint_epoch": epochs[where].startpoint,
                    "marks_epoch": epochs[where].marks,
                    "start": start,
                    "end": last + 1,
                    "rows": rows_seen,
                    "unkeyed": counts.unkeyed + counts.other_pids,
                    "ascends": bool(ascends),
                    "marks": filter_.marks().to_bytes(),
                }
            ],
            schema=_SCANNED,
        )


_SCANNED_FIELDS: Any = [
    ("topic", pa.string()),
    ("partition", pa.int32()),
    ("startpoint_epoch", pa.int64()),
    ("marks_epoch", pa.int64()),
    ("start", pa.int64()),
    ("end", pa.int64()),
    ("rows", pa.int64()),
    ("unkeyed", pa.int64()),
    ("ascends", pa.bool_()),
    ("marks", pa.binary()),
]
_SCANNED = pa.schema(_SCANNED_FIELDS)


def _widen(bounds: list[int], offsets: Numbers) -> None:
    """Bounds are [lowest, highest, rows, whether all ascend, offset of the row before]."""
    ascends = offsets[0] > bounds[4] and bool((offsets[1:] > offsets[:-1]).all())
    bounds[0], bounds[1] = min(bounds[0], int(offsets.min())), max(bounds[1], int(offsets.max()))
    bounds[2] += len(offsets)
    bounds[3] &= ascends
    bounds[4] = int(offsets[-1])


def log_partitions(topic: Any, partitions: Numbers) -> Iterator[tuple[tuple[str | None, int], Numbers | None]]:
    """(topic, partition) → its rows in order; None means all rows: there is only one log partition.

    `topic` is an Arrow string column, or None where all rows are of one topic.
    """
    if not len(partitions):
        return
    codes, names = partitions, None
    if topic is not None:
        dictionary = topic.dictionary_encode()
        names = dictionary.dictionary.to_pylist()
        if len(names) > 1:
            codes = (np.asarray(dictionary.indices).astype(np.int64) << 32) | partitions
    name = names[0] if names else None
    if (codes == codes[0]).all():
        yield (name, int(partitions[0])), None
        return
    order = np.argsort(codes, kind="stable")
    together = codes[order]
    cuts = [0, *(np.flatnonzero(together[1:] != together[:-1]) + 1).tolist(), len(order)]
    for low, high in pairwise(cuts):
        code = int(together[low])
        topic_name = names[code >> 32] if names and len(names) > 1 else name
        yield (topic_name, code & 0xFFFFFFFF), order[low:high]


def check_places(topic: Any, partition: Any, offset: Any) -> None:
    """Every row must say where it lies. Raises SparkJobError naming the column."""
    for column, values in (("topic", topic), ("partition", partition), ("offset", offset)):
        if values.null_count:
            raise SparkJobError(f"column {column!r}: a row has none; the filter needs to know where it lies")


def only_epoch(name: tuple[str | None, int], columns: list[Any], rows: Numbers | None) -> Epoch:
    """The epoch of these rows, which all have the same. Raises EpochsMixed."""
    if not columns:
        return Epoch()
    startpoints, marks = (np.asarray(column if rows is None else column.take(pa.array(rows))) for column in columns)
    if startpoints.min() != startpoints.max() or marks.min() != marks.max():
        raise EpochsMixed(*name, np.unique(startpoints).tolist())
    return Epoch(int(startpoints[0]), int(marks[0]))


def check_ascending(name: tuple[str | None, int], offsets: Numbers, before: int) -> int:
    """The last offset, if they all ascend from above `before`; raises LogOrderBroken, LogRowTwice."""
    steps = np.flatnonzero(offsets[1:] <= offsets[:-1])
    if offsets[0] <= before:
        _refuse_step(name, before, int(offsets[0]))
    if len(steps):
        _refuse_step(name, int(offsets[steps[0]]), int(offsets[steps[0] + 1]))
    return int(offsets[-1])


def _refuse_step(name: tuple[str | None, int], before: int, after: int) -> NoReturn:
    if before == after:
        raise LogRowTwice(*name, after)
    raise LogOrderBroken(*name, before, after)


def quiet_filter() -> None:
    """Workers log no pairs that were dropped whole: the driver names those of the batch."""
    logging.getLogger("filtering.replay_filter").setLevel(logging.ERROR)


def _rows_of(key: Any, rows: Numbers | None, low: int, high: int) -> Any:
    """Some rows of an Arrow column."""
    if rows is None:
        return key.slice(low, high - low)
    return key.take(pa.array(rows[low:high]))

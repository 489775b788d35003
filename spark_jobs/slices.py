"""The first pass over a batch: what each slice holds, and with which marks each slice must begin.

    batch ─▶ slices: the rows of one (topic, partition) inside one Spark partition, log offsets [start, end)
                 slice 1          slice 2          slice 3         of one log partition, by log offset
    marks N-1 ──▶ max ── merge ──▶ max ── merge ──▶ max ──merge──▶ marks N
              └─▶ starts 1    └─▶ starts 2     └─▶ starts 3

Running maximum is associative, so each slice can be filtered alone once its starting marks are known; marks N are
known before anything is written. Slices of one log partition that overlap tell of a shuffle: then no slice has an
order of its own, and the rows must be sorted first. `plan_batch` is pure; `scan_slices` runs one Spark job.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit

from filtering.highwater import HighwaterMarks
from spark_jobs.batch_marks import LogRange, MarksKey
from spark_jobs.columns import carrier_key, is_stream_metadata
from spark_jobs.errors import SparkJobError
from spark_jobs.settings import setting
from spark_jobs.slice_filter import FilterRule, scan_batches

KEY = "_pushrep_key"
"""The bytes that may be metadata, whatever carrier they came in, while a frame is inside the filter."""

_SHUFFLE = "spark.sql.shuffle.partitions"
_COLUMNS = ("topic", "partition", "offset")
_PAIR_ROW = np.dtype([("pid", ">i8"), ("partition", ">i4")])
_SCANNED = (
    "topic string, partition int, start bigint, end bigint, rows bigint, unkeyed bigint, ascends boolean, marks binary"
)


class FrameUnusable(SparkJobError):
    """The frame can't be filtered: it lacks a column the filter decides by, or has nulls in one."""

    def __init__(self, column: str, why: str) -> None:
        super().__init__(f"column {column!r}: {why}")
        self.column, self.why = column, why


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows of one log partition in one Spark partition; `marks` are what a filter knows that saw only them."""

    topic: str
    partition: int
    start: int
    end: int
    rows: int
    unkeyed: int
    marks: HighwaterMarks
    ascends: bool = True


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
class BatchPlan:
    """What the first pass found: how to filter each slice, and the marks after the batch.

    `must_sort`: the slices tell nothing about order, `starts` are those of whole log partitions, sorted.
    `all_dropped`: (topic, pid, source partition) of the pairs of which no row will pass.
    """

    starts: tuple[SliceStart, ...]
    must_sort: bool
    marks: Mapping[MarksKey, HighwaterMarks]
    ranges: tuple[LogRange, ...]
    rows: int
    unkeyed: int
    pairs: int
    all_dropped: tuple[tuple[str, int, int], ...]


def keyed_frame(df: DataFrame, rule: FilterRule) -> DataFrame:
    """The frame with the column KEY beside its own. Raises FrameUnusable, CarrierUnusable."""
    for column in _COLUMNS:
        if column not in df.columns:
            raise FrameUnusable(column, "the filter decides by topic, partition and offset: keep the source's columns")
    return df.withColumn(KEY, carrier_key(rule.carrier, df))


def scan_slices(keyed: DataFrame, rule: FilterRule) -> list[Slice]:
    """Run the first pass over a keyed frame. Raises FrameUnusable for null topics, partitions or offsets."""
    return _scan_windows(keyed, rule) if rule.window else _scan_marks(keyed, rule)


def governed(key: Column, rule: FilterRule) -> Column:
    """Whether the rule is for this key: metadata, and of one of `only_pids` if there are any."""
    ours = is_stream_metadata(key)
    if rule.only_pids is not None:
        pids = [pid.to_bytes(8, "big", signed=True) for pid in sorted(rule.only_pids)]
        ours &= F.substring(key, 1, 8).isin(pids) if pids else F.lit(False)
    return ours


def _scan_marks(keyed: DataFrame, rule: FilterRule) -> list[Slice]:
    """Without a window a slice's state is one maximum a pair: a plain aggregate, in the JVM.

    The maximum is taken of a number, not of the 8 bytes, because Spark sorts to aggregate binary values:
    0.8 s against 1.9 s for 4 M rows on 2 cores.
    """
    key = F.col(KEY)
    ours = governed(key, rule)
    summary = (
        keyed.select("topic", "partition", "offset", F.when(ours, key).alias(KEY))
        .groupBy(F.spark_partition_id().alias("slice"), "topic", "partition", F.substring(KEY, 1, 12).alias("pair"))
        .agg(
            F.max(F.conv(F.hex(F.substring(KEY, 13, 8)), 16, -10).cast("bigint")).alias("mark"),
            F.min("offset").alias("start"),
            F.max("offset").alias("last"),
            F.count(F.lit(1)).alias("rows"),
            F.count("offset").alias("offsets"),
        )
    )
    # The groups lie in one Spark partition already, but Spark shuffles them: 200 tasks for some kilobytes by default,
    # since adaptive execution, which would join them, is off in a stream.
    spark = keyed.sparkSession
    few = min(spark.sparkContext.defaultParallelism, int(spark.conf.get(_SHUFFLE) or 200))
    with setting(spark, _SHUFFLE, few):
        found = summary.toArrow()
    _refuse_nulls(found)
    return list(_slices_of(found.sort_by([("slice", "ascending"), ("topic", "ascending"), ("partition", "ascending")])))


def _slices_of(found: Any) -> Iterator[Slice]:
    """Rows of (slice, topic, partition, pair), sorted by the first three → one Slice for each of these."""
    if not found.num_rows:
        return
    columns = {name: found[name].to_numpy() for name in ("slice", "partition", "start", "last", "rows")}
    topics = found["topic"].to_pylist()
    marks = found["mark"].fill_null(-1).to_numpy()
    pairs = found["pair"].fill_null(b"\0" * _PAIR_ROW.itemsize)
    pair_rows = np.frombuffer(b"".join(pairs.to_pylist()), _PAIR_ROW)
    owners = list(zip(columns["slice"].tolist(), topics, columns["partition"].tolist(), strict=True))
    firsts = [0, *(i + 1 for i, (one, other) in enumerate(pairwise(owners)) if one != other), len(owners)]
    for low, high in pairwise(firsts):
        _, topic, partition = owners[low]
        keyed = low + np.flatnonzero(marks[low:high] >= 0)
        rows = columns["rows"][low:high]
        own = HighwaterMarks.from_columns(
            pair_rows["pid"][keyed], pair_rows["partition"][keyed], marks[keyed], partition
        )
        yield Slice(
            topic,
            partition,
            int(columns["start"][low:high].min()),
            int(columns["last"][low:high].max()) + 1,
            int(rows.sum()),
            int(rows[marks[low:high] < 0].sum()),
            own,
        )


def _refuse_nulls(found: pa.Table) -> None:
    for column in ("topic", "partition"):
        if found[column].null_count:
            raise FrameUnusable(column, "a row has none; the filter needs to know where each record lies")
    if found["rows"].to_numpy().sum() != found["offsets"].to_numpy().sum():
        raise FrameUnusable("offset", "a row has none; the filter needs to know where each record lies")


def _scan_windows(keyed: DataFrame, rule: FilterRule) -> list[Slice]:
    """With a window a slice's state is maximum and bits, which only Python can merge."""

    def scan(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return scan_batches(batches, rule)

    found = keyed.select(KEY, "topic", "partition", "offset").mapInArrow(scan, _SCANNED).toArrow()
    return [
        Slice(
            row["topic"],
            row["partition"],
            row["start"],
            row["end"],
            row["rows"],
            row["unkeyed"],
            HighwaterMarks.from_bytes(row["marks"]),
            row["ascends"],
        )
        for row in found.to_pylist()
    ]


def plan_batch(
    slices: Iterable[Slice], before: Mapping[MarksKey, HighwaterMarks], *, rule: FilterRule, now_ms: int, sort: bool
) -> BatchPlan:
    """Give each slice its starting marks, and the batch its marks. `before` are those after the batch before.

    `now_ms` becomes the last advance of every pair that rises. Raises PairSplit for a pair in two log partitions.
    """
    in_order = sorted(slices, key=lambda s: (s.topic, s.partition, s.start))
    must_sort = sort or _is_shuffled(in_order)
    marks = {key: old.with_window(rule.window) for key, old in before.items()}
    starts: list[SliceStart] = []
    dropped: list[tuple[str, int, int]] = []
    pairs = 0
    for topic in dict.fromkeys(s.topic for s in in_order):
        own = [s for s in in_order if s.topic == topic]
        old = marks.get(MarksKey(topic), HighwaterMarks())
        seen = _merged(s.marks for s in own)
        new = old.merge(_advanced_at(seen, now_ms))
        marks[MarksKey(topic)] = new
        pairs += len(seen)
        dropped.extend((topic, pid, partition) for pid, partition in _unchanged(seen, old, new))
        starts.extend(_whole_partitions(own, old) if must_sort else _slice_starts(own, old))
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
    )


def ranges_of(slices: Iterable[Slice]) -> tuple[LogRange, ...]:
    """The log ranges that the slices cover, one a log partition, ascending."""
    return _ranges(sorted(slices, key=lambda s: (s.topic, s.partition, s.start)))


def _ranges(in_order: list[Slice]) -> tuple[LogRange, ...]:
    bounds: dict[tuple[str, int], tuple[int, int]] = {}
    for s in in_order:
        start, end = bounds.get((s.topic, s.partition), (s.start, s.end))
        bounds[s.topic, s.partition] = min(start, s.start), max(end, s.end)
    return tuple(LogRange(*where, *range_) for where, range_ in bounds.items())


def _is_shuffled(in_order: list[Slice]) -> bool:
    same = ((a, b) for a, b in pairwise(in_order) if (a.topic, a.partition) == (b.topic, b.partition))
    return not all(s.ascends for s in in_order) or any(b.start < a.end for a, b in same)


def _slice_starts(own: list[Slice], old: HighwaterMarks) -> Iterator[SliceStart]:
    """Each slice begins with the old marks and what the slices of its log partition before it saw."""
    for partition in dict.fromkeys(s.partition for s in own):
        of_partition = [s for s in own if s.partition == partition]
        running = _restricted(old, _merged(s.marks for s in of_partition))
        for s in of_partition:
            yield SliceStart(s.topic, s.partition, s.start, s.end, s.rows, _restricted(running, s.marks))
            running = running.merge(s.marks)


def _whole_partitions(own: list[Slice], old: HighwaterMarks) -> Iterator[SliceStart]:
    for range_ in _ranges(own):
        of_partition = [s for s in own if s.partition == range_.partition]
        marks = _restricted(old, _merged(s.marks for s in of_partition))
        yield SliceStart(*range_, sum(s.rows for s in of_partition), marks)


def _merged(parts: Iterable[HighwaterMarks]) -> HighwaterMarks:
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

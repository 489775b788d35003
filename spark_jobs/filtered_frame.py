"""Filters a batch frame: a first pass finds which rows drop; then built-in column expressions select them, lazily.

    frame ─▶ by_runs: an aggregate in the JVM ───────────────┐
      │      else by_rows: Python, over the deciding columns ┴─▶ plan (batch_decision.py): log offsets that drop
      │                                                            none: the frame itself
      │                                                            few ranges of the log: a comparison for each
      │                                                            else: bitmaps, joined to the rows by their number
      └───────────────────────────────────────────────────────────┴─▶ rows, dropped

A run is a set of rows of one pair with the same difference between source and log offset (batch_decision.py), and the
same difference between log offset and row number in the Spark partition. Row numbers are unique, so no record is in a
run twice. A batch of a producer gives a run. A log whose pairs alternate row by row, or that has many gaps, gives too
many runs, which the number of groups shows. Then, and if runs overlap, and with a window, the rows decide one by one.
Both ways accept rows in any order.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit
from pyspark.sql.types import NullType, StringType

from filtering.marks import HighwaterMarks
from filtering.replay_filter import check_ttl
from filtering.stream_metadata import KEY_BYTES
from pushrep.env import SYSTEM_CLOCK
from spark_jobs.batch_decision import (
    BITMAP_OFFSETS,
    NO_PAIR,
    BatchPlan,
    Bitmaps,
    PartitionRows,
    Runs,
    check_unchanged,
    plan_batch,
)
from spark_jobs.batch_marks import LogRange, MarksKey
from spark_jobs.columns import WHOLE, SourcePosition, key_numbers, made_once, same_each_batch
from spark_jobs.errors import SparkJobError
from spark_jobs.filter_settings import BatchCounts, FilterRule, warn_of_chance_keys
from spark_jobs.mark_epochs import EPOCH_COLUMNS, Epoch
from spark_jobs.row_decision import DECIDED, decide_rows, decided
from spark_jobs.spark_internals import over_connect, setting, to_arrow, use_driver_python

KEY = "_pushrep_key"
"""The column with the bytes that may be metadata, from any carrier, while a frame is inside the filter."""

RUNS_MAX = 250_000
"""With more runs than this the rows decide: so many runs take about 20 MB on the driver, and more save no time."""

_CORES_LIKELY = 8
"""Assumed for a Spark Connect server, whose number of cores is unknown."""

STRETCHES_MAX = 64
"""With more stretches than this, bitmaps select the rows that drop: each stretch is a comparison for every row."""

_LOG = logging.getLogger(__name__)
_SHUFFLE = "spark.sql.shuffle.partitions"
_COLUMNS = ("topic", "partition", "offset")
_QUOTED = tuple(f"`{name}`" for name in _COLUMNS)  # with spark.sql.ansi.enforceReservedKeywords these are keywords
_WHOLE_KEY = f"if(octet_length({KEY}) = {KEY_BYTES}, {KEY}, null)"
_BITMAP = ("_pushrep_topic", "_pushrep_partition", "_pushrep_number", "_pushrep_words")
_BITMAP_SCHEMA = f"{_BITMAP[0]} string, {_BITMAP[1]} int, {_BITMAP[2]} bigint, {_BITMAP[3]} array<bigint>"


@dataclass(frozen=True, slots=True)
class FilteredFrame:
    """A filtered batch frame: `rows` pass, `dropped` do not; `marks` and `ranges` are those after all of its rows.

    Reading `rows` or `dropped` reads the frame again, which must give the same rows each time.
    """

    rows: DataFrame
    marks: Mapping[MarksKey, HighwaterMarks]
    ranges: tuple[LogRange, ...]
    plan: BatchPlan
    check_unchanged: Callable[[], None]
    """Reads the deciding columns once more. Raises FrameChanged if the frame gives other rows than before."""
    _dropped: Callable[[], DataFrame]

    @property
    def dropped(self) -> DataFrame:
        """The rows that do not pass. Spark plans this frame only when this property is read."""
        return self._dropped()

    def counts(self, batch_id: int = 0) -> BatchCounts:
        """The counts of rows kept and dropped. They are known before `rows` is read."""
        plan = self.plan
        return BatchCounts(
            batch_id,
            plan.rows,
            plan.unkeyed,
            plan.pairs,
            kept=plan.rows - plan.unkeyed - plan.dropped_rows,
            dropped=plan.dropped_rows,
            late=plan.late,
            jumped=plan.jumped,
            all_dropped=plan.all_dropped,
            unlikely_pairs=plan.unlikely_pairs,
        )


def filter_frame(  # noqa: PLR0913 - the rule's settings, by name
    df: DataFrame,
    marks: Mapping[MarksKey, HighwaterMarks] | None = None,
    *,
    carrier: str | SourcePosition = "key",
    window: int = 0,
    only_pids: Iterable[int] | None = None,
    ttl_s: float | None = None,
    retention_ms: int | None = None,
    now_ms: int | None = None,
) -> FilteredFrame:
    """Filter a batch frame. It needs the columns topic, partition and offset, and those of its carrier.

    One Spark job runs; the resulting frames are lazy. The rows may be in any order: the order of log offsets counts.
    carrier: where the metadata is: "key", "header" (the last one named `stream-metadata` in the column headers), or a
        `SourcePosition` for rows without metadata.
    marks: those before the frame, `{MarksKey(topic): HighwaterMarks}`.
    ttl_s: needs `retention_ms`, the topic's retention.ms, as in `filter_replays`.
    Raises TtlTooShort, FrameUnusable, CarrierUnusable, PositionUnfit, PairSplit, BadFilterSetting; LogRowTwice is
    raised in a worker, and is text in Spark's exception.
    """
    pids = None if only_pids is None else frozenset(only_pids)
    rule = FilterRule(carrier=carrier, window=window, only_pids=pids, ttl_s=ttl_s)
    check_ttl(ttl_s, retention_ms)
    keyed = keyed_frame(df, rule)
    now = SYSTEM_CLOCK.wall_ms() if now_ms is None else now_ms
    found = by_runs(keyed, rule)
    if found is None:
        found = by_rows(keyed, marks or {}, rule)
    plan = plan_frame(keyed, found, marks or {}, rule=rule, now_ms=now)
    warn_of_chance_keys(_LOG, "the frame", plan.pairs, plan.unlikely_pairs)
    return filtered_by(df, plan, unchanged_check(keyed, found, rule))


def plan_frame(
    keyed: DataFrame,
    found: Iterable[PartitionRows],
    before: Mapping[MarksKey, HighwaterMarks],
    *,
    rule: FilterRule,
    now_ms: int,
) -> BatchPlan:
    """The plan of a frame. found: the result of its first pass. If the runs do not decide, its rows are read."""
    plan = plan_batch(found, before, rule=rule, now_ms=now_ms)
    if plan is None:
        plan = plan_batch(by_rows(keyed, before, rule), before, rule=rule, now_ms=now_ms)
    assert plan is not None, "rows always decide"
    return plan


def unchanged_check(keyed: DataFrame, found: Sequence[PartitionRows], rule: FilterRule) -> Callable[[], None]:
    """A function that reads a keyed frame once more and compares: see FilteredFrame.check_unchanged."""

    def check() -> None:
        again = None if any(one.verdict is not None for one in found) else by_runs(keyed, rule)
        check_unchanged(found, by_rows(keyed, {}, rule) if again is None else again)

    return check


def filtered_by(df: DataFrame, plan: BatchPlan, check: Callable[[], None]) -> FilteredFrame:
    """The filtered frame of `plan`; it runs no job."""
    rows, dropped = _cut(df, plan)
    return FilteredFrame(rows, plan.marks, plan.ranges, plan, check, dropped)


def _cut(df: DataFrame, plan: BatchPlan) -> tuple[DataFrame, Callable[[], DataFrame]]:
    """The rows that pass, and a function for those that drop, by built-in expressions: no Python runs for a row.

    The frames have no Observation: the counts are known, and it adds a tenth to the time of reading them.
    """
    if not plan.dropped_rows:
        return df, lambda: df.where("false")
    stretches = [
        (*where, start, end)
        for where, found in plan.stretches.items()
        for start, end in zip(found.starts.tolist(), found.ends.tolist(), strict=True)
    ]
    if not plan.bitmaps and len(stretches) <= STRETCHES_MAX:
        # Empty stretches fill the list up to a power of two, so that batches with other counts run the same generated
        # code. Each has other numbers, because Spark evaluates equal expressions once.
        more = (1 << (len(stretches) - 1).bit_length()) - len(stretches)
        stretches += [(*stretches[-1][:2], empty, empty) for empty in range(-1, -1 - 2 * more, -2)]
        # As SQL text: built by functions, 64 stretches are a thousand calls into the JVM.
        inside = F.expr(" or ".join(_inside(*stretch) for stretch in stretches))
        return df.where(~inside), lambda: df.where(inside)
    bitmaps = {**plan.bitmaps, **{where: Bitmaps.of(found) for where, found in plan.stretches.items()}}
    table = [
        (*where, number, words)
        for where, found in bitmaps.items()
        for number, words in zip(found.numbers.tolist(), found.words.tolist(), strict=True)
    ]
    topic, partition, number, words = _BITMAP
    same = f"topic = {topic} and `partition` = {partition} and cast(`offset` as bigint) div {BITMAP_OFFSETS} = {number}"
    word = f"get({words}, cast(`offset` % {BITMAP_OFFSETS} div 64 as int))"
    bit = F.expr(f"coalesce(getbit({word}, cast(`offset` % 64 as int)), 0)")
    # A broadcast join: the rows are not shuffled.
    joined = df.join(F.broadcast(df.sparkSession.createDataFrame(table, _BITMAP_SCHEMA)), F.expr(same), "left")
    return joined.where(bit == 0).drop(*_BITMAP), lambda: joined.where(bit == 1).drop(*_BITMAP)


def _inside(topic: str, partition: int, start: int, end: int) -> str:
    """The condition, in SQL, that a row is in a stretch. The topic is in hexadecimal digits, which need no escaping.

    Spark writes number literals into the code that it generates. The code of each batch would differ, and Spark and the
    JVM would compile it again. Arrays are references in that code, so each number is an array's element, with an index
    that Spark can't compute in advance.
    """
    zero = "bigint(`partition`) - bigint(`partition`)"
    low, high, own = (f"get(array(bigint({number})), {zero})" for number in (start, end - 1, partition))
    name = f"cast(X'{topic.encode().hex()}' as string)"
    return f"(`offset` between {low} and {high} and `partition` = {own} and topic = {name})"


class FrameUnusable(SparkJobError):
    """The frame can't be filtered: a column that the filter needs is missing, of another type, or has nulls."""

    def __init__(self, column: str, why: str) -> None:
        super().__init__(f"column {column!r}: {why}")
        self.column, self.why = column, why


def keyed_frame(df: DataFrame, rule: FilterRule) -> DataFrame:
    """The frame with the additional column KEY. Raises FrameUnusable, CarrierUnusable, PositionUnfit."""
    for column in _COLUMNS:
        if column not in df.columns:
            raise FrameUnusable(
                column,
                "it is missing; the filter needs topic, partition and offset: select these columns of the source",
            )
        kind = df.schema[column].dataType
        if not isinstance(kind, (StringType, NullType) if column == "topic" else (*WHOLE, NullType)):
            wanted = "text" if column == "topic" else "a whole number (bigint), by which the log is in order"
            raise FrameUnusable(column, f"it is {kind.simpleString()}: cast it to {wanted}")
    missing = [column for column in EPOCH_COLUMNS if column not in df.columns]
    if len(missing) == 1:
        why = f"it is missing; select both {' and '.join(EPOCH_COLUMNS)} of the source, or neither"
        raise FrameUnusable(missing[0], why)
    use_driver_python(df.sparkSession)
    return df.withColumn(KEY, rule.key(df))


def by_runs(keyed: DataFrame, rule: FilterRule) -> list[PartitionRows] | None:
    """The content of a keyed frame by log partition, with its runs; None if there are too many runs, or with a window.

    Raises FrameUnusable for null topics, partitions or offsets, EpochsMixed.
    """
    if rule.window:
        return None
    found = _aggregated(keyed, rule)
    if found.num_rows > RUNS_MAX:
        return None
    _refuse_nulls(found)
    in_order = [(name, "ascending") for name in ("topic", "partition", *EPOCH_COLUMNS) if name in found.column_names]
    return list(_partitions_of(found.sort_by(in_order)))


def by_rows(keyed: DataFrame, before: Mapping[MarksKey, HighwaterMarks], rule: FilterRule) -> list[PartitionRows]:
    """The content of a keyed frame by log partition, and which rows drop. before: the marks before the frame.

    Raises as `by_runs`, and LogRowTwice. An error in a worker is text in Spark's exception. Each log partition is one
    task, so few of them use few cores.
    """
    marks = {key: own.with_window(rule.window) for key, own in before.items()}

    def decide(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return decide_rows(batches, marks, rule)

    columns = keyed.selectExpr(f"{_WHOLE_KEY} as {KEY}", *_QUOTED, *_epochs(keyed).values())
    with _few_shuffle_partitions(keyed):  # `repartition` without a number uses this setting
        # By columns only: adaptive execution may coalesce such partitions but never splits one.
        in_order = columns.repartition("topic", "partition").sortWithinPartitions("topic", "partition", "offset")
        return decided(to_arrow(in_order.mapInArrow(decide, DECIDED)))


def _epochs(keyed: DataFrame) -> dict[str, str]:
    """The SQL of the frame's epoch columns, by name; empty if the source follows no startpoints."""
    return {
        name: f"coalesce(cast(`{name}` as bigint), 0L) as `{name}`" for name in EPOCH_COLUMNS if name in keyed.columns
    }


def _aggregated(keyed: DataFrame, rule: FilterRule) -> Any:
    """An Arrow table of groups (topic, partition[, epochs], pair, run, place) with bounds; at most RUNS_MAX + 1 rows.

    Groups and bounds are numbers, except the topic: Spark aggregates numbers by hashing, and binary values by sorting.
    """
    spark, epochs = keyed.sparkSession, _epochs(keyed)
    number = key_numbers(spark)
    # As SQL text: an expression built by functions costs a call into the JVM for each of its parts, some milliseconds.
    # In few steps: Spark analyses each intermediate frame.
    columns = (
        "`offset` - monotonically_increasing_id() as place",  # ids differ between Spark partitions, too
        *_QUOTED,
        *epochs.values(),
    )

    def key_part(position: int, name: str) -> Column:
        return made_once(spark, (number, name), lambda: number(_WHOLE_KEY, position).alias(name))

    numbers = keyed.select(
        *same_each_batch(spark, *columns),
        key_part(1, "pid"),
        key_part(9, "middle"),  # the source partition, and the offset's upper half
        key_part(13, "source_offset"),
    )
    # For bytes that are not metadata the first two conditions are false or null, see columns.py.
    ours = f"middle >= 0 and source_offset >= 0 and {rule.pid_condition}"
    groups = (
        *(f"`{name}`" for name in ("topic", "partition", *epochs, "place")),
        f"if({ours}, pid, null) as pid",
        f"if({ours}, shiftright(middle, 32), null) as source_partition",
        f"if({ours}, source_offset - `offset`, null) as run",
    )
    bounds = ("min(`offset`) `start`", "max(`offset`) `last`", "count(1) `rows`")
    with _few_shuffle_partitions(keyed):
        found = numbers.groupBy(*same_each_batch(spark, *groups)).agg(*same_each_batch(spark, *bounds))
        return to_arrow(found.limit(RUNS_MAX + 1))


def _few_shuffle_partitions(keyed: DataFrame) -> AbstractContextManager[None]:
    """One shuffle task for each core. Spark's default is 200, and before 4.2 adaptive execution does not coalesce those
    of a stream.
    """
    spark = keyed.sparkSession
    cores = _CORES_LIKELY if over_connect(spark) else spark.sparkContext.defaultParallelism
    return setting(spark, _SHUFFLE, min(cores, int(spark.conf.get(_SHUFFLE) or 200)))


def _partitions_of(found: Any) -> Iterator[PartitionRows]:
    """Sorted groups (topic, partition[, epochs], pair, run, place) → one PartitionRows for each log partition and
    epoch.
    """
    if not found.num_rows:
        return
    starts, lasts, rows = (found[name].to_numpy() for name in ("start", "last", "rows"))
    is_keyed = found["pid"].is_valid().to_numpy()
    pids, partitions, distances = (_numbers(found[name]) for name in ("pid", "source_partition", "run"))
    partitions = np.where(is_keyed, partitions, NO_PAIR)
    all_runs = Runs(pids, partitions, starts, lasts, starts + distances, lasts + distances, rows)
    owners = [found[name] for name in ("topic", "partition", *EPOCH_COLUMNS) if name in found.column_names]
    differs = np.zeros(found.num_rows - 1, np.bool_)
    for column in owners:
        differs |= pc.not_equal(column[1:], column[:-1]).to_numpy()
    for low, high in pairwise([0, *(np.flatnonzero(differs) + 1).tolist(), found.num_rows]):
        topic, partition, *epochs_here = (column[low].as_py() for column in owners)
        epoch = Epoch(*epochs_here or (0, 0))
        runs = all_runs.some(np.arange(low, high))
        keyed = runs.some(np.flatnonzero(is_keyed[low:high]))
        yield PartitionRows(
            topic,
            partition,
            int(runs.starts.min()),
            int(runs.lasts.max()) + 1,
            int(runs.rows.sum()),
            int(runs.rows.sum() - keyed.rows.sum()),
            HighwaterMarks.from_columns(keyed.pids, keyed.partitions, keyed.highs, partition),
            epoch.startpoint,
            epoch.marks,
            runs,
        )


def _numbers(column: Any) -> Any:
    """A column as int64, with 0 for nulls."""
    return column.fill_null(0).to_numpy()


def _refuse_nulls(found: pa.Table) -> None:
    for column, found_as in (("topic", "topic"), ("partition", "partition"), ("offset", "place")):
        if found[found_as].null_count:
            raise FrameUnusable(
                column, "a row has a null there; the filter needs topic, partition and offset of each row"
            )

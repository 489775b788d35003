"""A batch frame filtered: a first pass finds which rows drop; then built-in columns select them, lazily.

    frame ─▶ by_runs: an aggregate in the JVM ───────────────┐
      │      else by_rows: Python, over what decides alone ──┴─▶ plan (batch_decision.py): log offsets that drop
      │                                                            none: the frame itself
      │                                                            few stretches of the log: a comparison for each
      │                                                            else: bitmaps, joined to the rows by their number
      └───────────────────────────────────────────────────────────┴─▶ rows, dropped

A run is rows of one pair with one distance between source and log offset (batch_decision.py), as producers' batches
come, and with one distance between log offset and place in the Spark partition. Places differ, so no record stands in a
run twice. A log in which pairs alternate row by row, or that has holes everywhere, has no runs to speak of; it shows by
the number of groups. Then, or where runs cross, or with a window, rows decide. In either way rows may lie in any order.
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
    epoch_in,
    numbers_of,
    plan_batch,
)
from spark_jobs.batch_marks import LogRange, MarksKey, SentBack
from spark_jobs.columns import SourcePosition, key_numbers, made_once, same_each_batch
from spark_jobs.errors import SparkJobError
from spark_jobs.filter_settings import BatchCounts, FilterRule, warn_of_chance_keys
from spark_jobs.mark_epochs import EPOCH_COLUMNS, Epoch
from spark_jobs.row_decision import DECIDED, decide_rows, decided
from spark_jobs.spark_internals import over_connect, setting, to_arrow, use_driver_python

KEY = "_pushrep_key"
"""The bytes that may be metadata, whatever carrier they came in, while a frame is inside the filter."""

RUNS_MAX = 250_000
"""With more runs than this the rows decide: some 20 MB for the driver, and no worth beyond."""

_CORES_LIKELY = 8
"""Of a Spark Connect server, which doesn't say how many it has."""

STRETCHES_MAX = 64
"""With more stretches than this, bitmaps say what drops: each stretch is a comparison for every row."""

_LOG = logging.getLogger(__name__)
_SHUFFLE = "spark.sql.shuffle.partitions"
_COLUMNS = ("topic", "partition", "offset")
_QUOTED = tuple(f"`{name}`" for name in _COLUMNS)  # a session may keep SQL's own words to itself
_WHOLE_KEY = f"if(octet_length({KEY}) = {KEY_BYTES}, {KEY}, null)"
_BITMAP = ("_pushrep_topic", "_pushrep_partition", "_pushrep_number", "_pushrep_words")
_BITMAP_SCHEMA = f"{_BITMAP[0]} string, {_BITMAP[1]} int, {_BITMAP[2]} bigint, {_BITMAP[3]} array<bigint>"


@dataclass(frozen=True, slots=True)
class FilteredFrame:
    """A batch frame's answer: `rows` pass, `dropped` do not; `marks` and `ranges` belong to all of its rows.

    Reading `rows` or `dropped` reads the frame again: it must give the same rows each time.
    """

    rows: DataFrame
    marks: Mapping[MarksKey, HighwaterMarks]
    ranges: tuple[LogRange, ...]
    plan: BatchPlan
    check_unchanged: Callable[[], None]
    """Reads the deciding columns once more. Raises FrameChanged if the frame does not give the same rows any more."""
    _dropped: Callable[[], DataFrame]

    @property
    def dropped(self) -> DataFrame:
        """The rows that do not pass; Spark plans the frame only where somebody asks for it."""
        return self._dropped()

    def counts(self, batch_id: int = 0) -> BatchCounts:
        """What becomes of the rows, known before anyone has read them."""
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
    """Filter a batch frame with the columns topic, partition and offset, and those of its carrier: one job, lazy rows.

    `carrier`: where the metadata is, "key" or "header" (the last one named `stream-metadata` in the column headers), or
    a `SourcePosition` where there is none.
    `marks` are those before the frame, `{MarksKey(topic): HighwaterMarks}`. The rows may lie in any order: the log's
    counts. `ttl_s` needs `retention_ms`, the topic's retention.ms, as in `filter_replays`.
    Raises TtlTooShort, FrameUnusable, CarrierUnusable, PositionUnfit, PairSplit, BadFilterSetting, and LogRowTwice as
    text in Spark's exception.
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


def plan_frame(  # noqa: PLR0913 - a frame, what is known of it, and the rule
    keyed: DataFrame,
    found: Iterable[PartitionRows],
    before: Mapping[MarksKey, HighwaterMarks],
    *,
    rule: FilterRule,
    now_ms: int,
    sent_back: Iterable[SentBack] = (),
) -> BatchPlan:
    """The plan of a frame of which the first pass has found this; where its runs do not decide, its rows do."""
    plan = plan_batch(found, before, rule=rule, now_ms=now_ms)
    if plan is None:
        plan = plan_batch(by_rows(keyed, before, rule, sent_back), before, rule=rule, now_ms=now_ms)
    assert plan is not None, "rows always decide"
    return plan


def unchanged_check(keyed: DataFrame, found: Sequence[PartitionRows], rule: FilterRule) -> Callable[[], None]:
    """What reads a keyed frame once more and compares: see FilteredFrame.check_unchanged."""

    def check() -> None:
        again = None if any(one.verdict is not None for one in found) else by_runs(keyed, rule)
        check_unchanged(found, by_rows(keyed, {}, rule) if again is None else again)

    return check


def filtered_by(df: DataFrame, plan: BatchPlan, check: Callable[[], None]) -> FilteredFrame:
    """The frame of `plan`, lazily."""
    rows, dropped = _cut(df, plan)
    return FilteredFrame(rows, plan.marks, plan.ranges, plan, check, dropped)


def _cut(df: DataFrame, plan: BatchPlan) -> tuple[DataFrame, Callable[[], DataFrame]]:
    """Rows and dropped rows by built-in columns: no Python runs for a row.

    Nor are they observed: their counts are known, and an Observation adds a tenth to the time of reading them.
    """
    if not plan.dropped_rows:
        return df, lambda: df.where("false")
    stretches = [
        (*where, start, end)
        for where, found in plan.stretches.items()
        for start, end in zip(found.starts.tolist(), found.ends.tolist(), strict=True)
    ]
    if not plan.bitmaps and len(stretches) <= STRETCHES_MAX:
        # Empty stretches fill up to a power of two, so that batches with other counts run the same generated code. Each
        # has numbers of its own, since Spark evaluates equal expressions once.
        more = (1 << (len(stretches) - 1).bit_length()) - len(stretches)
        stretches += [(*stretches[-1][:2], empty, empty) for empty in range(-1, -1 - 2 * more, -2)]
        # As text: made by functions, 64 stretches are a thousand calls into the JVM.
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
    # Broadcast: the rows stay where they are.
    joined = df.join(F.broadcast(df.sparkSession.createDataFrame(table, _BITMAP_SCHEMA)), F.expr(same), "left")
    return joined.where(bit == 0).drop(*_BITMAP), lambda: joined.where(bit == 1).drop(*_BITMAP)


def _inside(topic: str, partition: int, start: int, end: int) -> str:
    """Whether a row lies in a stretch, in SQL; the topic is written as hexadecimal digits, which need no escaping.

    Spark writes a number into the code that it generates, and the code of a batch with numbers of its own would be
    compiled anew, by Spark and by the JVM. A text or an array is handed to the code, so each number is taken out of an
    array, at a place that Spark doesn't know before.
    """
    zero = "bigint(`partition`) - bigint(`partition`)"
    low, high, own = (f"get(array(bigint({number})), {zero})" for number in (start, end - 1, partition))
    name = f"cast(X'{topic.encode().hex()}' as string)"
    return f"(`offset` between {low} and {high} and `partition` = {own} and topic = {name})"


class FrameUnusable(SparkJobError):
    """The frame can't be filtered: it lacks a column the filter decides by, or has nulls in one."""

    def __init__(self, column: str, why: str) -> None:
        super().__init__(f"column {column!r}: {why}")
        self.column, self.why = column, why


def keyed_frame(df: DataFrame, rule: FilterRule) -> DataFrame:
    """The frame with the column KEY beside its own. Raises FrameUnusable, CarrierUnusable, PositionUnfit."""
    for column in _COLUMNS:
        if column not in df.columns:
            raise FrameUnusable(column, "the filter decides by topic, partition and offset: keep the source's columns")
    missing = [column for column in EPOCH_COLUMNS if column not in df.columns]
    if len(missing) == 1:
        why = f"marks are kept by {' and '.join(EPOCH_COLUMNS)}: keep both of the source's columns, or neither"
        raise FrameUnusable(missing[0], why)
    use_driver_python(df.sparkSession)
    return df.withColumn(KEY, rule.key(df))


def by_runs(keyed: DataFrame, rule: FilterRule, sent_back: Iterable[SentBack] = ()) -> list[PartitionRows] | None:
    """What the batch of a keyed frame holds, with its runs; None where they are too many, or a window needs the rows.

    Raises FrameUnusable for null topics, partitions or offsets, EpochsMixed.
    """
    if rule.window:
        return None
    found = _aggregated(keyed, rule)
    if found.num_rows > RUNS_MAX:
        return None
    _refuse_nulls(found)
    in_order = [(name, "ascending") for name in ("topic", "partition", *EPOCH_COLUMNS) if name in found.column_names]
    return list(_partitions_of(found.sort_by(in_order), numbers_of(sent_back)))


def by_rows(
    keyed: DataFrame, before: Mapping[MarksKey, HighwaterMarks], rule: FilterRule, sent_back: Iterable[SentBack] = ()
) -> list[PartitionRows]:
    """What it holds, and which rows drop that begin with the marks `before`. Raises as `by_runs`, and LogRowTwice.

    What a worker raises comes as text in Spark's exception. A log partition is one task: few of them use few cores.
    """
    marks = {key: own.with_window(rule.window) for key, own in before.items()}
    numbers = numbers_of(sent_back)

    def decide(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return decide_rows(batches, marks, numbers, rule)

    columns = keyed.selectExpr(f"{_WHOLE_KEY} as {KEY}", *_QUOTED, *_epochs(keyed).values())
    with _few_shuffle_partitions(keyed):  # `repartition` asks for the number
        # By columns only: adaptive execution may join such partitions but never cuts one.
        in_order = columns.repartition("topic", "partition").sortWithinPartitions("topic", "partition", "offset")
        return decided(to_arrow(in_order.mapInArrow(decide, DECIDED)))


def _epochs(keyed: DataFrame) -> dict[str, str]:
    """The frame's epochs, in SQL by name; none where no startpoints are followed."""
    return {
        name: f"coalesce(cast(`{name}` as bigint), 0L) as `{name}`" for name in EPOCH_COLUMNS if name in keyed.columns
    }


def _aggregated(keyed: DataFrame, rule: FilterRule) -> Any:
    """An Arrow table of (topic, partition[, epochs], pair, run, place) with bounds; cut behind RUNS_MAX + 1.

    Groups and bounds are numbers, except the topic: Spark aggregates these by hashing, and binary values by sorting.
    """
    spark, epochs = keyed.sparkSession, _epochs(keyed)
    number = key_numbers(spark)
    # As text: an expression made by functions costs a call into the JVM for each of its parts, some milliseconds. And
    # few frames: each is analysed by itself.
    columns = (
        "`offset` - monotonically_increasing_id() as place",  # differs between Spark partitions, too
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
    # The first two are false or null for what is not metadata, see columns.py.
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
    """One task a core. Spark's default is 200, and before 4.2 no adaptive execution joins those of a stream."""
    spark = keyed.sparkSession
    cores = _CORES_LIKELY if over_connect(spark) else spark.sparkContext.defaultParallelism
    return setting(spark, _SHUFFLE, min(cores, int(spark.conf.get(_SHUFFLE) or 200)))


def _partitions_of(found: Any, sent_back: Mapping[tuple[str, int], int]) -> Iterator[PartitionRows]:
    """Rows of (topic, partition[, epochs], pair, run, place), sorted → all of one log partition and epoch in one."""
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
        epoch = epoch_in(sent_back, topic, partition, Epoch(*epochs_here or (0, 0)))
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
    """A column as int64, 0 where it has none."""
    return column.fill_null(0).to_numpy()


def _refuse_nulls(found: pa.Table) -> None:
    for column, found_as in (("topic", "topic"), ("partition", "partition"), ("offset", "place")):
        if found[found_as].null_count:
            raise FrameUnusable(column, "a row has none; the filter needs to know where each record lies")

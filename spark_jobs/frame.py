"""Filters a batch frame: a first pass finds which rows drop; then built-in column expressions select them, lazily.

    frame ─▶ by_runs: an aggregate in the JVM ───────────────┐
      │      else by_rows: Python, over the deciding columns ┴─▶ verdict (decide.py): log offsets that drop
      │                                                            none: the frame itself
      │                                                            few ranges of the log: a comparison for each
      │                                                            else: bitmaps, joined to the rows by their number
      └───────────────────────────────────────────────────────────┴─▶ rows, dropped

A run is a set of rows of one pair with the same difference between source and log offset (decide.py), and the
same difference between log offset and row number in the Spark partition. Row numbers are unique, so no record is in a
run twice. A batch of a producer gives a run. A log whose pairs alternate row by row, or that has many gaps, gives too
many runs, which the number of groups shows. Then, and if runs overlap, and with a window, the rows decide one by one.
Both ways accept rows in any order.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit
from pyspark.sql.types import NullType, StringType

from filtering.carrier import CarrierCheck
from filtering.errors import BadFilterSetting
from filtering.marks import HighwaterMarks
from filtering.stream_metadata import KEY_BYTES
from pushrep.env import SYSTEM_CLOCK
from spark_jobs.batch_marks import MarksKey
from spark_jobs.columns import (
    WHOLE,
    FilterRule,
    SourcePosition,
    carrier_key,
    is_stream_metadata,
    key_numbers,
    made_once,
)
from spark_jobs.decide import (
    BITMAP_OFFSETS,
    EPOCH_COLUMNS,
    NO_PAIR,
    BatchCounts,
    BatchVerdict,
    Bitmaps,
    Epoch,
    PartitionRows,
    Runs,
    Stretches,
    check_unchanged,
    decide,
    warn_of,
)
from spark_jobs.errors import FrameUnusable
from spark_jobs.row_decision import DECIDED, check_places, decide_rows, decided
from spark_jobs.spark_internals import ShuffleSession, over_connect, to_arrow, use_driver_python

KEY = "_pushrep_key"
"""The column with the bytes that may be metadata, from any carrier, while a frame is inside the filter."""

RUNS_MAX = 250_000
"""With more runs than this the rows decide: so many runs take about 20 MB on the driver, and more save no time."""

_CORES_LIKELY = 8
"""Assumed for a Spark Connect server, whose number of cores is unknown."""

STRETCHES_MAX = 64
"""With more stretches than this, bitmaps select the rows that drop: each stretch is a comparison for every row."""

WITHOUT_RUNS = 16
"""After a batch that was searched for runs in vain 1 batch is filtered without, then 2, 4, 8, at last this many."""

_LOG = logging.getLogger(__name__)
_COLUMNS = ("topic", "partition", "offset")
_QUOTED = tuple(f"`{name}`" for name in _COLUMNS)  # with spark.sql.ansi.enforceReservedKeywords these are keywords
_EPOCHS = tuple(f"coalesce(cast(`{name}` as bigint), 0L) as `{name}`" for name in EPOCH_COLUMNS)
_WHOLE_KEY = f"if(octet_length({KEY}) = {KEY_BYTES}, {KEY}, null)"
_BITMAP = ("_pushrep_topic", "_pushrep_partition", "_pushrep_number", "_pushrep_words")
_BITMAP_SCHEMA = f"{_BITMAP[0]} string, {_BITMAP[1]} int, {_BITMAP[2]} bigint, {_BITMAP[3]} array<bigint>"


@dataclass(frozen=True, slots=True)
class FilteredFrame:
    """A filtered batch frame: `rows` pass, `dropped` do not; `marks` are those after all of its rows.

    Reading `rows` or `dropped` reads the frame again, which must give the same rows each time.
    """

    rows: DataFrame = field(init=False)
    verdict: BatchVerdict
    _frame: DataFrame
    _keyed: DataFrame
    _found: list[PartitionRows]
    _rule: FilterRule

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", self._selected(drops=False))

    @property
    def dropped(self) -> DataFrame:
        """The rows that do not pass. Spark plans this frame only when this property is read."""
        return self._selected(drops=True)

    @property
    def marks(self) -> Mapping[MarksKey, HighwaterMarks]:
        """The marks after all rows of the frame."""
        return self.verdict.marks

    def counts(self) -> BatchCounts:
        """The counts of rows kept and dropped. They are known before `rows` is read."""
        return self.verdict.counts

    def check_unchanged(self) -> None:
        """Read the deciding columns once more. Raises FrameChanged if the frame gives other rows than before."""
        again = None if any(one.verdict is not None for one in self._found) else by_runs(self._keyed, self._rule)
        check_unchanged(self._found, by_rows(self._keyed, {}, self._rule) if again is None else again)

    def _selected(self, *, drops: bool) -> DataFrame:
        """The rows that drop, or those that pass, by built-in expressions: no Python runs for a row.

        The frames have no Observation: the counts are known, and it adds a tenth to the time of reading them.
        """
        found = self.verdict.dropped
        if not found:
            return self._frame.where("false") if drops else self._frame
        stretches = [
            (*where, start, end)
            for where, one in found.items()
            if isinstance(one, Stretches)
            for start, end in zip(one.starts.tolist(), one.ends.tolist(), strict=True)
        ]
        if len(stretches) <= STRETCHES_MAX and not any(isinstance(one, Bitmaps) for one in found.values()):
            inside = _inside_any(stretches)
            return self._frame.where(inside if drops else ~inside)
        table = [
            (*where, number, words)
            for where, one in found.items()
            for bitmaps in [one if isinstance(one, Bitmaps) else Bitmaps.of(one)]
            for number, words in zip(bitmaps.numbers.tolist(), bitmaps.words.tolist(), strict=True)
        ]
        topic, partition, number, words = _BITMAP
        own_number = f"cast(`offset` as bigint) div {BITMAP_OFFSETS}"
        same = f"topic = {topic} and `partition` = {partition} and {own_number} = {number}"
        word = f"get({words}, cast(`offset` % {BITMAP_OFFSETS} div 64 as int))"
        bit = F.expr(f"coalesce(getbit({word}, cast(`offset` % 64 as int)), 0)")
        # A broadcast join: the rows are not shuffled.
        bitmaps_frame = F.broadcast(self._frame.sparkSession.createDataFrame(table, _BITMAP_SCHEMA))
        return self._frame.join(bitmaps_frame, F.expr(same), "left").where(bit == int(drops)).drop(*_BITMAP)


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
    Raises FrameUnusable, PairSplit, WrongCarrier, BadFilterSetting; what is raised in a worker is text in Spark's
    exception.
    """
    rule = FilterRule(carrier=carrier, window=window, only_pids=only_pids, ttl_s=ttl_s, retention_ms=retention_ms)
    marks = checked_marks(marks)
    if df.isStreaming:
        raise FrameUnusable("it is a stream: filter it by filter_replays, or in foreachBatch by ReplayFilteredBatches")
    use_driver_python(df.sparkSession)
    keyed = keyed_frame(df, rule)
    found = by_runs(keyed, rule)
    if found is None:
        found = by_rows(keyed, marks, rule)
    CarrierChecks(rule).look(keyed, found, marks)
    verdict = decided_frame(keyed, found, marks, rule=rule, now_ms=SYSTEM_CLOCK.wall_ms() if now_ms is None else now_ms)
    warn_of(_LOG, "the frame", verdict.counts)
    return FilteredFrame(verdict, df, keyed, found, rule)


def checked_marks(marks: Mapping[MarksKey, HighwaterMarks] | None) -> Mapping[MarksKey, HighwaterMarks]:
    """The marks to begin with, none for None. Raises BadFilterSetting for what is no such mapping."""
    given: Any = {} if marks is None else marks
    is_right = isinstance(given, Mapping) and all(
        isinstance(key, MarksKey) and isinstance(one, HighwaterMarks) for key, one in given.items()
    )
    if not is_right:
        raise BadFilterSetting(
            "marks", marks, "{MarksKey(topic): HighwaterMarks}, as BatchMarks and FilteredFrame have"
        )
    found: Mapping[MarksKey, HighwaterMarks] = given
    return found


def decided_frame(
    keyed: DataFrame,
    found: list[PartitionRows],
    before: Mapping[MarksKey, HighwaterMarks],
    *,
    rule: FilterRule,
    now_ms: int,
) -> BatchVerdict:
    """The verdict on a frame. found: the result of its first pass. If the runs do not decide, its rows are read."""
    verdict = decide(found, before, rule=rule, now_ms=now_ms)
    if verdict is None:
        verdict = decide(by_rows(keyed, before, rule), before, rule=rule, now_ms=now_ms)
    assert verdict is not None, "rows always decide"
    return verdict


def _inside_any(stretches: list[tuple[str, int, int, int]]) -> Column:
    """The condition that a row is in one of the stretches.

    Empty stretches fill the list up to a power of two, so that batches with other counts run the same generated code.
    Each has other numbers, because Spark evaluates equal expressions once.
    """
    more = (1 << (len(stretches) - 1).bit_length()) - len(stretches)
    empty = [(*stretches[-1][:2], number, number) for number in range(-1, -1 - 2 * more, -2)]
    # As SQL text: built by functions, 64 stretches are a thousand calls into the JVM.
    return F.expr(" or ".join(_inside(*stretch) for stretch in stretches + empty))


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


def keyed_frame(df: DataFrame, rule: FilterRule) -> DataFrame:
    """The frame with the additional column KEY. Raises FrameUnusable."""
    for column in _COLUMNS:
        if column not in df.columns:
            why = "it is missing; the filter needs topic, partition and offset: select these columns of the source"
            raise FrameUnusable(f"column {column!r}: {why}")
        kind = df.schema[column].dataType
        if not isinstance(kind, (StringType, NullType) if column == "topic" else (*WHOLE, NullType)):
            wanted = "text" if column == "topic" else "a whole number (bigint), by which the log is in order"
            raise FrameUnusable(f"column {column!r}: it is {kind.simpleString()}: cast it to {wanted}")
    missing = [column for column in EPOCH_COLUMNS if column not in df.columns]
    if len(missing) == 1:
        why = f"it is missing; select both {' and '.join(EPOCH_COLUMNS)} of the source, or neither"
        raise FrameUnusable(f"column {missing[0]!r}: {why}")
    return df.withColumn(KEY, rule.key(df))


def by_runs(keyed: DataFrame, rule: FilterRule) -> list[PartitionRows] | None:
    """The content of a keyed frame by log partition, with its runs; None if there are too many runs, or with a window.

    Raises FrameUnusable for null topics, partitions or offsets.
    """
    if rule.window:
        return None
    spark, epochs = keyed.sparkSession, _epochs(keyed)
    wanted = (_run_columns, rule.pid_condition, epochs)
    columns, groups, bounds = made_once(spark, wanted, lambda: _run_columns(spark, rule.pid_condition, epochs))
    found = to_arrow(keyed.select(*columns).groupBy(*groups).agg(*bounds).limit(RUNS_MAX + 1))
    if found.num_rows > RUNS_MAX:
        return None
    check_places(found["topic"], found["partition"], found["place"])
    in_order = [(name, "ascending") for name in ("topic", "partition", *EPOCH_COLUMNS) if name in found.column_names]
    return list(_partitions_of(found.sort_by(in_order)))


class CarrierChecks:
    """Whether the topics of a query carry their metadata where the rule looks; its first pass counts them anyway."""

    def __init__(self, rule: FilterRule) -> None:
        self._rule = rule
        self._checks: dict[str, CarrierCheck] = {}

    def look(self, keyed: DataFrame, found: Iterable[PartitionRows], before: Mapping[MarksKey, HighwaterMarks]) -> None:
        """Look at a batch, before any row is given to anybody. before: the marks before it. Raises WrongCarrier."""
        sums: dict[str, tuple[int, int]] = {}
        for one in found:
            rows, unkeyed = sums.get(one.topic, (0, 0))
            sums[one.topic] = rows + one.rows, unkeyed + one.unkeyed
        for topic, (rows, unkeyed) in sums.items():
            if (check := self._checks.get(topic)) is None:
                check = CarrierCheck(_LOG, topic, self._rule.carrier_name, self._rule.wanted)
                self._checks[topic] = check
                if any(key.topic == topic and marks for key, marks in before.items()):
                    check.prove()
            check.look(rows, unkeyed, partial(_in_header, keyed, topic))


def _in_header(keyed: DataFrame, topic: str, count: int) -> int:
    if "headers" not in keyed.columns:  # as without `includeHeaders`: then nobody can say
        return 0
    some = keyed.where(F.col("topic") == topic).select(KEY, carrier_key("header", keyed).alias("header")).limit(count)
    return some.where(~is_stream_metadata(F.col(KEY)) & is_stream_metadata(F.col("header"))).count()


class FirstPass:
    """The first pass over the batches of a query: by runs, unless those of batches shortly before decided nothing."""

    def __init__(self, rule: FilterRule) -> None:
        self._rule, self._session = rule, ShuffleSession()
        self.runs_decided()

    def runs_decided(self) -> None:
        """Look for runs in the next batch, too."""
        self._without_runs = self._pause = 0  # batches before runs are looked for again: still to come, and in all

    def partition_rows(self, keyed: DataFrame, before: Mapping[MarksKey, HighwaterMarks]) -> list[PartitionRows]:
        """The content of a keyed frame. After it the next batches go without runs, unless these decided."""
        found = None
        if self._without_runs:
            self._without_runs -= 1
        else:
            found = by_runs(self._session.planned(keyed, cores_of(keyed.sparkSession)), self._rule)
            self._without_runs = self._pause = min(2 * self._pause or 1, WITHOUT_RUNS)
        return by_rows(keyed, before, self._rule) if found is None else found


def by_rows(keyed: DataFrame, before: Mapping[MarksKey, HighwaterMarks], rule: FilterRule) -> list[PartitionRows]:
    """The content of a keyed frame by log partition, and which rows drop. before: the marks before the frame.

    Raises as `by_runs`, and for a record that stands twice. An error in a worker is text in Spark's exception. Each log
    partition is one task, so few of them use few cores.
    """

    def decide_in_order(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return decide_rows(batches, before, rule)

    columns = keyed.selectExpr(f"{_WHOLE_KEY} as {KEY}", *_QUOTED, *_epochs(keyed))
    in_order = columns.repartition(cores_of(keyed.sparkSession), "topic", "partition").sortWithinPartitions(*_COLUMNS)
    return decided(to_arrow(in_order.mapInArrow(decide_in_order, DECIDED)))


def cores_of(spark: SparkSession) -> int:
    """How many tasks run at once. More tasks than that for a shuffle save nothing here."""
    return _CORES_LIKELY if over_connect(spark) else spark.sparkContext.defaultParallelism


def _epochs(keyed: DataFrame) -> tuple[str, ...]:
    """The SQL of the frame's epoch columns; none if the source follows no startpoints."""
    return _EPOCHS if EPOCH_COLUMNS[0] in keyed.columns else ()


def _run_columns(spark: SparkSession, pid_condition: str, epochs: Iterable[str]) -> tuple[list[Column], ...]:
    """The columns of a keyed frame that decide; the groups of its rows, which are the runs; the bounds of each.

    Groups and bounds are numbers, except the topic: Spark aggregates numbers by hashing, and binary values by sorting.
    As SQL text: an expression built by functions costs a call into the JVM for each of its parts, some milliseconds.
    In few steps: Spark analyses each intermediate frame.
    """
    number = key_numbers(spark)
    columns = [
        F.expr("`offset` - monotonically_increasing_id() as place"),  # ids differ between Spark partitions, too
        *map(F.expr, (*_QUOTED, *epochs)),
        number(_WHOLE_KEY, 1).alias("pid"),
        number(_WHOLE_KEY, 9).alias("middle"),  # the source partition, and the offset's upper half
        number(_WHOLE_KEY, 13).alias("source_offset"),
    ]
    # For bytes that are not metadata the first two conditions are false or null, see columns.py.
    ours = f"middle >= 0 and source_offset >= 0 and {pid_condition}"
    groups = (
        *(f"`{name}`" for name in ("topic", "partition", *(EPOCH_COLUMNS if epochs else ()), "place")),
        f"if({ours}, pid, null) as pid",
        f"if({ours}, shiftright(middle, 32), null) as source_partition",
        f"if({ours}, source_offset - `offset`, null) as run",
    )
    bounds = ("min(`offset`) `start`", "max(`offset`) `last`", "count(1) `rows`")
    return columns, [*map(F.expr, groups)], [*map(F.expr, bounds)]


def _partitions_of(found: Any) -> Iterator[PartitionRows]:
    """Sorted groups (topic, partition[, epochs], pair, run, place) → one PartitionRows for each log partition and
    epoch.
    """
    if not found.num_rows:
        return
    starts, lasts, rows = (found[name].to_numpy() for name in ("start", "last", "rows"))
    is_keyed = found["pid"].is_valid().to_numpy()
    pids, partitions, distances = (found[name].fill_null(0).to_numpy() for name in ("pid", "source_partition", "run"))
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

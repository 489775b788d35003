"""A batch frame filtered in two passes: the first finds the slices, the second keeps or drops rows, lazily.

    frame ─▶ keyed_frame ─▶ scan_slices: one Spark job ─▶ plan (slices.py)
                   │                                        │
                   └────────────────────────────────────────┴─ apply_plan ─▶ rows, dropped

First pass. Without a window a slice's state is one maximum a pair, which is a plain aggregate in the JVM. It groups
rows by run (slices.py): one distance between source and log offset, as producers' batches come, and one distance
between log offset and row number in the Spark partition. Row numbers differ, so no record stands in a run twice.
Most batches are decided by their runs alone, and then no Python runs for a row. A log in which pairs alternate row
by row, or that has holes everywhere, has about as many runs as rows. The number of groups shows that, and the batch is
aggregated by pair instead.

Second pass. If the runs decide, it is built-in columns only, and none if every row is new. Otherwise Python workers
decide each row (slice_filter.py), and an Observation counts.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit

from filtering.marks import HighwaterMarks
from filtering.replay_filter import PAIR_BYTES, check_ttl
from filtering.stream_metadata import KEY_BYTES, pack_keys
from pushrep.env import SYSTEM_CLOCK
from spark_jobs.batch_marks import LogRange, MarksKey
from spark_jobs.columns import SourcePosition, is_stream_metadata, key_numbers
from spark_jobs.errors import SparkJobError
from spark_jobs.filter_settings import BatchCounts, FilterRule, warn_of_chance_keys
from spark_jobs.mark_epochs import EPOCH_COLUMNS
from spark_jobs.slice_filter import COUNT_SHIFT, JUMPED, KIND_MASK, LATE, PASSES, decider, log_partitions, scan_batches
from spark_jobs.slices import BatchPlan, BatchVerdict, Runs, Slice, Stretch, plan_batch
from spark_jobs.spark_internals import (
    decisions_by,
    is_local,
    is_observed,
    over_connect,
    setting,
    to_arrow,
    use_driver_python,
)

KEY = "_pushrep_key"
"""The bytes that may be metadata, whatever carrier they came in, while a frame is inside the filter."""

RUNS_MAX = 250_000
"""With more runs than this a batch is aggregated by pair: the driver would get over 20 MB, and little is gained."""

_CORES_LIKELY = 8
"""Of a Spark Connect server, which doesn't tell how many it has."""

_SHUFFLE = "spark.sql.shuffle.partitions"
_COLUMNS = ("topic", "partition", "offset")
_IN_ORDER = ("slice", "topic", "partition", *EPOCH_COLUMNS)
_SCANNED = (
    "topic string, partition int, startpoint_epoch bigint, marks_epoch bigint, start bigint, end bigint, rows bigint, "
    "unkeyed bigint, ascends boolean, marks binary"
)


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


def scan_slices(keyed: DataFrame, rule: FilterRule, *, runs: bool = True) -> list[Slice]:
    """Run the first pass over a keyed frame. Raises FrameUnusable for null topics, partitions or offsets.

    `runs=False` skips looking for runs, where they are known to be too many.
    """
    if rule.window:
        return _scan_windows(keyed, rule)
    found = _aggregated(keyed, rule, runs=runs)
    if runs and found.num_rows > RUNS_MAX:
        runs, found = False, _aggregated(keyed, rule, runs=False)
    _refuse_nulls(found)
    in_order = [(name, "ascending") for name in _IN_ORDER if name in found.column_names]
    return list(_slices_of(found.sort_by(in_order), runs=runs))


def in_log_order(keyed: DataFrame) -> bool:
    """Whether the rows of each log partition ascend inside each Spark partition. One more job, over three columns."""

    def look(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        last: dict[tuple[str | None, int], int] = {}
        for batch in batches:
            topic, partition, offset = batch.columns
            offsets = np.asarray(offset).astype(np.int64)
            for where, rows in log_partitions(topic, np.asarray(partition).astype(np.int64)):
                own = offsets if rows is None else offsets[rows]
                if own[0] < last.get(where, -1) or (own[1:] < own[:-1]).any():
                    yield pa.RecordBatch.from_pylist([{"unordered": True}])
                    return
                last[where] = int(own[-1])

    return not keyed.select(*_COLUMNS).mapInArrow(look, "unordered boolean").take(1)


def governed(key: Column, rule: FilterRule) -> Column:
    """Whether the rule is for this key: metadata, and of one of `only_pids` if there are any."""
    ours = is_stream_metadata(key)
    if rule.only_pids is not None:
        pids = [pid.to_bytes(8, "big", signed=True) for pid in sorted(rule.only_pids)]
        ours &= F.substring(key, 1, 8).isin(pids) if pids else F.lit(False)
    return ours


def epoch_columns(keyed: DataFrame) -> list[Column]:
    """The frame's epochs; none where no startpoints are followed."""
    names = [name for name in EPOCH_COLUMNS if name in keyed.columns]
    return [F.coalesce(F.col(name).cast("bigint"), F.lit(0)).alias(name) for name in names]


def _aggregated(keyed: DataFrame, rule: FilterRule, *, runs: bool) -> Any:
    """An Arrow table of (slice, topic, partition[, epochs], pair[, run, place]) with bounds; cut behind RUNS_MAX + 1.

    Groups and bounds are numbers, except the topic: Spark aggregates these by hashing, and binary values by sorting.
    """
    epochs = epoch_columns(keyed)
    names = [*_COLUMNS, *(EPOCH_COLUMNS if epochs else ())]
    number, key = key_numbers(keyed.sparkSession), F.col(KEY)
    # As text: an expression made by functions costs a call into the JVM for each of its parts, some milliseconds.
    whole = keyed.select(*_COLUMNS, *epochs, F.expr(f"if(octet_length({KEY}) = {KEY_BYTES}, {KEY}, null) as {KEY}"))
    numbers = whole.select(
        F.expr("spark_partition_id() as slice"),
        *([F.expr("`offset` - monotonically_increasing_id() as place")] if runs else []),
        *names,
        number(key, 1).alias("pid"),
        number(key, 9).alias("middle"),  # the source partition, and the offset's upper half
        number(key, 13).alias("source_offset"),
    )
    ours = F.expr("middle >= 0 and source_offset >= 0")  # false or null for what is not metadata, see columns.py
    if rule.only_pids is not None:
        ours &= F.col("pid").isin(sorted(rule.only_pids)) if rule.only_pids else F.lit(False)
    of_slice = ["slice", *(name for name in names if name != "offset")]
    asked = numbers.select("*", ours.alias("ours")).selectExpr(
        *(f"`{name}`" for name in (*of_slice, "offset", *(["place"] if runs else []))),
        "if(ours, pid, null) as pid",
        "if(ours, shiftright(middle, 32), null) as source_partition",
        "if(ours, source_offset - `offset`, null) as run" if runs else "if(ours, source_offset, null) as mark",
    )
    # In quotes, as a session may keep SQL's own words to itself.
    bounds = ["min(`offset`) `start`", "max(`offset`) `last`", "count(1) `rows`"]
    summary = asked.groupBy(*of_slice, "pid", "source_partition", *(["run", "place"] if runs else [])).agg(
        *(F.expr(bound) for bound in ([] if runs else ["max(mark) as mark", "count(`offset`) as offsets"]) + bounds)
    )
    # The groups lie in one Spark partition already, but Spark shuffles them: 200 tasks for some kilobytes by default,
    # since adaptive execution, which would join them, is off in a stream.
    spark = keyed.sparkSession
    cores = _CORES_LIKELY if over_connect(spark) else spark.sparkContext.defaultParallelism
    few = min(cores, int(spark.conf.get(_SHUFFLE) or 200))
    with setting(spark, _SHUFFLE, few):
        return to_arrow(summary.limit(RUNS_MAX + 1) if runs else summary)


def _slices_of(found: Any, *, runs: bool) -> Iterator[Slice]:
    """Rows of (slice, topic, partition[, epochs], pair[, run]), sorted → a Slice for all of one pair in front."""
    if not found.num_rows:
        return
    columns = {name: found[name].to_numpy() for name in ("slice", "partition", "start", "last", "rows")}
    is_keyed = found["pid"].is_valid().to_numpy()
    pids, partitions = (_numbers(found[name]) for name in ("pid", "source_partition"))
    all_runs = _all_runs(columns, pids, partitions, _numbers(found["run"])) if runs else None
    marks = _numbers(found["mark"]) if all_runs is None else all_runs.highs
    topics = found["topic"].to_pylist()
    no_epochs = [0] * found.num_rows
    epochs = [found[name].to_pylist() if name in found.column_names else no_epochs for name in EPOCH_COLUMNS]
    owners = list(zip(columns["slice"].tolist(), topics, columns["partition"].tolist(), *epochs, strict=True))
    firsts = [0, *(i + 1 for i, (one, other) in enumerate(pairwise(owners)) if one != other), len(owners)]
    places = _numbers(found["place"]) if runs else None
    for low, high in pairwise(firsts):
        _, topic, partition, startpoint_epoch, marks_epoch = owners[low]
        keyed = low + np.flatnonzero(is_keyed[low:high])
        unkeyed = low + np.flatnonzero(~is_keyed[low:high])
        yield Slice(
            topic,
            partition,
            int(columns["start"][low:high].min()),
            int(columns["last"][low:high].max()) + 1,
            int(columns["rows"][low:high].sum()),
            int(columns["rows"][unkeyed].sum()),
            HighwaterMarks.from_columns(pids[keyed], partitions[keyed], marks[keyed], partition),
            ascends=places is None or _ascend(columns["start"][low:high], columns["last"][low:high], places[low:high]),
            runs=all_runs and all_runs.some(keyed),
            unkeyed_runs=all_runs and all_runs.some(unkeyed)._replace(partitions=np.full(len(unkeyed), partition)),
            startpoint_epoch=startpoint_epoch,
            marks_epoch=marks_epoch,
        )


def _ascend(starts: Any, lasts: Any, places: Any) -> bool:
    """Whether the first and last rows of a slice's groups, in the order of the Spark partition, ascend in the log too.

    This notices a task that reads files in the wrong order. Rows inside a group are not compared.
    """
    offsets, where = np.concatenate([starts, lasts]), np.concatenate([starts - places, lasts - places])
    return bool((np.diff(offsets[np.argsort(where, kind="stable")]) >= 0).all())


def _all_runs(columns: dict[str, Any], pids: Any, partitions: Any, distances: Any) -> Runs:
    starts, lasts = columns["start"], columns["last"]
    return Runs(pids, partitions, starts, lasts, starts + distances, lasts + distances, columns["rows"])


def _numbers(column: Any) -> Any:
    """A column as int64, 0 where it has none."""
    return column.fill_null(0).to_numpy()


def _refuse_nulls(found: pa.Table) -> None:
    for column in ("topic", "partition"):
        if found[column].null_count:
            raise FrameUnusable(column, "a row has none; the filter needs to know where each record lies")
    by_run = "place" in found.column_names  # of a row without an offset there is none either
    if found["place"].null_count if by_run else pc.sum(found["rows"]) != pc.sum(found["offsets"]):
        raise FrameUnusable("offset", "a row has none; the filter needs to know where each record lies")


def _scan_windows(keyed: DataFrame, rule: FilterRule) -> list[Slice]:
    """With a window a slice's state is maximum and bits, which only Python can merge."""

    def scan(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return scan_batches(batches, rule)

    columns = keyed.select(KEY, *_COLUMNS, *epoch_columns(keyed))
    found = to_arrow(columns.mapInArrow(scan, _SCANNED))
    return [
        Slice(**(row | {"marks": HighwaterMarks.from_bytes(row["marks"])}))  # the columns are its fields
        for row in found.to_pylist()
    ]


STRETCHES_MAX = 64
"""With more stretches than this the rows are decided one by one, since each stretch costs every row a comparison."""

_LOG = logging.getLogger(__name__)
_DECISION = "_pushrep_decision"


@dataclass(frozen=True, slots=True)
class FilteredFrame:
    """A batch frame's answer: `rows` pass, `dropped` do not; `marks` and `ranges` belong to all of its rows.

    Reading `rows` or `dropped` reads the frame again. If rows are decided one by one and the frame gives other rows,
    that fails with FrameChanged, as text in Spark's exception. If runs decide, other rows are not noticed here;
    ReplayFilteredBatches notices them.
    """

    rows: DataFrame
    dropped: DataFrame
    marks: Mapping[MarksKey, HighwaterMarks]
    ranges: tuple[LogRange, ...]
    plan: BatchPlan
    observation: Observation

    def counts(self, batch_id: int = 0) -> BatchCounts:
        """The counts: known at once if runs decide, else as the first action on `rows` saw them."""
        plan = self.plan
        known = BatchCounts(
            batch_id,
            plan.rows,
            plan.unkeyed,
            plan.pairs,
            all_dropped=plan.all_dropped,
            unlikely_pairs=plan.unlikely_pairs,
        )
        if plan.verdict is not None:
            dropped, jumped = plan.verdict.dropped_rows, plan.verdict.jumped
            kept = plan.rows - plan.unkeyed - dropped
            return replace(known, kept=kept, dropped=dropped, late=0, jumped=jumped)
        if not is_observed(self.observation):
            return known
        seen = {name: value or 0 for name, value in self.observation.get.items()}
        if seen["rows"] != plan.rows:
            return known
        kept, dropped = seen["passed"] - plan.unkeyed, plan.rows - seen["passed"]
        return replace(known, kept=kept, dropped=dropped, late=seen["late"], jumped=seen["jumped"])


def filter_frame(  # noqa: PLR0913 - the rule's settings, by name
    df: DataFrame,
    marks: Mapping[MarksKey, HighwaterMarks] | None = None,
    *,
    carrier: str | SourcePosition = "key",
    window: int = 0,
    only_pids: Iterable[int] | None = None,
    ttl_s: float | None = None,
    retention_ms: int | None = None,
    sort: bool = False,
    now_ms: int | None = None,
) -> FilteredFrame:
    """Filter a batch frame with the columns topic, partition and offset, and those of its carrier: one job, lazy rows.

    `carrier`: where the metadata is, "key" or "header" (the last one named `stream-metadata` in the column headers), or
    a `SourcePosition` where there is none.
    `marks` are those before the frame, `{MarksKey(topic): HighwaterMarks}`. `sort=True` brings the rows into log
    order first; without it a shuffled frame, files that are not in log order, and rows that are part of the plan are
    recognised and sorted. Other rows out of order inside one Spark partition may fail with LogOrderBroken.
    `ttl_s` needs `retention_ms`, the topic's retention.ms, as in `filter_replays`.
    Raises TtlTooShort, FrameUnusable, CarrierUnusable, PositionUnfit, PairSplit, BadFilterSetting.
    """
    pids = None if only_pids is None else frozenset(only_pids)
    rule = FilterRule(carrier=carrier, window=window, only_pids=pids, ttl_s=ttl_s)
    check_ttl(ttl_s, retention_ms)
    keyed = keyed_frame(df, rule)
    slices = scan_slices(keyed, rule)
    now = SYSTEM_CLOCK.wall_ms() if now_ms is None else now_ms
    plan = plan_frame(keyed, slices, marks or {}, rule=rule, now_ms=now, sort=sort)
    warn_of_chance_keys(_LOG, "the frame", plan.pairs, plan.unlikely_pairs)
    return apply_plan(keyed, plan, rule)


def plan_frame(  # noqa: PLR0913 - a frame, what is known of it, and the rule
    keyed: DataFrame,
    slices: list[Slice],
    before: Mapping[MarksKey, HighwaterMarks],
    *,
    rule: FilterRule,
    now_ms: int,
    sort: bool,
) -> BatchPlan:
    """The plan of a scanned frame; it sorts if rows are decided one by one and not in the order that this needs."""
    plan = plan_batch(slices, before, rule=rule, now_ms=now_ms, sort=sort)
    if decided_by_runs(plan) or plan.must_sort:
        return plan
    if any(s.of_pruned_frame for s in slices):
        slices = scan_slices(keyed, rule, runs=False)
    sort = not _is_in_order(keyed, slices, rule)
    return plan_batch(slices, before, rule=rule, now_ms=now_ms, sort=sort)


def _is_in_order(keyed: DataFrame, slices: list[Slice], rule: FilterRule) -> bool:
    """Whether rows lie in the Spark partitions that the first pass saw and, as far as is known, in log order.

    Not so for rows that are part of the plan (values, a small Arrow table): a first pass over them runs without tasks.
    Spark packs files into tasks by size; whether these are in log order is known only from runs, or with a window.
    """
    if is_local(keyed) is not False:
        return False
    known = rule.window or all(s.runs is not None for s in slices)
    return bool(known) or len(keyed.inputFiles()) < 2 or in_log_order(keyed)


def decided_by_runs(plan: BatchPlan) -> bool:
    """Whether built-in columns will tell which rows pass, wherever these lie."""
    return plan.verdict is not None and len(plan.verdict.dropped) <= STRETCHES_MAX


def apply_plan(keyed: DataFrame, plan: BatchPlan, rule: FilterRule) -> FilteredFrame:
    """The frame of `plan`, lazily; `keyed` is the very frame that was scanned for it."""
    observation = Observation()
    if plan.verdict is not None and decided_by_runs(plan):
        rows, dropped = _by_stretches(keyed, plan.verdict, rule)
        return FilteredFrame(rows, dropped, plan.marks, plan.ranges, plan, observation)
    if plan.must_sort:
        # By columns only: adaptive execution may join such partitions but never cuts one.
        keyed = keyed.repartition("topic", "partition").sortWithinPartitions("topic", "partition", "offset")
    by_topic = len({start.topic for start in plan.starts}) > 1
    decide = decisions_by(decider(plan.starts, rule, by_topic=by_topic))
    columns = [KEY, "partition", "offset", *(["topic"] if by_topic else [])]
    decided = keyed.withColumn(_DECISION, decide(*columns)).drop(KEY)
    decision = F.col(_DECISION)
    passes = decision.bitwiseAND(F.lit(PASSES)) != 0
    count = F.shiftright(decision, COUNT_SHIFT)
    kind = decision.bitwiseAND(F.lit(KIND_MASK))
    # Inside foreachBatch it does not appear in the query's progress.
    observed = decided.observe(
        observation,
        F.count(F.lit(1)).alias("rows"),
        F.sum(decision.bitwiseAND(F.lit(PASSES))).alias("passed"),
        F.sum(F.when(kind == LATE, count)).alias("late"),
        F.sum(F.when(kind == JUMPED, count)).alias("jumped"),
    )
    rows = observed.where(passes).drop(_DECISION)
    # An Observation is filled by the first action, which must not be a mere isEmpty.
    rows.isEmpty = decided.where(passes).isEmpty  # type: ignore[method-assign]
    return FilteredFrame(
        rows,
        decided.where(~passes).drop(_DECISION),
        plan.marks,
        plan.ranges,
        plan,
        observation,
    )


def _by_stretches(keyed: DataFrame, verdict: BatchVerdict, rule: FilterRule) -> tuple[DataFrame, DataFrame]:
    """Rows and dropped rows by built-in columns: no Python runs for a row.

    Nor are they observed: their counts are known, and an Observation adds a tenth to the time of reading them.
    """
    if not verdict.dropped:
        return keyed.drop(KEY), keyed.drop(KEY).where("false")
    # As text: made by functions, 64 stretches are a thousand calls into the JVM.
    inside = " or ".join(_inside(topic, stretch) for topic, stretch in verdict.dropped)
    # Log offsets first: they exclude most rows. Null, for a row without a key, is joined with a false.
    replayed = F.expr(inside) & governed(F.col(KEY), rule)
    decided = keyed.withColumn(_DECISION, replayed).drop(KEY)
    return decided.where(~F.col(_DECISION)).drop(_DECISION), decided.where(_DECISION).drop(_DECISION)


def _inside(topic: str, stretch: Stretch) -> str:
    """Whether a row lies in a stretch, in SQL; what is no number goes as hexadecimal digits, which need no escaping."""
    pair = pack_keys(stretch.pid, stretch.partition, 0, 1)[:PAIR_BYTES].hex()
    return (
        f"(`offset` between {stretch.start} and {stretch.end - 1} and substring({KEY}, 1, {PAIR_BYTES}) = X'{pair}' "
        f"and topic = cast(X'{topic.encode().hex()}' as string))"
    )

"""A frame filtered: the second pass over the rows, lazy, with what the first pass found beside it.

keyed frame + plan ─┬─ the runs decide: built-in columns, none if every row is new ─┬─▶ rows
                    └─ a decision a row, by Python workers (slice_filter.py), ──────┤
                       observed for the counts                                      └─▶ dropped
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit

from filtering.marks import HighwaterMarks
from filtering.replay_filter import PAIR_BYTES
from filtering.stream_metadata import pack_keys
from pushrep.env import SYSTEM_CLOCK
from spark_jobs.batch_marks import LogRange, MarksKey
from spark_jobs.filter_settings import BatchCounts, FilterRule, check_ttl, warn_of_chance_keys
from spark_jobs.runs import Stretch
from spark_jobs.slice_filter import COUNT_SHIFT, JUMPED, KIND_MASK, LATE, PASSES, decider
from spark_jobs.slice_scan import KEY, governed, in_log_order, keyed_frame, scan_slices
from spark_jobs.slices import BatchPlan, BatchVerdict, Slice, plan_batch
from spark_jobs.source_position import SourcePosition
from spark_jobs.spark_internals import decisions_by, is_local, is_observed

STRETCHES_MAX = 64
"""With more stretches than this the rows are decided one by one: each is a comparison for every row."""

_LOG = logging.getLogger(__name__)
_DECISION = "_pushrep_decision"


@dataclass(frozen=True, slots=True)
class FilteredFrame:
    """A batch frame's answer: `rows` pass, `dropped` do not; `marks` and `ranges` belong to all of its rows.

    Reading `rows` or `dropped` reads the frame again. Where rows are judged one by one, it fails with FrameChanged, as
    text in Spark's exception, if it does not give the same rows again; where whole runs pass or drop, nobody looks,
    but ReplayFilteredBatches does.
    """

    rows: DataFrame
    dropped: DataFrame
    marks: Mapping[MarksKey, HighwaterMarks]
    ranges: tuple[LogRange, ...]
    plan: BatchPlan
    observation: Observation

    def counts(self, batch_id: int = 0) -> BatchCounts:
        """Counts as the runs have decided; where rows are judged one by one, as the first action on `rows` saw them."""
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
    order first; without it a frame that a shuffle cut up, files that don't lie in log order, and rows that are part of
    the plan are recognised and sorted. Other rows that lie unordered in one piece may fail with LogOrderBroken.
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
    """The plan of a scanned frame: where rows are judged one by one and don't lie as that needs, it sorts."""
    plan = plan_batch(slices, before, rule=rule, now_ms=now_ms, sort=sort)
    if decided_by_runs(plan) or plan.must_sort:
        return plan
    if any(s.borrowed for s in slices):
        slices = scan_slices(keyed, rule, runs=False)
    sort = not _is_in_order(keyed, slices, rule)
    return plan_batch(slices, before, rule=rule, now_ms=now_ms, sort=sort)


def _is_in_order(keyed: DataFrame, slices: list[Slice], rule: FilterRule) -> bool:
    """Whether rows lie in the Spark partitions that the first pass saw, and as far as is known in log order.

    Rows that are part of the plan (values, a small Arrow table) don't: a first pass over them runs without tasks. And
    Spark packs files into tasks by their size, which only groups of runs tell, and a window's first pass.
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
    # Inside foreachBatch it reaches no progress of the query, only who asks for it.
    observed = decided.observe(
        observation,
        F.count(F.lit(1)).alias("rows"),
        F.sum(decision.bitwiseAND(F.lit(PASSES))).alias("passed"),
        F.sum(F.when(kind == LATE, count)).alias("late"),
        F.sum(F.when(kind == JUMPED, count)).alias("jumped"),
    )
    rows = observed.where(passes).drop(_DECISION)
    # An Observation is filled by the first action: who asks whether there are rows at all must not be that.
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

    Nor are they watched: their counts are known, and an Observation costs a tenth of reading them.
    """
    if not verdict.dropped:
        return keyed.drop(KEY), keyed.drop(KEY).where("false")
    # As text: made by functions, 64 stretches are a thousand calls into the JVM.
    inside = " or ".join(_inside(topic, stretch) for topic, stretch in verdict.dropped)
    # Places first: of most rows nothing else is looked at. Null, for a row without a key, meets a false.
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

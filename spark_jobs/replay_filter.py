"""Replay filtering in Spark: the foreachBatch form, and the same for a batch frame. The operator form: keyed_state.py.

    batch N ─▶ first pass (slice_scan.py) ─▶ plan (slices.py): starting marks of each slice, marks N
                                          │
            marks N-1 from the store ─────┘      rows ─▶ second pass (slice_filter.py) ─▶ handler(rows, N)
                                                                                     then marks N ─▶ store

The frame is read once for each pass; where the first proves that every row is new, the second is the bare frame.
Promise: every record once, under the prefix condition, for the life of the marks, for a handler whose second call
with one batch replaces what the first one left. Marks N are stored after the handler returned; killed before that,
Spark runs N again, which reads marks N-1 again and hands over the same rows.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit

from filtering.highwater import HighwaterMarks
from pushrep.seams import SYSTEM_CLOCK, Clock
from spark_jobs.batch_marks import ADOPTED, BatchMarks, LogRange, MarksKey
from spark_jobs.errors import SparkJobError
from spark_jobs.keyed_state import filter_replays
from spark_jobs.marks import MarksStore
from spark_jobs.slice_filter import COUNT_SHIFT, JUMPED, KIND_MASK, LATE, PASSES, FilterRule, LogOrderBroken, decider
from spark_jobs.slice_scan import KEY, keyed_frame, scan_slices
from spark_jobs.slices import BatchPlan, Slice, plan_batch, ranges_of

__all__ = ["BatchCounts", "FilteredFrame", "ReplayFilteredBatches", "filter_frame", "filter_replays"]

_LOG = logging.getLogger(__name__)
_DECISION = "_pushrep_decision"
_NAMED_IN_LOG = 10
_WITHOUT_RUNS = 16
"""After a batch whose pairs alternate too often for runs to help, so many are taken without looking for them."""

Handler = Callable[[DataFrame, int], Any]


class CanDropBatches(Protocol):
    """A handler that can take back what it wrote; sinks/table.py has one."""

    def drop_from(self, batch_id: int) -> None:
        """Remove whatever was written for batches >= batch_id."""
        ...


class NotInForeachBatch(SparkJobError):
    """There is no streaming query to keep marks for: use `filter_frame` on a batch frame."""

    def __init__(self) -> None:
        super().__init__("not inside foreachBatch: a batch frame is filtered by .filter_frame(df, marks)")


class MarksMissing(SparkJobError):
    """The store lacks the marks of the batch before; going on with empty ones would let every replay through."""

    def __init__(self, location: str, query_id: str, batch_id: int, kept: list[int]) -> None:
        have = f"it has batches {kept[0]} to {kept[-1]}" if kept else "it has none of this query"
        super().__init__(
            f"marks at {location} lack batch {batch_id} of query {query_id}: {have}. Give the store that belongs to "
            "this checkpoint, or begin a fresh checkpoint with adopt=(query, batch), --adopt QUERY:BATCH"
        )
        self.location, self.query_id, self.batch_id, self.kept = location, query_id, batch_id, kept


class MarksOfAnotherQuery(SparkJobError):
    """The store belongs to another query: adopt its marks, or give this query a store of its own."""

    def __init__(self, location: str, owner: str, last: int, query_id: str) -> None:
        super().__init__(
            f"marks at {location} belong to query {owner} (last batch {last}), this is query {query_id}. To go on "
            f"where that one ended pass adopt=({owner!r}, {last}), --adopt {owner}:{last}; otherwise choose another "
            "place for the marks"
        )
        self.location, self.owner, self.last, self.query_id = location, owner, last, query_id


class CheckpointWentBack(SparkJobError):
    """Spark planned a batch anew that had been stored with other records, and the handler can't take them back."""

    def __init__(self, batch_id: int) -> None:
        super().__init__(
            f"batch {batch_id} was stored with other log ranges: its checkpoint was rolled back. The handler must "
            "remove what it wrote for this batch and later ones: give it a method drop_from(batch_id)"
        )
        self.batch_id = batch_id


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """What became of a batch's rows. rows = kept + dropped + unkeyed; late rows are among the dropped.

    `unkeyed` passed untouched: no metadata, or a PID outside of `only_pids`. `jumped`: source offsets that marks
    passed over, 0 as long as nothing is missing. `kept`, `dropped`, `late` and `jumped` are None if the handler's
    first action did not read all rows, or there was none. `all_dropped`: (topic, pid, source partition) of pairs of
    which no row passed. `skipped`: the batch had been stored before, the handler was not called.
    """

    batch_id: int
    rows: int
    unkeyed: int
    pairs: int
    kept: int | None = None
    dropped: int | None = None
    late: int | None = None
    jumped: int | None = None
    all_dropped: tuple[tuple[str, int, int], ...] = ()
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class FilteredFrame:
    """A batch frame's answer: `rows` pass, `dropped` do not; `marks` and `ranges` belong to all of its rows.

    Reading `rows` or `dropped` reads the frame again and fails with FrameChanged, as text in Spark's exception, if
    it does not give the same rows again.
    """

    rows: DataFrame
    dropped: DataFrame
    marks: Mapping[MarksKey, HighwaterMarks]
    ranges: tuple[LogRange, ...]
    plan: BatchPlan
    observation: Observation

    def counts(self, batch_id: int = 0) -> BatchCounts:
        """Counts as the first action on `rows` saw them."""
        plan = self.plan
        known = BatchCounts(batch_id, plan.rows, plan.unkeyed, plan.pairs, all_dropped=plan.all_dropped)
        if not plan.rows:
            return replace(known, kept=0, dropped=0, late=0, jumped=0)
        # `get` waits for an action that may never come.
        if not cast("Any", self.observation)._jo.future().isCompleted():  # noqa: SLF001 - there is no public question
            return known
        seen = {name: value or 0 for name, value in self.observation.get.items()}
        if seen["rows"] != plan.rows:
            return known
        if plan.all_kept_jumped is not None:
            return replace(known, kept=plan.rows - plan.unkeyed, dropped=0, late=0, jumped=plan.all_kept_jumped)
        kept = seen["passed"] - plan.unkeyed
        dropped = plan.rows - seen["passed"]
        return replace(known, kept=kept, dropped=dropped, late=seen["late"], jumped=seen["jumped"])


def filter_frame(  # noqa: PLR0913 - the rule's settings, by name
    df: DataFrame,
    marks: Mapping[MarksKey, HighwaterMarks] | None = None,
    *,
    carrier: str = "key",
    window: int = 0,
    only_pids: Iterable[int] | None = None,
    ttl_s: float | None = None,
    sort: bool = False,
    now_ms: int | None = None,
) -> FilteredFrame:
    """Filter a batch frame with the columns topic, partition and offset, and key or headers: one job now, lazy rows.

    `marks` are those before the frame, `{MarksKey(topic): HighwaterMarks}`. `sort=True` brings the rows into log
    order first; without it a frame that a shuffle cut up is recognised and sorted, and one whose rows lie unordered
    in one piece fails with LogOrderBroken. Raises FrameUnusable, CarrierUnusable, PairSplit, BadFilterSetting.
    """
    pids = None if only_pids is None else frozenset(only_pids)
    rule = FilterRule(carrier=carrier, window=window, only_pids=pids, ttl_s=ttl_s)
    keyed = keyed_frame(df, rule)
    slices = scan_slices(keyed, rule)
    now = SYSTEM_CLOCK.wall_ms() if now_ms is None else now_ms
    return _filtered(keyed, plan_batch(slices, marks or {}, rule=rule, now_ms=now, sort=sort), rule)


def _filtered(keyed: DataFrame, plan: BatchPlan, rule: FilterRule) -> FilteredFrame:
    observation = Observation()
    if plan.all_kept_jumped is not None:
        frame = keyed.drop(KEY)
        rows = frame.observe(observation, F.count(F.lit(1)).alias("rows"))
        return FilteredFrame(rows, frame.where(F.lit(False)), plan.marks, plan.ranges, plan, observation)
    if plan.must_sort:
        # By columns only: adaptive execution may join such partitions but never cuts one.
        keyed = keyed.repartition("topic", "partition").sortWithinPartitions("topic", "partition", "offset")
    by_topic = len({start.topic for start in plan.starts}) > 1
    # Nondeterministic for Spark, so that it runs once a row, over all rows, with nothing pushed below it.
    decide = F.arrow_udf(  # type: ignore[attr-defined] # exported at run time only
        decider(plan.starts, rule, by_topic=by_topic), "bigint"
    ).asNondeterministic()
    columns = [KEY, "partition", "offset", *(["topic"] if by_topic else [])]
    decided = keyed.withColumn(_DECISION, decide(*columns)).drop(KEY)
    decision = F.col(_DECISION)
    passes = decision.bitwiseAND(F.lit(PASSES)) != 0
    count = F.shiftright(decision, COUNT_SHIFT)
    kind = decision.bitwiseAND(F.lit(KIND_MASK))
    observed = decided.observe(
        observation,
        F.count(F.lit(1)).alias("rows"),
        F.sum(decision.bitwiseAND(F.lit(PASSES))).alias("passed"),
        F.sum(F.when(kind == LATE, count)).alias("late"),
        F.sum(F.when(kind == JUMPED, count)).alias("jumped"),
    )
    return FilteredFrame(
        observed.where(passes).drop(_DECISION),
        decided.where(~passes).drop(_DECISION),
        plan.marks,
        plan.ranges,
        plan,
        observation,
    )


class ReplayFilteredBatches:
    """For `foreachBatch`: calls `handler(rows, batch_id)` with the rows of each batch that were not seen before.

    `marks` keeps the marks between batches (spark_jobs.marks). `handler` must replace, when called again with a
    batch, what its first call left; its method `drop_from(batch_id)`, if it has one, is called when the checkpoint
    was rolled back. `adopt=(query id, batch)` starts a fresh checkpoint from another query's marks as of that batch.
    `on_dropped(rows, batch_id)` gets the dropped rows after the handler returned, at least once. `on_counts(counts)`
    gets each batch's counts, which `.last_counts` keeps. `sort=True` brings rows into log order first, for a frame
    that was shuffled before; a shuffled batch is otherwise recognised, or found out and run again sorted.
    The rule: `carrier` "key" or "header", `window`, `only_pids`, `ttl_s` as in filtering.ReplayFilter.
    Raises CarrierUnusable, BadFilterSetting; inside a batch also MarksMissing, MarksOfAnotherQuery, PairSplit.
    """

    def __init__(  # noqa: PLR0913 - the rule's four settings and the batch's, all but two optional and by name
        self,
        handler: Handler,
        marks: MarksStore,
        *,
        carrier: str = "key",
        window: int = 0,
        only_pids: Iterable[int] | None = None,
        ttl_s: float | None = None,
        adopt: tuple[str, int] | None = None,
        on_dropped: Handler | None = None,
        on_counts: Callable[[BatchCounts], Any] | None = None,
        sort: bool = False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        pids = None if only_pids is None else frozenset(only_pids)
        self._rule = FilterRule(carrier=carrier, window=window, only_pids=pids, ttl_s=ttl_s)
        self._handler, self._store, self._adopt = handler, marks, adopt
        self._on_dropped, self._on_counts = on_dropped, on_counts
        self._sort, self._clock = sort, clock
        self._without_runs = 0  # batches still to come for which nobody looks for runs
        self._unkeyed_told = False
        self.last_counts: BatchCounts | None = None

    def __call__(self, df: DataFrame, batch_id: int) -> None:
        """One batch, as foreachBatch calls it."""
        query_id = query_id_of(df)
        if query_id is None:
            raise NotInForeachBatch
        before = self._marks_before(query_id, batch_id)
        keyed = keyed_frame(df, self._rule)
        slices = scan_slices(keyed, self._rule, runs=not self._without_runs)
        self._without_runs = self._without_runs - 1 if self._without_runs else _has_no_runs(slices) * _WITHOUT_RUNS
        if self._is_stored(query_id, batch_id, ranges_of(slices)):
            _LOG.info("batch %d is in the store with these very log ranges: not run again", batch_id)
            rows, unkeyed = sum(s.rows for s in slices), sum(s.unkeyed for s in slices)
            self._tell(BatchCounts(batch_id, rows, unkeyed, 0, skipped=True))
            return
        filtered = self._handle(keyed, slices, before, batch_id)
        if self._on_dropped is not None:
            self._on_dropped(filtered.dropped, batch_id)
        keep = int(df.sparkSession.conf.get("spark.sql.streaming.minBatchesToRetain") or 1) + 1
        self._store.write(BatchMarks(query_id, batch_id, filtered.ranges, filtered.marks), keep=keep)
        self._tell(filtered.counts(batch_id))

    def filter_frame(self, df: DataFrame, marks: Mapping[MarksKey, HighwaterMarks] | None = None) -> FilteredFrame:
        """A batch frame by this rule, for backfills: no store, no handler; see the function `filter_frame`."""
        rule = self._rule
        return filter_frame(
            df,
            marks,
            carrier=rule.carrier,
            window=rule.window,
            only_pids=rule.only_pids,
            ttl_s=rule.ttl_s,
            sort=self._sort,
            now_ms=self._clock.wall_ms(),
        )

    def _handle(
        self, keyed: DataFrame, slices: list[Slice], before: Mapping[MarksKey, HighwaterMarks], batch_id: int
    ) -> FilteredFrame:
        now_ms = self._clock.wall_ms()
        while True:
            plan = plan_batch(slices, before, rule=self._rule, now_ms=now_ms, sort=self._sort)
            filtered = _filtered(keyed, plan, self._rule)
            try:
                self._handler(filtered.rows, batch_id)
            except Exception as error:
                # From a worker it comes as text. A handler stands being called again: Spark itself would do it.
                if plan.must_sort or LogOrderBroken.__name__ not in str(error):
                    raise
                _LOG.warning("batch %d is not in log order: from now on rows are sorted first", batch_id)
                self._sort = True
            else:
                return filtered

    def _marks_before(self, query_id: str, batch_id: int) -> Mapping[MarksKey, HighwaterMarks]:
        """The marks as of the batch before this one."""
        store = self._store
        owner = store.owner()
        if owner is not None and owner != query_id:
            self._take_over(owner, query_id, batch_id)
        stored = store.read(query_id, batch_id - 1)
        if stored is not None:
            return stored.marks
        if batch_id > 0:
            raise MarksMissing(store.location, query_id, batch_id - 1, store.batches(query_id))
        if owner is None and self._adopt is not None:
            raise MarksMissing(store.location, *self._adopt, store.batches(self._adopt[0]))
        return {}

    def _take_over(self, owner: str, query_id: str, batch_id: int) -> None:
        store = self._store
        if self._adopt is None or batch_id != 0:
            raise MarksOfAnotherQuery(store.location, owner, store.batches(owner)[-1], query_id)
        adopted = store.read(*self._adopt)
        if adopted is None:
            raise MarksMissing(store.location, *self._adopt, store.batches(self._adopt[0]))
        store.write(BatchMarks(query_id, ADOPTED, adopted.ranges, adopted.marks), keep=1)

    def _is_stored(self, query_id: str, batch_id: int, ranges: tuple[LogRange, ...]) -> bool:
        """Whether this very batch is done. If one of this number is, with other records, everything from it on goes."""
        store = self._store
        stored = store.read(query_id, batch_id)
        if stored is not None and stored.ranges == ranges:
            return True
        if any(kept >= batch_id for kept in store.batches(query_id)):
            drop_from = getattr(self._handler, "drop_from", None)
            if drop_from is None:
                raise CheckpointWentBack(batch_id)
            _LOG.warning("the checkpoint was rolled back: batches from %d on are dropped and run anew", batch_id)
            # The sink first: killed in between, the marks still say that there is something to drop.
            drop_from(batch_id)
            store.drop_from(query_id, batch_id)
        return False

    def _tell(self, counts: BatchCounts) -> None:
        self.last_counts = counts
        _LOG.info("%s", counts)
        if counts.all_dropped:
            _LOG.warning(
                "batch %d: every row of %d (topic, pid, source partition) was dropped: %s%s; a replayed stretch looks "
                "like this, and so does a re-used PID or a source that began again at offset 0",
                counts.batch_id,
                len(counts.all_dropped),
                list(counts.all_dropped[:_NAMED_IN_LOG]),
                " and more" if len(counts.all_dropped) > _NAMED_IN_LOG else "",
            )
        if counts.unkeyed == counts.rows > 0 and self._rule.only_pids is None and not self._unkeyed_told:
            self._unkeyed_told = True
            _LOG.warning(
                "batch %d: none of its %d records has stream metadata as carrier=%r: all of them pass, replayed or not",
                counts.batch_id,
                counts.rows,
                self._rule.carrier,
            )
        if self._on_counts is not None:
            self._on_counts(counts)


def _has_no_runs(slices: list[Slice]) -> bool:
    return any(s.runs is None for s in slices)


def query_id_of(df: DataFrame) -> str | None:
    """The id of the query in whose foreachBatch we are, None elsewhere; it lives as long as its checkpoint."""
    return df.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")

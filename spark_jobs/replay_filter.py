"""The filter in foreachBatch. Of a batch frame: frame.py; as an operator: keyed_state.py.

    batch N ─▶ first pass (frame.py) ─▶ verdict (decide.py): which rows drop, marks N
                                  │
          marks N-1 from the store┘        rows (frame.py) ─▶ handler(rows, N), then marks N ─▶ store

The first pass reads the columns that decide, the handler those that it asks for; of files neither reads another, where
the plan allows it (spark_internals.py). Python workers see rows only where a batch's runs decide nothing.
Promise: every record once, under the prefix condition, for the life of the marks, for a handler whose second call with
one batch replaces what the first one left. Marks N are stored after the handler returned; killed before that, Spark
runs N again, which reads marks N-1 again and hands over the same rows.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

from pyspark.sql import DataFrame

from filtering.marks import HighwaterMarks
from filtering.replay_filter import check_ttl
from pushrep.env import SYSTEM_CLOCK, Clock
from spark_jobs.batch_marks import BatchMarks, LogRange, MarksKey, RowCounts
from spark_jobs.columns import SourcePosition
from spark_jobs.decide import PartitionRows, ranges_of
from spark_jobs.errors import (
    CheckpointWentBack,
    MarksMissing,
    MarksOfAnotherQuery,
    NotInForeachBatch,
    RolledBackOverReplaced,
)
from spark_jobs.filter_settings import (
    BatchCounts,
    FilterRule,
    warn_of,
    warn_of_no_metadata,
)
from spark_jobs.frame import (
    FilteredFrame,
    by_rows,
    by_runs,
    cores_of,
    decided_frame,
    filter_frame,
    keyed_frame,
)
from spark_jobs.keyed_state import filter_replays
from spark_jobs.marks import MarksStore
from spark_jobs.replacing import Replacing, ReplacingHandler
from spark_jobs.spark_internals import Readings, query_id_of, setting

__all__ = [
    "BatchCounts",
    "CheckpointWentBack",
    "FilteredFrame",
    "MarksMissing",
    "MarksOfAnotherQuery",
    "NotInForeachBatch",
    "Replacing",
    "ReplayFilteredBatches",
    "RolledBackOverReplaced",
    "filter_frame",
    "filter_replays",
]

_LOG = logging.getLogger(__name__)
_SHUFFLE = "spark.sql.shuffle.partitions"
_WITHOUT_RUNS = 16
"""After a batch that was searched for runs in vain 1 batch is filtered without, then 2, 4, 8, at last this many."""

Handler = Callable[[DataFrame, int], Any]


class ReplayFilteredBatches:
    """For `foreachBatch`: calls `handler(rows, batch_id)` with the rows of each batch that were not seen before.

    `marks` keeps the marks between batches (spark_jobs.marks). `handler` must replace, when called again with a
    batch, what its first call left. Of these two methods the form calls what the handler has: for each batch
    `expect(query_id, batch_id, ranges)` first, with the log ranges of all its rows; `drop_from(batch_id)` when the
    checkpoint was rolled back. A store of marks with a method `expect` is told, too.
    `adopt=(query id, batch)` starts a fresh checkpoint from another query's marks as of that batch. The numbers of
    batches continue there: handler, marks and counts see batch + 1 where Spark's own count begins again at 0.
    `on_dropped(rows, batch_id)` gets the dropped rows after the handler returned, at least once. `on_counts(counts)`
    gets each batch's counts, which `.last_counts` keeps. The rows of a batch may lie in any order: the log's counts.
    `replacing` (replacing.py): after a startpoint that resets marks, rows that are read again replace those in the
    handler's table, and marks are as they were there; without it marks begin empty, and the rows come a second time.
    The rule: `carrier` "key" or "header", or a `SourcePosition` for records without metadata; `window`, `only_pids`,
    `ttl_s` as in filtering.ReplayFilter; `ttl_s` needs `retention_ms`, the topic's retention.ms (-1: for ever), and
    must not be shorter; 0 takes any.
    Raises CarrierUnusable, BadFilterSetting; inside a batch also MarksMissing, MarksOfAnotherQuery,
    PositionUnfit, PairSplit, EpochsMixed, LogRowTwice, CantReplace, RolledBackOverReplaced, and FrameChanged if the
    handler read fewer rows than the first pass found, because they are gone.
    """

    def __init__(  # noqa: PLR0913 - the rule's four settings and the batch's, all but two optional and by name
        self,
        handler: Handler,
        marks: MarksStore,
        *,
        carrier: str | SourcePosition = "key",
        window: int = 0,
        only_pids: Iterable[int] | None = None,
        ttl_s: float | None = None,
        retention_ms: int | None = None,
        adopt: tuple[str, int] | None = None,
        on_dropped: Handler | None = None,
        on_counts: Callable[[BatchCounts], Any] | None = None,
        replacing: Replacing | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        pids = None if only_pids is None else frozenset(only_pids)
        self._rule = FilterRule(carrier=carrier, window=window, only_pids=pids, ttl_s=ttl_s)
        check_ttl(ttl_s, retention_ms)
        self._handler, self._store, self._adopt = handler, marks, adopt
        self._on_dropped, self._on_counts = on_dropped, on_counts
        self._replacing, self._clock = replacing, clock
        self._without_runs = self._pause = 0  # batches before runs are looked for again: still to come, and in all
        self._has_warned_of_no_metadata = False
        self.last_counts: BatchCounts | None = None

    def __call__(self, df: DataFrame, batch_id: int) -> None:
        """One batch, as foreachBatch calls it."""
        query_id = query_id_of(df.sparkSession)
        if query_id is None:
            raise NotInForeachBatch
        stored = self._batch_before(query_id, batch_id)
        batch_id = stored.batch_id + 1  # Spark's own, unless the query continues another one's
        before = stored.marks
        readings = Readings(df)
        keyed = keyed_frame(readings.narrow, self._rule)
        found = self._first_pass(keyed, before)
        ranges = ranges_of(found)
        self._expect(query_id, batch_id, ranges)
        if self._is_stored(query_id, batch_id, ranges):
            _LOG.info("batch %d is in the store with these very log ranges: not run again", batch_id)
            rows, unkeyed = sum(one.rows for one in found), sum(one.unkeyed for one in found)
            self._report(BatchCounts(batch_id, rows, unkeyed, 0, skipped=True))
            return
        keep = int(df.sparkSession.conf.get("spark.sql.streaming.minBatchesToRetain") or 1) + 1
        handler = self._handler
        replaced: tuple[LogRange, ...] = ()
        if self._replacing is not None and any(one.marks_epoch for one in found):
            reread = self._replacing.of_batch(df.sparkSession, found, self._rule, batch_id)
            marks = reread.marks_before(before)
            if marks is not before and not reread.table.commits_marks:
                self._store.write(replace(stored, marks=marks), keep=keep)
            if marks is not before and any(one.verdict is not None for one in found):
                found = by_rows(keyed, marks, self._rule)  # these rows were judged by the other marks
            before = marks
            replaced, handler = reread.ranges(), reread.handler(cast("ReplacingHandler", handler))
        verdict = decided_frame(keyed, found, before, rule=self._rule, now_ms=self._clock.wall_ms())
        if verdict.by_runs:
            self._without_runs = self._pause = 0
        counts = replace(verdict.counts, batch_id=batch_id)
        warn_of(_LOG, f"batch {batch_id}", counts)
        filtered = FilteredFrame(verdict, readings.whole, keyed, found, self._rule)
        if readings.fewer_than(counts.rows, lambda: handler(filtered.rows, batch_id)):
            filtered.check_unchanged()  # marks N are of all rows, so all of them must still be there
        if self._on_dropped is not None:
            self._on_dropped(filtered.dropped, batch_id)
        kept = RowCounts(
            counts.rows,
            counts.kept,
            counts.dropped,
            counts.unkeyed,
            counts.late,
            counts.jumped if self._rule.counts_gaps else None,
        )
        after = BatchMarks(query_id, batch_id, ranges, verdict.marks, replaced, stored.first, kept)
        self._store.write(after, keep=keep)
        self._report(counts)

    def _first_pass(self, keyed: DataFrame, before: Mapping[MarksKey, HighwaterMarks]) -> list[PartitionRows]:
        """The first pass: by runs, unless those of batches shortly before decided nothing."""
        found = None
        if self._without_runs:
            self._without_runs -= 1
        else:
            spark = keyed.sparkSession  # the query's own session, where Spark's default of 200 tasks may be changed
            with setting(spark, _SHUFFLE, min(cores_of(spark), int(spark.conf.get(_SHUFFLE) or 200))):
                found = by_runs(keyed, self._rule)
            # The next batches go without; `__call__` sets both to 0 if the runs decide.
            self._without_runs = self._pause = min(2 * self._pause or 1, _WITHOUT_RUNS)
        return by_rows(keyed, before, self._rule) if found is None else found

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
            retention_ms=0,  # was checked by the constructor
            now_ms=self._clock.wall_ms(),
        )

    def _batch_before(self, query_id: str, batch_id: int) -> BatchMarks:
        """The stored batch before the one that Spark numbers `batch_id`; the next one's number is one above its own."""
        store = self._store
        owner = store.owner()
        if owner is not None and owner != query_id:
            return self._taken_over(owner, query_id, batch_id)
        kept = store.batches(query_id)
        newest = store.read(query_id, kept[-1]) if kept else None
        before = batch_id - 1 + (0 if newest is None else newest.first)
        if before < 0:
            if owner is None and self._adopt is not None:
                raise MarksMissing(store.location, *self._adopt, store.batches(self._adopt[0]))
            return BatchMarks(query_id, before)
        stored = newest if newest is not None and newest.batch_id == before else store.read(query_id, before)
        if stored is None:
            raise MarksMissing(store.location, query_id, before, kept)
        return stored

    def _taken_over(self, owner: str, query_id: str, batch_id: int) -> BatchMarks:
        """The marks that the query begins with, stored as the batch before its first one."""
        store = self._store
        if self._adopt is None or batch_id != 0:
            raise MarksOfAnotherQuery(store.location, owner, store.batches(owner)[-1], query_id)
        adopted = store.read(*self._adopt)
        if adopted is None:
            raise MarksMissing(store.location, *self._adopt, store.batches(self._adopt[0]))
        begins = BatchMarks(query_id, adopted.batch_id, adopted.ranges, adopted.marks, first=adopted.batch_id + 1)
        store.write(begins, keep=1)
        return begins

    def _expect(self, query_id: str, batch_id: int, ranges: tuple[LogRange, ...]) -> None:
        """Tell handler and store what comes: a sink's threads have no property that says which query runs."""
        for sink in (self._handler, self._store):
            if (expect := getattr(sink, "expect", None)) is not None:
                expect(query_id, batch_id, ranges)

    def _is_stored(self, query_id: str, batch_id: int, ranges: tuple[LogRange, ...]) -> bool:
        """Whether this batch is stored with these ranges. Stored with others, it and all later ones are dropped."""
        store = self._store
        stored = store.read(query_id, batch_id)
        if stored is not None and stored.ranges == ranges:
            return True
        if behind := [kept for kept in store.batches(query_id) if kept >= batch_id]:
            handler: object = self._handler
            drop_from = getattr(handler, "drop_from", None)
            for kept in behind:
                over = store.read(query_id, kept)
                if drop_from is None and over is not None and over.ranges:
                    raise CheckpointWentBack(batch_id)
                if over is not None and over.replaced:
                    raise RolledBackOverReplaced(batch_id, kept, over.replaced)
            _LOG.warning("the checkpoint was rolled back: batches from %d on are dropped and run anew", batch_id)
            # The sink first: killed in between, the marks still show that there is something to drop.
            if drop_from is not None and handler is not store:  # which drops rows and marks as one
                drop_from(batch_id)
            store.drop_from(query_id, batch_id)
        return False

    def _report(self, counts: BatchCounts) -> None:
        self.last_counts = counts
        _LOG.info("%s", counts)
        if counts.unkeyed == counts.rows > 0 and self._rule.only_pids is None and not self._has_warned_of_no_metadata:
            self._has_warned_of_no_metadata = True
            warn_of_no_metadata(_LOG, counts, self._rule.carrier)
        if self._on_counts is not None:
            self._on_counts(counts)

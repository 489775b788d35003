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
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from filtering.errors import BadFilterSetting, WrongCarrier
from pushrep.env import SYSTEM_CLOCK, Clock
from spark_jobs.batch_marks import BatchMarks, LogRange, MarksStore, RowCounts
from spark_jobs.columns import FilterRule, SourcePosition
from spark_jobs.decide import BatchCounts, ranges_of, warn_of
from spark_jobs.errors import (
    ROWS_WOULD_BE_LOST,
    CheckpointWentBack,
    FrameUnusable,
    MarksMissing,
    MarksOfAnotherQuery,
    TableWentBack,
)
from spark_jobs.frame import CarrierChecks, FilteredFrame, FirstPass, by_rows, decided_frame, keyed_frame
from spark_jobs.replacing import Replacing
from spark_jobs.spark_internals import Readings

_LOG = logging.getLogger(__name__)

Handler = Callable[[DataFrame, int], Any]

_USED: dict[int, list[str]] = {}
"""The stores, by identity, of which a batch runs in this process, and its query."""


@contextmanager
def _in_use(store: MarksStore, query_id: str) -> Iterator[None]:
    """The store is this batch's alone. Raises MarksOfAnotherQuery while another batch uses the same object."""
    mine = [query_id]
    if (theirs := _USED.setdefault(id(store), mine)) is not mine:
        raise MarksOfAnotherQuery(
            f"the store of marks at {store.location} is in use: a batch of query {theirs[0]} runs with this very "
            f"object, this is query {query_id}. Give each query marks and a table of its own"
        )
    try:
        yield
    finally:
        del _USED[id(store)]


class ReplayFilteredBatches:
    """For `foreachBatch`: calls `handler(rows, batch_id)` with the rows of each batch that were not seen before.

    `marks` keeps the marks between batches (spark_jobs.batch_marks), for one query at a time. `handler` must replace,
    when called again with a batch, what its first call left. Of these methods the form calls what the handler has:
    for each batch `expect(query_id, batch_id, ranges)` first, with the log ranges of all its rows;
    `last_batch(session)`, the newest batch that its table holds, below 0 for none, None if it can't say, where a run
    begins; `drop_from(batch_id)` when the checkpoint went back. A store of marks with a method `expect` is told, too.
    `adopt=(query id, batch)` starts a fresh checkpoint from another query's marks as of that batch. The numbers of
    batches continue there: handler, marks and counts see batch + 1 where Spark's own count begins again at 0.
    `on_dropped(rows, batch_id)` gets the dropped rows after the handler returned, at least once. `on_counts(counts)`
    gets each batch's counts, which `.last_counts` keeps. The rows of a batch may lie in any order: the log's counts.
    `replacing` (replacing.py): after a startpoint that resets marks, rows that are read again replace those in the
    handler's table, and marks are as they were there; without it marks begin empty, and the rows come a second time.
    The rule: `carrier` "key" or "header", or a `SourcePosition` for records without metadata; `window`, `only_pids`,
    `ttl_s` as in filtering.ReplayFilter; `ttl_s` needs `retention_ms`, the topic's retention.ms (-1: for ever), and
    must not be shorter; 0: it is not compared.
    Raises BadFilterSetting; inside a batch also MarksMissing, MarksOfAnotherQuery, FrameUnusable, WrongCarrier,
    PairSplit, CantReplace, CheckpointWentBack, TableWentBack, and FrameChanged if the handler read fewer rows than the
    first pass found, because they are gone.
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
        if not callable(handler):
            raise BadFilterSetting("handler", handler, "called with (rows, batch_id): a function, or a table of ours")
        if not hasattr(marks, "batches"):
            raise BadFilterSetting("marks", marks, "a store: FileMarks(path), or SqlTable(url, table)")
        _check_committed(handler, marks)
        self._rule = FilterRule(
            carrier=carrier, window=window, only_pids=only_pids, ttl_s=ttl_s, retention_ms=retention_ms
        )
        self._handler, self._store, self._adopt = handler, marks, adopt
        self._on_dropped, self._on_counts = on_dropped, on_counts
        self._replacing, self._clock = replacing, clock
        self._first_pass = FirstPass(self._rule)
        self._carrier_checks = CarrierChecks(self._rule)
        self._done: tuple[str, int] | None = None  # the query and number of the batch whose marks were stored last
        self.last_counts: BatchCounts | None = None

    def __call__(self, df: DataFrame, batch_id: int) -> None:
        """One batch, as foreachBatch calls it."""
        readings = Readings(df)
        query_id = readings.query_id
        if query_id is None:
            raise FrameUnusable("not inside foreachBatch: a batch frame is filtered by filter_frame(df, marks)")
        with _in_use(self._store, query_id):
            self._batch(df, readings, query_id, batch_id)

    def _batch(self, df: DataFrame, readings: Readings, query_id: str, batch_id: int) -> None:
        stored, kept = self._batch_before(query_id, batch_id)
        batch_id = stored.batch_id + 1  # Spark's own, unless the query continues another one's
        before = stored.marks
        keyed = keyed_frame(readings.narrow, self._rule)
        found = self._first_pass.partition_rows(keyed, before)
        ranges = ranges_of(found)
        self._expect(query_id, batch_id, ranges)
        held = None if self._done == (query_id, stored.batch_id) else self._last_batch(df.sparkSession, stored)
        if self._is_stored(query_id, batch_id, ranges, [number for number in kept if number >= batch_id], held):
            self._done = query_id, batch_id
            _LOG.info("batch %d is in the store with these very log ranges: not run again", batch_id)
            rows, unkeyed = sum(one.rows for one in found), sum(one.unkeyed for one in found)
            self._report(BatchCounts(batch_id, rows, unkeyed, 0, skipped=True))
            return
        self._carrier_checks.look(keyed, found, before)
        keep = int(df.sparkSession.conf.get("spark.sql.streaming.minBatchesToRetain") or 1) + 1
        handler = self._handler
        replaced: tuple[LogRange, ...] = ()
        if self._replacing is not None and any(one.marks_epoch for one in found):
            reread = self._replacing.of_batch(df.sparkSession, found, self._rule, batch_id)
            replaced, handler = reread.ranges(), reread.handler(handler)
            marks = reread.marks_before(before)
            if marks is not before and not reread.table.commits_marks:
                self._store.write(replace(stored, marks=marks), keep=keep)
            if marks is not before and any(one.verdict is not None for one in found):
                found = by_rows(keyed, marks, self._rule)  # these rows were judged by the other marks
            before = marks
        verdict = decided_frame(keyed, found, before, rule=self._rule, now_ms=self._clock.wall_ms())
        if verdict.by_runs:
            self._first_pass.runs_decided()
        counts = replace(verdict.counts, batch_id=batch_id)
        warn_of(_LOG, f"batch {batch_id}", counts)
        filtered = FilteredFrame(verdict, readings.whole, keyed, found, self._rule)
        if readings.fewer_than(counts.rows, lambda: handler(filtered.rows, batch_id)):
            filtered.check_unchanged()  # marks N are of all rows, so all of them must still be there
        if self._on_dropped is not None:
            self._on_dropped(filtered.dropped, batch_id)
        jumped = counts.jumped if self._rule.counts_gaps else None
        row_counts = RowCounts(counts.rows, counts.kept, counts.dropped, counts.unkeyed, counts.late, jumped)
        after = BatchMarks(
            query_id, batch_id, ranges, verdict.marks, replaced, stored.first, row_counts, self._rule.carrier_name
        )
        self._store.write(after, keep=keep)
        self._done = query_id, batch_id
        self._report(counts)

    def _batch_before(self, query_id: str, batch_id: int) -> tuple[BatchMarks, list[int]]:
        """The stored batch before the one that Spark numbers `batch_id`; the next one's number is one above its own.

        Also the numbers of all batches that are stored of the query.
        """
        store = self._store
        adopted = adopted_marks(store, query_id, self._adopt if batch_id == 0 else None)
        if adopted is not None:
            begins = BatchMarks(query_id, adopted.batch_id, adopted.ranges, adopted.marks, first=adopted.batch_id + 1)
            store.write(begins, keep=1)
            return begins, []
        kept = store.batches(query_id)
        newest = store.read(query_id, kept[-1]) if kept else None
        before = batch_id - 1 + (0 if newest is None else newest.first)
        if before < 0:
            return BatchMarks(query_id, before), kept
        stored = newest if newest is not None and newest.batch_id == before else store.read(query_id, before)
        if stored is None:
            raise _missing(store, query_id, before)
        self._check_carrier(stored)
        return stored, kept

    def _check_carrier(self, stored: BatchMarks) -> None:
        """Marks without a pair are any carrier's. Raises WrongCarrier."""
        own, made_by = self._rule.carrier_name, stored.carrier
        if made_by not in {None, own} and any(map(len, stored.marks.values())):
            place, query = self._store.location, stored.query_id
            why = (
                f"in the marks at {place}: they are of metadata that were there. If that was wrong, and it is {own!r} "
                f"from now on, end the query and empty them: pushrep marks import {shlex.quote(place)} --empty "
                f"--replace. Those of a database stay: begin a fresh checkpoint with --adopt {query}:{stored.batch_id}"
            )
            raise WrongCarrier(own, str(made_by), why)

    def _expect(self, query_id: str, batch_id: int, ranges: tuple[LogRange, ...]) -> None:
        """Tell handler and store what comes: a sink's threads have no property that says which query runs."""
        for sink in (self._handler, self._store):
            if (expect := getattr(sink, "expect", None)) is not None:
                expect(query_id, batch_id, ranges)

    def _last_batch(self, session: SparkSession, stored: BatchMarks) -> int | None:
        """The newest batch in the handler's table, None if it can't say. Raises TableWentBack."""
        ask = getattr(self._handler, "last_batch", None)
        held: int | None = None if ask is None else ask(session)
        is_new = stored.is_adopted and held is not None and held < 0
        if held is not None and held < stored.batch_id and not is_new:
            raise TableWentBack(
                f"the table ends with batch {held} of query {stored.query_id}, and its checkpoint and the marks at "
                f"{self._store.location} go on behind batch {stored.batch_id}: an older copy of it was restored, or "
                "batches were removed. Put them back; or begin a fresh checkpoint with "
                f"{_adopting(stored.query_id, held)}, which reads their records again"
            )
        return held

    def _is_stored(
        self, query_id: str, batch_id: int, ranges: tuple[LogRange, ...], behind: list[int], held: int | None
    ) -> bool:
        """Whether this batch is stored with these ranges, as the newest one, and the table does not say that it lacks
        it. If the checkpoint went back, this batch and all later ones are dropped.

        behind: the numbers of the stored batches from this one on. held: the newest batch in the table, or None.
        """
        store = self._store
        if behind == [batch_id] and (held is None or held <= batch_id):
            stored = store.read(query_id, batch_id)
            if stored is not None and stored.ranges == ranges:
                return held in {None, batch_id}
        if not behind and (held is None or held <= batch_id):
            return False
        handler: object = self._handler
        drop_from = getattr(handler, "drop_from", None)
        commits_marks = getattr(store, "commits_marks", False)  # then the store drops rows and marks as one
        newest = max([*behind, held or 0])
        for number in range(batch_id, newest + 1):
            over = store.read(query_id, number)
            if drop_from is None and not commits_marks and (over is None or over.ranges):
                raise _went_back(store, query_id, batch_id, newest)
            if over is not None and over.replaced:
                why = f"batch {number} behind it replaced rows, those of {over.replaced[0]} first: {ROWS_WOULD_BE_LOST}"
                raise CheckpointWentBack(f"the checkpoint went back to batch {batch_id}, and {why}")
        _LOG.warning("the checkpoint went back: batches from %d to %d are dropped and run anew", batch_id, newest)
        # The sink first: killed in between, the marks still show that there is something to drop.
        if drop_from is not None and handler is not store:
            drop_from(batch_id)
        store.drop_from(query_id, batch_id)
        return False

    def _report(self, counts: BatchCounts) -> None:
        self.last_counts = counts
        _LOG.info("%s", counts)
        if self._on_counts is not None:
            self._on_counts(counts)


def _check_committed(handler: object, store: object) -> None:
    """Raise BadFilterSetting for a database's table whose rows would never be committed."""
    committed = [one for one in getattr(handler, "sinks", (handler,)) if getattr(one, "commits_marks", False)]
    if committed not in ([], [store]):
        raise BadFilterSetting(
            "marks",
            store,
            "the very SqlTable of the handler, of which there may be one: its rows are there once it has their marks",
        )


def adopted_marks(store: MarksStore, query_id: str | None, adopt: tuple[str, int] | None) -> BatchMarks | None:
    """The marks of another query with which this one begins; None if it begins without, or has marks of its own.

    query_id: None for a query that is not there yet. Raises MarksOfAnotherQuery, MarksMissing.
    """
    owner = store.owner()
    if owner is not None and owner == query_id:
        return None
    if owner is not None and adopt is None:
        last = store.batches(owner)[-1]
        raise MarksOfAnotherQuery(
            f"marks at {store.location} belong to query {owner} (last batch {last}), this is query "
            f"{query_id or '<new>'}. If it is the same, give it its checkpoint again: without the option "
            "checkpointLocation each start is another query. To go on where that one ended begin a fresh checkpoint "
            f"with {_adopting(owner, last)}; otherwise choose another place for the marks"
        )
    if adopt is None:
        return None
    found = store.read(*adopt)
    if found is None:
        raise _missing(store, *adopt)
    return found


def _went_back(store: MarksStore, query_id: str, batch_id: int, newest: int) -> CheckpointWentBack:
    return CheckpointWentBack(
        f"Spark runs batch {batch_id} of query {query_id}, and marks at {store.location} go up to batch {newest}: the "
        "checkpoint went back, and the handler can't take its rows back: it has no method drop_from(batch_id). If its "
        f"table holds the batches from {batch_id} on, begin a fresh checkpoint with {_adopting(query_id, newest)}; if "
        f"it went back with the checkpoint, with {_adopting(query_id, batch_id - 1)}"
    )


def _adopting(query_id: str, batch_id: int) -> str:
    """What a fresh checkpoint begins with, to go on behind this batch."""
    adopted = f"adopt=({query_id!r}, {batch_id}), --adopt {query_id}:{batch_id}"
    return "an empty place for the marks" if batch_id < 0 else adopted


def _missing(store: MarksStore, query_id: str, batch_id: int) -> MarksMissing:
    kept = store.batches(query_id)
    have = f"it has batches {kept[0]} to {kept[-1]}" if kept else "it has none of this query"
    return MarksMissing(
        f"marks at {store.location} lack batch {batch_id} of query {query_id}: {have}. Give the store that belongs to "
        "this checkpoint, or begin a fresh checkpoint with adopt=(query, batch), --adopt QUERY:BATCH"
    )

"""One handler for several sinks: each gets the rows of each batch, and is told whose they are.

    ReplayFilteredBatches ─▶ AllOf ─┬▶ sink     expect, drop_from, replace and last_batch of each sink that has them
                                    └▶ sink

If one fails the batch fails, and Spark runs it again: each sink replaces what its first call left. A database's table
among them is the store of the marks, too, and so commits its rows last.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from filtering.errors import BadFilterSetting
from spark_jobs.batch_marks import LogRange
from spark_jobs.errors import CantReplace
from spark_jobs.spark_internals import in_thread, is_persisted

Sink = Callable[[DataFrame, int], Any]


class AllOf:
    """The handler that `all_of` makes."""

    def __init__(self, sinks: Sequence[Sink], *, in_threads: bool) -> None:
        if not sinks or not all(map(callable, sinks)):
            raise BadFilterSetting("sinks", sinks, "one sink or more, each called with (rows, batch_id)")
        self.sinks, self._in_threads = tuple(sinks), in_threads
        self._batch_id = 0
        # Only if nothing stays: a sink without it keeps the rows of a batch that is planned anew.
        is_whole = all(hasattr(sink, "drop_from") for sink in sinks)
        self.drop_from = self._drop_from if is_whole else None

    def __call__(self, rows: DataFrame, batch_id: int) -> None:
        """Write the batch into each sink."""
        self._write(rows, [partial(_called, sink, batch_id) for sink in self.sinks])

    def replace(self, rows: DataFrame, batch_id: int, ranges: Sequence[LogRange]) -> None:
        """As the call; the rows of other batches in these log ranges go. Raises CantReplace before any sink writes."""
        calls = [getattr(sink, "replace", None) for sink in self.sinks]
        if None in calls:
            raise CantReplace(*ranges[0][:3], f"{self.sinks[calls.index(None)]!r} has no method replace")
        self._write(rows, [partial(call, batch_id=batch_id, ranges=ranges) for call in calls if call is not None])

    def expect(self, query_id: str, batch_id: int, ranges: tuple[LogRange, ...]) -> None:
        """Tell each sink what comes."""
        self._batch_id = batch_id
        for expect in self._have("expect"):
            expect(query_id, batch_id, ranges)

    def last_batch(self, session: SparkSession) -> int | None:
        """The newest batch of the sink that has the least; if none lacks a batch, of the one that has the most."""
        found: list[int] = [one for ask in self._have("last_batch") if (one := ask(session)) is not None]
        if not found:
            return None
        lowest, highest = min(found), max(found)
        return lowest if lowest < self._batch_id - 1 or highest <= self._batch_id else highest

    def _drop_from(self, batch_id: int) -> None:
        for sink in self.sinks:
            if not getattr(sink, "commits_marks", False):  # whose rows go with their marks, as the store's
                sink.drop_from(batch_id)  # type: ignore[attr-defined]

    def _have(self, method: str) -> list[Any]:
        return [found for sink in self.sinks if (found := getattr(sink, method, None)) is not None]

    def _write(self, rows: DataFrame, calls: Sequence[Callable[[DataFrame], Any]]) -> None:
        # Kept while they are written: so all sinks get the same rows, and the source is read for one.
        own = None if is_persisted(rows) else rows.persist()
        try:
            if not self._in_threads:
                for call in calls:
                    call(rows)
                return
            with ThreadPoolExecutor(len(calls)) as threads:
                running = [threads.submit(in_thread(rows.sparkSession, partial(call, rows))) for call in calls]
            for one in running:
                one.result()
        finally:
            if own is not None:
                own.unpersist()


def all_of(*sinks: Sink, in_threads: bool = False) -> AllOf:
    """A handler for ReplayFilteredBatches that writes each batch into all of these sinks.

    They get it one after another, in this order; in_threads: all at once. Each is told its query, the batch's number
    and log ranges, and takes a batch back, as if it were the handler; `drop_from` is there if each sink has it. One of
    them may be a SqlTable, which is the store of the marks then. The rows are persisted meanwhile.
    Raises BadFilterSetting for what is no sink; what a sink raises, in threads after all of them ended.
    """
    return AllOf(sinks, in_threads=in_threads)


def _called(sink: Sink, batch_id: int, rows: DataFrame) -> None:
    sink(rows, batch_id)

"""A startpoint that resets marks: what is read again replaces what stands in the table, and the table is right.

    rows of batches before      ... 118 119 │ 120 121 122 ... 179       a startpoint sends the partition back to 120
    batch N, in a new epoch                 │ 120 ... 139               its rows replace those, in one step
    marks before batch N        as they were at 120: of each pair, what lay below the lowest row that stands from there

Marks that began empty would let through what is replayed above 120 of records below it: their rows stand already.
So the table tells what the filter had kept from 120 on, by (topic, partition, offset), and the log tells whose records
those are. A batch replaces only what its own log range covers. Rows that somebody removed by hand tell nothing: leave
them there.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit

from filtering.errors import shown_partition
from filtering.marks import HighwaterMarks
from spark_jobs.batch_marks import LogRange, MarksKey
from spark_jobs.columns import stream_metadata_columns
from spark_jobs.errors import CantReplace
from spark_jobs.filter_rule import FilterRule
from spark_jobs.mark_epochs import LowestHeld, begun_anew, lowered, moved
from spark_jobs.slice_scan import KEY, governed, keyed_frame
from spark_jobs.slices import Slice, epochs_of, merged_marks, ranges_of
from spark_jobs.spark_internals import to_arrow

_LOG = logging.getLogger(__name__)

Records = Callable[[SparkSession, LogRange], DataFrame]
"""The records of a log range once more, with the source's columns."""


class ReplaceableTable(Protocol):
    """A table whose rows tell where their records lie, and that exchanges some of them in one step."""

    commits_marks: bool
    """Whether rows become part of the table only with the marks of their batch, in one transaction."""

    def held_until(self, session: SparkSession, where: LogRange, batch_id: int) -> int:
        """The log offset behind the last row that other batches than this one have of the partition; 0 without any.

        Raises CantReplace if rows don't tell where they lie.
        """
        ...

    def held(self, session: SparkSession, where: LogRange, batch_id: int) -> DataFrame:
        """Of such rows in a log range, the column `offset`."""
        ...


class ReplacingHandler(Protocol):
    """The filter's handler where rows are replaced."""

    def replace(self, rows: DataFrame, batch_id: int, ranges: Sequence[LogRange]) -> None:
        """As the handler itself, and the rows of other batches in these log ranges go in the same step."""
        ...


class Replacing:
    """For ReplayFilteredBatches: rows of records that a startpoint gives again replace those in the table.

    table: a ReplaceableTable; any other is refused (CantReplace) once a startpoint gives records again. The filter's
    handler, which may be the table itself, is a ReplacingHandler. records: reads a log range once more.
    """

    def __init__(self, table: object, records: Records) -> None:
        self._table, self._records = table, records
        self._held_until: dict[tuple[str, int, int], int] = {}

    def of_batch(self, session: SparkSession, slices: list[Slice], rule: FilterRule, batch_id: int) -> "RereadBatch":
        """What it means for the batch of these slices. Raises CantReplace."""
        until: dict[tuple[str, int], int] = {}
        for one in ranges_of(s for s in slices if s.marks_epoch):
            if not hasattr(self._table, "held_until"):
                why = "this table exchanges whole batches only; a path of parquet or orc can, and a database"
                raise CantReplace(*one[:3], why)
            where = one.topic, one.partition, one.startpoint_epoch
            if where not in self._held_until:
                # Asked once: what comes behind it is new, however many batches that takes.
                self._held_until[where] = self._table.held_until(session, one, batch_id)
            until[where[:2]] = self._held_until[where]
        return RereadBatch(cast("ReplaceableTable", self._table), self._records, session, slices, rule, batch_id, until)


@dataclass(frozen=True, slots=True)
class RereadBatch:
    """A batch of which some partitions are read again; `until`: behind their last row in the table."""

    table: ReplaceableTable
    records: Records
    session: SparkSession
    slices: list[Slice]
    rule: FilterRule
    batch_id: int
    until: Mapping[tuple[str, int], int]

    def ranges(self) -> tuple[LogRange, ...]:
        """The batch's log ranges in which rows of other batches may stand."""
        found = (one._replace(end=min(one.end, self._until(one))) for one in ranges_of(self.slices))
        return tuple(one for one in found if one.start < one.end)

    def marks_before(self, before: Mapping[MarksKey, HighwaterMarks]) -> Mapping[MarksKey, HighwaterMarks]:
        """The marks before the batch, of partitions that begin anew as they were there; `before` itself if none does.

        Once the table has changed they can't be told from it. Raises CantReplace.
        """
        changed = before
        for topic in dict.fromkeys(topic for topic, _ in self.until):
            own = [s for s in self.slices if s.topic == topic]
            epochs = epochs_of(own)
            old = begun_anew(before, topic, epochs, merged_marks(s.marks for s in own))
            if old:
                starts = {one.partition: one for one in ranges_of(own)}
                new = {partition: self._as_of(starts[partition], marks) for partition, marks in old.items()}
                changed = moved(changed, topic, epochs, old, new)
        return changed

    def _as_of(self, one: LogRange, marks: HighwaterMarks) -> HighwaterMarks:
        """A partition's marks as they were before the range's first record."""
        if self.rule.window or marks.window:
            raise CantReplace(*one[:3], "with a window the marks don't tell what they were there")
        again = one._replace(end=max(one.start, self._until(one)))
        held = self.table.held(self.session, again, self.batch_id)
        keyed = keyed_frame(self.records(self.session, again), self.rule).where(governed(F.col(KEY), self.rule))
        kept = keyed.join(held, "offset", "left_semi").select(*stream_metadata_columns(KEY))
        lowest = to_arrow(kept.groupBy("pid", "source_partition").agg(F.min("source_offset").alias("lowest")))
        found = LowestHeld(*(np.asarray(column).astype(np.int64) for column in lowest.columns))
        if not len(found.pids) and self._drops_all(one, marks) and held.isEmpty():
            raise CantReplace(*one[:3], "none of them stands there, so nothing tells which the filter had kept")
        where = one.topic, shown_partition(one.partition), one.start, again.end
        _LOG.warning("%s-%s is read again from offset %d on: rows below offset %d are replaced", *where)
        return lowered(marks, found)

    def _drops_all(self, one: LogRange, marks: HighwaterMarks) -> bool:
        """Whether no record of the batch's part would pass these marks, and some could."""
        slices = (s for s in self.slices if (s.topic, s.partition) == (one.topic, one.partition))
        seen = merged_marks(s.marks for s in slices).to_columns()
        rows = marks.find(seen.pids, seen.partitions)
        return len(rows) > 0 and bool((rows >= 0).all() and (marks.to_columns().offsets[rows] >= seen.offsets).all())

    def _until(self, one: LogRange) -> int:
        return self.until.get((one.topic, one.partition), 0)

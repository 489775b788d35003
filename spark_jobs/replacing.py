"""A startpoint that resets marks: rows of records that are read again replace the old ones in the table.

    rows of batches before      ... 118 119 │ 120 121 122 ... 179       a startpoint sends the partition back to 120
    batch N, in a new epoch                 │ 120 ... 139               its rows replace those, in one step
    marks before batch N        as they were at 120: of each pair, below its lowest row in the table from 120 on

Empty marks would let replays pass that lie above 120 in the log, of records whose rows below 120 stay in the table.
So the marks are computed: the table has the (topic, partition, offset) of each row that the filter kept from 120 on,
and the log has the pairs of those records. A batch replaces only rows inside its own log range. Do not delete rows by
hand before: without them the old marks can't be computed.

Where the startpoint says replace_until, say 150, rows from there on stay as they are (RowsWanted.end):

    batch N + 1                             │     140 ... 149          replaces those
                                            │         150 ... 159      only raises the marks: read, and not written

So after 179, the last old row, the marks are what they were before, and records from there on are new. If a later
startpoint without a reset goes back from 140 to 130, the marks drop what is read again, so rows below 140 stay
(RowsWanted.start).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from typing import Any, NamedTuple

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit

from filtering.errors import shown_partition
from filtering.marks import HighwaterMarks
from filtering.stream_metadata import OFFSET_MAX
from spark_jobs.batch_marks import LogRange, MarksKey
from spark_jobs.columns import FilterRule, stream_metadata_columns
from spark_jobs.decide import PartitionRows, epochs_of, lowered, merged_marks, ranges_of, taken_back
from spark_jobs.errors import CantReplace
from spark_jobs.frame import KEY, keyed_frame
from spark_jobs.spark_internals import to_arrow

_LOG = logging.getLogger(__name__)

Records = Callable[[SparkSession, LogRange], DataFrame]
"""The records of a log range once more, with the source's columns."""


class RowsWanted(NamedTuple):
    """Which rows of the table are replaced by what is read after a startpoint: those of log offsets [start, end).

    stood_at: the partition's position before the startpoint.
    """

    start: int = 0
    end: int = OFFSET_MAX
    stood_at: int = OFFSET_MAX


AskRowsWanted = Callable[[Mapping[LogRange, int]], Mapping[LogRange, RowsWanted]]
"""A batch's log ranges, each with the number of the startpoint that reset its marks -> which rows are replaced."""


def within(where: LogRange) -> Column:
    """Whether a row's record lies in the log range."""
    offset = F.col("offset")
    here = (F.col("topic") == where.topic) & (F.col("partition").cast("int") == where.partition)
    return here & (offset >= where.start) & (offset < where.end)


def within_any(ranges: Sequence[LogRange]) -> Column:
    """Whether it lies in one of them."""
    return reduce(or_, map(within, ranges))


class Replacing:
    """For ReplayFilteredBatches: rows of records that a startpoint gives again replace those in the table.

    table: a BatchTable or a SqlTable, which exchange rows in one step; any other is refused (CantReplace) once a
    startpoint gives records again. The filter's handler, which may be the table itself, has a method
    `replace(rows, batch_id, ranges)`: as the handler itself, and the rows of other batches in these log ranges go in
    the same step. records: reads a log range once more. wanted: which rows are replaced; without it, all that are read
    again.
    """

    def __init__(self, table: Any, records: Records, wanted: AskRowsWanted | None = None) -> None:
        self._table, self._records, self._wanted = table, records, wanted
        self._known: dict[tuple[str, int, int], _StoredRows] = {}

    def of_batch(
        self, session: SparkSession, found: list[PartitionRows], rule: FilterRule, batch_id: int
    ) -> "RereadBatch":
        """The partitions that the batch of these rows reads again, and which rows it replaces. Raises CantReplace."""
        resets = {(one.topic, one.partition): one.marks_epoch for one in found if one.marks_epoch}
        ranges = {one: resets[one[:2]] for one in ranges_of(one for one in found if one.marks_epoch)}
        # Asked once for each startpoint, and kept for all its batches: rows that these write themselves are new.
        new = {one: reset for one, reset in ranges.items() if (*one[:2], one.startpoint_epoch) not in self._known}
        wanted = self._wanted(new) if new and self._wanted is not None else {}
        for one in new:
            if not hasattr(self._table, "held_until"):
                why = "this table exchanges whole batches only; a path of parquet or orc can, and a database"
                raise CantReplace(*one[:3], why)
            until = self._table.held_until(session, one, batch_id)
            self._known[*one[:2], one.startpoint_epoch] = _StoredRows(until, wanted.get(one, RowsWanted()))
        stored_rows = {one[:2]: self._known[*one[:2], one.startpoint_epoch] for one in ranges}
        return RereadBatch(self._table, self._records, session, found, rule, batch_id, stored_rows)


class _StoredRows(NamedTuple):
    """Which rows of a partition the table may have, of log offsets [0, until), and which of them are to be replaced."""

    until: int = 0
    wanted: RowsWanted = RowsWanted()


@dataclass(frozen=True, slots=True)
class RereadBatch:
    """A batch of which some partitions are read again, and which of their rows are in the table."""

    table: Any
    records: Records
    session: SparkSession
    found: list[PartitionRows]
    rule: FilterRule
    batch_id: int
    stored_rows: Mapping[tuple[str, int], _StoredRows]

    def ranges(self) -> tuple[LogRange, ...]:
        """The batch's log ranges in which rows of other batches are replaced."""
        return self._ranges(lambda rows: (rows.wanted.start, min(rows.until, rows.wanted.end)))

    def handler(self, handler: Any) -> Callable[[DataFrame, int], Any]:
        """A handler that replaces other batches' rows in those ranges and leaves out rows whose old ones stay."""
        ranges = self.ranges()
        replacing = partial(handler.replace, ranges=ranges) if ranges else handler
        stay = self._ranges(lambda rows: (rows.wanted.end, rows.until))
        return (lambda rows, batch_id: replacing(rows.where(~within_any(stay)), batch_id)) if stay else replacing

    def marks_before(self, before: Mapping[MarksKey, HighwaterMarks]) -> Mapping[MarksKey, HighwaterMarks]:
        """The marks before the batch; those of partitions that are read again as they were at that position.

        `before` itself if no partition is. Compute it before the table changes. Raises CantReplace.
        """
        changed = before
        for topic in dict.fromkeys(topic for topic, _ in self.stored_rows):
            own = [rows for rows in self.found if rows.topic == topic]
            starts = {one.partition: one for one in ranges_of(own)}
            seen = merged_marks(rows.marks for rows in own)
            changed = taken_back(changed, topic, epochs_of(own), seen, partial(self._as_of, starts))
        return changed

    def _as_of(self, ranges: Mapping[int, LogRange], partition: int, marks: HighwaterMarks) -> HighwaterMarks:
        """A partition's marks as they were before the first record of its range."""
        one = ranges[partition]
        if self.rule.window or marks.window:
            raise CantReplace(*one[:3], "with a window the earlier marks can't be computed")
        until, wanted = self._at(one.topic, one.partition)
        if wanted.stood_at < one.start < until:
            why = f"the job stood at {wanted.stood_at}, below it, where an earlier startpoint gives records again: its "
            raise CantReplace(*one[:3], why + "marks say nothing of that place; go back to there, or further")
        again = one._replace(end=max(one.start, until))
        held = self.table.held(self.session, again, self.batch_id)
        keyed = keyed_frame(self.records(self.session, again), self.rule)
        pairs = keyed.join(held, "offset", "left_semi").select(*stream_metadata_columns(KEY))
        kept = pairs.where(f"pid is not null and {self.rule.pid_condition}")
        lowest = to_arrow(kept.groupBy("pid", "source_partition").agg(F.min("source_offset").alias("lowest")))
        found = HighwaterMarks.from_columns(*(column.to_numpy() for column in lowest.columns))
        if not len(found) and self._drops_all(one, marks) and held.isEmpty():
            raise CantReplace(
                *one[:3], "no row of them is in the table, so which records the filter had kept is not known"
            )
        where = one.topic, shown_partition(one.partition), one.start, min(until, wanted.end)
        _LOG.warning("%s-%s is read again from offset %d on: rows below offset %d are replaced", *where)
        return lowered(marks, found)

    def _drops_all(self, one: LogRange, marks: HighwaterMarks) -> bool:
        """Whether no record of the batch's part would pass these marks, and some could."""
        own = (rows.marks for rows in self.found if (rows.topic, rows.partition) == one[:2])
        seen = merged_marks(own).to_columns()
        rows = marks.find(seen.pids, seen.partitions)
        return len(rows) > 0 and bool((rows >= 0).all() and (marks.to_columns().offsets[rows] >= seen.offsets).all())

    def _ranges(self, of: Callable[[_StoredRows], tuple[int, int]]) -> tuple[LogRange, ...]:
        """Of the batch's log ranges the parts inside the offsets [start, end) that `of` gives."""
        found = []
        for one in ranges_of(self.found):
            start, end = of(self._at(one.topic, one.partition))
            found.append(one._replace(start=max(one.start, start), end=min(one.end, end)))
        return tuple(one for one in found if one.start < one.end)

    def _at(self, topic: str, partition: int) -> _StoredRows:
        return self.stored_rows.get((topic, partition), _StoredRows())

"""Whether a micro batch gave a handler the rows that the first pass found: asked of the count that Spark keeps itself.

foreachBatch's frame is the output of a plan that stands in the running query, and Spark counts each operator's rows
for its own display. Asking costs some milliseconds and nothing a row. These names are Spark's inner ones: where they
are others, or the plan ends in an operator whose rows are not those handed out, nobody knows, which is an answer too.

A handler that was handed fewer rows took only a part of them, or the source has changed since the first pass: a file
is gone that Spark may pass over, a topic has let go of records. A look at what is there now tells one from the other.
"""

import logging
from collections.abc import Iterable
from typing import Any, Final

from pyspark.sql import DataFrame

from spark_jobs.frame_errors import FrameChanged
from spark_jobs.micro_batch import OUTPUT_ROWS, running_query
from spark_jobs.slices import Slice
from spark_jobs.spark_internals import asked

_LOG = logging.getLogger(__name__)
_AS_MANY_ROWS: Final = frozenset(
    {
        "WholeStageCodegenExec",
        "InputAdapter",
        "ProjectExec",
        "ArrowEvalPythonExec",
        "BatchEvalPythonExec",
        "EventTimeWatermarkExec",
    }
)
"""Operators that hand out as many rows as they take, without a count of their own."""


class RowsRead:
    """The rows that were read of a foreachBatch frame so far, by whatever was done with it."""

    def __init__(self, df: DataFrame) -> None:
        self._metric: Any = None
        # What lies in memory or on disk is not read of its plan again.
        if not (df.storageLevel.useMemory or df.storageLevel.useDisk):
            self._metric = asked(lambda: _counter(df))

    def count(self) -> int | None:
        """All rows that the batch's plan has handed out, each time it was read; None where nobody knows."""
        return None if self._metric is None else asked(lambda: int(self._metric.value()))

    def fewer_than(self, rows: int, *, since: int | None) -> bool:
        """Whether it is known that fewer rows were read since the count was `since`."""
        now = self.count()
        if now is None or since is None or now - since >= rows:
            return False
        _LOG.info("%d rows of a batch of %d were read", now - since, rows)
        return True


def _counter(df: DataFrame) -> Any:
    query = running_query(df.sparkSession)
    if query is None:
        return None
    node = query.lastExecution().executedPlan()
    while not node.metrics().contains(OUTPUT_ROWS):
        if node.getClass().getSimpleName() not in _AS_MANY_ROWS:
            return None
        node = node.children().head()
    return node.metrics().apply(OUTPUT_ROWS)


def check_unchanged(first: Iterable[Slice], again: Iterable[Slice]) -> None:
    """Two first passes over one frame must have found the same rows. Raises FrameChanged."""
    expected, found = _by_partition(first), _by_partition(again)
    for where in sorted(expected.keys() | found.keys()):
        one, other = expected.get(where), found.get(where)
        if one != other:
            start, end, *_ = one or other or (0, 0)
            raise FrameChanged(where[1], start, end, one[2] if one else 0, other[2] if other else 0)


def _by_partition(slices: Iterable[Slice]) -> dict[tuple[str, int], tuple[int, int, int, int]]:
    """(topic, partition) → first log offset, the one behind the last, rows, rows without metadata."""
    found: dict[tuple[str, int], tuple[int, int, int, int]] = {}
    for s in slices:
        start, end, rows, unkeyed = found.get((s.topic, s.partition), (s.start, s.end, 0, 0))
        found[s.topic, s.partition] = min(start, s.start), max(end, s.end), rows + s.rows, unkeyed + s.unkeyed
    return found

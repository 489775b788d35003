"""What the running query tells about a micro batch: its plan, read with fewer columns, and how many rows were read.

foreachBatch hands over an RDD of whole rows: whatever a job asks of it, every column is read and every row put
together. The plan that this RDD was made of is part of the running query, whose inner names Spark does not promise. So
the plan is used only where all of it is known here: files, filters and projections, no state, nothing random, and the
same RDD that was handed over. Otherwise the frame stays as it is.

Spark counts each operator's rows for its own display. Reading that count takes some milliseconds and nothing a row.
"""

import logging
from collections.abc import Callable
from typing import Any, Final

from pyspark.sql import DataFrame

from spark_jobs.spark_internals import asked, class_name, query_id_of

_RELATION: Final = "LogicalRelation"
_COLUMNAR: Final = frozenset({"ParquetFileFormat", "OrcFileFormat"})
_LENIENT: Final = "ignoreCorruptFiles"
_FORGETFUL: Final = "ignoreMissingFiles"
_STATELESS: Final = frozenset({"Project", "Filter"})
OUTPUT_ROWS: Final = "numOutputRows"
"""Spark's count of the rows that an operator has handed out."""


def column_pruned(df: DataFrame) -> DataFrame:
    """The rows of a foreachBatch frame as a frame that reads only the columns used; `df` itself where that isn't sure.

    Both give the same rows, but maybe in other Spark partitions. Reading the answer does not count as input in the
    query's progress.
    """
    return asked(lambda: _replanned(df)) or df


def input_counter(df: DataFrame, pruned: DataFrame) -> Callable[[int], Any] | None:
    """Call it with a foreachBatch frame's rows where it was `pruned` that was read: its query's progress counts them.

    None where `pruned`, what `column_pruned` made of it, does not serve for the frame itself: where it may have fewer
    rows when it is read again, as files may be missing, or the frame has not all rows of its files.
    """
    return asked(lambda: _leaf_counter(df) if _gives_all(pruned) and _looks_like(pruned, df) else None)


def running_query(session: Any) -> Any:
    """Spark's own object of the query in whose foreachBatch we are; None elsewhere."""
    query_id = query_id_of(session)
    if query_id is None:
        return None
    jvm = session.sparkContext._jvm  # noqa: SLF001 - the door to Spark's own objects
    running = session._jsparkSession.sharedState().activeStreamingQueries()  # noqa: SLF001
    return running.get(jvm.java.util.UUID.fromString(query_id))


def _replanned(df: DataFrame) -> DataFrame | None:
    session: Any = df.sparkSession
    if df.storageLevel.useMemory or df.storageLevel.useDisk:
        return None
    query = running_query(session)
    if query is None or session.conf.get(f"spark.sql.files.{_LENIENT}") != "false":
        return None
    handed, execution = df._jdf.queryExecution().analyzed(), query.lastExecution()  # noqa: SLF001
    if class_name(handed) != "LogicalRDD" or not handed.rdd().equals(execution.toRdd()):
        return None
    jvm = session.sparkContext._jvm  # noqa: SLF001 - the door to Spark's own objects
    plan = execution.optimizedPlan()
    batch = _no_stream(plan, jvm) if plan.deterministic() else None
    if batch is None:
        return None
    frame = jvm.org.apache.spark.sql.classic.Dataset.ofRows(session._jsparkSession, batch)  # noqa: SLF001
    return DataFrame(frame, session)


def _gives_all(pruned: DataFrame) -> bool:
    if pruned.sparkSession.conf.get(f"spark.sql.files.{_FORGETFUL}") != "false":
        return False
    plan: Any = pruned._jdf.queryExecution().analyzed()  # noqa: SLF001 - the door to Spark's own objects
    while class_name(plan) != _RELATION:
        if class_name(plan) != "Project":
            return False
        plan = plan.child()
    return _FORGETFUL.lower() not in plan.relation().options().mkString(",").lower()


def _looks_like(one: DataFrame, other: DataFrame) -> bool:
    return bool(one._jdf.schema().equals(other._jdf.schema()))  # noqa: SLF001 - one call, not a schema in text


def _leaf_counter(df: DataFrame) -> Callable[[int], Any] | None:
    leaves = running_query(df.sparkSession).lastExecution().executedPlan().collectLeaves()
    if leaves.size() != 1:
        return None
    metric: Any = leaves.head().metrics().apply(OUTPUT_ROWS)
    return lambda rows: asked(lambda: metric.add(rows))


def _no_stream(plan: Any, jvm: Any) -> Any:
    """This plan over its files as a batch reads them; None for any other plan."""
    if class_name(plan) == _RELATION:
        if not _reads_by_column(plan.relation()):
            return None
        return plan.copy(plan.relation(), plan.output(), plan.catalogTable(), False, plan.stream())
    if class_name(plan) not in _STATELESS:
        return None
    child = _no_stream(plan.child(), jvm)
    nothing = getattr(getattr(jvm.scala.collection.immutable, "Nil$"), "MODULE$")
    return None if child is None else plan.withNewChildren(nothing.prepended(child))


def _reads_by_column(relation: Any) -> bool:
    return (
        class_name(relation) == "HadoopFsRelation"
        and class_name(relation.fileFormat()) in _COLUMNAR
        and _LENIENT.lower() not in relation.options().mkString(",").lower()
    )


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

"""A micro batch read with the columns that are asked for, not with all of them.

foreachBatch hands over an RDD of whole rows: whatever a job asks of it, every column is read and every row put
together. The plan that this RDD was made of stands in the running query, whose inner names Spark does not promise. So
it is used only where it is what is known here: files, filters and projections, nothing that remembers or draws lots,
and the very RDD that was handed over. Anything else, and any name that changed, leaves the frame as it is.
"""

import logging
from typing import Any, Final

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

_LOG = logging.getLogger(__name__)
_RELATION: Final = "LogicalRelation"
_COLUMNAR: Final = frozenset({"ParquetFileFormat", "OrcFileFormat"})
_LENIENT: Final = "ignoreCorruptFiles"
_STATELESS: Final = frozenset({"Project", "Filter"})


def column_pruned(df: DataFrame) -> DataFrame:
    """The rows of a foreachBatch frame as a frame that reads only the columns used; `df` itself where that isn't sure.

    Both give the same rows, but maybe in other Spark partitions. Reading the answer does not count as input in the
    query's progress.
    """
    try:
        return _replanned(df) or df
    except (Py4JError, PySparkException, AttributeError, TypeError) as error:
        _LOG.debug("this Spark names its plans otherwise: %s", error)
        return df


def running_query(session: Any) -> Any:
    """Spark's own object of the query in whose foreachBatch we are; None elsewhere."""
    query_id = session.sparkContext.getLocalProperty("sql.streaming.queryId")
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
    if _name(handed) != "LogicalRDD" or not handed.rdd().equals(execution.toRdd()):
        return None
    jvm = session.sparkContext._jvm  # noqa: SLF001 - the door to Spark's own objects
    plan = execution.optimizedPlan()
    batch = _no_stream(plan, jvm) if plan.deterministic() else None
    if batch is None:
        return None
    frame = jvm.org.apache.spark.sql.classic.Dataset.ofRows(session._jsparkSession, batch)  # noqa: SLF001
    return DataFrame(frame, session)


def _no_stream(plan: Any, jvm: Any) -> Any:
    """This plan over its files as a batch reads them; None for any other plan."""
    if _name(plan) == _RELATION:
        if not _reads_by_column(plan.relation()):
            return None
        return plan.copy(plan.relation(), plan.output(), plan.catalogTable(), False, plan.stream())
    if _name(plan) not in _STATELESS:
        return None
    child = _no_stream(plan.child(), jvm)
    nothing = getattr(getattr(jvm.scala.collection.immutable, "Nil$"), "MODULE$")
    return None if child is None else plan.withNewChildren(nothing.prepended(child))


def _reads_by_column(relation: Any) -> bool:
    return (
        _name(relation) == "HadoopFsRelation"
        and _name(relation.fileFormat()) in _COLUMNAR
        and _LENIENT.lower() not in relation.options().mkString(",").lower()
    )


def _name(node: Any) -> str:
    return str(node.getClass().getSimpleName())

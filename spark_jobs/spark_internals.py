"""What depends on the release of Spark: its inner objects, what old releases lack, settings that are changed.

Spark does not promise the names of its inner objects. Where they differ, `asked` gives None, and the caller goes on by
public means, which cost more and give the same rows.

    3.5   no DataFrame.toArrow, no arrow_udf, no transformWithState, no data sources in Python
    4.0   no arrow_udf, no limits for streams of a Python data source (so 4.1)
    4.2   all

Over Spark Connect there are no inner objects at all: the session speaks to a server.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import pandas as pd
import pyarrow as pa
import pyspark
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit
from pyspark.sql.pandas import types

from spark_jobs.errors import SparkJobError

_LOG = logging.getLogger(__name__)

_CONNECT: Final = "pyspark.sql.connect"
_LISTS: Final = frozenset({"LocalRelation", "OneRowRelation"})

_Answer = TypeVar("_Answer")


def asked(question: Callable[[], _Answer]) -> _Answer | None:
    """What Spark's inner objects answer; None where they have other names."""
    try:
        return question()
    except (Py4JError, PySparkException, AttributeError, ImportError, TypeError) as error:
        _LOG.debug("this Spark names its plans otherwise: %s", error)
        return None


def class_name(node: Any) -> str:
    """The class of one of Spark's objects, without its package."""
    return str(node.getClass().getSimpleName())


def is_local(df: DataFrame) -> bool | None:
    """Whether all rows come from lists inside the plan (values, a small Arrow table); None where nobody knows.

    What is projected from such a list the optimizer may compute itself, partition ids too: without tasks, as if there
    were one.
    """

    def look() -> bool:
        frame: Any = df._jdf  # noqa: SLF001 - there is no public question
        leaves = frame.queryExecution().optimizedPlan().collectLeaves()
        return all(class_name(leaves.apply(n)) in _LISTS for n in range(leaves.size()))

    return asked(look)


def is_observed(observation: Observation) -> bool:
    """Whether an action has filled it: `observation.get` waits for one that may never come."""
    inner: Any = observation
    if type(observation).__module__.startswith(_CONNECT):
        return bool(observation.get)  # where it waits for nothing

    def look() -> bool:
        future = inner._jo.future()  # noqa: SLF001 - there is no public question
        if release() < (4, 0):  # where it is told by a queue of events, some time after the action
            context: Any = SparkContext._active_spark_context  # noqa: SLF001
            scala = context._jvm.scala.concurrent  # noqa: SLF001
            scala.Await.ready(future, scala.duration.Duration.apply("2s"))
        return bool(future.isCompleted())

    return asked(look) or False


class NotOverConnect(SparkJobError):
    """Spark Connect can't do it: use a classic session, or what the message names."""

    def __init__(self, what: str, instead: str) -> None:
        super().__init__(f"{what}: not over Spark Connect; {instead}")
        self.what, self.instead = what, instead


def over_connect(spark: SparkSession) -> bool:
    """Whether this session speaks to a server, and has no JVM."""
    return type(spark).__module__.startswith(_CONNECT)


def query_id_of(spark: SparkSession) -> str | None:
    """The id of the query in whose foreachBatch we are, None elsewhere; it lives as long as its checkpoint.

    Over Spark Connect the handler is told no more than its session: the only query that runs there.
    Raises NotOverConnect for several.
    """
    if not over_connect(spark):
        return spark.sparkContext.getLocalProperty("sql.streaming.queryId")
    running = [str(query.id) for query in spark.streams.active]
    if len(running) > 1:
        raise NotOverConnect("several queries in one session", "nobody tells whose batch it is: one session for each")
    return running[0] if running else None


STREAMS_SINCE: Final = (4, 2)
"""Data sources in Python know the start of a stream's batch, and its limits, from this release on."""


class SparkTooOld(SparkJobError):
    """This release of Spark lacks what something needs: use a newer one."""

    def __init__(self, what: str, needed: str) -> None:
        super().__init__(f"{what} needs Spark {needed} or newer: this is {pyspark.__version__}")
        self.what, self.needed = what, needed


def release() -> tuple[int, int]:
    """Of the pyspark that is installed: (3, 5), (4, 0), ..."""
    major, minor, *_ = pyspark.__version__.split(".")
    return int(major), int(minor)


def to_arrow(df: DataFrame) -> Any:
    """The frame's rows as an Arrow table on the driver."""
    if has_to_arrow(df):
        return df.toArrow()
    return pa.Table.from_pylist([row.asDict() for row in df.collect()], arrow_schema(df.schema))


def has_to_arrow(df: DataFrame) -> bool:
    """Whether this release hands rows over as Arrow by itself."""
    return hasattr(df, "toArrow")


def arrow_schema(schema: Any) -> Any:
    """The Arrow types by which Spark's workers hand over these columns; instants in UTC."""
    if release() >= (4, 2):
        return types.to_arrow_schema(schema, timezone="UTC")
    return types.to_arrow_schema(schema)


def decisions_by(decide: Callable[[Any], Any]) -> Any:
    """A UDF over columns by an iterator of tuples of Arrow arrays, which yields arrays of int64.

    Nondeterministic for Spark, so that it runs once a row, over all rows, with nothing pushed below it.
    """
    if hasattr(F, "arrow_udf"):
        return F.arrow_udf(decide, "bigint").asNondeterministic()

    def by_pandas(batches: Iterator[tuple[pd.Series, ...]]) -> Iterator[pd.Series]:
        arrays = (tuple(pa.Array.from_pandas(column) for column in columns) for columns in batches)
        return (decided.to_pandas() for decided in decide(arrays))

    return F.pandas_udf(by_pandas, "bigint").asNondeterministic()  # type: ignore[attr-defined] # at run time only


@contextmanager
def setting(spark: SparkSession, name: str, value: str | int) -> Iterator[None]:
    """Set `name` in this session, and what it was before at the end. What is planned inside sees it."""
    before = spark.conf.get(name, None)
    spark.conf.set(name, value)
    try:
        yield
    finally:
        if before is None:
            spark.conf.unset(name)
        else:
            spark.conf.set(name, before)


def use_driver_python(spark: SparkSession) -> None:
    """Let the workers of a local master run the driver's own interpreter, unless another one is configured.

    Spark starts the `python3` of PATH. Where the virtual environment is not activated, that one lacks this package, and
    the first batch ends in a long Java trace. A cluster keeps its own settings, and so does a Spark Connect server: the
    driver's path means nothing there.
    """
    if over_connect(spark):
        return
    configured = "PYSPARK_PYTHON" in os.environ or any(
        spark.conf.get(name, None) for name in ("spark.pyspark.python", "spark.pyspark.driver.python")
    )
    context = spark.sparkContext
    if not configured and (context.master or "").startswith("local"):
        context.pythonExec = sys.executable

"""What depends on the release of Spark: its inner objects, what old releases lack, settings that are changed.

Spark does not promise the names of its inner objects. Where they differ, `asked` gives None, and the caller goes on by
public means, which cost more and give the same rows.

    3.5   no DataFrame.toArrow, no arrow_udf, no transformWithState, no data sources in Python
    4.0   no arrow_udf, no limits for streams of a Python data source (so 4.1)
    4.2   all
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
    frame: Any = df._jdf  # noqa: SLF001 - there is no public question

    def look() -> bool:
        leaves = frame.queryExecution().optimizedPlan().collectLeaves()
        return all(class_name(leaves.apply(n)) in _LISTS for n in range(leaves.size()))

    return asked(look)


def is_observed(observation: Observation) -> bool:
    """Whether an action has filled it: `observation.get` waits for one that may never come."""
    inner: Any = observation

    def look() -> bool:
        future = inner._jo.future()  # noqa: SLF001 - there is no public question
        if release() < (4, 0):  # where it is told by a queue of events, some time after the action
            context: Any = SparkContext._active_spark_context  # noqa: SLF001
            scala = context._jvm.scala.concurrent  # noqa: SLF001
            scala.Await.ready(future, scala.duration.Duration.apply("2s"))
        return bool(future.isCompleted())

    return asked(look) or False


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
    the first batch ends in a long Java trace. A cluster keeps its own settings: the driver's path means nothing there.
    """
    configured = "PYSPARK_PYTHON" in os.environ or any(
        spark.conf.get(name, None) for name in ("spark.pyspark.python", "spark.pyspark.driver.python")
    )
    context = spark.sparkContext
    if not configured and (context.master or "").startswith("local"):
        context.pythonExec = sys.executable
